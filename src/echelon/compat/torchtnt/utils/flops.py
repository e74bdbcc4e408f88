"""torchtnt.utils.flops, on torch's FlopCounterMode, with its own record of the submodule that an operation belongs to.

torch's tracker credits a submodule that returns its own input, such as a dropout of 0, with the backward pass of what came
before it, and loses some of the backward pass of a module that is called twice. Here each node of autograd's graph is marked
with the submodules that were running when it was made.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import FlopCounterMode

from echelon.parallel.gradients.clip import graph
from echelon.world.device import map_tensors

__all__ = ["FlopTensorDispatchMode", "counter_of"]

_MARK = "echelon.parts"


class _Parts:
    """The submodules that are running; replaces `FlopCounterMode.mod_tracker`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._called: list[str] = []
        self._given: list[set[Node]] = []  # of each call, the nodes that made its inputs
        self._backward: tuple[str, ...] = ()
        self._handles: list[Any] = []

    @property
    def parents(self) -> set[str]:
        return {"Global", *(self._called or self._backward)}

    def __enter__(self) -> None:
        for path, part in self._module.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
                self._handles.append(part.register_forward_pre_hook(self._entering(path), with_kwargs=True))
                self._handles.append(part.register_forward_hook(self._left, with_kwargs=True, always_call=True))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._called, self._given, self._backward, self._handles = [], [], (), []

    def _entering(self, path: str) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._called.append(path)
            self._given.append(set(_nodes((args, kwargs))))

        return enter

    def _left(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, names = self._given.pop(), tuple(self._called)
        self._called.pop()
        # Not a parameter's node, which stays.
        for node in graph(_nodes(output), without=lambda node: node in given or hasattr(node, "variable")):
            marks: dict[str, Any] = node.metadata
            if _MARK not in marks:  # not marked by a submodule within this one
                marks[_MARK] = names
                node.register_prehook(lambda _, names=names: self._at(names))
                node.register_hook(lambda *_: self._at(()))

    def _at(self, names: tuple[str, ...]) -> None:
        self._backward = names


def _nodes(values: Any) -> list[Node]:
    nodes: list[Node] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            nodes.append(value.grad_fn)
        return value

    map_tensors(values, look)
    return nodes


def counter_of(module: nn.Module) -> FlopCounterMode:
    """torch's counter, with counts by the paths of `module`'s submodules, and the total under "Global"."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Parts(module)  # type: ignore[assignment]
    return counter


class FlopTensorDispatchMode:
    """Context that counts the floating-point operations of a module's passes, by submodule: matrix products and convolutions. A
    multiplication and its addition count as one, as in TorchTNT; torch's own counter counts two.

    Args:
        module: whose submodules' names are used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._counter = counter_of(module)

    def __enter__(self) -> FlopTensorDispatchMode:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)

    @property
    def flop_counts(self) -> defaultdict[str, defaultdict[str, int]]:
        """Submodule -> operation -> count, as of now; the module's own name is empty."""
        by_module: defaultdict[str, defaultdict[str, int]] = defaultdict(_of_none)
        for name, counts in self._counter.get_flop_counts().items():
            if not name:  # the module itself; the total takes its name, ""
                continue
            for operation, count in counts.items():
                by_module["" if name == "Global" else name][f"{operation.__name__}.default"] += count // 2
        return by_module

    def reset(self) -> None:
        """Start counting again."""
        self._counter.flop_counts.clear()


def _of_none() -> defaultdict[str, int]:
    return defaultdict(int)
