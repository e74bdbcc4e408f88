"""`OSS`: an optimizer whose state is divided over the ranks, parameter by parameter. An adapter over `Partition`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import CheckpointError, CheckpointMismatchError, UsageError
from echelon.compat.collect import collect
from echelon.compat.fairscale.absent import METHODS
from echelon.compat.fairscale.groups import clip_owned_, outlive
from echelon.parallel.state.partition import Partition
from echelon.world.init import ensure_group

__all__ = ["OSS"]

logger = logging.getLogger(__name__)

_NO_OPTIONS = ("params", "param_names")


class OSS(torch.optim.Optimizer):
    """Looks like an optimizer over all parameters; each rank keeps the state of its own and sends them after a step.

    Whole parameters have one owner, so any optimizer works that treats parameters one by one. Gradients must be the mean, on all
    ranks (DistributedDataParallel) or on the owner (ShardedDataParallel). Building it, stepping, `consolidate_state_dict`,
    `refresh_trainable` and `clip_grad_norm` are collective.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs, or groups with options of their own.
        optim: the optimizer's class; `default` are its arguments.
        group: the ranks to divide over; by default all.
        broadcast_buffer_size, force_broadcast_object: accepted; they had stopped meaning anything.
        broadcast_fp16: accepted without an effect: parameters are sent in their own type, so no precision is lost.
    Attributes:
        optim: the optimizer over this rank's own parameters.
        group, rank, world_size: the ranks that it is divided over, and this one's place among them.
        param_groups: all parameters; options that are changed here (by a scheduler) hold for the next step.
        state: of this rank's own parameters.
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
        self._is_built = False
        super().__init__(params, default)
        ensure_group(self.param_groups[0]["params"][0].device)
        self.group = group if group is not None else dist.group.WORLD
        outlive(group)
        self.before_clipping: list[WeakMethod[Callable[[], None]]] = []  # of wrappers that may have gradients to reduce yet
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if broadcast_fp16 and self.rank == 0:
            logger.warning("OSS(broadcast_fp16=True) has no effect: parameters are sent in their own type")
        self.optim = optim([_own_group(each) for each in self.param_groups], **default)
        self.defaults = self.optim.defaults
        self.partition = Partition(
            self.optim,
            group,
            what="OSS",
            unfreezing="Call refresh_trainable() after unfreezing, on the optimizer or on ShardedDataParallel.",
            largest_first=False,  # so the owners are FairScale's
            shows_all=False,  # this one's groups do
        )
        self.partition.stands_behind(self)
        self._is_built = True
        self._pull()
        self._everyones: list[Any] | None = None  # each rank's state, after consolidate_state_dict
        pull = WeakMethod(self._pull)
        self.optim.register_load_state_dict_post_hook(lambda _: method() if (method := pull()) is not None else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. Collective."""
        super().add_param_group(param_group)
        if self._is_built:
            self._everyones = None
            self.optim.add_param_group(_own_group(self.param_groups[-1]))
            self.partition.refresh()
            self._pull()

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """One update of this rank's own parameters, then everyone's. Collective."""
        self._everyones = None
        self._push()
        loss = self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)
        self._pull()
        return loss

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
        own = [p for group in self.optim.param_groups for p in group["params"]]
        return clip_owned_(self._parameters, own, max_norm, norm_type, self.group)

    def refresh_trainable(self) -> None:
        """Give owners to what was unfrozen since. Collective. ShardedDataParallel calls it by itself."""
        self.partition.refresh()

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Bring the whole state to one rank's host memory, or to every rank's. Collective.

        Args:
            recipient_rank: within the group; -1 is every rank.
        """
        if not -1 <= recipient_rank < self.world_size:
            raise UsageError(f"consolidate_state_dict({recipient_rank}): ranks are 0 to {self.world_size - 1}, or -1 for all.")
        numbers: dict[torch.Tensor, int] = {p: number for number, p in enumerate(self._parameters)}
        own_state = {numbers[p]: state for p, state in self.optim.state.items() if p in numbers}
        self._everyones = collect(own_state, None if recipient_rank == -1 else recipient_rank, self.group)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The whole state as the undivided optimizer would give it, its tensors in host memory.

        Args:
            all_ranks: consolidate on every rank first; collective then.
        Raises:
            CheckpointError: a RuntimeError; this rank has not been given the state, or the optimizer has stepped since.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        if self._everyones is None:
            raise CheckpointError(
                f"Optimizer state has not been consolidated on this rank ({self.rank}) since the last step. Call "
                "consolidate_state_dict() on all ranks, and state_dict() on the one that receives it (recipient_rank; -1: all)."
            )
        numbers = {p: number for number, p in enumerate(self._parameters)}
        state: dict[Any, Any] = dict(sorted((n, s) for each in self._everyones for n, s in each.items()))
        state |= {key: each for key, each in self.optim.state.items() if not isinstance(key, torch.Tensor)}
        return {
            "state": state,
            "param_groups": [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state, of any number of ranks or of the undivided optimizer; it stays as it is.

        Raises:
            CheckpointMismatchError: it belongs to other parameters.
        """
        given = state_dict["param_groups"]
        sizes, wanted = [len(g["params"]) for g in given], [len(g["params"]) for g in self.param_groups]
        if sizes != wanted:
            raise CheckpointMismatchError(f"the state must have groups of {wanted} parameters, got {sizes}. It is another's.")
        saved = dict(zip(self._parameters, (n for group in given for n in group["params"]), strict=True))
        state: dict[Any, Any] = {key: _copy(each) for key, each in state_dict["state"].items() if not isinstance(key, int)}
        groups: list[dict[str, Any]] = []
        count = 0
        for own, options in zip(self.optim.param_groups, given, strict=True):
            numbers = range(count, count := count + len(own["params"]))
            groups.append({**_options(options), "params": list(numbers)})
            for number, parameter in zip(numbers, own["params"], strict=True):
                if each := state_dict["state"].get(saved[parameter]):
                    state[number] = _copy(each)  # torch would go on with the caller's tensors
        self._everyones = None
        self.optim.load_state_dict({"state": state, "param_groups": groups})

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _push(self) -> None:
        """Options as users and schedulers have set them."""
        for everyones, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            own.update(_options(everyones))

    def _pull(self) -> None:
        """Options as the optimizer or a checkpoint has set them."""
        self.state = self.optim.state
        for everyones, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            everyones.update(_options(own))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_OPTIONS}


def _own_group(group: dict[str, Any]) -> dict[str, Any]:
    return {**_options(group), "params": list(group["params"])}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(each) for each in value)
    return value
