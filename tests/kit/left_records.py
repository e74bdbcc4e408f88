"""Records of a run as its ranks and its launcher leave them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.contracts.pulse import Phase
from echelon.diagnosis import Evidence, Verdict, explain

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5766"
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"


def entry(seq: int, op: str = "all_reduce", size: Sequence[int] = (4,), kind: str = "Float", **more: Any) -> dict[str, Any]:
    tensors = {"sizes": [list(size)], "dtypes": [kind]} if op != "barrier" else {"sizes": [], "dtypes": []}
    return {
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "op_id": seq,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{op}",
        **{f"{way}_{name}": value for way in ("input", "output") for name, value in tensors.items()},
        "state": "scheduled",
        "retired": True,
        "time_created_ns": seq,
        **more,
    }


def record(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": "2.10", "entries": list(entries), "pg_config": {}, "pg_status": {}, **more}


def failed(rank: int, text: str = "ValueError: bad label", time_s: float = 0.0, **more: Any) -> dict[str, Any]:
    kind, _, message = text.partition(": ")
    frame = 'File "/home/me/train.py", line 41, in load'
    said = {"rank": rank, "exit_code": 1, "kind": kind, "message": message, "user_frames": [frame], "time": 1e9 + time_s}
    return {**said, "traceback": f"Traceback (most recent call last):\n  {frame}\n    x()\n{text}\n", "log": None, **more}


def killed(rank: int, name: str = "SIGKILL", **more: Any) -> dict[str, Any]:
    said = {"rank": rank, "exit_code": 137, "kind": name, "message": f"killed by {name}", "traceback": "", "reported": False}
    return {**said, "time": 1e9, **more}


def seen(step: int = 0, phase: Phase = Phase.NONE, **more: Any) -> dict[str, Any]:
    return {"at": [step, int(phase), 0, step], "stopped": False, "where": "", **more}


class Left:
    """A run's folder that a test fills."""

    def __init__(self, path: Path, attempt: int = 0) -> None:
        self.path, self.here, self.dumps = path, path / f"attempts/{attempt:03d}", path / f"dumps/{attempt:03d}"
        self.here.mkdir(parents=True)
        self.dumps.mkdir(parents=True)
        self.attempt = attempt

    def end(self, code: int, *failures: dict[str, Any], **more: Any) -> Left:
        first = failures[0] if failures else None
        said = {
            "exit_code": code,
            "stopped": None,
            "first_failure": first,
            "ranks": {str(f["rank"]): f for f in failures},
            **more,
        }
        (self.here / "exit.json").write_text(json.dumps(said))
        return self

    def rank(self, rank: int, code: int, **more: Any) -> Left:
        (self.here / f"exit.rank{rank}.json").write_text(json.dumps({"exit_code": code, "time_ns": 1, **more}))
        return self

    def flight(self, rank: int, *entries: dict[str, Any], **more: Any) -> Left:
        (self.dumps / f"flight.rank{rank}.json").write_text(json.dumps(record(*entries, **more)))
        return self

    def stack(self, rank: int, *frames: tuple[str, int, str]) -> Left:
        lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
        text = 'Thread 0x00007f (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
        (self.dumps / f"stack.rank{rank}.txt").write_text(
            text + "\n".join(["Current thread 0x1 (most recent call first):", *lines])
        )
        return self

    @property
    def evidence(self) -> Evidence:
        return Evidence.of(self.path, self.attempt)

    @property
    def verdict(self) -> Verdict:
        return explain(self.evidence)
