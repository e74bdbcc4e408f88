"""Checkpoints with something else in them, and checksums that are right for it."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import echelon as ech
from echelon.checkpoint import manifest
from tests.kit.saving import make_loader, make_unit

Saver = ech.DistributedCheckpointSaver
OLD, NEW = "step-00000002", "step-00000004"
EVIL = "\x1b]0;title\x07\x1b[2J\u202egnp\udcff"
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(300), 0)
TENSOR = "module.first.weight"  # of the model of these tests
TENSORS = "tensors-00000.safetensors"
OWN = "rank-00000.safetensors"


def seal(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda facts: None) -> None:
    """Write a manifest that is right for the files as they are now, after a change of it."""
    facts = json.loads((checkpoint / "manifest.json").read_text())
    del facts["checksum"]
    for name in facts["files"]:
        data = (checkpoint / name).read_bytes()
        facts["files"][name] = {"size": len(data), "crc32": manifest.checksums(data)}
    seal_text(checkpoint, json.dumps(change(facts) or facts, indent=1))


def seal_text(checkpoint: Path, body: str) -> None:
    body = f"{body[:-2]}\n}}" if not body.endswith("\n}") else body
    (checkpoint / "manifest.json").write_text(f'{body[:-2]},\n "checksum": "{zlib.crc32(body.encode()):08x}"\n}}\n')


def forge(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a file: an index, the header of a tensor file, or of a manifest. What changes returns, if not None."""
    if name == "manifest.json":
        seal(checkpoint, change)
        return
    path = checkpoint / name
    head, data = split(path)
    value = json.loads(head)
    changed = change(value)
    write(path, json.dumps(value if changed is None else changed).encode(), data)
    seal(checkpoint)


def forge_state(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the nested state in a file."""

    def inner(head: dict[str, Any]) -> None:
        value = json.loads(head["__metadata__"]["state"])
        changed = change(value)
        head["__metadata__"]["state"] = json.dumps(value if changed is None else changed)

    forge(checkpoint, name, inner)


def split(path: Path) -> tuple[bytes, bytes | None]:
    raw = path.read_bytes()
    if path.suffix == ".json":
        return raw, None
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length], raw[8 + length :]


def write(path: Path, head: bytes, data: bytes | None) -> None:
    path.write_bytes(head if data is None else struct.pack("<Q", len(head)) + head + data)


def at(value: Any, *path: Any) -> Any:
    return functools.reduce(lambda inner, key: inner[key], path, value)


def change(*path: Any, to: Any) -> Callable[[Any], None]:
    def act(value: Any) -> None:
        at(value, *path[:-1])[path[-1]] = copy.deepcopy(to)

    return act


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def _socket(path: Path) -> None:
    here = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path may be 100 bytes long
    here.bind(path.name)
    os.chdir(before)
    here.close()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {"pipe": pipe, "loop": loop, "nowhere": nowhere, "socket": _socket, "device": device, "folder": Path.mkdir}
FILES = ["manifest.json", "index.json", "state.safetensors", OWN, TENSORS]


JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x", "..", "/etc/passwd",
    "torch.float32", "torch.qint8", "index.json", TENSORS, "F64", "U8", "é", "\x00", EVIL, [], {}, [[]], [0], [0, 0],
    {"~": "tensor"}, {"~": "dict", "v": [[1, 2]]}, {"~": "tuple", "v": 3}, {"~": "complex", "v": [1.0, 2.0]}, {"~": []}, DEEP,
]  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Of a value of JSON, every (container, key) in it."""
    found = []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += [(value, key), *_places(value[key])]
    return found


def mutate(value: Any, dice: random.Random) -> Any:
    """Something else in one place or two; or something missing, twice, or in the place of something else."""
    for _ in range(dice.choice([1, 1, 2])):
        inside = _places(value)
        if not inside:
            return dice.choice(JUNK)
        container, key = dice.choice(inside)
        kind = dice.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1:
            other, its = dice.choice(inside)
            with_it = copy.deepcopy(other[its]) if its in other or (isinstance(other, list) and its < len(other)) else None
            container[key] = with_it
        elif kind == 2:
            if isinstance(container, list):
                container.insert(dice.randrange(len(container) + 1), copy.deepcopy(container[key]))
            else:
                container[dice.choice(["x", "~", "v", TENSOR, str(key) + "x"])] = copy.deepcopy(container[key])
        else:
            container[key] = copy.deepcopy(dice.choice(JUNK))
    return value


def spoil(data: bytes, dice: random.Random) -> bytes:
    """Bytes changed, cut, doubled."""
    made = bytearray(data)
    where = dice.randrange(len(made))
    kind = dice.randrange(4)
    if kind == 0:
        made[where] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del made[where : where + dice.randrange(1, 40)]
    elif kind == 2:
        made[where:where] = made[where : where + dice.randrange(1, 40)]
    else:
        made[where:where] = dice.choice([b"[", b'{"a":', b"NaN", b"1e999", b'"\\ud800"', b"\xff", b"\xef\xbb\xbf", b"[" * 3000])
    return bytes(made)


def spoil_file(checkpoint: Path, name: str, dice: random.Random) -> None:
    head, data = split(checkpoint / name)
    write(checkpoint / name, spoil(head, dice), data)
    if name != "manifest.json":
        seal(checkpoint)
        return
    text = (checkpoint / name).read_bytes().decode(errors="replace")
    seal_text(checkpoint, text.rpartition(',\n "checksum"')[0] + "\n}")


def restored(where: Any, **options: Any) -> int:
    unit = make_unit("none", seed=9)
    assert Saver.restore_from_latest(where, unit, train_dataloader=make_loader(), **options)
    return unit.train_progress.num_steps_completed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    ech.train(make_unit("none"), make_loader(), max_updates=4, callbacks=[Saver(folder, save_every_n_updates=2)])
    return folder


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "c"))


@pytest.fixture
def bucket(two: Path) -> Iterator[tuple[str, Any]]:
    import fsspec

    fs = fsspec.filesystem("memory")
    for path in two.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/hostile/{path.relative_to(two)}", path.read_bytes())
    yield "memory://hostile", fs
    fs.rm("/hostile", recursive=True)
