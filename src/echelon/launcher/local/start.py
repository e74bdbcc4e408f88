"""What a rank gets before its first line: its description, and open descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NOTHING", "CallFile", "Handed", "Start"]


@dataclass(frozen=True)
class Start:
    """Which rank to become, what to run, and where its output and record go.

    Args:
        kind: "script", "module" or "call"; `target` is the script's file, the module's name or the call's file.
        env: its whole environment.
        result: for a call, the file for its value.
        flight: the file for its flight record, written on failure or on request.
        cores: the cores it is bound to; empty for all.
        code: the first entry of its module search path.
        sha256, task, key: for a call, see `CallFile`.
    """

    kind: str
    target: str
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    sys_path: Sequence[str]
    log: str | None = None
    record: str | None = None
    result: str | None = None
    flight: str | None = None
    cores: Sequence[int] = ()
    code: str = ""
    sha256: str | None = None
    task: int = 0
    key: str = ""


@dataclass(frozen=True)
class CallFile:
    """The file that holds a call.

    Args:
        sha256: its checksum.
        key: seals the values that come back.
        task: its index in an array of calls.
    """

    sha256: str
    key: str
    task: int = 0


@dataclass(frozen=True)
class Handed:
    """Open descriptors for a rank; None where it gets none.

    Args:
        output, error: become its standard output and error.
        log: for text that goes into the log but is not shown, after what the rank wrote to `output` and `error`.
        pulse: shared memory for its progress and its stack.
        asked: the socket of its responder.
    """

    output: int | None = None
    error: int | None = None
    log: int | None = None
    pulse: int | None = None
    asked: int | None = None


NOTHING = Handed()
