"""Host memory for the copies of a rank's tensors, kept from save to save, in a few large pieces.

Copies of a GPU's tensors need page-locked memory, and locking takes time: when it was allocated tensor by tensor in the loop,
training stopped at the first save. So a thread allocates it beforehand, in several pieces: torch rounds each page-locked
allocation up to a power of two, which would turn 12 GB into 16. The size limit of a piece is such a power.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Mapping
from typing import NamedTuple

import torch

from echelon.world.device import in_thread

__all__ = ["Buffers"]

_PIECE_BYTES = 256 << 20
_ALIGNED = 512  # every view begins at a multiple of this; the size of any dtype divides it


class _Kind(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    locked: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        return cls(tensor.shape, tensor.dtype, tensor.is_cuda)

    def fits(self, view: torch.Tensor) -> bool:
        return (view.shape, view.dtype) == (self.shape, self.dtype)

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Buffers:
    """Host memory for copies of tensors, by key. Empty until `prepare` or `of` is called.

    Attributes:
        begun: set by the caller of `prepare`, so that it prepares only once. `clear` resets it.
    """

    begun = False

    def __init__(self) -> None:
        self._views: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start to allocate the memory for these tensors, in a thread."""
        kinds = {key: _Kind.of(tensor) for key, tensor in tensors.items()}  # the thread must not keep the tensors alive

        def work() -> None:
            try:
                self._views.update(_made(kinds))
            except (RuntimeError, MemoryError):  # too little memory: the save raises if this is still so then
                return

        self._thread = threading.Thread(target=in_thread(work), name="echelon-buffers", daemon=True)
        self._thread.start()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The memory for these tensors. Memory that is missing, or has another shape or dtype, is allocated now."""
        self._settle()
        kinds = {key: _Kind.of(tensor) for key, tensor in tensors.items()}
        views = self._views
        views.update(_made({key: kind for key, kind in kinds.items() if key not in views or not kind.fits(views[key])}))
        return {key: views[key] for key in tensors}

    def clear(self) -> None:
        self._settle()
        self._views.clear()
        self.begun = False

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self._views.items()

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _made(kinds: Mapping[str, _Kind]) -> dict[str, torch.Tensor]:
    views: dict[str, torch.Tensor] = {}
    for locked in (True, False):
        pieces: list[dict[str, int]] = []  # for each piece, where the views begin in it
        ends: list[int] = []
        for key, kind in kinds.items():
            if kind.locked is not locked:
                continue
            size = -(-kind.size // _ALIGNED) * _ALIGNED
            if not ends or ends[-1] + size > _PIECE_BYTES:
                pieces.append({})
                ends.append(0)
            pieces[-1][key] = ends[-1]
            ends[-1] += size
        for piece, end in zip(pieces, ends, strict=True):
            flat = torch.empty(end, dtype=torch.uint8, pin_memory=locked)
            for key, start in piece.items():
                kind = kinds[key]
                views[key] = flat[start : start + kind.size].view(kind.dtype).view(kind.shape)
    return views
