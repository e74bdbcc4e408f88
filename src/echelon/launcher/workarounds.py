"""All that launcher/ changes in other libraries because they offer no supported way.

Each entry gives the fault, the versions in which it was seen, the upstream issue, and why no public name suffices. For each, a
test in test_workarounds.py fails once the entry is no longer needed, or no longer possible; then the entry is deleted.
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
import time
import types
import weakref
from collections.abc import Mapping
from multiprocessing import spawn
from typing import Any

__all__ = [
    "ImportEndsError",
    "bootstrap_may_end",
    "close_failed",
    "has_destroyed_groups",
    "in_bootstrap",
    "keep_finalizers",
    "keep_process_groups",
    "look_for_failures_with_pauses",
    "prepare_main",
    "run_exit_functions",
    "serve_dragon_on_loopback",
    "write_open_files",
]

logger = logging.getLogger(__name__)

# ---- torch 2.13.0, gloo: https://github.com/pytorch/pytorch/issues/56297 (open)

_destroyed_groups: list[Any] = []


def has_destroyed_groups() -> bool:
    """Whether this process has destroyed a process group since `keep_process_groups`."""
    return bool(_destroyed_groups)


def keep_process_groups() -> None:
    """Keep process groups that are destroyed from now on alive until this process ends. Replaces `destroy_process_group`.

    When gloo's group is freed, its destructor joins the group's threads, and may do so while it holds the GIL. One of the threads
    may be waiting for the GIL to free the tensors of the last collective. So a function hangs now and then when it returns and
    drops its last reference to a wrapped model; so does the `main` of a script. Something must hold the group by then, but torch
    has no public list of groups, and no callback when one is destroyed.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or hasattr(dist.destroy_process_group, "__wrapped__"):
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        all_groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())  # torch 2.13's
        _destroyed_groups.extend([group] if group is not None else [dist.group.WORLD, *all_groups])
        destroy(group)

    dist.destroy_process_group = destroy_and_keep  # type: ignore[attr-defined]


# ---- CPython 3.11 to 3.14: https://github.com/python/cpython/issues/83856 (exit functions in forked children)
#
# A forked rank cannot end by returning: that would run the code of the process that forked it. Nor can it finalize the
# interpreter: a gloo thread that still needs it then ends the process with "terminate called without an active exception"
# (https://github.com/pytorch/pytorch/issues/190489, open). So it ends by `os._exit`, which skips all steps of an ordinary end.
# The steps that matter have no public name; `multiprocessing` ends its forked children by the same ones.


def run_exit_functions(*, join_threads: bool) -> None:
    """The first steps of an ordinary end of Python: join threads, tell those of idle executors to end, run atexit functions."""
    if join_threads:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def keep_finalizers() -> None:
    """Keep finalizers that run at Python's end in this process: a rank forked from it does not run them.

    `weakref.finalize` ignores which process registered it. The first rank to end would delete the temporary folders of the
    process that forked it, and each rank would unload torch's 170 operator libraries, which takes 50 ms of CPU (torch 2.13).
    There is no public list of finalizers.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def write_open_files() -> None:
    """Flush files that the program left open, as Python does when it frees them. Only the garbage collector knows all."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            try:
                if not thing.closed:
                    thing.flush()
            except Exception:  # the program's own classes may raise anything
                logger.debug("a %s could not be written at the end", type(thing).__name__, exc_info=True)


class ImportEndsError(BaseException):
    """The imported script has reached the call that started this rank. `except Exception` lets it pass."""


def prepare_main(main: Mapping[str, Any], *, may_end: bool = False) -> None:
    """Import the caller's script under a name other than `__main__`, as a child of `multiprocessing` does.

    Args:
        main: the caller's `multiprocessing.spawn.get_preparation_data`, its entries about the script.
        may_end: an ImportEndsError may end the import; the names defined until then stay.
    """
    process: Any = multiprocessing.current_process()
    path = main.get("init_main_from_path") if may_end else None
    process._inheriting = ImportEndsError if path else True  # makes multiprocessing refuse to start processes at the top level
    try:
        if path is None:
            spawn.prepare(dict(main))
        else:
            _import_until_it_ends(path)
    finally:
        del process._inheriting


def _import_until_it_ends(path: str) -> None:
    """Import as multiprocessing does, but keep the module's names when ImportEndsError ends the import."""
    module = types.ModuleType("__mp_main__")
    module.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with io.open_code(path) as file, contextlib.suppress(ImportEndsError):
        exec(compile(file.read(), path, "exec"), vars(module))


def in_bootstrap() -> bool:
    """Whether `prepare_main`, or multiprocessing, is importing the caller's script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def bootstrap_may_end() -> bool:
    """Whether an ImportEndsError would end that import."""
    return getattr(multiprocessing.current_process(), "_inheriting", False) is ImportEndsError


# ---- dragonhpc 0.15 (no upstream issue known)


def close_failed(group: Any) -> None:
    """Close Dragon's group after a rank has failed: the public `close` raises that failure again at every call."""
    try:
        group._close_no_decorator()
    except Exception:  # any fault of a runtime whose ranks failed: the failure itself was reported
        logger.debug("Dragon's group could not be closed", exc_info=True)


def look_for_failures_with_pauses(group: Any) -> None:
    """Pause between polls for failures: each wait of Dragon's thread that polls its queue keeps a core busy."""
    ask = group._exq.poll

    def poll(timeout: float) -> bool:
        has_failed = bool(ask(0))
        if not has_failed:
            time.sleep(timeout)
        return has_failed

    group._exq.poll = poll


def serve_dragon_on_loopback() -> None:
    """Dragon uses the host's name as rendezvous address, which may resolve to an unreachable address, even on one node."""
    os.environ["_DRAGON_CG_MASTER_ADDR"] = "127.0.0.1"
