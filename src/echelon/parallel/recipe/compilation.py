"""torch.compile, block by block or for the whole module.

A block's `forward` is compiled, so that hooks (those of `fully_shard` gather and free its parameters) stay outside of the graph,
and repeated blocks share one graph. torch makes a graph for the first batch; one more, for any number of rows or tokens, when the
shape changes, as with the short last batch of an epoch; and likewise for evaluation. Blocks that differ in a number (a
`layer_idx` that their forward uses) have separate graphs: so the recompile limit is raised, since torch would stop compiling
after eight.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from echelon.common.arguments import flags_of, several
from echelon.common.errors import CompileError, require
from echelon.parallel.patching import replace
from echelon.parallel.recipe.blocks import blocks_to_shard

__all__ = ["Compile", "Compiled", "TorchCompileParams", "compile_in_place", "keeping_random", "may_draw"]

logger = logging.getLogger(__name__)

# Graphs of a block: with and without gradients, for one shape and for any, and some more if an argument is sometimes left out.
_GRAPHS_OF_A_BLOCK = 8


@dataclass(frozen=True)
class TorchCompileParams:
    """`torch.compile`'s options. The module is compiled in place, so its parameter names stay.

    Args:
        recursive_module_types: compile the submodules of these classes, or class names, one by one instead of the whole module;
            faster to compile if a block is repeated.
        blocks: compile the forward of each repeated block of the model; the whole module if no blocks repeat.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    recursive_module_types: Collection[str | type[nn.Module]] = field(default_factory=tuple)
    blocks: bool = False

    def __post_init__(self) -> None:
        flags_of(self, kind=CompileError)
        kinds, what = self.recursive_module_types, "a list of classes or their names"
        kinds = several("recursive_module_types", kinds, what, lambda one: isinstance(one, str | type), kind=CompileError)
        object.__setattr__(self, "recursive_module_types", kinds)
        if self.blocks and kinds:
            raise CompileError("blocks and recursive_module_types both choose what is compiled. Give one of them.")

    @classmethod
    def of(cls, value: Any, option: str) -> TorchCompileParams | None:
        """From "blocks", True (the whole module), False or None (nothing), or a TorchCompileParams.

        Raises:
            UsageError: anything else. Names `option`.
        """
        if isinstance(value, cls) or value is None or value is False:
            return value or None
        require(
            value is True or value == "blocks",
            option,
            "'blocks', True, False or TorchCompileParams(...)",
            value,
            kind=CompileError,
        )
        return cls(blocks=value == "blocks")


Compile = TorchCompileParams | bool | Literal["blocks"] | None


def compile_in_place(module: nn.Module, params: TorchCompileParams, memory_budget: float | None) -> nn.Module:
    """Compile the module, or its chosen parts, in place, and return it.

    Args:
        memory_budget: see `within_budget`.
    """
    options: dict[str, Any] = {name: getattr(params, name) for name in ("fullgraph", "dynamic", "backend", "mode", "options")}
    options = within_budget(options, memory_budget)
    blocks = [block for _, block in blocks_to_shard(module)] if params.blocks else []
    if blocks:
        compile_forward(blocks, options)
        return module
    kinds = params.recursive_module_types
    names = {k for k in kinds if isinstance(k, str)}
    classes = tuple(k for k in kinds if isinstance(k, type))
    targets = [m for m in module.modules() if type(m).__name__ in names or isinstance(m, classes)] if kinds else [module]
    for target in targets:
        target.compile(**options)
    return module


def compile_forward(blocks: Sequence[nn.Module], options: dict[str, Any]) -> None:
    """Compile each block's `forward` in place; compiled ones are left alone.

    Args:
        options: options of torch.compile.
    """
    options = {**options, "recompile_limit": _GRAPHS_OF_A_BLOCK * max(1, len(blocks))}
    for block in blocks:
        if not isinstance(block.forward, Compiled):
            replace(block, "forward", "compile", Compiled(block.forward, options))


class Compiled:
    """A block's compiled `forward`. A class, so that the module can still be copied and pickled."""

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


# The memory budget of compiled graphs: which fraction of its activations each graph keeps, and which ones it must keep.
#
# torch's partitioner recomputes activations that do not fit. With a budget below 1 it may recompute an operator that draws random
# numbers: the backward pass would then use another dropout mask than the forward pass (seen with torch 2.13). So results of such
# operators are always kept. Under inductor each gets a mark. Other backends offer no step between tracing and partition, so they
# get the full budget, under which torch recomputes no random operator.

# At exactly 0, torch keeps a graph's inputs and looks at nothing else.
_LEAST = 1e-9

# Operators of other libraries, such as an attention with dropout, seldom declare whether they draw random numbers.
_SAYS_IF_RANDOM = frozenset({"aten", "prims", "prim", "inductor", "inductor_prims", "c10d", "_c10d_functional", "quantized"})


def within_budget(options: dict[str, Any], budget: float | None) -> dict[str, Any]:
    """Options of torch.compile under which graphs keep at most this fraction of their activations and recompute the rest.

    In torch the budget is a process-wide setting that is read while a graph is made. It is set only for that time.

    Args:
        budget: the fraction; None for the process-wide setting.
    """
    import torch._functorch.config as config

    part = float(config.activation_memory_budget) if budget is None else budget
    if budget is None and part == 1:
        return options
    if options["backend"] != "inductor" and part < 1:
        name = getattr(options["backend"], "__name__", options["backend"])
        logger.warning(
            "memory_budget has no effect under torch.compile's backend %r: only 'inductor' can keep the same random numbers", name
        )
        part = 1.0
    return {
        **options,
        "backend": _Budget(options["backend"], part, options["mode"], options["options"]),
        "mode": None,
        "options": None,
    }


class _Budget:
    """A backend of torch.compile that makes graphs under a memory budget."""

    def __init__(self, backend: str | Callable[..., Any], budget: float, mode: str | None, options: Any) -> None:
        self._backend, self._budget, self._mode, self._options = backend, budget, mode, options

    def __call__(self, graph: Any, inputs: Any, **more: Any) -> Any:
        import torch._functorch.config as config

        settings: dict[str, Any] = {"activation_memory_budget": max(self._budget, _LEAST)}
        if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):  # in graphs over DTensors: meshes, which hold no tensors
            settings["unsafe_treat_script_objects_as_zero_size"] = True
        with config.patch(settings):
            return self._make()(graph, inputs, **more)

    def _make(self) -> Callable[..., Any]:
        if not isinstance(self._backend, str):
            return self._backend
        if self._backend != "inductor":
            made: Callable[..., Any] = torch._dynamo.lookup_backend(self._backend)
            return made
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(self._mode) if self._mode else {}), **(self._options or {})}
        patches["joint_custom_post_pass"] = keeping_random()(patches.get("joint_custom_post_pass"))
        return functools.partial(compile_fx, config_patches=patches)


def may_draw(operator: Any) -> bool:
    """Whether the operator may draw random numbers."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in operator.tags or operator.namespace not in _SAYS_IF_RANDOM


@functools.cache
def keeping_random() -> type:
    """The class of a pass over inductor's joint graph that keeps random results. A function, to import inductor only if used."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeepRandom(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        """
        Args:
            before: the user's own pass or passes, which run first.
        """

        def __init__(self, before: Any) -> None:
            self._before: Sequence[Any] = before if isinstance(before, list | tuple) else () if before is None else (before,)

        def __call__(self, graph: Graph) -> None:
            for each in self._before:
                each(graph)
            for node in graph.nodes:
                _keep(node)

        def uuid(self) -> Any:
            """Part of the key of torch's cache of compiled graphs; None, if one of the user's passes has none, disables it."""
            theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before]
            return None if None in theirs else ("echelon: random operators are kept", *theirs)

    return KeepRandom


def _keep(node: Node) -> None:
    # Nodes that the user's own activation checkpointing recomputes are marked already, and torch replays their random numbers.
    if node.op == "call_function" and "recompute" not in node.meta and may_draw(node.target):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
