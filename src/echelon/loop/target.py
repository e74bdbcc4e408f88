"""The target of `prove` or `plan`: an unchanged script, or two functions."""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from echelon.common.machine import DEVICE_VARIABLE
from echelon.contracts.overrides import Overrides, impose
from echelon.loop.reporting.reporting import Observer, observing
from echelon.loop.run import train
from echelon.world.init import init_from_env

__all__ = ["Enough", "Target"]


class Enough(BaseException):
    """Raised by the observer of a script when it has seen enough."""


@dataclass(frozen=True)
class Target:
    """A script with its arguments, or two functions.

    Args:
        script: path of a Python file that calls `train` or `fit`.
        args: its command line.
        make_unit, make_data: in place of a script: functions that make the unit and its loader.
        device: "cpu" or "cuda", whatever the script says; None leaves the choice to the script.
    """

    script: str = ""
    args: Sequence[str] = ()
    make_unit: Callable[[], Any] | None = None
    make_data: Callable[[], Any] | None = None
    device: str | None = None

    def run(self) -> None:
        if self.device is not None:
            os.environ[DEVICE_VARIABLE] = self.device
        if self.make_unit is not None and self.make_data is not None:
            init_from_env()
            train(self.make_unit(), self.make_data(), max_epochs=10**6)
            return
        path = Path(self.script).resolve()
        sys.argv = [self.script, *self.args]
        sys.path.insert(0, str(path.parent))
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", str(path))
        main.__dict__.update(__file__=str(path), __builtins__=builtins, __cached__=None, __loader__=loader, __annotations__={})
        sys.modules["__main__"] = main
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)

    def run_until_enough(self, overrides: Overrides, observer: Observer) -> None:
        """Run the target under `overrides`, with `observer` watching, until the observer raises `Enough` or the target ends."""
        impose(overrides)
        try:
            with observing(observer):
                self.run()
        except Enough:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        finally:
            impose(None)
