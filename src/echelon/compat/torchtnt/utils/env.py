"""torchtnt.utils.env: join the other ranks; seed."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Literal

import torch

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.device import set_float32_precision
from echelon.world import init, rng

__all__ = ["init_from_env", "seed"]

logger = logging.getLogger(__name__)

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class MissingDeviceError(UsageError, RuntimeError):
    """There is no device of the requested type."""


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
    Raises:
        MissingDeviceError, a RuntimeError: there is no such device.
    """
    if dist_init_method_type not in ("env", "tcp", "file"):
        raise UsageError(f"dist_init_method_type {dist_init_method_type!r}: 'env', 'tcp' or 'file'.")
    info = init.rank_info()
    if dist_init_method_type == "file" and info.world_size > 1 and info.rank == 0:
        logger.warning(
            "init_from_env(dist_init_method_type='file') has no effect: the environment names no file that all ranks know, so "
            "they meet at the launcher's address. For a file of yours: torch.distributed.init_process_group(init_method="
            "get_file_init_method(filename=...))"
        )
    try:
        device = init.init_from_env(device_type, pg_backend, pg_timeout)
    except UsageError as error:
        if device_type in (None, "cpu") or torch.cuda.is_available():
            raise
        raise MissingDeviceError(f"Device type is specified to {device_type} but got cpu from env. {error}") from None
    if device.type == "cuda":
        set_float32_precision(float32_matmul_precision)
    return device


def seed(seed: int, deterministic: str | int | None = None) -> None:
    """Seed Python, numpy and torch alike on all ranks, and the hashes of Python processes that are started later.

    Args:
        deterministic: torch's `set_deterministic_debug_mode`: "default" or 0, "warn" or 1, "error" or 2. cuDNN chooses
            kernels by measuring only with the first. None changes nothing.
    """
    try:
        rng.seed(seed)
    except UsageError:
        raise UsageError(f"Invalid seed value provided: {seed}. Value must be in the range [0, 4294967295]") from None
    os.environ["PYTHONHASHSEED"] = str(seed)
    if deterministic is None:
        return
    torch.set_deterministic_debug_mode(deterministic)
    exact = torch.get_deterministic_debug_mode() > 0
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact
    if exact:
        os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS is deterministic only with workspaces of fixed sizes
