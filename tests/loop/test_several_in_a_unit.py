"""A unit with several optimizers: each steps on its own loss, in turn, as in plain PyTorch on the whole global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

import echelon as ech
from echelon.common.errors import LayoutError, RanksDisagreeError, UsageError
from echelon.contracts.events import read_lines
from echelon.contracts.overrides import Overrides, impose
from tests.conftest import Ranks
from tests.kit.gan import (
    CLIP,
    Tensors,
    assert_same,
    batches,
    dataset,
    losses,
    mlp,
    networks,
    plain_temperature,
    plainly,
    plainly_accumulated,
    scheduled,
    temperature_losses,
    weights,
)
from tests.kit.models import largest_difference, whole
from tests.kit.refusals import refusal, refused
from tests.kit.run_folders import recorded

pytestmark = pytest.mark.standing_ranks

LAYOUTS = ["ddp", "fsdp", "zero1"]


def _loader(accumulation: int = 1, samples: int = 25, **options: Any) -> Any:
    return ech.Loader(dataset(samples), 8, accumulate=accumulation, **{"shuffle": False, **options})


class Gan(ech.AutoUnit[Any]):
    every = 1  # the generator steps in every so many updates

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return scheduled(module)

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        for name, loss in losses(self.module, data):
            yield name, loss
            if self.train_progress.num_updates_completed % self.every:
                return


class Slow(Gan):
    every = 2


def _trained(layout: str, kind: type[Gan] = Gan, planned: int | None = None) -> Tensors:
    unit = kind(module=networks(), layout=layout, clip_grad_norm=CLIP)
    if planned is not None:
        impose(Overrides(planned_ranks=planned))
    try:
        ech.train(unit, _loader(), max_epochs=1)
    finally:
        impose(None)
    return weights(unit.module)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "size"), [*((layout, 2) for layout in LAYOUTS), ("tp=2", 2), ("hsdp", 4)])
def test_each_optimizer_of_a_unit_steps_on_its_own_loss(ranks: Ranks, layout: str, size: int) -> None:
    """With fewer ranks than planned, too: in parts of a micro-batch, a loss of the first would meet networks of before."""
    want, _ = plainly()
    assert_same(ranks(size, _trained, layout), want)
    if layout == "ddp":
        assert_same(ranks(2, _trained, layout, planned=4), want)


def test_in_one_process_and_one_that_steps_every_other_update(ranks: Ranks) -> None:
    assert_same([_trained("none")], plainly()[0])
    assert_same(ranks(2, _trained, "ddp", Slow), plainly(every=2)[0])


def _beside_the_networks(layout: str) -> torch.Tensor:
    module = networks()
    module["features"] = nn.Module()
    module["features"].register_buffer("matrix", torch.full((2,), float(dist.get_rank())))
    return Gan(module=module, layout=layout).module["features"].matrix


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_buffers_beside_the_networks_are_those_of_rank_0(ranks: Ranks, layout: str) -> None:
    """Random features without parameters were others on each rank, which trained on, in silence."""
    assert [found.tolist() for found in ranks(2, _beside_the_networks, layout)] == [[0.0, 0.0]] * 2


# --- accumulation


class Remembers(Gan):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[list[Any]] = [[]]

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        self.seen[-1].append(data)
        yield from super().compute_losses(state, data)

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        if self.has_updated:
            self.seen.append([])


def _accumulated(layout: str) -> tuple[Tensors, list[list[Any]]]:
    unit = Remembers(module=networks(), layout=layout)
    ech.train(unit, ech.Loader(dataset(), global_batch=12, accumulate=3, shuffle=False, tail="drop"), max_epochs=1)
    return weights(unit.module), unit.seen[:-1]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_accumulation_adds_up_each_optimizers_own_gradients(ranks: Ranks, layout: str) -> None:
    found = ranks(2, _accumulated, layout)
    assert_same([got for got, _ in found], plainly_accumulated([seen for _, seen in found], schedules=True))


# --- saved, averaged, evaluated, logged


def _stops(layout: str, folder: str, stop: int | None) -> Tensors:
    """Two epochs; `stop` ends it after so many updates, in the middle of an epoch."""
    unit = Gan(module=networks(), layout=layout, clip_grad_norm=CLIP, ema=0.9)
    loader = _loader(2, shuffle=True, seed=3)
    ech.train(unit, loader, max_epochs=2, max_updates=stop, checkpoints=ech.Checkpoints(folder, every=1))
    averages: Any = unit.swa_model
    with averages.applied():
        made = {f"average.{name}": value for name, value in weights(unit.module).items()}
    return {**made, **weights(unit.module)}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_stopped_in_mid_epoch_ends_with_the_same_bits(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    straight = ranks(2, _stops, layout, str(tmp_path / "a"), None)
    ranks(2, _stops, layout, str(tmp_path / "b"), 3)
    for got, want in zip(ranks(2, _stops, layout, str(tmp_path / "b"), None), straight, strict=True):
        assert largest_difference(got, want) == 0
    ranks(2, _stops, layout, str(tmp_path / "c"), 3)  # with fewer ranks and another layout as well
    assert_same(ranks(1, _stops, "ddp", str(tmp_path / "c"), None), straight[0])


def _averages(layout: str) -> Tensors:
    unit = Gan(module=networks(), layout=layout, clip_grad_norm=CLIP, ema=ech.units.SWAParams(0, 1, ema_decay=0.5))
    ech.train(unit, _loader(), max_epochs=1)
    averages: Any = unit.swa_model
    with averages.applied():
        return weights(unit.module)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_averages_of_all_networks_follow_each_update(ranks: Ranks, layout: str) -> None:
    average: Tensors = {}

    def follow(module: Any) -> None:
        now = weights(module)
        average.update({name: 0.5 * average.get(name, value) + 0.5 * value for name, value in now.items()})

    plainly(after=follow)
    assert_same(ranks(2, _averages, layout), average)


def _logs(folder: str) -> tuple[list[Any], float, float]:
    unit = Gan(module=networks(), layout="ddp", clip_grad_norm=CLIP)
    with recorded(folder) as run:
        ech.train(unit, _loader(), max_epochs=1, eval=_loader())
    return list(read_lines(run.metrics)), float(unit.eval_loss), unit.optimizer_critic.param_groups[0]["lr"]


@pytest.mark.full
def test_each_loss_is_logged_and_evaluated_over_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, _logs, str(tmp_path))
    module, (trained, of_critic) = networks(), plainly()
    module.load_state_dict(trained)
    (_, critic), (_, generator) = ((name, float(loss.detach())) for name, loss in losses(module, dataset().tensors))
    assert all(abs(loss - critic - generator) < 1e-9 for _, loss, _ in found)
    records, _, rate = found[0]
    assert rate == 0.1 * 0.5 ** (4 // 2)
    updates = [record for record in records if "loss_critic" in record]
    assert [record["loss_critic"] for record in updates] == pytest.approx(of_critic, abs=1e-9)
    assert [record["loss"] for record in updates] == pytest.approx([r["loss_critic"] + r["loss_generator"] for r in updates])
    assert all(record["grad_norm_generator"] > 0 and record["lr_generator"] > 0 for record in updates)
    (evaluated,) = [record for record in records if "eval_loss_critic" in record]
    assert evaluated["eval_loss_critic"] == pytest.approx(critic, abs=1e-9)


class Filtered(Gan):
    def weight(self, data: Any) -> float | torch.Tensor:
        """Nothing in the second update; in the third, nothing on rank 1."""
        none = self.window.updates == 1 or (self.window.updates == 2 and dist.is_initialized() and dist.get_rank() == 1)
        return 0.0 if none else super().weight(data)


def _filtered(layout: str) -> tuple[Tensors, list[Any]]:
    unit = Filtered(module=networks(), layout=layout, clip_grad_norm=CLIP)
    seen: list[Any] = []
    unit.on_train_step_end = lambda state, data, step, results: seen.append(data)  # type: ignore[method-assign]
    ech.train(unit, _loader(1, 24), max_epochs=1)
    return weights(unit.module), seen


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_weighs_nothing_trains_nothing(ranks: Ranks, layout: str) -> None:
    found = ranks(2, _filtered, layout)
    first = tuple(torch.cat(each) for each in zip(found[0][1][0], found[1][1][0], strict=True))
    assert_same([got for got, _ in found], plainly([first, found[0][1][2]])[0])  # type: ignore[list-item]


# --- one loss, two optimizers; and one of what is no module's


def _of_parts(module: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "matrices": torch.optim.SGD([p for p in module.parameters() if p.dim() > 1], 0.2),
        "rest": torch.optim.Adam([p for p in module.parameters() if p.dim() == 1], 1e-2),
    }


class OneLoss(ech.AutoUnit[Any]):
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return _of_parts(module)

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        out = self.module(data[1])
        return mse_loss(out, data[0]), out

    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        assert results.outputs.shape == data[0].shape


def _one_loss(layout: str) -> Tensors:
    unit = OneLoss(module=mlp(4, 2, seed=2), layout=layout)
    ech.train(unit, _loader(2), max_epochs=1)
    return whole(unit.module)


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_all_optimizers_step_on_the_one_loss_of_a_unit_without_others(ranks: Ranks, layout: str) -> None:
    module = mlp(4, 2, seed=2)
    made = _of_parts(module)
    for real, noise in batches():
        mse_loss(module(noise), real).backward()
        for optimizer in made.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ranks(2, _one_loss, layout), whole(module))


class Tempered(ech.AutoUnit[Any]):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log_alpha = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return {"policy": torch.optim.SGD(module.parameters(), 0.1), "alpha": torch.optim.Adam([self.log_alpha], 0.1)}

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        yield from temperature_losses(self.module, self.log_alpha, data)


def _tempered(layout: str, folder: str, epochs: int) -> tuple[Tensors, float]:
    unit = Tempered(module=mlp(4, 2, seed=0), layout=layout)
    ech.train(unit, _loader(), max_epochs=epochs, checkpoints=folder)
    return whole(unit.module), float(unit.log_alpha.detach())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_optimizer_of_a_parameter_outside_the_module(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    want, alpha = plain_temperature(2)
    ranks(2, _tempered, layout, str(tmp_path), 1)
    found = ranks(2, _tempered, layout, str(tmp_path), 2)
    assert_same([got for got, _ in found], want)
    assert [got for _, got in found] == pytest.approx([alpha] * 2, abs=1e-12)


# --- what is refused

YIELDS: dict[str, Any] = {
    "unknown names": lambda made: ((f"{name}s", loss) for name, loss in made),
    "a dict": dict,
    "no names": lambda made: (loss for _, loss in made),
    "nothing": lambda made: iter(()),
}
MAKES: dict[str, Any] = {
    "a plateau": lambda made: {**made, "critic": (made["critic"][0], ReduceLROnPlateau(made["critic"][0]))},
    "of a copy": lambda made: {**made, "critic": scheduled(networks())["critic"]},
    "a list": lambda made: [each for each, _ in made.values()],
}


class Wrong(Gan):
    how = ""

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return MAKES.get(self.how, lambda made: made)(super().configure_optimizers_and_lr_schedulers(module))

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        return YIELDS.get(self.how, lambda made: made)(super().compute_losses(state, data))


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("unknown names", {}, "got 'critics'; there are 'critic', 'generator'"),
        ("a dict", {}, "compute_losses must yield a name and a loss"),
        ("no names", {}, "compute_losses must yield the name of an optimizer"),
        ("nothing", {}, "must yield a loss in each batch"),
        ("a plateau", {}, "override step_lr_scheduler"),
        ("of a copy", {}, "must hold parameters of the module"),
        ("a list", {}, "a dict of pairs by name"),
        ("", {"precision": "fp16"}, "precision='fp16' must not be given with several optimizers"),
        ("", {"options": ech.UnitOptions(deterministic="bitwise")}, "must have one optimizer"),
    ],
)
def test_what_makes_no_update_is_refused_by_name(how: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        unit = type("Wrong", (Wrong,), {"how": how})(module=networks(), layout="none", **options)
        ech.train(unit, _loader(), max_updates=1)
    assert said in str(caught.value)


class HookedLate(Gan):
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
        return super().configure_optimizers_and_lr_schedulers(module)


def _hooked_late() -> str:
    return refusal(ech.train, HookedLate(module=networks(), layout="fsdp"), _loader(), max_updates=1)


def test_a_hook_that_torch_does_not_call_is_refused_with_several_optimizers_too(ranks: Ranks) -> None:
    """Gradients of shards were used as they were; with one optimizer it was said."""
    for said in ranks(2, _hooked_late):
        assert "is split over the ranks, and torch does not call its hook" in said


class ByRank(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        made = list(super().compute_losses(state, data))
        yield made[dist.get_rank()]


def _refused_on_ranks() -> None:
    with refused(RanksDisagreeError):
        ech.train(ByRank(module=networks(), layout="ddp"), _loader(), max_updates=1)
    with refused(LayoutError):
        Gan(module=networks(), layout="cp=2")


def test_ranks_that_yield_other_names_are_refused_on_all_and_so_is_a_layout_that_splits_sequences(ranks: Ranks) -> None:
    ranks(2, _refused_on_ranks)
