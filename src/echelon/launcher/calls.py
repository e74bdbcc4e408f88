"""Calls sent to other processes, and values sent back. Both are pickles, and only trusted ones are loaded.

A call is loaded only if its file has the checksum that came by another way, such as the command line of a batch script that Slurm
keeps. A value, or a rank's exception, is loaded only if its file is this user's own and sealed with the job's key: then a rank of
this job wrote it, for this place. A rank gets the key over the socket of the process that forks it, or from job.json, which only
this user can read and whose checksum is in the batch script.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from echelon.common.errors import EchelonError, LaunchError, RankFailedError
from echelon.common.files import open_file
from echelon.common.terminal import rank_ranges
from echelon.launcher.workarounds import ImportEndsError, bootstrap_may_end, in_bootstrap, prepare_main

__all__ = [
    "Call",
    "checksum",
    "end_bootstrap",
    "load_call",
    "load_exception",
    "load_value",
    "load_values",
    "main_module",
    "owner_only",
    "pack",
    "refuse_in_bootstrap",
    "write_call",
    "write_value",
]

logger = logging.getLogger(__name__)

_SEAL_BYTES = 32


@dataclass(frozen=True)
class Call:
    """A function and its arguments; in an array of tasks, one set of arguments per task.

    Args:
        path: the module search path; empty to use that of the process that loads the call.
        argv: the caller's; empty to use that of the process that loads the call.
    """

    function: Callable[..., Any]
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    path: Sequence[str] = ()
    argv: Sequence[str] = field(default=())


def main_module() -> dict[str, Any]:
    """multiprocessing's description of how to import the caller's `__main__` elsewhere; empty in an interactive session."""
    known = spawn.get_preparation_data("rank")
    if not Path(known.get("init_main_from_path", __file__)).is_file():  # "<stdin>"
        return {}
    return {k: v for k, v in known.items() if k in ("init_main_from_name", "init_main_from_path")}


def refuse_in_bootstrap(what: str) -> None:
    """Refuse to start ranks while a rank imports the caller's script: the script would start ranks again, without end.

    Raises:
        UsageError: this process is a rank that imports the script.
    """
    if in_bootstrap():
        script = getattr(sys.modules.get("__mp_main__"), "__file__", None) or "the script that started it"
        raise LaunchError(
            f"{what} was called while a rank imports {script}. There, put the call under "
            '`if __name__ == "__main__":`, which is false in a rank.'
        )


def end_bootstrap(what: str) -> None:
    """End the import of a script without a main guard, which trains at its top level: the rank has all it needs by now.

    Raises:
        UsageError: the rank imports the script for a function that may need the rest of the script.
    """
    if bootstrap_may_end():
        raise ImportEndsError
    refuse_in_bootstrap(what)


def pack(call: Call, copied: Callable[[str], str] = lambda path: path) -> bytes:
    """A call as bytes: by reference, with the caller's main module to import, or by value with cloudpickle.

    Args:
        copied: maps a path to its copy, or to itself if it was not copied.
    Raises:
        UsageError: the call can be sent in neither way.
    """
    main = {k: copied(v) if k == "init_main_from_path" else v for k, v in main_module().items()}
    main["may_end"] = _is_ours(call.function)  # a function of the script's own may be defined further down
    path = [copied(p) for p in call.path]
    return pickle.dumps((main, path, list(call.argv), _pickled((call.function, list(call.arguments)), call.function)))


def _is_ours(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).startswith("echelon.")


def _pickled(call: Any, function: Callable[..., Any]) -> bytes:
    try:
        data = pickle.dumps(call)
    except Exception:  # any type can raise anything when it is pickled
        logger.debug("%r cannot be sent by reference, so it is sent by value", function, exc_info=True)
    else:
        if b"__main__" not in data or main_module():  # an interactive session cannot be imported elsewhere
            return data
    import cloudpickle  # here: few calls need it

    try:
        by_value: bytes = cloudpickle.dumps(call)
        return by_value
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        of_args = [(f"args[{i}]", each) for args, _ in call[1] for i, each in enumerate(args)]
        of_kwargs = [item for _, kwargs in call[1] for item in kwargs.items()]
        culprit = _unsendable([(name, function), *of_args, *of_kwargs]) or f"{name} or its arguments"
        raise LaunchError(
            f"{culprit} cannot be sent to other processes: {error}. Open files, locks and connections in the process that uses "
            f"them, and "
            "pass the values needed to open them."
        ) from error


def _unsendable(parts: Iterable[tuple[str, Any]], depth: int = 12) -> str | None:
    """The name of the first part that cannot be pickled; if possible of the attribute, variable or item inside it that fails."""
    import cloudpickle

    for name, value in parts if depth else ():
        try:
            cloudpickle.dumps(value)
        except Exception:  # any type can raise anything when it is pickled
            return _unsendable(_parts(name, value), depth - 1) or name
    return None


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", each) for i, each in enumerate(value)]
    if cells := getattr(value, "__closure__", None):
        variables = zip(value.__code__.co_freevars, cells, strict=True)
        return [(f"the variable {inner} of {value.__qualname__}", cell.cell_contents) for inner, cell in variables]
    kind, own = type(value), {} if isinstance(value, type) else getattr(value, "__dict__", {})
    if kind.__module__.startswith("echelon."):  # the argument's name says more than echelon's class
        return list(own.items())
    return [(f"the attribute {inner} of {kind.__name__}", each) for inner, each in own.items()]


def write_call(path: Path, packed: bytes) -> str:
    """Write the bytes of `pack` for this user alone; returns the checksum that `load_call` needs."""
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(packed)
    return checksum(packed)


def checksum(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def load_call(path: str, sha256: str) -> Call:
    """Make the caller's modules importable in this process, and load its call.

    Raises:
        EchelonError: the file is not the one that was submitted. Nothing of it is loaded.
    """
    packed = Path(path).read_bytes()
    digest = checksum(packed)
    if digest != sha256:
        raise EchelonError(
            f"{path} is not the call that was submitted: its SHA-256 begins with {digest[:12]} instead of {sha256[:12]}. "
            "Nothing of it was loaded. Who can write there? Submit again."
        )
    main, search, argv, data = pickle.loads(packed)
    if search:
        sys.path[:] = search
    if argv:
        sys.argv[:] = argv
    may_end = main.pop("may_end")
    if main:
        prepare_main(main, may_end=may_end)
    function, arguments = pickle.loads(data)
    return Call(function, arguments, search, argv)


class _Sealed:
    """A file whose seal is computed while it is written."""

    def __init__(self, file: IO[bytes], seal: Any) -> None:
        self._file, self._seal = file, seal

    def write(self, data: Any) -> int:
        self._seal.update(data)
        return self._file.write(data)


class _ByName(pickle.Pickler):
    """Pickles classes and functions that came here by value from the caller's session, such as a notebook, by name."""

    def reducer_override(self, obj: Any) -> Any:
        is_of_session = isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__" and obj.__qualname__.isidentifier()
        return (_of_session, (obj.__qualname__,)) if is_of_session else NotImplemented


def _of_session(name: str) -> Any:
    return getattr(sys.modules["__main__"], name)


def _seal(path: Path, key: str) -> Any:
    """The seal of a file at this path: the same bytes for another attempt or rank have another seal."""
    seal = hashlib.blake2b(key=bytes.fromhex(key), digest_size=_SEAL_BYTES)
    seal.update(f"{path.parent.name}/{path.name}\0".encode())
    return seal


def write_value(value: Any, path: str | Path, key: str) -> None:
    """Write a sealed pickle for this user alone, whole or not at all.

    Args:
        key: of the job, in hexadecimal digits.
    """
    path = Path(path)
    temporary, seal = path.with_name(f".{path.name}.{os.urandom(8).hex()}"), _seal(path, key)
    try:
        with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(bytes(_SEAL_BYTES))
            try:
                pickle.dump(value, _Sealed(file, seal))
            except Exception:  # any type can raise anything; other causes raise again below
                file.seek(_SEAL_BYTES)
                file.truncate()
                seal = _seal(path, key)
                _ByName(_Sealed(file, seal)).dump(value)
            file.seek(0)
            file.write(seal.digest())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def load_value(path: Path, key: str) -> Any:
    """Load a value that `write_value` wrote.

    Raises:
        EchelonError: another user may have written the file, or it was not written by a rank of the job with this key; or the
            value can only be loaded in a rank.
        FileNotFoundError: the rank left no value.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        known = os.fstat(file.fileno())
        if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid() or known.st_mode & 0o022:
            raise EchelonError(f"{path} is not a file that only you can write: it is not loaded, since a pickle can run code.")
        packed, seal = file.read(_SEAL_BYTES), _seal(path, key)
        while block := file.read(1 << 20):
            seal.update(block)
        if not hmac.compare_digest(packed, seal.digest()):
            raise EchelonError(
                f"{path} was not written by a rank of this job, or not for this place: it is not loaded, since a pickle can run "
                "code. Who can write there?"
            )
        file.seek(_SEAL_BYTES)  # in the same open file, which no other user can write
        try:
            return pickle.load(file)
        except Exception as error:  # loading runs code of the value's class
            raise EchelonError(
                f"a rank returned a value that cannot be loaded here ({type(error).__name__}: {error}). Return plain values, "
                "arrays or tensors; of a model, what is inside DistributedDataParallel, or its state_dict()."
            ) from error


def load_values(paths: Sequence[Path], key: str) -> list[Any]:
    """The values of all ranks, in order, by `load_value`.

    Raises:
        RankFailedError: some ranks left no value.
    """
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        folder = str(paths[0].parent)
        raise RankFailedError(
            f"{rank_ranges(missing)} exited with 0, but left no value in {folder}. Did the function end its process, as by "
            "sys.exit(0)?",
            rank=missing[0],
            exit_code=0,
            logs=folder,
        )
    return [load_value(path, key) for path in paths]


def load_exception(path: Path, key: str) -> BaseException | None:
    """The exception that a rank left; None if there is none, or it cannot be loaded here."""
    try:
        value = load_value(path, key)
    except FileNotFoundError:
        return None
    except Exception:  # loading runs code of the exception's class
        logger.debug("the exception in %s cannot be loaded here", path, exc_info=True)
        return None
    return value if isinstance(value, BaseException) else None


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """In this context new files and folders are this user's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
