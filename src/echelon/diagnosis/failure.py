"""How a rank failed: the record, and the text that the user sees on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from echelon.common.error_pages import PAGES
from echelon.common.terminal import printable
from echelon.diagnosis.lost_peers import gave_up_waiting, lost_peer, told_by_another

__all__ = ["HANGS", "Failure", "render"]

HANGS = "hang"  # kind of a failure that only says that no rank made progress
_MOST_LINES, _LONGEST_LINE, _MOST_FRAMES = 100, 4000, 20
_HEARD_LATE_NS = 20_000_000


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Args:
        rank: which.
        exit_code: its exit code; 128 + n if signal n ended it, as a shell counts.
        time_ns: when it failed, on the monotonic clock that all processes of a machine share.
        kind: name of the exception's class, or of the signal.
        message: the exception's text.
        user_frames, traceback: the frames in the user's own files, and the whole text.
        ours: an error of echelon's own, whose text needs no library frames.
        code: of such an error, as `echelon explain` knows it.
        log: where the rank's output is.
        reported: the rank itself recorded the failure; False if only its parent saw it end.
        headline: replaces "rank N failed first", for a rank that did not fail by itself.
        oom: the kernel killed it because there was no memory left.
    """

    rank: int
    exit_code: int
    time_ns: int
    kind: str
    message: str = ""
    user_frames: Sequence[str] = ()
    traceback: str = ""
    ours: bool = False
    log: Path | None = None
    reported: bool = True
    headline: str = ""
    oom: bool = False
    code: str = ""

    @classmethod
    def from_record(cls, rank: int, exit_code: int, time_ns: int, record: Mapping[str, Any], log: Path) -> Failure:
        """From the rank's own record of its failure; an empty record means that the rank left none."""
        return cls(
            rank,
            exit_code,
            int(record.get("time_ns", time_ns)),
            str(record.get("kind", "exit")),
            str(record.get("message", f"exit code {exit_code}")),
            tuple(record.get("user_frames", ())),
            str(record.get("traceback", "")),
            bool(record.get("ours", False)),
            log,
            bool(record),
            code=str(record.get("code", "")),
        )

    @property
    def is_victim(self) -> bool:
        """True for a rank that failed only because another was gone, whatever its own error says."""
        return self.waited or lost_peer(self.traceback) or told_by_another(self.traceback)

    @property
    def waited(self) -> bool:
        """True for a rank that gave up waiting for another."""
        return gave_up_waiting(self.traceback)

    def as_json(self) -> dict[str, Any]:
        """As a dictionary, with wall-clock time in place of the machine's monotonic clock, to compare machines."""
        record = {each.name: getattr(self, each.name) for each in fields(self)}  # fast: sixteen thousand ranks may fail at once
        wall = (record.pop("time_ns") + time.time_ns() - time.monotonic_ns()) / 1e9
        return {**record, "log": str(self.log) if self.log else None, "time": wall}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Failure:
        """From a dictionary of `as_json`, of any machine, checked by `contracts.records.exit_record`."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        known |= {"time_ns": int(float(record.get("time", 0)) * 1e9), "log": Path(record["log"]) if record.get("log") else None}
        return cls(**{**known, "user_frames": tuple(record.get("user_frames", ()))})

    @staticmethod
    def first(failures: Sequence[Failure]) -> Failure:
        """The failure that the others follow from: the earliest one that is not just the loss of a peer.

        The death of a rank without a record is noticed late: the kernel closes its connections before it tells the parent, so a
        survivor's own error may carry the earlier time. SIGKILL comes first: no rank is killed by it because a peer failed.
        """
        return min(failures, key=lambda f: (f.is_victim, f.kind != "SIGKILL", f.time_ns - (0 if f.reported else _HEARD_LATE_NS)))


def render(failure: Failure, ranks: int) -> str:
    """The rank and its error, the user's own frames, and the logs. An error of echelon's own needs no library frames."""
    who = failure.headline or f"rank {failure.rank}" + (" failed first" if ranks > 1 else " failed")
    lines = [f"echelon: {who} (exit code {failure.exit_code})"]
    first, last = failure.user_frames[: _MOST_FRAMES // 2], failure.user_frames[_MOST_FRAMES // 2 :]
    more = len(last) - _MOST_FRAMES // 2
    lines += _indented(first)
    if more > 0:  # as in an endless recursion
        lines.append(f"  ... {more} more frames of the script, in the log")
    lines += _indented(last[max(0, more) :])
    own = failure.traceback.rpartition("Traceback (most recent call last)")[2]  # without its causes, which come before
    hidden = own.count('\n  File "') - len(failure.user_frames)
    if hidden > 0 and not failure.ours and failure.kind not in ("SystemExit", "exit"):
        lines.append(f"  ... {hidden} more frames in libraries, in the log")
    text = (
        failure.message
        if failure.kind in ("SystemExit", "exit", "stopped", "behind", "hang") or failure.kind.startswith("SIG")
        else f"{failure.kind}: {failure.message}"
    )
    lines += _shown(text) or [failure.kind]
    if failure.code in PAGES:  # a record may hold any text
        lines.append(f"`echelon explain {failure.code}` says what kind of error this is")
    if failure.log is not None:
        lines.append(f"log: {failure.log}" + (f"   all ranks: {failure.log.parent}" if ranks > 1 else ""))
    return printable("\n".join(lines))  # an exception's text may hold control characters


def _indented(frames: Sequence[str]) -> list[str]:
    return [f"  {line}" for frame in frames for line in frame.splitlines()]


def _shown(text: str) -> list[str]:
    """The lines of a message, shortened: an exception may hold a whole file or tensor."""
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..." for line in text.splitlines()]
    half, more = _MOST_LINES // 2, len(lines) - _MOST_LINES
    return [*lines[:half], f"... {more} more lines, in the log", *lines[-half:]] if more > 0 else lines
