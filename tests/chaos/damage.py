"""Damage done to checkpoints at random places, and whether each piece of it was found and named."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import CheckpointCorruptError
from tests.chaos.forks import run
from tests.chaos.program import END, NEW, OLD, Saver, Told, digest, scratch, train, unit_and_loader, written

OLDER, NEWER = manifest.named(OLD), manifest.named(NEW)


def make(folder: str) -> str:
    """Checkpoints of steps 2 and 4, by two ranks; the folder."""
    to = Path(folder, "made")
    for ended in run(train, str(to), "sync all", NEW, ranks=2):
        assert "value" in ended, ended
    return str(to)


def _flip(path: Path, other: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _cut(path: Path, other: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def _grow(path: Path, other: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randint(1, 100)))


def _delete(path: Path, other: Path, dice: random.Random) -> None:
    path.unlink()


def _zeros(path: Path, other: Path, dice: random.Random) -> None:
    """A block that never reached the disk."""
    data, at = bytearray(path.read_bytes()), dice.randrange(path.stat().st_size)
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)


def _swap(path: Path, other: Path, dice: random.Random) -> None:
    """With a file of the same checkpoint, or the same file of the older one. With the manifest, all else is unknown."""
    mate = dice.choice([p for p in (*path.parent.iterdir(), other) if p != path])
    mine, theirs = path.read_bytes(), mate.read_bytes()
    path.write_bytes(theirs)
    if mate != other:
        mate.write_bytes(mine)


# Flips are what no other format notices, so most are these.
KINDS: list[Callable[[Path, Path, random.Random], None]] = [_flip, _flip, _flip, _flip, _cut, _grow, _delete, _zeros, _swap]


def trials(start: str, seed: int, count: int) -> dict[str, int]:
    """Damage `count` times one file of the newest checkpoint, each time of a fresh copy; how many of which kind were found.

    Raises:
        AssertionError: one was not found, or not named, or the older checkpoint was not taken instead.
    """
    dice, done = random.Random(seed), Counter[str]()
    told = Told()
    logging.getLogger("echelon").addHandler(told)
    want = _restored(Path(start), told, only=OLDER)[1]
    with tempfile.TemporaryDirectory(dir=scratch()) as home:
        while done.total() < count:
            folder = Path(home, "c")
            shutil.copytree(start, folder)
            path = dice.choice(sorted((folder / NEWER).iterdir()))
            kind, before = dice.choice(KINDS), path.read_bytes()
            kind(path, folder / OLDER / path.name, dice)
            if not path.exists() or path.read_bytes() != before:
                what = f"seed {seed}, trial {done.total()}: {kind.__name__} of {path.name}"
                names = {path.name} | {p.name for p in (folder / NEWER).iterdir() if p.read_bytes() == before}
                _check(folder, names, want, told, what)
                done[kind.__name__.strip("_")] += 1
            shutil.rmtree(folder)
    return dict(done)


def _check(folder: Path, names: set[str], want: str, told: Told, what: str) -> None:
    """Args: names: one of these files must be named."""
    step, found, lines = _restored(folder, told)
    assert step == OLD and found == want, f"{what}: went on from {step}"
    assert any(NEWER in line and name in line for line in lines for name in names), f"{what}: not named in {lines}"
    # Both damaged: an error, never a fresh start.
    (folder / OLDER / min(names)).unlink(missing_ok=True)
    try:
        started = Saver.restore_from_latest(folder, unit_and_loader()[0])
    except CheckpointCorruptError as error:
        assert OLDER in str(error) and NEWER in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what}: with all damaged, restore_from_latest returned {started}")


def _restored(folder: Path, told: Told, only: str | None = None) -> tuple[int, str, list[str]]:
    told.lines.clear()
    unit, loader = unit_and_loader(seed=5)
    if only is not None:
        Saver.restore(folder / only, unit, train_dataloader=loader)
    else:
        assert Saver.restore_from_latest(folder, unit, train_dataloader=loader)
    return unit.train_progress.num_steps_completed, digest(unit), list(told.lines)


# --- what the system refuses


def without_privileges() -> None:
    """Modes bind this process from now on, though it may be root."""
    if os.getuid() == 0:
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def unreadable(start: str) -> list[list[str]]:
    """Restore and train with something closed to us: what is raised."""

    def closed(folder: str, path: str) -> list[str]:
        without_privileges()
        Path(path).chmod(0)
        said = []
        for act in (_restore, _train_anew):
            try:
                said.append(f"returned {act(Path(folder))}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        Path(path).chmod(0o700)
        return said

    answers = []
    for what in ("", NEWER, f"{NEWER}/manifest.json", f"{NEWER}/rank-00001.safetensors", OLDER):
        with tempfile.TemporaryDirectory(dir=scratch()) as home:
            folder = Path(shutil.copytree(start, Path(home, "c")))
            (ended,) = run(closed, str(folder), str(folder / what))
            answers.append([what, *ended.get("value", [str(ended)])])
    return answers


def _restore(folder: Path) -> Any:
    unit, _ = unit_and_loader()
    return Saver.restore_from_latest(folder, unit) and unit.train_progress.num_steps_completed


def _train_anew(folder: Path) -> None:
    """As a script does that forgot to restore."""
    unit, loader = unit_and_loader()
    ech.train(unit, loader, max_updates=1, callbacks=[Saver(folder)])


class Refusal(ech.Callback):
    """Between the third step and the fifth the storage takes nothing."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        self._begin, self._end = begin, end

    def on_train_step_start(self, state: ech.State, unit: Any) -> None:
        done = unit.train_progress.num_steps_completed
        if done in (NEW - 1, NEW + 1):
            written()
            (self._begin if done == NEW - 1 else self._end)()


def refused(folder: str, how: str, asynchronous: bool) -> dict[str, Any]:
    """Train through a refusal: by modes ("permission"), or by filling the file system ("full")."""

    def act() -> dict[str, Any]:
        home, ballast = Path(folder), Path(folder).parent / "ballast"
        if how != "full":
            without_privileges()

        def begin() -> None:
            _fill(ballast) if how == "full" else home.chmod(0o500)

        def end() -> None:
            ballast.unlink() if how == "full" else home.chmod(0o700)
            seen["whole"] = [p.name for p in manifest.committed(home)]

        told = Told()
        logging.getLogger("echelon").addHandler(told)
        unit, loader = unit_and_loader()
        saver = Saver(
            folder, save_every_n_updates=2, async_checkpoint=asynchronous, options=ech.callbacks.SaveOptions(tolerated_failures=1)
        )
        seen: dict[str, Any] = {}
        ech.train(unit, loader, max_updates=END, callbacks=[Refusal(begin, end), saver])
        return {**seen, "told": told.lines, "end": sorted(p.name for p in home.iterdir())}

    (ended,) = run(act)
    return ended


def _fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    os.truncate(ballast, ballast.stat().st_size - 8192)  # room for a beginning
