"""The values given to `self.log`, combined over all ranks: sums and weights are added up, means are divided once."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.world import agree

__all__ = ["How", "Numbers", "Results", "meets"]

REDUCTIONS = ("mean", "sum", "min", "max")

# Why a step's number cannot be combined over all ranks: in training, and elsewhere.
_APART = {
    True: "neither the module's file nor a callback's names sync_dist, so that ranks do not meet in a step. Write it there.",
    False: "ranks may have other numbers of batches here. Leave on_step out: an epoch's number is that of all ranks.",
}


@dataclass(frozen=True)
class How:
    """How a value is logged: the arguments of `self.log`, which must be the same in every call of one hook."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool = False
    logger: bool = True
    reduce: str = "mean"
    sync_dist: bool = False
    rank_zero_only: bool = False

    @staticmethod
    def reduction(given: Any) -> str:
        """The name of a reduction that is given as a name, or as a function of torch or Python.

        Raises:
            UsageError: it is none of `REDUCTIONS`.
        """
        name = str(given if isinstance(given, str) else getattr(given, "__name__", given)).lower()
        name = {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)
        if name not in REDUCTIONS:
            raise UsageError(f"self.log: reduce_fx must be 'mean', 'sum', 'min' or 'max', got {given!r}. Log a metric object.")
        return name


@dataclass
class Numbers:
    """Numbers by name: for callbacks, for loggers, for the progress bar."""

    callback: dict[str, torch.Tensor] = field(default_factory=dict)
    logged: dict[str, torch.Tensor] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)


class _One:
    """One logged value on this rank: the latest number, and the epoch's total so far."""

    def __init__(self, key: str, name: str, how: How, suffix: str) -> None:
        self.key, self.name, self.how, self.suffix = key, name, how, suffix
        self.metric: Any = None
        self.loaders: set[int] = set()  # those of several in which it was logged
        self.reset()

    def reset(self) -> None:
        self.latest: Any = None
        self.latest_weight: Any = 1
        self.fresh = False  # logged since the batch began
        self.total: Any = None
        self.weight: Any = 0
        self.dtype = torch.float32

    def add(self, value: torch.Tensor, weight: float) -> None:
        self.latest, self.latest_weight, self.fresh = value, weight, True
        if value.dtype == torch.float64:
            self.dtype = torch.float64
        if not self.how.on_epoch:
            return
        wide = value if value.device.type == "mps" else value.double()
        if self.how.reduce == "mean":
            if weight == 0:
                return
            self.total = wide * weight if self.total is None else self.total + wide * weight
            self.weight += weight
        elif self.total is None:
            self.total, self.weight = wide, 1
        elif self.how.reduce == "sum":
            self.total = self.total + wide
        else:
            self.total = torch.minimum(self.total, wide) if self.how.reduce == "min" else torch.maximum(self.total, wide)

    def share(self) -> list[float] | None:
        """This rank's [total, weight] of the epoch, for the other ranks; None if it has none."""
        if self.how.rank_zero_only and not agree.is_rank0():
            return None
        return None if self.total is None else [float(self.total), float(self.weight)]

    def so_far(self, *, step: bool) -> dict[str, torch.Tensor]:
        """This rank's number, by its names: of the step, or of the epoch so far. A metric object has none of the epoch."""
        share = self.share() if not step and self.metric is None else None
        value = torch.tensor(_together(self.how.reduce, [share]), dtype=self.dtype) if share is not None else None
        value = self.latest if step else value
        return dict.fromkeys(self.names(step=step), value) if value is not None else {}

    @property
    def form(self) -> list[Any]:
        """What ranks that have not logged the value need to know: name, suffix, options, its type."""
        return [self.name, self.suffix, list(vars(self.how).values()), self.dtype == torch.float64]

    @classmethod
    def of(cls, key: str, name: str, suffix: str, options: list[Any], is_double: bool) -> _One:
        one = cls(key, name, How(*options), suffix)
        one.dtype = torch.float64 if is_double else torch.float32
        return one

    @property
    def keeps(self) -> bool:
        """Whether its total of the epoch can be saved."""
        return self.how.on_epoch and self.metric is None

    def names(self, *, step: bool) -> tuple[str, str]:
        """(its name; its name with "_step" or "_epoch" if it is logged for both)."""
        forked = f"{self.name}_{'step' if step else 'epoch'}" if self.how.on_step and self.how.on_epoch else self.name
        return self.name + self.suffix, forked + self.suffix


def _together(reduce: str, shares: list[list[float]]) -> float:
    values = [value for value, _ in shares]
    if reduce in ("min", "max"):
        return min(values) if reduce == "min" else max(values)
    if reduce == "sum":
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    weight = sum(weight for _, weight in shares)
    return sum(values) / weight if weight else math.nan


class Results:
    """What a phase has logged since its epoch began.

    Args:
        training: callbacks also get a step's values.
    Attributes:
        meets: in every step, ranks exchange what they log with `sync_dist`.
    """

    def __init__(self, *, training: bool) -> None:
        self.training, self.meets = training, False
        self.batch_size: Callable[[], float] = lambda: 1
        self.dataloader_idx: int | None = None
        self._all: dict[str, _One] = {}
        self._step = Numbers()

    def begin_batch(self, batch_size: Callable[[], float], dataloader_idx: int | None) -> None:
        self.batch_size, self.dataloader_idx, self._step = batch_size, dataloader_idx, Numbers()
        for each in self._all.values():
            each.fresh = False

    def log(self, hook: str, name: str, value: Any, how: How, batch_size: float | None, *, add_idx: bool) -> _One:
        """Add a value.

        Raises:
            UsageError: the same hook logged it with other options before; or a step's number must be combined over all ranks,
                which do not meet in this step.
        """
        if how.sync_dist and how.on_step and not (how.rank_zero_only or self.meets) and agree.is_joined():
            raise UsageError(f"self.log({name!r}, on_step=True, sync_dist=True): {_APART[self.training]}")
        suffix = f"/dataloader_idx_{self.dataloader_idx}" if add_idx and self.dataloader_idx is not None else ""
        key = f"{hook}.{name}{suffix}"
        one = self._all.setdefault(key, _One(key, name, how, suffix))
        if self.dataloader_idx is not None:
            one.loaders.add(self.dataloader_idx)
        if one.how != how:
            raise UsageError(f"self.log({name!r}, ...) is called twice in {hook} with different options.")
        if callable(getattr(value, "compute", None)):
            one.metric, one.fresh = value, True
            one.latest = getattr(value, "_forward_cache", None)
            return one
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        tensor = tensor if tensor.is_floating_point() else tensor.float()
        needs = (how.on_epoch and how.reduce == "mean") or how.sync_dist
        weight = (batch_size if batch_size is not None else self.batch_size()) if needs else 1
        one.add(tensor.reshape(()), weight)
        return one

    def _over_ranks(self, shares: dict[str, Any]) -> list[tuple[_One, list[Any], bool]]:
        """Values of any rank, with the shares of the ranks that have them, and whether all have. Collective."""
        own = {key: [share, *self._all[key].form] for key, share in shares.items()}
        every = agree.gather(own) if agree.is_joined() else [own]
        forms = {key: form for each in reversed(every) for key, (_, *form) in each.items()}
        values = []
        for key, form in forms.items():
            known = [each[key][0] for each in every if key in each]
            values.append((self._all.get(key) or _One.of(key, *form), known, len(known) == len(every)))
        return values

    def of_step(self) -> Numbers:
        """The step's numbers that the current batch has logged so far. Collective if `meets` is set."""
        fresh = [one for one in self._all.values() if one.fresh and one.how.on_step and one.latest is not None]
        shared = {one.key: _share_of_step(one) for one in fresh if one.how.sync_dist and not one.how.rank_zero_only}
        met = self._over_ranks(shared) if self.meets and agree.any_rank(bool(shared)) else []
        together = {one.key for one, *_ in met}
        values = [(one, one.latest) for one in fresh if one.key not in together]
        values += [(one, torch.tensor(_together(one.how.reduce, shares), dtype=one.dtype)) for one, shares, _ in met]
        for one in fresh:
            one.fresh = False
        numbers, step = self._numbers(values, step=True), self._step
        step.callback |= numbers.callback
        step.logged |= numbers.logged
        step.bar |= numbers.bar
        return step

    def of_epoch(self) -> Numbers:
        """The epoch's numbers over all ranks. Collective."""
        own = {key: "metric" if one.metric is not None else one.share() for key, one in self._all.items() if one.how.on_epoch}
        values: list[tuple[_One, torch.Tensor]] = []
        for one, shares, everywhere in self._over_ranks(own):
            known = [share for share in shares if share is not None]
            if "metric" in shares:
                if not everywhere:  # raised on all ranks, before the collective compute()
                    raise UsageError(f"self.log({one.name!r}, <metric>) was called on some ranks only; its value is all ranks'.")
                values.append((one, one.metric.compute().detach()))
            elif known:
                values.append((one, torch.tensor(_together(one.how.reduce, known), dtype=one.dtype)))
        return self._numbers(values, step=False)

    def _numbers(self, values: list[tuple[_One, torch.Tensor]], *, step: bool) -> Numbers:
        numbers = Numbers()
        for one, value in values:
            name, forked = one.names(step=step)
            if one.how.logger:
                numbers.logged[forked] = value
            if self.training or not step:
                numbers.callback[name] = numbers.callback[forked] = value
            if one.how.prog_bar:
                numbers.bar[forked] = float(value)
        return numbers

    def state(self) -> list[Any]:
        """The epoch's totals so far over all ranks, without metric objects. Collective."""
        entries = []
        for one, each, _ in self._over_ranks({key: one.share() for key, one in self._all.items() if one.keeps}):
            if shares := [share for share in each if share is not None]:
                means = one.how.reduce == "mean"
                value = sum(value for value, _ in shares) if means else _together(one.how.reduce, shares)
                weight = sum(weight for _, weight in shares) if means else 1
                entries.append([one.key, *one.form, torch.tensor([value, weight], dtype=torch.float64)])
        return entries

    def load_state(self, state: list[Any]) -> None:
        """Continue an epoch. Its totals so far, over all ranks, become rank 0's."""
        for key, *form, total in state if agree.is_rank0() else ():
            one = self._all[key] = _One.of(key, *form)
            one.total, one.weight = total[0], float(total[1])

    def loaders_of(self) -> dict[str, set[int]]:
        """Name of an epoch's number -> the loaders, of several, in which this rank logged it; empty if it did so after them."""
        return {one.names(step=False)[1]: one.loaders for one in self._all.values()}

    def metrics(self) -> list[Any]:
        """The metric objects that were logged."""
        return [one.metric for one in self._all.values() if one.metric is not None]

    def reset(self) -> None:
        """Begin an epoch."""
        for metric in self.metrics():
            metric.reset()
        self._all.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)


def _share_of_step(one: _One) -> list[float]:
    weight = float(one.latest_weight) if one.how.reduce == "mean" else 1.0
    return [float(one.latest) * weight, weight]


def meets(objects: Iterable[Any]) -> bool:
    """Whether ranks exchange, in each training step, what they log with `self.log(..., sync_dist=True)`. Collective.

    A rank cannot know what others log, so either all exchange or none. They do if, on any rank, the source file of the class of
    one of these objects, or of its bases, contains `sync_dist`.
    """
    return agree.is_joined() and agree.any_rank(any(_names_it(cls) for each in objects for cls in type(each).__mro__))


def _names_it(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in ("builtins", "echelon", "torch"):
        return False
    try:
        return "sync_dist" in inspect.getsource(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):  # without a source file, as in an interpreter: it may
        return True
