"""Read a micro-batch, in this process or in a worker, so that an error names the sample that failed.

An error in a worker is sent to the rank as text and raised there as a DataError.
"""

from __future__ import annotations

import os
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import length_hint
from typing import Any

from torch.utils.data import default_collate

from echelon.common.errors import DataError
from echelon.data.workers import Board, said, seed_worker

__all__ = ["ReadFailure", "Reader"]


@dataclass(frozen=True)
class ReadFailure:
    """Stands for a batch that could not be read."""

    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: DataError, board: Board) -> ReadFailure:
        """Make a ReadFailure from an error in a worker, with the traceback of its cause."""
        cause = "".join(traceback.format_exception(error.__cause__))
        text = f"{error}\nIn worker {board.worker} (pid {os.getpid()}):\n\n{cause}"
        return cls(text, {**error.fields, "worker": board.worker})

    def error(self) -> DataError:
        """The error to raise on the rank."""
        return DataError(self.text, **self.fields)


class Reader:
    """The dataset that the workers see: (micro-batch, its samples) -> the samples' values, or a ReadFailure.

    Args:
        collate: list of samples -> batch.
        where: epoch and data rank, for messages.
        stream: with the micro-batch's number, seeds augmentation in a worker.
        board: the workers' board; None reads in this process.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], where: str, stream: Any, board: Board | None) -> None:
        self._dataset, self._collate, self._where, self._stream, self._board = dataset, collate, where, stream, board
        self._latest = list[int]()  # the samples read last, which are collated next
        self._at_once = callable(getattr(dataset, "__getitems__", None))

    def __getitems__(self, item: tuple[int, list[int]]) -> list[Any] | ReadFailure:
        micro, samples = item
        self._latest = samples
        if self._board is None:
            return self._read(samples)
        seed_worker(self._stream, micro)
        try:
            values = self._read_in_worker(samples, self._board)
        except DataError as error:
            return ReadFailure.of(error, self._board)
        self._board.reading(-1)
        return values

    def collate(self, samples: list[Any] | ReadFailure) -> Any:
        """Collate samples to a batch; a ReadFailure is passed on."""
        if isinstance(samples, ReadFailure):
            return samples
        try:
            return self._collate(samples)
        except Exception as error:
            differences, fields = _unlike(samples, self._latest) if self._collate is default_collate else ("", {})
            text = f"a batch of {len(samples)} samples{self._where} could not be collated: {differences}{said(error)}"
            named = DataError(text, **fields)
            named.__cause__ = error
            if self._board is None:
                raise named from error
            return ReadFailure.of(named, self._board)

    def _read(self, samples: list[int]) -> list[Any]:
        if self._at_once:
            return self._read_together(samples)
        dataset, taken = self._dataset, iter(samples)
        try:
            return [dataset[sample] for sample in taken]
        except Exception as error:
            # The iterator's remaining length tells which sample failed, without noting every sample.
            raise self._named(samples[len(samples) - length_hint(taken) - 1], error) from error

    def _read_in_worker(self, samples: list[int], board: Board) -> list[Any]:
        if self._at_once:
            board.reading(samples[0], len(samples))
            return self._read_together(samples)
        values, at = [], -1
        try:
            for at in samples:
                board.reading(at)
                values.append(self._dataset[at])
        except Exception as error:
            raise self._named(at, error) from error
        return values

    def _read_together(self, samples: list[int]) -> list[Any]:
        try:
            values: list[Any] = self._dataset.__getitems__(samples)
        except Exception as error:
            raise self._named(self._culprit(samples), error, samples) from error
        if len(values) != len(samples):
            kind = type(self._dataset).__name__
            raise DataError(f"{kind}.__getitems__ gave {len(values)} samples for {len(samples)}{self._where}.")
        return values

    def _named(self, at: int, error: Exception, samples: list[int] | None = None) -> DataError:
        which = f"sample {at}" if at >= 0 else f"one of the samples {samples}"
        return DataError(f"{which}{self._where} could not be read: {said(error)}", **({"sample": at} if at >= 0 else {}))

    def _culprit(self, samples: list[int]) -> int:
        """The first of these samples that also fails alone; -1 if none does."""
        for sample in samples:
            try:
                self._dataset.__getitems__([sample])
            except Exception:
                return sample
        return -1


def _unlike(values: list[Any], samples: list[int]) -> tuple[str, dict[str, int]]:
    """For samples that torch's collate function cannot stack: the sample whose form differs from most, if there is one."""
    forms = [textwrap.shorten(_form(value), 120) for value in values]
    counts = Counter(forms)
    if len(counts) < 2 or len(samples) != len(values):
        return "", {}
    usual, rare = (forms.index(form) for form in (counts.most_common()[0][0], counts.most_common()[-1][0]))
    return (
        f"sample {samples[rare]} is {forms[rare]}, sample {samples[usual]} is {forms[usual]}; torch stacks only equal shapes: "
        "pad or crop in the dataset, or give a collate_fn. "
    ), {"sample": samples[rare]}


def _form(value: Any) -> str:
    """Types and shapes of a value, for a message."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_form(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_form, value))})"
    return type(value).__name__
