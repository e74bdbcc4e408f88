"""Text as bytes: windows of a fixed length from a folder of files, for models that need no tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from echelon.common.arguments import is_path, several
from echelon.common.errors import DatasetError, require
from echelon.common.numbers import whole

__all__ = ["ByteText", "split_files"]


class ByteText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes from concatenated files; the targets are the bytes that follow each position.

    Args:
        files: read in the given order, joined by a zero byte so that a model can tell them apart.
        context: bytes per window.
        stride: distance between the beginnings of two windows; by default `context`, so that windows do not overlap.
    Sample: (inputs, targets), int64 of shape (context,), values 0 .. 255.
    Raises:
        UsageError: the files hold less than one window.
    """

    def __init__(self, files: Iterable[Path], context: int, *, stride: int | None = None) -> None:
        context = whole("context", context, at_least=1, kind=DatasetError)
        self.context, self.stride = (
            context,
            whole("stride", stride, at_least=1, kind=DatasetError) if stride is not None else context,
        )
        paths = several("files", files, "a list of paths", is_path, kind=DatasetError)
        parts = [np.frombuffer(Path(path).read_bytes() + b"\0", dtype=np.uint8) for path in paths]
        self.bytes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
        if len(self.bytes) < context + 1:
            raise DatasetError(
                f"the text must have at least context + 1 = {context + 1} bytes, got {len(self.bytes)} in {len(parts)} "
                "files. Use more text."
            )

    def __len__(self) -> int:
        return (len(self.bytes) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        starts = np.asarray(indices)[:, None] * self.stride
        windows = torch.from_numpy(self.bytes[starts + np.arange(self.context + 1)].astype(np.int64))  # (B, context + 1)
        return [(w[:-1], w[1:]) for w in windows]


def split_files(folder: Path, pattern: str = "**/*.py", *, held_out: float = 0.05) -> tuple[list[Path], list[Path]]:
    """Files for training and files held out, chosen by a hash of each path: the same on every rank and in every run.

    Raises:
        UsageError: the folder does not exist or holds too few files.
    """
    require(folder.is_dir(), "folder", "a folder of text files", str(folder), kind=DatasetError)
    files = sorted(p for p in folder.glob(pattern) if p.is_file() and p.stat().st_size)
    if len(files) < 2:
        raise DatasetError(f"{folder} must hold at least 2 files for {pattern!r}, one to be held out, got {len(files)}.")
    scored = sorted(files, key=lambda p: hashlib.sha256(str(p.relative_to(folder)).encode()).digest())
    count = min(len(files) - 1, max(1, round(len(files) * held_out)))
    return sorted(scored[count:]), sorted(scored[:count])
