"""Text without secrets, for what a run keeps: its command line, the errors of its ranks.

Taken out: the user and password of a URL, wherever it stands; the value of an option or variable whose name ends in key,
token, secret, password or credential, as in `--hf-token VALUE` and `WANDB_API_KEY=VALUE`. What a script itself prints is its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["redacted", "redacted_words"]

_HIDDEN = "***"
_USER_INFO = re.compile(r"(?<=://)[^/\s'\"<>]*@")
# The last part of a name: `--tokenizer`, `--tokens` and `--keys` are none.
_SECRET = re.compile(
    r"(?:[\w.-]*[_.-])?(?:api)?(?:key|token|secret|passw(?:or)?d|passphrase|credentials?)(?P<rest>=.*)?", re.I | re.S
)


def redacted(text: str) -> str:
    """`text` without the user and password of any URL in it."""
    return _USER_INFO.sub(f"{_HIDDEN}@", text)


def redacted_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, without URLs' users and the values of what is named as a secret."""
    shown, hide_next = [], False
    for word in words:
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
            hide_next = False
            continue
        named = _SECRET.fullmatch(word)
        hide_next = named is not None and named["rest"] is None and word.startswith("-")
        shown.append(f"{word.partition('=')[0]}={_HIDDEN}" if named is not None and named["rest"] else redacted(word))
    return shown
