"""torchtnt.utils.data: several loaders as one, and prefetching, by their names there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils.data.data_prefetcher import CudaDataPrefetcher
from echelon.compat.torchtnt.utils.data.iterators import (
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
from echelon.compat.torchtnt.utils.data.multi_dataloader import MultiDataLoader

__all__ = [
    "AllDatasetBatches",
    "AllDatasetBatchesIterator",
    "CudaDataPrefetcher",
    "DataIterationStrategy",
    "DataIterationStrategyRegistry",
    "InOrder",
    "InOrderIterator",
    "MultiDataLoader",
    "MultiIterator",
    "RandomizedBatchSampler",
    "RandomizedBatchSamplerIterator",
    "RoundRobin",
    "RoundRobinIterator",
    "StoppingMechanism",
]

__getattr__ = absent("utils.data")
