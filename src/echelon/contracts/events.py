"""Events: one JSON object a line, appended to a file. Everything that watches a run reads these lines and nothing else.

Two kinds of files use the form. `events.rankN.jsonl` holds what happened (`{"event": "train_start", "time": ..., ...}`).
`metrics.jsonl` holds numbers: training records `{"step", "update", "loss", "lr", "grad_norm", "<unit>_per_s", "time"}` and
evaluation records `{"step", "eval_loss", "time"}`. `time` is seconds since the epoch. A training record also has
`"<unit>_per_s_per_device"` with several ranks, `"mfu"` from 0 to 1 where the device's peak and the model's FLOPs are known, and
once a second `"memory_peak_bytes", "memory_reserved_bytes", "alloc_retries"` of rank 0's GPU, or `"host_memory_bytes"` of its
process on a CPU. What `state.log` was given stands in the same records by its name, that of an evaluation with `eval_` before it.
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

# Bytes of lines that wait for a disk to have room again.
_KEPT = 4 << 20


# Made once: json.dumps with options makes an encoder for every call.
_strict = json.JSONEncoder(allow_nan=False, default=str)


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON. inf and nan become the strings "inf", "-inf", "nan": JSON has no such numbers."""
    try:
        return _strict.encode(record)
    except ValueError:
        return _strict.encode(_finite(record))


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    """A line each. All are encoded at once, in two thirds of the time, if no text holds what separates them."""
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
        self._file: IO[bytes] | None = open(open_to_append(path, 0o666), "ab", buffering=0)

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
            self._owed += _lines(records).encode()
        try:
            while self._owed:  # a disk that becomes full takes a part
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
_FLAT = 64  # so many brackets are no deep nesting, whatever their order


def record_of(line: bytes) -> dict[str, Any] | None:
    """As `parse_object`, in half of its time for a line as we write it: a report reads a million of them."""
    try:
        text = line.decode()
        value, end = _scan(text)
    except (ValueError, RecursionError):
        return parse_object(line)
    if end == len(text) and type(value) is dict and text.count("{") + text.count("[") <= _FLAT:
        return value
    return parse_object(line)


# No line of ours is longer: such a line is left out.
_LONGEST = 4 << 20
_AT_ONCE = 64 << 20
# By so many bytes, which hold a time, a reader knows its file again.
_COMPARED = 256
# Of a file that is read whole: its last so many bytes and records. A run of a million updates has fewer.
_MOST_BYTES = 512 << 20
_MOST_RECORDS = 4_000_000


class LineReader:
    """Follows a growing JSON-lines file: each call of `read` gives the records that were completed since the last.

    A file that was replaced, or cut and written again, is read from its beginning.

    Attributes:
        bad: lines so far that are no records.
        rest: what follows the last whole line.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path, self.bad, self.rest = path, 0, b""
        self._position, self._before, self._skips = 0, b"", False
        if from_end:
            with contextlib.suppress(OSError), open(open_file(path), "rb") as file:
                self._position = file.seek(0, os.SEEK_END)
                self._before = self._bytes_before(file)

    def read(self) -> list[dict[str, Any]]:
        """
        Returns:
            the records; none if there is no such file, or none that can be read.
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
        """Whether what was read is not in the file any more. Its bytes say so: not every file system keeps a file's number."""
        return os.fstat(file.fileno()).st_size < self._position or not self._bytes_before(file).endswith(self._before)

    def _bytes_before(self, file: IO[bytes]) -> bytes:
        at = max(0, self._position - _COMPARED)
        return os.pread(file.fileno(), self._position - at, at)

    def records_of(self, file: IO[bytes], until: int | None = None) -> Iterator[dict[str, Any]]:
        """The records up to a position, or the end."""
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
                else:  # two attempts may have met in the middle of a line
                    self.bad += 1

    @classmethod
    def of_end(cls, path: Path, most_bytes: int) -> LineReader:
        """Of a file that may be long, or not there yet: its last so many bytes, and what comes."""
        reader = cls(path)
        with contextlib.suppress(OSError):
            reader.start_at(max(0, path.lstat().st_size - most_bytes))
        return reader

    def start_at(self, position: int) -> None:
        """Begin with the first whole line after this position."""
        self._position, self._skips = position, position > 0


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole records of a file; a last line cut off by a kill is left out. An absent file has none."""
    try:
        return list(survey(path)[0])
    except OSError:
        return []


def survey(path: str | os.PathLike[str]) -> tuple[Sequence[dict[str, Any]], list[str]]:
    """The whole records of a file, of a very large one the last, and a few words on everything that is not among them.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    records: deque[dict[str, Any]] = deque(maxlen=_MOST_RECORDS)
    notes = survey_into(path, records.extend)
    if len(records) == _MOST_RECORDS:
        notes.append(f"only the last {_MOST_RECORDS} records were read.")
    return records, notes


def survey_into(path: str | os.PathLike[str], take: Callable[[Iterator[dict[str, Any]]], object]) -> list[str]:
    """As `survey`, for a file whose records need not all be in memory: `take` is given them one after the other.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    reader, notes = LineReader(Path(path)), []
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            reader.start_at(size - _MOST_BYTES)
            notes.append(f"it has {size} bytes, of which only the last {_MOST_BYTES} were read.")
        take(reader.records_of(file, size))  # not what comes meanwhile, without end
    if reader.rest:
        notes.append("the last line is not whole and was left out.")
    if reader.bad:
        notes.append(f"{reader.bad} unreadable {'line was' if reader.bad == 1 else 'lines were'} left out.")
    return notes
