"""Loaders in a user's own loop: the training loader, iterated once per epoch, and loaders to evaluate on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon.common.errors import OwnLoopError, UsageError
from echelon.common.numbers import whole
from echelon.data.base import BaseLoader
from echelon.data.chain import Chain, loaders_of
from echelon.data.loader import Loader
from echelon.data.parts import Padding
from echelon.data.prefetch import samples_by_batch
from echelon.data.sampled import SampledLoader
from echelon.data.stream import StreamLoader
from echelon.data.torch_loader import as_loader, is_distributed
from echelon.loop.own.loop_unit import LoopUnit
from echelon.loop.own.session import kept_for
from echelon.parallel.layouts import resolve
from echelon.parallel.names import class_name
from echelon.world.device import copy_data_to_device

if TYPE_CHECKING:
    from echelon.loop.own.session import Session

__all__ = ["EvaluationBatches", "TrainingBatches", "check_shares", "refuse_prepared", "training_loader"]


logger = logging.getLogger(__name__)

_TOO_FEW = (
    "an evaluation loader's last batch must have a sample for each rank, since every rank must call the model under this "
    "layout, got fewer. Choose a batch size of two or more for each rank, or drop the last batch."
)
_APART = (
    " In eval mode and without gradients, as in `with echelon.evaluating(model):`, it takes samples from the batch before it."
)


class _Batches:
    """Wraps a loader. Other attributes are looked up in it, then in the DataLoader that it was made of.

    Args:
        given: the loader given to `prepare`.
    """

    def __init__(self, loader: Any, given: Any) -> None:
        self.loader, self._given = loader, given

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_given"):  # asked by copy or pickle before they are set
            raise AttributeError(name)
        return getattr(self.loader if hasattr(self.loader, name) else self._given, name)


class TrainingBatches(_Batches):
    """This rank's batches, on its device. Each iteration is an epoch; the first continues where a restored run stood."""

    def __init__(self, loader: Any, given: Any, session: Session) -> None:
        super().__init__(loader, given)
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        return self._session.batches()

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the session counts epochs itself, and after a restart begins in the middle of one."""


class EvaluationBatches(_Batches):
    """This rank's share of the batches, on its device, each sample once over all ranks.

    Args:
        number: the loader's number, from 1. It gives a shuffling DataLoader an order of its own; if it is read beside the
            training loader, a sample is then not paired with itself.
    Attributes:
        is_read_beside: the current iteration began with gradients enabled, so within training.
    """

    def __init__(self, loader: Any, unit: LoopUnit, number: int) -> None:
        super().__init__(self._divided(loader, unit, number), loader)
        self._unit = unit
        self.is_read_beside = False
        self._at: tuple[int, int] | None = None  # epoch and position of such an iteration at the end of the latest window
        self._saved: dict[str, Any] | None = None  # position of such an iteration in the restored run
        self._epochs_begun = 0  # at their first batch
        self._check(gradients=False, trains=False)

    def _check(self, gradients: bool, trains: bool) -> bool:
        """Refuse a loader whose last batch is too short, on all ranks, before any rank waits for another in the model.

        Args:
            gradients, trains: whether the model is called with gradients, in train mode.
        Returns:
            whether each rank must call the model equally often.
        """
        if isinstance(self.loader, Loader):
            self.loader.fills_tail = not (gradients and trains)
            self.loader.take_length()
        if isinstance(self.loader, BaseLoader):
            _ = self.loader.dp  # raises if the ranks cannot divide its batches
        prepared = self._unit.prepared
        in_step = prepared.forward_is_collective and (gradients or trains or prepared.before_evaluation())
        if isinstance(self.loader, StreamLoader):
            self.loader.pads = in_step  # then told of, where another rank would wait
        if in_step and not (gradients and trains) and getattr(self.loader, "pads", False):
            raise OwnLoopError(_TOO_FEW + (_APART if gradients or trains else ""))
        return in_step

    @staticmethod
    def _divided(loader: Any, unit: LoopUnit, number: int) -> Any:
        size = unit.data_rank_and_size
        ranks = size[1] if size is not None else 1
        if isinstance(loader, DataLoader):
            per_rank = loader.batch_size or 1
            if not is_distributed(loader):
                # Of two samples a rank can give one to a last batch that is too short. A batch_size of 1 stays: perhaps the
                # dataset's samples cannot be stacked.
                least = 2 if per_rank > 1 and unit.prepared.forward_is_collective else 1
                per_rank = max(least, math.ceil(per_rank / ranks))
            batch = per_rank * ranks
            why = "cannot be divided between the ranks, each of which would see all samples"
            loader = as_loader(loader, batch, 1, why, number=number)
            loader.accumulation = 1  # a launch command's accumulation is for training only
            if isinstance(loader, SampledLoader):
                loader.in_turn = False  # the epoch of an evaluation is the number of updates before it
        if isinstance(loader, (BaseLoader, Chain)) and size is not None:
            loader.set_data_rank(*size)
        return loader

    def __iter__(self) -> Iterator[Any]:
        return self._each(self._epochs_begun)

    def epoch_begins(self) -> None:
        """The loop begins an epoch at its first batch: as without a restart, an iteration made from now on begins anew."""
        self._epochs_begun += 1

    def _each(self, made_in: int) -> Iterator[Any]:
        unit = self._unit
        gradients, trains = torch.is_grad_enabled(), unit.module.training
        in_step = self._check(gradients, trains)  # its dataset may have changed
        self._begin(goes_on=not made_in)
        samples = samples_by_batch(self.loader)
        if isinstance(self.loader, Loader) and self.loader.samples < self.loader.dp[1]:
            unit.leaves_out_ranks = True
        try:
            for number, batch in enumerate(self.loader, 1):
                if gradients and trains and isinstance(batch, Padding):
                    yield copy_data_to_device(batch.batch, unit.device)  # read beside the training loader, on all ranks alike
                elif not isinstance(batch, Padding):
                    unit.evaluated = batch = copy_data_to_device(batch, unit.device)
                    unit.samples_given, unit.has_evaluated = samples(number), True
                    yield batch
                elif in_step:  # a loader that could not tell before
                    raise OwnLoopError(_TOO_FEW)
        finally:
            unit.evaluated = unit.samples_given = None
            # What is read after a restart is another iteration, as without one: `zip` begins anew in each epoch.
            self.is_read_beside, self._at = False, None

    def _begin(self, *, goes_on: bool) -> None:
        """Set the order and position of an iteration. The order follows from the number of updates, so that a shuffling loader
        has another each time, and the same after a restart. A loader read beside the training loader resumes where it stood.
        """
        self.is_read_beside = torch.is_grad_enabled()
        saved, self._saved = (self._saved, None) if self.is_read_beside and goes_on else (None, self._saved)
        if saved is not None:
            self.loader.load_state_dict(saved)
            return
        for each in loaders_of(self.loader):
            if isinstance(each, Loader):
                each.set_epoch(self._unit.train_progress.num_updates_completed)

    def note(self) -> None:
        """Note the position at a window's end: batches read later belong to the next window."""
        there = self.is_read_beside and isinstance(self.loader, Loader)
        self._at = (self.loader.epoch, self.loader.position) if there else None

    def where(self) -> dict[str, Any]:
        """State of an iteration beside the training loader, at the end of the latest window; {} if there was none."""
        return {} if self._at is None else self.loader.state_at(self._at[1], self._at[0])

    def go_on(self, state: Any) -> None:
        """Let the next iteration beside the training loader begin at `state`; from the beginning if its samples were others.

        Raises:
            TypeError, ValueError, KeyError, OverflowError: not a loader's state.
        """
        self._saved = None
        if not isinstance(self.loader, Loader):
            return
        try:
            self.loader.load_state_dict(state)
        except UsageError as error:
            logger.warning("a loader that was read beside the training loader restarts its epoch: %s", error)
            return
        self.loader.seek(0)  # an evaluation may come first, and reads from the beginning
        self._saved = state


def refuse_prepared(objects: Sequence[Any], layout: Any) -> None:
    """
    Raises:
        UsageError: an earlier call was given one of the objects, or returned it. Only a model that an earlier call returned may
            be given again, unchanged (layout=None), with another optimizer.
    """
    for each in objects:
        session, step = kept_for(each), getattr(each, "step", None)
        again = (
            isinstance(each, nn.Module)
            and session is not None
            and session.unit.module is each
            and (layout is None or resolve(layout) == resolve("none"))
        )
        if isinstance(each, _Batches) or getattr(step, "knows_window", False) or (session is not None and not again):
            what = class_name(each) if isinstance(each, nn.Module) else type(getattr(each, "_given", each)).__name__
            raise OwnLoopError(
                f"objects must be new to prepare(), got a {what} that an earlier call was given or returned. Make a new "
                "model, optimizer, scheduler and loaders for each run, for example for each fold. To train the same model "
                "with another optimizer, give the model that prepare() returned, with layout=None."
            )


def check_shares(loader: DataLoader[Any], unit: LoopUnit) -> None:
    """
    Raises:
        UsageError: the ranks cannot share its batches evenly.
    """
    size = unit.data_rank_and_size
    by_batches = loader.batch_size is None  # of any sizes, which the ranks share unevenly
    if size is not None and not by_batches and not is_distributed(loader) and (loader.batch_size or 1) % size[1]:
        raise OwnLoopError(
            f"the DataLoader's batch_size must be a multiple of the {size[1]} ranks that share each batch, got "
            f"{loader.batch_size}. Choose another, or give a DistributedSampler: its batch_size is each rank's."
        )


def training_loader(loader: Any, accumulation: int | None) -> tuple[Any, int]:
    """The loader to iterate over, and the number of micro-batches per update."""
    if accumulation is not None:
        accumulation = whole("accumulate", accumulation, at_least=1, kind=OwnLoopError)
    if isinstance(loader, DataLoader):
        steps, per_rank = accumulation or 1, loader.batch_size or 1
        ranks = loader.sampler.num_replicas if is_distributed(loader) else 1  # type: ignore[attr-defined]
        why = "has an order that prepare() cannot divide between ranks and resume"
        return as_loader(loader, per_rank * ranks * steps, steps, why), steps
    for part in loaders_of(loader):
        if isinstance(part, BaseLoader):
            part.take_accumulation(accumulation)
    return loader, accumulation or int(getattr(loader, "accumulation", 1))
