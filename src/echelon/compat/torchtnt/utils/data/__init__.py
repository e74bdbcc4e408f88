"""torchtnt.utils.data: several loaders as one, prefetching, profiling and synthetic data, by their names there."""

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
from echelon.compat.torchtnt.utils.data.profile_dataloader import profile_dataloader
from echelon.compat.torchtnt.utils.data.synthetic_data import AbstractRandomDataset

__all__ = [
    "AbstractRandomDataset",
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
    "profile_dataloader",
]
