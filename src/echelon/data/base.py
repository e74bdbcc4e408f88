"""What all loaders share: the global batch, and this rank's data-parallel rank and size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils.data import default_collate

from echelon.common.arguments import flags
from echelon.common.errors import LoaderError, require
from echelon.common.numbers import whole
from echelon.contracts.overrides import overrides
from echelon.contracts.restart_notes import note_loader
from echelon.data.options import AnyLoaderOptions, LoaderOptions
from echelon.data.resume import cannot_divide
from echelon.world.init import World

__all__ = ["BaseLoader", "Combined", "loaders_of"]


# Arguments of torch's DataLoader, and what is written here in their place.
_TORCHS = {
    "batch_size": "it takes global_batch, the samples of an update over all ranks, that is batch_size x ranks x accumulate",
    "gradient_accumulation_steps": "a unit or prepare() takes accumulate, the micro-batches of an update on each rank",
    "drop_last": 'write tail="drop" or tail="keep"',
}
# What belongs into the options, by the names that people look for, and how it is written there.
_OF_OPTIONS = {
    **dict.fromkeys(("dp", "dp_rank", "dp_size"), "dp=(dp_rank, dp_size)"),
    **{name: f"{name}=..." for name in ("timeout_s", "fingerprint", "accept_changes")},
    "timeout": "timeout_s=...",
}


class BaseLoader(ABC):
    """Base of loaders that are given the global batch; see `Loader` for the arguments.

    Raises:
        UsageError: a value that cannot be.
    """

    _options: type[AnyLoaderOptions] = LoaderOptions  # of this kind of loader
    _fixed_ranks = False  # whether a run can only resume with as many ranks

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for name in kwargs.keys() & _TORCHS.keys():
            raise LoaderError(f"{cls.__name__} has no {name}: {_TORCHS[name]}.")
        for name in kwargs.keys() & _OF_OPTIONS.keys():
            text = f"{cls._options.__name__}({_OF_OPTIONS[name]})"
            if name in ("fingerprint", "accept_changes") and not hasattr(cls._options, name):
                raise LoaderError(f"{cls.__name__} has no {name}: the state of a stream is its dataset's own. Leave it out.")
            raise LoaderError(f"{cls.__name__} takes {name} among its options: write options=echelon.data.{text}.")
        return super().__new__(cls)

    def __init__(
        self,
        global_batch: int,
        accumulate: int | None,
        tail: str,
        num_workers: int,
        collate_fn: Any,
        pin_memory: bool | None,
        options: AnyLoaderOptions | None,
    ) -> None:
        is_one = options is None or isinstance(options, AnyLoaderOptions)
        require(is_one, "options", f"{self._options.__name__}(...) or None", options, kind=LoaderError)
        self.options = options = self._options() if options is None else options
        require(tail in ("keep", "drop"), "tail", "'keep' or 'drop'", tail, kind=LoaderError)
        if accumulate is not None:
            accumulate = whole("accumulate", accumulate, at_least=1, kind=LoaderError)
        global_batch = whole("global_batch", global_batch, at_least=1, kind=LoaderError)
        if pin_memory is not None:
            flags(pin_memory=pin_memory, kind=LoaderError)
        require(
            collate_fn is None or callable(collate_fn),
            "collate_fn",
            "a function of a list of samples, or None",
            collate_fn,
            kind=LoaderError,
        )
        num_workers = whole("num_workers", num_workers, at_least=0, kind=LoaderError)
        self.global_batch, self.tail = global_batch, tail
        self.samples_of_a_rank: int | None = None  # of an update, where the script said so and not the global batch
        self._accumulate = overrides().accumulation or accumulate  # what it was told; None leaves it to the unit or prepare
        self.accumulation, self._times = self._accumulate or 1, 1
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.collate_fn = collate_fn or default_collate
        self._dp = options.dp
        self.epoch = 0
        self._told = False
        self.shares: int | None = None  # with bit-equal numbers, the number that the ranks must divide

    @property
    def dp(self) -> tuple[int, int]:
        """(dp_rank, dp_size), looked up when first needed: the group may be joined after the loader is made."""
        if self._dp is None:
            world = World.current(torch.device("cpu"))
            self._dp = (world.rank, world.size)
        if self.global_batch % (self._dp[1] * self.accumulation):
            raise LoaderError(cannot_divide(self.global_batch, self._dp[1], self.accumulation))
        return self._dp

    def set_data_rank(self, dp_rank: int, dp_size: int) -> None:
        """Set this rank's data-parallel rank and size, unless the user gave them; the loops call it."""
        if self.options.dp is None:
            self._dp = (dp_rank, dp_size)
        if not self._told:
            self._told = True
            self._tell_launcher(dp_size)

    def take_accumulation(self, accumulate: int | None, times: int = 1) -> None:
        """The micro-batches per update that a unit or `prepare` was told, for a loader that was told nothing; None is one. What a
        launch command imposes goes before either.

        Args:
            times: each is divided into as many more, as where fewer ranks run than were planned.
        Raises:
            UsageError: the loader was told another number.
        """
        if self._accumulate is not None and accumulate not in (None, self._accumulate) and overrides().accumulation is None:
            raise LoaderError(
                f"accumulate must be one number, got {self._accumulate} of the loader, which splits a global batch into as many "
                f"micro-batches a rank, and {accumulate} of the unit or prepare(). Say it once: leave it out at the loader."
            )
        self.accumulation, self._times = (self._accumulate or accumulate or 1) * times, times

    def split(self, accumulation: int, *, shares: int) -> None:
        """For bit-equal training, which decides into how many micro-batches a global batch is split, whatever was asked for.

        Args:
            accumulation: micro-batches per update on each rank.
            shares: the number that the ranks must divide.
        """
        self.accumulation, self.shares = accumulation, shares

    def _tell_launcher(self, dp_size: int) -> None:
        """For a restart with fewer ranks: which numbers of them this loader can serve."""
        world = World.current(torch.device("cpu"))
        if world.rank or world.size % dp_size:
            return
        said = self.accumulation // self._times
        note_loader(
            self.global_batch,
            said,
            divisible=self.shares or self.global_batch // said,
            ranks_per_place=world.size // dp_size,
            fixed=self._fixed_ranks,
        )

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def seek(self, position: int) -> int:
        """Begin the next iteration after `position` micro-batches of the epoch; returns where that is in this loader's count."""

    @property
    def _where(self) -> str:
        return f" (epoch {self.epoch}, data rank {self.dp[0]})"


class Combined(ABC):
    """Base of loaders that read several others as one."""

    @property
    @abstractmethod
    def loaders(self) -> list[Iterable[Any]]:
        """The others."""

    def set_data_rank(self, dp_rank: int, dp_size: int) -> None:
        """Set this rank's data-parallel rank and size; the loops call it."""
        for loader in self.loaders:
            if isinstance(loader, (BaseLoader, Combined)):
                loader.set_data_rank(dp_rank, dp_size)


def loaders_of(loader: Any) -> list[Any]:
    """The loaders that a loader consists of: itself, or several."""
    return loader.loaders if isinstance(loader, Combined) else [loader]
