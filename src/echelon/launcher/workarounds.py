"""What launcher/ does to other libraries for want of a supported way: all of it, and nothing else.

Each entry says what goes wrong without it, the versions in which that was seen, the upstream issue, and why no public name
will do. For each, a test in test_workarounds.py fails when it is no longer needed, or no longer possible: then it goes.
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
    """Keep process groups that are destroyed from here on alive until this process ends. Replaces `destroy_process_group`.

    When gloo's group is freed, its destructor joins the group's threads, and may do so without letting go of the interpreter's
    lock. One of the threads may be waiting for that lock, to free the tensors of the last collective. So a function that
    returns, and with it its last reference to a wrapped model, hangs now and then: the `main` of a script, too. Somebody must
    hold the group by then; but torch has no public list of groups, and no callback when one is destroyed.
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
# A forked rank cannot end by returning: that would run the code of the process that forked it. Nor can it tear the interpreter
# down, since a thread of gloo's that still needs it then ends the process with "terminate called without an active exception"
# (https://github.com/pytorch/pytorch/issues/190489, open). So it ends by `os._exit`, which skips all that an ordinary end does.
# The steps that matter have no public name; `multiprocessing` ends its forked children by the same ones.


def run_exit_functions(*, join_threads: bool) -> None:
    """The first steps of an ordinary end of Python: threads are joined, those of idle executors told to end, atexit is run."""
    if join_threads:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def keep_finalizers() -> None:
    """What finalizes objects of this process as Python ends stays its own business: a rank forked from it does not do it.

    `weakref.finalize` does not look at who registered it: the first rank to end would delete the temporary folders of the
    process that forked it, and each takes torch's 170 operator libraries down, in 50 ms of computing (torch 2.13).
    There is no public list of finalizers.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def write_open_files() -> None:
    """Flush the files that the program left open, as Python does when it frees them; only the collector knows them all."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            try:
                if not thing.closed:
                    thing.flush()
            except Exception:  # the program's own classes may raise anything
                logger.debug("a %s could not be written at the end", type(thing).__name__, exc_info=True)


class ImportEndsError(BaseException):
    """The script that is imported has come to where it starts this very rank. No `except Exception` of its own stops it."""


def prepare_main(main: Mapping[str, Any], *, may_end: bool = False) -> None:
    """Import the caller's script under another name than `__main__`, as a child of `multiprocessing` does.

    Args:
        main: what `multiprocessing.spawn.get_preparation_data` told of the script in the caller's process.
        may_end: the import may end by an ImportEndsError; what the script has defined until then stays.
    """
    process: Any = multiprocessing.current_process()
    path = main.get("init_main_from_path") if may_end else None
    process._inheriting = ImportEndsError if path else True  # whoever starts processes at its top level is told not to
    try:
        if path is None:
            spawn.prepare(dict(main))
        else:
            _import_until_it_ends(path)
    finally:
        del process._inheriting


def _import_until_it_ends(path: str) -> None:
    """As multiprocessing's own import, whose names would be lost with the error."""
    module = types.ModuleType("__mp_main__")
    module.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with io.open_code(path) as file, contextlib.suppress(ImportEndsError):
        exec(compile(file.read(), path, "exec"), vars(module))


def in_bootstrap() -> bool:
    """Whether `prepare_main`, or multiprocessing, imports the caller's script at this moment."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def bootstrap_may_end() -> bool:
    """Whether an ImportEndsError ends that import."""
    return getattr(multiprocessing.current_process(), "_inheriting", False) is ImportEndsError


# ---- dragonhpc 0.15 (no upstream issue known)


def close_failed(group: Any) -> None:
    """Close Dragon's group after a rank has failed: `close` raises that failure once more instead, at every call."""
    try:
        group._close_no_decorator()
    except Exception:  # whatever is wrong with a runtime whose ranks have failed: the failure has been told
        logger.debug("Dragon's group could not be closed", exc_info=True)


def look_for_failures_with_pauses(group: Any) -> None:
    """While ranks run, Dragon's thread of their group asks its queue for failures, and each of these waits keeps a core busy."""
    ask = group._exq.poll

    def poll(timeout: float) -> bool:
        has_failed = bool(ask(0))
        if not has_failed:
            time.sleep(timeout)
        return has_failed

    group._exq.poll = poll


def serve_dragon_on_loopback() -> None:
    """Dragon's own RankInfo names the host, which may resolve to an unreachable address, even on one node."""
    os.environ["_DRAGON_CG_MASTER_ADDR"] = "127.0.0.1"
