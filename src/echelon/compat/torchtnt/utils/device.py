"""torchtnt.utils.device: this rank's device, data on its way there, and what the machine uses."""

from __future__ import annotations

import logging
from typing import Any, TypedDict, TypeVar

import torch

from echelon.common.errors import LauncherEnvironmentError, UsageError
from echelon.compat.torchtnt.utils.distributed import get_local_rank
from echelon.compat.torchtnt.utils.resources import cpu_stats as get_psutil_cpu_stats
from echelon.compat.torchtnt.utils.resources import gpu_stats, nvidia_smi
from echelon.contracts.rank import RankInfo
from echelon.world import device as devices
from echelon.world.device import record_stream as record_data_in_stream

__all__ = [
    "CPUStats",
    "GPUStats",
    "collect_system_stats",
    "copy_data_to_device",
    "get_device_from_env",
    "get_nvidia_smi_gpu_stats",
    "get_psutil_cpu_stats",
    "record_data_in_stream",
    "set_float32_precision",
]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CPUStats(TypedDict):
    """What `get_psutil_cpu_stats` gives."""

    cpu_vm_percent: float
    cpu_percent: float
    cpu_swap_percent: float
    worker_cpu_time_user: float
    worker_cpu_time_system: float
    worker_rss: float


class GPUStats(TypedDict, total=False):
    """What `get_nvidia_smi_gpu_stats` gives; what the GPU does not know is missing."""

    utilization_gpu_percent: float
    utilization_memory_percent: float
    fan_speed_percent: float
    memory_used_mb: float
    memory_free_mb: float
    temperature_gpu_celsius: float
    temperature_memory_celsius: float


class TooFewDevicesError(UsageError, RuntimeError):
    """More ranks than devices."""


def get_device_from_env() -> torch.device:
    """cuda:LOCAL_RANK, which becomes the current device, or the CPU.

    Raises:
        TooFewDevicesError, a RuntimeError: there are not so many.
    """
    try:
        info = RankInfo.from_env()
    except LauncherEnvironmentError:  # LOCAL_RANK alone is enough here
        local = get_local_rank()
        info = RankInfo(rank=local, local_rank=local, world_size=local + 1, local_world_size=local + 1)
    try:
        device = devices.device_of(info)
    except UsageError as error:
        if info.local_rank < max(1, torch.cuda.device_count()):
            raise
        raise TooFewDevicesError(f"The local rank is larger than the number of available GPUs. {error}") from None
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


def get_nvidia_smi_gpu_stats(device: torch.device) -> GPUStats:
    """What nvidia-smi says of a device of torch's.

    Raises:
        FileNotFoundError: there is no nvidia-smi.
        UsageError: the device is no GPU.
    """
    if device.type != "cuda":
        raise UsageError(f"get_nvidia_smi_gpu_stats: {device} is no GPU.")
    if nvidia_smi() is None:
        raise FileNotFoundError("nvidia-smi: command not found.")
    # A UUID means the same to both; nvidia-smi counts GPUs that CUDA_VISIBLE_DEVICES hides from torch.
    known = torch.version.cuda is not None and torch.cuda.is_available()
    return gpu_stats(f"GPU-{torch.cuda.get_device_properties(device).uuid}" if known else device.index or 0)  # type: ignore[return-value]


def collect_system_stats(device: torch.device) -> dict[str, Any]:
    """Processor and memory, and for a GPU what nvidia-smi and torch's allocator know."""
    stats: dict[str, Any] = dict(get_psutil_cpu_stats())
    if device.type == "cuda":
        try:
            stats |= get_nvidia_smi_gpu_stats(device)
        except FileNotFoundError:
            logger.warning("Unable to find nvidia-smi. Skipping GPU stats collection.")
        stats |= torch.cuda.memory_stats(device)
    return stats


def set_float32_precision(precision: str = "high") -> None:
    """On GPUs: the precision of products of float32 matrices and of convolutions; without a GPU nothing.

    Args:
        precision: "highest", or "high" and "medium" for TensorFloat-32.
    """
    if precision not in ("highest", "high", "medium"):
        raise UsageError(f"float32 precision {precision!r}: 'highest', 'high' or 'medium'.")
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"
