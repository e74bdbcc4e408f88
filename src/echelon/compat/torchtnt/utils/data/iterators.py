"""torchtnt.utils.data.iterators: in which order batches of several loaders come.

A strategy is a value; its iterator reads the loaders one batch at a time and gives dicts of a loader's name and its batch.
Nothing is read before it is asked for. Random choices are a function of (seed, epoch, how many were made), so where an
iterator stands is a few numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from echelon.compat.torchtnt.utils.data.source import END, Source
from echelon.compat.torchtnt.utils.data.strategies import (
    AllDatasetBatches,
    DataIterationStrategy,
    InOrder,
    RandomizedBatchSampler,
    RoundRobin,
    StoppingMechanism,
)
from echelon.contracts.errors import UsageError
from echelon.data.order import key_of, mix64
from echelon.data.parts import Padding
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

_RESTARTING = (StoppingMechanism.RESTART_UNTIL_ALL_DATASETS_EXHAUSTED, StoppingMechanism.WRAP_AROUND_UNTIL_KILLED)


class MultiIterator(Iterator[dict[str, Any]]):
    """Base of what iterates over several loaders for one epoch.

    Attributes:
        epoch: which one; decides random choices.
    """

    def __init__(
        self,
        individual_dataloaders: Mapping[str, Iterable[Any]],
        iteration_strategy: DataIterationStrategy,
    ) -> None:
        self.individual_dataloaders = individual_dataloaders
        self.iteration_strategy = iteration_strategy
        self.epoch = 0

    def __str__(self) -> str:
        return str(self.iteration_strategy)

    @abstractmethod
    def __next__(self) -> dict[str, Any]:
        """The next batch or batches, by their loaders' names."""

    def state_dict(self) -> dict[str, Any]:
        """Its position, besides the states of the loaders."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; called before the first batch."""


class SourcesIterator(MultiIterator):
    """What our iterators share: the loaders' passes, and what the end of one means.

    Attributes:
        mechanism: when the epoch ends.
        ended: whether it has.
    """

    together = False  # whether a loader that ends on one rank ends on all

    def __init__(
        self,
        individual_dataloaders: Mapping[str, Iterable[Any]],
        iteration_strategy: DataIterationStrategy,
        mechanism: StoppingMechanism,
    ) -> None:
        super().__init__(individual_dataloaders, iteration_strategy)
        if not individual_dataloaders:
            raise UsageError("individual_dataloaders must hold at least one loader, got none.")
        if not isinstance(mechanism, StoppingMechanism):
            raise UsageError(f"stopping_mechanism must be a StoppingMechanism, got {mechanism!r}.")
        self.mechanism = mechanism
        self.sources = {name: Source(name, loader) for name, loader in individual_dataloaders.items()}
        self.ended = False

    @abstractmethod
    def draw(self) -> dict[str, Any] | None:
        """The next batches; None at the epoch's end."""

    def __next__(self) -> dict[str, Any]:
        found = None if self.ended else self.draw()
        if found is None:
            self.ended = True
            raise StopIteration
        padded = [isinstance(batch, Padding) for batch in found.values()]
        if not any(padded):
            return found
        if not all(padded):
            raise UsageError(
                "some loaders have a sample for this rank in this step and others do not; batches are used together, or "
                "left out together. Give the loaders tail='drop'."
            )
        return Padding({name: batch.batch for name, batch in found.items()})  # type: ignore[return-value]

    def order_of(self, names: list[str] | None) -> list[str]:
        order = list(self.sources) if names is None else list(names)
        unknown = sorted(set(order) - set(self.sources))
        if unknown or not order:
            raise UsageError(f"iteration_order must name loaders among {', '.join(map(repr, self.sources))}, got {order}.")
        return order

    def prepare(self, epoch: int, *, told: bool, allow_empty: bool) -> None:
        """Before the first batch: which epoch it is, whether samplers are told, whether a loader may have no batch."""
        self.epoch = epoch
        for source in self.sources.values():
            source.epoch, source.allow_empty = epoch if told else None, allow_empty

    def gone(self, name: str) -> bool:
        """Whether a loader gives nothing more in this epoch."""
        return self.sources[name].over

    def take(self, name: str, counting: Iterable[str]) -> Any:
        """A batch of one loader; END if it has none. Sets `ended` if the epoch ends with it.

        Args:
            counting: the loaders whose ends count.
        """
        source = self.sources[name]
        batch = self.read(source)
        if batch is not END or source.is_empty:
            return batch
        if self.mechanism is StoppingMechanism.SMALLEST_DATASET_EXHAUSTED:
            self.ended = True
        elif self.mechanism is StoppingMechanism.RESTART_UNTIL_ALL_DATASETS_EXHAUSTED:
            self.ended = all(self.sources[each].finished for each in counting)
        if self.ended or self.mechanism not in _RESTARTING:
            return END
        source.restart()
        return self.read(source)

    def read(self, source: Source) -> Any:
        batch = source.read()
        ends = batch is END
        nothing = ends and not source.used
        if self.together:  # what is left elsewhere of a loader that ends here is left out
            ends = agree.any_rank(ends)
            nothing = ends and agree.any_rank(nothing)
        if not ends:
            return batch
        if nothing:
            source.gave_nothing()
        source.end(left_off=batch is not END)
        return END

    def state_dict(self) -> dict[str, Any]:
        return {"sources": {name: source.state() for name, source in self.sources.items()}, "ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["sources"]
        if set(saved) != set(self.sources):
            raise UsageError(f"the loaders must be those of the saved run, {sorted(saved)}, got {sorted(self.sources)}.")
        for name, source in self.sources.items():
            source.go_on(saved[name])
        self.ended = bool(state_dict["ended"])


class RoundRobinIterator(SourcesIterator):
    """Carries out RoundRobin: `{name: batch}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: RoundRobin) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, iteration_strategy.stopping_mechanism)
        self._order = self.order_of(iteration_strategy.iteration_order)
        self._turn = 0

    def draw(self) -> dict[str, Any] | None:
        while not self.ended and not all(map(self.gone, self._order)):
            name = self._order[self._turn % len(self._order)]
            self._turn += 1
            if self.gone(name):
                continue
            batch = self.take(name, self._order)
            if batch is not END:
                return {name: batch}
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turn": self._turn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._turn = int(state_dict["turn"])


class AllDatasetBatchesIterator(SourcesIterator):
    """Carries out AllDatasetBatches: `{name: batch, name: batch, ...}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: AllDatasetBatches) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, iteration_strategy.stopping_mechanism)

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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draws": self._draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._draws = int(state_dict["draws"])


_STEP, _MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF


def _weights(given: Mapping[str, float] | None, names: list[str]) -> dict[str, float]:
    """Of those that can be drawn, in an order that does not depend on that of the loaders."""
    weights = dict.fromkeys(names, 1.0) if given is None else dict(given)
    missing = [name for name in names if name not in weights]
    if missing:
        raise UsageError(f"weights must have one for each loader, got none for {', '.join(map(repr, missing))}.")
    for name in names:
        if not math.isfinite(weights[name]) or weights[name] < 0:
            raise UsageError(f"the weight of {name!r} must be finite and at least 0, got {weights[name]}.")
    drawn = {name: float(weights[name]) for name in sorted(names) if weights[name]}
    if not drawn:
        raise UsageError("at least one of the weights must be above 0, got only zeros.")
    return drawn


class InOrderIterator(SourcesIterator):
    """Carries out InOrder: `{name: batch}`."""

    def __init__(self, individual_dataloaders: Mapping[str, Iterable[Any]], iteration_strategy: InOrder) -> None:
        super().__init__(individual_dataloaders, iteration_strategy, StoppingMechanism.ALL_DATASETS_EXHAUSTED)
        self._order = self.order_of(iteration_strategy.iteration_order)
        self._at = 0

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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._at = int(state_dict["at"])


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
            raise UsageError(
                f"{iteration_strategy!r} has no iterator: give the loader an iterator_cls, or register one in "
                f"{cls.__name__}.REGISTRY."
            )
        return found
