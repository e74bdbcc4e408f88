"""Run folders as a run would have left them, for what reads them, and pages taken apart."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from echelon.contracts.events import encode
from echelon.contracts.run_dir import RunDir
from echelon.observe import report

START = 1_760_000_000.0


@contextlib.contextmanager
def recorded(folder: str | Path) -> Iterator[RunDir]:
    """What is trained within on this rank has this run folder, which rank 0 makes."""
    run = RunDir(Path(folder))
    with pytest.MonkeyPatch.context() as patch:
        if not dist.is_initialized() or dist.get_rank() == 0:
            run.at_attempt(0)
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        yield run


class Page(HTMLParser):
    """A page taken apart as a browser would: elements with attributes, text by element, data of the charts."""

    VOID = frozenset({"meta", "br", "img", "input", "link", "base", "embed"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], "elements that were never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        """Elements and names of attributes: what markup there is, whatever the texts say."""
        return [(tag, tuple(attrs)) for tag, attrs in self.elements]

    def text(self) -> str:
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    def facts(self) -> dict[str, Any]:
        """What the page's script draws; nothing on a page without charts."""
        found = [json.loads(text) for tag, text in self.texts if tag == "script" and text.startswith('{"updates"')]
        return found[0] if found else {"charts": [], "marks": []}

    def charts(self) -> list[dict[str, Any]]:
        return list(self.facts()["charts"])


def training(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "update": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_s": 5e4,
        "time": START + step,
    } | more


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "time": START + step}


def make_run(
    folder: Path,
    metrics: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[Mapping[str, Any] | None] = ({"exit_code": 0, "first_failure": None, "started": START, "ended": START + 90},),
    events: Sequence[Mapping[str, Any]] = (),
    **about: Any,
) -> RunDir:
    """A run folder with one attempt for each of `ends`; None is an attempt without exit.json. `events` are the last attempt's."""
    run = RunDir(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    run.checkpoints.mkdir(exist_ok=True)
    run.run_json.write_text(json.dumps({"name": "nano", "ranks": 2, "launcher": "local", "command": ["train.py"]} | about))
    run.metrics.write_text("".join(encode(r) + "\n" for r in metrics))
    for n, end in enumerate(ends):
        there = run.at_attempt(n)
        if end is not None:
            there.exit_json.write_text(json.dumps(end))
        there.events(0).write_text("".join(encode(e) + "\n" for e in events) if n == len(ends) - 1 else "")
    return run


def page_of(run: RunDir) -> Page:
    return Page(report.render(run))


PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</title></style></pre><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="',
    "' onfocus='alert(1)' autofocus='",
    "<!--<script>",
    "]]><svg/onload=alert(1)>",
    "<a href='https://evil.example/'>x</a>",
    '{"</script>": "&lt;b&gt;"}',
    "\u2028\u2029</script\n><iframe src=//evil.example>",
    "&#60;script&#62;&lt;",
    "{style}{0}%s\\u003cb\\x3e",
    "\ud800<b>\x00\x1b]0;x\x07",
]


def times(run: RunDir, attempt: int, rank: int, *records: dict[str, Any]) -> None:
    run.at_attempt(attempt).times(rank).write_text("".join(encode(r) + "\n" for r in records))


def stretch(first: int, last: int, **parts: float) -> dict[str, Any]:
    """A record of steps that take so many seconds each."""
    spent = {f"{name}_s": (last - first) * each for name, each in parts.items()}
    return {"steps": [first, last], "wall_s": sum(spent.values()), **spent, "line": "train.py:41 in load", "host": "node1"}


def begun(total: int, step: int = 0) -> dict[str, Any]:
    return {"event": "train_start", "total_steps": total, "step": step, "time": START}
