"""Text from files and errors, made safe to print on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "Forgiving",
    "OutputFilter",
    "columns",
    "flush",
    "is_terminal",
    "one_line",
    "printable",
    "put",
    "put_bytes",
    "rank_ranges",
    "say",
    "shortly",
]

# C0 without newline and tab, DEL, C1; characters that change the direction of text; lone surrogates.
_MORE_THAN_TEXT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
# The beginning of a colour sequence, at the end of the text so far.
_BEGUN = re.compile(r"\x1b(\[[0-9;:]{0,64})?\Z")  # not $, which also matches before a final newline


def printable(text: str) -> str:
    """`text` with a question mark for every character that a terminal would not just show."""
    return _MORE_THAN_TEXT.sub("?", text)


def one_line(text: str) -> str:
    """`printable` without newlines and tabs, for text that another user may have written."""
    return printable(text).replace("\n", "?").replace("\t", " ")


def shortly(text: str, most: int = 80) -> str:
    """A value of any length in quotes, shortened for an error."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def rank_ranges(ranks: Iterable[int], *, shortest: int = 2, most: int = 12) -> str:
    """As "rank 2", "ranks 0-2, 5" or "ranks 0-7, 12".

    Args:
        shortest: length from which consecutive ranks are shown as a range.
        most: number of ranges and ranks that are shown.
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) >= shortest else map(str, run))]
    more = f" and more, {len(ordered)} in all" if len(shown) > most else ""
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(shown[:most])}{more}"


def say(text: str) -> None:
    """Print a line of echelon's own on standard error. A closed terminal is no error."""
    put(sys.stderr, printable(f"echelon: {text}") + "\n")


def put(stream: Any, text: str) -> None:
    """Write to a stream of the user's, which may be closed, None, or an object of a notebook, a logger, a test.

    Its errors are dropped: training must not end because its output cannot be shown.
    """
    with contextlib.suppress(Exception):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
    flush(stream)


def put_bytes(stream: Any, data: bytes) -> None:
    """As `put`, for bytes: written unchanged if the stream has a buffer, else as text."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # streams of notebooks and tests take text only
        put(stream, data.decode("utf-8", "replace"))
        return
    flush(stream)
    with contextlib.suppress(Exception):
        buffer.write(data)
    flush(buffer)


def flush(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False if it cannot tell."""
    with contextlib.suppress(Exception):
        return bool(stream.isatty())
    return False


class Forgiving:
    """A stream of the user's that other code writes to, with writes as in `put`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        put(self._stream, text)
        return len(text)

    def flush(self) -> None:
        flush(self._stream)

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class OutputFilter:
    """Filters a program's output in pieces of any length: keeps colours, and carriage returns, which progress bars use."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._coloured = False

    def feed(self, data: bytes) -> str:
        """The complete text so far."""
        text = self._held + self._decoder.decode(data)
        begun = _BEGUN.search(text)
        self._held = begun[0] if begun else ""
        return self._shown(text[: len(text) - len(self._held)])

    def end(self) -> str:
        """The rest, with colours switched off."""
        rest, self._held = self._held + self._decoder.decode(b"", True), ""
        return self._shown(rest) + ("\x1b[0m" if self._coloured else "")

    def _shown(self, text: str) -> str:
        shown, at = [], 0
        for colour in _COLOUR.finditer(text):
            shown += [_plain(text[at : colour.start()]), colour[0]]
            at, self._coloured = colour.end(), True
        return "".join([*shown, _plain(text[at:])])


def _plain(text: str) -> str:
    return "\r".join(printable(part) for part in text.split("\r"))
