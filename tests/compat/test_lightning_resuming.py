"""What a Trainer restores before what, where a second call goes on, and what may not be trained at all."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.cli.main import main
from echelon.common.errors import CheckpointError, CheckpointInUseError
from echelon.compat.lightning.pytorch import Callback, LightningModule, Trainer
from echelon.compat.lightning.pytorch.callbacks import ModelCheckpoint
from echelon.compat.lightning.pytorch.loggers import CSVLogger
from echelon.parallel.shards import whole
from tests.compat.lightning_modules import GAN, QUIET, SAVING, Classifier, loader_of, made, two_batches
from tests.conftest import clean_environment
from tests.kit.models import largest_difference
from tests.kit.refusals import refused

pytestmark = [pytest.mark.standing_ranks, pytest.mark.usefixtures("forked_programs")]


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[str] = []

    def note(self, what: str) -> None:
        self.calls.append(f"{what} {float(whole(self.layer.weight).detach().sum()):.4f}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.note("on_fit_start")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note("on_load_checkpoint")


class Watches(Callback):
    seen = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def state_key(self) -> str:
        return self.name

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        self.module.calls.append(f"{self.name}.load_state_dict")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.module = pl_module

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pl_module.note(f"{self.name}.on_load_checkpoint")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.calls.append(f"{self.name} saw {self.seen}")


def restored_in_order(folder: str, strategy: str) -> tuple[list[str], list[str], float, float]:
    torch.manual_seed(1)
    saver = ModelCheckpoint(dirpath=folder, save_last=True)
    first = Small()
    Trainer(max_epochs=1, strategy=strategy, callbacks=[saver, Watches("a"), Watches("b")], **SAVING).fit(first, two_batches())
    saved = float(whole(first.layer.weight).detach().sum())
    options = {"strategy": strategy, "callbacks": [Watches("a"), Watches("b")], **QUIET}
    again = Small()
    before = float(again.layer.weight.detach().sum())
    Trainer(max_epochs=2, **options).fit(again, two_batches(), ckpt_path=saver.last_model_path)
    tested = Small()
    fresh = float(tested.layer.weight.detach().sum())
    Trainer(**options).test(tested, two_batches(), ckpt_path=saver.last_model_path)
    fit = [call.replace(f"{before:.4f}", "fresh").replace(f"{saved:.4f}", "saved") for call in again.calls]
    test = [call.replace(f"{fresh:.4f}", "fresh").replace(f"{saved:.4f}", "saved") for call in tested.calls]
    return fit, test, before, saved


LOADED = [
    "on_load_checkpoint fresh",
    "a.on_load_checkpoint saved",
    "b.on_load_checkpoint saved",
    "a.load_state_dict",
    "b.load_state_dict",
]
STARTED = ["configure_optimizers saved", "a saw 1", "b saw 1", "on_fit_start saved"]


def test_weights_and_callbacks_are_restored_before_there_are_optimizers(tmp_path: Path) -> None:
    """As a program under Lightning 2.6.6 writes it down."""
    fit, test, before, saved = restored_in_order(str(tmp_path), "auto")
    assert before != saved and fit == LOADED + STARTED and test == LOADED


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_so_they_are_on_several_ranks(strategy: str, ranks: Any, tmp_path: Path) -> None:
    for fit, test, _, _ in ranks(2, restored_in_order, str(tmp_path), strategy):
        assert [line.rpartition(" ")[0] for line in fit] == [line.rpartition(" ")[0] for line in LOADED + STARTED]
        assert fit[1:] == (LOADED + STARTED)[1:] and test[1:] == LOADED[1:]


class Averages(Callback):
    """As many programs average weights: over a copy that is made when training begins."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not hasattr(self, "average"):
            self.average = copy.deepcopy(pl_module.net)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), pl_module.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def test_a_copy_that_is_made_as_training_begins_is_one_of_the_restored_weights(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first = made(Classifier)
    Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(first, loader_of(Classifier, 1))
    expected = copy.deepcopy(first.net)
    averages = Averages()
    again = Classifier()
    Trainer(max_epochs=1, callbacks=[averages], **QUIET).fit(again, loader_of(Classifier, 1), ckpt_path=saver.last_model_path)
    assert largest_difference(dict(averages.average.state_dict()), dict(expected.state_dict())) == 0


class Edits(Classifier):
    """Renames what an older version of it has saved."""

    seen: Any = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "state_dict" in checkpoint and checkpoint.get("nothing") is None
        checkpoint["state_dict"]["net.3.bias"] = torch.full((4,), 7.0, dtype=torch.float64)
        self.seen = sorted(checkpoint["state_dict"])


def edit(folder: str, strategy: str) -> tuple[Any, torch.Tensor]:
    saver = ModelCheckpoint(dirpath=folder, save_last=True)
    Trainer(max_epochs=1, callbacks=[saver], strategy=strategy, **SAVING).fit(made(Classifier), loader_of(Classifier, 1))
    module = Edits()
    Trainer(strategy=strategy, **QUIET).test(module, loader_of(Classifier, 1), ckpt_path=saver.last_model_path)
    return module.seen, whole(module.net[3].bias).detach()


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_hook_may_change_the_weights_that_are_loaded(strategy: str, ranks: Any, tmp_path: Path) -> None:
    for seen, bias in ranks(2, edit, str(tmp_path), strategy):
        assert seen == ["net.1.bias", "net.1.weight", "net.3.bias", "net.3.weight"] and bias.eq(7).all()


class PutsWeights(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {}


def test_weights_that_a_hook_puts_into_a_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, callbacks=[ModelCheckpoint(dirpath=tmp_path), PutsWeights()], **SAVING)
    with refused(CheckpointError):
        trainer.fit(Small(), two_batches())


@pytest.mark.parametrize(("counts", "kept"), [(True, ["model-v1.ckpt", "model.ckpt"]), (False, ["model.ckpt"])])
def test_a_checkpoint_of_a_taken_name_is_counted_or_replaced(tmp_path: Path, counts: bool, kept: list[str]) -> None:
    data = DataLoader(TensorDataset(torch.randn(8, 2)), 4)
    for _ in range(2):
        saver = ModelCheckpoint(dirpath=tmp_path, filename="model", enable_version_counter=counts)
        module = Small()
        Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(module, data)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == kept
    assert Path(saver.best_model_path).name == kept[0]
    saved = Small.load_from_checkpoint(saver.best_model_path)
    assert torch.equal(saved.layer.weight, module.layer.weight)


def test_numbers_are_logged_under_the_steps_that_follow_the_saved_ones(tmp_path: Path) -> None:
    module, saver = Small(), ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module.training_step = lambda batch, batch_idx: (  # type: ignore[method-assign]
        module.log("loss", loss := module.layer(batch[0]).square().mean()),
        loss,
    )[1]
    Trainer(max_epochs=1, callbacks=[saver], log_every_n_steps=1, **{**SAVING, "logger": CSVLogger(tmp_path, "a")}).fit(
        module, two_batches()
    )
    logger = CSVLogger(tmp_path, "b")
    Trainer(max_epochs=2, log_every_n_steps=1, **{**QUIET, "logger": logger}).fit(
        module, two_batches(), ckpt_path=saver.last_model_path
    )
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("step")
    assert [row.split(",")[place] for row in rows[1:]] == ["2", "3"]


# --- a second call


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_goes_on_from_the_first(devices: int, caplog: pytest.LogCaptureFixture) -> None:
    """With the same limits it does nothing, as under Lightning; it trained once more."""
    trainer, module = Trainer(max_epochs=2, devices=devices, strategy="auto" if devices == 1 else "ddp", **QUIET), Small()
    trainer.fit(module, two_batches())
    once, steps = copy.deepcopy(module.layer.state_dict()), trainer.global_step
    trainer.fit(module, two_batches())
    assert largest_difference(dict(module.layer.state_dict()), once) == 0
    assert (trainer.global_step, trainer.current_epoch) == (steps, 2)
    trainer.validate(module, two_batches())
    assert (trainer.global_step, trainer.current_epoch) == (steps, 2)
    trainer.max_epochs = 3
    trainer.fit(module, two_batches())
    assert (trainer.global_step, trainer.current_epoch) == (steps * 3 // 2, 3)


NO_GUARD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from echelon.compat.lightning.pytorch import LightningModule, Trainer
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def on_train_start(self):
        print("it trains", flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = Trainer(devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
try:
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
except Exception:
    raise SystemExit(3)
print(f"after it: {trainer.global_step} updates", flush=True)
"""


@pytest.mark.full
def test_a_script_without_a_main_guard_trains_once_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NO_GUARD)
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert done.stdout == "it trains\nafter it: 2 updates\n"  # of rank 0 and of the script; on one rank it would be 4


# --- modes


class Frozen(LightningModule):
    """Its encoder is frozen, in eval mode, and has batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.encoder.requires_grad_(False).eval()
        self.head = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.training and not self.encoder.training
        return self.head(self.encoder(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.head.training

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Pretrained(nn.Sequential):
    """A backbone as it comes from a hub: in eval mode."""

    @classmethod
    def from_pretrained(cls) -> Pretrained:
        return cls(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()  # type: ignore[return-value]


def test_modules_are_trained_in_the_mode_in_which_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """As Lightning does since 2.2: also a backbone that comes in eval mode."""
    module = Frozen()
    before = copy.deepcopy(module.encoder.state_dict())
    with caplog.at_level(logging.WARNING):
        Trainer(max_epochs=2, **QUIET).fit(module, two_batches(), two_batches())
    assert largest_difference(dict(module.encoder.state_dict()), before) == 0 and module.training
    assert any("eval mode" in record.getMessage() and "encoder" in record.getMessage() for record in caplog.records)
    module = Frozen()
    module.encoder = Pretrained.from_pretrained()
    Trainer(max_epochs=1, **QUIET).fit(module, two_batches())
    assert not module.encoder[1].running_mean.any()


# --- manual optimization


class ByItself(GAN):
    """Its first optimizer's pass is one of torch's own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise = batch[0].flatten(1)[:, :3]
        first, _ = self.optimizers()
        first.zero_grad()
        self.discriminator(self(noise)).square().mean().backward()
        first.step()


class Overrides(GAN):
    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class StepsDirectly(ByItself):
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


class ReducesByItself(ByItself):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        self.discriminator(self(batch[0].flatten(1)[:, :3])).square().mean().backward()
        for parameter in self.generator.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()
        first.step()


class Lookahead(GAN):
    """A pass for the gradients of its input, which are not stepped with."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        pictures = batch[0].flatten(1).requires_grad_()
        self.discriminator(pictures).sum().backward()
        first.zero_grad()
        self.manual_backward(self.discriminator(self(pictures.detach()[:, :3])).square().mean())
        first.step()


class Copied(GAN):
    """As a callback does that averages weights, saves the whole module, or plots what its output depends on."""

    def on_train_start(self) -> None:
        copies = [copy.deepcopy(self), pickle.loads(pickle.dumps(self))]
        if torch.distributed.get_rank() == 0:  # these passes are a rank's own
            noise = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
            torch.autograd.grad(self(noise).sum(), noise)
            for each in copies:
                each(noise).sum().backward()


def step_by_hand(kinds: list[Any], ranks: int) -> list[float]:
    found = []
    for kind in kinds:
        module = made(kind)
        Trainer(max_epochs=1, strategy="ddp" if ranks > 1 else "auto", **QUIET).fit(module, loader_of(GAN, ranks))
        found.append(sum(float(p.detach().abs().sum()) for p in module.parameters()))
    return found


def test_every_backward_pass_averages_gradients_whoever_calls_it(ranks: Any) -> None:
    kinds, need_ranks = [ByItself, Overrides, StepsDirectly, Lookahead, GAN], [ReducesByItself, Copied]
    one, two = ranks(2, step_by_hand, [*kinds, *need_ranks], 2)
    assert one == two
    assert one[:5] == pytest.approx(step_by_hand(kinds, 1), rel=1e-12) and one[6] == one[4]


class Uncounted(GAN):
    """Steps what configure_optimizers returned by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.trainer.optimizers
        first.zero_grad()
        self.manual_backward(self.discriminator(self(batch[0].flatten(1)[:, :3])).square().mean())
        first.step()


def test_optimizers_that_are_stepped_directly_are_saved_at_the_ends_of_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, saver = made(Uncounted), ModelCheckpoint(dirpath=tmp_path, save_last=True)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(module, loader_of(GAN, 1))
    loaded = Uncounted.load_from_checkpoint(saver.last_model_path)
    assert largest_difference(dict(loaded.state_dict()), dict(module.state_dict())) == 0
    assert "global_step" not in caplog.text
    saver = ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=2)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(made(Uncounted), loader_of(GAN, 1))
    assert sum("global_step is still 0" in record.getMessage() for record in caplog.records) == 1


# --- checkpoints' folders


class Waits(Small):
    """Says that it trains, and waits for the test to have looked."""

    folder: Path

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (self.folder / "trains").touch()
        while not (self.folder / "seen").exists():
            time.sleep(0.05)


TWO_RUNS = """
import sys
from pathlib import Path
from tests.compat.test_lightning_resuming import ModelCheckpoint, SAVING, Trainer, Waits, two_batches
module = Waits()
module.folder = Path(sys.argv[1])
saver = ModelCheckpoint(dirpath=sys.argv[1] + "/ckpt", save_last=True)
Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(module, two_batches())
"""


@pytest.mark.full
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_RUNS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    root = str(Path(__file__).parents[2])
    environment = {**clean_environment(), "PYTHONPATH": root}
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE) as running:
        while not (tmp_path / "trains").exists() and running.poll() is None:
            time.sleep(0.05)
        try:
            saver = ModelCheckpoint(dirpath=tmp_path / "ckpt")
            with pytest.raises(CheckpointInUseError, match=str(running.pid)):
                Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(Small(), two_batches())
        finally:
            (tmp_path / "seen").touch()
        _, said = running.communicate(timeout=240)
        assert running.returncode == 0, said
    both = [ModelCheckpoint(dirpath=tmp_path / "ckpt"), ModelCheckpoint(dirpath=tmp_path / "ckpt", monitor="val_loss")]
    Trainer(max_epochs=1, callbacks=both, **SAVING).fit(Small(), two_batches(), two_batches())
    assert not (tmp_path / "ckpt/.lease").exists()


def test_what_a_trainer_saves_is_found_by_ckpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_top_k=-1, save_last=True)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(Small(), two_batches())
    for path in (tmp_path, tmp_path / "checkpoints"):
        assert main(["ckpt", "verify", str(path)]) == 0 and main(["ckpt", "ls", str(path)]) == 0
        told = capsys.readouterr().out
        assert told.count("epoch=0-step=2.ckpt") == told.count("epoch=1-step=4.ckpt") == 2 and "no checkpoint" not in told


def test_the_newest_of_several_last_ones_is_taken(tmp_path: Path) -> None:
    """Lightning leaves last.ckpt of an earlier run where it is, and writes last-v1.ckpt."""
    for number, name in enumerate(("last-v1.ckpt", "last-v2.ckpt", "last.ckpt")):
        module = Small()
        nn.init.constant_(module.layer.weight, float(number))
        torch.save({"state_dict": module.state_dict(), "epoch": 0, "global_step": 1}, tmp_path / name)
        os.utime(tmp_path / name, (1e9 + (number + 1) % 3, 1e9 + (number + 1) % 3))
    stale = (tmp_path / "last.ckpt").read_bytes()
    module = Small()
    Trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path, save_last=True)], **SAVING).test(module, two_batches(), ckpt_path="last")
    assert module.layer.weight.eq(1).all()  # that of last-v2.ckpt, which is the newest
    module, saver = Small(), ModelCheckpoint(dirpath=tmp_path, save_last=True)
    Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(module, two_batches())
    assert (tmp_path / "last.ckpt").read_bytes() == stale and Path(saver.last_model_path).name == "last-v3.ckpt"
    again = Small()
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(again, two_batches(), ckpt_path="last")
    assert again.calls[1] == f"configure_optimizers {float(module.layer.weight.detach().sum()):.4f}"
    assert Path(saver.last_model_path).name == "last-v3.ckpt"


def test_a_metric_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Its state is in no state_dict, so the epoch's number would be that of the batches after the restore."""
    metrics = pytest.importorskip("torchmetrics")

    class Counts(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.rows, self.evaluated = metrics.SumMetric(), metrics.CatMetric(), metrics.SumMetric()
            kinds = metrics.classification
            self.all = metrics.MetricCollection([kinds.BinaryPrecision(), kinds.BinaryAccuracy()])  # one has the state of both

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.rows.update(batch[0])
            self.seen(batch[0].sum())
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            self.all.update(torch.ones(1), torch.tensor([batch_idx % 2]))
            self.log_dict(self.all, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.note(f"{len(self.rows.compute())} rows")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.evaluated.update(batch[0].sum())
            self.log("evaluated", self.evaluated)

    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)
    for limit in ({"max_steps": 3}, {"max_epochs": 1}):
        saver, module = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_last=True), Counts()
        trainer = Trainer(callbacks=[saver], val_check_interval=2, **limit, **SAVING)
        trainer.fit(module, data, data, ckpt_path="last")
        assert "seen" not in module.state_dict()
    assert float(trainer.callback_metrics["seen"]) == float(trainer.callback_metrics["evaluated"]) == 8
    assert module.calls[-1].startswith("4 rows")
    assert [float(trainer.callback_metrics[f"Binary{name}"]) for name in ("Precision", "Accuracy")] == [0.5, 0.5]


def test_the_latest_numbers_come_back_and_a_schedule_that_follows_them_goes_on(tmp_path: Path) -> None:
    """The evaluation after an epoch's last batch saves before the epoch ends, at which the schedule asks for its number."""

    metrics = pytest.importorskip("torchmetrics")

    class Follows(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen = metrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen(batch[0][:, 0])
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 4:
                raise KeyError("ends")

    def trained(*callbacks: Any, start: str | None = None) -> Trainer:
        torch.manual_seed(1)
        options = {"max_epochs": 3, "val_check_interval": 2, **SAVING}
        trainer = Trainer(callbacks=[*callbacks], enable_checkpointing=bool(callbacks), **options)
        trainer.fit(Follows(), two_batches(), two_batches(), ckpt_path=start)
        return trainer

    whole_run = trained()
    saver = ModelCheckpoint(dirpath=tmp_path)
    with pytest.raises(Exception, match="ends"):
        trained(saver, Ends())
    (saved,) = tmp_path.glob("*.ckpt")
    resumed = trained(ModelCheckpoint(dirpath=tmp_path), start=str(saved))
    assert resumed.callback_metrics == whole_run.callback_metrics
    assert saved.is_dir()  # a checkpoint that a run continued from is left


STOPPED = """
import os, signal, sys
from tests.compat.test_lightning_resuming import ModelCheckpoint, SAVING, Small, Trainer, two_batches
class Stops(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3 and not os.path.exists(sys.argv[1] + "/stopped"):
            open(sys.argv[1] + "/stopped", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
    def on_train_start(self):
        print("began at", self.trainer.global_step, flush=True)
saver = ModelCheckpoint(dirpath=sys.argv[1] + "/ckpt", save_last=sys.argv[2] == "last")
trainer = Trainer(max_epochs=3, callbacks=[saver], **SAVING)
trainer.fit(Stops(), two_batches(), ckpt_path="last")
print("ended at", trainer.global_step, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("keeps", ["last", "best"])
def test_a_run_that_is_asked_to_stop_says_what_it_saved(keeps: str, tmp_path: Path) -> None:
    """Nothing was saved, it said, and went on from what was. With save_last it saves where it stands."""
    (tmp_path / "train.py").write_text(STOPPED)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "echelon", "run", "--ranks", "1", "--runs", str(tmp_path / "runs"), "--name", "a"]
    command += [str(tmp_path / "train.py"), str(tmp_path), keeps]
    environment = {**clean_environment(), "PYTHONPATH": root}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert first.returncode == 75, first.stderr
    assert "nothing was saved" not in first.stderr and "nothing saved" not in first.stderr
    if keeps == "best":
        assert "epoch=0-step=2.ckpt" in first.stderr
        return
    assert "go on with the same command" in first.stderr
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert second.returncode == 0, second.stderr
    assert "began at 3" in second.stdout and "ended at 6" in second.stdout
