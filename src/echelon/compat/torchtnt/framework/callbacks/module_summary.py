"""torchtnt.framework.callbacks.module_summary: a table of the unit's modules as a run starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils import module_summary
from echelon.loop.callback import Callback
from echelon.loop.state import EntryPoint, State
from echelon.world import agree

__all__ = ["ModuleSummary", "log_summaries"]

logger = logging.getLogger(__name__)

Summaries = list[module_summary.ModuleSummary]


def log_summaries(summaries: Summaries) -> None:
    """The tables, as INFO in rank 0's log."""
    if agree.is_rank0():
        for each in summaries:
            logger.info("\n%s", module_summary.get_summary_table(each))


class ModuleSummary(Callback):
    """Summarises every module of the unit, once as the run starts, on all ranks: modules may be split over them.

    Args:
        max_depth: 1 is the modules themselves; None shows all.
        process_fn: is given the summaries, on every rank; by default rank 0 logs them.
        module_inputs: {the module's attribute: (arguments, keyword arguments)}, for operations, shapes and times.
    """

    may_stop = False

    def __init__(
        self,
        max_depth: int | None = None,
        process_fn: Callable[[Summaries], None] = log_summaries,
        module_inputs: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None,
    ) -> None:
        if max_depth is not None and max_depth < 1:
            raise UsageError(f"max_depth {max_depth}: at least 1, or None.")
        self._max_depth, self._process_fn, self._inputs = max_depth, process_fn, dict(module_inputs or {})

    def on_train_start(self, state: State, unit: Any) -> None:
        modules = unit.tracked_modules()
        if unknown := sorted(self._inputs.keys() - modules.keys()):
            raise UsageError(f"module_inputs for {', '.join(unknown)}: the unit's modules are {', '.join(modules) or 'none'}.")
        summaries = []
        for name, module in modules.items():
            args, kwargs = self._inputs.get(name, (None, None))
            summary = module_summary.get_module_summary(module, args, kwargs)
            summary.module_name = name
            if self._max_depth is not None:
                module_summary.prune_module_summary(summary, max_depth=self._max_depth)
            summaries.append(summary)
        self._process_fn(summaries)

    def on_eval_start(self, state: State, unit: Any) -> None:
        if state.entry_point is not EntryPoint.FIT:
            self.on_train_start(state, unit)

    on_predict_start = on_test_start = on_train_start
