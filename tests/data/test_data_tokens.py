"""Token files and packed rows: every token exactly once, documents kept apart, damage named."""

from __future__ import annotations

import pickle
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.common.errors import DataError, DatasetError
from echelon.data.packed import IGNORED
from tests.kit.refusals import refused

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def _numbered(sizes: list[int]) -> list[list[int]]:
    """Documents whose tokens are 1, 2, 3, ... throughout: a token says which it is."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [list(range(a + 1, b + 1)) for a, b in pairwise(ends)]


@pytest.mark.full
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=25).filter(any), length=st.integers(1, 12), cut=st.booleans())
def test_every_token_is_an_input_once_and_a_target_once_unless_its_document_begins_with_it(
    sizes: list[int], length: int, cut: bool
) -> None:
    """Documents and positions say where each token is; a document is not cut unless told, or longer than a row."""
    documents = _numbered(sizes)
    place = {token: (d, p) for d, document in enumerate(documents) for p, token in enumerate(document)}
    rows = ech.Packed(documents, length, cut=cut)
    inputs, targets = [], []
    row_of: dict[int, int] = {}
    for number, row in enumerate(rows.__getitems__(range(len(rows)))):
        real, has_target = row.documents >= 0, row.targets != IGNORED
        tokens, numbers = row.inputs[real].tolist(), row.documents[real].tolist()
        inputs += tokens
        targets += row.targets[has_target].tolist()
        row_of |= dict.fromkeys(tokens, number)
        assert not (has_target & ~real).any() and (row.inputs[~real] == 0).all()
        assert (row.targets[has_target] == row.inputs[has_target] + 1).all()
        assert row.positions[real].tolist() == [place[token][1] for token in tokens]
        assert numbers[0] == 0 and all(b - a in (0, 1) for a, b in pairwise(numbers))
        owners = [place[token][0] for token in tokens]
        assert [a == b for a, b in pairwise(owners)] == [a == b for a, b in pairwise(numbers)]
    assert inputs == list(range(1, sum(sizes) + 1))
    assert targets == [t for t in inputs if place[t][1] > 0]
    assert rows.fill == sum(sizes) / (len(rows) * length)
    for document in filter(None, documents if not cut else []):
        assert len({row_of[t] for t in document}) == (1 if len(document) <= length else -(-len(document) // length))


def test_a_row_by_hand() -> None:
    rows = ech.Packed(DOCUMENTS, 6)
    row = rows[0]
    assert row.inputs.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.targets.tolist() == [2, 3, IGNORED, IGNORED, 6, 7]
    assert row.documents.tolist() == [0, 0, 0, 1, 2, 2] and row.positions.tolist() == [0, 1, 2, 0, 0, 1]
    last = ech.Packed(DOCUMENTS, 6, pad=99)[-1]
    assert last.inputs.tolist() == [13, 99, 99, 99, 99, 99]
    assert last.targets.tolist() == [IGNORED] * 6
    assert last.documents.tolist() == [0, -1, -1, -1, -1, -1] and last.positions.tolist() == [1, 0, 0, 0, 0, 0]
    assert ech.Packed(DOCUMENTS, 6, across=True)[0].targets.tolist() == [2, 3, 4, 5, 6, 7]
    assert ech.Packed(DOCUMENTS, 6, across=True)[2].targets.tolist() == [IGNORED] * 6
    edges, longest = ech.data.cu_seqlens(torch.stack([rows[r].documents for r in range(3)]))
    # row 0: 3 + 1 + 2, row 1: 5 + 1, row 2: 1 and the padding's 5
    assert edges.tolist() == [0, 3, 4, 6, 11, 12, 13, 18] and longest == 5 and edges.dtype == torch.int32


def test_attention_masked_by_documents_equals_each_document_alone() -> None:
    """The documents' ids are what a mask needs: packed attention is that of each document by itself."""
    torch.manual_seed(0)
    table = torch.randn(20, 8, dtype=torch.float64)
    attend = torch.nn.functional.scaled_dot_product_attention
    row = ech.Packed(DOCUMENTS, 13)[0]
    x = table[row.inputs][None]
    mask = (row.documents[:, None] == row.documents[None]) & torch.ones(13, 13).tril().bool()
    packed = attend(x, x, x, attn_mask=mask)[0]
    alone = [attend(*[table[torch.tensor(d)][None]] * 3, is_causal=True)[0] for d in DOCUMENTS if d]
    assert torch.allclose(packed, torch.cat(alone), rtol=1e-12)


def test_rows_go_through_a_loader_in_batches_and_by_workers(tmp_path: Path) -> None:
    tokens = ech.data.write_tokens(tmp_path / "t.bin", _numbered([5, 3, 9, 20, 1, 10]))
    seen = []
    for workers in (0, 2):
        loader = ech.Loader(ech.Packed(tokens, 6), 4, num_workers=workers, options=ech.data.LoaderOptions(dp=(0, 1)))
        batches = list(loader)
        assert batches[0].inputs.shape == (4, 6) and batches[0].documents.dtype == torch.int32
        seen.append(torch.cat([b.inputs[b.documents >= 0] for b in batches]).sort().values.tolist())
    assert seen[0] == seen[1] == list(range(1, 49))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    top = np.iinfo(dtype).max
    documents = [[1, 2, 3], [], [top], [7] * 5]
    tokens = ech.data.write_tokens(tmp_path / "t.bin", documents, dtype)
    assert tokens.documents == 4 and len(tokens) == 9 and tokens.data.dtype == dtype
    assert [tokens.document(i).tolist() for i in range(4)] == documents
    again = pickle.loads(pickle.dumps(tokens))
    assert [again.document(i).tolist() for i in range(4)] == documents
    assert len(pickle.dumps(ech.Packed(ech.data.write_tokens(tmp_path / "t.bin", [range(60_000)]), 8))) < 2000  # opened again
    assert not tokens.data.flags.writeable and list(tmp_path.iterdir()) == [tmp_path / "t.bin"]


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    with (
        refused(DatasetError),
        ech.data.TokenWriter(tmp_path / "t.bin") as w,
    ):
        w.add([1, 2])
        assert not (tmp_path / "t.bin").exists()
        w.add([70_000])
    assert not list(tmp_path.iterdir())


def test_raw_files_are_read_with_their_type(tmp_path: Path) -> None:
    np.arange(1, 11, dtype=np.uint16).tofile(tmp_path / "nano.bin")
    assert ech.Tokens(tmp_path / "nano.bin", "uint16").data.tolist() == list(range(1, 11))
    split = ech.Tokens(tmp_path / "nano.bin", "uint16", documents=[0, 4, 10])
    assert [split.document(i).tolist() for i in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert pickle.loads(pickle.dumps(split)).offsets.tolist() == [0, 4, 10]
    with refused(DatasetError):
        ech.Tokens(tmp_path / "nano.bin")
    with refused(DatasetError):
        ech.Tokens(tmp_path / "nano.bin", "uint16", documents=[0, 11])
    with refused(DataError):
        ech.Tokens(tmp_path / "nano.bin", "uint64")
    with refused(DatasetError):
        ech.Tokens(tmp_path / "absent.bin")


def test_files_of_megatron_are_read_with_their_index_unless_it_says_what_cannot_be(tmp_path: Path) -> None:
    """Three sequences in two documents: the second document is the last two sequences."""

    def index(counts: tuple[int, int], lengths: tuple[int, ...], bounds: tuple[int, ...]) -> bytes:
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, *counts) + struct.pack("<3i", *lengths)
        return head + struct.pack("<3q", 0, 8, 10) + struct.pack("<3q", *bounds)

    np.arange(1, 11, dtype=np.uint16).tofile(tmp_path / "m.bin")
    right = index((3, 3), (4, 1, 5), (0, 1, 3))
    (tmp_path / "m.idx").write_bytes(right)
    tokens = ech.Tokens(tmp_path / "m.bin")
    assert [tokens.document(i).tolist() for i in range(tokens.documents)] == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    for wrong in (
        right[:40],
        index((3, 3), (-4, 9, 5), (0, 1, 3)),  # ten in all
        index((3, 3), (4, 1, 5), (0, 1, 2**40)),
        index((3, 3), (4, 1, 5), (-5, 1, 3)),
        index((2**63, 3), (4, 1, 5), (0, 1, 3)),
        index((3, 2**64 - 1), (4, 1, 5), (0, 1, 3)),
    ):
        (tmp_path / "m.idx").write_bytes(wrong)
        with refused(DataError):
            ech.Tokens(tmp_path / "m.bin")


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: raw[:70]])
def test_a_file_of_another_size_than_its_header_says_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "t.bin"
    ech.data.write_tokens(path, DOCUMENTS)
    path.write_bytes(damage(path.read_bytes()))
    with refused(DataError):
        ech.Tokens(path)


@pytest.mark.parametrize("dtype", [b"|O", b"O8", b"<u8", b"<i2", b">u2", b"u2", b"<u2,<u2", b"<f2", b"\xff", b"|V4", b""])
def test_a_header_may_name_no_other_type_than_the_two(tmp_path: Path, dtype: bytes) -> None:
    """numpy would take bytes of the file for addresses of objects; the size fits each time."""
    header = struct.pack("<8s8sQQ32x", b"ECHTOK1\n", dtype, 4, 1)
    (tmp_path / "t.bin").write_bytes(header + b"\1" * 32 + struct.pack("<2q", 0, 4))
    with refused(DataError):
        ech.Tokens(tmp_path / "t.bin")


@pytest.mark.parametrize("offsets", [[1, 4, 10], [0, 4, 9], [0, 4, 2**62], [-1, 4, 10]])
def test_documents_begin_with_the_first_token_and_end_with_the_last(tmp_path: Path, offsets: list[int]) -> None:
    _forged(tmp_path / "t.bin", offsets)
    with refused(DataError):
        ech.Tokens(tmp_path / "t.bin")


@pytest.mark.parametrize("middle", [11, -1, 2**62, -(2**62)])
def test_a_document_that_lies_elsewhere_is_named_when_it_is_read(tmp_path: Path, middle: int) -> None:
    """When the file is opened, no more is read than where the first begins and the last ends."""
    _forged(tmp_path / "t.bin", [0, 3, middle, 6, 10])
    tokens = ech.Tokens(tmp_path / "t.bin")
    assert tokens.document(0).tolist() == [0, 1, 2] and tokens.document(-1).tolist() == [6, 7, 8, 9]
    for read in (lambda: tokens.document(1), lambda: ech.Packed(tokens, 4, cut=False), lambda: ech.Packed(tokens, 4)):
        with refused(DataError):
            read()


def _forged(path: Path, offsets: list[int]) -> None:
    header = struct.pack("<8s8sQQ32x", b"ECHTOK1\n", b"<u2", 10, len(offsets) - 1)
    path.write_bytes(header + struct.pack("<10H4x", *range(10)) + struct.pack(f"<{len(offsets)}q", *offsets))


def test_a_writer_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "t.bin.partial").symlink_to(tmp_path / "precious")
    assert len(ech.data.write_tokens(tmp_path / "t.bin", [[1, 2]])) == 2
    assert (tmp_path / "precious").read_text() == "x" and not (tmp_path / "t.bin").is_symlink()


def test_rows_without_tokens_are_refused() -> None:
    with refused(DatasetError, name="documents", got="0"):
        ech.Packed([[], []], 8)
    with refused(DatasetError, name="length", got="0"):
        ech.Packed(DOCUMENTS, 0)
    with pytest.raises(IndexError, match="row 3 is out of range for 3 rows"):
        ech.Packed(DOCUMENTS, 6)[3]
