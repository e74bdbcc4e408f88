"""The run folder: everything that a run leaves, and all that commands after a run read.

runs/NAME/
    run.json                      what was started: command, versions, git state, launcher
  metrics.jsonl                 one record per optimizer update or evaluation, global values, written by rank 0
    .lock                         held by the launcher; on several nodes by the first one's
  attempts/000/rank0.log        output of a rank
  attempts/000/events.rank0.jsonl
    attempts/000/times.rank0.jsonl  where the rank's time goes (contracts/times.py)
  attempts/000/exit.rank0.json  how a rank ended, written by the rank if it still could
  attempts/000/exit.json        how the attempt ended, written by the launcher
  attempts/000/exit.node0.json  how it ended on one of several nodes
  attempts/000/loaders.json     which numbers of ranks can share the global batches, written by rank 0
  checkpoints/step-00000500/    committed states
    dumps/000/stack.rank0.txt     Python stacks of a rank that still ran when its attempt failed or hung
    dumps/000/flight.rank0.json   its last collectives, as torch records them
    profiles/000/                 files of --profile and --memory-snapshot, by attempt
  report.html
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.common.arguments import is_path
from echelon.common.errors import RunFolderError, require
from echelon.common.files import parse_object, private_folder, read_bytes, write_whole
from echelon.common.lock import HeldError, Lock, look
from echelon.common.numbers import count_in

__all__ = [
    "FULL_DISK",
    "RUN_DIR_VARIABLE",
    "TRACK_VARIABLE",
    "RunDir",
    "find_run",
    "read_json",
    "write_json",
]

# Errors that a run survives: the disk or its quota is full, or the file has reached its size limit.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RUN_DIR_VARIABLE = "ECHELON_RUN_DIR"
TRACK_VARIABLE = "ECHELON_TRACK"  # names of trackers, with commas between them
_ATTEMPT_VARIABLE = "ECHELON_ATTEMPT"
_LOCK, _SUBMITTING = ".lock", ".submitting"

# Names become folder names, job names and shell words: nothing that could be an option, a path or an escape.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# A folder with any of these is a run's.
_PARTS = ("attempts", "job", "run.json", "metrics.jsonl")
_NUMBER = re.compile(r"[0-9]{3,9}")


class RunDir:
    """Paths of one run, and the number of its present attempt.

    Args:
        path: the run's folder; it may not exist yet.
        attempt: 0 for the first start; one more for every restart or resume in the same folder.
    """

    def __init__(self, path: str | os.PathLike[str], attempt: int = 0) -> None:
        require(is_path(path), "path", "a run's folder", path, kind=RunFolderError)
        self.path = Path(path)
        self.attempt = attempt

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r}, attempt={self.attempt})"

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str | None, *, stem: str = "run", begin: bool = True) -> RunDir:
        """Create the folder `root/name`, or open it for another attempt if it exists.

        Args:
            root: folder of all runs.
            name: the run's name; None makes a new one from `stem` and the time.
            begin: take the next attempt now; otherwise the launcher calls `next_attempt` later.
        Raises:
            UsageError: the name is not a plain file name, or the root cannot be written.
        """
        if name is not None:
            cls.check_name(name)
        root = Path(root)
        try:
            if name is not None:
                run = cls(root / name)
                root.mkdir(parents=True, exist_ok=True)
                if not run.path.is_dir():  # also true for a user's own link to a folder elsewhere
                    private_folder(run.path)
            else:
                run = cls._unique(root, re.sub(r"[^A-Za-z0-9_-]", "_", stem)[:40] or "run")
            if begin:
                run._claim_attempt()
            for folder in (run.checkpoints, run.dumps):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot make the run folder {error.filename or root}: {error.strerror}. "
                "Start from a folder you can write to, or choose another with --runs or --name."
            ) from error
        return run

    @staticmethod
    def check_name(name: str) -> None:
        """Check a run's name.

        Raises:
            UsageError: it is not a plain file name.
        """
        if not _NAME.fullmatch(name):
            raise RunFolderError(
                f"a run's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ - and not begin with . or -, got {name!r}."
            )

    @classmethod
    def _unique(cls, root: Path, stem: str) -> RunDir:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        root.mkdir(parents=True, exist_ok=True)
        for n in range(1000):
            path = root / (f"{stem}-{stamp}" if n == 0 else f"{stem}-{stamp}-{n}")
            try:
                path.mkdir(0o755)
                return cls(path)
            except FileExistsError:  # another run of the same script began in the same second
                continue
        raise RunFolderError(f"1000 runs named {stem}-{stamp} exist in {root}. Give this one a --name.")

    @classmethod
    def current(cls) -> RunDir | None:
        """The folder of the run that this process belongs to, from the launcher's environment variable; else None."""
        path = os.environ.get(RUN_DIR_VARIABLE)
        if not path:
            return None
        remedy = f"echelon's launcher sets it beside {RUN_DIR_VARIABLE}: unset both."
        return cls(path, count_in(os.environ, _ATTEMPT_VARIABLE, 0, remedy))

    def to_env(self) -> dict[str, str]:
        return {RUN_DIR_VARIABLE: str(self.path.absolute()), _ATTEMPT_VARIABLE: str(self.attempt)}

    def at_attempt(self, attempt: int) -> RunDir:
        """The same run at another attempt, whose folder is created."""
        run = RunDir(self.path, attempt)
        self.path.mkdir(parents=True, exist_ok=True)
        private_folder(self.path / "attempts")
        private_folder(run.attempt_path)
        return run

    def hold(self, *, job: str = "", patience_s: float = 1.0, renew_s: float = 60.0) -> None:
        """Keep other launchers out of this run until this process ends. Children do not inherit the lock.

        Args:
            job: number of the batch system's job and of its start, such as 123.0; other launchers are told, too.
            patience_s: how long to wait for another holder; a second covers those that only check the lock.
            renew_s: without file locks, seconds between renewals for other machines, which trust each for ten minutes.
        Raises:
            UsageError: another launcher holds the run.
        """
        with self._refusing(_LOCK, "is under way", "Wait for its end, end it"):
            lock = Lock.take(self.path / _LOCK, job=job, patience_s=patience_s)
        if lock.is_new and lock.file is None:  # only the file's text locks, and for another machine it stays valid for a while
            ends = threading.Event()
            renewing = threading.Thread(target=_renew, args=(lock, renew_s, ends), name="echelon-lock", daemon=True)

            def end() -> None:
                ends.set()
                renewing.join(1.0)
                lock.release(remove=True)

            atexit.register(end)
            renewing.start()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Context of one submission into this run: no launcher holds the run, and no other submission is active.

        Raises:
            UsageError: the run is held, or another submission is active.
        """
        with self._refusing(_SUBMITTING, "is being submitted", "Wait for that"):
            lock = Lock.take(self.path / _SUBMITTING)
        try:
            with self._refusing(_LOCK, "is under way", "Wait for its end, end it"), contextlib.suppress(FileNotFoundError):
                look(self.path / _LOCK)
            yield
        finally:
            lock.release(remove=True)

    def is_held(self) -> bool:
        """Whether a launcher other than this process holds the run."""
        try:
            look(self.path / _LOCK)
        except HeldError:
            return True
        except OSError:
            return False
        return False

    @contextlib.contextmanager
    def _refusing(self, name: str, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except HeldError as error:
            holder = error.holder or "another has its folder"
            raise RunFolderError(f"run {self.name} {what}: {holder}. {remedy}, or give this one another --name.") from None
        except OSError as error:
            raise RunFolderError(
                f"run {self.name} cannot be locked: {self.path / name} {_reason(error)}. Remove it, or give another --name."
            ) from error

    def next_attempt(self) -> RunDir:
        """The same run, which must exist, at a new attempt of its own."""
        run = RunDir(self.path)
        run._claim_attempt()
        return run

    def _claim_attempt(self) -> None:
        """Take the next free number. Creating the folder claims it, so two launchers never share an attempt."""
        private_folder(self.path / "attempts")
        while True:
            self.attempt = max((int(p.name) for p in self.attempts()), default=-1) + 1
            try:
                self.attempt_path.mkdir(0o755)
                return
            except FileExistsError:  # another launcher was faster
                continue

    def attempts(self) -> list[Path]:
        """The folders of all attempts, in order."""
        try:
            folders = [p for p in (self.path / "attempts").iterdir() if _NUMBER.fullmatch(p.name)]
        except OSError:
            return []
        return sorted(folders, key=lambda p: int(p.name))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def attempt_path(self) -> Path:
        return self.path / "attempts" / f"{self.attempt:03d}"

    def log(self, rank: int) -> Path:
        return self.attempt_path / f"rank{rank}.log"

    def events(self, rank: int) -> Path:
        return self.attempt_path / f"events.rank{rank}.jsonl"

    def times(self, rank: int) -> Path:
        return self.attempt_path / f"times.rank{rank}.jsonl"

    def rank_exit(self, rank: int) -> Path:
        return self.attempt_path / f"exit.rank{rank}.json"

    @property
    def dump_path(self) -> Path:
        return self.dumps / f"{self.attempt:03d}"

    def stack(self, rank: int) -> Path:
        return self.dump_path / f"stack.rank{rank}.txt"

    def flight(self, rank: int) -> Path:
        return self.dump_path / f"flight.rank{rank}.json"

    def node_exit(self, node: int) -> Path:
        return self.attempt_path / f"exit.node{node}.json"

    @property
    def exit_json(self) -> Path:
        return self.attempt_path / "exit.json"


def _renew(lock: Lock, every_s: float, ends: threading.Event) -> None:
    while not ends.wait(every_s):
        with contextlib.suppress(
            OSError, HeldError
        ):  # after a long pause another launcher may hold the run; this attempt goes on
            lock.refresh()


def find_run(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """The folder of a run, given as a path or as a name below `root`.

    Raises:
        UsageError: there is no such run; the message names similar ones.
    """
    below = Path(os.path.expanduser(root))
    places = [Path(os.path.expanduser(name)), below / name]
    for path in places:
        if name and _is_run(path):
            return path
    there = next((path for path in places if name and os.path.lexists(path)), None)
    if there is not None:
        raise RunFolderError(
            f"{there} is not a run folder: it has no attempts. Give a run's name or its folder, such as runs/NAME."
        )
    for path in places:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.lstat(path)
            except PermissionError:
                raise RunFolderError(f"{path} cannot be read by this user. Run the command as its owner.") from None
            except OSError:  # not a possible file name
                continue
    runs = _runs_in(below)
    near = difflib.get_close_matches(name, runs, n=3)
    listed = ", ".join(runs[-5:]) + (f" and {len(runs) - 5} older ones" if len(runs) > 5 else "")
    hint = f" Did you mean {' or '.join(near)}?" if near else f" There: {listed}." if runs else ""
    raise RunFolderError(f"run {name!r} was not found, neither here nor in {root}.{hint}")


def _is_run(path: Path) -> bool:
    return any(os.path.lexists(path / part) for part in _PARTS)


def _runs_in(root: Path) -> list[str]:
    """Names of the runs in a folder, the newest last."""
    try:
        names = [
            (entry.stat().st_mtime, entry.name) for entry in os.scandir(root) if entry.is_dir() and _is_run(Path(entry.path))
        ]
    except OSError:
        return []
    return [name for _, name in sorted(names)]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON file for this user alone. A reader sees the old or the new text, never half of it."""
    write_whole(path, json.dumps(value, indent=2, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is missing, too large or not a complete object."""
    try:
        return parse_object(read_bytes(path))
    except OSError:
        return None


def _reason(error: OSError) -> str:
    return "is a link" if error.errno == errno.ELOOP else str(error.strerror)
