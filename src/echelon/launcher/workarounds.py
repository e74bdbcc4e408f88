"""What launcher/ does to other libraries for want of a supported way: all of it, and nothing else.

Each entry says what goes wrong without it, with which versions that was seen, and why no public name will do. For each there
is a test in tests/test_workarounds.py that fails when it is no longer needed, or no longer possible: then it goes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing import spawn
from typing import Any

__all__ = [
    "close_failed",
    "in_bootstrap",
    "keep_process_groups",
    "prepare_main",
    "run_exit_functions",
    "serve_dragon_on_loopback",
    "write_open_files",
]

logger = logging.getLogger(__name__)

# --- torch 2.13.0, gloo

_ended_groups: list[Any] = []


def keep_process_groups() -> None:
    """Have process groups that are destroyed from here on live until this process ends: replaces `destroy_process_group`.

    A group of gloo's that is freed joins its threads without letting go of the interpreter's lock, for which one of them may be
    waiting, to let go of a collective's tensors. So a function that returns, and with it its last reference to a wrapped
    model, hangs now and then. Somebody must hold the group by then; torch tells nobody which groups there are.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or hasattr(dist.destroy_process_group, "__wrapped__"):
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        _ended_groups.append(group if group is not None else dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = destroy_and_keep  # type: ignore[attr-defined]


# --- CPython 3.11 to 3.14

# A forked rank must not unwind through the frames of whoever forked it, nor be torn down: a thread of gloo's that still needs the
# interpreter then takes the process along ("terminate called without an active exception"). So it ends by `os._exit`, which
# runs nothing; what Python does before it tears down has no public name. `multiprocessing` ends its own children so, too.


def run_exit_functions(*, join_threads: bool) -> None:
    """What an ordinary end of Python begins with: threads joined, among them those of idle executors, then atexit."""
    if join_threads:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def write_open_files() -> None:
    """What the program wrote to files that it left open: Python writes it when it frees them, which here it never does."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):  # the program's own classes may raise anything
                thing.flush()


def prepare_main(main: Mapping[str, Any]) -> None:
    """Import the caller's script under another name than `__main__`, as a child of `multiprocessing` does.

    Args:
        main: what `multiprocessing.spawn.get_preparation_data` told of the script in the caller's process.
    """
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # whoever starts processes at the script's top level is told not to
    try:
        spawn.prepare(dict(main))
    finally:
        del process._inheriting


def in_bootstrap() -> bool:
    """Whether `prepare_main`, or multiprocessing, imports the caller's script at this moment."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


# --- dragonhpc 0.15


def close_failed(group: Any) -> None:
    """Close Dragon's group after a rank has failed: `close` raises that failure once more instead, at every call."""
    try:
        group._close_no_decorator()
    except Exception:  # whatever is wrong with a runtime whose ranks have failed: the failure has been told
        logger.debug("Dragon's group could not be closed", exc_info=True)


def serve_dragon_on_loopback() -> None:
    """Dragon's own RankInfo names the host, which may resolve to an address that nobody can reach, even on one node."""
    os.environ["_DRAGON_CG_MASTER_ADDR"] = "127.0.0.1"
