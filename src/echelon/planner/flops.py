"""FLOPs of matrix products, convolutions and attention: of one operator, and of a module's passes by submodule.

torch's own tracker credits a submodule that returns its own input, such as a dropout of 0, with the backward pass of what came
before it, and loses some of the backward pass of a module that is called twice. `Parts` marks each node of autograd's graph with
the submodules that were running when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from echelon.parallel.gradients.clip import graph
from echelon.world.device import map_tensors

__all__ = ["Parts", "counter_of", "flops_of"]

aten = torch.ops.aten
_MARK = "echelon.parts"
_TOTAL = "Global"  # torch's name


def flops_of(op: Any, made: Any, args: Any, kwargs: Any) -> int | None:
    """FLOPs of a matrix product or of attention; None for other operators. A script registers an operator of its own with torch's
    `register_flop_formula`; it is attention if its name contains the word."""
    count = _FLOPS.get(op.overloadpacket) or flop_registry.get(op.overloadpacket)
    return None if count is None else int(count(*args, **kwargs, out_val=made))


def _shape(of: Any) -> Any:
    return getattr(of, "shape", of)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(_shape(query), _shape(key), _shape(value)))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(_shape(grad), _shape(query), _shape(key), _shape(value)))


def _grouped(rows: Any, other: Any, *_: Any, **__: Any) -> int:
    """FLOPs of rows times the matrices of their groups; or, for a weight's gradient, of both sides over the rows."""
    return int(2 * _shape(rows)[0] * _shape(rows)[1] * _shape(other)[-1])


# torch has no formulas for grouped products and the CPU's attention kernel. Like torch's, these count the whole square of a
# causal attention. They take tensors or shapes.
_FLOPS: dict[Any, Any] = {
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Parts:
    """Context that knows which submodules run, in a forward pass or in the backward pass of its nodes.

    Attributes:
        first: by path, (shapes of inputs, shapes of outputs, seconds) of each submodule's first forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.first: dict[str, tuple[Any, Any, float]] = {}
        self._called: list[tuple[str, set[Node], float]] = []  # path, the nodes that made its inputs, when it began
        self._backward: tuple[str, ...] = ()
        self._handles: list[Any] = []

    @property
    def parents(self) -> set[str]:
        """What FlopCounterMode asks for; "" is the module itself."""
        return {_TOTAL, *([path for path, *_ in self._called] or self._backward)}

    def __enter__(self) -> Parts:
        for path, part in self._module.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
                self._handles.append(part.register_forward_pre_hook(self._entering(path), with_kwargs=True))
                self._handles.append(part.register_forward_hook(self._left, with_kwargs=True, always_call=True))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._called, self._backward, self._handles = [], (), []

    def _entering(self, path: str) -> Any:
        return lambda _, args, kwargs: self._called.append((path, set(_nodes((args, kwargs))), _now()))

    def _left(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        names = tuple(path for path, *_ in self._called)
        path, given, began = self._called.pop()
        inputs = [*args, *kwargs.values()]
        self.first.setdefault(path, (_shapes(inputs[0] if len(inputs) == 1 else inputs), _shapes(output), _now() - began))
        # Not a parameter's node, which stays.
        for node in graph(_nodes(output), without=lambda node: node in given or hasattr(node, "variable")):
            marks: dict[str, Any] = node.metadata
            if _MARK not in marks:  # not marked by a submodule within this one
                marks[_MARK] = names
                node.register_prehook(lambda _, names=names: self._at(names))
                node.register_hook(lambda *_: self._at(()))

    def _at(self, names: tuple[str, ...]) -> None:
        self._backward = names


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shapes(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shapes(each) for each in value]
    return list(value.shape) if hasattr(value, "shape") else None


def _nodes(values: Any) -> list[Node]:
    nodes: list[Node] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            nodes.append(value.grad_fn)
        return value

    map_tensors(values, look)
    return nodes


def counter_of(module: nn.Module) -> FlopCounterMode:
    """torch's counter, by the paths of `module`'s submodules: "" is the module itself, "Global" the total."""
    counter = FlopCounterMode(display=False, custom_mapping=_FLOPS)
    counter.mod_tracker = Parts(module)  # type: ignore[assignment]
    return counter
