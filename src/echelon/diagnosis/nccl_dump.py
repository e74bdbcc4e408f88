"""What NCCL's watchdog left before it ended a rank: torch's pickle of its last collectives. Unpickling runs no code.

On GPUs the launcher points torch at the run's folder, because a rank that the watchdog aborts can no longer answer. The format is
that of `_dump_fr_trace` in torch 2.13, which gloo's recorder also writes; the tests use that.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["environment", "record_in"]

_PLAIN = re.compile(
    r"APPENDS?|BINFLOAT|(LONG_)?BIN(GET|PUT)|BININT[12]?|(SHORT_)?BINUNICODE8?|EMPTY_(DICT|LIST|TUPLE)|FRAME|LONG1|MARK|MEMOIZE"
    r"|NEW(FALSE|TRUE)|NONE|PROTO|SETITEMS?|STOP|TUPLE[123]?"
)


def environment(dumps: Path) -> dict[str, str]:
    """Variables that make torch's watchdog write nccl.rankR into this folder, which must exist by then."""
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": str(dumps.absolute() / "nccl.rank")}


def record_in(content: bytes) -> dict[str, Any] | None:
    """A pickle of plain containers, for `flight.parse`; None for any other content.

    A pickle may refer to one text or list a million times: the caller limits what it reads of each entry.
    """
    try:
        _check(content)
        entries = _Plain(io.BytesIO(content)).load()["entries"]
    except Exception:  # malformed data may raise anything
        return None
    return {"entries": entries} if type(entries) is list and entries else None


def _check(content: bytes) -> None:
    """
    Raises:
        UnpicklingError: it makes more than plain containers, or uses memo numbers so high that the memo would fill the memory.
    """
    for code, argument, _ in pickletools.genops(content):
        if not _PLAIN.fullmatch(code.name) or (code.name.endswith("PUT") and int(argument or 0) > len(content)):
            raise pickle.UnpicklingError(f"no {code.name} here")


class _Plain(pickle.Unpickler):
    """Makes only dictionaries, lists, tuples, numbers and texts."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"no {module}.{name} here")
