"""The record of how an attempt ended: the ranks' failures, and the one to blame by `diagnosis`."""

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

HUNG = 124  # exit code of a hang, as of `timeout`
# Limits of exit.json, which is read whole: bytes of each text of the first failure; of the others', ever less until all fit.
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
    """Write an attempt's exit.json, as `write_exit` does, and return the failure that the others follow from.

    Args:
        code: the exit code if no rank failed.
        failures: of all ranks that failed.
        seen: each rank's progress before the ranks were ended; for other nodes, from their records.
    """
    first = Failure.first(failures) if failures else None

    write = functools.partial(write_exit, attempt_dir.exit_json, stopped=stopped, seen=seen, hang_s=hang_s, world_size=world_size)
    write(first.exit_code if first else code, failures, first)
    if first is None and stopped is None and code != REQUEUE:
        return None
    try:
        evidence = Evidence.of(attempt_dir.path, attempt_dir.attempt)
        verdict = explain(evidence)
    except Exception:  # a run must end even if its folder cannot be explained
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
    """Record how an attempt ended. If the file cannot be written, say so; the exit code stays.

    Args:
        path: the attempt's exit.json, or on several nodes the node's own.
        failures: of all ranks that failed; `first` is the one that the others follow from.
        stopped: the reason for the end, if no rank failed.
        seen: progress of each rank, or of each rank of a node, before the ranks were ended.
        hang_s: seconds without progress after which the attempt was ended.
        world_size: number of ranks on all nodes.
        explained: a paragraph for the user on why it ended.
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
    """Write the record. If its folder was removed meanwhile, make a new one, but only for a failure."""
    try:
        if again:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:  # a full disk, too
        say(f"{path} cannot be written: {error.strerror}")


def _shortened(failure: Failure, most: int) -> dict[str, Any]:
    """A failure with texts of at most about `most` bytes; if that is little, also without frames and log path."""
    record = failure.as_json()
    record["message"], record["traceback"] = _short(failure.message, most), _short(failure.traceback, most)
    frames = list(failure.user_frames) if most > 1000 else []
    while frames and len(json.dumps(frames)) > most:
        frames = frames[len(frames) // 2 + 1 :]
    return {**record, "user_frames": frames, "log": record["log"] if most > 1000 else None}


def _short(text: str, most: int) -> str:
    """The beginning and the end of a text, where an exception says most."""
    if len(text) <= most and len(json.dumps(text)) <= most:
        return text
    size = min(most, len(text))
    while len(json.dumps(cut := f"{text[: size // 3]}\n[...]\n{text[-(size * 2 // 3) :].lstrip()}")) > most and size > 12:
        size = size * 3 // 4
    return cut
