"""torchtnt.utils.data.multi_dataloader: several loaders read as one, a batch of one or of all at a time.

`Mixture` mixes samples within a batch; this leaves each loader its own batches, collation, sampler and workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from echelon.common.errors import LoaderError
from echelon.compat.torchtnt.utils.data.iterators import DataIterationStrategyRegistry, MultiIterator, SourcesIterator
from echelon.compat.torchtnt.utils.data.source import Source
from echelon.compat.torchtnt.utils.data.strategies import DataIterationStrategy
from echelon.data.base import BaseLoader, Combined

__all__ = ["MultiDataLoader"]

logger = logging.getLogger(__name__)

# What TorchTNT says of the iterator, and what is needed beside it to go on exactly.
_ITERATOR, _OWN = "iterator_state", "iterator_position"


class MultiDataLoader(Combined):
    """Iterates over several loaders for an epoch, in the way that the strategy says. Batches: `{name: batch}`.

    Resumable in mid-epoch: a loader with `state_dict` and `load_state_dict` is put back to where it stood, of others the
    batches that were used are read again and left out. No length: how many batches come is known at the end.

    Args:
        individual_dataloaders: by name.
        iteration_strategy: RoundRobin, AllDatasetBatches, RandomizedBatchSampler or InOrder.
        iterator_cls: a MultiIterator of your own that carries it out.
        ignore_empty_data: a loader without batches is left out with a warning, instead of being an error.
    Attributes:
        current_iterator: the latest.
    Raises:
        UsageError: a loader without batches: at once if it has a length, else when its first batch is asked for. Nothing is
            read to find out.
    """

    def __init__(
        self,
        individual_dataloaders: Mapping[str, Iterable[Any]],
        iteration_strategy: DataIterationStrategy,
        iterator_cls: type[MultiIterator] | None = None,
        ignore_empty_data: bool = False,
    ) -> None:
        if not individual_dataloaders or {_OWN, _ITERATOR} & set(individual_dataloaders):
            raise LoaderError(
                f"individual_dataloaders must hold at least one loader, none named {_OWN!r} or {_ITERATOR!r}, got "
                f"{list(individual_dataloaders)}."
            )
        self.individual_dataloaders, self.iteration_strategy = individual_dataloaders, iteration_strategy
        self.iterator_cls, self.ignore_empty_data = iterator_cls, ignore_empty_data
        self.current_iterator: MultiIterator | None = None
        self._epoch: int | None = None  # as the loop counts them, if it does
        self._count = self._next = 0  # of iterations: the present one's number, and the next one's
        self._loaded: dict[str, Any] | None = None
        self._sources: dict[str, Source] = {}  # of the latest iteration
        for name in [name for name, loader in individual_dataloaders.items() if _surely_empty(loader)]:
            if not ignore_empty_data:
                raise LoaderError(f"Dataloader '{name}' contains no data.")
            logger.warning("Dataloader '%s' which contains no data. You might have empty dataloaders in the input dict.", name)

    @property
    def meets_in_steps(self) -> bool:
        """Whether the ranks meet at every batch, so that none may leave alone."""
        return bool(getattr(self.iteration_strategy, "enforce_same_loader_across_ranks", False))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it, and the loaders and their samplers are told.

        Another epoch than the present one begins at its start.
        """
        if epoch != self._epoch:
            if self._epoch is not None:
                self.current_iterator = self._loaded = None
            self._epoch = epoch

    @property
    def loaders(self) -> list[Iterable[Any]]:
        return list(self.individual_dataloaders.values())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        make = self.iterator_cls or DataIterationStrategyRegistry.get(self.iteration_strategy)
        iterator: MultiIterator = make(
            individual_dataloaders=self.individual_dataloaders, iteration_strategy=self.iteration_strategy
        )
        loaded, self._loaded = self._loaded or {}, None
        self._count, self._next = self._next, self._next + 1
        iterator.epoch = self._count if self._epoch is None else self._epoch
        own = isinstance(iterator, SourcesIterator)
        if isinstance(iterator, SourcesIterator):
            iterator.prepare(iterator.epoch, told=self._epoch is not None, allow_empty=self.ignore_empty_data)
            for name, source in iterator.sources.items():
                if name in self._sources:
                    source.follow(self._sources[name])
            self._sources = iterator.sources
            if (position := loaded.get(_OWN, {}).get("position")) is not None:
                iterator.go_to(position)
        if _ITERATOR in loaded and not (own and _OWN in loaded):
            iterator.load_state_dict(loaded[_ITERATOR])
        self.current_iterator = iterator
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The states of the loaders that have one, by name; once it is iterated over, "iterator_state" as TorchTNT has it, for
        strategies that have one there, and under "iterator_position" what else it takes to go on exactly."""
        if self._loaded is not None:
            return self._loaded
        loaders: dict[str, Any] = dict(self.individual_dataloaders)
        states = {name: each.state_dict() for name, each in loaders.items() if _has_state(each)}
        now = self.current_iterator
        if now is None and not self._next:
            return states
        over = getattr(now, "ended", False) and self._epoch is None  # the user's own loop continues with the next epoch
        begins = now is None or over
        if now is not None and (theirs := now.state_dict()):
            states[_ITERATOR] = theirs
        position = now.position() if isinstance(now, SourcesIterator) and not begins else None
        left_off = sorted(name for name, source in self._sources.items() if source.is_left_off)
        count = self._next if begins else self._count
        return {**states, _OWN: {"epoch": self._epoch, "count": count, "position": position, "left_off": left_off}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there with the next iteration; also from a state that TorchTNT saved, as exactly as that is.

        Raises:
            UsageError: a state of something else; when the iteration begins: other loaders than were saved.
        """
        loaders: dict[str, Any] = dict(self.individual_dataloaders)
        if state_dict and not {_OWN, _ITERATOR, *loaders} & set(state_dict):
            raise LoaderError(f"state_dict must be that of a MultiDataLoader, got one with {sorted(state_dict)}.")
        saved = state_dict.get(_OWN, {"epoch": self._epoch, "count": self._next, "position": None, "left_off": []})
        sources = (saved["position"] or {}).get("sources", {})
        self._sources = {name: Source(name, loader) for name, loader in self.individual_dataloaders.items()}
        for name, loader in loaders.items():
            if not _has_state(loader):
                continue
            at = sources.get(name, {"used": 0, "over": True})
            if name not in state_dict:
                logger.warning(
                    "Skipping loading state dict for dataloader %s as there is no corresponding entry in the state dict", name
                )
            elif _OWN in state_dict and isinstance(loader, BaseLoader) and (at["over"] or not at["used"]):
                loader.set_epoch(state_dict[name]["epoch"])  # its next pass begins at its start, and it remembers another
            else:
                loader.load_state_dict(state_dict[name])
                self._sources[name].put_back(left_off=name in saved["left_off"])
        self._loaded, self.current_iterator = dict(state_dict), None
        self._epoch, self._next = saved["epoch"], int(saved["count"])


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _surely_empty(loader: Any) -> bool:
    try:
        return isinstance(loader, Sized) and len(loader) == 0
    except TypeError:  # a DataLoader over something without a length
        return False
