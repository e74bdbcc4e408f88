"""`OSS`: an optimizer whose state is divided over the ranks, parameter by parameter. An adapter over `Partition`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist

from echelon.common.errors import CheckpointError, UsageError
from echelon.compat.collect import collect
from echelon.compat.fairscale.absent import METHODS
from echelon.compat.fairscale.groups import clip_owned_, outlive
from echelon.parallel.state.partition import Partition
from echelon.world.init import ensure_group

__all__ = ["OSS"]

logger = logging.getLogger(__name__)


class OSS(torch.optim.Optimizer):
    """An optimizer over all parameters. Each rank keeps the state of those that it owns, and sends these after a step.

    A parameter has one owner as a whole, so any optimizer works that treats parameters one by one. Gradients must be the mean,
    on all ranks (DistributedDataParallel) or on the owner (ShardedDataParallel). Building it, stepping,
    `consolidate_state_dict`, `refresh_trainable` and `clip_grad_norm` are collective.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs, or groups with options of their own.
        optim: the optimizer's class; `default` are its arguments.
        group: the ranks to divide the state over; by default all.
        broadcast_buffer_size, force_broadcast_object: accepted; they had lost their effect in FairScale already.
        broadcast_fp16: accepted without effect: parameters are sent in their own type, so no precision is lost.
    Attributes:
        optim: the optimizer itself; `param_groups` are its groups.
        group, rank, world_size: the ranks that the state is divided over, this rank's number among them, and how many they are.
        state: the state of this rank's own parameters.
    """

    partition_parameters: Any = METHODS["OSS.partition_parameters"]

    def __init__(
        self,
        params: Any,
        optim: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        self.optim = optim(params, **default)
        super().__init__(self.optim.param_groups, self.optim.defaults)
        ensure_group(self.param_groups[0]["params"][0].device)
        self.group = group if group is not None else dist.group.WORLD
        outlive(group)
        self.before_clipping: list[WeakMethod[Callable[[], None]]] = []  # of wrappers that may still have gradients to reduce
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if broadcast_fp16 and self.rank == 0:
            logger.warning("OSS(broadcast_fp16=True) has no effect: parameters are sent in their own type")
        self.partition = Partition(
            self.optim,
            group,
            what="OSS",
            unfreezing="Call refresh_trainable() after unfreezing, on the optimizer or on ShardedDataParallel.",
            largest_first=False,  # same owners as FairScale's
        )
        self.partition.stands_behind(self)
        self._share()
        self._everyones: list[Any] | None = None  # each rank's state, after consolidate_state_dict
        share = WeakMethod(self._share)
        self.optim.register_load_state_dict_post_hook(lambda _: method() if (method := share()) is not None else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. Collective."""
        if not hasattr(self, "partition"):  # within the constructor
            super().add_param_group(param_group)
            return
        self._everyones = None
        self.optim.add_param_group(param_group)
        self.partition.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's own parameters, then exchange all. Collective."""
        self._everyones = None
        return self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that the norm of all of them together is at most `max_norm`. Collective.

        Args:
            max_norm: > 0.
            norm_type: > 0; 2 is the Euclidean norm, inf the largest absolute value.
        Returns:
            The norm before clipping, the same on every rank.
        Source: Pascanu et al. 2013, section 3.2, as `torch.nn.utils.clip_grad_norm_` does it.
        """
        for reference in self.before_clipping:
            if (settle := reference()) is not None:
                settle()
        parameters = self.partition.parameters
        own = [p for p in parameters if self.partition.owns(p)]
        return clip_owned_(parameters, own, max_norm, norm_type, self.group)

    def refresh_trainable(self) -> None:
        """Give owners to parameters that were unfrozen since. Collective. ShardedDataParallel calls it itself."""
        self.partition.refresh()

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Bring the whole state to one rank's host memory, or to every rank's. Collective.

        Args:
            recipient_rank: a rank within the group; -1 is every rank.
        """
        if not -1 <= recipient_rank < self.world_size:
            raise UsageError(f"consolidate_state_dict({recipient_rank}): ranks are 0 to {self.world_size - 1}, or -1 for all.")
        numbers: dict[torch.Tensor, int] = {p: number for number, p in enumerate(self.partition.parameters)}
        owners, owns = self.partition.owners, self.partition.owns
        # Every rank may have state of frozen parameters, which nobody owns: the constructor of Adagrad makes it.
        own_state = {numbers[p]: state for p, state in self.optim.state.items() if p in numbers and (owns(p) or p not in owners)}
        self._everyones = collect(own_state, None if recipient_rank == -1 else recipient_rank, self.group)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The whole state in the undivided optimizer's form, with its tensors in host memory.

        Args:
            all_ranks: consolidate on every rank first; then this is collective.
        Raises:
            CheckpointError, a RuntimeError: this rank has not received the state, or the optimizer has stepped since.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        if self._everyones is None:
            raise CheckpointError(
                f"Optimizer state has not been consolidated on this rank ({self.rank}) since the last step. Call "
                "consolidate_state_dict() on all ranks, and state_dict() on the one that receives it (recipient_rank; -1: all)."
            )
        numbers = {p: number for number, p in enumerate(self.partition.parameters)}
        merged: dict[Any, Any] = {number: each for some in self._everyones for number, each in some.items()}
        state = {number: merged[number] for number in sorted(merged)}
        state |= {key: each for key, each in self.optim.state.items() if not isinstance(key, torch.Tensor)}
        return {
            "state": state,
            "param_groups": [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, from any number of ranks or the undivided optimizer; `state_dict` stays.

        Raises:
            ValueError: from torch: the state belongs to other parameters.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = {number for number, p in zip(numbers, self.partition.parameters, strict=False) if self.partition.owns(p)}
        # Copied: torch would go on using the caller's tensors.
        state = {key: copy.deepcopy(each) for key, each in state_dict["state"].items() if not isinstance(key, int) or key in own}
        self._everyones = None
        self.optim.load_state_dict({**state_dict, "state": state})

    def _share(self) -> None:
        """Use the inner optimizer's groups and state as this one's."""
        self.param_groups, self.state = self.optim.param_groups, self.optim.state
