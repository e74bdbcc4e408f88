"""Docstrings describe arguments that belong together in one entry, `max_epochs, max_updates:`; the site gives each its own."""

from __future__ import annotations

import re
from typing import Any

import griffe

_TOGETHER = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:,\s+\w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE)


class Apart(griffe.Extension):
    """Writes the entry once for each of its names, so that griffe finds its type and can refuse a name that is not there."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _TOGETHER.sub(_apart, obj.docstring.value)


def _apart(found: re.Match[str]) -> str:
    return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in re.split(r",\s+", found["names"]))
