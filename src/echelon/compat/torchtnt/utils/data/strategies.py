"""torchtnt.utils.data: the strategies by which several loaders are read as one. They are values; iterators carry them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "AllDatasetBatches",
    "DataIterationStrategy",
    "InOrder",
    "RandomizedBatchSampler",
    "RoundRobin",
    "StoppingMechanism",
]


class StoppingMechanism(StrEnum):
    """When the epoch ends.

    ALL_DATASETS_EXHAUSTED: when every loader is; one that is exhausted gives nothing more.
    SMALLEST_DATASET_EXHAUSTED: when the first one is.
    RESTART_UNTIL_ALL_DATASETS_EXHAUSTED: when every loader was exhausted once; until then each begins again.
    WRAP_AROUND_UNTIL_KILLED: never; each begins again. Of RandomizedBatchSampler alone.
    """

    ALL_DATASETS_EXHAUSTED = "ALL_DATASETS_EXHAUSTED"
    SMALLEST_DATASET_EXHAUSTED = "SMALLEST_DATASET_EXHAUSTED"
    RESTART_UNTIL_ALL_DATASETS_EXHAUSTED = "RESTART_UNTIL_ALL_DATASETS_EXHAUSTED"
    WRAP_AROUND_UNTIL_KILLED = "WRAP_AROUND_UNTIL_KILLED"


@dataclass
class DataIterationStrategy:
    """Base of strategies; one of your own also needs a MultiIterator of its own."""


@dataclass
class RoundRobin(DataIterationStrategy):
    """One batch of each loader in turn.

    Args:
        iteration_order: names, which may come more than once; by default the loaders' order. A loader left out gives nothing.
    """

    stopping_mechanism: StoppingMechanism = StoppingMechanism.ALL_DATASETS_EXHAUSTED
    iteration_order: list[str] | None = None


@dataclass
class AllDatasetBatches(DataIterationStrategy):
    """One batch of every loader at once; with ALL_DATASETS_EXHAUSTED, of every one that has some left."""

    stopping_mechanism: StoppingMechanism = StoppingMechanism.ALL_DATASETS_EXHAUSTED


@dataclass
class RandomizedBatchSampler(DataIterationStrategy):
    """A batch of a loader drawn by its weight.

    Args:
        weights: by name, 0 or more; by default all the same. A loader of weight 0 gives nothing.
        enforce_same_loader_across_ranks: every rank draws the same loader, and one that ends on a rank ends on all of them,
            though others have batches left. Every rank then reads equally many batches. Costs a small message a batch.
        seed: of the draws. The same on all ranks makes them draw alike while their loaders are equally long.
    """

    weights: dict[str, float] | None = None
    stopping_mechanism: StoppingMechanism = StoppingMechanism.ALL_DATASETS_EXHAUSTED
    enforce_same_loader_across_ranks: bool = False
    seed: int = 0


@dataclass
class InOrder(DataIterationStrategy):
    """All batches of one loader, then all of the next.

    Args:
        iteration_order: names, which may come more than once; by default the loaders' order.
    """

    iteration_order: list[str] | None = None
