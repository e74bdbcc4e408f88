"""The reference: the user's loss and optimizer in plain PyTorch, one process, one forward pass over each global batch.

Nothing of echelon's loop, window, loader or strategies runs here. It is computed twice, in the precision of the
comparison and in float64: how far the two lie apart is what rounding alone does to each tensor, and that is what the
tolerance is made of. A unit with its own train_step may have wrapped its module in something that has float32 built in; for it
the second time is the same batch in reverse order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.contracts.errors import UsageError
from echelon.loop.auto import AutoUnit
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.prover.record import loss_in, named_values, parameters_of, whole, whole_parameters
from echelon.prover.streams import Micro, NotJoinable, join, widened

__all__ = ["Reference", "micros_in_order"]

Values = dict[str, torch.Tensor]


def micros_in_order(records: list[dict[str, Any]]) -> list[list[Micro]]:
    """The micro-batches of each update over all ranks: micro-batch by micro-batch, then rank by rank, without silent ones."""
    updates = min((len(r["updates"]) for r in records), default=0)
    merged = []
    for k in range(updates):
        longest = max(len(r["updates"][k]) for r in records)
        by_index = [[r["updates"][k][m] for r in records if m < len(r["updates"][k])] for m in range(longest)]
        merged.append([micro for same in by_index for micro in same if micro.weight > 0])
    return merged


class Reference:
    """Trains one unit on recorded micro-batches.

    Args:
        unit: as the script made it, on one process, with nothing made parallel.
        data: the files of all ranks of the row whose data it is.
        folder: where the values of each update go.
        dtype: of the comparison.
    """

    def __init__(self, unit: Any, data: list[Path], folder: Path, dtype: torch.dtype) -> None:
        self.unit, self.folder, self.dtype = unit, folder, dtype
        self.records = [torch.load(path, weights_only=False) for path in data]
        self.updates = micros_in_order(self.records)
        self.device = unit.device if isinstance(unit, AutoUnit) else torch.device("cpu")
        self.own_step = not isinstance(unit, AutoUnit)
        self.drew = any(m.stream is not None for u in self.updates for m in u) and not self.own_step
        self.joined = not self.drew
        self.held: set[str] = set()
        self.reverse = False
        self.seen: Values = {}  # gradients of the update under way, for a unit that steps by itself
        phase = PhaseState(dataloader=[])
        self.state = State(entry_point=EntryPoint.TRAIN, train_state=phase)

    def run(self, diagnose: int | None = None) -> dict[str, Any]:
        """Write the values of every update; with `diagnose`, return what mistakes would give at that update instead."""
        unit = self.unit
        parameters = dict(parameters_of(unit))
        modules = [unit.prepared.plain] if isinstance(unit, AutoUnit) else list(unit.tracked_modules().values())
        for module in modules:
            module.train()
            for inner in module.modules() if self.own_step else ():
                if isinstance(inner, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
                    inner.p = 0.0
        initial = {n: p.detach().clone() for n, p in parameters.items()}
        buffers = {n: b.detach().clone() for n, b in named_values(unit).items()}
        fresh = None if not self.own_step else copy.deepcopy([o.state_dict() for o in self._optimizers()])
        torch.save({"parameters": whole_parameters(unit), "buffers": _host(buffers)}, self.folder / "initial.pt")
        narrow = self._train(self.dtype, diagnose)
        if diagnose is not None:
            return narrow[-1]
        wide: list[dict[str, Any]] | None = None
        if self.dtype is not torch.float64:
            for module in modules if not self.own_step else ():
                module.double()
            with torch.no_grad():
                for name, parameter in parameters_of(unit):
                    parameter.copy_(initial[name])
                for name, buffer in named_values(unit).items():
                    buffer.copy_(buffers[name])
            for optimizer, saved in zip(self._optimizers(), fresh or [], strict=False):
                optimizer.load_state_dict(saved)
            if self.own_step:
                self.reverse = True
                wide = self._train(self.dtype, None)
            else:
                torch.set_default_dtype(torch.float64)
                wide = self._train(torch.float64, None)
        for k, values in enumerate(narrow):
            torch.save(_with_errors(values, wide[k] if wide else None), self.folder / f"update-{k:03d}.pt")
        return {"updates": len(narrow), "joined": self.joined, "drew": self.drew, "held": self.held}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.unit.tracked_optimizers().values()) if self.own_step else []

    # --- training

    def _train(self, dtype: torch.dtype, stop_at: int | None) -> list[dict[str, Any]]:
        self.unit.train_progress.num_steps_completed = 0
        return list(self._auto(dtype, stop_at) if not self.own_step else self._own(dtype, stop_at))

    def _auto(self, dtype: torch.dtype, stop_at: int | None) -> Iterator[dict[str, Any]]:
        unit: Any = self.unit
        module = unit.prepared.plain
        optimizer, scheduler = unit.configure_optimizers_and_lr_scheduler(module)
        self.held = {n for n, p in parameters_of(unit) if any(p is q for g in optimizer.param_groups for q in g["params"])}
        epoch = self.updates[0][0].epoch if self.updates else 0
        for k, micros in enumerate(self.updates):
            if unit.step_lr_interval == "epoch" and scheduler is not None and micros[0].epoch != epoch:
                scheduler.step()
            epoch = micros[0].epoch
            if k == stop_at:
                yield self._mistakes(k, dtype)
                return
            loss = self._backward(self._shares(micros), dtype)
            norm = self._clip(module)
            gradients = self._gradients()
            optimizer.step()
            optimizer.zero_grad()
            if unit.step_lr_interval == "step" and scheduler is not None:
                scheduler.step()
            unit.train_progress.num_steps_completed += 1
            yield self._values(loss, norm, gradients)

    def _shares(self, micros: list[Micro]) -> list[tuple[Any, float, Any]]:
        """(data, share of the mean, random stream). One piece for the whole global batch, unless random numbers were drawn."""
        if not self.drew:
            try:
                return [(join([m.data for m in micros]), 1.0, None)]
            except NotJoinable:
                self.joined = False
        total = sum(m.weight for m in micros)
        return [(m.data, m.weight / total, m.stream) for m in micros]

    def _backward(self, pieces: list[tuple[Any, float, Any]], dtype: torch.dtype) -> float:
        mean = 0.0
        for data, share, stream in pieces:
            if stream is not None:
                torch.set_rng_state(stream)
            loss, _ = self.unit.compute_loss(self.state, widened(data, dtype, self.device))
            (loss * share).backward()
            mean += float(loss.detach()) * share
        return mean

    def _clip(self, module: nn.Module) -> float | None:
        norm = None
        if self.unit.clip_grad_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), self.unit.clip_grad_norm))
        if self.unit.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), self.unit.clip_grad_value)
        return norm

    def _own(self, dtype: torch.dtype, stop_at: int | None) -> Iterator[dict[str, Any]]:
        """A unit's own `train_step`, given micro-batches joined over the ranks: it accumulates and steps as it likes."""
        seen = self.seen

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            held = {id(p) for g in optimizer.param_groups for p in g["params"]}
            self.held |= {n for n, p in parameters_of(self.unit) if id(p) in held}
            fresh = {n: p.grad for n, p in parameters_of(self.unit) if p.grad is not None}
            seen.update({n: whole(g) for n, g in fresh.items() if n not in seen})

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            for k, _ in enumerate(self.updates):
                steps = self._by_index(k)
                if k == stop_at:
                    yield self._mistakes(k, dtype)
                    return
                seen.clear()
                losses = []
                for same in steps:
                    batch = self._whole_batch([m.data for m in same])
                    result = self.unit.train_step(self.state, widened(batch, dtype, self.device))
                    loss = loss_in(result)
                    losses.append((float(loss) if isinstance(loss, torch.Tensor) else float("nan"), sum(m.weight for m in same)))
                    self.unit.train_progress.num_steps_completed += 1
                total = sum(w for _, w in losses)
                yield self._values(sum(v * w for v, w in losses) / total, None, dict(seen))
        finally:
            handle.remove()

    def _whole_batch(self, batches: list[Any]) -> Any:
        try:
            return join(batches[::-1] if self.reverse else batches)
        except NotJoinable as why:
            raise UsageError(
                f"{type(self.unit).__name__} steps by itself, and the micro-batches of the ranks cannot be joined into the one "
                f"batch that a single process would get ({why})."
            ) from why

    def _by_index(self, k: int) -> list[list[Micro]]:
        records = [r["updates"][k] for r in self.records]
        return [[r[m] for r in records if m < len(r)] for m in range(max(map(len, records)))]

    # --- what mistakes would give

    def _mistakes(self, k: int, dtype: torch.dtype) -> dict[str, Any]:
        """Loss and gradients of update k as they would be if the shares of the ranks were put together in other ways."""
        parts = list(self._parts_of_own(k, dtype) if self.own_step else self._parts_of_auto(k, dtype))
        total = sum(weight for _, weight, _, _ in parts)
        ways = {
            "weighted": [weight / total for _, weight, _, _ in parts],
            "unweighted": [1 / len(parts)] * len(parts),
            "summed": [1.0] * len(parts),
        }
        for rank in sorted({rank for rank, _, _, _ in parts}):
            own = sum(weight for r, weight, _, _ in parts if r == rank)
            ways[f"rank {rank} alone"] = [weight / own if r == rank else 0.0 for r, weight, _, _ in parts]
        mistakes = {way: self._combined(parts, shares) for way, shares in ways.items()}
        if not self.own_step:
            mistakes["best weights"] = self._combined(parts, self._best_shares(k, dtype, parts))
        return {"mistakes": mistakes}

    def _best_shares(self, k: int, dtype: torch.dtype, parts: list[tuple[int, float, float, Values]]) -> list[float]:
        """By least squares, the shares with which the parts come nearest to the right gradient."""
        right = self._right_gradients(k, dtype)
        each = torch.stack([torch.cat([g[n].double().flatten() for n in right if n in g]) for _, _, _, g in parts])
        goal = torch.cat([right[n].double().flatten() for n in right if n in parts[0][3]])
        if any(g.keys() != parts[0][3].keys() for _, _, _, g in parts):
            return [1 / len(parts)] * len(parts)
        shares: list[float] = torch.linalg.lstsq(each @ each.T, each @ goal).solution.tolist()
        return shares

    def _right_gradients(self, k: int, dtype: torch.dtype) -> Values:
        """Before clipping, of the whole batch."""
        self.unit.prepared.plain.zero_grad()
        self._backward(self._shares(self.updates[k]), dtype)
        gradients = self._gradients()
        self.unit.prepared.plain.zero_grad()
        return gradients

    def _parts_of_auto(self, k: int, dtype: torch.dtype) -> Iterator[tuple[int, float, float, Values]]:
        """(rank, weight, loss, gradients) of each micro-batch by itself."""
        module = self.unit.prepared.plain
        for record in self.records:
            for micro in record["updates"][k]:
                if micro.weight > 0:
                    module.zero_grad()
                    loss = self._backward([(micro.data, 1.0, micro.stream)], dtype)
                    yield record["rank"], micro.weight, loss, self._gradients()
        module.zero_grad()

    def _parts_of_own(self, k: int, dtype: torch.dtype) -> Iterator[tuple[int, float, float, Values]]:
        """The same for a unit that steps by itself: each rank's micro-batches are trained on, and that is taken back."""
        parameters = dict(parameters_of(self.unit))
        before = {n: p.detach().clone() for n, p in parameters.items()}
        saved = copy.deepcopy([o.state_dict() for o in self._optimizers()])
        for record in self.records:
            self.seen.clear()
            micros, losses = record["updates"][k], []
            for micro in micros:
                result = loss_in(self.unit.train_step(self.state, widened(micro.data, dtype, self.device)))
                losses.append(float(result) if isinstance(result, torch.Tensor) else float("nan"))
            yield record["rank"], sum(m.weight for m in micros), sum(losses) / len(losses), dict(self.seen)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(before[name])
            for optimizer, state in zip(self._optimizers(), saved, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))

    def _combined(self, parts: list[tuple[int, float, float, Values]], shares: list[float]) -> dict[str, Any]:
        names = parts[0][3].keys()
        gradients = {
            n: torch.stack([g[n] * share for (_, _, _, g), share in zip(parts, shares, strict=True) if n in g]).sum(0)
            for n in names
        }
        limit = getattr(self.unit, "clip_grad_norm", None)
        if limit is not None and not self.own_step:
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
            gradients = {n: g * factor for n, g in gradients.items()}
        loss = sum(value * share for (_, _, value, _), share in zip(parts, shares, strict=True))
        return {"loss": loss, "gradients": gradients}

    # --- values

    def _gradients(self) -> Values:
        return {n: whole(p.grad) for n, p in parameters_of(self.unit) if p.grad is not None}

    def _values(self, loss: float, norm: float | None, gradients: Values) -> dict[str, Any]:
        parameters = whole_parameters(self.unit)
        buffers = {n: whole(b) for n, b in named_values(self.unit).items()}
        return {"loss": loss, "norm": norm, "gradients": gradients, "parameters": parameters, "buffers": buffers}


def _host(values: Values) -> Values:
    return {n: whole(v) for n, v in values.items()}


def _with_errors(narrow: dict[str, Any], wide: dict[str, Any] | None) -> dict[str, Any]:
    """The values in the precision of the comparison, and how far from float64 they are."""
    if wide is None:
        return {**narrow, "errors": None}
    errors: dict[str, Any] = {
        kind: {n: (wide[kind][n].double() - v.double()).abs().float() for n, v in narrow[kind].items() if n in wide[kind]}
        for kind in ("gradients", "parameters", "buffers")
    }
    errors["loss"] = abs(wide["loss"] - narrow["loss"])
    errors["norm"] = abs(wide["norm"] - narrow["norm"]) if narrow["norm"] is not None else 0.0
    return {**narrow, "errors": errors}
