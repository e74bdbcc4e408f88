"""Restoring: what changed since, what is missing, weights alone, and states that are not only numbers."""

from __future__ import annotations

import logging
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import echelon as ech
from echelon.checkpoint import plain
from echelon.contracts.errors import CheckpointError, CheckpointMismatchError, UsageError
from tests.conftest import Ranks
from tests.models import largest_difference, net, whole
from tests.test_checkpoint import DATA, _loader, _resume, _train_and_save, _uninterrupted, _unit
from tests.units import Regression

Saver = ech.DistributedCheckpointSaver
Options = ech.RestoreOptions


# --- what changed


@pytest.mark.parametrize(
    ("what", "loader"),
    [
        ("global_batch", {"global_batch": 16}),
        ("seed", {"seed": 2}),
        ("samples", {"dataset": torch.utils.data.TensorDataset(DATA.tensors[0][:40], DATA.tensors[1][:40])}),
    ],
)
def test_other_data_is_shown_in_a_table_and_needs_to_be_allowed(tmp_path: Path, what: str, loader: dict[str, Any]) -> None:
    _train_and_save(tmp_path, "noop", 2)
    other = ech.Loader(**{"dataset": DATA, "global_batch": 8, "seed": 1, **loader})
    unit = _unit("noop", seed=3)
    before = whole(unit.module)
    with pytest.raises(
        CheckpointMismatchError, match=rf"(?s)what\s+saved\s+now.*{what}\s+\d+\s+\d+\s+NOT harmless.*allow_changes"
    ):
        Saver.restore_from_latest(tmp_path, unit, train_dataloader=other)
    assert largest_difference(whole(unit.module), before) == 0  # refused before anything was changed
    Saver.restore_from_latest(
        tmp_path, unit, train_dataloader=other, restore_options=Options(allow_changes=(what, "fingerprint"))
    )
    assert unit.train_progress.num_steps_completed == 2


def test_another_optimizer_is_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = _train_and_save(tmp_path, "noop", 2)
    unit = Regression(module=net(5), optimizer="SGD")
    with pytest.raises(CheckpointMismatchError, match=r"optimizer\s+AdamW\s+SGD\s+NOT harmless"):
        Saver.restore_from_latest(tmp_path, unit)
    with caplog.at_level(logging.WARNING):
        Saver.restore_from_latest(tmp_path, unit, restore_options=Options(allow_changes=("optimizer",)))
    assert largest_difference(whole(unit.module), want) == 0 and not unit.optimizer.state
    assert "allowed" in caplog.text


def _restored_under(folder: Path, strategy: str) -> str:
    import io

    heard = io.StringIO()
    handler, log = logging.StreamHandler(heard), logging.getLogger("echelon")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    unit = _unit(strategy, seed=3)
    Saver.restore_from_latest(folder, unit, train_dataloader=_loader())
    return heard.getvalue()


def test_harmless_changes_pass_and_are_said_once(ranks: Ranks, tmp_path: Path) -> None:
    _train_and_save(tmp_path / "c", "noop", 2)
    first, second = ranks(2, _restored_under, tmp_path / "c", "ddp")
    assert "world_size" in first and "strategy" in first and "harmless" in first
    assert "harmless" not in second


# --- what is missing, and what nobody asked for


def test_without_strict_the_missing_and_the_unexpected_are_listed_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = _train_and_save(tmp_path, "noop", 2)
    module = net(4)
    module.last, module.head = None, nn.Linear(8, 3).double()  # type: ignore[assignment]
    untouched = module.head.weight.detach().clone()

    class Other(Regression):
        def __init__(self) -> None:
            super().__init__(module=module, optimizer="AdamW", training=False)

    with pytest.raises(CheckpointMismatchError, match=r"(?s)state\s+saved\s+now.*module.head.bias\s+-\s+wanted.*strict=False"):
        Saver.restore(tmp_path / "step-00000002", Other())
    options = Options.weights_only(strict=False)
    with caplog.at_level(logging.WARNING):
        report = Saver.restore(tmp_path / "step-00000002", Other(), restore_options=options)
    assert report.missing == ["module.head.bias", "module.head.weight"]
    assert report.unexpected == ["module.last.bias", "module.last.weight"]
    assert "module.head.bias" in caplog.text and "nobody asked for: module.last.bias" in caplog.text
    assert torch.equal(module.head.weight, untouched)
    assert torch.equal(module.first.weight, saved["first.weight"])


def test_another_shape_is_refused_with_or_without_strict_and_shown(tmp_path: Path) -> None:
    _train_and_save(tmp_path, "noop", 2)
    for options in (Options(), Options.weights_only(strict=False)):
        unit = Regression(module=net(width=16), optimizer="AdamW")
        with pytest.raises(CheckpointMismatchError, match=r"module.first.weight\s+\(8, 4\)\s+\(16, 4\)"):
            Saver.restore_from_latest(tmp_path, unit, restore_options=options)


def _frozen_groups(strategy: str, seed: int, averages: bool) -> Any:
    """Two parameter groups, one frozen layer, an average of the weights (not with FSDP1, which hides them)."""

    class Grouped(Regression):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
            named = dict(module.named_parameters())
            last = [p for n, p in named.items() if "last" in n]
            rest = [p for n, p in named.items() if "last" not in n and p.requires_grad]
            optimizer = torch.optim.AdamW([{"params": rest}, {"params": last, "lr": 0.01, "weight_decay": 0.3}], lr=0.05)
            return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])

    module: Any = net(seed)
    module.blocks[0].requires_grad_(False)
    if strategy == "fsdp1":  # wrapped by hand
        module = FSDP(module, device_id=torch.device("cpu"), use_orig_params=True)
        return Grouped(module=module, step_lr_interval="step")
    swa = ech.SWAParams(1, 1, ema_decay=0.5) if averages else None
    return Grouped(module=module, strategy=strategy, swa_params=swa, step_lr_interval="step")


def _result(unit: Any) -> dict[str, torch.Tensor]:
    if isinstance(unit.module, FSDP):
        with FSDP.summon_full_params(unit.module):
            return {n: p.detach().clone() for n, p in unit.module.module.named_parameters()}
    means = unit.swa_model.state_dict() if unit.swa_model is not None else {}
    means = {f"mean.{k}": v for k, v in means.items() if isinstance(v, torch.Tensor)}
    means = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in means.items()}
    return {**whole(unit.module), **means}


def _save_grouped(folder: Path, kinds: list[str], averages: bool) -> None:
    for kind in kinds:
        ech.train(_frozen_groups(kind, 0, averages), _loader(), max_steps=4, callbacks=[Saver(folder / kind)])


def _resume_grouped(folder: Path, pairs: list[tuple[str, str]], averages: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for source, kind in pairs:
        unit, loader = _frozen_groups(kind, 7, averages), _loader()
        Saver.restore_from_latest(folder / source, unit, train_dataloader=loader)
        ech.train(unit, loader, max_steps=7)
        results[f"{source} -> {kind}"] = _result(unit)
    return results


@pytest.mark.parametrize(
    ("averages", "kinds"), [(True, ["ddp", "fsdp", "hsdp", "zero1", "zero2"]), (False, ["fsdp1", "ddp", "fsdp", "zero1"])]
)
def test_groups_frozen_layers_and_averages_go_on_under_another_strategy(
    ranks: Ranks, tmp_path: Path, averages: bool, kinds: list[str]
) -> None:
    unit = _frozen_groups("noop", 0, averages)
    ech.train(unit, _loader(), max_steps=7)
    want = _result(unit)
    ranks(2, _save_grouped, tmp_path, kinds, averages)
    others = list(zip(kinds, [*kinds[1:], *kinds[:1]], strict=True)) + list(zip(kinds, [*kinds[2:], *kinds[:2]], strict=True))
    for size, pairs in ((2, others), (4, others[: len(kinds)]), (1, [(kind, "noop") for kind in kinds])):
        for got in ranks(size, _resume_grouped, tmp_path, pairs, averages):
            assert {name: d for name, each in got.items() if not (d := largest_difference(each, want)) < 1e-12} == {}, size


# --- weights of other programs


def test_weights_of_another_program_are_read_into_any_strategy(ranks: Ranks, tmp_path: Path) -> None:
    want = {k: v.contiguous() for k, v in net(3).state_dict().items()}
    save_file(want, tmp_path / "model.safetensors")
    torch.save({"state_dict": want}, tmp_path / "model.pt")
    for got in ranks(2, _imported, [tmp_path / "model.safetensors", tmp_path / "model.pt", tmp_path]):
        assert got == {"ddp": 0, "fsdp": 0, "zero1": 0, "tp": 0}
    unit = Regression(module=net(0, width=16))
    with pytest.raises(CheckpointMismatchError, match=r"module.first.weight\s+\(8, 4\)\s+\(16, 4\)"):
        Saver.restore(tmp_path / "model.pt", unit)


def _imported(paths: list[Path]) -> dict[str, float]:
    found: dict[str, float] = {}
    want = {n: p.detach() for n, p in net(3).named_parameters()}
    for strategy in ("ddp", "fsdp", "zero1", "tp"):
        for path in paths:
            unit = _unit(strategy, seed=1)
            Saver.restore(path, unit)
            found[strategy] = max(found.get(strategy, 0), largest_difference(whole(unit.module), want))
    return found


class Marked:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    for name in ("model.pt", "model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps({"a": Marked(tmp_path / "ran")}))
        with pytest.raises(CheckpointError, match="--trust-pickle"):
            Saver.restore(tmp_path / name, _unit("noop"))
    assert not (tmp_path / "ran").exists()


def test_a_checkpoints_own_files_hold_no_pickle(tmp_path: Path) -> None:
    _train_and_save(tmp_path, "noop", 2)
    folder = tmp_path / "step-00000002"
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}
    assert load_file(folder / "tensors-00000.safetensors")  # the real library reads them
    for path in folder.iterdir():
        assert b"ctorch" not in path.read_bytes() and b"PK\x03\x04" not in path.read_bytes()


# --- any state


def test_states_of_many_kinds_come_back_as_they_were() -> None:
    tensor = torch.randn(3, 2).to(torch.bfloat16)
    value: dict[Any, Any] = {
        "plain": [1, 2.5, None, True, "text", float("inf"), 2**70],
        3: {"~": 1, ("a", 1): {4, 5}},
        "counter": Counter({3: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "tuple": (1, (2, [3])),
        "tensors": [tensor, torch.tensor(3), torch.empty(0, 4), torch.tensor([1 + 2j]), torch.tensor([True])],
        "numpy": [np.arange(3), np.float32(1.5), np.array([], dtype=np.int16), np.array(7)],
        "bytes": b"\x00\xff",
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "odd": [complex(1, 2), frozenset([1])],
    }
    import json

    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(plain.encode(value, tensors))
    got = plain.decode(json.loads(text), lambda name, dtype, shape: tensors[name])
    assert list(got) == list(value) and got["plain"] == value["plain"]
    for key in (3, "counter", "ordered", "tuple", "bytes", "torch", "odd"):
        assert got[key] == value[key] and type(got[key]) is type(value[key]), key
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got["tensors"], value["tensors"], strict=True))
    for a, b in zip(got["numpy"], value["numpy"], strict=True):
        assert np.array_equal(a, b) and a.dtype == b.dtype and type(a) is type(b)
    with pytest.raises(CheckpointError, match=r"a.b\[0\] is a PosixPath"):
        plain.encode({"a": {"b": [Path("x")]}}, {})


# --- a URL


def test_a_url_is_a_folder_like_any_other(tmp_path: Path) -> None:
    import fsspec

    url = "memory://bucket/run"
    fs = fsspec.filesystem("memory")
    saver = Saver(url, save_every_n_train_steps=2, keep_last_n_checkpoints=2)
    assert not Saver.restore_from_latest(url, _unit("noop"))
    fs.pipe_file("/bucket/run/step-00000009/tensors-00000.safetensors", b"of a killed save")
    ech.train(_unit("noop"), _loader(), max_steps=6, callbacks=[saver])
    assert sorted(p.rsplit("/", 1)[1] for p in fs.ls("/bucket/run", detail=False)) == ["step-00000004", "step-00000006"]
    unit, loader = _unit("noop", seed=9), _loader()
    newest = "/bucket/run/step-00000006/tensors-00000.safetensors"
    data = bytearray(fs.cat_file(newest))
    data[-1] ^= 1
    fs.pipe_file(newest, bytes(data))
    assert Saver.restore_from_latest(url, unit, train_dataloader=loader)
    assert unit.train_progress.num_steps_completed == 4
    ech.train(unit, loader, max_steps=8, callbacks=[Saver(url, async_checkpoint=True, save_every_n_train_steps=4)])
    assert largest_difference(whole(unit.module), _uninterrupted("noop", 8)) == 0
    assert Saver.restore_from_latest(url, unit) and unit.train_progress.num_steps_completed == 8


def test_ranks_write_to_a_url_together(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _train_and_save, f"file://{tmp_path}/c", "fsdp", 4)
    assert largest_difference(ranks(2, _resume, tmp_path / "c", "ddp", 8)[0], _uninterrupted("noop", 8)) < 1e-12


def test_a_url_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install 'echelon\[remote\]'"):
        Saver("s3://bucket/run")
