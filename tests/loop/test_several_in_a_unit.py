"""A unit with several optimizers: each steps on its own loss, in turn, as in plain PyTorch on the whole global batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import TensorDataset

import echelon as ech
from echelon.common.errors import RanksDisagreeError, UnitError, UsageError
from echelon.contracts.events import read_lines
from echelon.contracts.overrides import Overrides, impose
from tests.conftest import Ranks
from tests.kit.models import largest_difference
from tests.kit.models import whole as whole_of_one
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks

LAYOUTS = ["ddp", "fsdp", "zero1"]
CLIP = 0.05

Tensors = dict[str, torch.Tensor]


def whole(module: Any) -> Tensors:
    """By the names of plain PyTorch."""
    return {f"{name}.{inner}": value for name in module for inner, value in whole_of_one(module[name]).items()}


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def _networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"generator": _mlp(4, 2), "critic": _mlp(2, 1)})


def _data(samples: int = 25) -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(samples, width, generator=numbers, dtype=torch.float64) for width in (2, 4)))


def _loader(accumulation: int = 1, samples: int = 25) -> Any:
    return ech.Loader(_data(samples), global_batch=8, accumulate=accumulation, shuffle=False)


def _optimizers(module: nn.ModuleDict) -> dict[str, tuple[torch.optim.Optimizer, Any]]:
    made = {
        "critic": torch.optim.SGD(module["critic"].parameters(), 0.1, momentum=0.9),
        "generator": torch.optim.Adam(module["generator"].parameters(), 1e-2),
    }
    return {name: (each, torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5)) for name, each in made.items()}


class Gan(ech.AutoUnit[Any]):
    every = 1  # the generator steps in every so many updates

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return _optimizers(module)  # type: ignore[arg-type]

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        (real, noise), critic = data, self.module["critic"]  # type: ignore[index]
        made = self.module["generator"](noise)  # type: ignore[index]
        yield "critic", (softplus(-critic(real)) + softplus(critic(made.detach()))).mean()
        if self.train_progress.num_updates_completed % self.every == 0:
            yield "generator", softplus(-critic(made)).mean()


class Slow(Gan):
    every = 2


def _batches() -> Any:
    return zip(*(tensor.split(8) for tensor in _data().tensors), strict=True)


def _plainly(epochs: int = 1, every: int = 1) -> tuple[Tensors, list[float]]:
    """The weights, and the critic's losses."""
    module, losses = _networks(), []
    generator, critic = module["generator"], module["critic"]
    made = _optimizers(module)
    for update, (real, noise) in enumerate(batch for _ in range(epochs) for batch in _batches()):
        out = generator(noise)
        for name, (optimizer, scheduler) in made.items():
            if name == "generator" and update % every:
                continue
            if name == "critic":
                loss = (softplus(-critic(real)) + softplus(critic(out.detach()))).mean()
                losses.append(float(loss.detach()))
            else:
                loss = softplus(-critic(out)).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module[name].parameters(), CLIP)
            optimizer.step()
            scheduler.step()
    return whole(module), losses


def _trained(layout: str, kind: type[Gan] = Gan, loader: Any = None, epochs: int = 1, **options: Any) -> Tensors:
    unit = kind(module=_networks(), layout=layout, clip_grad_norm=CLIP)
    ech.train(unit, loader or _loader(), max_epochs=epochs, **options)
    made: Tensors = whole(unit.module)
    return made


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_optimizer_of_a_unit_steps_on_its_own_loss(ranks: Ranks, layout: str) -> None:
    want, _ = _plainly()
    for got in ranks(2, _trained, layout):
        assert largest_difference(got, want) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks_of_it"),
    [("tp=2", 2), ("hsdp", 4)],
)
def test_where_ranks_share_samples_or_layers(ranks: Ranks, layout: str, ranks_of_it: int) -> None:
    want, _ = _plainly()
    for got in ranks(ranks_of_it, _trained, layout):
        assert largest_difference(got, want) < 1e-12


def _with_cp() -> str:
    with pytest.raises(UsageError) as caught:
        Gan(module=_networks(), layout="cp=2")
    return str(caught.value)


@pytest.mark.full
def test_a_layout_that_splits_sequences_is_refused(ranks: Ranks) -> None:
    for text in ranks(2, _with_cp):
        assert "several optimizers must have a strategy" in text and "one with pp or cp" in text


def test_in_one_process_and_one_that_steps_every_other_update(ranks: Ranks) -> None:
    assert largest_difference(_trained("none"), _plainly()[0]) < 1e-12
    want, _ = _plainly(every=2)
    for got in ranks(2, _trained, "ddp", Slow):
        assert largest_difference(got, want) < 1e-12


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
    unit = Remembers(module=_networks(), layout=layout)
    ech.train(unit, ech.Loader(_data(), global_batch=12, accumulate=3, shuffle=False, tail="drop"), max_epochs=1)
    return whole(unit.module), unit.seen[:-1]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_accumulation_adds_up_each_optimizers_own_gradients(ranks: Ranks, layout: str) -> None:
    found = ranks(2, _accumulated, layout)
    module = _networks()
    generator, critic = module["generator"], module["critic"]
    made = _optimizers(module)
    for of_ranks in zip(*(seen for _, seen in found), strict=True):
        micros = [tuple(map(torch.cat, zip(*same, strict=True))) for same in zip(*of_ranks, strict=True)]
        assert len(micros) == 3
        total, old = sum(len(real) for real, _ in micros), copy.deepcopy(critic)
        # The generator's meets the critic of before its step in all but the last.
        for name, (optimizer, scheduler) in made.items():
            sums: dict[Any, torch.Tensor] = {}
            for real, noise in micros:
                out = generator(noise)
                loss = softplus(-critic(real)) + softplus(critic(out.detach()))
                if name == "generator":
                    loss = softplus(-(critic if real is micros[-1][0] else old)(out))
                of = list(module[name].parameters())
                for p, g in zip(of, torch.autograd.grad(loss.mean(), of), strict=True):
                    sums[p] = sums.get(p, 0) + g * (len(real) / total)
            for p, g in sums.items():
                p.grad = g
            optimizer.step()
            scheduler.step()
    want = whole(module)
    for got, _ in found:
        assert largest_difference(got, want) < 1e-12


# --- saved, averaged, evaluated, logged


def _stops(layout: str, folder: str, stop: int | None) -> Tensors:
    """Two epochs; `stop` ends it after so many updates, in the middle of an epoch."""
    unit = Gan(module=_networks(), layout=layout, clip_grad_norm=CLIP, ema=0.9)
    ech.train(
        unit,
        ech.Loader(_data(), global_batch=8, accumulate=2, seed=3),
        max_epochs=2,
        max_updates=stop,
        checkpoints=ech.Checkpoints(folder, every=1),
    )
    averages: Any = unit.swa_model
    with averages.applied():
        made = {f"average.{name}": value for name, value in whole(unit.module).items()}
    return {**made, **whole(unit.module)}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_stopped_in_mid_epoch_ends_with_the_same_bits(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    straight = ranks(2, _stops, layout, str(tmp_path / "a"), None)
    ranks(2, _stops, layout, str(tmp_path / "b"), 3)
    for got, want in zip(ranks(2, _stops, layout, str(tmp_path / "b"), None), straight, strict=True):
        assert largest_difference(got, want) == 0


@pytest.mark.full
def test_it_goes_on_with_fewer_ranks_and_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks(2, _stops, "ddp", str(tmp_path / "a"), None)[0]
    ranks(2, _stops, "fsdp", str(tmp_path / "b"), 3)
    (got,) = ranks(1, _stops, "ddp", str(tmp_path / "b"), None)
    assert largest_difference(got, straight) < 1e-12


def _averages(layout: str) -> Tensors:
    unit = Gan(module=_networks(), layout=layout, clip_grad_norm=CLIP, ema=ech.units.SWAParams(0, 1, ema_decay=0.5))
    ech.train(unit, _loader(), max_epochs=1)
    averages: Any = unit.swa_model
    with averages.applied():
        made: Tensors = whole(unit.module)
    return made


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_averages_of_all_networks_follow_each_update(ranks: Ranks, layout: str) -> None:
    module, average = _networks(), None
    made = _optimizers(module)
    for real, noise in _batches():
        out = module["generator"](noise)
        for name, (optimizer, scheduler) in made.items():
            critic = module["critic"]
            loss = softplus(-critic(real)) + softplus(critic(out.detach())) if name == "critic" else softplus(-critic(out))
            optimizer.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(module[name].parameters(), CLIP)
            optimizer.step()
            scheduler.step()
        now = {name: value.clone() for name, value in whole(module).items()}
        average = now if average is None else {name: 0.5 * value + 0.5 * now[name] for name, value in average.items()}
    for got in ranks(2, _averages, layout):
        assert largest_difference(got, average) < 1e-12


def _logs(folder: str) -> tuple[list[Any], float, float]:
    unit = Gan(module=_networks(), layout="ddp", clip_grad_norm=CLIP)
    run = ech.evidence.RunDir(Path(folder) / "run")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            run.at_attempt(0)
        for key, value in run.to_env().items():
            patch.setenv(key, value)
        ech.train(unit, _loader(), max_epochs=1, eval=_loader())
    records = list(read_lines(run.metrics))
    return records, float(unit.eval_loss), unit.optimizer_critic.param_groups[0]["lr"]


@pytest.mark.full
def test_each_loss_is_logged_and_evaluated_over_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, _logs, str(tmp_path))
    module, (weights, losses) = _networks(), _plainly()
    module.load_state_dict(weights)
    real, noise = _data().tensors
    critic, out = module["critic"], module["generator"](noise)
    of_critic, of_generator = (softplus(-critic(real)) + softplus(critic(out))).mean(), softplus(-critic(out)).mean()
    assert all(abs(loss - float((of_critic + of_generator).detach())) < 1e-9 for _, loss, _ in found)
    assert found[0][2] == 0.1 * 0.5 ** (4 // 2)
    records = found[0][0]
    updates = [record for record in records if "loss_critic" in record]
    assert [record["loss_critic"] for record in updates] == pytest.approx(losses, abs=1e-9)
    assert [record["loss"] for record in updates] == pytest.approx([r["loss_critic"] + r["loss_generator"] for r in updates])
    assert all(record["grad_norm_generator"] > 0 and record["lr_generator"] > 0 for record in updates)
    (evaluated,) = [record for record in records if "eval_loss_critic" in record]
    assert evaluated["eval_loss_critic"] == pytest.approx(float(of_critic.detach()), abs=1e-9)


# --- a batch that weighs nothing


class Filtered(Gan):
    def weight(self, data: Any) -> float | torch.Tensor:
        """Nothing in the second update; in the third, nothing on rank 1."""
        none = self.window.updates == 1 or (self.window.updates == 2 and dist.is_initialized() and dist.get_rank() == 1)
        return 0.0 if none else super().weight(data)


def _filtered(layout: str) -> tuple[Tensors, list[Any]]:
    unit = Filtered(module=_networks(), layout=layout, clip_grad_norm=CLIP)
    first: list[Any] = []
    unit.on_train_step_end = lambda state, data, step, results: first.append(data)  # type: ignore[method-assign]
    ech.train(unit, _loader(1, 24), max_epochs=1)
    return whole(unit.module), first


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_weighs_nothing_trains_nothing(ranks: Ranks, layout: str) -> None:
    found = ranks(2, _filtered, layout)
    first = [torch.cat(each) for each in zip(found[0][1][0], found[1][1][0], strict=True)]
    module = _networks()
    made = _optimizers(module)
    for real, noise in (first, found[0][1][2]):
        out = module["generator"](noise)
        for name, (optimizer, scheduler) in made.items():
            critic = module["critic"]
            loss = softplus(-critic(real)) + softplus(critic(out.detach())) if name == "critic" else softplus(-critic(out))
            optimizer.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(module[name].parameters(), CLIP)
            optimizer.step()
            scheduler.step()
    for got, _ in found:
        assert largest_difference(got, whole(module)) < 1e-12


# --- one loss, two optimizers


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(x).tanh())
        return out


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
    unit = OneLoss(module=_Regression(), layout=layout)
    ech.train(unit, _loader(2), max_epochs=1)
    made: Tensors = whole_of_one(unit.module)
    return made


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_all_optimizers_step_on_the_one_loss_of_a_unit_without_others(ranks: Ranks, layout: str) -> None:
    module = _Regression()
    made = _of_parts(module)
    for real, noise in _batches():
        mse_loss(module(noise), real).backward()
        for optimizer in made.values():
            optimizer.step()
            optimizer.zero_grad()
    for got in ranks(2, _one_loss, layout):
        assert largest_difference(got, whole_of_one(module)) < 1e-12


# --- an optimizer of what is no module's


class Tempered(ech.AutoUnit[Any]):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log_alpha = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return {"policy": torch.optim.SGD(module.parameters(), 0.1), "alpha": torch.optim.Adam([self.log_alpha], 0.1)}

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        error = (self.module(data[1]) - data[0]).square().mean(1)
        yield "policy", (self.log_alpha.exp().detach() * error).mean()
        yield "alpha", (self.log_alpha * (error.detach() - 1)).mean()


def _tempered(layout: str, folder: str, epochs: int) -> tuple[Tensors, float]:
    unit = Tempered(module=_Regression(), layout=layout)
    ech.train(unit, _loader(), max_epochs=epochs, checkpoints=folder)
    return whole_of_one(unit.module), float(unit.log_alpha.detach())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_an_optimizer_of_a_parameter_outside_the_module(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    module, log_alpha = _Regression(), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    made = [torch.optim.SGD(module.parameters(), 0.1), torch.optim.Adam([log_alpha], 0.1)]
    for real, noise in (batch for _ in range(2) for batch in _batches()):
        error = (module(noise) - real).square().mean(1)
        (log_alpha.exp().detach() * error).mean().backward()
        (log_alpha * (error.detach() - 1)).mean().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    ranks(2, _tempered, layout, str(tmp_path), 1)
    for got, alpha in ranks(2, _tempered, layout, str(tmp_path), 2):
        assert largest_difference(got, whole_of_one(module)) < 1e-12
        assert abs(alpha - float(log_alpha.detach())) < 1e-12


# --- fewer ranks than planned


def _of_four(layout: str) -> Tensors:
    impose(Overrides(planned_ranks=4))
    try:
        return _trained(layout)
    finally:
        impose(None)


@pytest.mark.full
def test_fewer_ranks_than_planned_train_the_same(ranks: Ranks) -> None:
    """In pieces of a micro-batch, a loss of the first would meet networks of before the steps."""
    want, _ = _plainly()
    for got in ranks(2, _of_four, "ddp"):
        assert largest_difference(got, want) < 1e-12


# --- what is refused


class OfACopy(Gan):
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return {**super().configure_optimizers_and_lr_schedulers(module), "critic": _optimizers(_networks())["critic"]}


class Unknown(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        for name, loss in super().compute_losses(state, data):
            yield f"{name}s", loss


class Returned(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        return dict(super().compute_losses(state, data))


class Unnamed(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        for _, loss in super().compute_losses(state, data):
            yield loss


class Silent(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        yield from ()


class ByRank(Gan):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        made = list(super().compute_losses(state, data))
        yield made[dist.get_rank()]


class Plateau(Gan):
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        made = super().configure_optimizers_and_lr_schedulers(module)
        return {**made, "critic": (made["critic"][0], torch.optim.lr_scheduler.ReduceLROnPlateau(made["critic"][0]))}


class Listed(Gan):
    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return [made for made, _ in super().configure_optimizers_and_lr_schedulers(module).values()]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Unknown, {}, "got 'critics'; there are 'critic', 'generator'"),
        (Returned, {}, "compute_losses must yield a name and a loss"),
        (Unnamed, {}, "compute_losses must yield the name of an optimizer"),
        (Silent, {}, "must yield a loss in each batch"),
        (Plateau, {}, "a step_lr_scheduler of your own"),
        (OfACopy, {}, "must hold parameters that the module has now"),
        (Listed, {}, "a dict of pairs by name"),
        (Gan, {"precision": "fp16"}, "precision='fp16' must be left out with several optimizers"),
        (Gan, {"options": ech.UnitOptions(deterministic="bitwise")}, "must have one optimizer"),
    ],
)
def test_what_makes_no_update_is_refused_by_name(kind: type[Gan], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        unit = kind(module=_networks(), layout="none", **options)
        ech.train(unit, _loader(), max_updates=1)
    assert said in str(caught.value)


class SharedGraph(OneLoss):
    def compute_losses(self, state: ech.State, data: Any) -> Any:
        out = self.module(data[1])
        yield "matrices", mse_loss(out, data[0])
        yield "rest", out.square().mean()


def test_losses_of_one_graph_are_told_to_be_yielded_together() -> None:
    with pytest.raises(RuntimeError) as caught:
        ech.train(SharedGraph(module=_Regression(), layout="none"), _loader(), max_updates=1)
    assert "the sum of both losses" in caught.value.__notes__[0]


def _by_rank(layout: str) -> str:
    unit = ByRank(module=_networks(), layout=layout)
    with pytest.raises(RanksDisagreeError) as caught:
        ech.train(unit, _loader(), max_updates=1)
    return str(caught.value)


def test_ranks_that_yield_other_names_are_refused_on_all(ranks: Ranks) -> None:
    for text in ranks(2, _by_rank, "ddp"):
        assert "the ranks must step the same optimizers in the same order" in text


def test_one_optimizers_method_is_still_asked_for() -> None:
    class Neither(ech.AutoUnit[Any]):
        def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
            raise NotImplementedError

    with refused(UnitError):
        Neither(module=_networks())  # type: ignore[abstract]
