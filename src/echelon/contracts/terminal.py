"""Text from files that somebody else may have written, made harmless for a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

# C0 but for newline and tab, DEL, C1, marks and overrides of the writing direction, separators of lines, halves of characters.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with a question mark for whatever would do more to a terminal than show itself; it can always be encoded."""
    return _UNSAFE.sub("?", text)
