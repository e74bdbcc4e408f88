"""torch.compile, block by block or whole: what it needs is asked for before the first batch.

A block is compiled by its `forward`, so that hooks (those of `fully_shard` gather and free its parameters) stay outside of the
graph, and repeated blocks share one. What changes how often: a graph is made for the first batch; one more, for any number of
rows or tokens, when another shape comes, as with the short last batch of an epoch; and likewise for evaluation. Blocks that
differ in a number (a `layer_idx` that their forward uses) have graphs of their own:
torch would give up after eight and go on without.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from echelon.common.errors import CompileError
from echelon.parallel.patching import replace

__all__ = ["Compiled", "check_backend", "compile_forward"]

# Graphs of a block: with gradients and without, of one shape and of any, and some more when an argument is sometimes left out.
_GRAPHS_OF_A_BLOCK = 8


def check_backend(backend: str | Callable[..., Any], device: torch.device) -> None:
    """
    Raises:
        UsageError: torch has no such backend; inductor without what it makes code with.
    """
    if not isinstance(backend, str):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise CompileError(
            f"the backend of torch.compile must be one of {', '.join(map(repr, sorted(known)))}, or a function, got {backend!r}. "
            "Is the package that has it installed?"
        )
    if backend != "inductor":
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise CompileError(
            "torch.compile's backend 'inductor' needs triton on a GPU, and it is not installed. Install the one of this torch "
            f"({torch.__version__}), or use backend='aot_eager', or compile=False."
        )
    compilers = [os.environ.get("CXX"), "g++", "clang++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers if name):
        raise CompileError(
            "torch.compile's backend 'inductor' needs a C++ compiler on a CPU, and there is no g++ or clang++. Install one, name "
            "yours in CXX, or use backend='aot_eager', or compile=False."
        )


def compile_forward(blocks: Sequence[nn.Module], options: dict[str, Any]) -> None:
    """Compile each block's `forward`, in place; those that are compiled already are left alone.

    Args:
        options: of torch.compile.
    """
    options = {**options, "recompile_limit": _GRAPHS_OF_A_BLOCK * max(1, len(blocks))}
    for block in blocks:
        if not isinstance(block.forward, Compiled):
            replace(block, "forward", "compile", Compiled(block.forward, options))


class Compiled:
    """The `forward` of a block that is compiled. A class, so that the module can still be copied and pickled."""

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]) -> None:
        self._forward, self._options = forward, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        limit, rest = self._options["recompile_limit"], {k: v for k, v in self._options.items() if k != "recompile_limit"}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            rest["recompile_limit"] = limit
        else:  # before torch 2.13
            config: Any = torch._dynamo.config
            config.recompile_limit = max(limit, config.recompile_limit)
        made: Callable[..., Any] = torch.compile(self._forward, **rest)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"_forward": self._forward, "_options": self._options}
