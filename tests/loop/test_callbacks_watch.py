"""Callbacks that watch: what they write down, on which rank, and when."""

from __future__ import annotations

import io
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from torch import nn

import echelon as ech
from echelon.common.errors import CallbackError, UsageError
from echelon.compat.torchtnt.framework.callbacks import (
    ModuleSummary,
    TQDMProgressBar,
)
from echelon.compat.torchtnt.utils.loggers import InMemoryLogger
from echelon.compat.torchtnt.utils.module_summary import get_module_summary, get_summary_table, prune_module_summary
from echelon.loop.callbacks import LearningRateMonitor
from echelon.loop.callbacks.monitors import learning_rates
from echelon.parallel.state import partition
from echelon.world import rng
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.refusals import refused
from tests.kit.units import SEVERAL, Numbers, Regression, under_each

pytestmark = pytest.mark.standing_ranks

tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars, and stays


def logged(logger: InMemoryLogger, name: str) -> dict[int, float]:
    return {step: row[name] for step, row in logger.log_buffer.items() if name in row}


# --- learning rates


class TwoRates(Regression):
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        first, second, *rest = module.parameters()
        groups = [{"params": [first], "name": "bias", "lr": 0.5}, {"params": [second]}, {"params": rest, "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(("interval", "steps"), [("epoch", [0, 2]), ("step", [0, 1, 2, 3])])
def test_learning_rates_are_logged_by_group(interval: Any, steps: list[int]) -> None:
    loggers = [InMemoryLogger(), InMemoryLogger()]
    monitor = LearningRateMonitor(loggers, logging_interval=interval)
    unit = TwoRates(options=ech.UnitOptions(lr_interval="epoch"))
    ech.train(unit, [batch(2, i) for i in range(2)], max_epochs=2, callbacks=[monitor])
    for logger in loggers:
        rates = logged(logger, "optimizers/optimizer/bias:0")
        assert rates == {step: 0.5 if step < 2 else 0.25 for step in steps}
        assert [logged(logger, f"optimizers/optimizer/pg:{i}")[0] for i in range(2)] == [0.1, 0.2]
        assert logged(logger, "lr_schedulers/lr_scheduler/bias:0") == rates
    with refused(CallbackError):
        LearningRateMonitor(loggers, logging_interval="day")  # type: ignore[arg-type]


# --- progress


def _drawn() -> str:
    """Also of an epoch that is resumed in its middle: TorchTNT has no bar for it."""
    unit, file = Numbers(), io.StringIO()
    unit.train_progress.num_steps_completed = unit.train_progress.num_steps_completed_in_epoch = 3
    loaders = [ech.Loader(range(n), 1, options=ech.data.LoaderOptions(dp=(0, 1))) for n in (5, 2)]
    ech.fit(unit, *loaders, max_epochs=2, callbacks=[TQDMProgressBar(file=file, mininterval=0)])
    return file.getvalue()


def test_rank_0_draws_a_bar_for_each_epoch(ranks: Ranks) -> None:
    text, nothing = ranks(2, _drawn)
    last = [part.split("\r")[-1] for part in text.split("\n")]
    shown = [f"{line.split(':')[0]} {line.split('|')[2].split()[0]}" for line in last if line]
    assert shown == ["Train Epoch 0 5/5", "Eval Epoch 0 2/2", "Train Epoch 1 5/5", "Eval Epoch 1 2/2"] and nothing == ""
    first = [part for part in text.split("\n")[0].split("\r") if "|" in part]
    assert "| 3/5 " in first[0] and "| 4/5 " in first[1]


# --- summaries


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lazy = nn.BatchNorm1d(4), nn.LazyLinear(2)


def test_parameters_bytes_and_operations_are_counted() -> None:
    module = net(dtype=torch.float32)
    module.first.bias.requires_grad_(False)
    summary = get_module_summary(module, (torch.randn(3, 4),))
    first = summary.submodule_summaries["first"]
    assert (summary.module_name, summary.module_type, first.module_name, first.module_type) == ("", "Net", "first", "Linear")
    assert summary.num_parameters == sum(p.numel() for p in module.parameters())
    assert (first.num_parameters, first.num_trainable_parameters, first.size_bytes) == (40, 32, 160)
    assert first.flops_forward == 3 * 4 * 8 and first.flops_backward == 3 * 4 * 8  # its input has no gradient
    assert summary.flops_forward == 3 * (4 * 8 + 4 * 8 * 8 + 8) and summary.flops_backward == 2 * summary.flops_forward - 96
    blocks = summary.submodule_summaries["blocks"]
    assert blocks.flops_forward == 3 * 4 * 8 * 8 and blocks.in_size == "?"
    block = blocks.submodule_summaries["blocks.0"]
    assert block.submodule_summaries["blocks.0.3"].flops_backward == 0
    assert (first.in_size, first.out_size, block.out_size) == ([3, 4], [3, 8], [3, 8])
    assert 0 < first.forward_elapsed_time_ms < summary.forward_elapsed_time_ms  # type: ignore[operator]
    with pytest.warns(UserWarning, match="UninitializedParameter was found"):
        lazy = get_module_summary(Lazy(), (torch.ones(1, 4),))
    assert lazy.has_uninitialized_param and (lazy.num_parameters, lazy.size_bytes, lazy.flops_forward) == (8, 72, "?")


def test_looking_changes_nothing() -> None:
    class Draws(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random(), np.random.rand()
            return super().forward(x)

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Draws(0.5))
    module(torch.randn(3, 4)).sum().backward()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    gradients, streams = [p.grad for p in module.parameters()], rng.digest()
    values = [g.clone() for g in gradients if g is not None]
    get_module_summary(module, (torch.ones(3, 4),))
    assert rng.digest() == streams
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    assert all(p.grad is g and torch.equal(g, v) for p, g, v in zip(module.parameters(), gradients, values, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_modules_are_summarised_as_the_run_starts_in_a_table_to_their_depth(caplog: pytest.LogCaptureFixture) -> None:
    given: list[Any] = []
    inputs = {"module": ((batch(2, 0)[0],), {})}
    ech.train(Regression(), [batch(2, 0)], max_epochs=1, callbacks=[ModuleSummary(2, given.append, inputs)])
    assert list(given[0][0].submodule_summaries) == ["first", "blocks", "last"] and given[0][0].flops_forward > 0
    with caplog.at_level(logging.INFO, "echelon.compat.torchtnt.framework.callbacks"):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(max_depth=1)])
    assert "Net" in caplog.messages[0] and "first" not in caplog.messages[0]
    with refused(UsageError):
        ech.evaluate(Regression(), [batch(2, 0)], callbacks=[ModuleSummary(module_inputs={"model": ((), {})})])
    summary = get_module_summary(net(dtype=torch.float32))
    lines = get_summary_table(summary).splitlines()
    assert len(lines) == 14 + 2 and "Forward FLOPs" not in lines[0] and set(lines[1]) == {"-"}
    assert [cell.strip() for cell in lines[2].split(" | ")] == ["", "Net", "337", "337", "1.3 K", "No"]
    prune_module_summary(summary, max_depth=2)
    assert [line.split()[0] for line in str(summary).splitlines()[3:]] == ["first", "blocks", "last"]


def _summary_under(layout: str) -> tuple[int, int, float]:
    """Of the run's module: its parameters, its operations, and what looking at it changed in training."""
    given: list[Any] = []
    inputs = {"module": ((batch(2, 0)[0],), {})}
    trained = []
    for watching in ([ModuleSummary(process_fn=given.append, module_inputs=inputs)], []):
        unit = Regression(layout=layout)
        ech.train(unit, [batch(2, i) for i in range(3)], max_epochs=1, callbacks=watching)
        trained.append(whole(unit.module))
    return given[0][0].num_parameters, given[0][0].flops_forward, largest_difference(*trained)


@pytest.mark.full
@pytest.mark.parametrize("layouts", SEVERAL)
def test_a_summary_is_of_the_whole_module_and_changes_nothing_under_any_strategy(ranks: Ranks, layouts: list[str]) -> None:
    whole_module = get_module_summary(net(), batch(2, 0)[:1])
    for found in ranks(2, under_each, layouts, _summary_under):
        assert found == dict.fromkeys(layouts, (whole_module.num_parameters, whole_module.flops_forward, 0.0))


def _rates() -> list[str]:
    module = nn.Linear(64, 1)
    optimizer = torch.optim.SGD([{"params": [module.weight], "name": "w"}, {"params": [module.bias], "name": "b"}], lr=0.1)
    divided = partition.Partition(optimizer, None)
    assert divided.groups
    return sorted(learning_rates(optimizer, "o"))


def test_rates_of_groups_that_other_ranks_own_are_logged(ranks: Ranks) -> None:
    assert ranks(2, _rates) == [["o/b:0", "o/w:0"]] * 2
