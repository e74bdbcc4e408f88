"""Events: one JSON object per line, appended to a file. Everything that watches a run reads only these lines.

Two kinds of files have this format. `events.rankN.jsonl` holds what happened (`{"event": "train_start", "time": ..., ...}`).
`metrics.jsonl` holds numbers: training records `{"step", "update", "loss", "lr", "grad_norm", "<unit>_per_s", "time"}` and
evaluation records `{"step", "eval_loss", "time"}`. `time` is seconds since the epoch. A training record also has
`"<unit>_per_s_per_device"` with several ranks, `"mfu"` from 0 to 1 where the device's peak and the model's FLOPs are known, and
once a second `"memory_peak_bytes", "memory_reserved_bytes", "alloc_retries"` of rank 0's GPU, or `"host_memory_bytes"` of its
process on a CPU. Values given to `state.log` are in the same records under their names, with `eval_` before those of evaluations.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from echelon.common.files import open_file, open_to_append, parse_object

__all__ = ["EventLog", "LineReader", "encode", "read_lines", "record_of", "survey", "survey_into"]

logger = logging.getLogger(__name__)

# Bytes of lines kept while the disk is full.
_KEPT = 4 << 20


# Created once: json.dumps with options creates an encoder at every call.
_strict = json.JSONEncoder(allow_nan=False, default=str)


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON. inf and nan become the strings "inf", "-inf", "nan": JSON has no such numbers."""
    try:
        return _strict.encode(record)
    except ValueError:
        return _strict.encode(_finite(record))


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    """One line per record. Encoded all at once, which takes two thirds of the time, unless a text contains the separator."""
    try:
        together = _strict.encode(records)[1:-1]
    except ValueError:
        together = ""
    if together.count("}, {") == len(records) - 1 and together:
        return together.replace("}, {", "}\n{") + "\n"
    return "".join(encode(record) + "\n" for record in records)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class EventLog:
    """Appends events to a file. One writer per file; each line is written by one call, so a reader sees whole lines.

    On a full disk, lines are kept and written later; beyond a few megabytes they are lost, with a warning. The run continues.

    Args:
        path: the file; its folder exists.
        common: fields of every event, such as the rank.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self._common = path, common
        self._owed, self._lost, self._in_trouble = b"", 0, False
        self._file: IO[bytes] | None = open(open_to_append(path, 0o666), "ab", buffering=0)

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event at once, so that it survives if this process is killed."""
        self.write([{"event": event, "time": time.time(), **self._common, **fields}])

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append records unchanged, with one system call for all."""
        if self._file is None or not records:
            return
        if len(self._owed) > _KEPT:
            self._lost += len(records)
        else:
            self._owed += _lines(records).encode()
        try:
            while self._owed:  # a disk that fills up may take only a part
                self._owed = self._owed[self._file.write(self._owed) or 0 :]
        except OSError as error:
            if not self._in_trouble:
                logger.warning(
                    "%s cannot be written: %s. The run continues, and lines are kept for later.", self.path, error.strerror
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


_scan = json.JSONDecoder().raw_decode
_FLAT = 64  # with so few brackets, nesting cannot be deep


def record_of(line: bytes) -> dict[str, Any] | None:
    """As `parse_object`, in half the time for a line in this module's own format: a report reads a million of them."""
    try:
        text = line.decode()
        value, end = _scan(text)
    except (ValueError, RecursionError):
        return parse_object(line)
    if end == len(text) and type(value) is dict and text.count("{") + text.count("[") <= _FLAT:
        return value
    return parse_object(line)


# echelon writes no longer lines: a longer line is skipped.
_LONGEST = 4 << 20
_AT_ONCE = 64 << 20
# A reader recognises its file by so many bytes, which contain a time.
_COMPARED = 256
# Limits for a file that is read whole: its last bytes and records. A run of a million updates has fewer.
_MOST_BYTES = 512 << 20
_MOST_RECORDS = 4_000_000


class LineReader:
    """Follows a growing JSON-lines file: each call of `read` returns the records completed since the last call.

    A file that was replaced, or truncated and rewritten, is read from its beginning.

    Attributes:
        bad: lines so far that are not records.
        rest: the text after the last whole line.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path, self.bad, self.rest = path, 0, b""
        self._position, self._before, self._skips = 0, b"", False
        if from_end:
            with contextlib.suppress(OSError), open(open_file(path), "rb") as file:
                self._position = file.seek(0, os.SEEK_END)
                self._before = self._bytes_before(file)

    def read(self) -> list[dict[str, Any]]:
        """Read new lines.

        Returns:
            the records; empty if the file does not exist or cannot be read.
        """
        try:
            with open(open_file(self.path), "rb") as file:
                if self._is_another(file):
                    self._position, self._before, self._skips, self.rest = 0, b"", False, b""
                records = list(self.records_of(file))
                self._before = self._bytes_before(file)
                return records
        except OSError:
            return []

    def _is_another(self, file: IO[bytes]) -> bool:
        """Whether the text read so far is no longer in the file. Compares bytes, as not every file system keeps inode numbers."""
        return os.fstat(file.fileno()).st_size < self._position or not self._bytes_before(file).endswith(self._before)

    def _bytes_before(self, file: IO[bytes]) -> bytes:
        at = max(0, self._position - _COMPARED)
        return os.pread(file.fileno(), self._position - at, at)

    def records_of(self, file: IO[bytes], until: int | None = None) -> Iterator[dict[str, Any]]:
        """The records up to a position, or to the end."""
        file.seek(self._position)
        while chunk := file.read(_AT_ONCE if until is None else min(_AT_ONCE, max(0, until - self._position))):
            self._position += len(chunk)
            lines = (self.rest + chunk).split(b"\n")
            self.rest = lines.pop()
            if self._skips and lines:
                self._skips = False
                del lines[0]
            if len(self.rest) > _LONGEST:
                self.bad += not self._skips
                self.rest, self._skips = b"", True
            for line in lines:
                record = record_of(line) if len(line) <= _LONGEST else None
                if record is not None:
                    yield record
                else:  # two attempts may have written into one line
                    self.bad += 1

    @classmethod
    def of_end(cls, path: Path, most_bytes: int) -> LineReader:
        """A reader of a file that may be long, or not exist yet: it reads the last `most_bytes`, and all that follows."""
        reader = cls(path)
        with contextlib.suppress(OSError):
            reader.start_at(max(0, path.lstat().st_size - most_bytes))
        return reader

    def start_at(self, position: int) -> None:
        """Begin with the first whole line after this position."""
        self._position, self._skips = position, position > 0


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole records of a file, without a last line cut off by a kill. Empty if the file does not exist."""
    try:
        return list(survey(path)[0])
    except OSError:
        return []


def survey(path: str | os.PathLike[str]) -> tuple[Sequence[dict[str, Any]], list[str]]:
    """The whole records of a file, of a very large file the last ones, and notes on all that is left out.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    records: deque[dict[str, Any]] = deque(maxlen=_MOST_RECORDS)
    notes = survey_into(path, records.extend)
    if len(records) == _MOST_RECORDS:
        notes.append(f"only the last {_MOST_RECORDS} records were read.")
    return records, notes


def survey_into(path: str | os.PathLike[str], take: Callable[[Iterator[dict[str, Any]]], object]) -> list[str]:
    """As `survey`, for files whose records need not all be in memory: `take` gets an iterator over them.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    reader, notes = LineReader(Path(path)), []
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            reader.start_at(size - _MOST_BYTES)
            notes.append(f"it has {size} bytes, of which only the last {_MOST_BYTES} were read.")
        take(reader.records_of(file, size))  # without lines that are appended meanwhile
    if reader.rest:
        notes.append("the last line is not whole and was left out.")
    if reader.bad:
        notes.append(f"{reader.bad} unreadable {'line was' if reader.bad == 1 else 'lines were'} left out.")
    return notes
