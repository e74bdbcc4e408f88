"""A cross entropy as torch.compile leaves it: one kernel reads the logits, and the backward pass reads them again and writes
their gradient, both in the logits' dtype. Neither is ever whole in float32, as it is in torch's own operators.

torchtune compiles its loss (torchtune/modules/loss). A plan compiles nothing, so an operator of that name stands for the compiled
loss here, and the plan counts the memory that it holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["compiled_cross_entropy"]


@torch.library.custom_op("compiled::cross_entropy", mutates_args=())
def compiled_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logits (N, V) and targets (N) -> the mean loss."""
    return F.cross_entropy(logits.float(), targets)


@torch.library.custom_op("compiled::cross_entropy_backward", mutates_args=())
def _gradient(grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shares = logits.float().softmax(-1)
    shares[torch.arange(len(targets)), targets] -= 1
    return (shares * (grad / len(targets))).to(logits.dtype)


compiled_cross_entropy.register_fake(lambda logits, targets: logits.new_empty((), dtype=torch.float32))
_gradient.register_fake(lambda grad, logits, targets: torch.empty_like(logits))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _gradient(grad, *ctx.saved_tensors), None


compiled_cross_entropy.register_autograd(_backward, setup_context=_keep)
