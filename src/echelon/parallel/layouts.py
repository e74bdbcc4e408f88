"""The names of layouts (how ranks share a model and its samples) in one table, with other libraries' names.

A layout is a word such as "fsdp", axes such as "dp_shard=2,tp=4", or a frozen value with options, such as
`FSDPStrategy(blocks=[...])`. `resolve` turns each into a value; `in_words` gives the shortest text for a value.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from echelon.common.errors import LayoutError, require
from echelon.common.older_words import is_now
from echelon.parallel.composed import Layout
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.ddp.dp import DPStrategy
from echelon.parallel.ddp.local_sgd import DiLoCoStrategy, LocalSGDStrategy
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.strategy import NOOPStrategy, Strategy
from echelon.world.mesh import AXES

__all__ = ["LAYOUTS", "in_words", "is_word", "resolve", "with_options_of"]

# The words that users write and errors list.
LAYOUTS: dict[str, Callable[[], Strategy]] = {
    "none": NOOPStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": partial(FSDPStrategy, sharding_strategy="HYBRID_SHARD"),
    "zero1": partial(DDPStrategy, shard_optimizer=True),
    "zero2": partial(FSDPStrategy, reshard_after_forward=False),
    "local_sgd": LocalSGDStrategy,
    "diloco": DiLoCoStrategy,
}

# Older words and those of other libraries, with what they mean here.
ALIASES: dict[str, str | Callable[[], Strategy]] = {
    "dp": DPStrategy,  # DataParallel: one process
    **{axis: f"{axis}=-1" for axis in AXES},  # over all ranks
    **dict.fromkeys(("noop", "single_device"), "none"),
    **dict.fromkeys(("ddp_spawn", "ddp_fork", "ddp_notebook", "no_shard"), "ddp"),
    **dict.fromkeys(("fsdp2", "zero3", "fsdp_native", "full_shard", "fully_shard", "deepspeed_stage_3"), "fsdp"),
    **dict.fromkeys(("shard_grad_op", "ddp_sharded", "deepspeed_stage_2"), "zero2"),
    **dict.fromkeys(("hybrid_shard",), "hsdp"),
    **dict.fromkeys(("deepspeed_stage_1",), "zero1"),
    **{
        f"ddp{how}_find_unused_parameters_{unused}": partial(DDPStrategy, find_unused_parameters=unused == "true")
        for how in ("", "_spawn", "_fork", "_notebook")
        for unused in ("true", "false")
    },
}


def resolve(layout: Strategy | str | None) -> Strategy | None:
    """The value of a layout. None stays None: a module that is already parallel has its own layout.

    Raises:
        UsageError: an unknown word (the message lists the known ones), or invalid axes.
    """
    if layout is None or isinstance(layout, Strategy):
        return layout
    require(isinstance(layout, str), "layout", _known(), layout, kind=LayoutError)
    if "=" in layout or "," in layout:
        return Layout.parse(layout)
    entry = _entry(layout)
    if entry is None:
        near = difflib.get_close_matches(layout.lower(), [*LAYOUTS, *ALIASES], 1)
        raise LayoutError(f"layout must be {_known()}, got {layout!r}." + (f" Is it {near[0]!r}?" if near else ""))
    return resolve(entry) if isinstance(entry, str) else entry()


def is_word(text: Any) -> bool:
    """Whether the text is a layout's word; axes are not."""
    return isinstance(text, str) and _entry(text) is not None


def in_words(layout: Strategy) -> str:
    """The shortest text for a layout: the word or the axes that `resolve` to the same value, else its Python expression."""
    for word, make in LAYOUTS.items():
        if layout == make():
            return word
    return layout.text if isinstance(layout, Layout) and layout == Layout.parse(layout.text) else repr(layout)


def with_options_of(own: Strategy | None, given: Strategy) -> Strategy:
    """`given`, a layout named without options, with the options of the script's layout `own` if both are of one family.

    The options say what the model needs: that parameters stay unused, which modules are blocks, where to cut it into stages.
    """
    if isinstance(given, Layout) and isinstance(own, Layout):
        return own.but(**{axis: getattr(given, axis) for axis in (*AXES, "ep")})
    if isinstance(given, DDPStrategy) and isinstance(own, DDPStrategy):
        return own.but(shard_optimizer=given.shard_optimizer)
    if isinstance(given, FSDPStrategy) and isinstance(own, FSDPStrategy):
        how = ("sharding_strategy", "reshard_after_forward")
        return own.but(**{name: getattr(given, name) for name in how})
    return own if own is not None and type(own) is type(given) else given


def _entry(word: str) -> str | Callable[[], Strategy] | None:
    word = word.strip().lower().replace("-", "_")  # as torch's ShardingStrategy and command lines spell them
    return LAYOUTS.get(word) or ALIASES.get(word)


def _known() -> str:
    words = ", ".join(map(repr, LAYOUTS))
    return f"one of {words}, axes such as 'dp_shard=2,tp=4' or 'pp=4', or a value such as Layout(...) or FSDPStrategy(...)"


# Older names of layouts with options. Each returns the value that replaces it, and warns with that value.


L = TypeVar("L", bound=Strategy)


def Parallel(**options: Any) -> Layout:
    """`Layout(...)`."""
    return _told("Parallel", Layout(**options))


def TPStrategy(
    plan: Any = None, size: int | None = None, dp_replicate: int = 1, sequence_parallel: bool = False, fsdp: Any = None
) -> Layout:
    """`Layout(tp=size, ...)`; over all ranks without a size."""
    tp = -1 if size is None else size
    options: dict[str, Any] = {"plan": plan, "sequence_parallel": sequence_parallel, "fsdp": fsdp}
    return _told("TPStrategy", Layout(tp=tp, dp_replicate=dp_replicate, **options))


def HSDPStrategy(shard_size: int | None = None, replicate_size: int | None = None, **options: Any) -> Strategy:
    """`Layout(dp_replicate=..., dp_shard=..., fsdp=FSDPStrategy(...))`, or FSDPStrategy's own sizes."""
    if shard_size is None and replicate_size is None:
        return _told("HSDPStrategy", FSDPStrategy(sharding_strategy="HYBRID_SHARD", **options))
    copies = -1 if replicate_size is None else replicate_size
    fsdp = FSDPStrategy(**options)
    return _told("HSDPStrategy", Layout(dp_replicate=copies, dp_shard=shard_size, fsdp=fsdp))


def ZeROStrategy(stage: int = 1, **options: Any) -> Strategy:
    """`DDPStrategy(shard_optimizer=True)` for stage 1, FSDPStrategy for 2 and 3, with their options.

    Raises:
        UsageError: another stage.
    """
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise LayoutError(
            f"stage must be 1 (optimizer state), 2 (also gradients) or 3 (also parameters), got {stage!r}. "
            "Stage 0 is layout 'ddp'."
        )
    if stage == 1:
        return _told("ZeROStrategy", DDPStrategy(shard_optimizer=True, **options))
    return _told("ZeROStrategy", FSDPStrategy(reshard_after_forward=None if stage == 3 else False, **options))


def _told(name: str, made: L) -> L:
    is_now(f"{name}(...)", repr(made))
    return made
