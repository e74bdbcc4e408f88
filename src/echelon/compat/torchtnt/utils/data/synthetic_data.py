"""torchtnt.utils.data.synthetic_data: datasets of random items."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils.data import Dataset

from echelon.contracts.errors import UsageError

__all__ = ["AbstractRandomDataset", "generate_random_square_image_tensor"]

TItem = TypeVar("TItem")


@dataclass
class AbstractRandomDataset(Dataset[TItem], abc.ABC, Generic[TItem]):
    """Base of map-style datasets that make up their items: give it `_generate_random_item`.

    Args:
        size: how many items it has.
    Raises:
        UsageError: a size that is not above 0.
    """

    size: int = 100

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise UsageError(f"size {self.size}: above 0.")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> TItem:
        if not 0 <= idx < self.size:
            raise IndexError(f"index {idx} of a dataset of {self.size} items")
        return self._generate_random_item()

    @abc.abstractmethod
    def _generate_random_item(self) -> TItem:
        """An item, another one at each call."""


def generate_random_square_image_tensor(num_channels: int, side_length: int) -> torch.Tensor:
    """A random image (num_channels, side_length, side_length), from 0 to 1. On the host: a loader's workers have no GPU.

    Raises:
        UsageError: a size that is not above 0.
    """
    if num_channels <= 0 or side_length <= 0:
        raise UsageError(f"num_channels {num_channels}, side_length {side_length}: both above 0.")
    return torch.rand(num_channels, side_length, side_length)
