"""Give a trained model back to the library that it comes from: whole weights, written by the model's own `save_pretrained`.

Under every layout. The weights are gathered one by one into files beside the target, which rank 0 maps into memory: no rank
holds more than its own parts and one whole tensor.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.checkpoint import commit
from echelon.common.arguments import flags
from echelon.common.errors import CheckpointOptionError, require
from echelon.hf.plain_model import can_be_built, of_adapters, plain_model
from echelon.loop.checkpointing.gathered import Weights
from echelon.loop.unit import Unit
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import authors_classes
from echelon.world import agree
from echelon.world.init import World

__all__ = ["save_pretrained"]

logger = logging.getLogger(__name__)


def save_pretrained(model: Unit | nn.Module, folder: str | os.PathLike[str], *, merged: bool = False, **options: Any) -> Path:
    """Write a model for `from_pretrained`, or an adapter for PEFT, whatever the layout. Collective: every rank calls it.

    Rank 0 alone writes, by the model's own `save_pretrained`. Into a folder that is not there yet the files come whole or not at
    all; in one that is there they are replaced one by one. It needs as much room on the folder's disk once more, for a while.

    Args:
        model: an AutoUnit, a unit with one module, or a module, also as a layout or the user wrapped it.
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
    weights = Weights(prepared.state())
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
    weights: Weights,
    whole: Mapping[str, torch.Tensor],
    folder: Path,
    merged: bool,
    options: Mapping[str, Any],
) -> None:
    if merged:
        _plain(module, weights, whole).merge_and_unload().save_pretrained(folder, **options)
    elif weights.is_cut and can_be_built(module):  # this stage's own counts and names its own layers only
        _plain(module, weights, whole).save_pretrained(folder, state_dict=whole, **options)
    else:
        with authors_classes(module):
            own(module, folder, state_dict=whole, **options)


def _check(module: nn.Module, merged: bool, options: Mapping[str, Any]) -> Any:
    """Its own function that saves it."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        raise CheckpointOptionError(
            f"{type(module).__name__} has no save_pretrained. `echelon ckpt export CHECKPOINT FOLDER` writes the weights of any "
            "module as safetensors."
        )
    if "state_dict" in options:
        raise CheckpointOptionError("save_pretrained gathers the state_dict itself. Leave it out.")
    flags(merged=merged, kind=CheckpointOptionError)
    if merged and not callable(getattr(module, "merge_and_unload", None)):
        raise CheckpointOptionError(f"merged must be False for a {type(module).__name__}: PEFT put no adapters around it.")
    return own


def _module(model: Unit | nn.Module) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    require(isinstance(model, Unit), "model", "a unit or a torch.nn.Module", model, kind=CheckpointOptionError)
    modules = model.tracked_modules()
    if len(modules) != 1:
        raise CheckpointOptionError(f"the unit has {len(modules)} modules: {', '.join(modules)}. Pass the one to be written.")
    return next(iter(modules.values()))


def _needed(module: nn.Module, weights: Weights) -> set[str]:
    """Names that the module's `save_pretrained` will write: of an adapter of PEFT's not those of the base, which is large.

    Collective.
    """
    if (own := of_adapters(module, _stand_ins(weights))) is None:
        if "state_dict" in vars(module) and agree.is_rank0():
            kind = type(module).__name__
            logger.warning("save_pretrained writes all weights of the %s, whatever the state_dict set on it would give", kind)
        return set(weights.entries)
    # A stage knows of its own layers only what PEFT would write.
    return {name for each in agree.kinds(sorted(own)) for name in each}


def _plain(module: nn.Module, weights: Weights, whole: Mapping[str, torch.Tensor]) -> Any:
    with authors_classes(module):
        return plain_model(module, {**_stand_ins(weights), **whole}, is_cut=weights.is_cut)


def _stand_ins(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: entry.stand_in() for name, entry in weights.entries.items()}
