"""torchtnt.utils.device: this rank's device, and copies of data to it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from echelon.common.errors import LauncherEnvironmentError
from echelon.compat.torchtnt.utils.distributed import get_local_rank
from echelon.contracts.rank import RankInfo
from echelon.world import device as devices
from echelon.world.device import record_stream as record_data_in_stream

__all__ = [
    "copy_data_to_device",
    "get_device_from_env",
    "record_data_in_stream",
    "set_float32_precision",
]

T = TypeVar("T")


def get_device_from_env() -> torch.device:
    """cuda:LOCAL_RANK, which becomes the current device, or the CPU."""
    try:
        info = RankInfo.from_env()
    except LauncherEnvironmentError:  # LOCAL_RANK alone is enough here
        local = get_local_rank()
        info = RankInfo(rank=local, local_rank=local, world_size=local + 1, local_world_size=local + 1)
    device = devices.device_of(info)
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
    """Set the precision of float32 matrix products and convolutions on GPUs; without a GPU do nothing.

    Args:
        precision: "highest", or "high" and "medium" for TensorFloat-32.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"
