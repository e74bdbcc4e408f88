"""Host memory for the copies of a rank's tensors, kept from save to save, in a few large pieces.

Copies of a GPU's tensors need page-locked memory, and locking it takes time: made tensor by tensor in the loop, it stopped
training at the first save. So a thread makes all of it before. Not in one piece, since torch rounds each page-locked one up to a
power of two: 12 GB would become 16. Pieces are such a power themselves.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Mapping
from typing import NamedTuple

import torch

from echelon.world.device import in_thread

__all__ = ["Buffers"]

_PIECE_BYTES = 256 << 20
_ALIGNED = 512  # of every view's beginning: any type's size divides it


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
    """Memory like that of given tensors, by key. Empty until it is prepared or asked for.

    Attributes:
        begun: for whoever prepares it: it was tried. `clear` takes it back.
    """

    begun = False

    def __init__(self) -> None:
        self._views: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to make the memory for these, in a thread."""
        kinds = {key: _Kind.of(tensor) for key, tensor in tensors.items()}  # and not the tensors, which would live on

        def work() -> None:
            try:
                self._views.update(_made(kinds))
            except (RuntimeError, MemoryError):  # there is not so much: the save says so, if that is still true then
                return

        self._thread = threading.Thread(target=in_thread(work), name="echelon-buffers", daemon=True)
        self._thread.start()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The memory for these; what is not there yet, or was for another shape or type, is made now."""
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
        pieces: list[dict[str, int]] = []  # where each begins in its piece
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
