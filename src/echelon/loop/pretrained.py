"""Give a trained model back to the library that it comes from: whole weights, written by the model's own `save_pretrained`.

Under every strategy. The weights are gathered one by one into files beside the target, which rank 0 maps into memory: no rank
holds more than its own parts and one whole tensor.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.checkpoint import commit
from echelon.checkpoint.location import explain
from echelon.contracts.arguments import flags
from echelon.contracts.errors import CheckpointWriteError, UsageError, require
from echelon.loop.checkpointing.converted import authors_classes
from echelon.loop.unit import Unit
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import is_split, whole
from echelon.world import agree
from echelon.world.init import World

__all__ = ["save_pretrained"]


def save_pretrained(model: Unit | nn.Module, folder: str | os.PathLike[str], *, merged: bool = False, **options: Any) -> Path:
    """Write a model for `from_pretrained`, or an adapter for PEFT, whatever the strategy. Collective: every rank calls it.

    Rank 0 alone writes, by the model's own `save_pretrained`. Into a folder that is not there yet the files come whole or not at
    all; in one that is there they are replaced one by one. It needs as much room on the folder's disk once more, for a while.

    Args:
        model: an AutoUnit, a unit with one module, or a module, also as a strategy or the user wrapped it.
        folder: on rank 0's machine.
        merged: of a model with PEFT's adapters, write a whole model that has them in its weights, as `merge_and_unload` makes it.
        options: more of what the model's `save_pretrained` takes, such as `max_shard_size="2GB"`.
    Returns:
        the folder.
    Raises:
        UsageError: the module has no `save_pretrained`; `echelon ckpt export` writes safetensors of any module.
        CheckpointWriteError: on every rank, if rank 0 could not write.
    """
    wrapped = _module(model)
    prepared = Prepared.of(wrapped, World.current(torch.device("cpu")))
    module = prepared.unwrapped
    own = _check(module, merged, options)
    target = Path(folder).absolute()
    values: dict[str, Any] = {n: v for n, v in prepared.state().state_dict().items() if isinstance(v, torch.Tensor)}
    _refuse_stages(values)
    scratch = target.with_name(f".gathered-{target.name}")

    def begin() -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    commit.on_rank0(begin, scratch)
    try:
        whole = _gathered(values, set(values) if merged else _needed(module, values), scratch)

        def write() -> None:
            staged = scratch / "files"
            place = target if target.exists() else staged
            if merged:
                _merged(module, whole).save_pretrained(place, **options)
            else:
                with authors_classes(module):
                    own(module, place, state_dict=whole, **options)
            if staged.exists():
                os.replace(staged, target)

        commit.on_rank0(write, target)
    finally:
        if agree.is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _check(module: nn.Module, merged: bool, options: Mapping[str, Any]) -> Any:
    """Its own function that saves it."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        raise UsageError(
            f"{type(module).__name__} has no save_pretrained. `echelon ckpt export CHECKPOINT FOLDER` writes the weights of any "
            "module as safetensors."
        )
    if "state_dict" in options:
        raise UsageError("save_pretrained gathers the state_dict itself. Leave it out.")
    flags(merged=merged)
    if merged and not callable(getattr(module, "merge_and_unload", None)):
        raise UsageError(f"merged must be False for a {type(module).__name__}: PEFT put no adapters around it.")
    return own


def _refuse_stages(values: Mapping[str, Any]) -> None:
    """Collective."""
    names = agree.gather(sorted(values))
    if any(each != names[0] for each in names):
        raise UsageError(
            "save_pretrained: ranks hold other weights, as stages of a pipeline do, and rank 0 would write its own alone. Save a "
            "checkpoint; restored under fsdp, say, the model can be written."
        )


def _module(model: Unit | nn.Module) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    require(isinstance(model, Unit), "model", "a unit or a torch.nn.Module", model)
    modules = model.tracked_modules()
    if len(modules) != 1:
        raise UsageError(f"the unit has {len(modules)} modules: {', '.join(modules)}. Pass the one to be written.")
    return next(iter(modules.values()))


def _needed(module: nn.Module, values: Mapping[str, Any]) -> set[str]:
    """Names that the module's `save_pretrained` will write: of an adapter of PEFT's not those of the base, which is large."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return set(values)
    stand_ins = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in values.items()}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    chosen: set[str] = set()
    for adapter in module.peft_config:
        for value in peft.get_peft_model_state_dict(module, state_dict=dict(stand_ins), adapter_name=adapter).values():
            if id(value) not in names:
                return set(values)  # it computes with them
            chosen.add(names[id(value)])
    return chosen


@torch.no_grad()
def _merged(module: Any, whole: Mapping[str, torch.Tensor]) -> Any:
    """PEFT's own merge, on a plain copy of the model whose weights are the mapped files."""
    with authors_classes(module):
        base = module.get_base_model()
        kind, outer = type(base), type(module)
    configs = copy.deepcopy(module.peft_config)
    for config in configs.values():
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # the values are there
    with torch.device("meta"):
        plain = kind(copy.deepcopy(base.config))
        (first, config), *others = configs.items()
        made = outer(plain, config, adapter_name=first)
        for name, config in others:
            made.add_adapter(name, config)
    given = made.load_state_dict(
        {name: tensor.requires_grad_(False) for name, tensor in whole.items()}, strict=False, assign=True
    )
    if given.missing_keys or given.unexpected_keys:
        raise UsageError(
            f"a plain {kind.__name__} with these adapters has other weights than the trained one: "
            f"{', '.join([*given.missing_keys, *given.unexpected_keys][:3])}. Write the adapter (merged=False); PEFT merges it."
        )
    if hasattr(plain, "tie_weights"):
        plain.tie_weights()
    if getattr(base, "generation_config", None) is not None:
        plain.generation_config = base.generation_config
    made.set_adapter(module.active_adapters if len(configs) > 1 else first)
    return made.merge_and_unload()


def _gathered(values: Mapping[str, Any], needed: Iterable[str], folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors by name, on rank 0, mapped from files in the folder; elsewhere nothing. Collective."""
    wanted, found = set(needed), dict[str, torch.Tensor]()
    same: dict[int, torch.Tensor] = {}  # of a tied one, under all its names
    problem: str | None = None
    for number, (name, value) in enumerate(values.items()):
        if name not in wanted:
            continue
        if id(value) not in same:
            whole = _whole(value)
            same[id(value)] = torch.empty(0)
            if agree.is_rank0() and problem is None:
                try:
                    same[id(value)] = _mapped(whole.detach().cpu().contiguous(), folder / f"{number}")
                except OSError as error:  # the others are in the middle of gathering
                    problem = f"rank 0: {explain(error, folder)}"
            del whole
        found[name] = same[id(value)]
    problem = agree.first_told(problem)
    if problem is not None:
        raise CheckpointWriteError(problem)
    return found if agree.is_rank0() else {}


def _whole(value: Any) -> torch.Tensor:
    if not is_split(value):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise UsageError(f"a weight of type {type(value).__name__} cannot be gathered; use fully_shard's strategies, or ddp.")
        return value  # type: ignore[no-any-return]
    return whole(value)


def _mapped(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """The tensor, written to a file and mapped from there."""
    if not tensor.numel():
        return tensor
    with file.open("wb") as stream:
        tensor.view(-1).view(torch.uint8).numpy().tofile(stream)
    # What is changed in it goes to the file, too, and not into this process's memory.
    mapped = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    with contextlib.suppress(OSError):
        file.unlink()  # the mapping keeps it
    return mapped.view(tensor.shape)
