"""torchtnt.utils.loggers.json."""

from __future__ import annotations

import json
import os

from echelon.common.errors import UsageError
from echelon.common.files import write_whole
from echelon.compat.torchtnt.utils.loggers.file import FileLogger
from echelon.contracts.events import encode

__all__ = ["JSONLogger"]


class JSONLogger(FileLogger):
    """A JSON array with one object a step; complete JSON after every write. inf and nan are the strings "inf", "-inf", "nan"."""

    def _check(self) -> None:
        if self._path.exists() and self._path.stat().st_size:
            try:
                whole = isinstance(json.loads(self._path.read_text(encoding="utf-8")), list)
            except ValueError:
                whole = False
            if not whole:
                raise UsageError(
                    f"{self._path} exists, and is not a JSON array, so this logger did not write it. Choose another path."
                )

    def _without_last(self, text: str) -> str:
        before = text[: text.rindex("{")].rstrip(",\n")
        return "[]\n" if before == "[" else f"{before}\n]\n"

    def _append(self, rows: list[dict[str, float]]) -> None:
        text = ",\n".join(encode(row) for row in rows)
        size = self._path.stat().st_size if self._path.exists() else 0
        if size <= len("[]\n"):
            write_whole(self._path, f"[\n{text}\n]\n", 0o666)
            return
        with open(self._path, "rb+") as file:
            file.seek(-min(size, 8), os.SEEK_END)
            tail = file.read()
            file.seek(tail.rindex(b"]") - len(tail), os.SEEK_END)
            # The bracket is written over by the same call that writes the next one.
            os.pwrite(file.fileno(), f",\n{text}\n]\n".encode(), file.tell())
