"""How an epoch's batches reach the unit: where the loader resumes, how many it may give, and who fetches them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from echelon.common.errors import LoopError, UsageError
from echelon.contracts.overrides import overrides
from echelon.data.base import BaseLoader, Combined, loaders_of
from echelon.data.fingerprint import checksum, read_twice
from echelon.data.loader import Loader
from echelon.data.prefetch import NO_STEP, Feed, known_length
from echelon.loop.progress import Progress
from echelon.loop.stage import Stage, timed
from echelon.loop.state import EvaluateEvery, PhaseState
from echelon.loop.unit import Unit, wants_iterator
from echelon.loop.validate import KINDS, keeps
from echelon.world import agree, rng

__all__ = ["Batches", "check_evaluation", "open_feed", "own_fetch"]

logger = logging.getLogger(__name__)


class Batches(Iterator[Any]):
    """The batches of a feed as the unit's code gets them, any number for a step; where each stands is in the phase's `step`."""

    def __init__(self, feed: Feed, here: PhaseState, progress: Progress, unit: Unit) -> None:
        self._feed, self._here, self._progress, self._unit = feed, here, progress, unit

    def __next__(self) -> Any:
        step = self._feed.__next__()
        if not step.is_last and self._here.steps_left(self._progress, self._unit) == 1:
            step = step._replace(is_last=True)
        self._here.step = step
        return step.batch

    def itself(self) -> Batches:
        """For a step that fetches its own batches."""
        return self

    def within_limits(self, fetch: Callable[[], Any]) -> Any:
        """What `fetch` gives, if the run's limits allow one more step."""
        if self._here.steps_left(self._progress, self._unit) == 0:
            raise StopIteration
        return fetch()


def own_fetch(stage: Stage, batches: Batches, *, always: bool) -> Callable[[], Any] | None:
    """The call that gets a step's data where the unit has its own way: a method that fetches, or a step that iterates.

    Args:
        always: for other units, too, the next of `batches`, instead of None.
    """
    if wants_iterator(getattr(stage.unit, f"{stage.phase}_step", None)):
        return partial(batches.within_limits, batches.itself)
    fetch: Callable[[], Any] = batches.__next__
    if _fetches(stage):
        own = partial(getattr(stage.unit, f"get_next_{stage.phase}_batch"), stage.state, batches)
        fetch = partial(batches.within_limits, own)
    elif not always:
        return None
    return timed(stage.state.timer, f"{stage.entry}.next(data_iter)", fetch)


def _fetches(stage: Stage) -> bool:
    """Whether a method of the unit's own fetches a step's data."""
    return not keeps(stage.unit, f"get_next_{stage.phase}_batch", KINDS[stage.phase])


def open_feed(stage: Stage) -> Feed:
    """The iterator of the coming epoch, from where progress says that it continues. Hooks run around its making."""
    here, progress, inner = stage.here, stage.progress, stage.inner
    own = wants_iterator(getattr(stage.unit, f"{stage.phase}_step", None)) or _fetches(stage)
    limit = None if own else here.steps_left(progress, inner)  # a step of its own may take several batches
    _seek(here.dataloader, progress)
    for part in loaders_of(here.dataloader):
        if isinstance(part, Loader):
            _check_tail(stage, part)
    loader, resumed = _resumed(stage)
    stage.call(stage.hooks.iter_start)
    move, stream = inner.placement(stage.phase)
    timer, name = stage.state.timer, f"{type(stage.unit).__name__}.{stage.entry}"
    read: Callable[..., Any] = next
    if move is not None:
        move = timed(timer, f"{name}.move_data_to_device", partial(move, stage.state))
        read = timed(timer, f"{name}.next(data_iter)", next)
    make = timed(timer, f"{stage.entry}.iter(dataloader)", Feed)
    pieces = inner.pieces_of_step(stage.phase)
    here.step = NO_STEP
    here.feed = feed = make(loader, limit=limit, move=move, stream=stream, pieces=pieces, resumed=resumed, read=read)
    stage.call(stage.hooks.iter_end)
    return feed


def _seek(loader: Any, progress: Progress) -> None:
    """Tell the loader its epoch and, if it can, where in it."""
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(progress.num_epochs_completed)
    if isinstance(loader, BaseLoader):
        # The unit's progress says where an epoch continues; a loader that was looked into or stopped early does not.
        progress.num_steps_completed_in_epoch = loader.seek(progress.num_steps_completed_in_epoch)


def _resumed(stage: Stage) -> tuple[Any, int]:
    """What to iterate over, and after how many batches of the epoch it resumes by a state of its own."""
    loader, done = stage.here.dataloader, stage.progress.num_steps_completed_in_epoch
    if not stage.trains or done == 0 or isinstance(loader, BaseLoader):
        return loader, 0
    if hasattr(loader, "load_state_dict"):
        return loader, done
    if known_length(loader) == done:
        return (), 0  # the epoch was whole when it was saved
    logger.warning(
        "training resumes after step %s of an epoch, but %s has no state and starts over. echelon.Loader resumes",
        done,
        type(loader).__name__,
    )
    return loader, 0


def check_evaluation(stage: Stage) -> None:
    """When `fit` begins: what would be refused when its first evaluation is due, after an epoch of training.

    Raises:
        UsageError: on all ranks: they cannot divide the loader.
    """
    here = stage.here
    if here.evaluations == EvaluateEvery():
        return
    loader, rank_and_size = here.dataloader, stage.inner.data_rank_and_size
    if isinstance(loader, (BaseLoader, Combined)) and rank_and_size is not None:
        loader.set_data_rank(*rank_and_size)
    for part in loaders_of(loader):
        if isinstance(part, BaseLoader):
            _ = part.dp  # which says so
        if isinstance(part, Loader):
            _check_tail(stage, part)


def _check_tail(stage: Stage, loader: Loader) -> None:
    if not stage.inner.weighs_padding and (loader.pads or (stage.trains and loader.is_uneven)):
        raise LoopError(
            f"the last global batch ({loader.samples % loader.global_batch} samples) cannot be shared evenly by "
            f"{loader.dp[1]} ranks, and only AutoUnit weighs shares by their size. Use Loader(..., tail='drop')."
        )


# A loader whose samples nobody divided between the ranks: each trains on all of them, which is seldom meant.


def warn_of_same_samples(loader: Any, unit: Unit) -> None:
    """Where ranks train one model on other data, as far as a look at the dataset tells. Collective."""
    told = agree.kinds(seen_of(loader))
    if isinstance(loader, Loader):
        if len(told) > 1 and None not in told and agree.is_rank0():
            logger.warning(
                "ranks give the Loader datasets with other samples, of which each reads its share only: what was divided before, "
                "as by split_dataset_by_node, Subset or Dataset.shard, is divided twice, and the rest is never trained on. Give "
                "every rank the whole dataset"
            )
        return
    if len(told) > 1 or told[0] is None or not agree.is_rank0():
        return
    size = 1
    with contextlib.suppress(UsageError):  # nothing says which ranks have other samples
        _, size = unit.data_rank_and_size or (0, 1)
    if size > 1:
        logger.warning(
            "each of %s ranks trains on all %s samples of the DataLoader in every epoch, instead of its share: nothing divides "
            "them. Give echelon.Loader(dataset, global_batch=%s), or a DataLoader with a DistributedSampler",
            size,
            told[0][0],
            size * (loader.batch_size or 1),
        )


def checksum_of_first(here: PhaseState | None, batch: Any) -> int | None:
    """Of the first batch of a run, where nothing else tells whether ranks have samples of their own: of an iterable."""
    loader = here.dataloader if isinstance(here, PhaseState) else ()
    divided = isinstance(loader, Loader) or getattr(loader, "shards", None) == "stride"
    if divided or overrides().observes or seen_of(loader) is not None:
        return None
    try:
        return checksum(batch)
    except Exception:  # a batch of the user's own can be anything
        return None


def warn_of_same_batches(seen: Sequence[int | None]) -> None:
    """Of the first batches of the ranks, as `checksum_of_first` has them; only rank 0 speaks."""
    first: dict[int, int] = {}
    for rank, each in enumerate(seen):
        if each is not None and (other := first.setdefault(each, rank)) != rank:
            if agree.is_rank0():
                logger.warning(
                    "ranks %s and %s have the same first batch: where nothing divides the samples, each rank trains on all of "
                    "them instead of its share. Divide by rank where they are read, or give echelon.Loader or "
                    "StreamLoader(..., shards='stride')",
                    other,
                    rank,
                )
            return


def seen_of(loader: Any) -> list[int] | None:
    """[length, checksum of a sample] of a dataset that torch reads to its end; None if nothing is known."""
    if isinstance(loader, Loader):
        return _part(loader.dataset) if loader.options.dp is None else None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.sampler) not in (SequentialSampler, RandomSampler) or loader.batch_size is None:
        return None
    # What workers will read is not opened here: they would share the open file.
    if loader.num_workers and not isinstance(loader.dataset, TensorDataset):
        return None
    length = len(loader.dataset)  # type: ignore[arg-type]
    if len(loader.sampler) != length or getattr(loader.sampler, "replacement", False):  # type: ignore[arg-type]  # ranks may draw others
        return None
    sample = _first(loader.dataset) if length else None
    return None if sample is None else [length, sample]


def _first(dataset: Any) -> int | None:
    before = rng.states()
    try:
        return read_twice(dataset, 0)
    finally:
        rng.put_back(before)


def _part(dataset: Any) -> list[int] | None:
    """[length, checksum] of a dataset whose samples are at hand; None of any other, which is not read before its turn."""
    if type(dataset) is Subset:
        found = checksum(list(dataset.indices))
    elif type(dataset) is TensorDataset or hasattr(dataset, "_fingerprint"):  # or a table of the library datasets
        found = _first(dataset) if len(dataset) else 0
    else:
        return None
    return None if found is None else [len(dataset), found]
