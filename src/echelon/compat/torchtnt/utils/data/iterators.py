"""torchtnt.utils.data.iterators."""

from echelon.data.multi_iterators import (
    AllDatasetBatches,
    AllDatasetBatchesIterator,
    DataIterationStrategy,
    DataIterationStrategyRegistry,
    InOrder,
    InOrderIterator,
    MultiIterator,
    RandomizedBatchSampler,
    RandomizedBatchSamplerIterator,
    RoundRobin,
    RoundRobinIterator,
    StoppingMechanism,
)

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
    "StoppingMechanism",
]
