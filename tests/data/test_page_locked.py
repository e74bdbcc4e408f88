"""A loader locks its batches' memory where the process computes on CUDA, and nowhere else. Locking is pretended."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import echelon as ech
from echelon.data.page_locked import locked
from tests.kit.models import net
from tests.kit.units import Regression


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had begun to use CUDA; a page-locked tensor has got an attribute."""

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        tensor.locked = True  # type: ignore[attr-defined]
        return tensor

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)


def _is_locked(tensor: Any) -> bool:
    return getattr(tensor, "locked", False) is True


ROWS = [(torch.full((2,), float(i)), i) for i in range(8)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ROWS


def _loaders(**options: Any) -> list[Any]:
    return [
        make(num_workers=workers, **options)
        for workers in (0, 1)
        for make in (
            lambda **more: ech.Loader(ROWS, 4, shuffle=False, **more),
            lambda **more: ech.StreamLoader(Stream(), 4, shards="itself", **more),
        )
    ]


def test_batches_are_locked_where_the_process_computes_on_cuda(cuda: None) -> None:
    for loader in _loaders():
        batches = list(loader)
        assert len(batches) == 2 and all(_is_locked(part) for each in batches for part in each), loader
        assert torch.equal(batches[1][0], torch.arange(4.0, 8.0)[:, None].expand(4, 2))
    for loader in _loaders(pin_memory=False):
        assert not any(_is_locked(part) for each in loader for part in each)


def test_a_process_on_a_cpu_locks_nothing_and_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started"))
    for loader in _loaders():
        assert len(list(loader)) == 2


class OwnList(list[Any]):
    def __init__(self) -> None:
        super().__init__([torch.ones(2)])


def test_what_cannot_be_locked_stays_as_it_is_and_layouts_are_kept(cuda: None) -> None:
    """torch's own pinning would raise for a batch that lies on a device."""
    there, sparse, subclass = torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(2))
    images, positions = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.arange(3).expand(2, 3)
    rest, mine = [there, sparse, subclass], OwnList()
    made = locked(
        {"pair": Pair(torch.ones(2), "a"), "rest": rest, "user": UserDict(x=torch.ones(1)), "n": 3, "of": [images, positions]}
    )
    assert _is_locked(made["pair"].x) and made["pair"].name == "a" and _is_locked(made["user"]["x"]) and made["n"] == 3
    assert all(now is before for now, before in zip(made["rest"], rest, strict=True)) and locked(mine) is mine
    image, position = made["of"]
    assert image.is_contiguous(memory_format=torch.channels_last) and position.is_contiguous()
    assert _is_locked(image) and _is_locked(position) and torch.equal(position, positions)


def test_a_dataloader_of_the_users_is_left_as_it_is(cuda: None) -> None:
    seen = []

    class Sees(Regression):
        def compute_loss(self, state: ech.State, data: Any) -> Any:
            seen.append(_is_locked(data[0]))
            return super().compute_loss(state, data)

    unit = Sees(module=net(dtype=torch.float32))
    x = torch.ones(4, next(unit.module.parameters()).shape[1])
    rows = [(x[0], unit.module(x)[0].detach())] * 4
    for loader in (DataLoader(rows, 2), ech.Loader(rows, 2)):  # type: ignore[arg-type]
        ech.train(unit, loader, max_epochs=1)
        unit.train_progress.num_epochs_completed = 0
    assert seen == [False, False, True, True]


@pytest.mark.parametrize(("device", "asked", "want"), [("cuda", False, True), ("cuda", True, True), ("cpu", False, False)])
def test_batches_go_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch, device: str, asked: bool, want: bool) -> None:
    """From a GPU to the host they are waited for: what is read too early is garbage."""
    unit = Regression(module=net(dtype=torch.float32))
    unit.device = torch.device(device)
    said: list[Any] = []
    monkeypatch.setattr(
        "echelon.loop.auto.prepared_unit.copy_data_to_device", lambda data, device, **options: said.append(options)
    )
    unit.move_data_to_device(None, [torch.ones(1)], asked)  # type: ignore[arg-type]
    assert said == [{"non_blocking": want}]
