"""Base of all loaders: the global batch, and this rank's data-parallel rank and size."""

from __future__ import annotations

from abc import ABC, abstractmethod
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

__all__ = ["BaseLoader"]


# Arguments of torch's DataLoader, and what to write in their place.
_TORCHS = {
    "batch_size": "it takes global_batch, the samples of an update over all ranks, that is batch_size x ranks x accumulate",
    "gradient_accumulation_steps": "a unit or prepare() takes accumulate, the micro-batches of an update on each rank",
    "drop_last": 'write tail="drop" or tail="keep"',
}


class BaseLoader(ABC):
    """Base of loaders that are given the global batch; see `Loader` for the arguments.

    Raises:
        UsageError: an invalid value.
    """

    _options: type[AnyLoaderOptions] = LoaderOptions  # class of this loader's options
    _fixed_ranks = False  # whether a run can only resume with the same number of ranks

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for name in kwargs.keys() & _TORCHS.keys():
            raise LoaderError(f"{cls.__name__} has no {name}: {_TORCHS[name]}.")
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
        is_one = options is None or isinstance(options, self._options)
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
        self._global_batch, self.tail = global_batch, tail
        # Samples of a rank per update, if the script gave this number and not the global batch.
        self.samples_of_a_rank: int | None = None
        self._accumulate = overrides().accumulation or accumulate  # as given; None leaves it to the unit or prepare
        self.accumulation, self._times = self._accumulate or 1, 1
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.collate_fn = collate_fn or default_collate
        self._dp = options.dp
        self.epoch = 0
        self._told = False
        self.shares: int | None = None  # in bit-equal training, parts of a global batch, which the ranks must divide evenly

    @property
    def global_batch(self) -> int:
        """Samples of an update over all ranks."""
        return self._global_batch

    @property
    def dp(self) -> tuple[int, int]:
        """(dp_rank, dp_size), looked up at first use: the process group may be joined after the loader is made."""
        if self._dp is None:
            world = World.current(torch.device("cpu"))
            self._dp = (world.rank, world.size)
        self._check_divides(self._dp[1])
        return self._dp

    def _check_divides(self, ranks: int) -> None:
        """
        Raises:
            UsageError: the ranks cannot divide a global batch.
        """
        if self.global_batch % (ranks * self.accumulation):
            raise LoaderError(cannot_divide(self.global_batch, ranks, self.accumulation))

    def set_data_rank(self, dp_rank: int, dp_size: int) -> None:
        """Set this rank's data-parallel rank and size, unless the user gave them; the loops call it."""
        if self.options.dp is None:
            self._dp = (dp_rank, dp_size)
        if not self._told:
            self._told = True
            self._tell_launcher(dp_size)

    def take_accumulation(self, accumulate: int | None, times: int = 1) -> None:
        """Take the micro-batches per update of a unit or `prepare`, if the loader was given none; None is one. The number that a
        launch command imposes has precedence.

        Args:
            times: split each micro-batch into this many, if fewer ranks run than planned.
        Raises:
            UsageError: the loader was given another number.
        """
        if self._accumulate is not None and accumulate not in (None, self._accumulate) and overrides().accumulation is None:
            raise LoaderError(
                f"accumulate must be one number, got {self._accumulate} from the loader, which splits a global batch into that "
                f"many micro-batches per rank, and {accumulate} from the unit or prepare(). Leave it out at the loader."
            )
        self.accumulation, self._times = (self._accumulate or accumulate or 1) * times, times

    def split(self, accumulation: int, *, shares: int) -> None:
        """Set the split of a global batch for bit-equal training, in place of the given `accumulate`.

        Args:
            accumulation: micro-batches per update on each rank.
            shares: parts of a global batch, a number divisible by the number of ranks.
        """
        self.accumulation, self.shares = accumulation, shares

    def _tell_launcher(self, dp_size: int) -> None:
        """For a restart with fewer ranks, tell the launcher which numbers of ranks this loader can serve."""
        world = World.current(torch.device("cpu"))
        if world.rank or world.size % dp_size:
            return
        note_loader(
            self.global_batch,
            self.accumulation // self._times,
            divisible=self._divisible(),
            ranks_per_place=world.size // dp_size,
            fixed=self._fixed_ranks,
        )

    def _divisible(self) -> int:
        """What the number of ranks must divide."""
        return self.shares or self.global_batch // (self.accumulation // self._times)

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the loops call it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""

    @abstractmethod
    def seek(self, position: int) -> int:
        """Begin the next iteration after `position` micro-batches of the epoch. Returns the position in this loader's count."""

    @property
    def _where(self) -> str:
        return f" (epoch {self.epoch}, data rank {self.dp[0]})"
