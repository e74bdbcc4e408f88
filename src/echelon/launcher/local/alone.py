"""Whether a program started on several ranks trained in each as if it were the only one."""

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

# A program that uses these names gives each rank its own work, or finds the others in its own way.
_KNOWS_RANKS = re.compile(
    rb"\b(?:[A-Z]+_)*RANK\b|\bWORLD_SIZE\b|\bSLURM_PROCID\b|\b(?:local|global)_rank\b|\bworld_size\b|\bRankInfo\b|\bprocess_index\b"
)
# A failed program with these names may have been about to join a group.
_WOULD_MEET = re.compile(rb"\b(?:echelon|init_process_group|accelerate|lightning|transformers)\b")
_OTHER_WAYS = ("mpi4py", "horovod", "ray", "jax", "dragon", "deepspeed")
_LARGEST, _MOST_FILES = 1 << 20, 500


def has_trained_alone(script: Path, *, failed: bool = False) -> bool:
    """Whether this rank, one of several, made an optimizer but never joined a group, in a program without rank names.

    Args:
        script: the program's file; its own modules are searched, too.
        failed: the program did not reach its end.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or any(name in sys.modules for name in _OTHER_WAYS):
        return False
    torch, dist = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    if torch is None or dist is None or not dist.is_available() or dist.is_initialized() or has_destroyed_groups():
        return False
    if not any(getattr(kind.step, "hooked", False) for kind in _below(torch.optim.Optimizer)):  # no optimizer was made
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
    """A note for the end of a run in which every rank trained alone; empty for other runs."""
    if attempt is None or len(ranks) < 2:
        return ""
    if not all((rank_record(attempt.record_path(rank)) or {}).get("alone") for rank in ranks):
        return ""
    return (
        f"nothing was distributed: the {len(ranks)} ranks never met, and each trained its own model; of files with the "
        "same name, only the last is left. Call echelon.init_from_env() first and train with a layout, such as 'ddp'; or start "
        "one rank with --ranks 1."
    )
