"""A worker that trains by itself, and what happens when the workers meet. See `local_sgd`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import CheckpointCorruptError, LayoutError
from echelon.parallel.names import plain_buffers, plain_names
from echelon.parallel.state.optimizer_state import OptimizerState
from echelon.parallel.state.state import ModuleState
from echelon.world import agree

__all__ = ["OuterOptimizer", "Worker", "WorkerOptimizerState", "WorkerState"]

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# Numbers that are sent at once: their copy takes 64 MiB in float32.
_AT_ONCE = 2**24


class Worker(nn.Module):
    """A wrapper that computes what its module does.

    Args:
        module: with the same values on all ranks.
        layout: its name, for messages.
        every: updates between two meetings.
        outer: makes the outer optimizer; None takes the average.
    Attributes:
        optimizer: the worker's own.
        have_met: whether the workers have met after the latest update.
    """

    def __init__(self, module: nn.Module, layout: str, every: int, outer: OuterOptimizer | None) -> None:
        super().__init__()
        self.module, self.layout, self.every = module, layout, every
        self.optimizer: torch.optim.Optimizer | None = None
        self.have_met = False
        self._since = 0  # updates since the last meeting
        self._weight: Any = 0.0  # trained on since then
        self._weight_of_window: Any = 0.0
        self._own: dict[str, torch.Tensor] | None = None  # set aside while the common values are shown
        self._make_outer, self._anchor, self._outer = outer, dict[str, nn.Parameter](), None
        if outer is not None:
            trained = {n: p for n, p in plain_names(module) if p.requires_grad}
            self._anchor = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items()}
            self._outer = outer(list(self._anchor.values()))
            if not isinstance(self._outer, torch.optim.Optimizer):
                raise LayoutError(f"outer_optimizer must return a torch optimizer, got {type(self._outer).__name__}.")

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    # --- training

    def count(self, weight: Any) -> None:
        """A micro-batch of this weight is trained on."""
        self._weight_of_window = self._weight_of_window + weight

    def discard(self) -> None:
        self._weight_of_window = 0.0

    def stepped(self) -> None:
        """After an update. Collective when a meeting is due."""
        self._since += 1
        self._weight, self._weight_of_window = self._weight + self._weight_of_window, 0.0
        self.have_met = self._since >= self.every
        if self.have_met:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """All workers go on from common parameters. Collective. Does nothing if they have just done so."""
        self.show_own()
        if not self._since:
            return
        common = self._common(commits=True)
        for name, tensor in self._exchanged():
            tensor.copy_(common[name])
        self._since, self._weight = 0, 0.0

    def _exchanged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is trained, and buffers of floating-point numbers."""
        for name, parameter in plain_names(self.module):
            if parameter.requires_grad or name in self._anchor:
                yield name, parameter
        for name, buffer in plain_buffers(self.module):
            if buffer.is_floating_point() or buffer.is_complex():
                yield name, buffer

    @torch.no_grad()
    def _common(self, *, commits: bool) -> dict[str, torch.Tensor]:
        """What a meeting gives. Collective.

        Args:
            commits: it is one; else the outer optimizer stays as it is.
        """
        averages = _averages(dict(self._exchanged()), self._weight)
        if self._outer is None or self._make_outer is None:
            return averages
        anchor, outer = self._anchor, self._outer
        if not commits:
            anchor = {n: nn.Parameter(p.detach().clone()) for n, p in anchor.items()}
            outer = self._make_outer(list(anchor.values()))
            outer.load_state_dict(copy.deepcopy(self._outer.state_dict()))
        for name, parameter in anchor.items():
            parameter.grad = parameter.detach() - averages[name]
        outer.step()
        outer.zero_grad()
        return averages | {n: p.detach() for n, p in anchor.items()}

    # --- what others see

    @torch.no_grad()
    def show_common(self) -> None:
        """Until training goes on, the module has what a meeting would give. Collective."""
        if self._own is None and self._since:
            common = self._common(commits=False)
            self._own = {}
            for name, tensor in self._exchanged():
                self._own[name] = tensor.data
                tensor.data = common[name]

    @torch.no_grad()
    def show_own(self) -> None:
        """What the worker has of its own takes its place again."""
        own, self._own = self._own, None
        if own is not None:
            named = self._named()
            for name, tensor in own.items():
                named[name].data = tensor

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(plain_names(self.module)) | dict(plain_buffers(self.module))

    # --- state

    @torch.no_grad()
    def begin_here(self) -> None:
        """The module's values, which were loaded, are those of a meeting."""
        self._own, self._since, self._weight, self._weight_of_window = None, 0, 0.0, 0.0
        if self._make_outer is not None:
            named = self._named()
            for name, parameter in self._anchor.items():
                parameter.copy_(named[name])
            self._outer = self._make_outer(list(self._anchor.values()))

    def own_state(self) -> dict[str, Any]:
        """What this worker alone has, of plain values and tensors."""
        values = self._own if self._own is not None else dict(self._exchanged()) if self._since else {}
        optimizer = {} if self.optimizer is None else OptimizerState({"module": self}, self.optimizer).state_dict()
        return {
            "since": self._since,
            "weight": float(self._weight),
            "values": {name: tensor.detach() for name, tensor in values.items()},
            "optimizer": optimizer,
            "anchor": {name: p.detach() for name, p in self._anchor.items()} if self._since else {},
            "outer": {} if self._outer is None else self._outer.state_dict(),
        }

    @torch.no_grad()
    def load_own_state(self, saved: Any) -> None:
        """
        Raises:
            CheckpointCorruptError: it is nothing that `own_state` gives for such a module.
        """
        named = self._named()
        since, weight, values, anchor = _checked(saved, named)
        for name, tensor in values.items():
            named[name].copy_(tensor)
        for name, tensor in anchor.items():
            if name in self._anchor:
                self._anchor[name].copy_(tensor)
        self._since, self._weight = since, weight
        try:
            if self.optimizer is not None and saved["optimizer"]:
                OptimizerState({"module": self}, self.optimizer).load_state_dict(saved["optimizer"])
            if self._outer is not None and saved["outer"]:
                self._outer.load_state_dict(saved["outer"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise CheckpointCorruptError(f"the checkpoint holds a worker's optimizer that is not valid: {error!r}.") from None


class WorkerState(ModuleState):
    """The workers' common parameters and buffers, by name. Its methods are collective."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.module)
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        self._worker.show_common()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._worker.begin_here()


class WorkerOptimizerState(OptimizerState):
    """An optimizer's state, of which rank 0's counts: each worker has its own, which `Worker.own_state` gives."""

    @property
    def of_first_rank(self) -> list[str]:
        return [name for name, value in self.state_dict().items() if isinstance(value, torch.Tensor)]


Tensors = dict[str, torch.Tensor]


def _checked(saved: Any, named: Mapping[str, torch.Tensor]) -> tuple[int, float, Tensors, Tensors]:
    wanted = {"since": int, "weight": float, "values": dict, "optimizer": dict, "anchor": dict, "outer": dict}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(name), kind) for name, kind in wanted.items()):
        raise CheckpointCorruptError("the checkpoint holds a state of workers that is not valid.")
    since, weight = saved["since"], saved["weight"]
    if isinstance(since, bool) or since < 0 or not 0 <= weight < math.inf:
        raise CheckpointCorruptError(f"the checkpoint holds a worker with {weight} samples in {since} updates, which cannot be.")
    for part in ("values", "anchor"):
        for name, tensor in saved[part].items():
            living = named.get(name)
            if living is None or not isinstance(tensor, torch.Tensor) or tensor.shape != living.shape:
                raise CheckpointCorruptError(f"the checkpoint holds {name!r} of a worker, which does not fit this module.")
    return since, weight, saved["values"], saved["anchor"]


def _averages(tensors: Mapping[str, torch.Tensor], weight: Any) -> dict[str, torch.Tensor]:
    """The mean over all ranks, each with its weight, or plain if nobody has one. Collective."""
    if not agree.is_joined():
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    mine = torch.tensor([float(weight)], dtype=torch.float64)
    total = mine.clone()
    dist.all_reduce(total, group=agree.control_group())
    share = float(mine / total) if float(total) > 0 else 1 / dist.get_world_size()
    found: dict[str, torch.Tensor] = {}
    for names in _buckets(tensors):
        first = tensors[names[0]]
        precise = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        flat = torch.cat([tensors[name].detach().reshape(-1).to(precise) for name in names]).mul_(share)
        dist.all_reduce(flat)
        parts = flat.split([tensors[name].numel() for name in names])
        found |= {n: part.view(tensors[n].shape).to(first.dtype, copy=True) for n, part in zip(names, parts, strict=True)}
    return found


def _buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of tensors of one type, of which about `_AT_ONCE` numbers are sent together."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    for names in kinds.values():
        bucket, size = list[str](), 0
        for name in names:
            if bucket and size + tensors[name].numel() > _AT_ONCE:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += tensors[name].numel()
        yield bucket
