"""A Trainer's runs that go on: resumed, stopped, killed, started again, and what their folder may hold."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.common.errors import CheckpointCorruptError, CheckpointError, UsageError
from echelon.contracts.run_dir import RunDir
from echelon.data.prefetch import Feed
from echelon.world import rng
from tests.compat.small_trainer import (
    GLOBAL_BATCH,
    RATE,
    losses_of,
    program,
    trained_plainly,
    trainer_of,
    values_of,
)
from tests.conftest import server_with
from tests.kit.models import largest_difference
from tests.kit.refusals import refused

pytestmark = [pytest.mark.standing_ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module", autouse=True)
def ranks_have_loaded_transformers() -> None:
    """Once for all of them: it takes seconds."""
    server_with(__name__).preload(["echelon.compat.transformers.trainer"])


def _resume(folder: str, strategies: list[tuple[str | None, str | None]]) -> list[Any]:
    """Six updates at once; four, and then the rest, perhaps under another strategy."""
    from transformers import EarlyStoppingCallback

    saves = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "lr_scheduler_type": "constant",
    }
    found = []
    for first, then in strategies:
        runs = []
        for name, strategy, stops_at in (("whole", first, 6), ("parts", first, 4), ("parts", then, 6)):
            given = {**saves, "strategy": strategy, "max_steps": stops_at}
            patience = EarlyStoppingCallback(9)
            trainer = trainer_of(f"{folder}/{first}-{then}-{name}", args=given, callbacks=[patience])
            trainer.train(resume_from_checkpoint=True if (name, stops_at) == ("parts", 6) else None)
            history = [row for row in trainer.state.log_history if "train_loss" not in row]
            rows = [{k: v for k, v in row.items() if "per_second" not in k and "runtime" not in k} for row in history]
            best = Path(trainer.state.best_model_checkpoint).name, patience.early_stopping_patience_counter
            runs.append((values_of(trainer.model), rows, trainer.state.best_metric, best))
        found.append(runs)
    return found


def _check_resumed(found: list[Any], *, exactly: bool = True) -> None:
    for (values, rows, best, path), _, (resumed, rows_again, best_again, path_again) in found:
        if exactly:
            assert all(torch.equal(values[name], resumed[name]) for name in values)
            assert rows == rows_again and best == best_again
        assert largest_difference(values, resumed) < 1e-6 and path == path_again


@pytest.mark.full
def test_a_resumed_run_is_the_whole_run_to_the_bit(ranks: Any, tmp_path: Path) -> None:
    _check_resumed(_resume(str(tmp_path / "one"), [(None, None)]))
    saved = sorted(path.name for path in (tmp_path / "one/None-None-whole").iterdir())
    assert saved == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for found in ranks(2, _resume, str(tmp_path / "two"), [(None, None), ("fsdp", "fsdp"), ("fsdp", "zero1")]):
        _check_resumed(found[:2])
        _check_resumed(found[2:], exactly=False)


@pytest.mark.parametrize(("step", "begins"), [(2, 2), (3, 1)])
def test_the_rest_of_an_epoch_begins_and_logs_the_rate_of_its_updates(step: int, begins: int, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Begins(TrainerCallback):  # type: ignore[misc]
        count = 0

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

    given = {"save_strategy": "steps", "save_steps": 1, "logging_strategy": "epoch", "lr_scheduler_type": "constant"}
    given["warmup_steps"] = 0
    trainer_of(f"{tmp_path}/first", args={**given, "max_steps": step}).train()
    counts = Begins()
    again = trainer_of(f"{tmp_path}/again", args={**given, "save_strategy": "no"}, callbacks=[counts])
    again.train(resume_from_checkpoint=f"{tmp_path}/first/checkpoint-{step}")
    rates = [row["learning_rate"] for row in again.state.log_history if "learning_rate" in row]
    assert counts.count == begins and set(rates) == {RATE}


def _with_loader_of_its_own(folder: str) -> list[Any]:
    """The whole run, and one that goes on in the middle of its second epoch."""
    from torch.utils.data import DataLoader, WeightedRandomSampler

    from echelon.compat.transformers import Trainer

    class Weighted(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = WeightedRandomSampler([1.0 + at for at in range(24)], 24)  # which draws from torch's own generator
            return DataLoader(program.Rows(24, 1), batch_size=4, sampler=sampler, collate_fn=self.data_collator)

    saves = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1, "num_train_epochs": 2}
    found = []
    for args in ({**saves}, {**saves, "save_strategy": "no"}):
        trainer = trainer_of(folder, kind=Weighted, args=args)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8" if found else None)
        found.append((values_of(trainer.model), losses_of(trainer), trainer.state.global_step))
    return found


@pytest.mark.full
def test_a_run_with_a_dataloader_of_the_users_goes_on_where_it_stood(tmp_path: Path) -> None:
    (values, losses, _), (resumed, losses_again, updates) = _with_loader_of_its_own(str(tmp_path))
    assert updates == 12 and losses_again == losses
    assert all(torch.equal(values[name], resumed[name]) for name in values)


def test_a_dataloader_that_is_saved_before_it_is_read_stands_where_it_was_restored() -> None:
    from echelon.data.replayed import Replayed

    def loader() -> Any:
        return Replayed(torch.utils.data.DataLoader(range(12), batch_size=2, shuffle=True))

    first, second, third = loader(), loader(), loader()
    batches = iter(first)
    for _ in range(2):
        next(batches)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    assert third.goes_on(2) and not loader().goes_on(2)
    assert [each.tolist() for each in third] == [each.tolist() for each in batches]
    assert len(list(third)) == 6


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        ({"given": 1, "begun": {"torch": 1}}, CheckpointCorruptError, "is not valid"),
        ({"given": -1}, CheckpointCorruptError, "given must be .* at least 0, got -1"),
    ],
)
def test_a_state_that_no_dataloader_of_the_users_gave_is_refused(state: dict[str, Any], error: Any, says: str) -> None:
    from echelon.data.replayed import Replayed

    loader = Replayed(torch.utils.data.DataLoader(range(12), batch_size=2))
    drawn = torch.get_rng_state()
    with pytest.raises(error, match=says):
        loader.load_state_dict({"begun": {**rng.states(), "generators": []}, **state})
    assert torch.equal(torch.get_rng_state(), drawn) and len(list(loader)) == 6


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Its length is a guess: each worker's last batch may be a short one."""

    def __len__(self) -> int:
        return program.ROWS

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        rows = program.Rows(program.ROWS, 1)
        return iter([rows[at] for at in range(worker.id if worker else 0, program.ROWS, worker.num_workers if worker else 1)])


@pytest.mark.full
def test_all_batches_of_a_dataloader_are_trained_on_whatever_its_length_says(tmp_path: Path) -> None:
    from echelon.compat.transformers import Trainer
    from echelon.data.replayed import Replayed

    class Reads(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(Streamed(), batch_size=8, num_workers=2, collate_fn=self.data_collator)
            assert sum(1 for _ in loader) > len(loader)
            return loader

    trainer = trainer_of(tmp_path, kind=Reads, args={"gradient_accumulation_steps": 1, "num_train_epochs": 1})
    assert trainer.train().global_step == sum(1 for _ in trainer.get_train_dataloader())

    def order(wraps: Any) -> list[Any]:
        sampler = torch.utils.data.RandomSampler(range(6), num_samples=9, generator=torch.Generator().manual_seed(3))
        loader = wraps(torch.utils.data.DataLoader(range(6), batch_size=2, sampler=sampler))
        return [[step.batch.tolist() for step in Feed(loader)] for _ in range(3)]

    assert order(Replayed) == order(lambda loader: loader)


@pytest.mark.full
def test_a_run_goes_on_with_fewer_micro_batches_in_its_folder(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}
    runs = [(tmp_path / "one", 2, 4)] + [(tmp_path / "two", *each) for each in ((2, 2), (1, 3), (2, 4))]
    for folder, accumulation, updates in runs:
        parts = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": GLOBAL_BATCH // accumulation}
        trainer = trainer_of(folder, args={**saves, **parts, "max_steps": updates})
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
        assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint-{at}" for at in (updates - 1, updates)]
        if folder == tmp_path / "one":
            want = values_of(trainer.model)
    assert largest_difference(values_of(trainer.model), want) < 1e-6


@pytest.mark.full
def test_what_is_in_the_folder_is_not_mixed_with_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = {"save_strategy": "epoch", "save_total_limit": 1}
    trainer = trainer_of(tmp_path, args=saves)
    with refused(UsageError):
        trainer.train(resume_from_checkpoint=True)
    trainer = trainer_of(tmp_path, args=saves)
    trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]
    with refused(CheckpointError):
        trainer_of(tmp_path, args=saves).train()
    again = trainer_of(tmp_path, args={**saves, "overwrite_output_dir": True})
    again.train()
    assert largest_difference(values_of(again.model), values_of(trainer.model)) == 0
    done = trainer_of(tmp_path, args=saves)
    done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert largest_difference(values_of(done.model), values_of(trainer.model)) == 0 and done.state.epoch == 2.0
    monkeypatch.setenv("ECHELON_RESTART", "1")  # as `echelon run --restart` sets it
    anew = trainer_of(tmp_path, args=saves)
    anew.train(resume_from_checkpoint=True)
    assert len(losses_of(anew)) == 6 and largest_difference(values_of(anew.model), values_of(trainer.model)) == 0
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/trainer_state.json").write_text("{}")
    with refused(UsageError):
        trainer_of(tmp_path, args=saves).train(resume_from_checkpoint=str(tmp_path / "theirs"))


def test_what_a_callback_asks_for_is_saved_though_nothing_else_is(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 2:
                control.should_save, self.weights = True, values_of(model)

    for rate in (0.1, 0.2):  # the second run replaces what the first has saved
        asks, more = Asks(), {"save_strategy": "no", "learning_rate": rate}
        trainer_of(tmp_path, args=more, callbacks=[asks]).train()
    saved = trainer_of(tmp_path / "other", args={"save_strategy": "no", "max_steps": 2})
    saved.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert largest_difference(values_of(saved.model), asks.weights) == 0
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def _best(folder: str) -> Any:
    """The rate is far too high: it gets worse, and stops."""
    from transformers import EarlyStoppingCallback

    more = {
        "learning_rate": 3.0,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 0,
        "num_train_epochs": 9,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "eval_on_start": True,
    }
    losses = iter([1.0, 0.5, 0.7, 0.8, 0.9, 1.0])
    trainer = trainer_of(
        folder,
        args={**more, "metric_for_best_model": "made_up"},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        compute_metrics=lambda prediction: {"made_up": next(losses)},
    )
    trainer.args.greater_is_better = False
    seen = []

    class Keeps(type(trainer.callback_handler.callbacks[0])):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen.append(values_of(model))

    trainer.add_callback(Keeps)
    trainer.train()
    kept = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("checkpoint"))
    return kept, trainer.state.global_step, trainer.state.best_metric, largest_difference(values_of(trainer.model), seen[0])


@pytest.mark.full
def test_the_best_is_loaded_at_the_end_and_a_run_stops_early(ranks: Any, tmp_path: Path) -> None:
    # The first of the made-up numbers is that of the evaluation before training, which counts for nothing.
    want = ["checkpoint-1", "checkpoint-3"], 3, 0.5, 0.0
    assert _best(str(tmp_path / "one")) == want
    assert ranks(2, _best, str(tmp_path / "two")) == [want, want]


def _stopped_early(folder: str) -> Any:
    from transformers import EarlyStoppingCallback

    losses = iter([0.5, 0.7, 0.8, 0.9])
    evaluates = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 1}
    trainer = trainer_of(
        folder,
        args={**evaluates, "metric_for_best_model": "made_up"},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        compute_metrics=lambda prediction: {"made_up": next(losses)},
    )
    trainer.args.greater_is_better = False
    trainer.train()
    return trainer.state.global_step


def test_several_ranks_stop_early_at_the_same_update_as_one(ranks: Any, tmp_path: Path) -> None:
    assert [_stopped_early(str(tmp_path)), *ranks(2, _stopped_early, str(tmp_path))] == [3, 3, 3]


def _asked_on_one_rank_and_started_again(folder: str) -> Any:
    """A callback of rank 0 alone asks for a save; then the launcher starts the job again, and the script says nothing of it."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):  # type: ignore[misc]
        stops = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_save or (state.is_world_process_zero and state.global_step == 3)
            if state.global_step == 4 and args.process_index == 1 and self.stops:
                control.should_training_stop = True

    found = []
    for Asks.stops in (True, False):
        trainer = trainer_of(folder, args={"save_strategy": "steps", "save_steps": 100}, callbacks=[Asks])
        began = len(trainer.state.log_history)
        trainer.train()
        found.append(
            (began, trainer.state.global_step, len(losses_of(trainer)), sorted(path.name for path in Path(folder).iterdir()))
        )
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return found, values_of(trainer.model)


@pytest.mark.full
def test_ranks_do_what_one_of_them_asks_and_a_job_that_is_started_again_goes_on(ranks: Any, tmp_path: Path) -> None:
    for found, values in ranks(2, _asked_on_one_rank_and_started_again, str(tmp_path)):
        assert found == [(0, 4, 4, ["checkpoint-3"]), (0, 6, 6, ["checkpoint-3", "checkpoint-6"])]
        assert largest_difference(values, trained_plainly()[0]) < 1e-5


def _interrupted(folder: str, signal_at: int | None, **args: Any) -> Any:
    """A script that says `train()`, whoever started it; exit codes are returned."""
    from transformers import TrainerCallback

    class Signals(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)

    given = {"save_strategy": "steps", "save_steps": 100, "per_device_train_batch_size": 2, **args}
    trainer = trainer_of(folder, args=given, callbacks=[Signals])
    try:
        done = trainer.train()
    except SystemExit as error:
        return error.code
    return done.global_step, len(losses_of(trainer)), values_of(trainer.model)


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_a_stopped_run_goes_on_with_the_same_command_also_on_fewer_ranks(ranks: Any, tmp_path: Path) -> None:
    """Four samples a rank and update: one rank keeps the global batch of the two that were there, however often it starts."""
    wanted = trained_plainly()[0]
    for number, sizes in enumerate(((2, 1, 1), (2, 1, 2))):
        folder = str(tmp_path / str(number))
        for size, stops_at in zip(sizes[:-1], (2, 4), strict=False):
            assert set(ranks(size, _interrupted, folder, stops_at)) == {75}
        for updates, losses, values in ranks(sizes[-1], _interrupted, folder, None):
            assert (updates, losses) == (6, 6) and largest_difference(values, wanted) < 1e-5


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_another_batch_of_the_script_counts_when_a_run_goes_on(ranks: Any, tmp_path: Path) -> None:
    """Four updates of 8 samples, in an epoch of 22; then batches of 4."""
    assert ranks(1, _interrupted, str(tmp_path), 4, per_device_train_batch_size=4) == [75]
    ((updates, *_),) = ranks(1, _interrupted, str(tmp_path), None, per_device_train_batch_size=2)
    assert updates == 4 + 4


def _complete_or_another(folder: str) -> list[Any]:
    found = [_interrupted(f"{folder}/one", None, max_steps=2)[:2]]
    with refused(CheckpointError):
        _interrupted(f"{folder}/one", None, max_steps=2)
    return found


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_a_complete_run_is_not_gone_on_with_by_itself(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, _complete_or_another, str(tmp_path)) == [[(2, 2)]]
    other = str(tmp_path / "other")
    assert ranks(1, _interrupted, other, 2) == [75]
    again = ranks(1, _interrupted, other, None, max_steps=4, overwrite_output_dir=True)
    assert again[0][:2] == (4, 4)  # from its beginning


@pytest.mark.full
def test_a_run_that_was_killed_goes_on_with_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    def killed(*given: Any) -> None:
        raise Killed

    for name, words in (("first", ["t.py", "--lr", "1"]), ("second", ["t.py", "--lr", "1"]), ("third", ["t.py", "--lr", "2"])):
        run = RunDir.create(tmp_path / "runs", name)
        run.run_json.write_text(json.dumps({"command": words}))
        for key, value in run.to_env().items():
            monkeypatch.setenv(key, value)
        trainer = trainer_of(tmp_path / "out", args={"save_strategy": "steps", "save_steps": 2})
        if name == "first":
            monkeypatch.setattr(trainer.callback_handler, "on_epoch_end", killed)
            with pytest.raises(Killed):
                trainer.train()
            monkeypatch.undo()
        elif name == "second":
            trainer.train()
            assert largest_difference(values_of(trainer.model), trained_plainly()[0]) < 1e-5 and len(losses_of(trainer)) == 6
        else:
            with refused(CheckpointError):
                trainer.train()


def test_what_scripts_call_after_training_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, args={"max_steps": 1})
    trainer.train()
    trainer.create_model_card(finetuned_from="m", tasks="text-generation")
    trainer.push_to_hub(commit_message="done")
    assert not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled
    assert "no model card was written" in caplog.text and "nothing was uploaded" in caplog.text
