"""What was run, where and with what; for several runs, the differences."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from echelon.common.redact import redacted_words
from echelon.contracts.run_dir import RunDir
from echelon.observe.columns import number
from echelon.observe.facts import get, word
from echelon.observe.report.runs import RunOnPage
from echelon.observe.report.text import NONE, safe, table, when

__all__ = ["differences", "run_table"]

_MOST = 200  # most rows of settings
_DEEPEST = 4
# Fields that differ between any two runs.
_NO_SETTING = {"name", "started", "command", "planned"}


def run_table(run: RunDir, about: Mapping[str, object]) -> str:
    """The table of run.json's facts."""
    words = _words(about.get("command"))
    versions, commit, dirty = about.get("versions"), word(get(about, "git", "commit")), get(about, "git", "dirty")
    state = {True: ", with uncommitted changes", False: ", clean"}.get(dirty, "") if isinstance(dirty, bool) else ""
    facts: list[tuple[str, str | None]] = [
        ("command", shlex.join(words) if words else word(about.get("command"))),
        ("script", word(about.get("script"))),
        ("host", word(about.get("host"))),
        *((str(name), word(version)) for name, version in list(versions.items() if isinstance(versions, dict) else ())[:20]),
        ("git", f"{commit}{state}" if commit else None),
        ("launcher", word(about.get("launcher"))),
        ("ranks", word(about.get("ranks"))),
        ("started", when(number(about.get("started")))),
        ("folder", str(run.path)),
    ]
    return table("Run", [], [[name, "unknown" if value is None else value] for name, value in facts], "")


def differences(runs: Sequence[RunOnPage]) -> str:
    """The settings and the environment in which the runs differ: one row each, with every run's value."""
    settings = [_flat(each.facts.about) for each in runs]
    names = list(dict.fromkeys(name for of_run in settings for name in of_run))
    differ = [name for name in names if len({of_run.get(name) for of_run in settings}) > 1]
    if not differ:
        return '<section><h2>Differences</h2><p class="none">Command, versions and code of these runs are the same.</p></section>'
    head = "".join(f'<th class="run r{each.number % 8}">{safe(each.label, 60)}</th>' for each in runs)
    rows = [
        f'<tr><th scope="row">{safe(name, 60)}</th>'
        + "".join(f"<td>{safe(of_run.get(name, NONE), 300)}</td>" for of_run in settings)
        + "</tr>"
        for name in differ[:_MOST]
    ]
    cut = "" if len(differ) <= _MOST else f"; {_MOST} of {len(differ)} shown"
    under = f'<p class="none">{len(names) - len(differ)} other settings are the same{cut}.</p>'
    made = f'<table class="rows"><thead><tr><th></th>{head}</tr></thead>{"".join(rows)}</table>'
    return f'<section><h2>Differences</h2><div class="scroll" tabindex="0">{made}</div>{under}</section>'


def _words(command: object) -> list[str] | None:
    # Redacted again, since an earlier version may have written the file.
    return redacted_words([word(part) or "?" for part in command]) if isinstance(command, list) else None


def _flat(about: Mapping[str, object]) -> dict[str, str]:
    """Settings under flat names: versions.torch, and the script's options under their own names."""
    settings: dict[str, str] = {}
    for name, value in about.items():
        if name == "args":
            settings |= _options(_words(value) or [])
        elif name not in _NO_SETTING:
            _flatten(str(name), value, settings, _DEEPEST)
    return settings


def _flatten(name: str, value: object, settings: dict[str, str], levels: int) -> None:
    if isinstance(value, Mapping) and levels:
        for key, each in value.items():
            _flatten(f"{name}.{key}", each, settings, levels - 1)
    elif len(settings) < 10 * _MOST:
        settings[name] = "none" if value is None else str(value)


def _options(words: Sequence[str]) -> dict[str, str]:
    """--lr 0.1 --fast a.txt: options by name, other words by position."""
    options: dict[str, str] = {}
    place, at = 0, 0
    while at < len(words):
        name, sign, value = words[at].partition("=")
        at += 1
        if not name.startswith("-") or not name.strip("-"):
            place += 1
            options[f"argument {place}"] = words[at - 1]
        elif sign:
            options[name] = value
        elif at < len(words) and not words[at].startswith("--"):
            options[name] = words[at]
            at += 1
        else:
            options[name] = "given"
    return options
