"""torchtnt.utils.distributed, env, device and rank_zero_log: ranks, their devices and seeds, what they tell each other."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist

from echelon.common.errors import LauncherEnvironmentError, UsageError, require
from echelon.compat.collect import gather_tensors as all_gather_tensors
from echelon.compat.torchtnt.absent import absent
from echelon.contracts.rank import RankInfo
from echelon.launcher.functions.launch import launch
from echelon.world import device as devices
from echelon.world import init, rng
from echelon.world.device import record_stream as record_data_in_stream

__all__ = [
    "all_gather_tensors",
    "barrier",
    "copy_data_to_device",
    "get_device_from_env",
    "get_file_init_method",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_process_group_backend_from_device",
    "get_tcp_init_method",
    "get_world_size",
    "init_from_env",
    "rank_zero_critical",
    "rank_zero_debug",
    "rank_zero_error",
    "rank_zero_info",
    "rank_zero_print",
    "rank_zero_warn",
    "record_data_in_stream",
    "seed",
    "set_float32_precision",
    "spawn_multi_process",
]

T = TypeVar("T")

_logger = logging.getLogger(__name__)


# --- who this rank is


def _number(variable: str, field: str) -> int:
    """What a launcher says; of a variable that is set alone, that one; else what one process has alone."""
    try:
        return int(getattr(RankInfo.from_env(), field))
    except LauncherEnvironmentError:  # whoever joins ranks says what is missing; to ask for a number, this is enough
        return _read(variable) if os.environ.get(variable) else int(getattr(RankInfo(rank=0, world_size=1), field))


def _read(variable: str) -> int:
    text = os.environ[variable]
    require(text.isdecimal(), variable, "a number", text)
    return int(text)


def get_global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else _number("RANK", "rank")


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else _number("WORLD_SIZE", "world_size")


def get_local_rank() -> int:
    return _number("LOCAL_RANK", "local_rank")


def get_local_world_size() -> int:
    return _number("LOCAL_WORLD_SIZE", "local_world_size")


# --- groups


def get_process_group_backend_from_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    if dist.is_initialized():
        nccl = "nccl" in str(dist.get_backend_config())
        dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)


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
            port = _read("MASTER_PORT")
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
    require(size >= 1, "world_size", "at least 1", size)
    require(0 <= rank < size, "rank", f"from 0 to below world_size={size}", rank)
    return rank, size


# --- devices, and data on their way there


def get_device_from_env() -> torch.device:
    """cuda:LOCAL_RANK, which becomes the current device, or the CPU.

    Raises:
        UsageError: there are not so many.
    """
    device = devices.device_of(init.rank_info())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def copy_data_to_device(
    data: T, device: torch.device, stream_to_record: torch.cuda.Stream | None = None, *args: Any, **kwargs: Any
) -> T:
    """As `echelon.world.device.copy_data_to_device`.

    Args:
        stream_to_record: the stream that will use the copies, however deep they lie in the data.
    """
    copied = devices.copy_data_to_device(data, device, *args, **kwargs)
    if stream_to_record is not None:
        record_data_in_stream(copied, stream_to_record)
    return copied


def set_float32_precision(precision: str = "high") -> None:
    """On GPUs: the precision of products of float32 matrices and of convolutions; without a GPU nothing.

    Args:
        precision: "highest", or "high" and "medium" for TensorFloat-32.
    """
    require(precision in ("highest", "high", "medium"), "precision", "'highest', 'high' or 'medium'", precision)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"


# --- joining the other ranks, and seeds


def init_from_env(
    *,
    device_type: str | None = None,
    dist_init_method_type: Literal["env", "tcp", "file"] = "env",
    pg_backend: str | None = None,
    pg_timeout: timedelta = timedelta(minutes=30),
    float32_matmul_precision: str = "high",
) -> torch.device:
    """As `echelon.init_from_env`, with TorchTNT's arguments and defaults.

    Args:
        dist_init_method_type: ranks always meet in the store at the launcher's address, which is what "env" and "tcp" mean;
            for "file" the environment names no file that all ranks know, and a warning says so.
        float32_matmul_precision: set on GPUs, as TorchTNT does: by default products of float32 have TensorFloat-32's 10 bits of
            mantissa. "highest" keeps all 23.
    """
    known = dist_init_method_type in ("env", "tcp", "file")
    require(known, "dist_init_method_type", "'env', 'tcp' or 'file'", dist_init_method_type)
    info = init.rank_info()
    if dist_init_method_type == "file" and info.world_size > 1 and info.rank == 0:
        _logger.warning(
            "init_from_env(dist_init_method_type='file') has no effect: the environment names no file that all ranks know, so "
            "they meet at the launcher's address. For a file of yours: torch.distributed.init_process_group(init_method="
            "get_file_init_method(filename=...))"
        )
    device = init.init_from_env(device_type, pg_backend, pg_timeout)
    if device.type == "cuda":
        set_float32_precision(float32_matmul_precision)
    return device


def seed(seed: int, deterministic: str | int | None = None) -> None:
    """Seed Python, numpy and torch alike on all ranks, and the hashes of Python processes that are started later.

    Args:
        deterministic: torch's `set_deterministic_debug_mode`: "default" or 0, "warn" or 1, "error" or 2; cuDNN measures which
            kernel is fastest with the first only. None changes nothing.
    """
    rng.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    if deterministic is None:
        return
    torch.set_deterministic_debug_mode(deterministic)
    exact = torch.get_deterministic_debug_mode() > 0
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with workspaces of fixed sizes


# --- what only rank 0 says


def rank_zero_print(*args: Any, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        print(*args, **kwargs)


def _at(level: int) -> Callable[..., None]:
    def log(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if get_global_rank() == 0:
            (logger or _logger).log(level, *args, stacklevel=stacklevel + 1, **kwargs)

    return log


rank_zero_debug, rank_zero_info, rank_zero_warn = _at(logging.DEBUG), _at(logging.INFO), _at(logging.WARNING)
rank_zero_error, rank_zero_critical = _at(logging.ERROR), _at(logging.CRITICAL)


# --- processes


class _InGroup:
    """Calls the function within a process group over the ranks that `launch` has started."""

    def __init__(self, backend: str, timeout: timedelta, fn: Callable[..., Any]) -> None:
        self._backend, self._timeout, self._fn = backend, timeout, fn
        self.__name__ = getattr(fn, "__name__", "spawn_multi_process")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        init.init_from_env("cuda" if "nccl" in self._backend else "cpu", self._backend, self._timeout)
        try:
            return self._fn(*args, **kwargs)
        finally:
            gc.collect()  # what holds the group ends before it
            dist.destroy_process_group()


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


__getattr__ = absent(__name__)
