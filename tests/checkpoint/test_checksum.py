"""Checksums of blocks: the same numbers by every implementation, on any number of threads, however the stream is cut."""

from __future__ import annotations

import random
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.checkpoint import checksum, manifest
from echelon.checkpoint.checksum import Sums


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (checksum, manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 12)
    return 1 << 12


@pytest.mark.parametrize("size", [0, 1, (1 << 12) - 1, 1 << 12, 50_000, 10 << 12])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_threads_change_no_checksum(small_blocks: int, size: int, most: int) -> None:
    data = random.Random(size).randbytes(size)
    want = [f"{zlib.crc32(data[at : at + small_blocks]):08x}" for at in range(0, size, small_blocks)]
    cuts = random.Random(most)
    with Sums(most) as sums:
        at = 0
        while at < size:
            step = cuts.choice([1, 100, 4096, 9000])
            sums.add(memoryview(data)[at : at + step])
            at += step
        assert sums.entry() == {"size": size, "crc32": want}
    assert manifest.checksums(data) == want
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPool")]


def test_a_faster_library_is_used_if_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"crc32": lambda data, start=0: zlib.crc32(data, start)}

    def import_module(name: str) -> Any:
        if "crc32" not in found:
            raise ImportError(name)
        assert name == "zlib_ng.zlib_ng"
        return SimpleNamespace(**found)

    monkeypatch.setattr(checksum.importlib, "import_module", import_module)
    assert checksum.fastest() is found["crc32"]
    found["crc32"] = lambda data, start=0: 7  # another polynomial would make checkpoints that nobody else can read
    assert checksum.fastest() is zlib.crc32
    found.clear()
    assert checksum.fastest() is zlib.crc32
