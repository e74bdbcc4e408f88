"""torchtnt.utils.test_utils: for tests of several ranks."""

from __future__ import annotations

import contextlib
import ctypes
import io
import unittest
import uuid
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig

__all__ = [
    "captured_output",
    "get_pet_launch_config",
    "is_asan",
    "is_asan_or_tsan",
    "is_tsan",
    "skip_if_asan",
    "skip_if_not_distributed",
    "skip_if_not_gpu",
]

P = ParamSpec("P")
R = TypeVar("R")

skip_if_not_gpu = unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
skip_if_not_distributed = unittest.skipUnless(dist.is_available(), "needs torch.distributed")


def get_pet_launch_config(nproc: int) -> LaunchConfig:
    """For torch's `elastic_launch`: so many ranks on this machine, without restarts. `echelon.launch` is shorter."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="spawn",
        max_restarts=0,
        monitor_interval=0.1,
    )


def _is_loaded(symbol: str) -> bool:
    """Whether this process runs under the sanitizer that brings the symbol."""
    return hasattr(ctypes.CDLL(None), symbol)


def is_asan() -> bool:
    return _is_loaded("__asan_init")


def is_tsan() -> bool:
    return _is_loaded("__tsan_init")


def is_asan_or_tsan() -> bool:
    return is_asan() or is_tsan()


def skip_if_asan(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorator: under a sanitizer, which is slow and does not bear forks, the test is skipped."""

    @wraps(func)
    def test(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if is_asan_or_tsan():
            raise unittest.SkipTest("under a sanitizer")
        return func(*args, **kwargs)

    return test


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[TextIO, TextIO]]:
    """What is printed inside, as (standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
