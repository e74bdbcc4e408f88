"""A tensor as bytes: to be written, sent, compared or counted."""

from __future__ import annotations

import torch

__all__ = ["flat_bytes"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in the order of its elements, one-dimensional, on its device: a view of them if it is contiguous."""
    plain = tensor.detach().contiguous()
    # A dimension of one element may have any stride in what is contiguous, and `view` to another type wants 1 (torch 2.13).
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
