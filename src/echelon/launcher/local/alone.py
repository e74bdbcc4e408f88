"""Whether a program that was started on several ranks trained in each as if it were the only one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.common.files import read_bytes
from echelon.contracts.records import rank_record
from echelon.launcher.workarounds import has_destroyed_groups

if TYPE_CHECKING:
    from echelon.launcher.local.attempt import Attempt

__all__ = ["has_trained_alone", "never_met"]

# A program that knows of these gives each rank work of its own, or finds the others in its own way.
_KNOWS_RANKS = re.compile(
    rb"\b(?:[A-Z]+_)*RANK\b|\bWORLD_SIZE\b|\bSLURM_PROCID\b|\b(?:local|global)_rank\b|\bworld_size\b|\bRankInfo\b|\bprocess_index\b"
)
# One that failed may have been about to meet the others.
_WOULD_MEET = re.compile(rb"\b(?:echelon|init_process_group|accelerate|lightning|transformers)\b")
_OTHER_WAYS = ("mpi4py", "horovod", "ray", "jax", "dragon", "deepspeed")
_LARGEST, _MOST_FILES = 1 << 20, 500


def has_trained_alone(script: Path, *, failed: bool = False) -> bool:
    """Whether this rank, one of several, made an optimizer and never joined a group, in a program that knows of no ranks.

    Args:
        script: the program's; its own modules are looked at, too.
        failed: the program did not come to its end.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or any(name in sys.modules for name in _OTHER_WAYS):
        return False
    torch, dist = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    if torch is None or dist is None or not dist.is_available() or dist.is_initialized() or has_destroyed_groups():
        return False
    if not any(getattr(kind.step, "hooked", False) for kind in _below(torch.optim.Optimizer)):  # of which none was made
        return False
    return not any(_KNOWS_RANKS.search(text) or (failed and _WOULD_MEET.search(text)) for text in _own_sources(script))


def _below(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _own_sources(script: Path) -> Iterator[bytes]:
    folder = script.resolve().parent
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(name).resolve() for name in named if isinstance(name, str)}
    own = [p for p in paths if p.is_relative_to(folder) and not {"site-packages", "dist-packages"} & {*p.parts}]
    for path in [script, *own[:_MOST_FILES]]:
        with contextlib.suppress(OSError):
            yield read_bytes(path, _LARGEST)


def never_met(attempt: Attempt | None, ranks: Sequence[int]) -> str:
    """A word for the end of a run of which every rank trained alone; empty of any other."""
    if attempt is None or len(ranks) < 2:
        return ""
    if not all((rank_record(attempt.record_path(rank)) or {}).get("alone") for rank in ranks):
        return ""
    return (
        f"nothing was distributed: the {len(ranks)} ranks never met, and each trained a model of its own; of what they wrote "
        "under one name, the last is left. Call echelon.init_from_env() first and train with a layout, such as 'ddp'; or start "
        "one with --ranks 1."
    )
