"""AutoUnit: precision, schedulers, recompute, compile, RNGs, wrapped modules, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import LayoutError, LoopError, LossError, NonFiniteError
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refused
from tests.kit.units import PARALLEL, Regression, under_each

pytestmark = pytest.mark.standing_ranks


def _step_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Overrides(Regression):
    def on_train_epoch_end(self, state: ech.State) -> None:
        pass  # without super()


def _rate_after(interval: str, layout: str | None = None) -> float:
    unit = Overrides(lr=1.0, layout=layout, schedule=_step_schedule, lr_interval=interval, accumulate=2)
    ech.train(unit, [batch(2, i) for i in range(4)], max_epochs=2)
    return float(unit.optimizer.param_groups[0]["lr"])


def test_schedulers_step_per_update_or_per_epoch() -> None:
    assert _rate_after("update") == 0.5**4  # two epochs of two updates
    assert _rate_after("epoch") == 0.5**2


def _with_a_head() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(net(), nn.Linear(1, 1).double())


def _norms_of_a_part(layout: str) -> list[float]:
    module = _with_a_head()
    unit = Regression(
        module=module, layout=layout, clip_grad_norm=0.05, optimizer=lambda module: torch.optim.SGD(module[1].parameters(), 0.1)
    )
    ech.train(unit, ech.Loader(list(zip(*batch(32, 0), strict=True)), global_batch=8), max_epochs=1)
    return unit.norms


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_gradients_that_no_optimizer_takes_do_not_add_up_from_update_to_update(ranks: Ranks, layout: str) -> None:
    """They did, and counted in the norm by which the others are clipped: another one on two ranks, and after a restart."""
    want = []
    module = _with_a_head()
    optimizer = torch.optim.SGD(module[1].parameters(), 0.1)
    for x, y in ech.Loader(list(zip(*batch(32, 0), strict=True)), global_batch=8):
        module.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        want.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        optimizer.step()
    for got in ranks(2, _norms_of_a_part, layout):
        assert got == pytest.approx(want, abs=1e-12)


def _alone() -> dict[str, torch.Tensor]:
    unit = Regression(layout="none")
    ech.train(unit, [batch(4, dist.get_rank())], max_epochs=1)
    return whole(unit.module)


def test_ranks_that_train_models_of_their_own_on_purpose_get_whole_gradients(ranks: Ranks) -> None:
    for rank, got in enumerate(ranks(2, _alone)):
        want, _, _ = plain_training([[batch(4, rank)]])
        assert largest_difference(got, want) < 1e-12


def _wrong_on_ranks() -> None:
    ddp = nn.parallel.DistributedDataParallel
    with refused(LoopError):  # no layout: each would train a model of its own; peers do so without a word
        ech.train(Regression(layout=None), [batch(4, 0)], max_epochs=1)
    with refused(LayoutError):  # of which a part is wrapped
        Regression(module=nn.Sequential(nn.Linear(4, 4), ddp(nn.Linear(4, 1))))
    with refused(LayoutError):  # of which all is
        Regression(module=ddp(net()), layout="fsdp")


def test_several_ranks_without_a_layout_and_with_one_for_a_wrapped_module_are_refused(ranks: Ranks) -> None:
    ranks(2, _wrong_on_ranks)


@pytest.mark.parametrize(("name", "value"), [("weight", 0.5), ("window", 3), ("prepared", None)])
def test_an_attribute_that_hides_autounits_is_named(name: str, value: Any) -> None:
    unit = Regression()
    setattr(unit, name, value)
    with refused(LoopError):
        ech.train(unit, [batch(2, 0)], max_epochs=1)


class CountsRows(Regression):
    seen = 0

    def on_eval_step_end(self, state: ech.State, data: Any, step: int, loss: Any, outputs: Any) -> None:
        self.seen += len(data[0])

    on_test_step_end = on_eval_step_end


def _rows_seen(entry: str) -> int:
    unit = CountsRows(layout="ddp")
    loader = ech.Loader(torch.utils.data.TensorDataset(*batch(5, 0)), 4, shuffle=False)
    getattr(ech if entry == "evaluate" else ech.units, entry)(unit, loader)
    return unit.seen


@pytest.mark.parametrize("entry", ["evaluate", "test"])
def test_hooks_see_each_sample_once_and_no_padding(ranks: Ranks, entry: str) -> None:
    assert sum(ranks(2, _rows_seen, entry)) == 5


def _unequal_start(layout: str) -> dict[str, torch.Tensor]:
    module = net(seed=dist.get_rank())
    return whole(Regression(module=module, layout=layout).module)


@pytest.mark.full
def test_models_that_were_seeded_apart_start_from_rank_0s(ranks: Ranks) -> None:
    want = {n: p.detach() for n, p in net(seed=0).named_parameters()}
    for started in ranks(2, under_each, PARALLEL, _unequal_start):
        assert {s: d for s, got in started.items() if (d := largest_difference(got, want))} == {}


def _in_the_older_fsdp() -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(net(dtype=torch.float32), device_id=torch.device("cpu"), use_orig_params=True)
    unit = Regression(module=module, accumulate=2, clip_grad_norm=0.5)
    ech.train(unit, [batch(4, 10 * dist.get_rank() + i, torch.float32) for i in range(3)], max_epochs=1)
    with FullyShardedDataParallel.summon_full_params(module):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.full
def test_a_module_in_the_older_fsdp_trains_just_as_well(ranks: Ranks) -> None:
    """In float32, as it computes its norm. Other wrappers are parallel/test_compilation.py's and test_over_ranks.py's."""
    rows = [[batch(4, 10 * r + i, torch.float32) for r in range(2)] for i in range(3)]
    want, _, _ = plain_training([rows[0] + rows[1], rows[2]], clip=0.5, module=net(dtype=torch.float32))
    assert largest_difference(ranks(2, _in_the_older_fsdp)[0], want) < 1e-6


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (out, out),
        lambda out: (out.mean().detach(), out),
        lambda out: (3.0, out),
        lambda out: out.mean(),  # without outputs
        None,  # of a module that is frozen as a whole, which is not blamed on detach()
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_named(loss: Any) -> None:
    class Odd(Regression):
        def compute_loss(self, state: ech.State, data: Any) -> Any:
            return loss(self.module(data[0])) if loss is not None else super().compute_loss(state, data)

    with refused(LossError):
        ech.train(Odd(module=net().requires_grad_(loss is not None)), [batch(2, 0)], max_epochs=1)


class _InTurn(Regression):
    """The same loss by `compute_losses`."""

    def compute_losses(self, state: ech.State, data: Any) -> Any:
        yield "all", self.compute_loss(state, data)[0]

    def configure_optimizers_and_lr_schedulers(self, module: nn.Module) -> Any:
        return {"all": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)}


def _of_one_element() -> list[float]:
    """What differs from plain PyTorch after training by a unit, one of several optimizers, and a loop of one's own."""

    def loss(module: Any, data: Any) -> torch.Tensor:
        out = module(data[0])
        return nn.functional.mse_loss(out, data[1]) + 0 * out[0]

    batches = [batch(3, i) for i in range(4)]
    want, *_ = plain_training([[b] for b in batches])
    units = [Regression(loss=loss), _InTurn(loss=loss)]
    for unit in units:
        ech.fit(unit, batches, batches, max_epochs=1)
    module: Any = net()
    rows = torch.utils.data.TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    parts = module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), torch.utils.data.DataLoader(rows, 3)
    model, optimizer, loader = ech.prepare(*parts, device=torch.device("cpu"))
    for data in loader:
        with ech.window(model) as window:
            optimizer.zero_grad()
            window.backward(loss(model, data))
        optimizer.step()
    assert isinstance(window.loss, torch.Tensor) and not window.loss.dim()
    return [largest_difference(whole(each), want) for each in (*(unit.module for unit in units), module)]


def test_a_loss_of_one_element_is_a_number(ranks: Ranks) -> None:
    """torch's own backward takes it, and `mean() + 0 * outputs[0]` is one in many a public script."""
    assert max(ranks(1, _of_one_element)[0]) < 1e-12


class NaNOnRank1(Regression):
    def compute_loss(self, state: ech.State, data: Any) -> Any:
        loss, out = super().compute_loss(state, data)
        if self.train_progress.num_steps_completed == 2 and ech.launching.World.current().rank == 1:
            loss = loss * float("nan")
        return loss, out


def _nan(layout: str) -> tuple[str, bool]:
    unit = NaNOnRank1(layout=layout, detect_anomaly=True)
    with pytest.raises(NonFiniteError) as caught:
        ech.train(unit, [batch(2, i) for i in range(5)], max_epochs=1)
    return str(caught.value), all(bool(p.isfinite().all()) for p in whole(unit.module).values())


@pytest.mark.full
def test_a_nan_on_one_rank_is_named_on_all_and_reaches_no_parameter(ranks: Ranks) -> None:
    for said in ranks(2, under_each, PARALLEL, _nan):
        for layout, (text, finite) in said.items():
            assert "update 2" in text and "rank 1: nan" in text and "rank 0" not in text, layout
            assert finite, layout


def test_a_unit_without_training_builds_no_optimizer() -> None:
    unit = Regression(training=False)
    assert "optimizer" not in unit.app_state()
    ech.evaluate(unit, [batch(2, 0)])
    with pytest.raises(AttributeError, match="built with training=False"):
        ech.train(unit, [batch(2, 0)], max_epochs=1)


def test_the_optimizer_is_built_once_over_the_final_module() -> None:
    class Counts(Regression):
        built = 0

        def __init__(self) -> None:
            super().__init__()
            self.optimizer = None  # type: ignore[assignment]
            self.rate = 0.25  # set after super().__init__(), used when the optimizer is built

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            assert module is self.module
            self.built += 1
            return torch.optim.SGD(module.parameters(), lr=self.rate), None

    unit = Counts()
    ech.train(unit, [batch(2, 0)], max_epochs=1)
    assert unit.built == 1 and unit.optimizer.param_groups[0]["lr"] == 0.25


def test_gradients_stay_for_hooks_when_they_are_cleared_at_the_start() -> None:
    unit = Regression(zero_grad_first=True)
    ech.train(unit, [batch(2, 0)], max_epochs=1)
    assert all(p.grad is not None for p in unit.module.parameters())
    other = Regression()
    ech.train(other, [batch(2, 0)], max_epochs=1)
    assert all(p.grad is None for p in other.module.parameters())


def _mean_of_metrics() -> tuple[float, float]:
    """In double, whatever the weights are."""
    mean, constant = ech.Mean(), ech.Mean()
    for i in range(3 - dist.get_rank()):
        mean.update(torch.tensor(100.0 if i == 0 and dist.get_rank() == 0 else 0.0))
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        for _ in range(300):
            constant.update(torch.ones(()), torch.tensor(100.0, dtype=kind))
    return mean.compute(), constant.compute()


def test_metrics_are_sums_over_counts_not_means_of_means(ranks: Ranks) -> None:
    """Lightning reports 1.25 for the constant and 33.3 for the mean."""
    assert ranks(2, _mean_of_metrics) == [(20.0, 1.0)] * 2


def test_auto_predict_unit_moves_and_predicts() -> None:
    outputs = []

    class Predicts(ech.units.AutoPredictUnit[torch.Tensor]):
        def on_predict_step_end(self, state: ech.State, data: Any, step: int, out: Any) -> None:
            outputs.append((step, tuple(out.shape)))

    ech.predict(Predicts(module=net(), options=ech.UnitOptions(device=torch.device("cpu"))), [batch(3, 0)[0], batch(2, 1)[0]])
    assert outputs == [(0, (3, 1)), (1, (2, 1))]


@pytest.mark.parametrize(
    "made",
    [
        lambda o, s: (o, {"scheduler": s, "interval": "step"}),
        lambda o, s: (o, {"scheduler": s}),
        lambda o, s: {"optimizer": o, "lr_scheduler": s},
        lambda o, s: ([o], [s]),
        lambda o, s: (o, [s]),
        lambda o, s: o,
        lambda o, s: (o, 0.1),
    ],
)
def test_what_lightning_returns_for_a_scheduler_is_answered_with_the_lines_to_write(made: Any) -> None:
    class Foreign(Regression):
        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            return made(*super().configure_optimizers_and_lr_scheduler(module))

    with refused(LoopError):
        ech.train(Foreign(schedule=_step_schedule), [batch(2, 0)], max_epochs=1)
