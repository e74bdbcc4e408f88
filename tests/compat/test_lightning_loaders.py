"""torch's DataLoaders under a Trainer: where a run goes on in the middle of an epoch, and on fewer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import echelon
from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import Callback, LightningModule, Trainer
from echelon.compat.lightning.pytorch.callbacks import ModelCheckpoint
from echelon.contracts.overrides import Overrides, impose
from tests.compat.lightning_modules import QUIET, SAVING
from tests.kit.models import largest_difference
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

ROWS = 24


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(float(ROWS), dtype=torch.float64).reshape(-1, 1))


class Line(LightningModule):
    """Draws, as dropout does, and writes down the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1).double()
        self.seen: list[float] = []
        self.ends: list[tuple[list[float], float]] = []
        self.starts: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        self.seen += x.flatten().tolist()
        self.log("mean", x.mean(), on_step=True, on_epoch=True)
        return (self.layer(x / ROWS) - torch.rand((), dtype=torch.float64)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts.append(batch[0].flatten().tolist())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((batch[0].flatten().tolist(), float(self.trainer.callback_metrics["mean_step"])))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step == 6


class Halves(Sampler[int]):
    """An order of its own, drawn by numpy's or torch's RNG as many do."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS).tolist())

    def __len__(self) -> int:
        return ROWS


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(row,) for row in numbers().tensors[0][torch.randperm(ROWS)]])


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(numbers(), batch_size=6, shuffle=True),
    "in order": lambda: DataLoader(numbers(), batch_size=6),
    "by a generator": lambda: DataLoader(numbers(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "by a sampler": lambda: DataLoader(numbers(), batch_size=6, sampler=Halves()),
    "by batches": lambda: DataLoader(numbers(), batch_sampler=torch.utils.data.BatchSampler(Halves(), 6, drop_last=True)),
    "of a stream": lambda: DataLoader(Stream(), batch_size=6),
    "with workers": lambda: DataLoader(numbers(), batch_size=6, shuffle=True, num_workers=1),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", [*LOADERS])
def test_a_run_on_one_rank_goes_on_in_the_middle_of_an_epoch(kind: str, tmp_path: Path) -> None:
    echelon.seed(3)
    whole = Line()
    Trainer(max_epochs=3, **QUIET).fit(whole, LOADERS[kind]())
    echelon.seed(3)
    first, saver = Line(), ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=6, save_last=True)
    Trainer(max_epochs=3, callbacks=[saver, Stops()], **SAVING).fit(first, LOADERS[kind]())
    assert len(first.seen) == 36 and first.seen == whole.seen[:36]
    echelon.seed(9)
    again = Line()
    Trainer(max_epochs=3, **QUIET).fit(again, LOADERS[kind](), ckpt_path=saver.last_model_path)
    assert again.seen == whole.seen[36:]
    assert largest_difference(dict(again.layer.state_dict()), dict(whole.layer.state_dict())) == 0


class Unit(Regression):
    """Writes down its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def compute_loss(self, state: Any, data: Any) -> Any:
        self.seen += data[0][:, 0].tolist()
        return super().compute_loss(state, data)


def test_so_does_a_unit_of_echelons_own(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        x, y = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
        return DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)

    seen = []
    for limit in (6, 12):
        echelon.seed(3)
        unit = Unit()
        saver = echelon.DistributedCheckpointSaver(tmp_path)
        data = loader()
        path = str(tmp_path / "step-00000006") if limit == 12 else None
        echelon.Trainer(max_updates=limit, callbacks=[saver], run_dir=tmp_path / "run").fit(unit, data, ckpt_path=path)
        seen.append(unit.seen)
    echelon.seed(3)
    whole = Unit()
    echelon.Trainer(max_updates=12).fit(whole, loader())
    assert seen[0] + seen[1] == whole.seen


# --- fewer ranks


def trained(folder: str, path: str | None, planned: int | None, epochs: int = 3, batch_size: int = 3) -> Any:
    impose(Overrides(planned_ranks=planned) if planned else None)
    try:
        echelon.seed(3)
        module = Line()
        module.training_step = lambda batch, batch_idx: (  # type: ignore[method-assign]  # without a draw, which is the rank's
            module.seen.extend(batch[0].flatten().tolist()),
            module.log("mean", batch[0].mean(), on_step=True, on_epoch=True),
            (module.layer(batch[0] / ROWS) - 1).square().mean(),
        )[2]
        saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1)
        loader = DataLoader(numbers(), batch_size=batch_size, shuffle=True)
        trainer = Trainer(max_epochs=epochs, strategy="ddp", callbacks=[saver], **SAVING)
        trainer.fit(module, loader, ckpt_path=path)
        weights = {name: value.detach().clone() for name, value in module.layer.state_dict().items()}
        mean = float(trainer.callback_metrics.get("mean_epoch", 0))
        return weights, module.seen, module.starts, module.ends, mean
    finally:
        impose(None)
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("planned", [2, None])
def test_a_run_of_two_ranks_goes_on_on_one_with_the_same_batches(
    planned: int | None, ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (weights, one, *_, mean), (_, two, *_) = ranks(2, trained, str(tmp_path / "two"), None, planned)
    # In the middle of an epoch, there once more, as the run that shrank does, and at the end.
    for step, left, folder in ((3, 54, "two"), (9, 18, "again 3"), (12, 0, "two")):
        saved = next(iter((tmp_path / folder).glob(f"epoch=*-step={step}.ckpt")))
        again, seen, starts, ends, mean_again = trained(str(tmp_path / f"again {step}"), str(saved), planned)
        assert largest_difference(again, weights) < 1e-14 and len(seen) == left
        assert sorted(seen[:6]) == sorted(one[step * 3 : step * 3 + 3] + two[step * 3 : step * 3 + 3])
        assert starts == [batch for batch, _ in ends] and all(len(batch) == 6 for batch in starts)
        assert all(number == pytest.approx(sum(batch) / 6) for batch, number in ends)
        assert not left or mean_again == mean == pytest.approx((ROWS - 1) / 2)
    told = [record.getMessage() for record in caplog.records if "global batches of 6" in record.getMessage()]
    assert len(told) == (0 if planned else 3)


@pytest.mark.full
def test_a_script_that_divides_its_batch_by_the_ranks_goes_on_on_one_in_mid_epoch(ranks: Any, tmp_path: Path) -> None:
    (weights, *_), _ = ranks(2, trained, str(tmp_path / "2"), None, None)
    saved = str(tmp_path / "2/epoch=0-step=3.ckpt")
    again, seen, starts, *_ = trained(str(tmp_path / "1"), saved, None, 3, 6)
    assert largest_difference(again, weights) < 1e-14 and len(seen) == 54 and all(len(batch) == 6 for batch in starts)


def grown(folder: str, path: str) -> str:
    try:
        return str(len(trained(folder, path, None)[1]))
    except UsageError as error:
        return str(error)


@pytest.mark.full
def test_one_rank_grows_at_an_epochs_end_and_is_told_so_in_its_middle(ranks: Any, tmp_path: Path) -> None:
    trained(str(tmp_path / "one"), None, None, 1)
    at_end = ModelCheckpoint(dirpath=str(tmp_path / "one"))
    Trainer(max_epochs=1, callbacks=[at_end], **SAVING).fit(Line(), DataLoader(numbers(), batch_size=3, shuffle=True))
    for step, said in ((6, "checkpoint of an epoch's end"), (8, str(2 * ROWS // 2))):
        saved = next(iter((tmp_path / "one").glob(f"epoch=*-step={step}.ckpt")))
        for found in ranks(2, grown, str(tmp_path / str(step)), str(saved)):
            assert said in found and "RestoreOptions" not in found


@pytest.mark.full
def test_a_batch_size_of_todays_counts(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Lightning: whoever changes it means it."""
    ranks(2, trained, str(tmp_path / "two"), None, None, 1)
    saved = str(tmp_path / "two/epoch=0-step=3.ckpt")
    Trainer(max_epochs=2, **QUIET).fit(Line(), DataLoader(numbers(), batch_size=12, shuffle=True), ckpt_path=saved)
    assert "the position of the DataLoader is not known: it starts over" in caplog.text


class Tail(Line):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("mean", batch[0].mean(), on_epoch=True)
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", batch[0].mean())


class Collecting(Tail):
    """Evaluates as scripts do: by a metric, a list and a number."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.sum, self.rows, self.seen = SumMetric(), list[torch.Tensor](), 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sum.update(batch[0])
        self.log("sum", self.sum)
        self.rows.append(batch[0])
        self.seen += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"rows": float(torch.cat(self.rows).sum()), "seen": float(self.seen)}, reduce_fx="sum")

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


class ByHand(Collecting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def evaluate_a_tail() -> list[dict[str, float]]:
    data = TensorDataset(numbers().tensors[0][:9])
    tried = (Collecting, "ddp"), (ByHand, "ddp"), (Collecting, "fsdp")
    return [Trainer(strategy=how, **QUIET).test(kind(), DataLoader(data, batch_size=4))[0] for kind, how in tried]


def test_a_rank_without_samples_counts_and_collects_nothing(ranks: Any) -> None:
    pytest.importorskip("torchmetrics")
    for found in ranks(2, evaluate_a_tail):
        assert found == [{"sum": 36.0, "rows": 36.0, "seen": 9.0}] * 3


def log_a_tail() -> tuple[float, float, float]:
    trainer = Trainer(max_epochs=1, strategy="ddp", **QUIET)
    data = TensorDataset(numbers().tensors[0][:9])
    trainer.fit(Tail(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    mean, count, val_mean = (float(trainer.callback_metrics[name]) for name in ("mean_epoch", "count", "val_mean"))
    return mean, count, val_mean


def test_a_step_knows_its_loader_also_after_one_without_a_length() -> None:
    module, seen = Line(), list[tuple[int, int]]()
    module.test_step = lambda batch, batch_idx, dataloader_idx: seen.append((batch_idx, dataloader_idx))  # type: ignore
    module.on_after_batch_transfer = lambda batch, dataloader_idx: seen.append(dataloader_idx) or batch  # type: ignore
    loaders = [DataLoader(Stream(), batch_size=12), DataLoader(numbers(), batch_size=12)]
    Trainer(**QUIET).test(module, loaders)
    assert [place for place in seen if isinstance(place, tuple)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [index for index in seen if not isinstance(index, tuple)] == [0, 0, 1, 1]


def test_a_rank_without_samples_logs_nothing(ranks: Any) -> None:
    for found in ranks(2, log_a_tail):
        assert found == (4.0, 9.0, 4.0)


class Counts(Line):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.sum = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sum.update(batch[0])
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def count_to_its_end(folder: str, steps: int, path: str | None) -> tuple[str, float]:
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_last=True)
    limit = {"max_steps": steps} if steps else {"max_epochs": 1}
    trainer = Trainer(strategy="ddp" if dist.is_initialized() else "auto", callbacks=[saver], **limit, **SAVING)
    trainer.fit(Counts(), DataLoader(numbers(), batch_size=2), ckpt_path=path)
    return str(saver.last_model_path), float(trainer.callback_metrics.get("sum", 0))


def test_a_metric_object_goes_on_with_fewer_ranks(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    path, _ = ranks(2, count_to_its_end, str(tmp_path), 3, None)[0]
    assert count_to_its_end(str(tmp_path), 0, path)[1] == sum(range(ROWS))
