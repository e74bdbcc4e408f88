"""torchtnt.utils.data.iterators: in which order batches of several loaders come.

A strategy is a value; its iterator reads the loaders one batch at a time and gives dicts of a loader's name and its batch.
Nothing is read before it is asked for. Random choices are a function of (seed, epoch, how many were made), so where an
iterator stands is a few numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from echelon.common.errors import LoaderError, UsageError
from echelon.compat.torchtnt.utils.data.source import END
from echelon.compat.torchtnt.utils.data.sources_iterator import MultiIterator, SourcesIterator
from echelon.compat.torchtnt.utils.data.strategies import (
    AllDatasetBatches,
    DataIterationStrategy,
    InOrder,
    RandomizedBatchSampler,
    RoundRobin,
    StoppingMechanism,
)
from echelon.data.order import key_of, mix64
from echelon.world import agree

__all__ = [
    "AllDatasetBatches",
    "AllDatasetBatchesIterator",
    "DataIterationStrategy",
    "DataIterationStrategyRegistry",
    "InOrder",
    "InOrderIterator",
    "MultiIterator",
    "RandomizedBatchSampler",
    "RandomizedBatchSamplerIterator",
    "RoundRobin",
    "RoundRobinIterator",
    "SourcesIterator",
    "StoppingMechanism",
]

logger = logging.getLogger(__name__)


class NoIteratorError(UsageError, NotImplementedError):
    """Nothing carries out a strategy."""


class WeightsError(UsageError, AssertionError):
    """Weights that do not belong to the loaders."""


class RoundRobinIterator(SourcesIterator):
    """Carries out RoundRobin: `{name: batch}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: RoundRobin) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, iteration_strategy.stopping_mechanism)
        _refuse_wrapping(self.mechanism, "RoundRobin")
        self._order = self.order_of(iteration_strategy.iteration_order)
        self._turn = 0
        self.finished_dataloaders: list[str] = []

    @property
    def cur_dataloader(self) -> str:
        """The loader whose turn it was last, or that has the first turn."""
        return self._order[(self._turn - 1) % len(self._order) if self._turn else 0]

    def draw(self) -> dict[str, Any] | None:
        while not self.ended and not all(map(self.gone, self._order)):
            name = self._order[self._turn % len(self._order)]
            self._turn += 1
            if self.gone(name):
                continue
            batch = self.take(name, self._order)
            if batch is not END:
                return {name: batch}
            if not self.ended or all(map(self.gone, self._order)):
                self.finished_dataloaders.append(name)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"finished_dataloaders": list(self.finished_dataloaders), "cur_dataloader": self.cur_dataloader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.finished_dataloaders = [name for name in state_dict["finished_dataloaders"] if name in self.sources]
        for name in self.finished_dataloaders:
            self.sources[name].end(left_off=False)
        current = state_dict["cur_dataloader"]
        if current not in self._order:
            logger.warning("Did not find %s in %s. Skipping setting cur_dataloader", current, self._order)
            return
        self._turn = self._order.index(current) + 1

    def position(self) -> dict[str, Any]:
        return {**super().position(), "turn": self._turn}

    def go_to(self, position: dict[str, Any]) -> None:
        super().go_to(position)
        self._turn = int(position["turn"])
        self.finished_dataloaders = [name for name in dict.fromkeys(self._order) if self.gone(name)]


def _refuse_wrapping(mechanism: StoppingMechanism, strategy: str) -> None:
    if mechanism is StoppingMechanism.WRAP_AROUND_UNTIL_KILLED:
        raise NoIteratorError(f"{mechanism.value} is not implemented for {strategy}. RandomizedBatchSampler has it.")


class AllDatasetBatchesIterator(SourcesIterator):
    """Carries out AllDatasetBatches: `{name: batch, name: batch, ...}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: AllDatasetBatches) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, iteration_strategy.stopping_mechanism)
        _refuse_wrapping(self.mechanism, "AllDatasetBatches")

    def draw(self) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for name in self.sources:
            if self.gone(name):
                continue
            batch = self.take(name, self.sources)
            if self.ended:
                return None
            if batch is not END:
                found[name] = batch
        return found or None


class RandomizedBatchSamplerIterator(SourcesIterator):
    """Carries out RandomizedBatchSampler: `{name: batch}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: RandomizedBatchSampler) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, iteration_strategy.stopping_mechanism)
        self._seed, self._draws = iteration_strategy.seed, 0
        self._weights = _weights(iteration_strategy.weights, list(self.sources))
        self.together = iteration_strategy.enforce_same_loader_across_ranks
        self._compared = not self.together

    def draw(self) -> dict[str, Any] | None:
        if not self._compared:  # at the first batch: loaders are made before the ranks have met
            self._compared = True
            self._compare()
        while not self.ended:
            names = [name for name in self._weights if not self.gone(name)]
            if not names:
                break
            name = self._choice(names)
            batch = self.take(name, self._weights)
            if batch is not END:
                return {name: batch}
        return None

    def _compare(self) -> None:
        what = [self._seed, self.epoch, self._draws, self.mechanism.value, sorted(self._weights.items())]
        agree.same_on_all("which loaders are drawn from", what, "Give every rank the same names, weights, seed and state.")

    def _choice(self, names: list[str]) -> str:
        word = mix64(np.array([key_of(self._seed, self.epoch, 307) + self._draws * _STEP & _MASK], dtype=np.uint64))
        self._draws += 1
        place = (int(word[0]) >> 11) * 2.0**-53 * sum(self._weights[name] for name in names)
        for name in names:
            place -= self._weights[name]
            if place < 0:
                return name
        return names[-1]  # rounding

    def position(self) -> dict[str, Any]:
        return {**super().position(), "draws": self._draws}

    def go_to(self, position: dict[str, Any]) -> None:
        super().go_to(position)
        self._draws = int(position["draws"])


_STEP, _MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF


def _weights(given: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """Of those that can be drawn, in an order that does not depend on that of the loaders."""
    weights = dict.fromkeys(names, 1.0) if given is None else dict(given)
    missing = [name for name in names if name not in weights]
    if missing:
        shown = ", ".join(map(repr, missing))
        raise WeightsError(
            f"Weight keys must match dataloader keys: weights must have one for each loader, got none for {shown}."
        )
    for name in names:
        if not math.isfinite(weights[name]) or weights[name] < 0:
            raise LoaderError(f"the weight of {name!r} must be finite and at least 0, got {weights[name]}.")
    drawn = {name: float(weights[name]) for name in sorted(names) if weights[name]}
    if not drawn:
        raise LoaderError("at least one of the weights must be above 0, got only zeros.")
    return drawn


class InOrderIterator(SourcesIterator):
    """Carries out InOrder: `{name: batch}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: InOrder) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, StoppingMechanism.ALL_DATASETS_EXHAUSTED)
        self._order = self.order_of(iteration_strategy.iteration_order)
        self._at = 0

    @property
    def iterators_finished(self) -> int:
        return self._at

    @property
    def cur_iterator(self) -> str:
        return self._order[min(self._at, len(self._order) - 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"iterators_finished": self.iterators_finished, "cur_iterator": self.cur_iterator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finished, current = state_dict["iterators_finished"], state_dict["cur_iterator"]
        if current not in self._order or not 0 <= finished <= len(self._order):
            logger.warning(
                "Will not restore InOrderIterator state, since expected dataloader was not found in available iterators: %s",
                current,
            )
            return
        self._at = finished

    def draw(self) -> dict[str, Any] | None:
        while self._at < len(self._order):
            source = self.sources[self._order[self._at]]
            batch = END if source.over else self.read(source)
            if batch is not END:
                return {source.name: batch}
            self._at += 1
            if self._at < len(self._order) and (again := self.sources[self._order[self._at]]).over and not again.is_empty:
                again.restart()
        return None

    def position(self) -> dict[str, Any]:
        return {**super().position(), "at": self._at}

    def go_to(self, position: dict[str, Any]) -> None:
        super().go_to(position)
        self._at = int(position["at"])


class DataIterationStrategyRegistry:
    """Which iterator carries out a strategy. One of your own: `REGISTRY[MyStrategy] = MyIterator`."""

    REGISTRY: ClassVar[dict[type[DataIterationStrategy], type[Any]]] = {
        RoundRobin: RoundRobinIterator,
        AllDatasetBatches: AllDatasetBatchesIterator,
        RandomizedBatchSampler: RandomizedBatchSamplerIterator,
        InOrder: InOrderIterator,
    }

    @classmethod
    def get(cls, iteration_strategy: DataIterationStrategy) -> type[Any]:
        """
        Raises:
            UsageError: a strategy that was not registered.
        """
        found = cls.REGISTRY.get(type(iteration_strategy))
        if found is None:
            raise NoIteratorError(
                f"No iterator implementation for {iteration_strategy}: it has no iterator. Give the loader an iterator_cls, or "
                f"register one in {cls.__name__}.REGISTRY."
            )
        return found
