"""Strict parsing of untrusted JSON: whatever does not have the expected form raises `Wrong`.

Works without torch. The reader of a file adds its name when it turns `Wrong` into a CheckpointError.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from typing import Any

from echelon.common.files import is_deeper

__all__ = [
    "DEPTH",
    "JSON_BYTES",
    "Wrong",
    "check_depth",
    "check_size",
    "fits",
    "listing",
    "loads",
    "mapping",
    "number",
    "short",
    "text",
    "whole",
]

# Limits of one JSON text in a checkpoint, and of its values. A value takes up to a hundred bytes of memory and may be written
# in two: a text of such values would take fifty times its size. 8,192 ranks and 400 tensors need a third of the limits.
JSON_BYTES = 512 << 20
JSON_VALUES = 1 << 26
# Limit of nested lists and objects, when reading and when writing.
DEPTH = 200


class Wrong(ValueError):
    """Content that cannot be right. The text says what is wrong, without the file's name."""


def loads(data: bytes | str) -> Any:
    """Parse a JSON text in which no object has a name twice.

    Raises:
        Wrong: it is no such text, is nested too deeply, or exceeds the limits of `check_size`.
    """
    check_size(data)
    try:
        return json.loads(data if isinstance(data, str) else data.decode(), object_pairs_hook=_object)
    except Wrong:
        raise
    except RecursionError:
        raise Wrong("its JSON is nested too deeply") from None
    except (ValueError, MemoryError) as error:
        raise Wrong(f"it is not JSON: {error}") from None


def check_size(data: bytes | str, values: int = JSON_VALUES) -> None:
    """Check the size of a JSON text before it is parsed, which takes memory, or written.

    Raises:
        Wrong: it has too many bytes or values.
    """
    if len(data) > JSON_BYTES:
        raise Wrong(f"it must be at most {JSON_BYTES} bytes of JSON, got {len(data)}")
    marks = (b",", b":", b"[", b"{") if isinstance(data, bytes) else (",", ":", "[", "{")
    if len(data) > values and (count := sum(map(data.count, marks))) > values:  # type: ignore[arg-type]
        raise Wrong(f"it must hold at most {values} values of JSON, got about {count}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = Counter(name for name, _ in pairs)
        raise Wrong(f"{short(names.most_common(1)[0][0])} comes twice")
    return made


def check_depth(value: Any) -> None:
    """Check how deeply a JSON value is nested.

    Raises:
        Wrong: it is nested deeper than DEPTH.
    """
    if is_deeper(value, DEPTH):
        raise Wrong(f"its JSON is nested deeper than {DEPTH} levels")


def fits(value: Any, form: Any) -> bool:
    """Whether a value has a form. A form is a type; `[form]`: a list whose items have that form; `(form, form)`: a list of that
    length; `{str: form}`: an object whose values have that form; `{"name": form, ...}`: an object with at least these names.
    """
    if isinstance(form, list):
        return isinstance(value, (list, tuple)) and all(fits(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return isinstance(value, (list, tuple)) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, dict):
        named = form if str not in form or not isinstance(value, dict) else dict.fromkeys(value, form[str])
        return isinstance(value, dict) and all(name in value and fits(value[name], each) for name, each in named.items())
    return isinstance(value, form) and (form is bool or not isinstance(value, bool))


def whole(value: Any, what: str, most: int = 2**63 - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Wrong(f"{what} must be a whole number from 0 to {most}, got {short(value)}")
    return value


def number(value: Any, what: str, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise Wrong(f"{what} must be a number from {least:g} to {most:g}, got {short(value)}")
    return float(value)


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Wrong(f"{what} must be a string, got {short(value)}")
    return value


def listing(value: Any, what: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise Wrong(f"{what} must be a list{f' of {length}' if length is not None else ''}, got {short(value)}")
    return value


def mapping(value: Any, what: str, names: set[str] | None = None) -> dict[str, Any]:
    """A value that must be an object.

    Args:
        names: exactly those that it must have.
    """
    if not isinstance(value, dict) or (names is not None and value.keys() != names):
        shown = f" with {', '.join(sorted(names))}" if names is not None else ""
        raise Wrong(f"{what} must be an object{shown}, got {short(value)}")
    return value


def short(value: Any) -> str:
    """A value in few characters, none of which controls a terminal."""
    return reprlib.repr(value)
