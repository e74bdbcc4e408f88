"""Verdicts as text for a terminal and as values for a program."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from echelon.common.terminal import one_line
from echelon.diagnosis.evidence import Evidence
from echelon.diagnosis.verdict import Verdict

__all__ = ["as_json", "paragraph", "text"]

_WIDTH = 120
_SHOWN_ATTEMPTS = 50


def paragraph(verdict: Verdict) -> str:
    """The paragraph as `echelon run` shows it below the error."""
    return one_line(verdict.paragraph)


def text(attempts: Sequence[tuple[Evidence, Verdict]]) -> str:
    """All attempts of a run, the latest in full."""
    lines = []
    if len(attempts) > _SHOWN_ATTEMPTS:
        lines.append(f"{len(attempts) - _SHOWN_ATTEMPTS} earlier attempts are not shown; --attempt N shows one of them.")
    for evidence, verdict in attempts[-_SHOWN_ATTEMPTS:-1]:
        lines.append(_wrapped(f"attempt {evidence.attempt}: {verdict.headline}."))
    evidence, verdict = attempts[-1]
    first = f"attempt {evidence.attempt}: " if len(attempts) > 1 or evidence.attempt else ""
    lines.append(_wrapped(first + verdict.paragraph))
    return "\n".join([*lines, *(_wrapped(each, "  ") for each in verdict.seen)])


def _wrapped(line: str, indent: str = "") -> str:
    return textwrap.fill(
        one_line(line),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(attempts: Sequence[tuple[Evidence, Verdict]]) -> list[dict[str, Any]]:
    """For each attempt: its number, exit code, cause, guilty ranks and sentences."""
    return [
        {
            "attempt": evidence.attempt,
            "exit_code": evidence.exit_code,
            "running": evidence.running,
            "world_size": evidence.world_size,
            "cause": verdict.cause,
            "guilty": list(verdict.guilty),
            "headline": verdict.headline,
            "paragraph": verdict.paragraph,
            "seen": list(verdict.seen),
        }
        for evidence, verdict in attempts
    ]
