"""A Trainer's batches: echelon's loaders, over datasets with the columns that the model takes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from transformers import trainer_utils

from echelon.common.errors import UsageError
from echelon.data.loader import Loader
from echelon.data.options import LoaderOptions
from echelon.data.sampled import SampledLoader
from echelon.data.stream import StreamLoader, is_divided

__all__ = ["InTurn", "Shuffled", "columns_of", "default_collator", "loader_of", "places_of", "without_adapters"]


def columns_of(model: torch.nn.Module, label_names: list[str]) -> list[str]:
    """Names of the forward's parameters and of labels."""
    return [*inspect.signature(without_adapters(model).forward).parameters, "label", "label_ids", *label_names]


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT model, whose own forward takes any argument; any other model unchanged."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    tokenizers = (transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor)
    if isinstance(processing_class, tokenizers):
        return transformers.DataCollatorWithPadding(processing_class)  # type: ignore[no-any-return]
    return transformers.default_data_collator  # type: ignore[no-any-return]


def loader_of(
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    columns: list[str] | None,
    args: Any,
    data_ranks: int,
    *,
    trains: bool,
    sampler: Any = None,
) -> Loader | StreamLoader:
    """
    Args:
        columns: the columns to keep; None keeps all.
        data_ranks: how many ranks have different samples.
        sampler: a script's own, over the samples of all ranks.
    Raises:
        UsageError: the dataset has no column that the model takes, or drop_last would drop all its samples.
    """
    if columns is not None:
        dataset, collator = _with_columns(dataset, collator, columns)
    each = args.per_device_train_batch_size if trains else args.per_device_eval_batch_size
    accumulation = args.gradient_accumulation_steps if trains else 1
    given: dict[str, Any] = {
        "accumulate": accumulation,
        "num_workers": args.dataloader_num_workers,
        "collate_fn": collator,
        "pin_memory": None if args.dataloader_pin_memory else False,
        "tail": "drop" if args.dataloader_drop_last else "keep",
    }
    size = each * data_ranks * accumulation
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        stream = StreamLoader(
            dataset, size, shards=None if hasattr(dataset, "set_place") or is_divided(dataset) else "stride", **given
        )
        stream.samples_of_a_rank = each * accumulation
        return stream
    shuffles = trains and args.train_sampling_strategy != "sequential"
    count = len(sampler) if sampler is not None else len(dataset)
    least = each * data_ranks if args.dataloader_drop_last else 1
    if count < least:
        phase = "train" if trains else "eval"
        raise UsageError(
            f"the {phase}_dataset must hold at least one batch of {each} x {data_ranks} ranks with dataloader_drop_last=True, "
            f"got {count} samples. Give a smaller per_device_{phase}_batch_size, or leave out dataloader_drop_last."
        )
    seed = args.data_seed if args.data_seed is not None else args.seed
    # Fewer ranks keep the global batch (`saving.ranks_that_share`). Another one is the script's choice and counts from here on.
    options = LoaderOptions(accept_changes={"global_batch"})
    if accumulation > 1:  # drop only what fills no micro-batch of all ranks; the last update may have fewer
        given["tail"] = "keep"
    given |= {"seed": seed, "options": options}
    if sampler is not None:
        loader: Loader = SampledLoader(dataset, sampler, size, **given)
    else:
        loader = Loader(dataset, size, shuffle=shuffles, **given)
    if args.dataloader_drop_last and accumulation > 1:
        loader.multiple = each * data_ranks
    loader.samples_of_a_rank = each * accumulation
    return loader


def places_of(loader: Any, counts: list[int]) -> list[list[int]] | None:
    """Positions in the dataset of the rows of this rank's batches. None if the batches are in order, or if it is not known.

    Args:
        loader: an evaluation's; its streams each keep every count-th sample, and take turns.
        counts: rows of each batch.
    """
    if not isinstance(loader, StreamLoader) or loader.shards != "stride":
        return None
    (rank, ranks), streams = loader.dp, max(1, loader.num_workers)
    size, apart = loader.global_batch // ranks, ranks * streams
    turns = [divmod(number, streams) for number in range(len(counts))]
    firsts = [turn * size * apart + rank * streams + stream for turn, stream in turns]
    return [[first + row * apart for row in range(count)] for first, count in zip(firsts, counts, strict=True)]


class Shuffled(RandomSampler):
    """What a Trainer's `_get_train_sampler` gives if no subclass has another: torch's order, in a DataLoader of the script's."""


class InTurn(SequentialSampler):
    """The same for train_sampling_strategy="sequential"."""


def _with_columns(dataset: Any, collator: Callable[[list[Any]], Any], columns: list[str]) -> tuple[Any, Any]:
    """(dataset, collator) without unused columns. A dataset of the library `datasets` never reads them."""
    names = getattr(dataset, "column_names", None)
    if names and hasattr(dataset, "remove_columns"):
        unused = [name for name in names if name not in columns]
        if len(unused) == len(names):
            raise UsageError(
                f"the dataset must have a column that the model's forward takes ({', '.join(columns)}), got {', '.join(names)}. "
                "Rename its columns, or give remove_unused_columns=False."
            )
        return (dataset.remove_columns(unused) if unused else dataset), collator
    return dataset, trainer_utils.RemoveColumnsCollator(collator, columns)
