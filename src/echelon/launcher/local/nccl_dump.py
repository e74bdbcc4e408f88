"""What NCCL's watchdog left before it ended a rank: torch's pickles become flight records, and nothing in them is run.

Where there are GPUs the launcher points torch at the run's folder; a rank that the watchdog aborts writes there, and can answer
nobody any more. The form is that of torch 2.13's `_dump_fr_trace`, which gloo's recorder writes, too: the tests take it so.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from echelon.common.files import read_bytes, write_whole
from echelon.launcher.local.flight import MOST, MOST_OF_A_GROUP, group_of

__all__ = ["environment", "read_dump", "translate"]

_PREFIX = "nccl.rank"
_NAME = re.compile(r"nccl\.rank(\d{1,7})")
_PLAIN = re.compile(
    r"APPENDS?|BINFLOAT|(LONG_)?BIN(GET|PUT)|BININT[12]?|(SHORT_)?BINUNICODE8?|EMPTY_(DICT|LIST|TUPLE)|FRAME|LONG1|MARK|MEMOIZE"
    r"|NEW(FALSE|TRUE)|NONE|PROTO|SETITEMS?|STOP|TUPLE[123]?"
)
# A text or list of a pickle may be in it once and be meant a million times: what is made of it has limits of its own.
_MOST_BYTES, _MOST_SHAPES, _MOST_DIMS, _LONGEST = 16 << 20, 64, 16, 500
_LARGEST = 12 << 20
_TEXTS, _COUNTS, _FLAGS = (
    ("profiling_name", "state"),
    ("collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns"),
    ("is_p2p", "retired"),
)


def environment(dumps: Path) -> dict[str, str]:
    """By which torch's watchdog writes into this folder, which must exist then."""
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": str(dumps.absolute() / _PREFIX)}


def translate(dumps: Path) -> None:
    """Write flight.rankR.json for every rank that has only the watchdog's pickle."""
    with contextlib.suppress(OSError):
        if not all(stat.S_ISDIR(os.lstat(folder).st_mode) for folder in (dumps.parent, dumps)):  # a link leads elsewhere
            return
        for path in sorted(dumps.iterdir()):
            name = _NAME.fullmatch(path.name)
            flight = dumps / f"flight.rank{name[1]}.json" if name else None
            if flight is not None and not os.path.lexists(flight) and (record := read_dump(path)) is not None:
                write_whole(flight, json.dumps(record))


def read_dump(path: Path) -> dict[str, Any] | None:
    """The entries of a pickle of plain containers; None for any other file."""
    try:
        content = read_bytes(path, _MOST_BYTES)
        _check(content)
        record = _Plain(io.BytesIO(content)).load()
        listed = record["entries"]
        entries = _newest(listed) if type(listed) is list else []
    except Exception:  # a pickle that is none may raise anything
        return None
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(group_of(entry), []).append(entry)
    return {"entries": [entry for of_group in groups.values() for entry in of_group[-MOST_OF_A_GROUP:]]} if entries else None


def _newest(listed: list[Any]) -> list[dict[str, Any]]:
    """As many as a reader takes; oldest first."""
    entries, size = list[dict[str, Any]](), 0
    for each in reversed(listed[-MOST:]):
        if (entry := _entry(each)) is not None:
            size += len(json.dumps(entry))
            if size > _LARGEST:
                break
            entries.append(entry)
    return entries[::-1]


def _check(content: bytes) -> None:
    """
    Raises:
        UnpicklingError: it makes more than plain containers, or numbers them so high that their list would fill the memory.
    """
    for code, argument, _ in pickletools.genops(content):
        if not _PLAIN.fullmatch(code.name) or (code.name.endswith("PUT") and int(argument or 0) > len(content)):
            raise pickle.UnpicklingError(f"no {code.name} here")


class _Plain(pickle.Unpickler):
    """Makes dictionaries, lists, tuples, numbers and texts."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"no {module}.{name} here")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _entry(said: Any) -> dict[str, Any] | None:
    """What is read of an entry, in the form of torch's JSON; None where something lacks or is of another kind."""
    group = said["process_group"] if type(said) is dict else ()
    if type(group) is not tuple or not 0 < len(group) < 8 or any(type(name) is not str for name in group):
        return None
    kinds = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_COUNTS, int), **dict.fromkeys(_FLAGS, bool)}
    if any(type(said.get(name)) is not kind for name, kind in kinds.items()) or not all(_is_count(said[n]) for n in _COUNTS):
        return None
    entry = {name: said[name][:_LONGEST] if kind is str else said[name] for name, kind in kinds.items()}
    entry["process_group"] = [name[:_LONGEST] for name in group]
    for kind in ("input", "output"):
        shapes, types = said.get(f"{kind}_sizes"), said.get(f"{kind}_dtypes")
        if type(shapes) is not list or type(types) is not list:
            return None
        shapes, types = shapes[:_MOST_SHAPES], types[:_MOST_SHAPES]
        if not all(type(shape) in (list, tuple) and len(shape) <= _MOST_DIMS and all(map(_is_count, shape)) for shape in shapes):
            return None
        entry[f"{kind}_sizes"] = [list(shape) for shape in shapes]
        entry[f"{kind}_dtypes"] = [name[:_LONGEST] for name in types if type(name) is str]
    return entry
