"""How a rank failed: what is recorded of it, and the text that a person at the terminal sees."""

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

HANGS = "hang"  # the kind of a failure that only says that nothing moved
_MOST_LINES, _LONGEST_LINE, _MOST_FRAMES = 100, 4000, 20
_HEARD_LATE_NS = 20_000_000


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Args:
        rank: which.
        exit_code: its exit code; 128 + n if signal n ended it, as a shell counts.
        time_ns: when it failed, on the machine's monotonic clock, comparable between its processes.
        kind: name of the exception's class, or of the signal.
        message: the exception's text.
        user_frames, traceback: the frames in the user's own files, and the whole text.
        ours: an error of echelon's own, whose text already says all.
        code: of such an error, as `echelon explain` knows it.
        log: where the rank's output is.
        reported: the rank itself said so; False if only its parent saw it end.
        headline: what is said in place of "rank N failed first", of a rank that did not fail by itself.
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
        """From what the rank wrote when it failed; an empty record is a rank that ended without a word."""
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
        """With the wall clock in place of the machine's own, so that machines can be compared."""
        record = {each.name: getattr(self, each.name) for each in fields(self)}  # sixteen thousand ranks may fail at once
        wall = (record.pop("time_ns") + time.time_ns() - time.monotonic_ns()) / 1e9
        return {**record, "log": str(self.log) if self.log else None, "time": wall}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Failure:
        """From what `as_json` gave, on any machine, as `contracts.records.exit_record` has checked it."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        known |= {"time_ns": int(float(record.get("time", 0)) * 1e9), "log": Path(record["log"]) if record.get("log") else None}
        return cls(**{**known, "user_frames": tuple(record.get("user_frames", ()))})

    @staticmethod
    def first(failures: Sequence[Failure]) -> Failure:
        """The failure that the others follow from: the earliest that is not the mere loss of a peer.

        A death without a word is heard of late: the kernel closes a dying process's connections before it tells the parent,
        so that a survivor's own error may carry the earlier time. And nothing is killed by SIGKILL because a peer failed.
        """
        return min(failures, key=lambda f: (f.is_victim, f.kind != "SIGKILL", f.time_ns - (0 if f.reported else _HEARD_LATE_NS)))


def render(failure: Failure, ranks: int) -> str:
    """Three parts: the rank and its error; the user's own frames; the logs. An error of ours needs no library frames."""
    who = failure.headline or f"rank {failure.rank}" + (" failed first" if ranks > 1 else " failed")
    lines = [f"echelon: {who} (exit code {failure.exit_code})"]
    first, last = failure.user_frames[: _MOST_FRAMES // 2], failure.user_frames[_MOST_FRAMES // 2 :]
    more = len(last) - _MOST_FRAMES // 2
    lines += _indented(first)
    if more > 0:  # as of a recursion without an end
        lines.append(f"  ... {more} more frames of the script, in the log")
    lines += _indented(last[max(0, more) :])
    own = failure.traceback.rpartition("Traceback (most recent call last)")[2]  # not those of its causes, which stand before
    hidden = own.count('\n  File "') - len(failure.user_frames)
    if hidden > 0 and not failure.ours and failure.kind not in ("SystemExit", "exit"):
        lines.append(f"  ... {hidden} more frames in libraries, in the log")
    text = (
        failure.message
        if failure.kind in ("SystemExit", "exit", "stopped", "behind", "hang") or failure.kind.startswith("SIG")
        else f"{failure.kind}: {failure.message}"
    )
    lines += _shown(text) or [failure.kind]
    if failure.code in PAGES:  # a record may say anything
        lines.append(f"`echelon explain {failure.code}` says what kind of error this is")
    if failure.log is not None:
        lines.append(f"log: {failure.log}" + (f"   all ranks: {failure.log.parent}" if ranks > 1 else ""))
    return printable("\n".join(lines))  # an exception may hold anything, such as what was read from a file


def _indented(frames: Sequence[str]) -> list[str]:
    return [f"  {line}" for frame in frames for line in frame.splitlines()]


def _shown(text: str) -> list[str]:
    """Its lines, less what would push all else off a terminal: an exception may hold a whole file or tensor."""
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..." for line in text.splitlines()]
    half, more = _MOST_LINES // 2, len(lines) - _MOST_LINES
    return [*lines[:half], f"... {more} more lines, in the log", *lines[-half:]] if more > 0 else lines
