"""Scripts of transformers' Trainer and of Accelerate: what they train is what plain PyTorch trains in one process."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import NotHereError, UsageError
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from tests.compat.reference import in_order, plain, run_programs
from tests.compat.small_trainer import (
    CLIP,
    DECAY,
    EPOCHS,
    RATE,
    WARMUP,
    global_batches,
    losses_of,
    program,
    trained_plainly,
    trainer_of,
    training_arguments,
    values_of,
)
from tests.conftest import server_with
from tests.kit.models import largest_difference
from tests.kit.refusals import refused

pytestmark = [pytest.mark.standing_ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

HERE = Path(__file__).parent / "programs"


@pytest.fixture(scope="module", autouse=True)
def ranks_have_loaded_transformers() -> None:
    """Once for all of them: it takes seconds."""
    server_with(__name__).preload(["echelon.compat.transformers.trainer"])


# --- numbers


def _train_with(folder: str, strategies: list[str | None]) -> list[Any]:
    found = []
    for strategy in strategies:
        trainer = trainer_of(folder, args={"strategy": strategy}, compute_metrics=program.accuracy)
        done = trainer.train()
        metrics = trainer.evaluate()
        predictions = trainer.predict(program.Rows(5, 3))
        rows = [torch.from_numpy(predictions.predictions), torch.from_numpy(predictions.label_ids)]
        rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
        found.append(
            (values_of(trainer.model), (losses_of(trainer), rates), done.training_loss, metrics, rows, predictions.metrics)
        )
    return found


def _check_numbers(found: list[Any]) -> None:
    want, losses, loss = trained_plainly()
    module: Any = program.build_model()
    module.load_state_dict(want, strict=False)
    last = program.Rows(5, 3)
    ids = torch.stack([last[at]["input_ids"] for at in range(5)])
    mask = torch.stack([last[at]["attention_mask"] for at in range(5)])
    with torch.no_grad():
        logits = module.eval()(input_ids=ids, attention_mask=mask).logits
    for values, (logged, rates), mean, metrics, (predictions, labels), predicted in found:
        assert largest_difference(values, want) < 1e-5
        assert rates == [0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025]
        assert logged == pytest.approx(losses, rel=1e-5) and mean == pytest.approx(sum(losses) / 6, rel=1e-5)
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5) and metrics["epoch"] == 2.0
        assert 0 <= metrics["eval_accuracy"] <= 1 and metrics["eval_labels"] == int(program.Rows(7, 2).lengths.sum()) - 7
        assert torch.allclose(predictions, logits, atol=1e-4)
        assert torch.equal(labels, torch.stack([last[at]["labels"] for at in range(5)])) and "test_loss" in predicted


@pytest.mark.full
def test_one_rank_and_two_train_as_plain_pytorch_under_every_strategy(ranks: Any, tmp_path: Path) -> None:
    _check_numbers(_train_with(str(tmp_path), [None]))
    for found in ranks(2, _train_with, str(tmp_path), [None, "fsdp", "zero1"]):
        _check_numbers(found)


def _predicts(folder: str, strategy: str | None) -> tuple[torch.Tensor, torch.Tensor, float]:
    trainer = trainer_of(folder, args={"strategy": strategy}, compute_metrics=program.accuracy)
    made = trainer.predict(program.Rows(6, 3))
    return torch.from_numpy(made.predictions), torch.from_numpy(made.label_ids), made.metrics["test_accuracy"]


def test_predictions_and_metrics_are_of_whole_sequences_that_ranks_share(ranks: Any, tmp_path: Path) -> None:
    logits, labels, accuracy = _predicts(str(tmp_path), None)
    for got, of_labels, found in ranks(2, _predicts, str(tmp_path), "cp=2"):
        assert torch.allclose(got, logits, atol=1e-5) and torch.equal(of_labels, labels) and found == pytest.approx(accuracy)


# --- what programs write themselves


class Sum(nn.Module):
    """No model of transformers, and without dicts: (loss, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.last(self.norm(self.first(x)).tanh())
        return (nn.functional.mse_loss(out, labels), out) if labels is not None else (out,)


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 21) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[at], "labels": self.x[at].sum().sin()[None], "not_for_the_model": torch.zeros(3)}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Points()[at] for at in range(16)])


def _summed() -> Sum:
    torch.manual_seed(0)
    return Sum()


def _by_hand(batches: list[Any], loss: Any = nn.functional.mse_loss) -> dict[str, torch.Tensor]:
    module = _summed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss(module(batch["x"])[0], batch["labels"]).backward()
        optimizer.step()
    return values_of(module)


_PLAIN_SGD: dict[str, Any] = {
    "learning_rate": 0.1,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "num_train_epochs": 1,
    "optim_args": None,
}


def _own_parts(folder: str) -> dict[str, float]:
    """Scripts with parts of their own: the largest difference to plain PyTorch."""
    from echelon.compat.transformers import Trainer

    class SumOfErrors(Trainer):
        """Divides by the count of the batch."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            out = model(inputs["x"])[0]
            loss = (out - inputs.pop("labels")).abs().sum() / num_items_in_batch
            return (loss, {"logits": out}) if return_outputs else loss

    class MeanOfErrors(Trainer):
        """As scripts before transformers 4.46 have it."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            out = model(inputs["x"])[0]
            loss = (out - inputs["labels"]).abs().mean()
            return (loss, {"logits": out}) if return_outputs else loss

    class OwnOptimizer(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    class OwnLoader(OwnOptimizer):
        def get_train_dataloader(self) -> Any:
            samples = [{k: v for k, v in row.items() if k != "not_for_the_model"} for row in map(Points().__getitem__, range(21))]
            each = self.args.per_device_train_batch_size
            return torch.utils.data.DataLoader(samples, each, collate_fn=self.data_collator)

    momentum = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    in_turn = [
        {k: torch.stack([Points()[at][k] for at in range(i, min(i + 8, 21))]) for k in ("x", "labels")} for i in (0, 8, 16)
    ]
    whole = global_batches(0, Points())
    found = {}

    def run(name: str, want: dict[str, torch.Tensor], kind: Any = Trainer, args: Any = None, **more: Any) -> None:
        given = {
            "train_dataset": Points(),
            "eval_dataset": {"a": Points(5), "b": Points(3)},
            "model": _summed(),
            **momentum,
            **more,
        }
        trainer = trainer_of(folder, kind=kind, args={**_PLAIN_SGD, **(args or {})}, **given)
        trainer.train()
        metrics = trainer.evaluate()
        assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)
        found[name] = largest_difference(values_of(trainer.model), want)

    absolute = _by_hand(whole, lambda out, labels: (out - labels).abs().mean())
    run("a module", _by_hand(whole))
    run("sums", absolute, SumOfErrors)
    run("means", absolute, MeanOfErrors)
    run("own optimizer", _by_hand(whole), OwnOptimizer, optimizer_cls_and_kwargs=None)
    run("own loss", absolute, compute_loss_func=_absolute)
    run("sharded", _by_hand(whole), args={"strategy": "fsdp"})
    if dist.get_world_size() == 1:
        run("own loader", _by_hand([*in_turn]), OwnLoader, optimizer_cls_and_kwargs=None)
        run(
            "stream",
            _by_hand([{k: v[:8] for k, v in batch.items()} for batch in in_turn[:2]]),
            args={"max_steps": 2},
            train_dataset=Stream(),
        )
    model = _summed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run("given optimizer", _by_hand(whole), model=model, optimizers=(optimizer, None), optimizer_cls_and_kwargs=None)
    return found


def test_only_what_fills_no_batch_is_dropped(tmp_path: Path) -> None:
    args = {**_PLAIN_SGD, "dataloader_drop_last": True, "gradient_accumulation_steps": 3}
    momentum = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    trainer = trainer_of(tmp_path, args=args, train_dataset=Points(), model=_summed(), **momentum)
    assert trainer.train().global_step == 2
    first, second = global_batches(0, Points(), size=12)
    assert largest_difference(values_of(trainer.model), _by_hand([first, {k: v[:8] for k, v in second.items()}])) < 1e-6


def _evaluated_by_hand(folder: str) -> Any:
    """As transformers' example scripts for question answering evaluate: metrics from the samples and all outputs."""
    from echelon.compat.transformers import Trainer

    class Answers(Trainer):
        passes = 0

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            loader, compute_metrics = self.get_eval_dataloader(eval_dataset), self.compute_metrics
            self.compute_metrics = None
            try:
                only = True if compute_metrics is None else None
                output = self.evaluation_loop(loader, "Evaluation", only, ignore_keys, metric_key_prefix=metric_key_prefix)
            finally:
                self.compute_metrics = compute_metrics
            assert output.num_samples == len(output.predictions) == len(output.label_ids) == 5 and output.metrics.keys() == {
                "eval_loss"
            }
            return output.metrics | {"eval_error": float(abs(output.predictions - output.label_ids).mean())}

        def evaluation_loop(self, *args: Any, **options: Any) -> Any:
            self.passes += 1
            return super().evaluation_loop(*args, **options)

    def mean_error(found: Any) -> dict[str, float]:
        return {"error": float(abs(found.predictions - found.label_ids).mean())}

    trainer = trainer_of(folder, kind=Answers, model=_summed(), eval_dataset=Points(5), compute_metrics=mean_error)
    metrics, predicted = trainer.evaluate(), trainer.predict(Points(5)).metrics
    assert trainer.passes == 2
    return [metrics["eval_error"], predicted["test_error"]]


def test_evaluations_are_written_over_the_evaluation_loop(ranks: Any, tmp_path: Path) -> None:
    points = Points(5)
    labels = torch.stack([points[at]["labels"] for at in range(5)])
    with torch.no_grad():
        want = float((_summed().eval()(points.x)[0] - labels).abs().mean())
    assert ranks(2, _evaluated_by_hand, str(tmp_path)) == [pytest.approx([want, want], rel=1e-5)] * 2


def _absolute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return (outputs[0] - labels).abs().sum() / num_items_in_batch


KINDS = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_padded_batch_weigh_what_their_losses_are_means_over(kind: str, tmp_path: Path) -> None:
    import transformers

    from echelon.compat.transformers import Trainer

    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    configs: dict[str, Any] = {
        "GPT2": transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, **ends),
        "Llama": transformers.LlamaConfig(**small, **ends),
        "Bert": transformers.BertConfig(**small, is_decoder=kind == "BertLMHeadModel"),
        "T5": transformers.T5Config(
            d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16, decoder_start_token_id=0
        ),
    }
    config = next(config for name, config in configs.items() if kind.startswith(name))
    model = getattr(transformers, kind)(config).eval()
    ids = torch.randint(3, 16, (4, 6))
    labels = ids.clone()
    for row, length in enumerate((1, 2, 4, 6)):
        labels[row, length:] = -100
    whole = {"input_ids": ids, "labels": labels}
    trainer = Trainer(model=model, args=training_arguments(tmp_path))
    halves = [{name: each[rows] for name, each in whole.items()} for rows in (slice(0, 2), slice(2, 4))]
    total, *parts = (float(trainer.weight(each) * model(**each).loss.detach()) for each in (whole, *halves))
    assert sum(parts) == pytest.approx(total, rel=1e-5)


@pytest.mark.full
def test_parts_of_a_scripts_own(ranks: Any, tmp_path: Path) -> None:
    [alone] = ranks(1, _own_parts, str(tmp_path))
    assert len(alone) == 9 and max(alone.values()) < 1e-6, alone
    for found in ranks(2, _own_parts, str(tmp_path)):
        assert len(found) == 7 and max(found.values()) < 1e-6, found


@pytest.mark.full
def test_callbacks_of_both_kinds_are_called_at_transformers_times(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    import echelon as ech

    events: list[str] = []

    class Tells(TrainerCallback):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") and name not in ("on_init_end", "on_prediction_step", "on_log"):
                events.append(name.removeprefix("on_"))
            return super().__getattribute__(name)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 2:
                control.should_evaluate = control.should_save = True
            return control

    class Counts(ech.Callback):
        steps = 0

        def on_train_step_end(self, state: Any, unit: Any) -> None:
            self.steps += 1

    counts = Counts()
    trainer = trainer_of(tmp_path, args={"num_train_epochs": 1, "save_strategy": "epoch"}, callbacks=[Tells, counts])
    assert trainer.train().global_step == 3 and counts.steps == 6
    micro = ["step_begin", "substep_end", "step_end"]
    want = ["train_begin", "epoch_begin", *micro, *micro, "evaluate", "save", *micro, "epoch_end", "save", "train_end"]
    assert events == want
    trainer.train()  # once more, from the weights that it has
    assert trainer.state.global_step == 3 and events == [*want, *want]


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": "full_shard"},
        {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
        {"deepspeed": {"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR", "params": {}}}},
        {"deepspeed": {"gradient_accumulation_steps": 4}},
        {"deepspeed": {"bf16": {"enabled": True}}},
        {"deepspeed": {"zero_optimization": {"stage": 1}}, "strategy": "fsdp"},
        {"deepspeed": "no_such_file.json"},
        {"fsdp_config": {"min_num_params": 1}},
        {"neftune_noise_alpha": 5.0},
        {"auto_find_batch_size": True},
        {"average_tokens_across_devices": False},
        {"train_sampling_strategy": "group_by_length"},
        {"warmup_ratio": 3.0},
    ],
)
def test_what_arguments_cannot_mean_is_said(tmp_path: Path, given: dict[str, Any]) -> None:
    with refused(UsageError):
        training_arguments(tmp_path, **given)


def test_arguments_have_older_names_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = {
        "evaluation_strategy": "epoch",
        "no_cuda": True,
        "warmup_ratio": 0.5,
        "warmup_steps": 0,
        "logging_dir": "x",
        "report_to": None,
    }
    args = training_arguments(tmp_path, **older)
    assert args.eval_strategy == "epoch" and args.use_cpu and args.get_warmup_steps(6) == 3
    assert "logging_dir has no effect" in caplog.text
    shown = json.loads(training_arguments(tmp_path, strategy=FSDPStrategy(cpu_offload=True)).to_json_string())["strategy"]
    assert shown.startswith("FSDPStrategy(") and "cpu_offload=True" in shown
    assert dataclasses.replace(args, learning_rate=3.0).learning_rate == 3.0
    assert args.world_size == args.n_gpu == 1 and args.process_index == args.local_process_index == 0


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int, *, labels: bool = True) -> None:
        self.ids = torch.randint(3, 20, (count, 6), generator=torch.Generator().manual_seed(count))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        more = {"labels": self.ids[at, :4]} if self.labels else {}
        return {"input_ids": self.ids[at], "attention_mask": torch.ones(6, dtype=torch.long), **more}


def _generate(folder: str, strategy: str) -> Any:
    import transformers

    from echelon.compat.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    config = transformers.T5Config(
        vocab_size=24, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4 // ranks,
        per_device_eval_batch_size=2,
        max_steps=2,
        learning_rate=0.05,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        predict_with_generate=True,
        generation_max_length=7,
        strategy=strategy,
    )
    seen = []

    def compute_metrics(found: Any) -> dict[str, float]:
        seen.append(found.predictions.shape)
        return {"same": float((found.predictions[:, 1:5] == found.label_ids).mean())}

    trainer = Seq2SeqTrainer(model, args, train_dataset=Pairs(8), eval_dataset=Pairs(5), compute_metrics=compute_metrics)
    try:
        trainer.train()
        metrics = trainer.evaluate()
        found = trainer.predict(Pairs(5, labels=False), max_length=9, num_beams=2)
        vars(trainer)["_gen_kwargs"] = {"max_length": 8, "num_beams": None}  # as an override of evaluate sets them
        passed = trainer.evaluation_loop(trainer.get_test_dataloader(Pairs(5, labels=False)), "Prediction")
        assert passed.predictions.shape == (5, 8)
    except UsageError as error:
        return str(error)
    with torch.no_grad():
        loss = float(model.eval()(**{name: torch.stack([row[name] for row in Pairs(5)]) for name in Pairs(5)[0]}).loss)
        want = model.generate(input_ids=Pairs(5).ids, max_length=9, num_beams=2, use_cache=True)
        assert abs(metrics["eval_loss"] - loss) < 1e-5 and "eval_same" in metrics
    assert seen == [(5, 7)] and found.predictions.shape == (5, 9)
    filled = nn.functional.pad(want, (0, 9 - want.shape[1]))
    return bool((torch.from_numpy(found.predictions) == filled).all())


@pytest.mark.full
@pytest.mark.parametrize(("count", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "zero1")])
def test_predictions_are_what_the_model_generates(count: int, strategy: str, ranks: Any, tmp_path: Path) -> None:
    assert ranks(count, _generate, str(tmp_path), strategy) == [True] * count


def test_ranks_that_hold_parts_of_a_model_do_not_generate(ranks: Any, tmp_path: Path) -> None:
    """One rank would wait for the other at a token that this one does not make."""
    for said in ranks(2, _generate, str(tmp_path), "fsdp"):
        assert "predict_with_generate=True" in said


def test_a_configuration_of_deepspeed_that_is_only_a_stage_is_a_strategy(tmp_path: Path) -> None:
    """On the command lines of 22 of 39 repositories."""
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    more = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "steps_per_print": 10, "gradient_accumulation_steps": 2}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    for stage, want in enumerate(("ddp", "zero1", "zero2", "zero3")):
        zero = {"stage": stage, "overlap_comm": True, "offload_param": {"device": "none"}}
        file = tmp_path / "ds.json"
        file.write_text(json.dumps({"zero_optimization": zero, "optimizer": optimizer, **auto, **more}))
        assert training_arguments(tmp_path, deepspeed=str(file)).strategy == want
    assert training_arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 2}}, push_to_hub=True).strategy == "zero2"
    assert training_arguments(tmp_path, deepspeed="").strategy is None


def test_names_of_the_modules_in_which_programs_look(tmp_path: Path) -> None:
    import transformers

    import echelon.compat.transformers as ours
    from echelon.compat.transformers.trainer import TRAINING_ARGS_NAME, Trainer
    from echelon.compat.transformers.training_args import ParallelMode, TrainingArguments

    assert Trainer is ours.Trainer and TrainingArguments is ours.TrainingArguments
    assert TRAINING_ARGS_NAME == transformers.trainer.TRAINING_ARGS_NAME
    assert ParallelMode is transformers.training_args.ParallelMode


class Backwards(torch.utils.data.Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


def _sampled(folder: str) -> float:
    from echelon.compat.transformers import Trainer

    class Sorted(Trainer):
        def _get_train_sampler(self) -> Any:
            return Backwards(len(self.train_dataset))

    options = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    trainer = trainer_of(folder, kind=Sorted, args=_PLAIN_SGD, train_dataset=Points(), model=_summed(), **options)
    trainer.train()
    order = [range(20, 12, -1), range(12, 4, -1), range(4, -1, -1)]
    whole = [{k: torch.stack([Points()[at][k] for at in part]) for k in ("x", "labels")} for part in order]
    return largest_difference(values_of(trainer.model), _by_hand(whole))


@pytest.mark.parametrize("count", [1, 2])
def test_a_sampler_of_a_subclass_is_the_order_of_all_ranks(count: int, ranks: Any, tmp_path: Path) -> None:
    assert max(ranks(count, _sampled, str(tmp_path))) < 1e-6


def _saved_by_hand(folder: str, strategy: str) -> Any:
    """As the family of Stanford Alpaca saves, and as FlagEmbedding does."""
    from echelon.compat.transformers import Trainer

    class Saves(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(f"{output_dir}/inner", state_dict)

    trainer = trainer_of(folder, args={"max_steps": 2, "strategy": strategy})
    trainer.train()
    state = trainer.model.state_dict()
    if trainer.args.should_save:
        trainer._save(f"{folder}/alpaca", state_dict={name: value.cpu() for name, value in state.items()})
    other = trainer_of(folder, kind=Saves, args={"max_steps": 1, "strategy": strategy})
    other.train()
    other.save_model(f"{folder}/own")
    return dict(state), dict(other.model.state_dict())


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_scripts_that_save_on_rank_0_write_what_was_trained(count: int, ranks: Any, tmp_path: Path) -> None:
    first, own = ranks(count, _saved_by_hand, str(tmp_path), "ddp")[0]
    for folder, want in (("alpaca", first), ("own/inner", own)):
        read = type(program.build_model()).from_pretrained(tmp_path / folder).state_dict()
        assert set(want) >= set(read) and all(torch.equal(read[name], want[name]) for name in read)


def _adapted(folder: str, strategy: str | None, is_replaced: bool) -> dict[str, torch.Tensor]:
    """As alpaca-lora has it: `state_dict` of the model itself gives the adapter alone. Two updates, and then two more."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    for updates in (2, 4):
        torch.manual_seed(0)
        model: Any = peft.get_peft_model(program.build_model(), config)
        whole = model.state_dict
        if is_replaced:
            own = lambda self, *_, whole=whole, **__: peft.get_peft_model_state_dict(self, whole())  # noqa: E731
            model.state_dict = own.__get__(model, type(model))
        saves = {"max_steps": updates, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
        trainer = trainer_of(folder, model=model, args={**saves, "strategy": strategy})
        trainer.train(resume_from_checkpoint=updates == 4)
        trainer.save_model(f"{folder}/adapter")
    assert is_replaced == (len(model.state_dict()) < len(whole()))  # as the script has it, until its end
    return values_of(model)


@pytest.mark.parametrize(("count", "strategy"), [(1, None), (2, "fsdp")])
def test_a_state_dict_that_a_script_puts_on_its_model_is_left_to_what_it_saves(
    count: int, strategy: str | None, ranks: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    [want, *_] = ranks(1, _adapted, str(tmp_path / "whole"), None, False)
    for values in ranks(count, _adapted, str(tmp_path / "own"), strategy, True):
        assert largest_difference(values, want) < 1e-5
    saved = load_file(tmp_path / "own/adapter/adapter_model.safetensors")
    named = {name.replace(".weight", ".default.weight"): value for name, value in saved.items()}
    assert len(named) == 8 and largest_difference(named, {name: want[name] for name in named}) < 1e-5
    index = (tmp_path / "own/checkpoint-4/index.json").read_text()
    assert "lora_A" in index and "embed_tokens" not in index  # the base is the script's to build


def _split(folder: str, overrides: bool) -> str:
    from echelon.compat.transformers import Trainer

    class Saves(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None: ...

    trainer = trainer_of(folder, kind=Saves if overrides else Trainer, args={"max_steps": 1, "strategy": "fsdp"})
    try:
        trainer.train()
        trainer._save(folder)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("overrides", [False, True])
def test_what_is_split_is_not_saved_by_one_rank(overrides: bool, ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, _split, str(tmp_path), overrides):
        assert "split" in said and "save_model" in said


def test_what_a_trainer_cannot_mean_is_said(tmp_path: Path) -> None:
    import transformers
    from transformers import TrainerCallback

    import echelon.compat.transformers as ours

    class Steps(ours.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any: ...

    class Optimizes(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    theirs = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with refused(UsageError, name="args", got="'TrainingArguments'"):
        ours.Trainer(_summed(), theirs)
    with refused(UsageError):
        trainer_of(tmp_path, kind=Steps)
    with refused(UsageError):
        ours.Trainer(args=training_arguments(tmp_path))
    with refused(UsageError):
        trainer_of(tmp_path, args={"eval_strategy": "steps"}, eval_dataset=None)
    trainer = trainer_of(tmp_path)
    for name in ("hyperparameter_search", "training_step", "is_in_train"):
        with refused(NotHereError):
            getattr(trainer, name)
        assert not hasattr(trainer, name)
    with refused(NotHereError):
        trainer.accelerator.get_state_dict(trainer.model)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018
    for callback, says in ((Optimizes, "Optimizes has on_pre_optimizer_step or on_optimizer_step"), (Ends, "should_epoch_stop")):
        with pytest.raises(UsageError, match=says):
            trainer_of(tmp_path, callbacks=[callback]).train()
    with refused(UsageError):
        trainer_of(tmp_path, args={"eval_strategy": "epoch", "metric_for_best_model": "bleu"}).train()
    with refused(UsageError):
        trainer_of(tmp_path, args={"dataloader_drop_last": True}, train_dataset=Points(3), model=_summed()).train()
    with refused(UsageError):
        trainer_of(tmp_path, train_dataset=Stream(), model=_summed()).train()
    with refused(UsageError):
        trainer_of(tmp_path, model=nn.Linear(4, 1), train_dataset=[{"input": torch.zeros(4)} for _ in range(8)]).train()
    assert ours.AutoModelForCausalLM is transformers.AutoModelForCausalLM


# --- as programs


ECHELON = ("-m", "echelon", "run", "--ranks", "2")


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_script_of_accelerate_runs_unchanged(tmp_path: Path) -> None:
    loop = str(HERE / "accelerate_loop.py")
    (tmp_path / "loop").mkdir()
    run_programs(tmp_path, (*ECHELON, loop, "loop"))
    _check_loop(tmp_path / "loop")
    before = torch.load(tmp_path / "loop/out.pt")
    run_programs(tmp_path, (*ECHELON, loop, "loop", "--resume"))
    after = torch.load(tmp_path / "loop/out.pt")
    assert all(torch.equal(after[0][name], p) for name, p in before[0].items()) and torch.equal(after[1], before[1])


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_script_of_transformers_runs_unchanged_and_with_its_import_line_changed(tmp_path: Path) -> None:
    """In the second case its numbers are those of one process."""
    text = (HERE / "transformers_trainer.py").read_text()
    changed = re.sub(r"^from transformers import", "from echelon.compat.transformers import", text, flags=re.M)
    assert changed != text
    (tmp_path / "changed.py").write_text(changed)
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "seed": 42,
        "num_train_epochs": EPOCHS,
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "adam_epsilon": 1e-3,
        "max_grad_norm": CLIP,
        "warmup_steps": WARMUP,
        "logging_steps": 1,
        "save_steps": 4,
        "use_cpu": True,
        "eval_strategy": "epoch",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    run_programs(
        tmp_path,
        (*ECHELON, str(HERE / "transformers_trainer.py"), "--output_dir", "theirs", *words),
        (*ECHELON, "changed.py", "--output_dir", "ours", *words, "--strategy", "fsdp"),
    )
    _check_scripts(tmp_path)


def _check_loop(folder: Path) -> None:
    from tests.compat.programs import accelerate_loop

    parameters, predictions = torch.load(folder / "out.pt")
    # Two ranks have two rows each, twice: the first update is of rows 0 to 7.
    module = accelerate_loop.build_model()
    want = plain(module, in_order(accelerate_loop.dataset(), 8), epochs=accelerate_loop.EPOCHS, clip=1.0)
    assert largest_difference(parameters, want) < 1e-6
    with torch.no_grad():
        assert torch.allclose(predictions, module(accelerate_loop.held_out().tensors[0]), atol=1e-6) and len(predictions) == 11


def _check_scripts(folder: Path) -> None:
    from safetensors.torch import load_file

    want, losses, held_out = trained_plainly()
    theirs, ours = (torch.load(folder / name / "numbers.pt", weights_only=False) for name in ("theirs", "ours"))
    assert theirs["updates"] == ours["updates"] == 6
    assert theirs["predictions"].shape == ours["predictions"].shape == (5, program.LENGTH, 50)
    assert {"eval_loss", "eval_accuracy", "eval_runtime", "epoch"} <= set(theirs["metrics"]) & set(ours["metrics"])
    logged = [row["loss"] for row in ours["history"] if "loss" in row]
    assert logged == pytest.approx(losses, rel=1e-4) and ours["metrics"]["eval_loss"] == pytest.approx(held_out, rel=1e-4)
    saved = load_file(folder / "ours/model/model.safetensors")
    assert largest_difference({name: saved[name] for name in saved}, {name: want[name] for name in saved}) < 1e-5
    assert json.loads((folder / "ours/model/config.json").read_text())["hidden_size"] == 16
    assert json.loads((folder / "ours/trainer_state.json").read_text())["global_step"] == 6


def _ends_as_scripts_do(folder: str) -> Any:
    trainer = trainer_of(folder, args={"max_steps": 1, "save_strategy": "no"})
    trainer.train()
    accelerator = trainer.accelerator
    accelerator.wait_for_everyone()
    found = (accelerator.is_main_process, accelerator.process_index, accelerator.num_processes, str(accelerator.device))
    if accelerator.is_main_process:
        accelerator.unwrap_model(trainer.model_wrapped).save_pretrained(f"{folder}/saved")
    accelerator.wait_for_everyone()
    return found, Path(f"{folder}/saved/config.json").exists(), type(accelerator.unwrap_model(trainer.model_wrapped)).__name__


@pytest.mark.full
def test_what_scripts_ask_of_the_accelerator_at_their_end(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, _ends_as_scripts_do, str(tmp_path))
    assert first[:2] == ((True, 0, 2, "cpu"), True) and second[:2] == ((False, 1, 2, "cpu"), True)
    assert first[2] == second[2] != "DistributedDataParallel"
