"""Events: one JSON object a line, appended to a file. Whoever watches a run reads these lines and nothing else.

Two kinds of files use the form. `events.rankN.jsonl` holds what happened (`{"event": "train_start", "time": ..., ...}`).
`metrics.jsonl` holds numbers: training records `{"step", "update", "loss", "lr", "grad_norm", "<unit>_per_s", "time"}` and
evaluation records `{"step", "eval_loss", "time"}`. `time` is seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

# Bytes of lines that wait for a disk to have room again.
_KEPT = 4 << 20

__all__ = ["EventLog", "LineReader", "encode", "read_lines"]


# Made once: json.dumps with options makes an encoder for every call.
_strict = json.JSONEncoder(allow_nan=False, default=str)


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON. inf and nan become the strings "inf", "-inf", "nan": JSON has no such numbers."""
    try:
        return _strict.encode(record)
    except ValueError:
        return _strict.encode(_finite(record))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class EventLog:
    """Appends events to a file. One writer per file; a line is written by one call, so a reader sees whole lines.

    What cannot be written, as on a full disk, is kept and written later; beyond a few megabytes it is lost, and that is said. A
    run does not end for it.

    Args:
        path: the file; its folder exists.
        common: fields that every event carries, such as the rank.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self._common = path, common
        self._owed, self._lost, self._in_trouble = b"", 0, False
        self._file: IO[bytes] | None = open(path, "ab", buffering=0)

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event at once, so that it survives a kill of this process."""
        self.write([{"event": event, "time": time.time(), **self._common, **fields}])

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append records as they are, with one system call for all of them."""
        if self._file is None or not records:
            return
        if len(self._owed) > _KEPT:
            self._lost += len(records)
        else:
            self._owed += "".join(encode(r) + "\n" for r in records).encode()
        try:
            while self._owed:  # a disk that becomes full takes a part
                self._owed = self._owed[self._file.write(self._owed) or 0 :]
        except OSError as error:
            if not self._in_trouble:
                logger.warning(
                    "%s cannot be written: %s. The run goes on, and lines are kept for later.", self.path, error.strerror
                )
            self._in_trouble = True
        else:
            self._in_trouble = False

    def close(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._owed = self._owed[self._file.write(self._owed) or 0 :]
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None
        lost = self._lost + self._owed.count(b"\n")
        if lost:
            logger.warning("%s lacks %d lines, which could not be written", self.path, lost)


class LineReader:
    """Follows a growing JSON-lines file: each call of `read` gives the records that were completed since the last."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._position += len(chunk)
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return list(_decode(lines))


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole records of a file; a last line cut off by a kill is left out. An absent file has none."""
    return LineReader(Path(path)).read()


def _decode(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:  # two attempts may have met in the middle of a line
            continue
        if isinstance(value, dict):
            yield value
