"""Inside a rank: record what training does, through torch's own hooks, without changing it.

Gradients are seen when an optimizer steps, parameters after the step, micro-batches when the unit gets them. The loop's own
numbers are not trusted: the judge computes losses and means from the micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from echelon.common.errors import ProveError
from echelon.data.loader import Loader
from echelon.loop import unit as units
from echelon.loop.agreements import seen_of
from echelon.loop.auto.auto import AutoUnit
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.callback import Callback
from echelon.loop.samples import rows
from echelon.loop.state import ActivePhase, State, step_under_way
from echelon.loop.validate import accumulation_of
from echelon.parallel.ddp.sync_batchnorm import HostSyncBatchNorm
from echelon.parallel.names import plain_name
from echelon.parallel.prepared import MicroBatch
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.shards import local
from echelon.prover.gradients import GradientWatch
from echelon.prover.micro import Micro, digest, widened
from echelon.prover.objects import Objects, own_modules
from echelon.prover.operators import ConstantDraws
from echelon.prover.pass_state import ABSENT, KeptState, Sources, digests_of, drawn_between, of_loop
from echelon.prover.reading import Reading, plan_of
from echelon.prover.records import RankRecord, StopLoop
from echelon.prover.values import (
    UnitKind,
    is_replica,
    loss_in,
    modules_of,
    named_values,
    number_in,
    owners_of,
    parameters_of,
    prepared_of,
    switch_off_dropout,
    whole,
    whole_parameters,
)
from echelon.world.init import rank_info

__all__ = ["StepRecorder"]

_SETS = re.compile(r"\b(?:set|frozenset|hash)\(|\{[^{}:]+\bfor\b")
_UNSEEDED = 2**31  # no script would choose it
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class StepRecorder(Callback):
    """Watches one call of `train` or `fit`, and ends the script after `updates` optimizer updates.

    Args:
        folder: rank 0 writes the whole values there, each rank its own micro-batches.
        dtype: of the comparison; batches are widened to it.
        draws: entered after `attach`, if one process could not repeat the ranks' draws.
    """

    may_stop = False

    def __init__(self, folder: Path, updates: int, dtype: torch.dtype, draws: ConstantDraws) -> None:
        self.folder, self.updates, self.dtype = folder, updates, dtype
        self.rank, self._draws = rank_info().rank, draws
        self.record = RankRecord(rank=self.rank)
        self._unit: Any = None
        self._gradients: GradientWatch | None = None
        self._micros: list[Micro] = []
        self._clipped: tuple[float, float] | None = None  # in this update: (norm, limit)
        self._sources: Sources | None = None
        self._loader: Any = None
        self._reading: Reading | None = None
        self._kept: KeptState | None = None
        self._streams_before: dict[str, Any] = {}  # as the pass under way began, like `_kept_before`
        self._kept_before: dict[str, Any] = {}
        self._kept_last: dict[str, Any] = {}
        self._kept_digests: dict[str, int] = {}  # of kept state, as the latest pass left it
        self._loop_digests: dict[str, int] = {}
        self._moved: set[str] = set()  # the paths that ever changed
        self._in_pass = self._was_scaled = False
        self.cannot_draw_constantly = False  # with compiled code
        self.may_draw = True

    def __deepcopy__(self, memo: Any) -> StepRecorder:
        """Itself: a module's hooks refer to it, and a copy of the module keeps these hooks."""
        return self

    # --- before training

    def attach(self, unit: Any, dataloader: Any, *, unseeded: set[str]) -> None:
        """Record the unit before its first step, and watch it from now on. Collective if anything is sharded.

        Args:
            unseeded: the global RNGs that the script did not seed itself.
        """
        if self._unit is not None:
            raise StopLoop  # the script trains again, after fewer updates than were asked for
        if not isinstance(unit, units.TrainedUnit):
            raise ProveError(f"the unit must be a TrainUnit, got {type(unit).__name__}.")
        objects = Objects(unit)
        self._unit, self._sources, self._loader = unit, Sources(objects), dataloader
        self.record.kind = kind = UnitKind.of(unit)
        self._describe(unit, dataloader)
        self.record.constant_draws |= self.record.rng_differs and self.may_draw
        self._unlike_others(unit, unseeded)
        if kind.is_loop:
            self._watch_loop(unit)
        elif kind is UnitKind.STEP:
            self._watch_own(unit)
        else:
            self._watch_auto(self._unit)
        if kind.draws_by_itself:
            self.record.dropouts = switch_off_dropout(unit)
        if self.record.constant_draws and self.cannot_draw_constantly:
            self.record.wants_constant_draws = True
            raise StopLoop
        for _, module in modules_of(unit):
            module.register_forward_pre_hook(self._before_forward)
        if self.dtype is not torch.float64 and any(p.dtype is torch.float64 for _, p in parameters_of(unit)):
            self.record.is_double = True
            raise StopLoop
        owners, parameters = owners_of(unit), whole_parameters(unit)
        self.record.owners = owners if not self.rank else {}
        self.record.initial_digests = {n: digest(p) for n, p in parameters.items()}
        self._write("initial", parameters=parameters, buffers=self._buffers())
        self._gradients = GradientWatch(unit, looks=not self.record.flattened)
        self._reading = Reading(dataloader, self.folder / f"reading{self.rank}.txt")
        self._kept = KeptState(objects)
        self._kept_last = self._kept.values()
        self._kept_digests = self.record.kept = digests_of(self._kept_last)

    def _unlike_others(self, unit: Any, unseeded: set[str]) -> None:
        """Give each rank its own state of the RNGs that the script does not seed, as ranks have without prove."""
        separates = UnitKind.of(unit).updates_are_ours  # echelon gives each rank an RNG state of its own
        number = unit.prepared.data.rank if separates else self.rank
        if not number:
            return
        if "torch" in unseeded and not separates:
            torch.manual_seed(int(torch.randint(2**62, ())) ^ number)
        if "numpy" in unseeded:
            np.random.seed(_UNSEEDED + number)
        if "python" in unseeded:
            random.seed(_UNSEEDED + number)

    def _describe(self, unit: Any, dataloader: Any) -> None:
        record = self.record
        record.is_replica = is_replica(unit)
        _place(record, unit)
        record.loader = type(dataloader).__name__
        record.accumulation = accumulation_of(unit, dataloader)
        record.global_batch = getattr(dataloader, "global_batch", None)
        if isinstance(dataloader, Loader):
            record.size, record.seen_of_data = len(dataloader.dataset), seen_of(dataloader)
        record.samples_by_rank = _samples_by_rank(dataloader)
        with contextlib.suppress(OSError, TypeError):  # a module without a source, as of an interpreter or a notebook
            record.hashes = any(_SETS.search(inspect.getsource(module)) for module in own_modules(unit))
        # Workers that train by themselves have gradients of their own.
        record.flattened = any(prepared.form.kind == "flat" or prepared.trains == "alone" for _, prepared in prepared_of(unit))
        types = [p.dtype for _, p in parameters_of(unit) if p.dtype in (torch.bfloat16, torch.float16)]
        record.narrow = str(types[0]).removeprefix("torch.") if types else ""
        for _, prepared in prepared_of(unit):
            self.computes_in(prepared.form.gathered_in)
        computes = unit.computes if UnitKind.of(unit).updates_are_ours else Precision()
        if computes.float8 is not None:
            record.half = "float8"
        if computes.dtype is None:
            gathered = [_HALVES[p.form.gathered_in] for _, p in prepared_of(unit) if p.form.gathered_in in _HALVES]
            record.gathers = gathered[0] if gathered else None
        record.trainable = {n for n, p in parameters_of(unit) if p.requires_grad}
        for prefix, module in modules_of(unit):
            for name, inner in module.named_modules():
                if isinstance(inner, _BATCH_NORMS):
                    record.batch_norms.append(f"{prefix}{plain_name(name)} ({type(inner).__name__})")
                    record.communicates |= isinstance(inner, (nn.SyncBatchNorm, HostSyncBatchNorm))

    def _watch_auto(self, unit: AutoUnit[Any]) -> None:
        def weight_of(state: State, data: Any) -> float:
            is_silent = float(state.logged.weight) == 0  # of the pass under way: padding, or a batch of weight 0
            return 0.0 if record_is_replica or is_silent else float(unit.weight(data))

        compute_loss = unit.compute_loss

        def watched_loss(state: State, data: Any) -> tuple[torch.Tensor, Any]:
            if state.active_phase is not ActivePhase.TRAIN or unit.prepared.batches.dry_run:
                return compute_loss(state, data)
            given, data = data, widened(data, self.dtype, unit.device)
            whole = wholes[id(given)][1] if id(given) in wholes else data
            self._begin_pass(whole)
            made = compute_loss(state, data)
            self._take(state, whole, weight_of(state, data), made[0])
            return made

        compute_losses = unit.compute_losses

        def watched_losses(state: State, data: Any) -> Generator[Any, None, Any]:
            if state.active_phase is not ActivePhase.TRAIN:
                return (yield from compute_losses(state, data))
            data, total = widened(data, self.dtype, unit.device), torch.zeros(())
            self._begin_pass(data)
            passes = compute_losses(state, data)
            while True:
                try:
                    names, loss = next(passes)
                except StopIteration as end:
                    outputs = end.value
                    break
                total = loss.detach() + total
                yield names, loss
            self._take(state, data, weight_of(state, data), total)
            return outputs

        wholes = self._watch_parts(unit)
        record_is_replica = self.record.is_replica
        if unit.has_several:
            unit.compute_losses = watched_losses  # type: ignore[method-assign]
        else:
            unit.compute_loss = watched_loss  # type: ignore[method-assign]
        self._watch_clipping(unit)

    def _watch_parts(self, unit: AutoUnit[Any]) -> dict[int, tuple[Any, Any]]:
        """By the id of this rank's part, (the part, its whole batch), for the update under way."""
        wholes: dict[int, tuple[Any, Any]] = {}  # keeps the part, so that its id stays unique
        prepared = unit.prepared
        if prepared.place.part[1] == 1:
            return wholes
        part_of, update = prepared.batches.part_of, 0

        def watched_part(batch: Any) -> Any:
            nonlocal update
            part = part_of(batch)
            if update != len(self.record.updates):
                wholes.clear()
                update = len(self.record.updates)
            wholes[id(part)] = part, widened(batch, self.dtype, unit.device)
            return part

        prepared.batches.part_of = watched_part  # type: ignore[method-assign]
        return wholes

    def _watch_loop(self, unit: Any) -> None:
        def given(data: Any) -> Any:
            data = widened(data, self.dtype, unit.device)
            self._begin_pass(data)
            if accumulated and accumulated != gradients() and self.record.changed_within is None:
                self.record.changed_within = len(self.record.updates)
            variables, known = of_loop(), self._loop_digests
            self._loop_digests = digests_of(variables)
            self._moved |= {n for n, each in self._loop_digests.items() if known.get(n, each) != each}
            self._kept_before.update(variables)
            return data

        def taken(state: State, data: Any, weight: Any, loss: Any) -> None:
            self._take(state, data, 0.0 if self.record.is_replica else float(weight), loss)

        def seeded(seed: Callable[..., None], *given: int) -> None:
            seed(*given)
            self._streams_before = self._states()

        goes_back: Any = unit.update if unit.several is None else unit.several
        original, discard, bitwise, accumulated = goes_back.backward, unit.update.discard, unit.update.bitwise, 0

        def backward(*given: Any, **options: Any) -> None:
            nonlocal accumulated
            original(*given, **options)
            micro_batch: MicroBatch[Any] = given[-1]
            accumulated = 0 if micro_batch.is_last else gradients()

        def left_out(*given: Any) -> None:
            discard(*given)
            self._micros.clear()

        def gradients() -> int:
            return digest([local(p.grad) for _, p in parameters_of(unit) if p.grad is not None])

        goes_back.backward, unit.given, unit.taken = backward, given, taken
        unit.update.discard = left_out
        if bitwise is not None:
            bitwise.begin = functools.partial(seeded, bitwise.begin)
        self._watch_clipping(unit)

    def _watch_clipping(self, unit: OptimizedUnit) -> None:
        clip = unit.prepared.clip_grad_norm_

        def watched_clip(max_norm: float, *args: Any, **options: Any) -> torch.Tensor:
            norm = clip(max_norm, *args, **options)
            self._clipped = float(norm), max_norm
            return norm

        unit.prepared.clip_grad_norm_ = watched_clip  # type: ignore[method-assign]

    def _watch_own(self, unit: Any) -> None:
        step: Callable[..., Any] = unit.train_step
        if units.wants_iterator(step):
            raise ProveError(f"{type(unit).__name__}.train_step fetches its own batches from an iterator: prove cannot see them.")

        @functools.wraps(step)
        def watched_step(state: State, data: Any) -> Any:
            data = widened(data, self.dtype)
            self._begin_pass(data)
            result = step(state, data)
            self._take(state, data, 0.0 if self.record.is_replica else float(rows(data)), loss_in(result))
            return result

        unit.train_step = watched_step

    def computes_in(self, dtype: torch.dtype | None) -> None:
        """Note a type in which the script computes, or a library for it."""
        if dtype in _HALVES and self.record.half not in ("bf16", "float8"):  # fewer digits stay
            self.record.half = _HALVES[dtype]

    def scales(self) -> None:
        """Note that a gradient scaler was made."""
        self.record.scaler = True

    def scaled(self) -> None:
        """Note that a gradient scaler has taken the optimizer's step, or skipped it."""
        self._was_scaled = True

    def warned(self, text: str) -> None:
        """Note the loop's warning about the loss's scale."""
        self.record.warned = text

    def communicated(self) -> None:
        """Note that the script has called a collective itself."""
        self.record.communicates |= self._in_pass

    def _begin_pass(self, data: Any) -> None:
        self._in_pass = True
        self._kept_before = self._kept_now()
        if self.record.constant_draws:
            assert self._sources is not None
            self._sources.pin()
            self._draws.begin(data)
        self._streams_before = self._states()

    def _kept_now(self) -> dict[str, Any]:
        """The kept state, searched once in each micro-batch; notes what has changed since the last one."""
        assert self._kept is not None
        values = self._kept.values()
        digests = digests_of(values)
        moved = {path for path, each in digests.items() if self._kept_digests.get(path) != each}
        for micro in (m for update in (*self.record.updates, self._micros) for m in update):
            micro.state.update({path: self._kept_last.get(path, ABSENT) for path in moved - self._moved})
        self._moved |= moved
        self._kept_digests, self._kept_last = digests, values
        return values

    def _states(self) -> dict[str, Any]:
        """The states of all RNGs. Once an update, also notes the modules in evaluation mode."""
        assert self._sources is not None
        if len(self.record.resting) == len(self.record.updates):
            self.record.resting.append(
                [prefix + plain_name(n) for prefix, m in modules_of(self._unit) for n, i in m.named_modules() if not i.training]
            )
        return self._sources.states()

    def _take(self, state: State, data: Any, weight: float, loss: Any) -> None:
        self._in_pass, before = False, self._streams_before
        assert self._kept is not None
        kept = {path: self._kept_before.get(path, ABSENT) for path in self._moved - self._kept.too_large}
        after = self._states()
        drawn = drawn_between(before, after)
        if not self.record.constant_draws:
            known = self.record.streams
            for name in drawn if not self.record.dropouts else {*drawn, "torch"}:
                known.setdefault(name, (digest(before[name]), digest(after[name])))
        scaler = getattr(self._unit, "grad_scaler", None)
        if scaler is not None and len(self.record.scales) == len(self.record.updates):
            self.record.scales.append(float(scaler.get_scale()))
        # Under a pipeline's schedule, all passes of an update run in its last step.
        is_own = UnitKind.of(self._unit) is UnitKind.STEP
        given = step_under_way(state.train_state).samples if is_own else self._unit.samples_given
        epoch = self._unit.train_progress.num_epochs_completed
        if UnitKind.of(self._unit).is_loop:
            self.record.reads_beside |= any(each.is_read_beside for each in self._unit.beside)
        self._micros.append(Micro.of(data, given, weight, number_in(loss), drawn, epoch, kept))

    # --- during training

    def on_eval_start(self, state: State, unit: Any) -> None:
        self.record.evaluates = True

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        if self.record.plan is None and not self.record.updates:
            self.record.plan = plan_of(self._loader)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Record buffers as the module is about to use them, after anything that synchronises them."""
        if module.training and len(self.record.buffer_digests) == len(self.record.updates) and not self._micros:
            self.record.buffer_digests.append({n: digest(b) for n, b in named_values(self._unit).items()})

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._draws.end()
        record, watch = self.record, self._gradients
        assert watch is not None
        gradients = watch.take()
        if gradients is None:
            if self._was_scaled or (UnitKind.of(unit).updates_are_ours and unit.at_boundary):  # the update was left out
                record.left_out += bool(self._micros)
                del record.scales[len(record.updates) :]
                self._begin_update()
            return
        parameters = whole_parameters(unit)
        loose = {} if record.flattened else {n: digest(local(p)) for n, p in watch.loose.items()}
        record.gradient_digests.append({n: digest(g) for n, g in gradients.items()} | (watch.loose_digests if loose else {}))
        record.parameter_digests.append({n: digest(p) for n, p in parameters.items()} | loose)
        name = f"update-{len(record.updates):03d}"
        self._write(name, gradients=gradients, parameters=parameters, buffers=self._buffers())
        norm, limit = self._clipped or (None, None)
        record.norms.append(norm)
        record.limits.append(limit)
        record.updates.append(self._micros)
        self._begin_update()
        if len(record.updates) == self.updates:
            raise StopLoop

    def _begin_update(self) -> None:
        self._micros, self._clipped, self._was_scaled = [], None, False

    # --- after it

    def close(self) -> dict[str, Any]:
        """Write this rank's record; returns a summary."""
        record = self.record
        if self._reading is not None:
            record.reading = self._reading.end()
        if self._gradients is not None:
            self._gradients.remove()
            record.held, record.strangers = self._gradients.held, self._gradients.strangers
            record.rates, record.attribute_digests = self._gradients.rates, self._gradients.attributes
            record.held_first = self._gradients.held_first
            record.owners.update(self._gradients.owners)
        record.wants_constant_draws |= record.rng_differs and not record.constant_draws and any(m.streams for m in record.micros)
        record.unknown_draw, record.by_sample = self._draws.unknown, self._draws.by_sample
        record.kinds, record.shapes = self._draws.kinds, self._draws.shapes
        torch.save(record, self.folder / f"rank{self.rank}.pt")
        return {"updates": len(record.updates), "kind": record.kind}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {n: whole(b) for n, b in named_values(self._unit).items()}

    def _write(self, name: str, **values: Any) -> None:
        if self.rank == 0:
            torch.save(values, self.folder / f"{name}.pt")
        elif not any(where for axis, where in self.record.place.items() if axis != "pp") and self.record.place:
            torch.save(values, self.folder / f"{name}.stage{self.record.stage[0]:03d}.pt")


def _place(record: RankRecord, unit: Any) -> None:
    for _, prepared in prepared_of(unit):
        record.part, record.stage = prepared.place.part, prepared.place.stage
        dims = getattr(prepared, "dims", None)
        if dims is not None:
            record.place = dims.place(record.rank)
        record.rng_differs |= prepared.place.rng_differs  # ranks that share samples: one process cannot repeat the draws of each


def _samples_by_rank(dataloader: Any) -> bool | None:
    if not isinstance(dataloader, DataLoader):
        return None
    if isinstance(dataloader.dataset, IterableDataset):
        return True  # it divides its samples itself
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    return any(isinstance(s, DistributedSampler) or hasattr(s, "rank") or hasattr(s, "num_replicas") for s in samplers)
