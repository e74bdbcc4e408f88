"""What runs in the processes that prove starts: the user's script, with the recorder or the reference in place of `train`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import ProveError
from echelon.contracts.overrides import Overrides, impose
from echelon.loop.auto import loss_scale
from echelon.loop.callback import Callback
from echelon.loop.reporting.reporting import observing
from echelon.loop.target import Target
from echelon.parallel import over_ranks
from echelon.parallel.composed import Layout
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.layouts import LAYOUTS, in_words, resolve, with_options_of
from echelon.parallel.recipe.compilation import keeping_random
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
from echelon.prover.loop_reference import LockstepLoop, reference_of
from echelon.prover.matrix import Row
from echelon.prover.objects import is_library
from echelon.prover.operators import ConstantDraws, without_narrow_casts
from echelon.prover.pass_state import GLOBAL, Sources, drawn_between
from echelon.prover.recorder import StepRecorder
from echelon.prover.records import StopLoop, load_records
from echelon.prover.reference import How, Reference, Shake
from echelon.prover.values import UnitKind, prepared_of, widen
from echelon.prover.workarounds import (
    noting_autocast,
    noting_collectives,
    noting_compilation,
    noting_seeds,
    noting_warnings_of,
    scaling_losses,
    without_autocast,
)
from echelon.world import rng
from echelon.world.init import rank_info

__all__ = ["Replay", "RowLayout", "run_reference", "run_row"]


def run_row(target: Target, row: Row, folder: str, updates: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Run the target as `row` says, on this rank, and leave what it did in `folder`."""
    chosen = RowLayout(row, dtype) if row.layout is not None or row.yours else None
    compiled, precision = None if row.is_compiled else False, row.imposed_precision(wide=dtype is torch.float64)
    decided = Overrides(chosen, precision, row.accumulation, compiled, row.parts, observes=True)
    draws = ConstantDraws()
    recorder = StepRecorder(Path(folder), updates, dtype, draws)

    def watch(unit: Any, dataloader: Iterable[Any], callbacks: list[Callback]) -> list[Callback]:
        building.close()
        if chosen is not None:
            chosen.check()
        _adapt(unit, row)
        if row.yours and any(prepared.trains == "alone" for _, prepared in prepared_of(unit)):
            raise ProveError("workers that average now and then train other numbers than one process: nothing can be compared.")
        recorder.record.constant_draws = row.constant_draws
        draws.alike = row.drawn_alike
        draws.by_sample = row.constant_draws and not any(prepared.place.rng_differs for _, prepared in prepared_of(unit))
        recorder.cannot_draw_constantly, recorder.may_draw = row.is_compiled, row.draws
        unseeded = set(GLOBAL) - seeded
        recorder.record.drew_unseeded = (unseeded - {"torch"}) & drawn_between(began, Sources(None).states()).keys()
        recorder.attach(unit, dataloader, unseeded=unseeded)
        if recorder.record.constant_draws:
            head.enter_context(draws)
        if chosen is not None and chosen.used:
            record = recorder.record
            record.overridable, record.own_layout, record.is_own = True, chosen.own, chosen.is_own
            record.own_row = chosen.own_row
        # Without callbacks that save: a few updates are not worth keeping.
        return [*(c for c in callbacks if getattr(c, "saves", False) is not True), recorder]

    with contextlib.ExitStack() as head, contextlib.ExitStack() as building:
        seeded = head.enter_context(_deciding(decided, row, dtype, seed))
        began = Sources(None).states()
        if dtype is torch.float64 and row.compiles and compiled is None:  # its model and data are drawn as in float32, too
            building.enter_context(without_narrow_casts())
        head.enter_context(noting_collectives(recorder.communicated))
        head.enter_context(over_ranks.heard(recorder.communicated))
        head.enter_context(noting_warnings_of(loss_scale.logger, recorder.warned))
        head.enter_context(noting_autocast(recorder.computes_in))
        head.enter_context(noting_compilation(lambda: _compiles(recorder, row, head)))
        head.enter_context(scaling_losses(1.0, recorder.scales, recorder.scaled))
        head.enter_context(observing(watch))
        try:
            target.run()
        except StopLoop:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        return recorder.close()


def _compiles(recorder: StepRecorder, row: Row, head: contextlib.ExitStack) -> None:
    """Note that the script compiles. In its own row, compiled code then draws as uncompiled code does, which can be repeated."""
    if not recorder.record.compiles and row.is_compiled:
        import torch._inductor.config as inductor

        # Under a memory budget of torch's own, these draws would be recomputed with other numbers in the backward pass.
        head.enter_context(inductor.patch(fallback_random=True, joint_custom_post_pass=keeping_random()(None)))
    recorder.record.compiles = True


@dataclass(frozen=True)
class Replay:
    """Runs the target again, in this one process and in plain PyTorch, on what the ranks of a row recorded.

    Args:
        row: its optimizer is used.
        data: files of the ranks whose micro-batches it trains on.
        folder: for its files.
        compiled: compile as the script does; otherwise nothing is compiled.
        rescaled: the factor for the first scale of the script's own gradient scalers.
    """

    target: Target
    row: Row
    data: Sequence[str]
    folder: str
    dtype: torch.dtype
    seed: int
    compiled: bool = False
    rescaled: float = 1.0

    def with_reference(self, work: Callable[[Reference], dict[str, Any]], how: How, shake: Shake | None) -> dict[str, Any]:
        """Return what `work` returns for a reference of the target's unit."""

        draws, records = ConstantDraws(), load_records(self.data)

        def with_unit(unit: Any, dataloader: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
            reference = reference_of(unit, records, Path(self.folder), self.dtype, how, shake or Shake())
            reference.loader = dataloader
            reference.callbacks = [c for c in callbacks if getattr(c, "saves", False) is not True and _is_own(c)]
            reference.constant_draws, reference.restores = self.row.constant_draws, self.row.restores
            reference.joined = not self.row.apart
            draws.by_sample, draws.alike, reference.by_sample = records[0].by_sample, self.row.drawn_alike, draws
            return work(reference)

        ranks = sum(not record.is_replica for record in records)
        return self.instead_of_training(with_unit, torch.float64 if how == "wide" else self.dtype, draws, ranks)

    def instead_of_training(
        self,
        work: Callable[[Any, Any, Sequence[Callback]], dict[str, Any]],
        dtype: torch.dtype,
        draws: ConstantDraws | None = None,
        ranks: int | None = None,
    ) -> dict[str, Any]:
        """Run the target up to where it would train, and return what `work(unit, dataloader, callbacks)` does there.

        Args:
            ranks: how many ranks' batches make this process's global batch, if the script gives batches per rank: schedules
                depend on their number.
        """
        recorded: dict[str, Any] = {}
        turns: LockstepLoop | None = None
        head = contextlib.ExitStack()

        def work_and_end(unit: Any, dataloader: Iterable[Any], callbacks: list[Callback]) -> list[Callback]:
            nonlocal turns
            _adapt(unit, self.row)
            if self.row.constant_draws and turns is None:
                head.enter_context(draws or ConstantDraws())
            if not UnitKind.of(unit).is_loop:
                recorded.update(work(unit, dataloader, callbacks))
                raise StopLoop
            if turns is None:
                unit.reference = turns = LockstepLoop(lambda: recorded.update(work(unit, dataloader, callbacks)))
            return []

        precision, compiled = self.row.imposed_precision(wide=dtype is torch.float64), None if self.compiled else False
        decided = Overrides("noop", precision, 1, compiled, None, ranks, observes=True)
        # Smaller scales than on the ranks: what did not overflow there does not here.
        scaled = scaling_losses(self.rescaled / 16, lambda: None, lambda: None)
        with _deciding(decided, self.row, dtype, self.seed), scaled, observing(work_and_end), head:
            try:
                self.target.run()
            except StopLoop:
                return recorded
        what = self.target.script or "the functions"
        if turns is not None:
            raise ProveError(
                f"the loop of {what} ended in one process after {turns.given} batches, before it had trained on all that the "
                "ranks recorded. A loop that counts its batches by itself must count updates."
            )
        raise ProveError(f"{what} never called echelon's train, fit or prepare, so there is nothing to compare.")


def _is_own(callback: Callback) -> bool:
    return getattr(callback, "is_of_unit", False) or not is_library(type(callback).__module__)


def run_reference(
    replay: Replay,
    work: Callable[[Reference], dict[str, Any]] = Reference.run,
    how: How = "right",
    shake: Shake | None = None,
) -> dict[str, Any]:
    """Train the target's unit, or do other work with its reference. `how` and `shake`: see `prover/reference.py`."""
    return replay.with_reference(work, how, shake)


@contextlib.contextmanager
def _deciding(decided: Overrides, row: Row, dtype: torch.dtype, seed: int) -> Iterator[set[str]]:
    """Impose on a script what prove decides: `decided`, the default type, and the seeds of the global RNGs.

    Yields the global RNGs that the script has seeded itself so far.
    """
    before = torch.get_default_dtype()
    impose(decided)
    torch.set_default_dtype(dtype)
    rng.seed(seed if row.seeded_alike else seed + rank_info().rank)  # a script that seeds itself does so again
    torch.manual_seed(_torch_seed(seed))  # torch's RNG is the same in every process, unless the script seeds it
    seeded: set[str] = set()
    try:
        with contextlib.ExitStack() as head:
            head.enter_context(noting_seeds(seeded))
            if decided.precision == "fp32":
                head.enter_context(without_autocast())
            if decided.compile is False:
                head.enter_context(torch.compiler.set_stance("force_eager"))
            if dtype is torch.float64 and not (row.compiles and decided.compile is None):  # it would run uncompiled
                head.enter_context(without_narrow_casts())
            yield seeded
    finally:
        torch.set_default_dtype(before)
        impose(None)


def _torch_seed(seed: int) -> int:
    """One that no script would choose: so it shows whether the script seeds torch itself."""
    return (0xEC4E1011 << 31) + seed


def _adapt(unit: Any, row: Row) -> None:
    """Change a unit in the same way for rows and references."""
    if row.optimizer == "sgd":
        _with_sgd(unit, momentum=0.0 if row.workers else 0.9)
    if row.workers:  # each would clip its own gradient
        unit.clip_grad_norm = unit.clip_grad_value = None
    averages = getattr(unit, "swa_params", None)
    if averages is not None:  # averages do not change training, but their schedule of learning rates would
        unit.swa_params, unit.swa_scheduler = replace(averages, swalr_params=None), None


def _with_sgd(unit: Any, momentum: float) -> None:
    """Give an AutoUnit SGD over the groups of its own optimizer; learning rates and schedule stay."""
    several = UnitKind.of(unit) is UnitKind.LOSSES
    method = f"configure_optimizers_and_lr_scheduler{'s' if several else ''}"
    configure = getattr(unit, method, None)
    if configure is None:
        raise ProveError(f"{type(unit).__name__} makes its own optimizer, so it has no row with SGD.")

    def sgd_of(own: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, None]:
        groups = [{"params": group["params"], "lr": 0.1} for group in own.param_groups]
        return torch.optim.SGD(groups, lr=0.1, momentum=momentum), None

    def with_sgd(module: Any) -> Any:
        if not several:
            return sgd_of(configure(module)[0])
        return {name: sgd_of(made[0] if isinstance(made, tuple) else made) for name, made in configure(module).items()}

    setattr(unit, method, with_sgd)
    for made in (
        "optimizer",
        "lr_scheduler",
        "several",
    ):  # built already, by a script that looked at it or by TorchTNT's AutoUnit
        vars(unit).pop(made, None)


class RowLayout(Strategy):
    """The layout of a row; for the row `yours`, the script's. `used` tells afterwards whether it was applied: a module that a
    script wrapped by hand stays as it is.

    Attributes:
        own: the name of the script's layout.
        own_row: the name of the row with the same layout, since a row keeps the script's options.
        is_own: it is the script's layout, with all its options.
    """

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        self._row, self._given = row, resolve(row.layout)
        self._layout: Strategy = self._given or NOOPStrategy()
        self.name, self.own, self.own_row = self._layout.name, "", ""
        self.used, self.is_own, self._dtype = False, True, dtype
        self._names_one = False

    def __call__(self, own: Strategy | None) -> Strategy:
        """In place of the script's own layout."""
        own = own or NOOPStrategy()
        self._names_one |= not isinstance(own, NOOPStrategy)
        # Mixed precision is left out: of layouts that are compared, only the script's own has it.
        layout = own.but(mixed_precision=None) if isinstance(own, FSDPStrategy) else own
        self._layout = self._given or (layout if self._dtype is torch.float64 else own)
        if isinstance(self._row.layout, str):
            self._layout = with_options_of(layout, self._layout)
        self.name, self.own = self._layout.name, in_words(own)
        self.own_row = _row_of(own, layout) or self.own
        self.is_own = self.is_own and self._layout == layout
        return self

    def check(self) -> None:
        """Call it when training begins: only then has a Trainer given its layout to a unit that was made without one.

        Raises:
            UsageError: the row is the script's own, on several ranks, and the script names no layout.
        """
        if self._given is None and self.used and not self._names_one and rank_info().world_size > 1:
            raise ProveError("the script names no layout: it is for one process.")

    def prepare(self, module: Any, world: Any, recipe: Any) -> Prepared[Any]:
        self.used = True
        if self._dtype is torch.float64:
            widen(module)  # it may be in half precision
        return self._layout.prepare(module, world, recipe)


def _row_of(own: Strategy, layout: Strategy) -> str | None:
    """The name of the layout that equals the script's when it gets the script's options; None with mixed precision."""
    if isinstance(own, Layout):
        return own.text
    return next((word for word in LAYOUTS if with_options_of(layout, LAYOUTS[word]()) == own), None)
