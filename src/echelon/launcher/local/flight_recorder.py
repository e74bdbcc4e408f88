"""The collectives that this rank has called: torch's own flight record, read through a private name.

torch keeps the last collectives of every process group, on gloo and NCCL, by default. It has no public way to read them: its
debug server opens a port for everybody, and its analyser fails on gloo's records. `torch._C._distributed_c10d` has
`_dump_fr_trace_json` (torch 2.13.0) and, where torch was built with NCCL, `_dump_nccl_trace_json`. Gloo's records lack the ranks
of a group, which `torch.distributed.distributed_c10d._world` has. Only this file uses these names. Without them, or with another
format, there is no record, and nothing else changes; tests/contracts/test_evidence.py notices.

Imports no torch: a rank that has not loaded torch has called no collective.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.common.files import private_folder, write_whole

__all__ = ["called", "flight_record", "last_calls", "write_flight"]

# A reader compares the last calls; with many groups fewer of each are kept, so that the file stays below some megabytes.
MOST_OF_A_GROUP, MOST = 200, 4000
_MOST_GROUPS, _LARGEST_GROUP = 100, 4096  # groups whose members are recorded
_NAMES = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def called() -> tuple[int, bool]:
    """Number of collectives begun plus ended here, over all groups, and whether one has begun but not ended.

    The number grows as long as a rank communicates.
    """
    begun = ended = 0
    pending = False
    for record in _dumps(entries=False):
        for status in _objects(record.get("pg_status")):
            newest, done = (max(0, _number(status.get(f"last_{name}_collective"))) for name in ("enqueued", "completed"))
            begun, ended, pending = begun + newest, ended + done, pending or newest > done
    return begun + ended, pending


def flight_record() -> dict[str, Any] | None:
    """The record that torch gives, cut to the last 200 entries of each process group; None if there is none."""
    records = _dumps(entries=True)
    if not records:
        return None
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        of_nccl = set(groups)
        for entry in record["entries"]:
            name = group_of(entry)
            if name in of_nccl:  # one group with two backends, each counting from 1
                name = f"{name}/gloo"
                entry["process_group"] = [name, *entry["process_group"][1:]]
            groups.setdefault(name, []).append(entry)
    most = min(MOST_OF_A_GROUP, max(20, MOST // max(1, len(groups))))
    kept = [entry for entries in groups.values() for entry in entries[-most:]]
    status = {name: each for record in reversed(records) for name, each in record.get("pg_status", {}).items()}
    return {**records[0], "entries": kept, "pg_status": status, "groups": _members()}


def _members() -> dict[str, dict[str, list[int]]]:
    """The members of each group of this rank, except the default group: {"1": {"ranks": [0, 2]}}."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    members: dict[str, dict[str, list[int]]] = {}
    try:  # the program may make a group at this very moment
        for group, ranks in list(world.pg_group_ranks.items()):
            name = world.pg_names.get(group)  # None for groups without this rank
            if name not in (None, "0") and len(ranks) <= _LARGEST_GROUP and len(members) < _MOST_GROUPS:
                members[str(name)] = {"ranks": sorted(map(int, ranks))}
    except Exception:  # another version of torch
        return {}
    return members


def group_of(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, list) and group else str(entry.get("pg_id", "0"))


def last_calls(record: Mapping[str, Any] | None) -> dict[str, str]:
    """The last call of this rank in each process group: {"0": "all_reduce #118"}."""
    last = {group_of(entry): entry for entry in (record or {}).get("entries", ())}
    return {
        group: f"{str(entry.get('profiling_name', '')).rpartition(':')[2]} "
        f"#{entry.get('p2p_seq_id' if entry.get('is_p2p') else 'collective_seq_id')}"
        for group, entry in last.items()
    }


def write_flight(path: Path) -> dict[str, Any] | None:
    """Write this rank's record to a file, whole or not at all; returns it. Without entries no file is written."""
    record = flight_record()
    if record is not None and record["entries"]:
        with contextlib.suppress(OSError):  # a full disk, or a removed folder
            private_folder(path.parent.parent)
            private_folder(path.parent)
            write_whole(path, json.dumps(record))
    return record


def _dumps(*, entries: bool) -> list[dict[str, Any]]:
    c10d = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    dumps = []
    for name in _NAMES:
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            record = json.loads(dump(includeCollectives=entries, onlyActive=False))
        except Exception:  # another version of torch may raise any C++ error
            continue
        if isinstance(record, dict):
            listed = record.get("entries")
            record["entries"] = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
            dumps.append(record)
    full = [record for record in dumps if record["entries"]]
    return full or dumps


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value.values() if isinstance(each, dict)] if isinstance(value, dict) else []


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
