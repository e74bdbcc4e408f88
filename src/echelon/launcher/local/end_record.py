"""The record of how an attempt ended: what ranks left, and who is to blame for it, as `diagnosis` says."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.common.files import MOST_BYTES, write_whole
from echelon.common.terminal import say
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis import Evidence, blamed, explain
from echelon.diagnosis.failure import Failure
from echelon.launcher.local.rank_state import RankState

__all__ = ["HUNG", "record_end", "write_exit"]

logger = logging.getLogger(__name__)

HUNG = 124  # the exit code, as `timeout` has it
# Of exit.json, which is read whole: bytes of each text of the first failure; of the others', less and less until all fits.
_LARGEST, _OF_FIRST, _OF_OTHERS = MOST_BYTES * 3 // 4, 1 << 19, (16_000, 4_000, 1_000, 200)
_MOST_FAILURES = 5000


def record_end(
    attempt_dir: RunDir,
    code: int,
    failures: Sequence[Failure] = (),
    stopped: str | None = None,
    *,
    seen: Mapping[int, RankState | Mapping[str, Any]] | None = None,
    hang_s: float | None = None,
    world_size: int | None = None,
) -> Failure | None:
    """Write an attempt's exit.json, as `write_exit` does, and return the failure from which the others follow.

    Args:
        code: if no rank failed.
        failures: of all ranks that failed.
        seen: how far each rank had come before the ranks were ended; of other nodes as their records say it.
    """
    first = Failure.first(failures) if failures else None

    write = functools.partial(write_exit, attempt_dir.exit_json, stopped=stopped, seen=seen, hang_s=hang_s, world_size=world_size)
    write(first.exit_code if first else code, failures, first)
    if first is None and stopped is None and code != REQUEUE:
        return None
    try:
        evidence = Evidence.of(attempt_dir.path, attempt_dir.attempt)
        verdict = explain(evidence)
    except Exception:  # whatever the folder holds: the end of a run does not depend on its explanation
        logger.debug("the end of attempt %d cannot be explained", attempt_dir.attempt, exc_info=True)
        return first
    if first is None:
        if stopped is not None or verdict.guilty:
            write(code, failures, explained=verdict.paragraph)
        return None
    named = blamed(evidence, verdict, first, failures)
    all_failed = [*failures, *([named] if all(f.rank != named.rank for f in failures) else [])]
    write(named.exit_code, all_failed, named, explained=verdict.paragraph)
    return named


def write_exit(
    path: Path,
    code: int,
    failures: Sequence[Failure] = (),
    first: Failure | None = None,
    stopped: str | None = None,
    *,
    seen: Mapping[int, RankState | Mapping[str, Any]] | None = None,
    hang_s: float | None = None,
    world_size: int | None = None,
    explained: str | None = None,
) -> None:
    """Record how an attempt ended. If that cannot be written, report it; the exit code stays.

    Args:
        path: the attempt's exit.json, or with several nodes a node's own.
        failures: of all ranks that failed; `first` is the one that the others followed.
        stopped: what ended it, if no rank did.
        seen: how far each rank, or each of a node's, had come before they were ended.
        hang_s: it was ended since no rank had made progress for so long.
        world_size: how many ranks there were, on all nodes.
        explained: a paragraph of why it ended, for a person.
    """
    states = {rank: s.as_json() if isinstance(s, RankState) else s for rank, s in (seen or {}).items()}
    record: dict[str, Any] = {
        "exit_code": code,
        "stopped": stopped,
        "first_failure": _shortened(first, _OF_FIRST) if first else None,
        "ranks": {},
        "ended": time.time(),
        "hang": {"after_s": round(hang_s, 3)} if hang_s is not None else None,
        "explained": explained,
        **({"seen": states} if states else {}),
        **({"world_size": world_size} if world_size else {}),
    }
    whole = {f.rank for f in (first, *([Failure.first(failures)] if failures else [])) if f is not None}
    text = ""
    for most in _OF_OTHERS:
        record["ranks"] = {str(f.rank): _shortened(f, _OF_FIRST if f.rank in whole else most) for f in failures}
        if states and most <= 1000:
            record["seen"] = {rank: {k: v for k, v in s.items() if k != "raised"} for rank, s in states.items()}
        text = json.dumps(record, indent=2 if most > 1000 else None, default=str)
        if len(text) <= _LARGEST:
            break
    else:  # a hundred thousand ranks
        kept = sorted(failures, key=lambda f: (f.rank not in whole, f.time_ns))[:_MOST_FAILURES]
        record["ranks"] = {str(f.rank): _shortened(f, _OF_FIRST if f.rank in whole else _OF_OTHERS[-1]) for f in kept}
        text = json.dumps({**record, "seen": {}}, default=str)
    _write_end(path, text, again=bool(failures))


def _write_end(path: Path, text: str, *, again: bool) -> None:
    """Where the folder was removed meanwhile: into a new one if there is a failure to be told."""
    try:
        if again:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:  # a full disk, too
        say(f"{path} cannot be written: {error.strerror}")


def _shortened(failure: Failure, most: int) -> dict[str, Any]:
    """With texts of at most about so many bytes each; where that is little, without what the others of its file say as well."""
    record = failure.as_json()
    record["message"], record["traceback"] = _short(failure.message, most), _short(failure.traceback, most)
    frames = list(failure.user_frames) if most > 1000 else []
    while frames and len(json.dumps(frames)) > most:
        frames = frames[len(frames) // 2 + 1 :]
    return {**record, "user_frames": frames, "log": record["log"] if most > 1000 else None}


def _short(text: str, most: int) -> str:
    """Its beginning and its end, as which an exception has what it says."""
    if len(text) <= most and len(json.dumps(text)) <= most:
        return text
    size = min(most, len(text))
    while len(json.dumps(cut := f"{text[: size // 3]}\n[...]\n{text[-(size * 2 // 3) :].lstrip()}")) > most and size > 12:
        size = size * 3 // 4
    return cut
