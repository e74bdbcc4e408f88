"""Parts of tensors are read out of files exactly, and no more than them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from echelon.checkpoint import ranges
from echelon.checkpoint.strict import Wrong
from echelon.checkpoint.tensorfile import TensorFile
from echelon.common.errors import CheckpointCorruptError
from tests.kit.refusals import refused

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def _read_bytes() -> int:
    """By this thread: another one hears what pytest's main process says."""
    line = next(line for line in Path("/proc/thread-self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])


@st.composite
def parts(draw: Any) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    begins = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, begins, [draw(st.integers(0, n - b)) for n, b in zip(shape, begins, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("at_once", [1, 64, 1 << 20])
@pytest.mark.parametrize("run", [0, 24, 1 << 20])
def test_any_part_of_any_tensor_into_memory_of_any_kind(tmp_path: Path, at_once: int, run: int) -> None:
    file = os.open(tmp_path / "values", os.O_RDWR | os.O_CREAT)

    @settings(max_examples=60)
    @given(parts(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans())
    def check(part: Any, held: torch.dtype, wanted: torch.dtype, gaps: bool) -> None:
        shape, begins, lengths = part
        whole = (torch.arange(torch.Size(shape).numel()) % 100).view(shape).to(held)
        os.pwrite(file, b"before " + bytes(whole.view(-1).view(torch.uint8).tolist()), 0)
        want = whole
        for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            want = want.narrow(dim, begin, length)
        into = torch.full([*lengths, 2], 7).to(wanted)[..., 1] if gaps else torch.empty(lengths, dtype=wanted)
        ranges.Stored(file, len(b"before "), held, shape).read_part(begins, lengths, into)
        assert torch.equal(into, want.to(wanted))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_AT_ONCE_BYTES", at_once)
        patch.setattr(ranges, "_RUN_BYTES", run)
        check()
    os.close(file)


@pytest.mark.parametrize(("shape", "dim"), [((64, 1024), 0), ((64, 1024), 1), ((8, 16, 512), 1)])
def test_no_byte_is_read_that_is_not_the_parts(tmp_path: Path, shape: tuple[int, ...], dim: int) -> None:
    whole = torch.randn(shape)
    save_file({"a": torch.zeros(5), "w": whole}, tmp_path / "f.safetensors")
    file = TensorFile(tmp_path / "f.safetensors")
    length = shape[dim] // 4
    begins, lengths = [0] * len(shape), list(shape)
    begins[dim], lengths[dim] = length, length
    for dtype in (torch.float32, torch.float64):
        into = torch.empty(lengths, dtype=dtype)
        before = _read_bytes()
        asked = _read_bytes() - before
        before = _read_bytes()
        file.read_part("w", begins, lengths, into)
        assert _read_bytes() - before == whole.nbytes // 4 + asked
        assert torch.equal(into, whole.narrow(dim, length, length).to(dtype))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Of a mapped one, the kernel would end the process."""
    path = tmp_path / "f.safetensors"
    save_file({"w": torch.randn(64, 1024)}, path)
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 5)
    with refused(CheckpointCorruptError):
        file.read_part("w", [0, 0], [64, 1024], torch.empty(64, 1024))
    with open(path, "rb") as short, pytest.raises(Wrong):
        ranges.Stored(short.fileno(), 1 << 20, torch.float32, [4]).read_part([0], [4], torch.empty(4))
