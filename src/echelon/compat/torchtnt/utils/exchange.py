"""What ranks tell one another: Python objects, tensors, one answer for all. By these names in `utils.distributed`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from echelon.common.errors import EchelonError, UsageError
from echelon.compat.collect import gather_tensors
from echelon.world import agree

__all__ = [
    "PGWrapper",
    "all_gather_tensors",
    "rank_zero_read_and_broadcast",
    "sync_bool",
]


P = ParamSpec("P")
R = TypeVar("R")

Group = dist.ProcessGroup | None


class ListError(UsageError, RuntimeError):
    """What is to be handed out is not one object a rank."""


class ModeError(UsageError, TypeError):
    """No way of making one answer of many."""


class PGWrapper:
    """Collectives of Python objects over a group; over the default one if it is None, and alone if there is none.

    Objects travel as pickles, as torch's functions of these names do it: between the ranks of one's own job only.

    Args:
        pg: the group. A `src` below is a global rank.
    """

    def __init__(self, pg: Group) -> None:
        self.pg: Any = pg if pg is not None or not dist.is_initialized() else dist.group.WORLD

    def get_rank(self) -> int:
        return 0 if self.pg is None else dist.get_rank(self.pg)

    def get_world_size(self) -> int:
        return 1 if self.pg is None else dist.get_world_size(self.pg)

    def barrier(self) -> None:
        if self.pg is not None:
            nccl = "nccl" in str(dist.get_backend_config(self.pg))
            dist.barrier(group=self.pg, device_ids=[torch.cuda.current_device()] if nccl else None)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> None:
        """Write the source's objects into everyone's list, in place."""
        if self.pg is not None:
            group, device = agree.channel(self.pg)
            dist.broadcast_object_list(obj_list, src=src, group=group, device=device)

    def all_gather_object(self, obj_list: list[Any], obj: Any) -> None:
        """Write every rank's object into the list, by rank in the group."""
        if self.pg is None:
            obj_list[0] = obj
        else:
            dist.all_gather_object(obj_list, obj, group=agree.channel(self.pg)[0])

    def scatter_object_list(self, output_list: list[Any], input_list: list[Any] | None, src: int = 0) -> None:
        """Write into `output_list[0]` the source's object for this rank.

        Raises:
            ListError, a RuntimeError: on every rank, if the source has no list of one object a rank.
        """
        size = self.get_world_size()
        told: list[Any] = [None, None]
        if self.pg is None or dist.get_rank() == src:
            if input_list is None or len(input_list) != size:
                told = ["The src rank's input_list for scatter_object_list must not be None.", None]
                if input_list is not None:
                    told[0] = (
                        f"The length of input_list {len(input_list)} for scatter_object_list must be the same as the process "
                        f"group's world size ({size})."
                    )
            else:
                told = [None, list(input_list)]
        self.broadcast_object_list(told, src)
        if told[0] is not None:
            raise ListError(told[0])
        output_list[0] = told[1][self.get_rank()]


def all_gather_tensors(result: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """As `compat.collect.gather_tensors`: every rank's tensor, by rank, whatever its shape. Gradients do not flow back."""
    return gather_tensors(result, group)


def sync_bool(
    val: bool,
    pg: Group = None,
    coherence_mode: Literal["any", "all", "rank_zero"] | int | float = "any",
) -> bool:
    """One answer for all ranks of a group; `val` itself without a process group.

    Args:
        pg: by default all ranks. A rank outside it gets its own value.
        coherence_mode: true if "any" rank, "all" of them, the group's first ("rank_zero"), at least so many (an int), or at
            least this part of them (a float between 0 and 1) say so.
    Raises:
        ModeError, a TypeError: another mode.
    """
    mode = coherence_mode
    known = mode in ("any", "all", "rank_zero") if isinstance(mode, str) else isinstance(mode, int) or 0 <= mode <= 1
    if not known or isinstance(mode, bool):
        raise ModeError(
            'Invalid value for `coherence_mode` provided: Expected type int, float between 0 and 1, or one of ("any", "all", '
            f'"rank_zero"), but received {mode}.'
        )
    if not dist.is_initialized() or dist.get_rank(pg) < 0:
        return val
    size = dist.get_world_size(pg)
    group, device = agree.channel(pg)
    said = torch.tensor([int(val)], dtype=torch.int64, device=device)
    if mode == "rank_zero":
        dist.broadcast(said, group=group, group_src=0)
        return bool(said.item())
    dist.all_reduce(said, group=group)
    count = int(said.item())
    if isinstance(mode, float):
        return count / size >= mode
    return count >= (mode if isinstance(mode, int) else {"any": 1, "all": size}[mode])


def rank_zero_read_and_broadcast(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the first rank of the group calls the function, every rank gets its value, or raises its error.

    The group is the keyword argument `process_group`, which the function itself does not get; by default all ranks.
    """

    @wraps(func)
    def read(*args: Any, **kwargs: Any) -> Any:
        wrapper = PGWrapper(kwargs.pop("process_group", None))
        if wrapper.get_world_size() == 1:
            return func(*args, **kwargs)
        answer: list[Any] = [None]
        failure: Exception | None = None
        if wrapper.get_rank() == 0:
            try:
                # Pickled here: what cannot be sent is this rank's error, too, and the others hear of it.
                answer = [pickle.dumps((func(*args, **kwargs), None))]
            except Exception as error:
                failure, answer = error, [_sendable(error)]
        wrapper.broadcast_object_list(answer, src=dist.get_global_rank(wrapper.pg, 0))
        if failure is not None:
            raise failure
        value, raised = pickle.loads(answer[0])
        if raised is not None:
            raised.add_note("(raised on the first rank, which read for all)")
            raise raised
        return value

    return read


def _sendable(error: Exception) -> bytes:
    try:
        sent = pickle.dumps((None, error))
        pickle.loads(sent)
        return sent
    except Exception:  # an exception of the user's that cannot be rebuilt
        return pickle.dumps((None, EchelonError(f"the first rank failed: {type(error).__name__}: {error}")))
