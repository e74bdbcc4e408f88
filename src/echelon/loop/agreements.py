"""Comparisons between the ranks of a run: limits, lengths of loaders, ends of epochs, and whether ranks have the same samples."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from echelon.common.errors import RanksDisagreeError, UsageError
from echelon.contracts.overrides import overrides
from echelon.data.chain import loaders_of
from echelon.data.fingerprint import checksum, read_twice
from echelon.data.loader import Loader
from echelon.data.sampled import SampledLoader
from echelon.loop.callback import Callback
from echelon.loop.progress import Progress
from echelon.loop.state import COUNTS, EntryPoint, PhaseState, State
from echelon.loop.unit import Unit
from echelon.world import agree, rng

__all__ = ["CutShort", "on_end", "on_limits"]

logger = logging.getLogger(__name__)


def on_limits(phase: PhaseState, progress: Progress, callbacks: Iterable[Callback], window: Any) -> None:
    """Compare where the ranks begin and stop training, and their collective callbacks. Collective.

    A rank that differs would leave the others waiting.
    """
    meeting = [type(each).__name__ for each in callbacks if getattr(each, "meets", False) is True]
    agree.same_on_all(
        "the callbacks in which they meet",
        meeting,
        "Give all ranks the same callbacks, without `if rank == 0`: a callback decides by itself which rank writes.",
    )
    limits = {
        **{name: getattr(phase, name) for name in COUNTS},
        "accumulate": getattr(window, "size", None),
        "seed of the order": _seeds(phase.dataloader),
        "epochs done": progress.num_epochs_completed,
        "updates done": progress.num_updates_completed,
        "steps done": progress.num_steps_completed,
    }
    agree.same_on_all("where training begins and ends", limits, "Give all ranks the same limits, loader and checkpoint.")


def _seeds(dataloader: Any) -> list[int | None]:
    """Seeds of the loaders that divide samples between ranks. With different seeds, ranks would repeat and miss samples."""
    if overrides().observes:
        return []
    return [each.order.seed if isinstance(each, Loader) and each.options.dp is None else None for each in loaders_of(dataloader)]


def drawn_by(dataloader: Any) -> list[str]:
    """What the samplers of an epoch's loaders have drawn, which must be the same on all ranks."""
    drawn = []
    for each in loaders_of(dataloader):
        if isinstance(each, SampledLoader):
            try:
                drawn.append(f"samples {each.checksum():08x}")
            except UsageError as error:  # raised again when the samples are read, if all ranks have it
                drawn.append(f"{error}")
    return drawn


def on_end(phase: str, used: int, *, ended: bool, is_last: bool, drops: bool) -> bool | None:
    """For loaders without a length, before each batch: agree that all ranks have one more batch, or none has. Collective. The
    batch must also be the last on all ranks or on none, because it ends a window, where the ranks reduce gradients.

    Args:
        drops: batches that not all ranks have are dropped.
    Returns:
        None if the epoch goes on. Otherwise the epoch ends because other ranks have no more batches: with this rank's batch if
        True, without it if False.
    """
    if not agree.any_rank(ended or is_last):
        return None
    states = agree.gather([used, ended, is_last, drops])
    if all(each[1:3] == states[0][1:3] for each in states):
        return None
    if all(each[3] for each in states):
        return not any(each[1] for each in states)
    shown = ", ".join(
        f"rank {r}: {'ended after' if e else 'has only' if last else 'has batch'} {n}" for r, (n, e, last, _) in enumerate(states)
    )
    raise RanksDisagreeError(
        f"ranks disagree about the end of the {phase} epoch: {shown}. Give every rank equally many batches; "
        "StreamLoader(tail='drop') drops batches that not all ranks have."
    )


class CutShort:
    """Tells whether an evaluation, a prediction or a test ends early because a rank was asked to stop.

    If forward passes or callbacks have collectives, all ranks learn of the stop at the same step; otherwise each rank leaves by
    itself. A single process needs only `state.should_stop`.

    Args:
        together: there are such collectives. If False, no collective is allowed here: a rank may evaluate alone.
    """

    def __init__(self, state: State, *, together: bool) -> None:
        self._state = state
        self._any_rank = agree.AnyRanksLater() if together else None

    def asked(self) -> bool:
        wants = self._state.stop_requested
        asked = self._any_rank(wants)[0] if self._any_rank is not None else wants
        if asked and self._state.entry_point is not EntryPoint.FIT:  # within `fit`, ranks agree after the evaluation
            self._state.agree_to_stop()
        return asked

    def settle(self) -> None:
        if self._any_rank is not None:
            self._any_rank.last()


# --- warnings for samples that are not divided between the ranks: usually a mistake


def warn_of_same_samples(loader: Any, unit: Unit) -> None:
    """Warn if each rank trains on all samples, or divides samples twice, as far as the dataset shows it. Collective."""
    samples_of_all = agree.kinds(seen_of(loader))
    if isinstance(loader, Loader):
        if len(samples_of_all) > 1 and None not in samples_of_all and agree.is_rank0():
            logger.warning(
                "ranks give the Loader datasets with different samples, but each rank reads only its share of them: a dataset "
                "divided before, as by split_dataset_by_node, Subset or Dataset.shard, is divided twice, and the rest is never "
                "trained on. Give every rank the whole dataset"
            )
        return
    if len(samples_of_all) > 1 or samples_of_all[0] is None or not agree.is_rank0():
        return
    size = 1
    with contextlib.suppress(UsageError):  # the modules do not say which ranks have different samples
        _, size = unit.data_rank_and_size or (0, 1)
    if size > 1:
        logger.warning(
            "each of %s ranks trains on all %s samples of the DataLoader in every epoch, instead of its share: nothing divides "
            "them. Give echelon.Loader(dataset, global_batch=%s), or a DataLoader with a DistributedSampler",
            size,
            samples_of_all[0][0],
            size * (loader.batch_size or 1),
        )


def checksum_of_first(train_state: PhaseState | None, batch: Any) -> int | None:
    """Checksum of a run's first batch, if the loader (an iterable) does not show whether ranks have different samples."""
    loader = train_state.dataloader if isinstance(train_state, PhaseState) else ()
    divided = isinstance(loader, Loader) or getattr(loader, "shards", None) == "stride"
    if divided or overrides().observes or seen_of(loader) is not None:
        return None
    try:
        return checksum(batch)
    except Exception:  # a user's batch can be of any type
        return None


def warn_of_same_batches(seen: Sequence[int | None]) -> None:
    """Warn on rank 0 if two ranks have the same first batch, by `checksum_of_first`."""
    first: dict[int, int] = {}
    for rank, each in enumerate(seen):
        if each is not None and (other := first.setdefault(each, rank)) != rank:
            if agree.is_rank0():
                logger.warning(
                    "ranks %s and %s have the same first batch: if the samples are not divided, each rank trains on all of "
                    "them instead of its share. Divide them by rank where they are read, or give echelon.Loader or "
                    "StreamLoader(..., shards='stride')",
                    other,
                    rank,
                )
            return


def seen_of(loader: Any) -> list[int] | None:
    """[length, checksum of a sample] of a dataset that torch reads to its end; None if unknown."""
    if isinstance(loader, Loader):
        return _part(loader.dataset) if loader.options.dp is None else None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.sampler) not in (SequentialSampler, RandomSampler) or loader.batch_size is None:
        return None
    # Do not open here what workers will read: they would share the open file.
    if loader.num_workers and not isinstance(loader.dataset, TensorDataset):
        return None
    length = len(loader.dataset)  # type: ignore[arg-type]
    if len(loader.sampler) != length or getattr(loader.sampler, "replacement", False):  # type: ignore[arg-type]  # ranks may draw others
        return None
    sample = _first(loader.dataset) if length else None
    return None if sample is None else [length, sample]


def _first(dataset: Any) -> int | None:
    with rng.unchanged():
        return read_twice(dataset, 0)


def _part(dataset: Any) -> list[int] | None:
    """[length, checksum] of a dataset whose samples are in memory; None for any other, which is not read early."""
    if type(dataset) is Subset:
        sums = checksum(list(dataset.indices))
    elif type(dataset) is TensorDataset or hasattr(dataset, "_fingerprint"):  # _fingerprint: a table of the library `datasets`
        sums = _first(dataset) if len(dataset) else 0
    else:
        return None
    return None if sums is None else [len(dataset), sums]
