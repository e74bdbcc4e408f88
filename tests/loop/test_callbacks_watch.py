"""Callbacks that watch: what they write down, on which rank, and when."""

from __future__ import annotations

import io
import logging
from typing import Any

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
    summary = get_module_summary(net(), batch(2, 0)[:1])
    own = ech.module_summary(net(), *batch(2, 0)[:1])
    assert (summary.flops_forward, summary.module_type, summary.in_size) == (own.flops_forward // 2, own.kind, own.inputs)
    assert summary.submodule_summaries["first"].forward_elapsed_time_ms > 0
    prune_module_summary(summary, max_depth=2)
    assert [line.split()[0] for line in get_summary_table(summary).splitlines()[2:]] == ["first", "blocks", "last"]
    unknown = get_module_summary(net())
    assert (unknown.in_size, unknown.flops_backward, unknown.forward_elapsed_time_ms) == ("?", "?", "?")
    with pytest.warns(UserWarning, match="UninitializedParameter was found"):
        assert get_module_summary(nn.LazyLinear(2)).has_uninitialized_param


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
