"""Going on with other data, another order or another global batch is noticed, explained, and allowed only by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import echelon as ech
from echelon.common.errors import LoaderError, UsageError
from echelon.data.fingerprint import checksum
from tests.kit.refusals import refused


def _loader(
    data: Any = range(40), size: int = 8, *, fingerprint: str | None = None, accept_changes: Any = (), **options: Any
) -> ech.Loader:
    more = ech.data.LoaderOptions(dp=(0, 1), fingerprint=fingerprint, accept_changes=accept_changes)
    return ech.Loader(data, size, options=more, **options)


def test_a_table_says_what_changed_and_what_is_harmless() -> None:
    state = _loader(seed=1, accumulate=2, tail="drop").state_dict()
    with pytest.raises(UsageError) as caught:
        _loader(range(41), 4, seed=2).load_state_dict(state)
    rows = [line.split(maxsplit=3) for line in str(caught.value).splitlines()[2:-1]]
    assert [row[:3] for row in rows] == [
        ["samples", "40", "41"],
        ["seed", "1", "2"],
        ["global_batch", "8", "4"],
        ["accumulate", "2", "1"],
        ["tail", "drop", "keep"],
    ]
    assert [row[3].startswith("harmless") for row in rows] == [False, False, False, True, True]
    assert "accept_changes={'samples', 'seed', 'global_batch'}" in str(caught.value)
    _loader(seed=1, tail="keep", num_workers=2).load_state_dict(state)  # what is harmless needs no word
    del state["order"]  # of an older version
    with refused(LoaderError):
        _loader(seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (list(range(40)), list(reversed(range(40)))),
        ([torch.tensor([i, 1]) for i in range(40)], [torch.tensor([i, 2]) for i in range(40)]),
        ([np.full(3, i) for i in range(40)], [np.full(3, i, dtype=np.float32) for i in range(40)]),
        ([f"text {i}" for i in range(40)], sorted((f"text {i}" for i in range(40)), key=len, reverse=True)),
        ([{"x": (b"a", i)} for i in range(40)], [{"x": (b"b", i)} for i in range(40)]),
    ],
)
def test_data_of_the_same_length_but_other_content_or_order_are_noticed(before: Any, after: Any) -> None:
    state = _loader(before).state_dict()
    _loader(list(before)).load_state_dict(state)
    with refused(LoaderError):
        _loader(after).load_state_dict(state)
    _loader(after, accept_changes=["fingerprint"]).load_state_dict(state)


def test_a_fingerprint_of_ones_own_counts_and_what_has_no_checksum_raises_no_alarm() -> None:
    """Augmented samples have none, nor has what cannot be read as bytes."""
    state = _loader(fingerprint="release 7").state_dict()
    _loader(list(reversed(range(40))), fingerprint="release 7").load_state_dict(state)
    with refused(LoaderError):
        _loader(fingerprint="release 8").load_state_dict(state)
    before = torch.get_rng_state()
    state = _loader(Noisy()).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert set(state["fingerprint"]["samples"].values()) == {None}
    _loader(Noisy()).load_state_dict(state)
    assert checksum(object()) is None and checksum((1, object())) is None and checksum(np.array([object()])) is None
    assert checksum(1) != checksum("1") != checksum(b"1")
    assert checksum(torch.zeros(2, 3)) != checksum(torch.zeros(3, 2)) != checksum(torch.zeros(3, 2).int())


class Noisy:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2)


class Opens:
    """Keeps the process that read first, as a dataset keeps the file that it opened."""

    def __init__(self) -> None:
        self.reader: int | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        import os

        self.reader = self.reader or os.getpid()
        return index


def test_with_workers_the_fingerprint_is_taken_in_one_of_them() -> None:
    """Or the file that the rank opened would be shared by all workers forked later, its position included."""
    data, alone = Opens(), Opens()
    states = [_loader(data, num_workers=2).state_dict(), _loader(alone).state_dict()]
    assert data.reader is None and alone.reader is not None
    assert states[0]["fingerprint"] == states[1]["fingerprint"]


def test_the_loop_goes_on_where_an_accepted_global_batch_says() -> None:
    class Sees(ech.TrainUnit[torch.Tensor]):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def train_step(self, state: ech.State, data: torch.Tensor) -> None:
            self.seen += data.tolist()

    unit, loader = Sees(), _loader(range(80), 8, shuffle=False)
    ech.train(unit, loader, max_updates=3)
    other = _loader(range(80), 6, shuffle=False, accumulate=2, accept_changes={"global_batch"})
    other.load_state_dict(loader.state_dict())
    assert other.seek(6) == 8  # three updates of two micro-batches have been counted; four of six hold as many samples
    assert torch.cat(list(other)).tolist() == list(range(24, 80))
    other = _loader(range(80), 4, shuffle=False, accept_changes={"global_batch"})
    other.load_state_dict(loader.state_dict())
    ech.train(unit, other, max_epochs=1)
    assert unit.seen == list(range(80)) and unit.train_progress.num_steps_completed_in_prev_epoch == 20


@pytest.mark.parametrize(("data", "names"), [(range(40), "samples"), (range(40), ["sample"]), ([], ())])
def test_accepting_what_does_not_exist_is_refused_and_so_is_a_loader_of_nothing(data: Any, names: Any) -> None:
    with refused(LoaderError):
        _loader(data, shuffle=False, accept_changes=names)
