"""torchtnt.utils.data.synthetic_data: datasets of random items."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils.data import Dataset

from echelon.common.errors import LoaderError

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
            raise LoaderError(f"Size must be greater than zero. (Received {self.size})")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> TItem:
        if not 0 <= idx < self.size:
            raise IndexError(f"Index {idx} out of range [0, {self.size - 1}]")
        return self._generate_random_item()

    @abc.abstractmethod
    def _generate_random_item(self) -> TItem:
        """An item, another one at each call."""


def generate_random_square_image_tensor(num_channels: int, side_length: int) -> torch.Tensor:
    """A random image (num_channels, side_length, side_length), from 0 to 1. On the host: a loader's workers have no GPU.

    Raises:
        UsageError: a size that is not above 0.
    """
    for name, value in (("num_channels", num_channels), ("side_length", side_length)):
        if value <= 0:
            raise LoaderError(f"{name} must be greater than zero. Received: {value}")
    return torch.rand(num_channels, side_length, side_length)
