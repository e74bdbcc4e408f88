"""A failure as text for the person at the terminal: which rank first, why, where in the user's code, where the logs are."""

from __future__ import annotations

from echelon.common.error_pages import PAGES
from echelon.common.terminal import printable
from echelon.launcher.job import Failure

__all__ = ["render"]

_MOST_LINES, _LONGEST_LINE = 100, 4000


def render(failure: Failure, ranks: int) -> str:
    """Three parts: the rank and its error; the user's own frames; the logs. An error of ours needs no library frames."""
    who = failure.headline or f"rank {failure.rank}" + (" failed first" if ranks > 1 else " failed")
    lines = [f"echelon: {who} (exit code {failure.exit_code})"]
    lines += [f"  {line}" for frame in failure.user_frames for line in frame.splitlines()]
    hidden = failure.traceback.count('\n  File "') - len(failure.user_frames)
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


def _shown(text: str) -> list[str]:
    """Its lines, less what would push all else off a terminal: an exception may hold a whole file or tensor."""
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..." for line in text.splitlines()]
    half, more = _MOST_LINES // 2, len(lines) - _MOST_LINES
    return [*lines[:half], f"... {more} more lines, in the log", *lines[-half:]] if more > 0 else lines
