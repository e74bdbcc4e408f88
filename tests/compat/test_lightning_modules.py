"""LightningModules on echelon's loop: what they train is what plain PyTorch trains, on one rank and on two, ddp and fsdp."""

from __future__ import annotations

import copy
import csv
import importlib
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.common.errors import CheckpointUnreadableError, EchelonError, UsageError
from echelon.compat.lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from echelon.compat.lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from echelon.compat.lightning.pytorch.hooks import ModuleHooks
from echelon.compat.lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from echelon.compat.lightning.pytorch.saving import facts_of as read_facts
from echelon.parallel.shards import whole
from tests.compat.lightning_modules import (
    GAN,
    QUIET,
    SAVING,
    Autoencoder,
    Classifier,
    Transformer,
    images,
    loader_of,
    made,
    plainly,
    two_batches,
)
from tests.kit.models import largest_difference
from tests.kit.refusals import refused

pytestmark = [pytest.mark.standing_ranks, pytest.mark.usefixtures("forked_programs")]

KINDS: list[Any] = [Classifier, Autoencoder, Transformer, GAN]


def train(strategy: str, kinds: list[Any]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        module = made(kind)
        trainer = Trainer(max_epochs=2, strategy=strategy, **QUIET)
        trainer.fit(module, loader_of(kind, trainer.world_size))
        weights = {name: whole(t).detach() for name, t in trainer.unit.prepared_modules()["module"].state().state_dict().items()}
        found[kind.__name__] = weights, {n: float(v) for n, v in trainer.callback_metrics.items()}, trainer.global_step
    return found


class ClearsBetween(GAN):
    """By the module, between a forward pass and its backward pass, and both networks get gradients of the first loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pictures = batch[0].flatten(1)
        first, second = self.optimizers()
        judged = self.discriminator(self(pictures[:, :3]))
        self.zero_grad()
        self.manual_backward(nn.functional.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
        first.step()
        real, fake = self.discriminator(pictures), self.discriminator(self(pictures[:, :3]).detach())
        loss = nn.functional.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        self.zero_grad()
        self.manual_backward((loss + nn.functional.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))) / 2)
        second.step()


class Teaches(Autoencoder):
    """Its teacher follows before gradients are cleared, where Lightning's users let it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                teacher.lerp_(student, 0.5)


class ClipsAfterBackward(Classifier):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def _clipped(strategy: str) -> dict[str, torch.Tensor]:
    module, trainer = made(ClipsAfterBackward), Trainer(max_epochs=2, strategy=strategy, **QUIET)
    trainer.fit(module, DataLoader(images(22), batch_size=8 // trainer.world_size))  # the last batch is a short one
    state = trainer.unit.prepared_modules()["module"].state().state_dict()
    return {name: whole(each).detach() for name, each in state.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_hook_clips_the_gradients_of_the_global_batch(strategy: str, ranks: Any) -> None:
    """They had the scale of a whole batch in each, also in a short one."""
    want = _clipped("auto")
    for weights in ranks(2, _clipped, strategy):
        assert largest_difference(weights, want) < 1e-12


@pytest.mark.full(but=("fsdp",))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_and_two_train_as_plain_pytorch_does(strategy: str, ranks: Any) -> None:
    """`ClearsBetween` as a GAN whose optimizers clear: a sharded network shows gathered parameters there."""
    kinds = [*KINDS, ClearsBetween, Teaches]
    alone = train("auto", kinds)
    assert all(largest_difference(alone[kind.__name__][0], plainly(kind, 2)) < 1e-14 for kind in KINDS)
    for told in ranks(2, train, strategy, kinds):
        for kind in kinds:
            weights, numbers, updates = told[kind.__name__]
            want = alone["Teaches"][0] if kind is Teaches else plainly(GAN if kind is ClearsBetween else kind, 2)
            assert largest_difference(weights, want) < 1e-12, kind
            assert numbers.keys() == alone[kind.__name__][1].keys()
            for name in (n for n in numbers if n.endswith(("_epoch", "_acc"))):  # means over all ranks
                assert numbers[name] == pytest.approx(alone[kind.__name__][1][name], rel=1e-6), (kind, name)
            assert updates == (16 if issubclass(kind, GAN) else 8)


def fit_by_hand_twice(strategy: str) -> dict[str, torch.Tensor]:
    module, trainer = made(GAN), Trainer(max_epochs=1, strategy=strategy, **QUIET)
    for trainer.max_epochs in (1, 2):
        trainer.fit(module, loader_of(GAN, 2))
    return {name: whole(parameter).detach() for name, parameter in module.named_parameters()}


def test_networks_that_an_earlier_call_has_split_stay_so(ranks: Any) -> None:
    """A second call with manual optimization was refused: they were split already."""
    for found in ranks(2, fit_by_hand_twice, "fsdp"):
        assert largest_difference(found, ranks(2, fit_by_hand_twice, "ddp")[0]) < 1e-12


def drawn_by_rank(checks: int, kind: Any) -> list[float]:
    echelon.seed(3)
    module, drawn = kind(), list[float]()
    module.on_train_batch_start = lambda *_: drawn.extend(torch.rand(2).tolist())  # type: ignore[method-assign]
    trainer = Trainer(max_epochs=1, strategy="ddp", num_sanity_val_steps=checks, **QUIET)
    data = images(8) if kind is GAN else TensorDataset(torch.ones(8, 2))
    trainer.fit(module, echelon.Loader(data, 4), echelon.Loader(data, 4))
    return drawn


@pytest.mark.parametrize("kind", ["Small", "GAN"])
def test_ranks_draw_otherwise_than_each_other_also_after_a_sanity_check(kind: str, ranks: Any) -> None:
    """A GAN, which steps by hand, had the same noise on all ranks."""
    kind_of = {"Small": Small, "GAN": GAN}[kind]
    first, second = ranks(2, drawn_by_rank, 2, kind_of)
    assert len(first) == len(second) == 4 and not set(first) & set(second)
    assert kind == "GAN" or [first, second] == ranks(2, drawn_by_rank, 0, kind_of)


def test_a_module_that_steps_by_hand_ends_at_max_steps_alone() -> None:
    trainer = Trainer(max_steps=20, **QUIET)
    trainer.fit(made(GAN), loader_of(GAN, 1))
    assert (trainer.global_step, trainer.current_epoch) == (20, 3)


# --- beside the weights


class Remembers(Callback):
    """What it has seen comes back to the caller."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["val_loss"]))
        pl_module.seen = len(self.seen)


@pytest.mark.full
def test_ranks_of_its_own_uneven_data_and_a_resume_on_one_rank(tmp_path: Path) -> None:
    module, remembers, rest = made(Classifier), Remembers(), DataLoader(images(19, 7), batch_size=4)
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_last=True, filename="{epoch}-{val_loss:.2f}")
    trainer = Trainer(
        max_epochs=2, devices=2, strategy="fsdp", accelerator="cpu", callbacks=[saver, remembers], logger=CSVLogger(tmp_path)
    )
    trainer.fit(module, loader_of(Classifier, 2), rest)
    assert largest_difference(dict(module.state_dict()), plainly(Classifier, 2)) < 1e-14
    x, y = images(19, 7).tensors
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(module(x), y))
    assert float(trainer.callback_metrics["val_loss"]) == remembers.seen[1] == pytest.approx(loss, rel=1e-12)
    assert (trainer.current_epoch, trainer.global_step, module.seen) == (2, 8, 2)
    assert Path(saver.best_model_path).name == f"epoch=1-val_loss={loss:.2f}.ckpt"
    assert trainer.test(dataloaders=rest) == [{"test_loss": pytest.approx(loss, rel=1e-12)}]
    assert torch.equal(torch.cat(trainer.predict(module, rest)), module(x).argmax(1))
    assert "train_loss_epoch" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    loaded = Classifier.load_from_checkpoint(saver.last_model_path)
    assert loaded.hparams == {"lr": 0.1, "hidden": 12} and largest_difference(loaded.state_dict(), module.state_dict()) == 0
    again = made(Classifier)
    Trainer(max_epochs=3, **QUIET).fit(again, loader_of(Classifier, 1), ckpt_path=saver.last_model_path)
    assert largest_difference(dict(again.state_dict()), plainly(Classifier, 3)) < 1e-14


class Small(LightningModule):
    """Writes down its hooks."""

    made: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[str] = []
        for name in dir(ModuleHooks):
            if name.startswith("on_") and "checkpoint" not in name and "transfer" not in name:
                vars(self)[name] = lambda *_, name=name: self.calls.append(name)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls.append("training_step")
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("validation_step")
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.made(self.optimizer) if self.made is not None else self.optimizer


class Late(Autoencoder):
    """Makes its layers in a hook."""

    def __init__(self, hook: str) -> None:
        LightningModule.__init__(self)
        self.hook = hook

    def make(self) -> None:
        fresh = made(Autoencoder)
        self.encoder, self.decoder, self.scale = fresh.encoder, fresh.decoder, fresh.scale

    def configure_model(self) -> None:
        if (self.hook == "configure_model" or (self.hook == "both" and self.is_set_up)) and not list(self.children()):
            self.make()

    def setup(self, stage: str) -> None:
        self.is_set_up = True
        if self.hook == "setup" or (self.hook == "only in ranks" and torch.distributed.is_initialized()):
            self.make()


OWN_RANKS: dict[str, Any] = {"max_epochs": 2, "devices": 2, "strategy": "ddp", **QUIET}


@pytest.mark.full
@pytest.mark.parametrize("hook", ["both", *(hook for hook in ("configure_model", "setup"))])
def test_layers_that_the_ranks_of_a_trainer_made_come_back_trained(hook: str) -> None:
    module = Late(hook)
    Trainer(**OWN_RANKS).fit(module, loader_of(Autoencoder, 2))
    assert largest_difference(module.state_dict(), plainly(Autoencoder, 2)) < 1e-12


@pytest.mark.full
def test_weights_of_layers_that_only_ranks_had_are_kept_in_a_file() -> None:
    with refused(UsageError) as raised:
        Trainer(**OWN_RANKS).fit(Late("only in ranks"), loader_of(Autoencoder, 2))
    left = Path(str(raised.value).partition("weights are in ")[2].partition(": ")[0])
    try:
        assert largest_difference(torch.load(left), plainly(Autoencoder, 2)) < 1e-12
    finally:
        shutil.rmtree(left.parent)


def test_hooks_run_in_lightnings_order() -> None:
    """As a program under Lightning 2.6.6 writes them down."""
    module = Small()
    Trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0, **QUIET).fit(
        module, two_batches(), two_batches()
    )
    evaluation = ["start", "epoch_start", "batch_start", "step", "batch_end", "epoch_end", "end"]
    assert module.calls == [
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        *(f"on_validation_{name}" if name != "step" else "validation_step" for name in evaluation),
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    ]


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)


FORMS: list[tuple[Any, float]] = [
    (lambda o: [o], 0.1),
    (lambda o: ([o], [torch.optim.lr_scheduler.StepLR(o, 1, 0.5)]), 0.025),
    (lambda o: {"optimizer": o, "lr_scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}, 0.025),
    (
        lambda o: {
            "optimizer": o,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "interval": "step", "frequency": 2},
        },
        0.025,
    ),
    (lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": "val_loss"}, 0.01),
    (lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "val_loss", "name": "lr"}}], 0.01),
    (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "none", "strict": False}}, 0.1),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_every_form_of_configure_optimizers(form: int) -> None:
    module = Small()
    made_of, rate = FORMS[form]
    module.made = made_of
    Trainer(max_epochs=2, **QUIET).fit(module, two_batches(), two_batches())
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_none_updates_nothing() -> None:
    module = Small()
    before = module.layer.weight.detach().clone()
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    Trainer(max_epochs=1, **QUIET).fit(module, two_batches())
    assert torch.equal(module.layer.weight, before)


@pytest.mark.parametrize(
    "made_of",
    [
        lambda o: [o, o],
        lambda o: {"optimizer": o, "lr_scheduler": plateau(o)},
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "loss"}},
        lambda o: {"optimizer": o, "schedule": None},
        lambda o: 3,
    ],
)
def test_what_configure_optimizers_may_not_return_is_named(made_of: Any) -> None:
    module = Small()
    module.made = made_of
    with refused(UsageError):
        Trainer(max_epochs=1, **QUIET).fit(module, two_batches(), two_batches())


def test_early_stopping_ends_the_run_after_its_patience() -> None:
    module = Small()
    stopping = EarlyStopping("val_loss", patience=2, min_delta=1e9)
    trainer = Trainer(max_epochs=9, callbacks=[stopping], **QUIET)
    trainer.fit(module, two_batches(), two_batches())
    assert (trainer.current_epoch, stopping.stopped_epoch) == (3, 2)  # inf is improved upon at first


@pytest.mark.full
@pytest.mark.parametrize("name", ["Transformer", "GAN"])  # by one optimizer for the module, and by hand with two
def test_prove_passes(name: str, echelon_command: Any) -> None:
    program = Path(__file__).parent / "programs/lightning_module.py"
    options = ["--float64", "--ranks", "2", "--accumulate", "1", "--layouts", "ddp,fsdp"]
    done = echelon_command("prove", *options, str(program), name, timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_of_lightnings_own_is_read_without_executing_it(tmp_path: Path) -> None:
    source = made(Classifier)
    saved = {"state_dict": source.state_dict(), "hyper_parameters": {"lr": 0.5, "hidden": 12}, "epoch": 3, "global_step": 9}
    torch.save(saved, tmp_path / "epoch=2-step=9.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "epoch=2-step=9.ckpt")
    assert loaded.hparams.lr == 0.5 and largest_difference(dict(loaded.state_dict()), dict(source.state_dict())) == 0
    torch.save({**saved, "callbacks": {"x": Path("/")}}, tmp_path / "with code.ckpt")
    with refused(CheckpointUnreadableError):
        Classifier.load_from_checkpoint(tmp_path / "with code.ckpt")


class Keeps(GAN):
    """Saves something of its own."""

    kept: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"list": [1, 2], "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["mine"]


def test_a_second_run_in_a_folder_saves_its_own_weights_and_removes_nothing_elsewhere(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        module, saver = Small(), ModelCheckpoint(dirpath=folder, save_last=True)
        nn.init.constant_(module.layer.weight, len(list(tmp_path.rglob("last.ckpt"))))
        source = str(tmp_path / "a/epoch=0-step=2-v1.ckpt") if folder.name == "b" else None
        trainer = Trainer(max_epochs=2 if source else 1, callbacks=[saver], **SAVING)
        trainer.fit(module, two_batches(), ckpt_path=source)
        last = Small.load_from_checkpoint(str(folder / "last.ckpt"))
        assert largest_difference(dict(last.state_dict()), dict(module.state_dict())) == 0
    names = {path.name for path in (tmp_path / "a").glob("epoch*")}
    assert names == {"epoch=0-step=2.ckpt", "epoch=0-step=2-v1.ckpt"}
    nn.init.zeros_(module.layer.weight)
    trainer.save_checkpoint(tmp_path / "b/last.ckpt")
    assert not Small.load_from_checkpoint(str(tmp_path / "b/last.ckpt")).layer.weight.any()
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"epoch=1-step=4.ckpt", ".last-step=4.ckpt", "last.ckpt"}


def test_manual_optimization_resumes_with_its_optimizers_and_what_hooks_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=6, save_top_k=-1)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(made(Keeps), loader_of(GAN, 1))
    module = made(Keeps)
    trainer = Trainer(max_epochs=2, **QUIET)
    loader = echelon.Loader(images(), 8, shuffle=False)  # which goes on in mid-epoch
    Trainer(
        max_epochs=1,
        max_steps=6,
        callbacks=[saver2 := ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=6)],
        **SAVING,
    ).fit(made(Keeps), loader)
    trainer.fit(module, echelon.Loader(images(), 8, shuffle=False), ckpt_path=saver2.best_model_path)
    assert largest_difference(dict(module.state_dict()), plainly(GAN, 2)) < 1e-14
    assert trainer.global_step == 16 and module.kept["list"] == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == ["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"]


def test_several_loaders_parts_of_an_epoch_and_evaluations_within_it() -> None:
    module = Small()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log("v", float(dataloader_idx))  # type: ignore
    trainer = Trainer(max_epochs=1, val_check_interval=0.5, limit_val_batches=0.5, **QUIET)
    trainer.fit(module, two_batches(), [two_batches(), two_batches()])
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "v/dataloader_idx_0": 0,
        "v/dataloader_idx_1": 1,
    }
    assert module.calls.count("on_validation_end") == 3 and module.calls.count("on_validation_batch_end") == 6
    assert trainer.validate(module, two_batches()) == [{"v": 0}]
    with refused(UsageError):
        Trainer(max_epochs=1, val_check_interval=2, limit_train_batches=3, **QUIET).fit(
            Small(), DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2), two_batches()
        )


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"precision": "16-mixed"},
    ],
)
def test_what_manual_optimization_does_by_itself_is_not_the_trainers(options: dict[str, Any]) -> None:
    with refused(UsageError):
        Trainer(max_epochs=1, **QUIET, **options).fit(made(GAN), loader_of(GAN, 1))


class LogsOnSomeRanks(Small):
    """Rank 1 alone logs a number of all ranks; both log another one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank = self.trainer.global_rank
        self.log("both", 1.0 + rank, sync_dist=True)
        if rank == 1:
            self.log("one", 5.0, sync_dist=True)
        return super().training_step(batch, batch_idx)


class LogsStepsOfEvaluations(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0, on_step=True, sync_dist=True)


def log_with_sync_dist(folder: str) -> tuple[dict[str, float], str]:
    options = {"max_epochs": 1, "strategy": "ddp", "num_sanity_val_steps": 0, **QUIET}
    trainer = Trainer(**options)
    trainer.fit(LogsOnSomeRanks(), two_batches())
    with pytest.raises(UsageError) as caught:
        Trainer(**options).fit(LogsStepsOfEvaluations(), two_batches(), two_batches())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, str(caught.value)


def test_a_number_of_all_ranks_may_be_logged_on_some(ranks: Any, tmp_path: Path) -> None:
    """The others do not wait for ever; and the number is there on all of them."""
    for numbers, said in ranks(2, log_with_sync_dist, str(tmp_path)):
        assert (numbers["both"], numbers["one"]) == (1.5, 5.0)
        assert "Leave on_step out" in said


# --- what users ask a Trainer for


class Moved(LightningDataModule):
    """Changes a batch on its way."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 3.0]

    def train_dataloader(self) -> Any:
        return two_batches()

    val_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize("kind", [Small, GAN])
def test_a_hook_after_a_batchs_transfer_changes_what_steps_get(kind: Any) -> None:
    seen: list[float] = []
    module = made(kind) if kind is GAN else Small()

    def training_step(batch: Any, batch_idx: int) -> Any:
        seen.append(float(batch[0].sum()))
        return None if kind is GAN else module.layer(batch[0]).sum()

    module.training_step = training_step
    Trainer(max_epochs=1, **QUIET).fit(module, datamodule=Moved())
    assert seen == [12.0, 12.0]


class Asks(Small):
    """Writes down what its Trainer says in each step."""

    said: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        trainer = self.trainer
        self.said.append((trainer.is_last_batch, trainer.training, trainer.evaluating, trainer.num_val_batches))
        return super().training_step(batch, batch_idx)


def test_where_a_trainer_is_and_what_it_uses() -> None:
    module, loader = Asks(), two_batches()
    module.said = []
    trainer = Trainer(max_epochs=1, limit_val_batches=1, precision="bf16-mixed", **QUIET)
    assert (trainer.train_dataloader, trainer.num_val_batches, trainer.is_last_batch) == (None, [], False)
    trainer.fit(module, loader, loader)
    assert module.said == [(False, True, False, [1]), (True, True, False, [1])]
    assert trainer.train_dataloader is loader and trainer.val_dataloaders is loader
    assert (trainer.state.finished, trainer.interrupted, trainer.precision, trainer.limit_val_batches) == (
        True,
        False,
        "bf16-mixed",
        1,
    )
    assert Trainer(devices=2, **QUIET).world_size == 2  # before it starts them, for a learning rate
    with pytest.raises(AttributeError, match=r"Trainer\.fit_loop is not part of echelon\.compat. Instead: hooks"):
        _ = trainer.fit_loop
    assert not hasattr(trainer, "nothing_of_the_kind")


def test_numbers_of_an_evaluations_steps_have_steps_of_their_own(tmp_path: Path) -> None:
    """All of them under the update's number would be one point of a curve."""
    module, logger = Small(), CSVLogger(tmp_path)
    module.validation_step = lambda batch, batch_idx: module.log("v", float(batch_idx), on_step=True)  # type: ignore
    Trainer(max_epochs=2, **{**QUIET, "logger": logger}).fit(module, two_batches(), two_batches())
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows if row["v_step"]] == ["0", "1", "2", "3"]


class Writes(Logger):
    """Remembers what it is called with."""

    def __init__(self, version: str = "w") -> None:
        self.told, self._version = list[Any](), version

    name = property(lambda self: "own")
    version = property(lambda self: self._version)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.append((step, *sorted(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.told.append(dict(params))

    def finalize(self, status: str) -> None:
        self.told.append(status)


def test_numbers_of_an_evaluations_steps_are_counted_in_each_loader() -> None:
    module, logger = Small(), Writes()

    def validation_step(batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        module.log("v", 1.0, on_step=True, on_epoch=False)

    module.validation_step = validation_step  # type: ignore
    Trainer(**{**QUIET, "logger": logger}).validate(module, [two_batches(), two_batches()])
    steps = [(at, "epoch", f"v/dataloader_idx_{i}")[::2] for i in range(2) for at in range(2)]
    assert [(step, names[-1]) for step, *names in logger.told[:-1]] == steps and logger.told[-1] == "success"


def test_every_call_tells_its_loggers_of_the_hyperparameters_and_how_it_ended() -> None:
    module, logger = Classifier(), Writes()
    module.test_step = lambda batch, batch_idx: None  # type: ignore
    trainer = Trainer(max_epochs=1, **{**QUIET, "logger": logger})
    trainer.test(module, two_batches())
    module.on_train_start = lambda: 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, two_batches())
    assert logger.told == [{"lr": 0.1, "hidden": 12}, "success", {"lr": 0.1, "hidden": 12}, "failed"]


class Watches(Callback):
    """What it sees of a sanity check, and of the evaluation after it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _look(self, trainer: Any, module: Any) -> None:
        self.seen.append((trainer.state.stage, trainer.validating, trainer.evaluating, sorted(trainer.callback_metrics)))

    on_sanity_check_start = on_validation_end = on_sanity_check_end = on_train_start = on_train_end = _look


def test_a_sanity_checks_numbers_are_seen_until_it_ends() -> None:
    module, watches, logger = Small(), Watches(), Writes()
    Trainer(max_epochs=1, callbacks=watches, **{**QUIET, "logger": logger}).fit(module, two_batches(), two_batches())
    both = sorted(module.trainer.callback_metrics)
    assert watches.seen == [
        ("sanity_check", False, True, []),
        ("sanity_check", False, True, ["val_loss"]),
        ("sanity_check", False, True, ["val_loss"]),
        ("train", False, False, []),
        ("validate", True, True, both),
        ("train", False, False, both),
    ]
    assert sum("val_loss" in each for each in logger.told) == 1


class Rereads(Small):
    """Looks at what it has just logged, as a hook does that keeps its best number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.on_train_epoch_end = lambda: self._reread("end", float(self.current_epoch + 1))  # type: ignore[method-assign]

    def _reread(self, name: str, value: float) -> None:
        self.log(name, value)
        self.seen.append(float(self.trainer.callback_metrics[name]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._reread("step", 10.0 + batch_idx)
        return super().training_step(batch, batch_idx)


def test_a_hook_sees_what_it_has_logged_itself() -> None:
    module = Rereads()
    Trainer(max_epochs=2, **QUIET).fit(module, two_batches())
    assert module.seen == [10.0, 11.0, 1.0] + [10.0, 11.0, 2.0]


class EverySecond(Small):
    """Steps in every second batch, and has losses of one element that are no scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.on_train_batch_end = lambda *_: self.rates.append(  # type: ignore[method-assign]
            float(self.trainer.optimizers[0].param_groups[0]["lr"])
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx)[None]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_by_steps_counts_batches_in_which_the_module_does_not_step() -> None:
    module = EverySecond()
    before = module.layer.weight.detach().clone()
    Trainer(max_epochs=2, **QUIET).fit(module, two_batches())
    assert module.rates == [1 / 2, 1 / 3, 1 / 4, 1 / 5] and not torch.equal(module.layer.weight, before)


@pytest.mark.parametrize(("limit", "checks", "count"), [(1, -1, 1), (None, -1, 2), (1, 2, 1)])
def test_a_sanity_check_keeps_to_the_limit(limit: int | None, checks: int, count: int) -> None:
    module = Small()
    trainer = Trainer(max_epochs=1, limit_val_batches=limit, num_sanity_val_steps=checks, **QUIET)
    trainer.fit(module, two_batches(), two_batches())
    assert module.calls[: module.calls.index("on_train_start")].count("validation_step") == count


def test_a_name_that_comes_again_is_the_latest_of_a_run(tmp_path: Path) -> None:
    module, saver = Small(), ModelCheckpoint(tmp_path, "{epoch}", every_n_train_steps=1, save_top_k=-1)
    Trainer(max_epochs=2, callbacks=[saver], **SAVING).fit(module, two_batches())
    assert sorted(path.name for path in tmp_path.glob("e*")) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert largest_difference(Small.load_from_checkpoint(saver.best_model_path).state_dict(), module.state_dict()) == 0


def test_a_last_checkpoint_is_there_though_none_was_due(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=50, save_last=True)
    Trainer(max_epochs=1, callbacks=[saver], **SAVING).fit(Small(), two_batches())
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["last.ckpt"]


class Writing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_scalar("x", 1.0)
        self.logger.watch(self)
        return super().training_step(batch, batch_idx)


def test_a_fast_dev_run_evaluates_and_neither_saves_nor_logs(tmp_path: Path) -> None:
    module, saver = Writing(), ModelCheckpoint(tmp_path, monitor="val_loss")
    callbacks = [saver, LearningRateMonitor()]
    Trainer(fast_dev_run=True, check_val_every_n_epoch=5, accelerator="cpu", callbacks=callbacks).fit(
        module, two_batches(), two_batches()
    )
    assert module.calls.count("training_step") == module.calls.count("validation_step") == 1
    assert not list(tmp_path.iterdir()) and not saver.best_model_path
    Trainer(fast_dev_run=True, overfit_batches=2, **QUIET).fit(module := Small(), two_batches())
    assert module.calls.count("training_step") == 1


def test_each_run_of_a_logger_of_ones_own_has_its_folder_of_checkpoints(tmp_path: Path) -> None:
    for version in ("a", "b"):
        trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", logger=Writes(version))
        trainer.fit(Small(), two_batches())
        assert list((tmp_path / "own" / version / "checkpoints").iterdir()) and trainer.log_dir == str(tmp_path)


def test_a_tensorboard_logger_writes_scalars_into_a_folder_below_with_options_of_the_writer(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, log_graph=True, sub_dir="rank0", filename_suffix=".mine")
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=logger)
    trainer.fit(Small(), two_batches(), two_batches())
    version = tmp_path / "lightning_logs" / "version_0"
    assert Path(trainer.log_dir) == version / "rank0" and list((version / "rank0").glob("events.*.mine"))
    assert list((version / "checkpoints").iterdir()) and "log_graph" in caplog.text
    found = EventAccumulator(trainer.log_dir).Reload()
    assert [each.step for each in found.Scalars("val_loss")] == [1] and "epoch" in found.Tags()["scalars"]
    with pytest.raises(TypeError):
        TensorBoardLogger(tmp_path, nmae="mine").log_metrics({"loss": 1.0}, 0)


def test_a_number_of_one_loader_is_in_no_others_dict() -> None:
    def validation_step(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        module.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False)

    module = Small()
    module.validation_step = validation_step  # type: ignore
    assert Trainer(**QUIET).validate(module, [two_batches(), two_batches()]) == [{"own_0": 1.0}, {"own_1": 1.0}]


def test_a_data_module_is_made_of_datasets() -> None:
    data = TensorDataset(torch.ones(6, 2))
    made_of = LightningDataModule.from_datasets(data, {"one": data}, batch_size=2)
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(Small(), made_of)
    assert trainer.num_val_batches == [3] and isinstance(trainer.train_dataloader.sampler, torch.utils.data.RandomSampler)


def test_a_dataset_that_is_a_sequence_is_one_dataset() -> None:
    class Rows(torch.utils.data.Dataset[Any], Sequence[Any]):
        def __getitem__(self, index: Any) -> Any:
            return (torch.ones(2),)

        def __len__(self) -> int:
            return 6

    assert len(LightningDataModule.from_datasets(Rows(), batch_size=2).train_dataloader()) == 3


class Draws(Small):
    """As many tutorials do: on every rank, with the logger's own object."""

    def on_train_epoch_end(self) -> None:
        for logger in self.loggers:
            logger.log_metrics({"own": 1.0}, step=7)
        self.loggers[1].experiment.add_scalars("drawn", {"a": 1.0}, self.global_step)


def draw(folder: str) -> list[str]:
    loggers = [CSVLogger(folder), TensorBoardLogger(folder)]
    module = Draws()
    vars(module).pop("on_train_epoch_end")
    Trainer(max_epochs=1, strategy="ddp", **{**QUIET, "logger": loggers}).fit(module, two_batches())
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_dir())


@pytest.mark.full
def test_every_rank_may_write_to_a_logger_and_rank_0_does(ranks: Any, tmp_path: Path) -> None:
    folders, _ = ranks(2, draw, str(tmp_path))
    assert [name for name in folders if "drawn" in name] == ["lightning_logs/version_0/drawn_a"]
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().count("\n7,") == 1


class FakeRun:
    """wandb's run, as far as its documentation has it."""

    def __init__(self, **options: Any) -> None:
        self.options, self.rows = options, list[dict[str, Any]]()
        self.id, self.config, self.finished, self.x_axis = options["id"], dict(options["config"] or {}), False, ""
        self.config = type("Config", (dict,), {"update": lambda own, new, **_: dict.update(own, new)})(self.config)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.x_axis = step_metric

    def log(self, row: dict[str, Any]) -> None:
        assert not self.finished
        self.rows.append(row)

    def finish(self, exit_code: int = 0) -> None:
        self.finished = True


def fake_wandb() -> list[FakeRun]:
    """Runs that `wandb.init` makes from here on."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    made: Any = types.ModuleType("wandb")
    made.init, made.Settings = init, lambda **options: options
    made.Image, made.Table = (lambda image, **of: ("image", of)), (lambda **of: ("table", of))
    sys.modules["wandb"] = made
    return runs


@pytest.fixture
def no_wandb_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)


class Shows(Small):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        vars(self).pop("on_train_epoch_end")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        if not isinstance(self.logger, WandbLogger):
            return
        self.logger.experiment.log({"own": 1.0})
        self.logger.log_image("seen", [torch.zeros(2, 2)], caption=["a"])
        self.logger.log_text("said", ["word"], [["x"]], step=3)


def to_wandb(folder: str) -> Any:
    runs = fake_wandb()
    given = WandbLogger(
        "mine", folder, project="all", id="a1", offline=True, entity="us", group="g", tags=["t"], config={"b": 1}, prefix="p"
    )
    given.experiment.config.update({"early": 2})
    trainer = Trainer(max_epochs=1, strategy="auto", log_every_n_steps=1, accelerator="cpu", logger=given)
    trainer.fit(Shows(), two_batches(), two_batches())
    trainer.validate(Shows(), two_batches())
    given.close()
    assert trainer.checkpoint_callback.best_model_path.startswith(f"{folder}/all/a1/checkpoints")
    sys.modules.pop("wandb")
    return [(run.options, dict(run.config), run.rows, run.x_axis, run.finished) for run in runs]


@pytest.mark.parametrize("count", [1, 2])
def test_wandb_gets_what_is_logged_on_rank_0(count: int, ranks: Any, no_wandb_afterwards: None, tmp_path: Path) -> None:
    first, *others = [to_wandb(str(tmp_path))] if count == 1 else ranks(2, to_wandb, str(tmp_path))
    assert others in ([], [[]])
    ((options, config, rows, x_axis, finished),) = first
    want = {"name": "mine", "project": "all", "dir": str(tmp_path), "id": "a1", "mode": "offline", "entity": "us", "group": "g"}
    assert want.items() <= options.items() and options["tags"] == ["t"] and options["resume"] == "allow"
    assert config == {"b": 1, "early": 2, "lr": 0.1} and x_axis == "trainer/global_step" and finished
    assert {"own": 1.0} in rows and {"p-seen": [("image", {"caption": "a"})]} in rows
    assert any(row.get("trainer/global_step") == 3 and "p-said" in row for row in rows)
    steps = [row["trainer/global_step"] for row in rows if "p-loss" in row]
    assert steps == [*range(2 // count)]
    losses = [row["p-loss"] for row in rows if "p-loss" in row]
    assert all(isinstance(loss, float) for loss in losses)


@pytest.mark.full
def test_mlflow_has_one_run_with_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the real package. A test after the training goes on in the run that `fit` has ended."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = MLFlowLogger("all", "mine", save_dir=str(tmp_path / "ml"), tags={"of": "us"}, artifact_location="s3://b")
    assert "MLFlowLogger(artifact_location='s3://b'): has no effect here" in caplog.text and "synchronous" not in caplog.text
    trainer = Trainer(max_epochs=1, log_every_n_steps=1, logger=given, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(Shows(), two_batches(), two_batches())
    trainer.validate(Shows(), two_batches())
    given.close()
    client = given.experiment
    (run,) = client.search_runs([client.get_experiment_by_name("all").experiment_id])
    assert run.info.run_id == given.run_id and run.info.run_name == "mine" and run.data.params == {"lr": "0.1"}
    assert run.data.tags["of"] == "us"
    assert [each.step for each in client.get_metric_history(given.run_id, "loss")] == [0, 1]
    given.close()
    assert client.get_run(given.run_id).info.status == "FINISHED"


def test_predictions_are_not_kept_if_nobody_wants_them() -> None:
    module, seen = Small(), Remembers()
    module.predict_step = lambda batch, batch_idx: batch[0].sum()  # type: ignore
    module.on_predict_batch_end = lambda outputs, batch, batch_idx, dataloader_idx=0: seen.seen.append(float(outputs))
    assert Trainer(**QUIET).predict(module, two_batches(), return_predictions=False) is None
    assert seen.seen == [4.0, 4.0]


@pytest.mark.parametrize("monitor", ["falls", None])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_name_without_numbers_stays_the_best_ones(epochs: int, monitor: str | None, tmp_path: Path) -> None:
    module = Small()
    module.on_train_epoch_end = lambda: module.log("falls", -float(module.current_epoch))  # type: ignore
    saver = ModelCheckpoint(dirpath=tmp_path, filename="best", monitor=monitor)
    Trainer(max_epochs=epochs, callbacks=[saver], **SAVING).fit(module, two_batches())
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"] == [Path(saver.best_model_path).name]
    assert read_facts(tmp_path / "best.ckpt")["epoch"] == epochs - 1


class Scaled(Autoencoder):
    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.scale


def call_parts(strategy: str) -> list[float]:
    torch.manual_seed(5)
    module = Scaled()
    trainer = Trainer(max_epochs=1, strategy=strategy, **QUIET)
    x, found = images().tensors[0].flatten(1), []
    for _ in range(2):
        trainer.fit(module, loader_of(Autoencoder, 2))
        with torch.no_grad():
            found += [float(module.encoder(x).sum()), float(module.encoder[0](x).sum()), float(module.embed(x).sum())]
        assert len(module.state_dict()) == 9
        found += [float(module.encoder[2](module.encoder[:2](x)).detach().sum()), float(module(x).detach().sum())]
        trainer.max_epochs = 2
    return found


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_part_of_a_sharded_module_can_be_called_after_fit(strategy: str, ranks: Any) -> None:
    one, two = ranks(2, call_parts, strategy)
    assert one == two == pytest.approx(ranks(2, call_parts, "ddp")[0], rel=1e-12)


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (LightningModule, "training_epoch_end"),
        (LightningModule, "on_epoch_end"),
        (LightningModule, "configure_sharded_model"),
        (Callback, "on_pretrain_routine_start"),
    ],
)
def test_a_hook_that_nothing_calls_is_refused_by_name(base: Any, hook: str) -> None:
    mine = type("Mine", (Small if base is LightningModule else base,), {hook: lambda self, *args: None})()
    with refused(UsageError):
        given = [mine] if base is Callback else []
        Trainer(max_epochs=1, callbacks=given, **QUIET).fit(Small() if given else mine, two_batches())


def test_a_method_of_the_programs_own_may_have_the_name_of_such_a_hook() -> None:
    """As in pytorch-forecasting, which calls it itself with what its steps gave."""
    mine = type("Mine", (Small,), {"on_epoch_end": lambda self, outputs: None})()
    Trainer(max_epochs=1, **QUIET).fit(mine, two_batches())
    assert "training_step" in mine.calls


class OwnBar(callbacks.ProgressBar):  # type: ignore[name-defined,misc]
    """As projects have it, to leave the version out."""

    def get_metrics(self, *args: Any) -> Any:
        return super().get_metrics(*args)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        trainer.seen = True


def test_displays_and_environments_are_taken_and_what_echelon_shows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    environments = importlib.import_module("echelon.compat.lightning.pytorch.plugins.environments")
    progress = importlib.import_module("echelon.compat.lightning.pytorch.callbacks.progress")
    shown = [
        progress.TQDMProgressBar(refresh_rate=10),
        progress.RichProgressBar(theme=progress.RichProgressBarTheme("red"), leave=True),
        callbacks.ModelSummary(max_depth=2),
        callbacks.RichModelSummary(2),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        OwnBar(),
    ]
    plugins = [environments.SLURMEnvironment(auto_requeue=False), environments.LightningEnvironment()]
    with caplog.at_level("INFO", logger="echelon"):
        trainer = Trainer(max_epochs=1, callbacks=shown, plugins=plugins, **QUIET)
        trainer.fit(Small(), two_batches())
        trainer.validate(Small(), two_batches())
    (told,) = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert "TQDMProgressBar" in told and "SLURMEnvironment" in told and "OwnBar" in told
    assert trainer.callbacks == shown and trainer.seen  # type: ignore[attr-defined]


def test_a_strategy_among_the_plugins_is_the_strategy() -> None:
    """Lightning 1's DDPPlugin."""
    plugins = importlib.import_module("echelon.compat.lightning.pytorch.plugins")
    trainer = Trainer(accelerator="ddp", plugins=[plugins.DDPPlugin(find_unused_parameters=False)])
    assert isinstance(trainer.layout, echelon.DDPStrategy)
    for given in (object(), plugins.DDPPlugin()):
        with refused(UsageError):
            Trainer(strategy="fsdp", plugins=given)


class LogsOnOne(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if torch.distributed.get_rank() == 0:
            self.log("mine", 1.0)
        return super().training_step(batch, batch_idx)


class Counter(nn.Module):
    def compute(self) -> torch.Tensor:
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return total

    def reset(self) -> None: ...


class MetricOnOne(Classifier):
    def on_train_epoch_end(self) -> None:
        if torch.distributed.get_rank() == 0:
            self.log("mine", Counter())


class OwnOrder(Classifier):
    """Evaluates by its blocks in another order on each rank: of equal size, each would be gathered from parts of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        for i in (1, 0) if not self.training and torch.distributed.get_rank() else (0, 1):
            x = x + self.blocks[i](x)
        return x


def fit_apart(folder: str, case: str) -> str:
    """With callbacks that rank 0 has alone, or a number that it alone has logged."""
    torch.manual_seed(5)
    apart: list[Any] = [ModelCheckpoint(dirpath=folder)] if case == "saver" else [EarlyStopping("val_loss")]
    known: dict[str, Any] = {
        "saved by": ModelCheckpoint(dirpath=folder, monitor="mine"),
        "stopped by": EarlyStopping("mine"),
        "perhaps stopped by": EarlyStopping("mine", strict=False),
    }
    apart = [] if case in ("metric", "order") or torch.distributed.get_rank() else apart
    callbacks = [known[case]] if case in known else apart
    others = {"metric": MetricOnOne, "order": OwnOrder, **dict.fromkeys(known, LogsOnOne)}
    module = others[case]() if case in others else made(Classifier)
    try:
        saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
        strategy = "fsdp" if case == "order" else "ddp"
        trainer = Trainer(max_epochs=2, callbacks=callbacks, strategy=strategy, **{**QUIET, "enable_checkpointing": saves})
        trainer.fit(module, loader_of(Classifier, 2), loader_of(Classifier, 2))
    except EchelonError as error:
        return str(error)
    return f"done after {trainer.global_step}"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("saver", "rank 1: []"),
        ("stopping", "rank 1: []"),
        ("saved by", "'mine', which was not logged"),
        ("stopped by", "'mine', which was not logged"),
        ("perhaps stopped by", "done after 8"),
        ("metric", "was called on some ranks only"),
        ("order", "of the evaluation rank 0 called blocks.0 and rank 1 called blocks.1"),
    ],
)
def test_what_one_rank_has_alone_is_told_to_all(case: str, said: str, ranks: Any, tmp_path: Path) -> None:
    for told in ranks(2, fit_apart, str(tmp_path), case):
        assert said in told
