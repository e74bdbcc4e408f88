"""The batches of a Trainer: datasets with the columns that the model takes, in echelon's loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import trainer_utils

from echelon.contracts.errors import CheckpointCorruptError, CheckpointMismatchError, UsageError
from echelon.contracts.numbers import whole
from echelon.data.loader import Loader
from echelon.data.options import LoaderOptions
from echelon.data.stream import StreamLoader, is_divided
from echelon.world import rng

__all__ = ["Counted", "columns_of", "default_collator", "loader_of"]


def columns_of(model: torch.nn.Module, label_names: list[str]) -> list[str]:
    """The names of what the model's forward takes, and of labels."""
    inner: Any = model
    base = getattr(model, "get_base_model", None)  # of PEFT, whose own forward takes anything
    if callable(base) and type(model).__module__.startswith("peft."):
        inner = base()
    return [*inspect.signature(inner.forward).parameters, "label", "label_ids", *label_names]


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    tokenizers = (transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor)
    if isinstance(processing_class, tokenizers):
        return transformers.DataCollatorWithPadding(processing_class)  # type: ignore[no-any-return]
    return transformers.default_data_collator  # type: ignore[no-any-return]


def loader_of(
    dataset: Any, collator: Callable[[list[Any]], Any], columns: list[str] | None, args: Any, data_ranks: int, *, trains: bool
) -> Loader | StreamLoader:
    """
    Args:
        columns: the only ones that are kept; None keeps all.
        data_ranks: ranks with different samples.
    Raises:
        UsageError: nothing in the dataset is for the model, or it is smaller than one update's samples.
    """
    if columns is not None:
        dataset, collator = _with_columns(dataset, collator, columns)
    each = args.per_device_train_batch_size if trains else args.per_device_eval_batch_size
    accumulation = args.gradient_accumulation_steps if trains else 1
    given: dict[str, Any] = {
        "accumulation": accumulation,
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
    if len(dataset) < size and (shuffles or given["tail"] == "drop"):
        phase = "train" if trains else "eval"
        raise UsageError(
            f"the {phase}_dataset must hold at least one batch of {each} x {data_ranks} ranks x {accumulation} accumulation "
            f"steps, got {len(dataset)} samples. Give a smaller per_device_{phase}_batch_size."
        )
    seed = args.data_seed if args.data_seed is not None else args.seed
    # Ranks that are fewer keep the batch (`saving.ranks_that_share`); another one was chosen, and counts from here on.
    options = LoaderOptions(accept_changes={"global_batch"})
    loader = Loader(dataset, size, seed=seed, shuffle=shuffles, options=options, **given)
    loader.samples_of_a_rank = each * accumulation
    return loader


def _with_columns(dataset: Any, collator: Callable[[list[Any]], Any], columns: list[str]) -> tuple[Any, Any]:
    """Without what the model's forward does not take; a dataset of the library datasets never reads it."""
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


class Counted:
    """A DataLoader of the user's, whose place is the number of batches that were read of an epoch.

    A run that goes on reads these again and leaves them out, as transformers does; with the random numbers that the epoch began
    with, so that a sampler which draws from torch's own generator draws the same again.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._read = self._skip = 0
        self._began: dict[str, Any] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The loader's own, by which its length is judged, and read to its end."""
        return type(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._skip:
            rng.put_back(self._began)
        else:
            self._began = rng.states()
        iterator, self._read, self._skip = iter(self._loader), self._skip, 0
        for count in range(self._read):
            if next(iterator, None) is None:
                raise UsageError(f"the DataLoader must go on after {self._read} batches, but has only {count}.")
        return self._counting(iterator)

    def _counting(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._read += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._read, "began": self._began}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.state_dict().keys():
            raise CheckpointMismatchError(
                "the run that was saved had another kind of loader than a DataLoader of its own. Go on with the one that it had."
            )
        now = rng.states()
        try:
            rng.put_back(state_dict["began"])
            self._read = self._skip = whole("batches", state_dict["batches"], at_least=0)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:  # and a UsageError
            raise CheckpointCorruptError(f"the checkpoint's state of the DataLoader is not valid: {error!r}.") from None
        finally:
            rng.put_back(now)
        self._began = state_dict["began"]
