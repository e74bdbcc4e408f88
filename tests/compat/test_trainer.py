"""Trainer: starts ranks, trains in them, and brings back what they trained."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import LoaderError, LoopError, RankFailedError, TrainerError, UsageError
from echelon.compat.lightning import Trainer
from echelon.compat.trainer.rank import shared
from tests.conftest import clean_environment
from tests.kit.models import Batch, batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.usefixtures("forked_programs")

ROWS = 32


def data() -> TensorDataset:
    return TensorDataset(*batch(ROWS, 7))


def windows(global_batch: int, updates: int) -> list[list[Batch]]:
    x, y = batch(ROWS, 7)
    rows = [[(x[i : i + global_batch], y[i : i + global_batch])] for i in range(0, ROWS, global_batch)]
    return [rows[i % len(rows)] for i in range(updates)]


def loader(global_batch: int = 8, **more: Any) -> ech.Loader:
    return ech.Loader(data(), global_batch, shuffle=False, **more)


class Watch(ech.Callback):
    """Writes down what a rank saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, state: ech.State, unit: Any) -> None:
        info = ech.RankInfo()
        text = f"{type(unit.prepared).__name__} {info.world_size} {unit.train_progress.num_steps_completed} {os.getpid()}"
        (self.folder / f"rank{info.rank}").write_text(text)


class Alone(ech.Callback):
    def on_train_start(self, state: ech.State, unit: Any) -> None:
        Alone.seen = (os.getpid(), type(unit.prepared).__name__, unit.clip_grad_norm, unit.gradient_accumulation_steps)


class Breaks(ech.Callback):
    def on_train_start(self, state: ech.State, unit: Any) -> None:
        if ech.RankInfo().rank == 1:
            raise KeyError("a fault in the user's own code")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process_does_and_the_weights_come_back(tmp_path: Path, strategy: str) -> None:
    unit = Regression(clip_grad_norm=0.5)
    module = unit.module
    Trainer(devices=2, strategy=strategy, max_epochs=2, callbacks=[Watch(tmp_path)]).fit(unit, loader(), loader())
    want, _, norms = plain_training(windows(8, 8), clip=0.5)
    assert max(norms) > 0.5
    assert unit.module is module
    assert largest_difference(whole(unit.module), want) < 1e-14
    assert unit.train_progress.num_steps_completed == 8
    said = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)]
    assert {tuple(words[:3]) for words in said} == {({"ddp": "DDPPrepared", "fsdp": "FSDPPrepared"}[strategy], "2", "8")}
    assert str(os.getpid()) not in {words[3] for words in said}


def test_minus_one_epoch_is_without_an_end() -> None:
    class Stops(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            if unit.train_progress.num_steps_completed == 6:
                state.stop()

    unit = Regression()
    Trainer(max_epochs=-1, callbacks=[Stops()]).fit(unit, loader())
    assert unit.train_progress.num_steps_completed == 6


@pytest.mark.full
def test_a_second_fit_goes_on_with_the_optimizer_of_the_first_and_tells_of_no_change(
    tmp_path: Path, caplog: Any, capfd: Any
) -> None:
    unit = Regression()
    for epochs in (1, 2):
        Trainer(devices=2, max_epochs=epochs, default_root_dir=tmp_path).fit(unit, loader())
    assert largest_difference(whole(unit.module), plain_training(windows(8, 8))[0]) < 1e-14  # momentum and all
    told = caplog.text + "".join(capfd.readouterr()) + "".join(log.read_text() for log in tmp_path.rglob("rank*.log"))
    assert "harmless" not in told and "was saved, this has changed" not in told


@pytest.mark.full
def test_options_of_the_trainer_reach_the_unit() -> None:
    unit = Regression(accumulate=1)
    trainer = Trainer(devices=2, max_steps=3, accumulate_grad_batches=2, gradient_clip_val=0.25)
    trainer.fit(unit, loader(accumulation=2))
    assert largest_difference(whole(unit.module), plain_training(windows(8, 3), clip=0.25)[0]) < 1e-14
    assert unit.train_progress.num_updates_completed == 3


@pytest.mark.full
def test_a_plain_dataloader_has_its_batch_size_on_each_rank() -> None:
    unit = Regression()
    Trainer(devices=2, max_epochs=1).fit(unit, DataLoader(data(), batch_size=4), DataLoader(data(), batch_size=4))
    assert largest_difference(whole(unit.module), plain_training(windows(8, 4))[0]) < 1e-14


@pytest.mark.full
@pytest.mark.parametrize("sized", [4, None])
def test_the_order_of_a_sampler_is_that_of_all_ranks(sized: int | None) -> None:
    """Each rank takes the DataLoader's batch size, or a batch of the batch sampler in turn."""
    order, unit = [*range(ROWS - 1, -1, -1)], Regression()
    batches = [order[at : at + 4] for at in range(0, ROWS, 4)]
    how: dict[str, Any] = {"batch_size": 4, "sampler": order} if sized else {"batch_sampler": batches}
    Trainer(devices=2, max_epochs=1).fit(unit, DataLoader(data(), **how))
    x, y = data().tensors
    windows_of = [[(x[order[at : at + 8]], y[order[at : at + 8]])] for at in range(0, ROWS, 8)]
    assert largest_difference(whole(unit.module), plain_training(windows_of)[0]) < 1e-14


def test_a_dataloader_without_batches_cannot_be_divided() -> None:
    with refused(LoaderError):
        shared(DataLoader(range(4), None), 2, 1)


@pytest.mark.full
def test_lightnings_older_spelling_is_understood_with_a_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unit = Regression()
    ech.Trainer(gpus=2, accelerator="ddp", max_epochs=1, callbacks=Watch(tmp_path)).fit(unit, loader())
    assert (tmp_path / "rank1").read_text().startswith("DDPPrepared 2 4")
    assert "write devices=2" in caplog.text and "write layout='ddp'" in caplog.text


class Drops(Regression):
    """Learns nothing; remembers a number that it drew."""

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn = float(torch.rand(()))
        return super().compute_loss(state, data)


@pytest.mark.full
def test_the_callers_seed_decides_what_ranks_draw() -> None:
    drawn = []
    for seed in (1, 1, 2):
        unit = Drops()
        ech.seed(seed)
        Trainer(devices=2, max_steps=1).fit(unit, loader())
        drawn.append(unit.drawn)
    assert drawn[0] == drawn[1] != drawn[2]


class DrawsOnEachRank(Regression):
    folder = Path()

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        (self.folder / f"rank{ech.RankInfo().rank}").write_text(str(torch.rand(4).tolist()))
        return super().compute_loss(state, data)


@pytest.mark.full
def test_ranks_draw_otherwise_than_each_other_after_a_restore_in_their_parent(tmp_path: Path) -> None:
    ech.train(Regression(), loader(), max_updates=1, callbacks=[ech.DistributedCheckpointSaver(tmp_path)])
    unit = DrawsOnEachRank()
    unit.folder = tmp_path
    ech.DistributedCheckpointSaver.restore_from_latest(tmp_path, unit)
    Trainer(devices=2, max_steps=2).fit(unit, loader())
    assert len({(tmp_path / f"rank{rank}").read_text() for rank in range(2)}) == 2


def test_dp_is_one_process(caplog: pytest.LogCaptureFixture) -> None:
    unit = Regression()
    with caplog.at_level(logging.WARNING):
        Trainer(gpus=2, accelerator="dp", max_epochs=1, callbacks=[Alone()]).fit(unit, loader())
    assert Alone.seen[0] == os.getpid()
    assert largest_difference(whole(unit.module), plain_training(windows(8, 4))[0]) < 1e-14


def test_one_rank_trains_in_this_process() -> None:
    unit = Regression()
    Trainer(max_epochs=1, gradient_clip_val=0.5, callbacks=[Alone()]).fit(unit, loader())
    assert Alone.seen == (os.getpid(), "Prepared", 0.5, 1)
    assert largest_difference(whole(unit.module), plain_training(windows(8, 4), clip=0.5)[0]) == 0


@pytest.mark.full
def test_a_ranks_own_traceback_arrives_and_the_unit_is_as_it_was() -> None:
    unit = Regression()
    with pytest.raises(RankFailedError, match="a fault in the user's own code") as error:
        Trainer(devices=2, max_epochs=1, callbacks=[Breaks()]).fit(unit, loader())
    assert error.value.rank == 1 and "in on_train_start" in str(error.value)
    assert largest_difference(whole(unit.module), {n: p.detach() for n, p in net().named_parameters()}) == 0


@pytest.mark.full
def test_a_folder_gets_checkpoints_from_which_last_goes_on(tmp_path: Path) -> None:
    Trainer(devices=2, max_epochs=1, default_root_dir=tmp_path).fit(Regression(), loader())
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    unit = Regression()
    Trainer(devices=2, max_epochs=2, default_root_dir=tmp_path).fit(unit, loader(), ckpt_path="last")
    assert largest_difference(whole(unit.module), plain_training(windows(8, 8))[0]) < 1e-14
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000008"]


class ByHand(ech.TrainUnit[Batch]):
    """A unit that wraps its module itself."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.module = ech.layouts.prepare_ddp(net(), torch.device("cpu"))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, state: ech.State, data: Batch) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.module(data[0]), data[1]).backward()
        self.optimizer.step()

    def on_train_end(self, state: ech.State) -> None:
        torch.save(whole(self.module), f"{self.path}.{ech.RankInfo().rank}")


class Factory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> ByHand:
        return ByHand(str(self.path))


@pytest.mark.full
def test_a_function_builds_a_unit_that_wraps_its_module_itself(tmp_path: Path) -> None:
    Trainer(devices=2, max_epochs=1).fit(Factory(tmp_path / "weights"), loader())
    for rank in range(2):
        assert largest_difference(torch.load(tmp_path / f"weights.{rank}"), plain_training(windows(8, 4))[0]) < 1e-14


class Remembers(ech.Callback):
    """Keeps what it saw, one thing of which cannot be sent."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_train_epoch_end(self, state: ech.State, unit: Any) -> None:
        self.epochs.append(unit.train_progress.num_epochs_completed)
        self.file = open(os.devnull)


class Predicts(Regression):
    """Knows how far from the truth it was."""

    seen: ClassVar[Any] = None

    def predict_step(self, state: ech.State, data: Batch) -> torch.Tensor:
        return super().predict_step(state, data[0])

    def on_eval_end(self, state: ech.State) -> None:
        self.rank_that_evaluated = ech.RankInfo().rank


@pytest.mark.full
def test_what_ranks_remember_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    unit, callback = Predicts(clip_grad_norm=1.0), Remembers()
    trainer = Trainer(devices=2, max_epochs=2, callbacks=[callback])
    trainer.fit(unit, loader(), loader())
    assert callback.epochs == [1, 2] and not hasattr(callback, "file")
    told = capfd.readouterr().err
    assert "Remembers.file is after the call what it was before" in told and "Predicts." not in told
    assert unit.steps == list(range(8)) and unit.rank_that_evaluated == 0
    assert unit.norms == pytest.approx(plain_training(windows(8, 8), clip=1.0)[2])
    assert trainer.callback_metrics == {"eval_loss": unit.eval_loss}
    Trainer(devices=2, max_epochs=3, callbacks=[callback]).fit(unit, loader())
    assert callback.epochs == [1, 2, 3] and unit.steps == list(range(12))


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_validate_test_and_predict(devices: int) -> None:
    """On a last batch that one of two ranks has nothing of, too."""
    unit = Predicts()
    trainer = Trainer(devices=devices, max_epochs=1)
    trainer.fit(unit, loader())
    x, y = (t[:17] for t in batch(ROWS, 7))
    some = ech.Loader(TensorDataset(x, y), 4, shuffle=False)
    with torch.no_grad():
        loss, of_fewer = (float(torch.nn.functional.mse_loss(unit.module(x[:n]), y[:n])) for n in (17, 11))
    assert trainer.validate(unit, some) == [{"eval_loss": pytest.approx(loss, rel=1e-12)}]
    fewer = DataLoader(TensorDataset(x[:11], y[:11]), 2)
    assert trainer.test(unit, fewer) == [{"test_loss": pytest.approx(of_fewer, rel=1e-12)}]
    assert (unit.eval_loss, unit.test_loss) == (pytest.approx(loss, rel=1e-12), pytest.approx(of_fewer, rel=1e-12))
    assert trainer.callback_metrics == {"eval_loss": unit.eval_loss, "test_loss": unit.test_loss}
    assert unit.eval_progress.num_steps_completed == 5 and unit.train_progress.num_steps_completed == 4
    predicted = trainer.predict(unit, some)
    assert len(predicted) == (9 if devices == 2 else 5)
    torch.testing.assert_close(torch.cat(predicted), unit.module(x).detach(), rtol=1e-12, atol=1e-12)
    assert len(trainer.predict(unit, [(x, y)] * 3)) == 3  # the same on every rank
    assert len(Trainer(devices=devices, limit_predict_batches=2).predict(unit, some)) == 2 * devices


def test_a_checkpoint_is_evaluated_by_name(tmp_path: Path) -> None:
    trained = Regression()
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(trained, loader())
    want = trainer.validate(trained, loader())
    [path] = (tmp_path / "checkpoints").glob("step-*")
    for where in ("last", path):
        unit = Regression()
        assert trainer.validate(unit, loader(), ckpt_path=where) == want
        assert largest_difference(whole(unit.module), whole(trained.module)) == 0
    with refused(TrainerError):
        Trainer(default_root_dir=tmp_path / "other").test(Regression(), loader(), ckpt_path="last")


def test_fast_dev_run_is_one_batch_and_leaves_nothing(tmp_path: Path) -> None:
    unit = Regression()
    Trainer(fast_dev_run=True, max_steps=100, default_root_dir=tmp_path).fit(unit, loader(), loader())
    assert unit.train_progress.num_steps_completed == unit.eval_progress.num_steps_completed == 1
    assert list(tmp_path.iterdir()) == []
    Trainer(fast_dev_run=3).fit(unit := Regression(), loader())
    assert unit.train_progress.num_steps_completed == 3


def test_lightnings_one_is_all() -> None:
    trainer = Trainer(max_epochs=1, limit_train_batches=1.0, val_check_interval=1.0, num_sanity_val_steps=0, logger=False)
    assert trainer.limits["train"] is None and trainer.evaluate_every_n_updates is None
    trainer.fit(Regression(), loader())


SCRIPT = """
import sys, torch, logging
sys.path.insert(0, {root!r})
import echelon as ech
from echelon.compat.lightning import Trainer
from tests.compat.test_trainer import loader, whole
from tests.kit.units import Regression

if {guard}:
    unit = Regression()
    Trainer(devices=2, strategy="fsdp", max_epochs=1).fit(unit, loader(), loader())
    weights = whole(unit.module)
    assert Trainer().validate(unit, loader()) == [{{"eval_loss": unit.eval_loss}}]
    if ech.RankInfo().rank == 0:
        torch.save((weights, type(unit.prepared).__name__), {out!r})
"""


def run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    ["function", "torchrun", "echelon run"],
)
def test_ranks_that_were_launched_already_are_used(tmp_path: Path, how: str) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.pt"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), out=str(out), guard="True"))
    if how == "function":
        ech.launch(run_script, ranks=2, args=(str(script),), run_dir=tmp_path / "run")
    else:
        launch_script(how, script)
    weights, kind = torch.load(out)
    assert kind == "FSDPPrepared" and largest_difference(weights, plain_training(windows(8, 4))[0]) < 1e-14


def launch_script(how: str, script: Path) -> None:
    command = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "echelon run": ["-m", "echelon", "run", "--ranks", "2"],
    }[how]
    options: Any = {"cwd": script.parent, "env": clean_environment(), "capture_output": True, "text": True, "timeout": 90}
    done = subprocess.run([sys.executable, *command, str(script)], **options)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_progress_is_shown_on_a_terminal_by_ranks_that_a_trainer_starts(tmp_path: Path) -> None:
    script, seen = tmp_path / "train.py", b""
    script.write_text(
        SCRIPT.format(root=str(Path(__file__).parents[2]), out=str(tmp_path / "out.pt"), guard="__name__ == '__main__'")
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, str(script)]
    running = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # closed by the last who had it
        while data := terminal.read(4096):
            seen += data
    assert running.wait() == 0 and b"update 4/4" in seen, seen


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": 0}, "devices must be a number of ranks, .*got 0"),
        ({"devices": [0, 0]}, r"\[0, 0\]"),
        ({"strategy": "horovod"}, "layout must be one of 'none', .*got 'horovod'"),
        ({"accelerator": "ddp", "strategy": "fsdp"}, "is a strategy"),
        ({"gpus": 2, "devices": 2}, "Give devices alone"),
        ({"precision": "64-true"}, r"module\.to\(torch\.float64\)"),
        ({"enable_checkpointing": True}, "where to"),
        ({"limit_train_batches": 0.5}, "limit_train_batches 0.5: a whole number"),
        ({"val_check_interval": 0.25}, "val_check_interval 0.25: a whole number"),
        ({"sync_batchnorm": True}, r"sync_batchnorm=True\): it is the strategy's: strategy=DDPStrategy"),
        ({"max_time": "1h"}, "echelon run --stop-after"),
        ({"resume_from_checkpoint": "x"}, "ckpt_path"),
        ({"swa": True}, "swa=True"),
    ],
)
def test_a_value_that_cannot_work_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Trainer(max_epochs=1, **arguments).fit(Regression(), loader())  # some have a meaning for a LightningModule


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps_per_epoch": {"eval": 3}},
        {"max_steps_per_epoch": 3},
        {"unit_options": {"learning_rate": 1}},
        {"num_nodes": "2"},
    ],
)
def test_what_the_core_trainer_does_not_know_is_not_left_unread(arguments: dict[str, Any]) -> None:
    with refused(UsageError if "unit_options" in arguments else TrainerError):
        ech.Trainer(max_epochs=1, **arguments)


def test_gpus_by_number_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(TrainerError):
        ech.Trainer(devices=[0, 1], accelerator="cpu", max_epochs=1)
    with refused(TrainerError):
        ech.Trainer(devices=[0, 1], max_epochs=1).fit(Regression(), loader())
    started: list[dict[str, str]] = []

    def refuse(*_: Any, env: dict[str, str], **more: Any) -> None:
        started.append(env)
        raise InterruptedError

    monkeypatch.setattr("echelon.compat.trainer.trainer.visible_devices", lambda: ["4", "7", "GPU-1f"])
    monkeypatch.setattr("echelon.compat.trainer.launched.launch", refuse)
    for chosen in ([2, 0], [1]):  # one rank that is not to take the first GPU needs a process of its own, too
        with pytest.raises(InterruptedError):
            ech.Trainer(devices=chosen, max_epochs=1).fit(Regression(), loader())
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["GPU-1f,4", "7"]


def test_several_nodes_need_a_launcher_and_it_says_which() -> None:
    with refused(TrainerError):
        Trainer(devices=2, num_nodes=2, max_epochs=1).fit(Regression(), loader())


@pytest.mark.parametrize(("name", "ours"), [("bf16-mixed", "bf16"), (16, "fp16"), ("32-true", "fp32"), (32, "fp32")])
def test_lightnings_names_of_precisions(name: Any, ours: str) -> None:
    assert Trainer(max_epochs=1, precision=name).unit_options["precision"] == ours


@pytest.mark.full
def test_the_trainer_in_this_librarys_words(tmp_path: Path) -> None:
    unit = Regression()
    trainer = ech.Trainer(
        2, "ddp", max_epochs=2, max_steps_per_epoch={"train": 2}, unit_options={"clip_grad_norm": 0.5}, run_dir=tmp_path
    )
    trainer.fit(unit, loader())
    two = [window for epoch in range(2) for window in windows(8, 2)]
    assert largest_difference(whole(unit.module), plain_training(two, clip=0.5)[0]) < 1e-14
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_the_trainer_is_not_without_an_end_unless_told() -> None:
    with refused(LoopError):
        ech.Trainer().fit(Regression(), loader())


class BuiltInRanks(Regression):
    """Built in the ranks, by the class itself; it needs no arguments."""

    def __init__(self) -> None:
        super().__init__(layout="ddp")


@pytest.mark.full
def test_a_class_may_build_the_unit_in_the_ranks() -> None:
    trainer = Trainer(devices=2, max_epochs=1)
    trainer.fit(BuiltInRanks, loader())
    assert len(trainer.predict(BuiltInRanks, DataLoader(data().tensors[0], 8))) > 0
