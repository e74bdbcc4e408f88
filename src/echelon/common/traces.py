"""The traceback of a script run without a launcher: the user's frames and torch's, without those inside echelon.

`echelon run` shows failures itself. Under plain `python train.py`, or torchrun, the interpreter prints an uncaught exception
through `sys.excepthook`, which `import echelon` sets unless it is set already. The text is the same, without the frames between
the user's call and the user's own code.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
from types import TracebackType

from echelon.common.errors import EchelonError
from echelon.common.terminal import put

__all__ = ["FULL_VARIABLE", "from_here", "in_library", "named_in_library", "print_uncaught", "shortened"]

FULL_VARIABLE = "ECHELON_FULL_TRACEBACK"
# Also of another Python: a user's own packages, those below a venv with --system-site-packages, and those of PYTHONPATH.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def in_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to echelon."""
    try:
        real = os.path.realpath(file)
    except (OSError, ValueError):  # not a possible file name
        return False
    return _INSTALLED.search(real) is not None or any(real.startswith(lib + os.sep) for lib in _libraries())


def named_in_library(file: str) -> bool:
    """As `in_library`, by the name alone: a name from an untrusted source is not looked up.

    A file of echelon may have another path where it was named: on another machine, or in a checkout.
    """
    if "\0" in file:
        return False
    _, ours, below = file.replace("\\", "/").rpartition("/echelon/")
    path = os.path.normpath(file)
    known = _INSTALLED.search(path) is not None or any(path.startswith(lib + os.sep) for lib in _libraries())
    return known or bool(ours and below in _own_files())


def from_here(path: str) -> str:
    """A file's path relative to the working folder, if it is inside and the folder still exists; otherwise unchanged."""
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:
        return path


@functools.lru_cache(maxsize=1)
def _own_files() -> frozenset[str]:
    """Files of this package, as "loop/engine.py"; without those at its top, whose names others use as well."""
    files = (os.path.relpath(os.path.join(at, name), _PACKAGE) for at, _, names in os.walk(_PACKAGE) for name in names)
    return frozenset(path.replace(os.sep, "/") for path in files if os.sep in path and path.endswith(".py"))


def _libraries() -> set[str]:
    """Folders of libraries, as configured and with links resolved."""
    # Without the prefix, which also is such a path: a project may lie below it, and often does in a container.
    spelled = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    spelled |= {_PACKAGE.rstrip(os.sep), os.path.dirname(os.__file__)}
    return spelled | {os.path.realpath(lib) for lib in spelled}


def shortened(error: BaseException) -> str:
    """The traceback of `error` and its causes, without frames of echelon that say nothing.

    All frames are kept if a line of echelon raised an exception of another class, since they explain it.
    """
    whole = traceback.TracebackException.from_exception(error)
    dropped = _shorten(whole, error, set())
    text = "".join(whole.format())
    code = f"`echelon explain {error.code}` says what kind of error this is\n" if isinstance(error, EchelonError) else ""
    hidden = f"{dropped} frame{'s' if dropped > 1 else ''} inside echelon left out"
    return text + (f"({hidden}; {FULL_VARIABLE}=1 shows all)\n" if dropped else "") + code


def _shorten(trace: traceback.TracebackException, error: BaseException, seen: set[int]) -> int:
    """Drop frames from `trace`, which describes `error`, and from its causes; returns how many."""
    if id(error) in seen:
        return 0
    seen.add(id(error))
    others = [frame for frame in trace.stack if not frame.filename.startswith(_PACKAGE)]
    tells_nothing = isinstance(error, EchelonError) or trace.stack[-1:] == others[-1:]
    dropped = len(trace.stack) - len(others) if others and tells_nothing else 0
    if dropped:
        trace.stack = traceback.StackSummary.from_list(others)
    for its_trace, its_error in ((trace.__cause__, error.__cause__), (trace.__context__, error.__context__)):
        if its_trace is not None and its_error is not None:
            dropped += _shorten(its_trace, its_error, seen)
    return dropped


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`: prints the result of `shortened`, or the whole traceback if the environment asks for it."""
    try:
        text = None if os.environ.get(FULL_VARIABLE) else shortened(error.with_traceback(trace))
    except Exception:  # for example, an exception's own text may raise
        text = None
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        put(sys.stderr, text)
