"""Gradients of gradients, such as a gradient penalty's, of a module that `fully_shard` has split: refused.

The first backward pass frees the parameters that were gathered for it, and the second would read them again: torch 2.13 ends the
process with SIGSEGV.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from echelon.contracts.errors import LayoutError
from echelon.parallel.names import class_name

__all__ = ["refuse_second_derivatives"]


def refuse_second_derivatives(module: nn.Module) -> None:
    """From now on a backward pass with `create_graph=True` through the module raises UsageError."""
    name = class_name(module)

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass: only where a graph of it is made
            raise LayoutError(
                f"create_graph=True must be left out in a backward pass through {name}, whose parameters are sharded: they are "
                "freed after it, and the backward pass through its gradients would read them. Train it under 'ddp' or 'zero1'."
            )

    def listen(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:  # a parameter would keep its hooks for ever
                    leaf.register_hook(refuse)

    module.register_forward_hook(torch.compiler.disable(listen))
