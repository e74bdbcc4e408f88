"""The traceback of a script that runs by itself: the user's frames and torch's, without those inside echelon.

`echelon run` shows failures itself. Under plain `python train.py`, or torchrun, the interpreter prints an uncaught exception
through `sys.excepthook`, which `import echelon` sets unless somebody has done so before. The text is the same, less the frames
between the user's call and the user's own code.
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
# Also those of another Python: a user's own, those below a venv with --system-site-packages, what PYTHONPATH adds.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def in_library(file: str) -> bool:
    """Whether a file belongs to Python, to what is installed in it, or to echelon."""
    try:
        real = os.path.realpath(file)
    except (OSError, ValueError):  # a name that no file can have
        return False
    return _INSTALLED.search(real) is not None or any(real.startswith(lib + os.sep) for lib in _libraries())


def named_in_library(file: str) -> bool:
    """As `in_library`, by the name alone: of a file that somebody else names, nothing is looked up.

    A file of echelon may lie elsewhere where it was named: on another machine, in a checkout.
    """
    if "\0" in file:
        return False
    _, ours, below = file.replace("\\", "/").rpartition("/echelon/")
    path = os.path.normpath(file)
    known = _INSTALLED.search(path) is not None or any(path.startswith(lib + os.sep) for lib in _libraries())
    return known or bool(ours and below in _own_files())


def from_here(path: str) -> str:
    """A file's path from the working folder, if it lies in there and that folder has not been removed; else as it is."""
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:
        return path


@functools.lru_cache(maxsize=1)
def _own_files() -> frozenset[str]:
    """Of this package, as "loop/engine.py"; not those at its top, whose names others have as well."""
    files = (os.path.relpath(os.path.join(at, name), _PACKAGE) for at, _, names in os.walk(_PACKAGE) for name in names)
    return frozenset(path.replace(os.sep, "/") for path in files if os.sep in path and path.endswith(".py"))


def _libraries() -> set[str]:
    """As they are spelled, and where they are."""
    # Not the prefix, which is among these paths too: a project may lie below it, and often does in a container.
    spelled = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    spelled |= {_PACKAGE.rstrip(os.sep), os.path.dirname(os.__file__)}
    return spelled | {os.path.realpath(lib) for lib in spelled}


def shortened(error: BaseException) -> str:
    """The traceback of `error` and of its causes, without frames of echelon where these say nothing.

    All frames are kept where a line of echelon raised an exception that is not one of ours: they explain it then.
    """
    whole = traceback.TracebackException.from_exception(error)
    dropped = _shorten(whole, error, set())
    text = "".join(whole.format())
    code = f"`echelon explain {error.code}` says what kind of error this is\n" if isinstance(error, EchelonError) else ""
    hidden = f"{dropped} frame{'s' if dropped > 1 else ''} inside echelon left out"
    return text + (f"({hidden}; {FULL_VARIABLE}=1 shows all)\n" if dropped else "") + code


def _shorten(trace: traceback.TracebackException, error: BaseException, seen: set[int]) -> int:
    """Drop frames from `trace`, which describes `error`, and from those that it names; how many."""
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
    """A `sys.excepthook`: prints what `shortened` gives; all of it where the environment asks for that."""
    try:
        text = None if os.environ.get(FULL_VARIABLE) else shortened(error.with_traceback(trace))
    except Exception:  # an exception whose own text raises, say
        text = None
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        put(sys.stderr, text)
