"""Less usual options of loaders."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from echelon.common.errors import LoaderError, require
from echelon.common.numbers import number, whole
from echelon.data.resume import check_accepted

__all__ = ["AnyLoaderOptions", "LoaderOptions", "StreamOptions"]


@dataclass(frozen=True)
class AnyLoaderOptions:
    """Options of both kinds of loaders. Neither LoaderOptions nor StreamOptions inherits from the other, so that a type checker
    tells them apart.
    """

    dp: tuple[int, int] | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.dp is not None:
            is_pair = isinstance(self.dp, (tuple, list)) and len(self.dp) == 2
            require(is_pair, "dp", "a pair (dp_rank, dp_size), or None", self.dp, kind=LoaderError)
            rank, size = (
                whole("dp_rank", self.dp[0], at_least=0, kind=LoaderError),
                whole("dp_size", self.dp[1], at_least=1, kind=LoaderError),
            )
            require(rank < size, "dp", "a pair (dp_rank, dp_size), the first below the second", self.dp, kind=LoaderError)
            object.__setattr__(self, "dp", (rank, size))
        number("timeout_s", self.timeout_s, "above 0 seconds", lambda seconds: seconds > 0, kind=LoaderError)


@dataclass(frozen=True)
class StreamOptions(AnyLoaderOptions):
    """Options of a StreamLoader.

    Args:
        dp, timeout_s: as in LoaderOptions.
    """


@dataclass(frozen=True)
class LoaderOptions(AnyLoaderOptions):
    """Options of a Loader.

    Args:
        dp: (dp_rank, dp_size), this rank's place among the ranks with different data. Default: from the unit's layout when a loop
            begins, and before that the rank and world size.
        timeout_s: how long a worker may give nothing before the run ends with an error that names it.
        fingerprint: a text that identifies the data, such as a version; by default checksums of four samples. A run that resumes
            with other data is refused.
        accept_changes: which changes since the save to accept, although they change the samples that are trained on: of
            "samples", "seed", "shuffle", "global_batch", "fingerprint", "order".
    """

    fingerprint: str | None = None
    accept_changes: Collection[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accepted(self.accept_changes)
        object.__setattr__(self, "accept_changes", frozenset(self.accept_changes))
