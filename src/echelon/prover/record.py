"""Inside a rank: write down what training does, through torch's own hooks, without taking part in it.

Gradients are seen when an optimizer steps, parameters after the step, micro-batches when the unit gets them. Nothing of the
loop's own numbers is believed: the judge computes losses and means from the micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.contracts.errors import UsageError
from echelon.contracts.rank import RankInfo
from echelon.loop import unit as units
from echelon.loop.auto import AutoUnit
from echelon.loop.callback import Callback
from echelon.loop.loss import rows
from echelon.loop.state import ActivePhase, State
from echelon.prover.peak import PeakMemory
from echelon.prover.streams import Micro, digest, on_host, widened

__all__ = ["Enough", "RankRecord", "Recorder", "loss_in", "named_values", "parameters_of", "whole", "whole_parameters"]


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Enough(BaseException):
    """Ends a script when all updates that are compared have been seen. Not an Exception, so that no script swallows it."""


@dataclass
class RankRecord:
    """What one rank saw. `digests[k]` has checksums of what should be the same on all ranks at update k."""

    kind: str = ""
    rank: int = 0
    is_replica: bool = False
    overridable: bool = False
    has_plan: bool = False  # of tensor parallelism, the module's own
    loader: str = ""
    samples_by_rank: bool | None = None  # whether the loader has a sampler that knows of ranks; None: not a torch DataLoader
    global_batch: int | None = None
    initial_digests: dict[str, int] = field(default_factory=dict)
    updates: list[list[Micro]] = field(default_factory=list)
    gradient_digests: list[dict[str, int]] = field(default_factory=list)
    parameter_digests: list[dict[str, int]] = field(default_factory=list)
    buffer_digests: list[dict[str, int]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    held: set[str] = field(default_factory=set)  # parameters that some optimizer of this rank holds
    strangers: int = 0  # parameters in an optimizer that belong to no module of the unit
    trainable: set[str] = field(default_factory=set)
    flattened: bool = False  # in the older FullyShardedDataParallel: gradients cannot be seen whole
    batch_norms: list[str] = field(default_factory=list)
    dropouts: int = 0
    first_stream: int = 0  # checksum of the random stream before the first forward pass
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


def parameters_of(unit: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The unit's parameters under the names that their author gave them."""
    for prefix, module in _modules_of(unit):
        for name, parameter in module.named_parameters():
            yield prefix + plain_name(name), parameter


def whole_parameters(unit: Any) -> dict[str, torch.Tensor]:
    """All parameters, gathered, on the host. Collective if anything is sharded."""
    with contextlib.ExitStack() as gathered:
        for module in _flattened(unit):
            gathered.enter_context(FullyShardedDataParallel.summon_full_params(module, writeback=False))
        return {n: whole(p) for n, p in parameters_of(unit)}


def _flattened(unit: Any) -> list[nn.Module]:
    """Modules in the older FullyShardedDataParallel, whose parameters are parts of one flat tensor."""
    return [m for _, m in _modules_of(unit) if isinstance(m, FullyShardedDataParallel)]


def named_values(unit: Any) -> dict[str, torch.Tensor]:
    """Buffers by name."""
    return {prefix + plain_name(n): b for prefix, module in _modules_of(unit) for n, b in module.named_buffers()}


def _modules_of(unit: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(unit, AutoUnit):
        return [("", unit.prepared.plain)]
    modules = unit.tracked_modules()
    return [(f"{name}." if len(modules) > 1 else "", module) for name, module in modules.items()]


def _innermost(module: nn.Module) -> nn.Module:
    """Inside DistributedDataParallel, which sends its buffers round before it calls this."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def plain_name(name: str) -> str:
    """Without the prefixes of DistributedDataParallel, compile, checkpoint wrappers and the older FSDP."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    parts = [p for p in name.split(".") if p not in wrappers]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, gathered if it is sharded: collective then."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().cpu().clone()


class Recorder(Callback):
    """Watches one call of `train` or `fit`, and ends the script after `updates` optimizer updates.

    Args:
        folder: where the values go: rank 0 writes those that are whole, each rank its own micro-batches.
        dtype: of the comparison; batches are widened to it.
        every: gradients and parameters are gathered at updates 0, `every`, 2 x `every`, ... and the last.
    """

    may_stop = False

    def __init__(self, folder: Path, updates: int, dtype: torch.dtype, every: int = 1) -> None:
        self.folder, self.updates, self.dtype, self.every = folder, updates, dtype, every
        self.rank = RankInfo.from_env().rank
        self.record = RankRecord(rank=self.rank)
        self.memory = PeakMemory()
        self._unit: Any = None
        self._names: dict[int, str] = {}
        self._micros: list[Micro] = []
        self._grads: dict[str, torch.Tensor] = {}
        self._stepped = False
        self._norm: float | None = None
        self._began = self._spent = 0.0
        self._handle: Any = None

    # --- before training

    def attach(self, unit: Any, dataloader: Any) -> None:
        """Look at the unit before its first step, and listen from now on. Collective if anything is sharded."""
        if self._unit is not None:
            raise UsageError("the script trains more than once: only its first call of train or fit is compared.")
        if not isinstance(unit, units.TrainUnit):
            raise UsageError(f"{type(unit).__name__} is not a TrainUnit: there is no training to compare.")
        self._unit, record = unit, self.record
        record.kind = "AutoUnit" if isinstance(unit, AutoUnit) else "TrainUnit"
        record.is_replica = isinstance(unit, AutoUnit) and unit.prepared.is_replica
        record.has_plan = any(hasattr(_innermost(module), "tp_plan") for _, module in _modules_of(unit))
        record.loader = type(dataloader).__name__
        record.global_batch = getattr(dataloader, "global_batch", None)
        record.samples_by_rank = _samples_by_rank(dataloader)
        record.flattened = bool(_flattened(unit))
        record.trainable = {n for n, p in parameters_of(unit) if p.requires_grad}
        for prefix, module in _modules_of(unit):
            for name, inner in module.named_modules():
                if isinstance(inner, _BATCH_NORMS):
                    record.batch_norms.append(prefix + plain_name(name))
                if isinstance(inner, _DROPOUTS) and inner.p > 0:
                    record.dropouts += 1
                    if record.kind == "TrainUnit":  # nobody can repeat its draws in another process
                        inner.p = 0.0
        if isinstance(unit, AutoUnit):
            self._watch_auto(unit)
        else:
            self._watch_own(unit)
        for _, module in _modules_of(unit):
            _innermost(module).register_forward_pre_hook(self._before_forward)
        parameters = whole_parameters(unit)
        record.initial_digests = {n: digest(p) for n, p in parameters.items()}
        self._write("initial", parameters=parameters, buffers=self._buffers())
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _watch_auto(self, unit: AutoUnit[Any]) -> None:
        compute_loss, clip = unit.compute_loss, unit.prepared.clip_grad_norm_

        def watched_loss(state: State, data: Any) -> tuple[torch.Tensor, Any]:
            if state.active_phase is not ActivePhase.TRAIN:
                return compute_loss(state, data)
            data = widened(data, self.dtype, unit.device)
            stream = torch.get_rng_state()
            made = compute_loss(state, data)
            feed = state.train_state.feed if state.train_state is not None else None
            silent = record_is_replica or (feed is not None and feed.is_padding)
            self._take(data, 0.0 if silent else float(unit.weight(data)), made[0], stream, unit.train_progress)
            return made

        def watched_clip(*args: Any, **options: Any) -> torch.Tensor:
            norm = clip(*args, **options)
            self._norm = float(norm)
            return norm

        record_is_replica = self.record.is_replica
        unit.compute_loss = watched_loss  # type: ignore[method-assign]
        unit.prepared.clip_grad_norm_ = watched_clip  # type: ignore[method-assign]

    def _watch_own(self, unit: Any) -> None:
        step: Callable[..., Any] = unit.train_step
        if units.wants_iterator(step):
            raise UsageError(f"{type(unit).__name__}.train_step fetches its own batches from an iterator: prove cannot see them.")

        @functools.wraps(step)
        def watched_step(state: State, data: Any) -> Any:
            data = widened(data, self.dtype)
            stream = torch.get_rng_state()
            result = step(state, data)
            self._take(data, float(rows(data)), loss_in(result), stream, unit.train_progress)
            return result

        unit.train_step = watched_step

    def _take(self, data: Any, weight: float, loss: Any, stream: torch.Tensor, progress: Any) -> None:
        drew = not torch.equal(stream, torch.get_rng_state())
        if not self._micros and not self.record.updates:
            self.record.first_stream = digest(stream)
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float("nan")
        self._micros.append(Micro(on_host(data), weight, value, stream if drew else None, progress.num_epochs_completed))

    # --- during training

    def on_train_step_start(self, state: State, unit: Any) -> None:
        self._began = time.perf_counter()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Buffers as the module is about to use them: whatever synchronises them has done so by now."""
        if module.training and len(self.record.buffer_digests) == len(self.record.updates) and not self._micros:
            self.record.buffer_digests.append({n: digest(b) for n, b in named_values(self._unit).items()})

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        self.memory.pause()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        known = {id(p) for _, p in parameters_of(self._unit)}
        self.record.strangers += len(held - known)
        for name, parameter in parameters_of(self._unit):
            if id(parameter) in held:
                self.record.held.add(name)
            if parameter.grad is not None and self._looks and (not self._stepped or id(parameter) in held):
                self._grads[name] = whole(parameter.grad)
        self._stepped = True
        self.memory.resume()
        self._spent += time.perf_counter() - began

    @property
    def _looks(self) -> bool:
        k = len(self.record.updates)
        return (k % self.every == 0 or k == self.updates - 1) and not self.record.flattened

    def on_train_step_end(self, state: State, unit: Any) -> None:
        took = time.perf_counter() - self._began - self._spent
        self._spent = 0.0
        record = self.record
        if len(record.step_s) == len(record.updates):
            record.step_s.append(took)
        else:
            record.step_s[-1] += took
        if not self._stepped:
            return
        self.memory.pause()
        if self._looks or record.flattened:
            parameters = whole_parameters(unit)
            record.gradient_digests.append({n: digest(g) for n, g in self._grads.items()})
            record.parameter_digests.append({n: digest(p) for n, p in parameters.items()})
            name = f"update-{len(record.updates):03d}"
            self._write(name, gradients=self._grads, parameters=parameters, buffers=self._buffers())
        record.norms.append(self._norm)
        record.updates.append(self._micros)
        self._micros, self._grads, self._stepped, self._norm = [], {}, False, None
        self.memory.resume()
        if len(record.updates) == self.updates:
            raise Enough

    # --- after it

    def close(self) -> dict[str, Any]:
        """Write this rank's part; returns what fits into a message."""
        if self._handle is not None:
            self._handle.remove()
        self.record.peak_bytes = self.memory.peak()
        torch.save(vars(self.record), self.folder / f"rank{self.rank}.pt")
        return {"updates": len(self.record.updates), "kind": self.record.kind}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {n: whole(b) for n, b in named_values(self._unit).items()}

    def _write(self, name: str, **values: Any) -> None:
        if self.rank == 0:
            torch.save(values, self.folder / f"{name}.pt")


def loss_in(result: Any) -> Any:
    """The loss in what a train_step returned: the scalar itself, the first of a tuple, or under the key "loss"."""
    if isinstance(result, dict):
        return result.get("loss")
    if isinstance(result, (tuple, list)) and result:
        return result[0]
    return result


def _samples_by_rank(dataloader: Any) -> bool | None:
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    if not isinstance(dataloader, DataLoader):
        return None
    if isinstance(dataloader.dataset, IterableDataset):
        return True  # its own business
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    return any(isinstance(s, DistributedSampler) or hasattr(s, "rank") or hasattr(s, "num_replicas") for s in samplers)
