"""torchtnt.utils.distributed: ranks, and what they tell each other."""

from __future__ import annotations

import os
import tempfile
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LauncherEnvironmentError, UsageError
from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils.exchange import (
    PGWrapper,
    all_gather_tensors,
    sync_bool,
)
from echelon.contracts.rank import RankInfo
from echelon.parallel.ddp import sync_batchnorm

__all__ = [
    "PGWrapper",
    "all_gather_tensors",
    "barrier",
    "get_file_init_method",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_process_group_backend_from_device",
    "get_tcp_init_method",
    "get_world_size",
    "revert_sync_batchnorm",
    "sync_bool",
]


# --- who this rank is


def _number(variable: str, field: str) -> int:
    """A variable of torchrun's, which may be set alone; else what another launcher says; else one process alone."""
    text = os.environ.get(variable)
    if not text:
        try:
            return int(getattr(RankInfo.from_env(), field))
        except LauncherEnvironmentError:  # whoever joins ranks says what is missing; to ask for a number, this is enough
            return int(getattr(RankInfo(rank=0, world_size=1), field))
    if not text.isdecimal():
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


# --- groups


def get_process_group_backend_from_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    PGWrapper(None).barrier()


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
    if size < 1:
        raise UsageError(f"Invalid world_size value provided: {size}. Value must be greater than 0.")
    if rank < 0:
        raise UsageError(f"Invalid rank value provided: {rank}. Value must be at least 0.")
    if rank >= size:
        raise UsageError(
            f"Invalid rank and world_size values provided: rank={rank}, world_size={size}. Rank must be less than world_size."
        )
    return rank, size


# --- modules


def revert_sync_batchnorm(module: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """As `echelon.parallel.ddp.sync_batchnorm.revert_sync_batchnorm`, which leaves the layers on their device.

    Args:
        device: move the layers there.
    """
    sync_batchnorm.revert_sync_batchnorm(module)
    if device is not None:
        for layer in module.modules():
            if isinstance(layer, sync_batchnorm.LocalBatchNorm):
                layer.to(device)
    return module


__getattr__ = absent("utils.distributed")
