"""The parts of the day, in their order. A part's own imports happen in its process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from bench.gpu.rows import Notes
from bench.gpu.runner import Part, Setting

__all__ = ["PARTS"]


def _call(module: str, setting: Setting, notes: Notes, **options: object) -> None:
    if setting.small:
        importlib.import_module("torch").set_num_threads(1)
    importlib.import_module(f"bench.gpu.{module}").run(setting, notes, **options)


def _of(module: str, **options: object) -> Callable[[Setting, Notes], None]:
    return partial(_call, module, **options)


# The most important first; each variant of the model (`speed.VARIANTS`) is a part of its own. The limits of the early parts leave
# time for the model.
MODELS = (
    "plain torch",
    "eager",
    "compiled",
    "compiled, chunked loss",
    "selective AC",
    "float8",
    "fsdp",
    "largest that fits",
    "full AC",
    "chunked loss",
    "memory budget",
)
PARTS = (
    Part("environment", _of("environment"), limit_s=60, needs_s=1),
    Part("tests", _of("marked"), limit_s=100),
    Part("waits", _of("waits"), limit_s=45),
    Part("two ranks", _of("two_ranks"), limit_s=55),
    Part("loop overhead", _of("overhead"), limit_s=50),
    Part("saves", _of("saves"), limit_s=40),
    Part("resume", _of("resume"), limit_s=60),
    *(Part(f"model: {name}", _of("speed", variant=name), limit_s=70, needs_s=15) for name in MODELS),
)
