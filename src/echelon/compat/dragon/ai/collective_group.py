"""`dragon.ai.collective_group`: CollectiveGroup with its arguments in Dragon's order, and RankInfo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.contracts.rank import RankInfo
from echelon.launcher.dragon import group

__all__ = ["CollectiveGroup", "RankInfo"]


class CollectiveGroup(group.CollectiveGroup):
    """`echelon.launching.CollectiveGroup`: a group of Dragon's on Dragon's runtime; elsewhere, ranks on this machine."""

    def __init__(
        self,
        training_fn: Callable[..., Any],
        training_args: Sequence[Any] | None = None,
        training_kwargs: Mapping[str, Any] | None = None,
        nprocs: int | None = None,
        hide_stderr: bool = False,
        port: int | None = None,
        policies: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(training_fn, training_args, training_kwargs, policies, hide_stderr, port, nprocs=nprocs)
