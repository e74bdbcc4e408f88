"""An exception as plain values for a rank's record, with frames of the user's own files apart from those of libraries."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from echelon.common.errors import EchelonError
from echelon.common.redact import redacted, secret_values
from echelon.common.traces import in_library

__all__ = ["cut", "describe", "in_library", "user_frames"]

_LONGEST = 1 << 18
_MOST_FRAMES = 100


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain values, with the frames in the user's own files apart. Of an exception group, the first exception."""
    if isinstance(error, BaseExceptionGroup):
        return _of_group(error)
    trace = _skip_launcher(error.__traceback__)
    known = secret_values(sys.argv, os.environ)
    text = redacted(cut("".join(traceback.format_exception(type(error), error, trace))), known)
    return {
        "time_ns": time.monotonic_ns(),
        "kind": type(error).__name__,
        "message": redacted(cut(_text_of(error)), known),
        "ours": isinstance(error, EchelonError),
        "code": error.code if isinstance(error, EchelonError) else "",
        "user_frames": [redacted(frame, known) for frame in user_frames(trace)[-_MOST_FRAMES:]],
        "traceback": text,
    }


def _of_group(group: BaseExceptionGroup[BaseException]) -> dict[str, Any]:
    """An exception group, as `asyncio` and others raise it: described by its first exception."""
    record, trace = describe(group.exceptions[0]), _skip_launcher(group.__traceback__)
    whole = "".join(traceback.format_exception(type(group), group, trace))
    known = secret_values(sys.argv, os.environ)
    frames = [redacted(frame, known) for frame in user_frames(trace)[-_MOST_FRAMES:]]
    if len(group.exceptions) > 1:
        more = f"(the first of {len(group.exceptions)} errors in {type(group).__name__}: {group.message})"
        record["message"] = redacted(cut(f"{record['message']} {more}".lstrip()), known)
    first = f"\nThe first of what {type(group).__name__} holds:\n\n{record['traceback']}"
    return {**record, "user_frames": [*frames, *record["user_frames"]], "traceback": redacted(cut(whole), known) + first}


def cut(text: str) -> str:
    """The beginning and the end of a text: an exception may hold a whole tensor, and readers of records read only a few MB."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as bad:
        return f"(its text cannot be shown: {type(bad).__name__})"


def _skip_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that lead into the user's program: those of echelon and runpy say nothing about it."""
    entry, ours = trace, str(Path(__file__).parents[1]) + os.sep
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if not file.startswith(ours) and file not in (runpy.__file__, "<frozen runpy>"):
            return entry
        entry = entry.tb_next
    return trace


def user_frames(trace: TracebackType | None) -> list[str]:
    """The frames in files outside libraries, outermost first, in a traceback's format."""
    frames = []
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith("<") or in_library(frame.filename):
            continue
        frames.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line or ""}'.rstrip())
    return frames
