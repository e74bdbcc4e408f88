"""A tensor as bytes, to write, send, compare or count them."""

from __future__ import annotations

import torch

__all__ = ["flat_bytes"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order of its elements, 1-D, on its device; a view if the tensor is contiguous."""
    plain = tensor.detach().contiguous()
    # In a contiguous tensor a dim of one element may have any stride, but `view` to another dtype requires 1 (torch 2.13).
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
