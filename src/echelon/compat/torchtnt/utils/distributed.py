"""torchtnt.utils.distributed: ranks, and what they tell each other."""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import nn

from echelon.compat.collect import gather_tensors
from echelon.contracts.errors import EchelonError, UsageError
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.run import launch
from echelon.parallel import sync_batchnorm
from echelon.world import agree
from echelon.world.init import init_from_env
from echelon.world.timeout import timeout_of_default_group

__all__ = [
    "PGWrapper",
    "ProcessGroupSetupParams",
    "all_gather_str",
    "all_gather_tensors",
    "barrier",
    "broadcast_str",
    "destroy_process_group",
    "get_file_init_method",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_or_create_gloo_pg",
    "get_process_group_backend_from_device",
    "get_tcp_init_method",
    "get_world_size",
    "local_rank_zero_fn",
    "rank_zero_fn",
    "rank_zero_read_and_broadcast",
    "revert_sync_batchnorm",
    "spawn_multi_process",
    "sync_bool",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Group = dist.ProcessGroup | None


# --- who this rank is


def _number(variable: str, field: str) -> int:
    """A variable of torchrun's, which may be set alone; else what another launcher says."""
    text = os.environ.get(variable)
    if text is None:
        return int(getattr(RankInfo.from_env(), field))
    if not text.isdigit():
        raise UsageError(f"{variable}={text!r} is no number.")
    return int(text)


def get_global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else _number("RANK", "rank")


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else _number("WORLD_SIZE", "world_size")


def get_local_rank() -> int:
    return _number("LOCAL_RANK", "local_rank")


def get_local_world_size() -> int:
    return _number("LOCAL_WORLD_SIZE", "local_world_size")


def rank_zero_fn(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: only global rank 0 calls the function, the others get None."""

    @wraps(fn)
    def on_rank0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if get_global_rank() == 0 else None

    return on_rank0


def local_rank_zero_fn(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: only local rank 0 of each node calls the function."""

    @wraps(fn)
    def on_local_rank0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if get_local_rank() == 0 else None

    return on_local_rank0


# --- groups


def get_process_group_backend_from_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    PGWrapper(None).barrier()


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def get_or_create_gloo_pg(candidate_pg: Group = None) -> Iterator[Group]:
    """A gloo group of the candidate's ranks: the candidate if it has gloo, else a new one, which ends with the context.

    Of the default group the new one stays, since `echelon` uses it too. None without a process group. Collective over the
    candidate's ranks.
    """
    if not dist.is_initialized() or candidate_pg is None or candidate_pg is dist.group.WORLD:
        yield agree.control_group()
        return
    if "gloo" in str(dist.get_backend_config(candidate_pg)):
        yield candidate_pg
        return
    members = dist.get_process_group_ranks(candidate_pg)
    made = dist.new_group(members, timeout_of_default_group(), backend="gloo", use_local_synchronization=True)
    try:
        yield made
    finally:
        dist.destroy_process_group(made)


def get_file_init_method(*, world_size: int | None = None, rank: int | None = None, filename: str | None = None) -> str:
    """An `init_method` for `torch.distributed.init_process_group` by which ranks meet through a file.

    Args:
        filename: one that all ranks see and that does not exist yet; a world of one makes its own.
    Raises:
        UsageError: several ranks and no file: each would make up another, and wait in it for ever.
    """
    rank, size = _place(rank, world_size)
    if filename is None:
        if size > 1:
            raise UsageError(
                f"get_file_init_method: {size} ranks need one filename that all of them know, on a disk that they share. Give "
                "filename=..., or use init_from_env(), by which ranks meet at the launcher's address."
            )
        filename = os.path.join(tempfile.mkdtemp(prefix="echelon-"), "store")
    return f"file://{quote(os.path.abspath(filename))}?world_size={size}&rank={rank}"


def get_tcp_init_method(
    *, world_size: int | None = None, rank: int | None = None, hostname: str | None = None, port: int | None = None
) -> str:
    """An `init_method` by which ranks meet at an address of rank 0; by default MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: several ranks, and neither a port nor MASTER_PORT: each would choose another.
    """
    rank, size = _place(rank, world_size)
    if port is None:
        if "MASTER_PORT" in os.environ:
            port = _number("MASTER_PORT", "master_port")
        elif size > 1:
            raise UsageError(
                f"get_tcp_init_method: {size} ranks need one port that all of them know. Give port=..., set MASTER_PORT, or use "
                "init_from_env()."
            )
        else:
            port = 0  # the store takes a free one, and nobody else needs to know it
    host = hostname or os.environ.get("MASTER_ADDR", "localhost")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}?world_size={size}&rank={rank}"


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    rank = get_global_rank() if rank is None else rank
    size = get_world_size() if world_size is None else world_size
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: ranks go from 0 to {size - 1}.")
    return rank, size


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
            UsageError: on every rank, if the source has no list of one object a rank.
        """
        size = self.get_world_size()
        told: list[Any] = [None, None]
        if self.pg is None or dist.get_rank() == src:
            if input_list is None or len(input_list) != size:
                found = "no list" if input_list is None else f"{len(input_list)} objects"
                told = [f"scatter_object_list: rank {src} has {found} for {size} ranks. Give it one object a rank.", None]
            else:
                told = [None, list(input_list)]
        self.broadcast_object_list(told, src)
        if told[0] is not None:
            raise UsageError(told[0])
        output_list[0] = told[1][self.get_rank()]


# --- values that all ranks get


def all_gather_tensors(result: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """As `compat.collect.gather_tensors`: every rank's tensor, by rank, whatever its shape. Gradients do not flow back."""
    return gather_tensors(result, group)


def all_gather_str(val: str, process_group: Group = None) -> list[str]:
    """Every rank's string, by rank, on every rank."""
    return agree.gather(val, process_group)


def broadcast_str(val: str | None, src: int = 0, process_group: Group = None, fixed_buffer_size: int | None = None) -> str | None:
    """The string of the global rank `src`, on every rank. Any string: empty, or with zero bytes in it.

    Args:
        fixed_buffer_size: accepted; lengths are agreed.
    """
    if not agree.is_joined():
        return val
    where = dist.get_group_rank(process_group, src) if process_group is not None else src
    answers: list[str | None] = agree.gather(val if dist.get_rank() == src else None, process_group)
    return answers[where]


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
    """
    mode = coherence_mode
    known = mode in ("any", "all", "rank_zero") if isinstance(mode, str) else isinstance(mode, int) or 0 <= mode <= 1
    if not known or isinstance(mode, bool):
        raise UsageError(f"sync_bool(coherence_mode={mode!r}): 'any', 'all', 'rank_zero', an int, or a float between 0 and 1.")
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


# --- modules


def revert_sync_batchnorm(module: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """As `echelon.parallel.sync_batchnorm.revert_sync_batchnorm`, which leaves the layers on their device.

    Args:
        device: move the layers there.
    """
    sync_batchnorm.revert_sync_batchnorm(module)
    if device is not None:
        for layer in module.modules():
            if isinstance(layer, sync_batchnorm.LocalBatchNorm):
                layer.to(device)
    return module


# --- processes


@dataclass
class ProcessGroupSetupParams:
    """For annotations alone: `spawn_multi_process` needs none, and its ranks meet without a port."""

    backend: str
    port: str
    world_size: int
    timeout_s: int


class _InGroup:
    """Calls the function within a process group over the ranks that `launch` has started."""

    def __init__(self, backend: str, timeout: timedelta, fn: Callable[..., Any]) -> None:
        self._backend, self._timeout, self._fn = backend, timeout, fn
        self.__name__ = getattr(fn, "__name__", "spawn_multi_process")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        init_from_env("cuda" if "nccl" in self._backend else "cpu", self._backend, self._timeout)
        try:
            return self._fn(*args, **kwargs)
        finally:
            gc.collect()  # what holds the group ends before it
            destroy_process_group()


def spawn_multi_process(
    world_size: int, backend: str, method: Callable[..., T], *method_args: Any, timeout_s: float = 60.0, **method_kwargs: Any
) -> list[T]:
    """Call a function on ranks of this machine within a process group; each rank's value, by rank.

    `echelon.launch` with a group: the ranks find torchrun's variables, RANK included, in their environment.

    Args:
        timeout_s: of the group's collectives.
    Raises:
        RankFailedError: with the first failing rank's traceback; the exception itself is its `__cause__`.
    """
    call = _InGroup(backend, timedelta(seconds=timeout_s), method)
    return launch(call, ranks=world_size, args=method_args, kwargs=method_kwargs)
