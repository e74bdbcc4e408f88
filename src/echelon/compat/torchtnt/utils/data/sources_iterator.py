"""The base of iterators over several loaders: what a pass of each is, and what the end of one means."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from echelon.common.errors import LoaderError
from echelon.compat.torchtnt.utils.data.source import END, Source
from echelon.compat.torchtnt.utils.data.strategies import DataIterationStrategy, StoppingMechanism
from echelon.data.parts import Padding
from echelon.world import agree

__all__ = ["MultiIterator", "SourcesIterator"]

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
            raise LoaderError("individual_dataloaders must hold at least one loader, got none.")
        try:
            self.mechanism = StoppingMechanism(mechanism)
        except ValueError:
            raise LoaderError(f"stopping_mechanism must be a StoppingMechanism, got {mechanism!r}.") from None
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
            raise LoaderError(
                "some loaders have a sample for this rank in this step and others do not; batches are used together, or "
                "left out together. Give the loaders tail='drop'."
            )
        return Padding({name: batch.batch for name, batch in found.items()})  # type: ignore[return-value]

    def order_of(self, names: list[str] | None) -> list[str]:
        order = list(self.sources) if names is None else list(names)
        unknown = sorted(set(order) - set(self.sources))
        if unknown or not order:
            raise LoaderError(f"iteration_order must name loaders among {', '.join(map(repr, self.sources))}, got {order}.")
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

    def position(self) -> dict[str, Any]:
        """Where it stands, exactly; `state_dict` is what TorchTNT's iterator of that name says of it."""
        return {"sources": {name: source.state() for name, source in self.sources.items()}, "ended": self.ended}

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on from `position()`; called before the first batch."""
        saved = position["sources"]
        if set(saved) != set(self.sources):
            raise LoaderError(f"the loaders must be those of the saved run, {sorted(saved)}, got {sorted(self.sources)}.")
        for name, source in self.sources.items():
            source.go_on(saved[name])
        self.ended = bool(position["ended"])
