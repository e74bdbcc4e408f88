"""A torch DataLoader that is not divided between ranks, in torch's own order, that can resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.common.errors import CheckpointCorruptError, CheckpointMismatchError, LoaderError, UsageError
from echelon.common.numbers import whole
from echelon.world import rng

__all__ = ["Replayed"]

_END = object()


class Replayed:
    """Its state is the RNG state with which the epoch began, and the number of batches given since.

    With these, the sampler draws the same epoch again. Samples of a map-style dataset that were given before are not read again;
    batches of other loaders are read again and dropped. Random numbers of loader workers are not repeated.

    Args:
        loader: a DataLoader without a state of its own.
    """

    STATE = frozenset({"begun", "given"})

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._begun: dict[str, Any] | None = None
        self._given = self._skips = 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # asked by copy or pickle before it is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skips, self._skips = self._skips, 0
        if not skips:
            self._begun, self._given = self._drawn(), 0
            return self._each(iter(self.loader), 0)
        now = self._drawn()
        assert self._begun is not None
        self._put_back(self._begun)
        batches = iter(self._rest(skips))
        rng.put_back(now)  # but not the loader's own generator, which is now where the epoch has left it
        return self._each(batches, skips)

    def _each(self, batches: Iterator[Any], given: int) -> Iterator[Any]:
        length = None if isinstance(self.loader.dataset, IterableDataset) else len(self.loader)
        while (batch := next(batches, _END)) is not _END:
            given += 1
            if given == length:
                next(batches, None)  # at its end a sampler may draw from its generator
            self._given = given
            yield batch

    def _rest(self, skips: int) -> Any:
        """The batches of an epoch that begins now, without the first `skips`."""
        loader = self.loader
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            batches = iter(loader)
            for given in range(skips):
                if next(batches, _END) is _END:
                    raise _too_short(skips, given)
            return batches
        by_batches = loader.batch_size is None and loader.batch_sampler is not None
        how: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
        if not by_batches:
            how = {"sampler": loader.sampler, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
        # Iterate as torch does, so that the same numbers are drawn, but over a dataset whose samples are their own indices.
        chosen = list(DataLoader(_Numbers(), collate_fn=_as_it_is, generator=loader.generator, **how))
        if len(chosen) < skips:
            raise _too_short(skips, len(chosen))
        chosen = chosen[skips:]
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
        alone = loader.batch_size is None and not by_batches
        return DataLoader(
            loader.dataset,
            **({"sampler": chosen, "batch_size": None} if alone else {"batch_sampler": chosen}),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator(),
            **workers,
        )

    # --- the state

    def _drawn(self) -> dict[str, Any]:
        generator = getattr(self.loader, "generator", None)
        return {**rng.states(), "cuda": None, "generator": None if generator is None else generator.get_state()}

    def _put_back(self, drawn: dict[str, Any]) -> None:
        rng.put_back(drawn)
        if drawn["generator"] is not None and self.loader.generator is not None:
            self.loader.generator.set_state(drawn["generator"])

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self._begun, "given": self._given} if self._begun is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            CheckpointMismatchError: another kind of loader was saved.
            CheckpointCorruptError: the state is invalid.
        """
        if state_dict.keys() != self.STATE:
            raise CheckpointMismatchError(
                "the checkpoint holds the position of another kind of loader in the middle of an epoch, from which an "
                "undivided DataLoader cannot resume. Give the same loader, or resume from a checkpoint of an epoch's end."
            )
        now = self._drawn()
        try:
            self._put_back(begun := dict(state_dict["begun"]))
            self._given = self._skips = whole("given", state_dict["given"], at_least=0, kind=LoaderError)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:  # and a UsageError
            raise CheckpointCorruptError(f"the checkpoint's state of the DataLoader is not valid: {error!r}.") from None
        finally:
            self._put_back(now)
        self._begun = begun


def _too_short(skips: int, given: int) -> UsageError:
    return LoaderError(f"the DataLoader must resume after {skips} batches, but has only {given}.")


class _Numbers(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return index


def _as_it_is(samples: Any) -> Any:
    return samples
