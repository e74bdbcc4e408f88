"""A torch DataLoader without a state of its own, in torch's order, goes on in the middle of an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.common.errors import CheckpointCorruptError, LoaderError
from echelon.common.numbers import whole
from echelon.data.generators import generators_of
from echelon.world import rng
from echelon.world.init import world_size

__all__ = ["Replayed", "with_state"]

_END = object()


@dataclass
class _Position:
    """Where a DataLoader stands: the RNG states with which its epoch began, and the number of batches given since."""

    begun: dict[str, Any] | None = None
    given: int = 0


# By DataLoader, as the script knows no other object: it restores with the one that it trains with.
_positions: weakref.WeakKeyDictionary[DataLoader[Any], _Position] = weakref.WeakKeyDictionary()


def with_state(loader: Any) -> Any:
    """The loader, or a `Replayed` of a DataLoader that has no state of its own."""
    return Replayed(loader) if isinstance(loader, DataLoader) and not hasattr(loader, "state_dict") else loader


class Replayed:
    """An epoch of a DataLoader. Its state is the RNG states with which the epoch began, and the number of batches given since.

    With these, the sampler draws the same epoch again. Samples of a map-style dataset that were given before are not read again;
    batches of other loaders are read again and dropped. Random numbers of loader workers are not repeated.

    Args:
        loader: a DataLoader without a state of its own.
    """

    STATE = frozenset({"begun", "given"})

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self._skips = loader, 0
        self._at = _positions.setdefault(loader, _Position())

    def __iter__(self) -> Iterator[Any]:
        at, skips, self._skips = self._at, self._skips, 0
        now = self._drawn()
        if skips:
            assert at.begun is not None
            self._put_back(at.begun)
            batches = iter(self._rest(skips))
            rng.put_back(now)  # but not the loader's own generators, which are now where the epoch has them
        else:
            at.begun, batches = now, iter(self.loader)
        at.given = skips
        return self._each(batches)

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._at.given += 1
            yield batch

    def goes_on(self, given: int) -> bool:
        """Have the next iteration give the epoch's batches after the first `given`. False if it was neither read so far nor
        restored.
        """
        self._skips = given if self._at.begun is not None and self._at.given >= given else 0
        return self._skips > 0

    def _rest(self, skips: int) -> Any:
        """The batches of an epoch that begins now, without the first `skips`."""
        loader = self.loader
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            return _without_first(skips, iter(loader))
        by_batches = loader.batch_size is None and loader.batch_sampler is not None
        how: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
        if not by_batches:
            how = {"sampler": loader.sampler, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
        # Iterate as torch does, so that the same numbers are drawn, but over a dataset whose samples are their own indices.
        # One by one: a sampler may have no end.
        chosen = _without_first(skips, iter(DataLoader(_Numbers(), collate_fn=_as_it_is, generator=loader.generator, **how)))
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
        return {**rng.states(), "cuda": None, "generators": [each.get_state() for each in generators_of(self.loader)]}

    def _put_back(self, drawn: dict[str, Any]) -> None:
        rng.put_back(drawn)
        for generator, state in zip(generators_of(self.loader), drawn["generators"], strict=True):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        at = self._at
        return {} if at.begun is None else {"begun": at.begun, "given": at.given, **self._division()}

    def _division(self) -> dict[str, Any]:
        """What a number of batches means only together with."""
        return {"batch_size": self.loader.batch_size, "ranks": world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stand where the saved loader stood. Does nothing if another kind of loader was saved, or batches, generators or ranks
        are others now: the epoch then begins anew, which the loop tells.

        Raises:
            CheckpointCorruptError: the state is invalid.
        """
        if not state_dict.keys() >= self.STATE:
            return
        now = self._drawn()
        try:
            begun, given = dict(state_dict["begun"]), whole("given", state_dict["given"], at_least=0, kind=LoaderError)
            alike = all(state_dict.get(name, value) == value for name, value in self._division().items())
            alike = alike and len(begun["generators"]) == len(now["generators"])
            if alike:
                self._put_back(begun)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:  # and a UsageError
            raise CheckpointCorruptError(f"the checkpoint's state of the DataLoader is not valid: {error!r}.") from None
        finally:
            self._put_back(now)
        if alike:
            self._at.begun, self._at.given = begun, given


def _without_first(skips: int, batches: Iterator[Any]) -> Iterator[Any]:
    for given in range(skips):
        if next(batches, _END) is _END:
            raise LoaderError(f"the DataLoader must resume after {skips} batches, but has only {given}.")
    return batches


class _Numbers(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return index


def _as_it_is(samples: Any) -> Any:
    return samples
