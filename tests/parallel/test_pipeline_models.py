"""Pipelines of models that nobody wrote for them: transformers', torchvision's, and those with buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.parallel.names import plain_buffers
from tests.conftest import Ranks
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.units import Regression

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # torchao's, when it is compiled for the first time
    pytest.mark.standing_ranks,
]

Batch = dict[str, torch.Tensor]


def built(name: str) -> nn.Module:
    from tests.kit import hf_models

    options: dict[str, Any] = {"n_layer": 4} if name == "gpt2" else {}
    if name.startswith("llama"):
        options = {"tie_word_embeddings": name == "llama tied"}
    if name == "llama dynamic":  # longer than what it was made for
        options |= {"max_position_embeddings": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    return hf_models.without_dropout(seeded(getattr(hf_models, name.split()[0]), **options))


def batches(name: str, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        length = 7 if name != "llama dynamic" else (6, 9, 12, 9, 7)[number // 2]
        words = torch.randint(3, 50, (2, length), generator=generator)
        one = {"input_ids": words, "labels": words.clone()}
        if name != "t5":
            one["attention_mask"] = torch.ones_like(words)
            one["attention_mask"][1, 5:] = 0  # padding
        made.append(one)
    return made


class Causal(Regression):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(module=built(name), optimizer="AdamW", lr=1e-2, clip_grad_norm=0.5, **options)
        self.losses: list[float] = []

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, Any]:
        out = self.module(**data)
        return out.loss, out.logits

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        if results.total_grad_norm is not None:
            self.losses.append(float(self.latest_update[0]))


def trained(name: str, layout: Any, data: list[Batch]) -> tuple[dict[str, torch.Tensor], list[float]]:
    unit = Causal(name, layout=layout, accumulate=2)
    ech.train(unit, data, max_epochs=1)
    return whole(unit.prepared), unit.losses


def plain(name: str, data: list[Batch]) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = built(name).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        loss = (module(**first).loss + module(**second).loss) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {n: p.detach().clone() for n, p in module.named_parameters()}, losses


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "llama dynamic", "bert", "t5"])
def test_models_of_transformers_run_in_stages_as_they_are(ranks: Ranks, name: str) -> None:
    data = batches(name, 10)
    want, losses = plain(name, data)
    for schedule in ("1f1b", "zero_bubble") if name == "gpt2" else ("1f1b",):
        results = ranks(2, trained, name, ech.Layout(pp=2, schedule=schedule), data)
        got = {key: value for values, _ in results for key, value in values.items()}
        assert largest_difference(got, want) < 1e-11
        for _, told in results:
            assert told == pytest.approx(losses, rel=1e-6)  # they compute the loss in float32


class Convolutions(nn.Module):
    """Statistics in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4))
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(4))
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean(-1))


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = (torch.randn(3, 1, 8, generator=generator, dtype=torch.float64) for _ in range(count))
    return [(x, torch.randint(3, (3,), generator=generator)) for x in made]


class Classes(Regression):
    def __init__(self, on_meta: bool = False, **options: Any) -> None:
        with ech.on_meta() if on_meta else torch.device("cpu"):
            module = seeded(Convolutions)
        super().__init__(module=module, accumulate=2, **options)

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        out = self.module(data[0])
        return nn.functional.cross_entropy(out, data[1]), out


def classified(**options: Any) -> tuple[dict[str, torch.Tensor], float]:
    unit = Classes(**options)
    ech.train(unit, images(6), max_epochs=1)
    buffers = {name: buffer.clone() for name, buffer in plain_buffers(unit.prepared.module)}
    return whole(unit.prepared) | buffers, float(unit.latest_update[0])


def merged(results: list[tuple[dict[str, torch.Tensor], float]]) -> dict[str, torch.Tensor]:
    assert len({loss for _, loss in results}) == 1
    return {name: value for values, _ in results for name, value in values.items()}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"on_meta": True}, {"activation_checkpoint_params": "blocks"}])
def test_statistics_meta_builds_and_recomputed_blocks_are_as_in_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    (want,) = ranks(1, classified, layout="none")
    for schedule in ("1f1b", "zbv") if not options else ("interleaved",):
        got = merged(ranks(2, classified, layout=ech.Layout(pp=2, schedule=schedule), **options))
        assert largest_difference(got, want[0]) < 1e-11


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_its_scaler_agrees(ranks: Ranks, precision: str) -> None:
    (want,) = ranks(1, classified, layout="none", precision=precision)
    for layout in (ech.Layout(pp=2), ech.Layout(pp=2, fsdp=ech.FSDPStrategy())):
        got = merged(ranks(2, classified, layout=layout, precision=precision))
        assert largest_difference(got, want[0]) < 2e-2


class Overflowing(Classes):
    """The first stage learns nothing; in the second update the last one's gradients overflow."""

    def __init__(self, frozen: str, **options: Any) -> None:
        super().__init__(**options)
        for name, p in self.module.named_parameters():
            p.requires_grad_(not name.startswith(frozen))

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        loss, out = super().compute_loss(state, data)
        return loss * (float("inf") if 1 < self.train_progress.num_steps_completed < 4 else 1.0), out


def _frozen_stage(frozen: str, layout: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    unit = Overflowing(frozen, layout=layout, precision="fp16")
    seen: list[Any] = []
    unit.configure()
    unit.optimizer.register_step_post_hook(lambda *_: seen.append(None))
    ech.train(unit, images(6), max_epochs=1)
    return whole(unit.prepared), [float(unit.grad_scaler.get_scale()), len(seen)]


@pytest.mark.full
@pytest.mark.parametrize("frozen", ["stem", "head"])
def test_a_stage_without_gradients_agrees_on_the_scale(ranks: Ranks, frozen: str) -> None:
    """It has nothing to look at for an inf, and hears of the other stage's."""
    (want,) = ranks(1, _frozen_stage, frozen, "none")
    stages = ["layers.0"] if frozen == "stem" else ["head"]
    results = ranks(2, _frozen_stage, frozen, ech.Layout(pp=2, stages=stages))
    got = {name: value for values, _ in results for name, value in values.items()}
    assert [scaled for _, scaled in results] == [want[1]] * 2
    assert largest_difference(got, want[0]) < 2e-2
