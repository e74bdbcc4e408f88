"""What a rank is told before its first line, and what it is handed open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NOTHING", "CallFile", "Handed", "Start"]


@dataclass(frozen=True)
class Start:
    """Who a rank is, what to run, and where its output and its record go.

    Args:
        kind: "script", "module" or "call", of which `target` is the file, the name or the file of the call.
        env: its whole environment.
        result: of a call, where its value goes.
        flight: where its flight record goes when it fails, or when it is asked for.
        cores: that it is bound to; none are all.
        code: the first place on its path.
        sha256, task, key: of a call, see `CallFile`.
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
    """The file that has a call.

    Args:
        sha256: its checksum.
        key: seals the values that come back.
        task: which, of an array of calls.
    """

    sha256: str
    key: str
    task: int = 0


@dataclass(frozen=True)
class Handed:
    """Open descriptors; None is not handed over.

    Args:
        output, error: that become its standard output and error.
        log: to write to what belongs into its log and is not to be shown, behind what it has written to these two.
        pulse: in which it says how far it is; its stack is written there, too.
        asked: on which its responder is asked.
    """

    output: int | None = None
    error: int | None = None
    log: int | None = None
    pulse: int | None = None
    asked: int | None = None


NOTHING = Handed()
