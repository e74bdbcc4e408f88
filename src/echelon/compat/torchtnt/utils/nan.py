"""torchtnt.utils.nan: errors where a nan comes up. `AutoUnit(detect_anomaly=...)` and RollBack are for whole runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from echelon.common.errors import UsageError
from echelon.parallel.gradients.clip import graph

__all__ = ["check_for_nan_or_inf", "register_nan_hooks_on_whole_graph"]


def check_for_nan_or_inf(tensor: torch.Tensor, msg: str = "Detected NaN or Inf in tensor") -> None:
    """Raise if a tensor holds nan or inf. On a GPU nothing waits: the error comes later, and ends the use of CUDA.

    Raises:
        RuntimeError: with `msg`.
    """
    torch._assert_async(torch.isfinite(tensor).all(), msg)


def register_nan_hooks_on_whole_graph(t_outputs: Sequence[torch.Tensor | GradientEdge]) -> Callable[[], None]:
    """Have backward passes through these outputs raise where a gradient becomes nan, naming the operation.

    Returns:
        Call it to take the hooks away.
    Raises:
        UsageError: an output that has no graph.
    """
    nodes = []
    for i, output in enumerate(t_outputs):
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            raise UsageError(f"output {i} requires no gradient, so there is no backward pass to watch.")
        edge = get_gradient_edge(output) if isinstance(output, torch.Tensor) else output
        nodes.append(edge.node)
    # The name alone: a hook that holds its node would keep the graph alive.
    handles = [node.register_hook(partial(_check, node.name())) for node in graph(nodes)]
    del nodes

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _check(name: str, grad_inputs: Sequence[torch.Tensor | None], _: Sequence[torch.Tensor | None]) -> None:
    for i, gradient in enumerate(grad_inputs):
        if gradient is not None:
            torch._assert_async(
                torch.logical_not(torch.isnan(gradient).any()), f"Detected NaN in 'grad_inputs[{i}]' after executing Node {name}"
            )
