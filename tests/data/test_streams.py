"""Standard output and error that are closed, None, or objects of a notebook, a logger, a test: no training ends for them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

import echelon as ech
from echelon.common.terminal import is_terminal, say
from echelon.common.traces import print_uncaught
from echelon.observe.sinks.progress import ProgressSink
from tests.kit.models import batch
from tests.kit.units import Regression


class Tee:
    """As many write it: without isatty, and sometimes without flush."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the logger behind this stream has gone")


class Notebook(io.StringIO):
    def isatty(self) -> bool:
        return True


class Silent:
    """Of a terminal, as far as it says."""

    isatty: Any = None

    def write(self, text: str) -> None:
        raise OSError(5, "Input/output error")


def _closed() -> Any:
    made = io.StringIO()
    made.close()
    return made


STREAMS: dict[str, Callable[[], Any]] = {
    "tee": Tee,
    "broken": Broken,
    "notebook": Notebook,
    "silent": Silent,
    "closed": _closed,
    "none": lambda: None,
    "bytes": io.BytesIO,
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_training_ends_well_whatever_stands_for_the_terminal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, STREAMS[kind]())
    unit = Regression()
    say("hällo")
    ech.train(unit, [batch(4, seed=1)] * 3, max_epochs=1)
    error = ValueError("of the script, in ä")
    print_uncaught(ValueError, error, None)
    monkeypatch.undo()
    assert unit.train_progress.num_steps_completed == 3


@pytest.mark.parametrize("kind", STREAMS)
def test_progress_is_drawn_on_whatever_takes_text(kind: str) -> None:
    stream = STREAMS[kind]()
    sink = ProgressSink(stream or _closed())
    sink.event({"event": "train_start", "total_steps": 2, "step": 0})
    sink.records([{"step": 1, "loss": 2.0, "time": 1.0}])
    sink.event({"event": "checkpoint_saved", "path": "runs/ä/step-1"})
    sink.close()
    takes = {
        "tee": lambda: stream.text,
        "notebook": lambda: stream.getvalue(),
        "ascii": lambda: stream.buffer.getvalue().decode(),
    }
    assert kind not in takes or "training from update 0 of 2" in takes[kind]()
    assert is_terminal(stream) == (kind == "notebook")
