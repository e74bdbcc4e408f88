"""transformers' Trainer: calls in any order, and what a script's own parts see of them, are as with transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.data.order import Order
from tests.compat.small_trainer import losses_of, program, trainer_of, values_of
from tests.conftest import server_with
from tests.kit.models import largest_difference

pytestmark = [pytest.mark.standing_ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module", autouse=True)
def ranks_have_loaded_transformers() -> None:
    server_with(__name__).preload(["echelon.compat.transformers.trainer"])


class Regresses(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.drop = nn.Linear(4, 1), nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.modes.append(self.training)
        out = self.last(self.drop(x))
        return {"loss": nn.functional.mse_loss(out, labels), "out": out} if labels is not None else {"out": out}


def undropped() -> Regresses:
    model = Regresses()
    model.drop.p = 0.0
    return model


def points(count: int = 16) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum()[None]} for row in x]


def regressing(folder: Any, *, kind: Any = None, args: dict[str, Any] | None = None, **more: Any) -> Any:
    given = {"model": Regresses(), "train_dataset": points(), "eval_dataset": points(4), **more}
    args = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "optim": "sgd", **(args or {})}
    return trainer_of(folder, kind=kind, args=args, **given)


def rates_of(trainer: Any) -> list[float]:
    return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]


# --- again


@pytest.mark.parametrize("arguments", [0, 1])
def test_a_model_init_is_called_again_by_each_train(tmp_path: Path, arguments: int) -> None:
    from echelon.compat.transformers import Trainer
    from tests.compat.small_trainer import training_arguments

    init = program.build_model if not arguments else lambda trial: program.build_model()
    rows = program.Rows(program.ROWS, 1)
    trainer = Trainer(args=training_arguments(tmp_path, max_steps=3), model_init=init, train_dataset=rows)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append((losses_of(trainer), values_of(trainer.model)))
    assert runs[0][0] == runs[1][0] and largest_difference(runs[0][1], runs[1][1]) == 0


def test_a_schedule_of_the_script_goes_on_in_a_second_train(tmp_path: Path) -> None:
    model = Regresses()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = regressing(tmp_path, model=model, optimizers=(optimizer, schedule), args={"max_steps": 2})
    trainer.train()
    trainer.train()
    assert trainer.lr_scheduler is schedule and rates_of(trainer) == [0.25, 0.125]


def test_a_schedule_that_was_made_before_training_is_made_anew_for_its_updates(tmp_path: Path) -> None:
    trainer = regressing(tmp_path, args={"max_steps": 4, "learning_rate": 1.0, "warmup_steps": 0})
    trainer.create_optimizer_and_scheduler(num_training_steps=1000)
    trainer.train()
    assert rates_of(trainer) == [1.0, 0.75, 0.5, 0.25]


def test_a_trainer_that_has_trained_resumes_with_the_schedule_of_the_checkpoint(tmp_path: Path) -> None:
    trainer = regressing(tmp_path, args={"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0})
    trainer.train()
    want = rates_of(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rates_of(trainer) == want and len(set(want)) == 4


@pytest.mark.parametrize("evaluates", [False, True])
def test_arguments_that_a_script_has_changed_count_in_the_next_train(tmp_path: Path, evaluates: bool) -> None:
    changed = {"max_steps": 3, "max_grad_norm": 0.05, "gradient_accumulation_steps": 2, "warmup_steps": 0}
    want = regressing(tmp_path / "want", model=undropped(), args=changed)
    trainer = regressing(
        tmp_path, model=undropped(), args={"max_steps": 2, "learning_rate": 0.0} if not evaluates else {"max_steps": 2}
    )
    if evaluates:
        trainer.evaluate()
    else:
        trainer.train()
        for group in trainer.optimizer.param_groups:
            group["initial_lr"] = want.args.learning_rate
    for name, value in changed.items():
        setattr(trainer.args, name, value)
    for each in (want, trainer):
        each.train()
    assert losses_of(trainer) == losses_of(want) and largest_difference(values_of(trainer.model), values_of(want.model)) == 0


# --- what scripts find


def test_the_output_folder_is_there_though_nothing_is_saved(tmp_path: Path) -> None:
    trainer = regressing(tmp_path / "new/out", args={"max_steps": 1})
    (tmp_path / "new/out/notes.txt").write_text("from the script")
    trainer.save_metrics("train", trainer.train().metrics)
    trainer.save_state()
    assert json.loads((tmp_path / "new/out/trainer_state.json").read_text())["global_step"] == 1


def _saved(folder: str, strategy: str | None) -> dict[str, torch.Tensor]:
    trainer = regressing(folder, args={"max_steps": 1, "strategy": strategy})
    trainer.train()
    trainer.save_model(f"{folder}/model")
    return values_of(trainer.model)


@pytest.mark.parametrize(("count", "strategy"), [(1, None), (2, "fsdp")])
def test_a_module_without_save_pretrained_is_saved_as_safetensors(
    count: int, strategy: str | None, ranks: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    [want, *_] = ranks(count, _saved, str(tmp_path), strategy)
    assert largest_difference(load_file(tmp_path / "model/model.safetensors"), want) == 0


def tokenizer() -> Any:
    import tokenizers
    import transformers

    model = tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="a")
    fast = tokenizers.Tokenizer(model)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_the_models_special_tokens_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    """Without a pad token, this model refuses batches of several rows."""
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=5, eos_token_id=6)
    rows = [{"input_ids": [3, 4, 3][: 1 + at % 3], "labels": at % 2} for at in range(8)]
    model = transformers.GPT2ForSequenceClassification(config)
    trainer = trainer_of(tmp_path, model=model, train_dataset=rows, processing_class=tokenizer(), args={"max_steps": 1})
    trainer.train()
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)


def test_the_tokenizer_of_a_collator_is_saved_with_the_model(tmp_path: Path) -> None:
    import transformers

    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = trainer_of(tmp_path, data_collator=collator, args={"max_steps": 1})
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model/tokenizer.json").exists()


# --- what is logged and measured


def test_the_gradient_norm_is_logged_though_nothing_is_clipped(tmp_path: Path) -> None:
    trainer = regressing(tmp_path, args={"max_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0, "weight_decay": 0.0})
    before = values_of(trainer.model)
    trainer.train()
    after, rate = values_of(trainer.model), rates_of(trainer)[0]
    moved = torch.cat([(before[name] - after[name]).flatten() for name in before]).norm() / rate
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(moved), rel=1e-4)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points(16))


def test_epochs_of_a_stream_are_counted_as_transformers_does(tmp_path: Path) -> None:
    trainer = regressing(tmp_path, args={"max_steps": 5}, train_dataset=Stream())
    trainer.train()
    assert [row["epoch"] for row in trainer.state.log_history[:5]] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.2])


def test_epochs_are_counted_in_the_batches_that_there_are(tmp_path: Path) -> None:
    """Ten batches in updates of three: the last update has only one."""
    trainer = regressing(
        tmp_path, args={"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}, train_dataset=points(20)
    )
    trainer.train()
    assert [row["epoch"] for row in trainer.state.log_history[:4]] == pytest.approx([0.3, 0.6, 0.9, 1.0])


class Numbers(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"x": torch.full((4,), float(at)), "labels": torch.tensor([float(at)])} for at in range(13)])


class Repeats(Regresses):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": nn.functional.mse_loss(self.last(x), labels), "out": x[:, 0]}


def _predicted_from_a_stream(folder: str, workers: int) -> Any:
    trainer = regressing(folder, model=Repeats(), args={"dataloader_num_workers": workers})
    made = trainer.predict(Numbers())
    return made.predictions.tolist(), made.label_ids[:, 0].tolist()


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 0), (2, 2)])
def test_predictions_of_a_stream_are_in_its_order(count: int, workers: int, ranks: Any, tmp_path: Path) -> None:
    want = [float(at) for at in range(13)]
    assert ranks(count, _predicted_from_a_stream, str(tmp_path), workers) == [(want, want)] * count


class Paired(Regresses):
    """Has a loss without labels, as CLIP does."""

    def forward(self, x: torch.Tensor, return_loss: bool = True) -> Any:  # type: ignore[override]
        out = self.last(x)
        return (out.square().mean(), out, out + 1) if return_loss else (out, out + 1)


def test_predictions_of_a_model_without_labels_do_not_hold_the_loss(tmp_path: Path) -> None:
    seen = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append((len(prediction.predictions), prediction.label_ids))
        return {"made": 1.0}

    rows = [{"x": row["x"]} for row in points(4)]
    trainer = regressing(tmp_path, model=Paired(), eval_dataset=rows, compute_metrics=measure)
    metrics = trainer.evaluate()
    assert seen == [(2, ())] and metrics["eval_made"] == 1.0 and metrics["eval_loss"] > 0


def test_a_loss_of_compute_metrics_is_the_one_that_is_returned(tmp_path: Path) -> None:
    trainer = regressing(tmp_path, compute_metrics=lambda prediction: {"loss": 7.0})
    assert trainer.evaluate()["eval_loss"] == 7.0


def test_several_labels_at_once_are_not_smoothed(tmp_path: Path) -> None:
    import transformers

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
    config = transformers.BertConfig(**small, num_labels=3, problem_type="multi_label_classification")
    rows = [{"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([1.0, 0.0, 1.0])} for _ in range(8)]
    model = transformers.BertForSequenceClassification(config)
    trainer = trainer_of(tmp_path, model=model, train_dataset=rows, args={"max_steps": 1, "label_smoothing_factor": 0.1})
    assert trainer.train().training_loss > 0


def test_greedy_rates_change_with_the_evaluations(tmp_path: Path) -> None:
    losses = iter([2.0, 1.0, 3.0, 4.0])
    made = {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "min_lr": 1e-4, "max_lr": 1.0}}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "made", "greater_is_better": False}
    args = {**made, **evaluates, "max_steps": 4, "learning_rate": 0.1, "warmup_steps": 0}
    trainer = regressing(tmp_path, args=args, compute_metrics=lambda prediction: {"made": next(losses)})
    trainer.train()
    assert len(rates_of(trainer)) == 4 and len(set(rates_of(trainer))) > 1


def test_the_best_checkpoint_is_known_though_it_was_saved_before_it_was_evaluated(tmp_path: Path) -> None:
    evaluates = {"eval_strategy": "epoch", "metric_for_best_model": "loss", "num_train_epochs": 2}
    args = {**evaluates, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "learning_rate": 1e-3}
    trainer = regressing(tmp_path, args=args)
    trainer.train()
    state = trainer.state
    assert (state.best_global_step, state.best_model_checkpoint) == (
        8,
        str(tmp_path / "checkpoint-4"),
    )  # nothing is saved after 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


# --- a script's own parts


def test_a_callback_that_leaves_eval_mode_does_not_end_dropout(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Samples(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.eval()

    trainer = regressing(tmp_path, callbacks=[Samples], args={"max_steps": 3})
    trainer.train()
    assert trainer.model.modes == [True] * 3


def test_an_optimizer_with_modes_is_told_of_them(tmp_path: Path) -> None:
    class ScheduleFree(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

        def step(self, closure: Any = None) -> Any:
            assert self.mode == "train"
            return super().step(closure)

    model = Regresses()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = regressing(tmp_path, model=model, optimizers=(optimizer, None), args=evaluates)
    trainer.train()
    assert optimizer.mode == "eval"


def test_overrides_get_what_transformers_gives_them(tmp_path: Path) -> None:
    from echelon.compat.transformers import Trainer

    class Own(Trainer):
        started = 0.0

        def _get_train_sampler(self, train_dataset: Any) -> Any:
            self.sampled = train_dataset
            return torch.utils.data.SequentialSampler(train_dataset)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.started = start_time or self.started
            super().log(logs, start_time)

        def evaluate(self, *args: Any, **options: Any) -> Any:
            self.ignored = options.get("ignore_keys")
            return super().evaluate(*args, **options)

    rows = points()
    trainer = regressing(tmp_path, kind=Own, train_dataset=rows, args={"max_steps": 2, "eval_strategy": "epoch"})
    trainer.train(ignore_keys_for_eval=["out"])
    assert trainer.sampled is rows and trainer.started > 0 and trainer.ignored == ["out"]


def test_a_loader_over_the_trainers_sampler_is_shuffled(tmp_path: Path) -> None:
    from echelon.compat.transformers import Trainer

    class Loads(Trainer):
        def get_train_dataloader(self) -> Any:
            made = torch.utils.data.DataLoader(
                self.train_dataset, self.args.per_device_train_batch_size, sampler=self._get_train_sampler()
            )
            return self.accelerator.prepare(made)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset)

    class Plain(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset)

    loader = regressing(tmp_path, kind=Loads).get_train_dataloader()
    seen = torch.cat([batch["x"] for batch in loader])
    rows = torch.stack([row["x"] for row in points()])
    assert not torch.equal(seen, rows) and torch.equal(seen.sort(0).values, rows.sort(0).values)
    for strategy in ("random", "sequential"):
        args = {"train_sampling_strategy": strategy}
        loaders = [regressing(tmp_path, kind=kind, args=args).get_train_dataloader() for kind in (Plain, Trainer)]
        assert all(type(loader.order) is Order for loader in loaders)  # echelon's
        assert [loader.shuffle for loader in loaders] == [strategy == "random"] * 2


def _asked_in(folder: str, event: str) -> Any:
    """A callback of rank 0 alone asks for a save while all ranks log, or evaluate."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):  # type: ignore[misc]
        pass

    def asks(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_save or state.is_world_process_zero

    setattr(Asks, event, asks)
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}
    trainer = regressing(folder, callbacks=[Asks], args={**evaluates, "max_steps": 2})
    trainer.train()
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
def test_ranks_do_what_one_asks_while_they_log_or_evaluate(event: str, ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, _asked_in, str(tmp_path), event) == [["checkpoint-2"]] * 2
