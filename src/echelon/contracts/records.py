"""Records that ranks and launchers leave for one another, read as untrusted input.

Anything of an unexpected type or size is not a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.contracts.pulse import Phase
from echelon.contracts.run_dir import read_json

__all__ = [
    "exit_record",
    "meeting_record",
    "place_record",
    "progress_of",
    "raised_record",
    "rank_record",
    "refusal_record",
]

Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _exit_code(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 255


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _time(value: Any) -> bool:
    return _count(value) or (isinstance(value, float) and math.isfinite(value) and abs(value) < 1e11)


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11


def _of_names(value: Any, check: Check) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _object(must: Mapping[str, Check], may: Mapping[str, Check]) -> Check:
    """Checks for an object that has all fields of `must`, and whose known fields all have the right type."""
    known = {**must, **may}

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and must.keys() <= value.keys()
            and all(known[name](each) for name, each in value.items() if name in known)
        )

    return check


_SAID = {"user_frames": _texts, "traceback": _text, "ours": _flag, "code": _text}
_RANK = _object(
    {"exit_code": _exit_code},
    {
        **_SAID,
        "time_ns": _count,
        "kind": _text,
        "message": _text,
        "loaded": _texts,
        "finished": _flag,
        "alone": _flag,
        "heard": _text,
        "collectives": lambda v: _of_names(v, _text),
    },
)
_FAILURE = _object(
    {"rank": _count, "exit_code": _exit_code, "kind": _text, "message": _text},
    {**_SAID, "time": _time, "log": _or_none(_text), "reported": _flag, "headline": _text, "oom": _flag},
)
_RAISED = _object({"kind": _text, "message": _text}, _SAID)
_CAME_TO = _object({"steps": lambda steps: isinstance(steps, list)}, {"checkpoint": _or_none(_text)})
_SEEN = _object(
    {
        "at": lambda at: (
            isinstance(at, list) and len(at) == 4 and all(map(_count, at)) and at[1] in {phase.value for phase in Phase}
        ),
        "stopped": _flag,
        "where": _text,
    },
    {
        "silent_s": _or_none(_seconds),
        "answers": _or_none(_flag),
        "ended": _or_none(lambda code: type(code) is int),
        "raised": _or_none(_RAISED),
    },
)
_EXIT = _object(
    {"exit_code": _exit_code},
    {
        "stopped": _or_none(_text),
        "first_failure": _or_none(_FAILURE),
        "ranks": lambda ranks: isinstance(ranks, dict) and all(map(_FAILURE, ranks.values())),
        "ended": _time,
        "came_to": _or_none(_CAME_TO),
        "seen": lambda seen: _of_names(seen, _SEEN) and all(rank.isdecimal() for rank in seen),
        "hang": _or_none(_object({"after_s": _seconds}, {})),
        "world_size": lambda size: _count(size) and 0 < size < 1 << 31,
        "explained": _or_none(_text),
    },
)
_MEETING = _object(
    {
        "host": _text,
        **dict.fromkeys(("port", "command_port"), lambda port: _count(port) and port < 1 << 16),
        "token": lambda token: _text(token) and len(token) == 32 and token.isalnum(),
        "attempt": lambda attempt: _count(attempt) and attempt < 10**9,
        "nodes": lambda nodes: _texts(nodes) and bool(nodes),
    },
    {},
)
_PLACE = _object(dict.fromkeys(("rank", "local_world_size", "pid"), _count), {})
_REFUSAL = _object({"host": _text, "why": _text}, {})


def _read(path: Path, check: Check) -> dict[str, Any] | None:
    record = read_json(path)
    return record if check(record) else None


def raised_record(record: Any) -> dict[str, Any] | None:
    """The exception that a rank reports to be handling, in the format of `worker.describe`; None if malformed."""
    return record if _RAISED(record) else None


def rank_record(path: Path) -> dict[str, Any] | None:
    """How a rank ended, by its own record: `exit_code`, and for a failure the fields of `worker.describe`."""
    return _read(path, _RANK)


def exit_record(path: Path) -> dict[str, Any] | None:
    """How an attempt ended, or a node's part of it, as `attempt.write_exit` wrote it."""
    return _read(path, _EXIT)


def progress_of(path: Path) -> dict[str, Any]:
    """An attempt's progress, which `finish_job` wrote into exit.json; empty if there is none."""
    return (exit_record(path) or {}).get("came_to") or {}


def meeting_record(path: Path) -> dict[str, Any] | None:
    """The meeting place of the nodes of a start."""
    return _read(path, _MEETING)


def place_record(path: Path) -> dict[str, Any] | None:
    """The process of a rank that a launch command started."""
    record = _read(path, _PLACE)
    return record if record is not None and record["pid"] > 1 else None


def refusal_record(path: Path) -> dict[str, Any] | None:
    """Why the launcher of a node ended before it began."""
    return _read(path, _REFUSAL)
