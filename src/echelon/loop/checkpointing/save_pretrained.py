"""Write a trained model for the library that it comes from: whole weights, by the model's own `save_pretrained`.

Works under every layout. The weights are gathered one by one into files beside the target, which rank 0 maps into memory: no rank
holds more than its own parts and one whole tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.checkpoint import commit
from echelon.checkpoint.location import explain
from echelon.checkpoint.plain import dtype_of
from echelon.common.arguments import flags
from echelon.common.errors import CheckpointOptionError, CheckpointWriteError, require
from echelon.hf.plain_model import can_be_built, of_adapters, plain_model
from echelon.loop.unit import Unit
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import authors_classes, is_split, whole
from echelon.parallel.state.state import ModuleState
from echelon.world import agree
from echelon.world.init import World
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["save_pretrained", "save_whole"]

logger = logging.getLogger(__name__)


def save_pretrained(model: Unit | nn.Module, folder: str | os.PathLike[str], *, merged: bool = False, **options: Any) -> Path:
    """Write a model for `from_pretrained`, or an adapter for PEFT, under any layout. Collective: every rank calls it.

    Only rank 0 writes, by the model's own `save_pretrained`. A new folder appears with all its files or not at all; in an
    existing folder the files are replaced one by one. For a while it needs twice the room on the folder's disk.

    Args:
        model: an AutoUnit, a unit with one module, or a module, wrapped by a layout or by the user or not.
        folder: a folder on rank 0's machine.
        merged: write a model with PEFT's adapters as a whole model with the adapters merged into its weights, as
            `merge_and_unload` does.
        options: further arguments of the model's `save_pretrained`, such as `max_shard_size="2GB"`.
    Returns:
        the folder.
    Raises:
        UsageError: the module has no `save_pretrained`; `echelon ckpt export` writes safetensors of any module.
        CheckpointWriteError: on every rank, if rank 0 could not write.
    """
    prepared = _prepared(model)
    own = _check(prepared.unwrapped, merged, options)
    return _written(prepared, folder, own, merged, options)


def save_whole(model: Unit | nn.Module, folder: str | os.PathLike[str], write: Callable[..., Any]) -> Path:
    """As `save_pretrained`, by a function for a module without one: `write(module, folder, state_dict=...)`, on rank 0 alone.

    Args:
        write: makes the folder if it is not there.
    """
    return _written(_prepared(model), folder, write, False, {})


def _prepared(model: Unit | nn.Module) -> Prepared[Any]:
    return Prepared.of(_module(model), World.current(torch.device("cpu")))


def _written(
    prepared: Prepared[Any],
    folder: str | os.PathLike[str],
    own: Callable[..., Any],
    merged: bool,
    options: Mapping[str, Any],
) -> Path:
    module = prepared.unwrapped
    target = Path(folder).absolute()
    weights = _Weights(prepared.state())
    scratch = target.with_name(f".gathered-{target.name}")

    def begin() -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    commit.on_rank0(begin, scratch)
    try:
        names = set(weights.entries) if merged else _needed(module, weights)
        whole = weights.gather(names, scratch)

        staged = target if target.exists() else scratch / "files"

        def write() -> None:
            _write(module, own, weights, whole, staged, merged, options)
            if staged != target:
                os.replace(staged, target)

        commit.on_rank0(write, target)
    finally:
        if agree.is_rank0():
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(
    module: Any,
    own: Callable[..., Any],
    weights: _Weights,
    whole: Mapping[str, torch.Tensor],
    folder: Path,
    merged: bool,
    options: Mapping[str, Any],
) -> None:
    if merged:
        _plain(module, weights, whole).merge_and_unload().save_pretrained(folder, **options)
    elif weights.is_cut and can_be_built(module):  # the save_pretrained of this stage counts and names its own layers only
        _plain(module, weights, whole).save_pretrained(folder, state_dict=whole, **options)
    else:
        with authors_classes(module):
            own(module, folder, state_dict=whole, **options)


def _check(module: nn.Module, merged: bool, options: Mapping[str, Any]) -> Any:
    """The module's own `save_pretrained`; refuse modules without one, and wrong options."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        raise CheckpointOptionError(
            f"{type(module).__name__} has no save_pretrained. `echelon ckpt export CHECKPOINT FOLDER` writes the weights of any "
            "module as safetensors."
        )
    if "state_dict" in options:
        raise CheckpointOptionError("state_dict must not be given: save_pretrained gathers it. Leave it out.")
    flags(merged=merged, kind=CheckpointOptionError)
    if merged and not callable(getattr(module, "merge_and_unload", None)):
        raise CheckpointOptionError(f"merged must be False for a {type(module).__name__}, which has no adapters of PEFT.")
    return own


def _module(model: Unit | nn.Module) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    require(isinstance(model, Unit), "model", "a unit or a torch.nn.Module", model, kind=CheckpointOptionError)
    modules = model.tracked_modules()
    if len(modules) != 1:
        raise CheckpointOptionError(f"the unit has {len(modules)} modules: {', '.join(modules)}. Pass the one to write.")
    return next(iter(modules.values()))


def _needed(module: nn.Module, weights: _Weights) -> set[str]:
    """Names that the module's `save_pretrained` will write; for a PEFT adapter, without those of the base model. Collective."""
    if (own := of_adapters(module, _stand_ins(weights))) is None:
        if "state_dict" in vars(module) and agree.is_rank0():
            kind = type(module).__name__
            logger.warning("save_pretrained writes all weights of the %s, and ignores the state_dict that was set on it", kind)
        return set(weights.entries)
    # A pipeline stage knows only which of its own layers PEFT would write.
    return {name for each in agree.kinds(sorted(own)) for name in each}


def _plain(module: nn.Module, weights: _Weights, whole: Mapping[str, torch.Tensor]) -> Any:
    with authors_classes(module):
        return plain_model(module, {**_stand_ins(weights), **whole}, is_cut=weights.is_cut)


def _stand_ins(weights: _Weights) -> dict[str, torch.Tensor]:
    return {name: entry.stand_in() for name, entry in weights.entries.items()}


# --- all weights, whole, on rank 0
#
# The ranks first exchange which tensors they hold. Then each tensor is gathered only by the ranks that hold parts of it, and the
# first of these sends it to rank 0. Pipeline stages take turns, so that a stage waits for rank 0 only while it writes a few
# tensors.


@dataclass(frozen=True)
class _Entry:
    """A tensor under one of its names.

    Args:
        stage: index of the first distinct listing of tensors that has it; the ranks of a pipeline stage have the same listing.
        same: the tensor's first name in that listing; a tied tensor has several names.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    stage: int
    same: str

    def stand_in(self) -> torch.Tensor:
        """An empty tensor of the same shape and dtype, on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _Weights:
    """All tensors of a module, over all ranks.

    Attributes:
        entries: tensors by name; a tensor that several stages have belongs to the first of them.
        is_cut: ranks hold different parts of the module, as pipeline stages do.
    Raises:
        UsageError: on every rank: ranks hold different weights without being stages; or a tensor's type cannot be gathered.
    """

    def __init__(self, state: ModuleState) -> None:
        """Collective."""
        self._values: dict[str, Any] = {n: v for n, v in state.state_dict().items() if isinstance(v, torch.Tensor)}
        firsts = {name: names[0] for names in state.tied() for name in names}
        tensors = [[n, str(v.dtype), list(v.shape), firsts.get(n, n)] for n, v in self._values.items()]
        self.is_cut = state.is_cut
        facts = [self.is_cut, tensors]
        facts_of_all = agree.kinds(facts)
        self._refuse(facts_of_all)
        self._stage = facts_of_all.index(facts)
        stages = agree.gather(self._stage)
        self._speakers = [stages.index(stage) for stage in range(len(facts_of_all))]
        self.entries: dict[str, _Entry] = {}
        for stage, (_, listed) in enumerate(facts_of_all):
            for name, dtype, shape, same in listed:
                if name not in self.entries:
                    self.entries[name] = _Entry(name, dtype_of(dtype), torch.Size(shape), stage, same)

    def _refuse(self, facts_of_all: list[Any]) -> None:
        if len(facts_of_all) > 1 and not all(is_cut for is_cut, _ in facts_of_all):
            kept = [{name: rest for name, *rest in listed} for _, listed in facts_of_all]
            odd = next((n for one in kept for n in one if any(other.get(n) != one[n] for other in kept)), "their order")
            raise CheckpointOptionError(
                f"save_pretrained: ranks hold different weights: {odd}. Build the same model on every rank."
            )
        kinds = (type(v) for v in self._values.values() if not is_split(v) and type(v) not in (torch.Tensor, nn.Parameter))
        odd_kind = agree.first_not_none(next((kind.__name__ for kind in kinds), None))
        if odd_kind is not None:
            raise CheckpointOptionError(f"a weight of type {odd_kind} cannot be gathered. Use fully_shard's layouts, or ddp.")

    def gather(self, names: Collection[str], folder: Path) -> dict[str, torch.Tensor]:
        """Whole tensors by name, mapped from files in the folder, on rank 0; {} on other ranks. Collective.

        Raises:
            CheckpointWriteError: on every rank, if rank 0 could not write.
        """
        same: dict[tuple[int, str], torch.Tensor] = {}  # a tied tensor once, by its first name
        problem: str | None = None
        for number, entry in enumerate(self._in_turns(names)):
            key = entry.stage, entry.same
            if key in same:
                continue
            same[key] = torch.empty(0)
            value = self._on_rank0(entry)
            if value is not None and problem is None:
                try:
                    same[key] = _mapped(value, folder / f"{number}")
                except OSError as error:  # raised later: the other ranks are still gathering
                    problem = f"rank 0: {explain(error, folder)}"
            del value
        agree.raise_on_all(problem, CheckpointWriteError)
        if not agree.is_rank0():
            return {}
        return {name: same[each.stage, each.same] for name, each in self.entries.items() if name in names}

    def _in_turns(self, names: Collection[str]) -> list[_Entry]:
        """The entries in round-robin order over the stages."""
        by_stage: list[list[_Entry]] = [[] for _ in self._speakers]
        for name, entry in self.entries.items():
            if name in names:
                by_stage[entry.stage].append(entry)
        return [entry for turn in itertools.zip_longest(*by_stage) for entry in turn if entry is not None]

    def _on_rank0(self, entry: _Entry) -> torch.Tensor | None:
        """A whole tensor on rank 0, None elsewhere. Collective over the ranks of its stage and rank 0."""
        value = whole(self._values[entry.name]).detach() if entry.stage == self._stage else None
        speaker = self._speakers[entry.stage]
        rank = dist.get_rank() if agree.is_joined() else 0
        if rank not in (0, speaker):
            return None
        if value is not None:
            value = value.cpu().contiguous()
        if speaker != 0 and entry.shape.numel():
            if value is not None:
                dist.send(flat_bytes(value), dst=0, group=agree.control_group())
            else:
                value = torch.empty(entry.shape, dtype=entry.dtype)
                dist.recv(flat_bytes(value), src=speaker, group=agree.control_group())
        elif value is None:
            value = torch.empty(entry.shape, dtype=entry.dtype)
        return value if rank == 0 else None


def _mapped(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """Write a tensor to a file, and map it from there."""
    if not tensor.numel():
        return tensor
    with file.open("wb") as stream:
        flat_bytes(tensor).numpy().tofile(stream)
    # shared=True: changes go to the file, not into this process's memory.
    mapped = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    with contextlib.suppress(OSError):
        file.unlink()  # the mapping keeps the data
    return mapped.view(tensor.shape)
