"""The values given to `self.log`, combined over all ranks as those of `state.log` are: sums and weights first, means once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from echelon.common.errors import UsageError
from echelon.loop.records.logged import REDUCTIONS, one_number, reduced, total_of
from echelon.world import agree

__all__ = ["How", "Results", "meets"]

_ALIASES = {"avg": "mean", "amin": "min", "amax": "max"}

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
    prog_bar: bool
    logger: bool
    reduce: str
    sync_dist: bool
    rank_zero_only: bool

    @staticmethod
    def reduction(given: Any) -> str:
        """The name of a reduction that is given as a name, or as a function of torch or Python.

        Raises:
            UsageError: it is none of `REDUCTIONS`.
        """
        name = str(given if isinstance(given, str) else getattr(given, "__name__", given)).lower()
        name = _ALIASES.get(name, name)
        if name not in REDUCTIONS:
            raise UsageError(f"self.log: reduce_fx must be 'mean', 'sum', 'min' or 'max', got {given!r}. Log a metric object.")
        return name


class One:
    """One logged value on this rank: the latest number, and the epoch's total so far.

    Attributes:
        loaders: those of several in which it was logged.
        fresh: it was logged since the step's numbers were asked for.
    """

    def __init__(self, key: str, name: str, suffix: str, how: How) -> None:
        self.key, self.name, self.suffix, self.how = key, name, suffix, how
        self.metric: Any = None
        self.loaders: set[int] = set()
        self.latest: Any = None
        self.latest_weight, self.fresh = 1.0, False
        self.total = total_of(how.reduce)

    @property
    def form(self) -> list[Any]:
        """What ranks that have not logged the value need to know."""
        return [self.name, self.suffix, [*astuple(self.how)]]

    @classmethod
    def of(cls, key: str, name: str, suffix: str, options: list[Any]) -> One:
        return cls(key, name, suffix, How(*options))

    def add(self, value: Any, weight: float) -> None:
        number = one_number(self.name, value, "self.log")
        self.latest = number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=torch.float64)
        self.latest_weight, self.fresh = weight, True
        if self.how.on_epoch and weight:
            self.total.add(number, weight)

    def share(self) -> list[list[float]] | None:
        """This rank's parts of the epoch's number, for the other ranks; None if it has none."""
        nothing = self.total.value is None or (self.how.rank_zero_only and not agree.is_rank0())
        return None if nothing else self.total.share()

    def share_of_step(self) -> list[list[float]]:
        total = total_of(self.how.reduce)
        total.add(float(self.latest), self.latest_weight)
        return total.share()

    def result(self, shares: list[list[list[float]]]) -> torch.Tensor:
        return torch.tensor(total_of(self.how.reduce).result(*reduced(shares)), dtype=torch.float64)

    def so_far(self, *, step: bool) -> dict[str, torch.Tensor]:
        """This rank's number, by its names: of the step, or of the epoch so far. A metric object has none of the epoch."""
        share = self.share() if not step and self.metric is None else None
        value = self.latest if step else self.result([share]) if share is not None else None
        return dict.fromkeys(self.names(step=step), value) if value is not None else {}

    def names(self, *, step: bool) -> tuple[str, str]:
        """(its name; its name with "_step" or "_epoch" if it is logged for both)."""
        forked = f"{self.name}_{'step' if step else 'epoch'}" if self.how.on_step and self.how.on_epoch else self.name
        return self.name + self.suffix, forked + self.suffix


class Results:
    """What a phase has logged since its epoch began.

    Attributes:
        meets: in every step, ranks exchange what they log with `sync_dist`.
        dataloader_idx: the loader of the current batch, if there are several.
    """

    def __init__(self, phase: str) -> None:
        self.phase, self.meets = phase, False
        self.batch_size: Callable[[], float] | None = None
        self.dataloader_idx: int | None = None
        self._all: dict[str, One] = {}
        self._step: dict[str, tuple[One, torch.Tensor]] = {}

    def begin_batch(self, batch_size: Callable[[], float], dataloader_idx: int | None) -> None:
        self.batch_size, self.dataloader_idx, self._step = batch_size, dataloader_idx, {}
        for each in self._all.values():
            each.fresh = False

    def log(self, hook: str, name: str, value: Any, how: How, batch_size: float | None, *, add_idx: bool) -> One:
        """Add a value.

        Raises:
            UsageError: the same hook logged it with other options before; or a step's number must be combined over all ranks,
                which do not meet in this step.
        """
        if how.sync_dist and how.on_step and not (how.rank_zero_only or self.meets) and agree.is_joined():
            raise UsageError(f"self.log({name!r}, on_step=True, sync_dist=True): {_APART[self.phase == 'train']}")
        suffix = f"/dataloader_idx_{self.dataloader_idx}" if add_idx and self.dataloader_idx is not None else ""
        key = f"{hook}.{name}{suffix}"
        one = self._all.setdefault(key, One(key, name, suffix, how))
        if self.dataloader_idx is not None:
            one.loaders.add(self.dataloader_idx)
        if one.how != how:
            raise UsageError(f"self.log({name!r}, ...) is called twice in {hook} with different options.")
        if callable(getattr(value, "compute", None)):
            one.metric, one.latest, one.fresh = value, getattr(value, "_forward_cache", None), True
            return one
        weighs = how.reduce == "mean" and (how.on_epoch or how.sync_dist)
        if batch_size is None:
            batch_size = self.batch_size() if weighs and self.batch_size is not None else 1
        one.add(value, float(batch_size) if weighs else 1.0)
        return one

    def _over_ranks(self, shares: dict[str, Any]) -> list[tuple[One, list[Any], bool]]:
        """Values of any rank, with the shares of the ranks that have them, and whether all have. Collective."""
        every = agree.gather({key: [share, *self._all[key].form] for key, share in shares.items()})
        forms = {key: form for each in reversed(every) for key, (_, *form) in each.items()}
        values = []
        for key, form in forms.items():
            known = [each[key][0] for each in every if key in each]
            one = self._all.get(key) or One.of(key, *form)
            values.append((one, [share for share in known if share is not None], len(known) == len(every)))
        return values

    def of_step(self) -> list[tuple[One, torch.Tensor]]:
        """The step's numbers that the current batch has logged so far. Collective if `meets` is set."""
        fresh = [one for one in self._all.values() if one.fresh and one.how.on_step and one.latest is not None]
        shared = {one.key: one.share_of_step() for one in fresh if one.how.sync_dist and not one.how.rank_zero_only}
        self._step |= {one.key: (one, one.latest) for one in fresh}
        if self.meets and agree.any_rank(bool(shared)):
            self._step |= {one.key: (one, one.result(shares)) for one, shares, _ in self._over_ranks(shared)}
        for one in fresh:
            one.fresh = False
        return [*self._step.values()]

    def of_epoch(self) -> list[tuple[One, torch.Tensor]]:
        """The epoch's numbers over all ranks. Collective."""
        own = {key: "metric" if one.metric is not None else one.share() for key, one in self._all.items() if one.how.on_epoch}
        values: list[tuple[One, torch.Tensor]] = []
        for one, shares, everywhere in self._over_ranks(own):
            if "metric" in shares:
                if not everywhere:  # raised on all ranks, before the collective compute()
                    raise UsageError(f"self.log({one.name!r}, <metric>) was called on some ranks only; its value is all ranks'.")
                values.append((one, one.metric.compute().detach()))
            elif shares:
                values.append((one, one.result(shares)))
        return values

    def state(self, module: nn.Module) -> list[Any]:
        """The epoch's totals so far over all ranks, and which metric objects of the module were logged. Collective."""
        own = {key: one.share() for key, one in self._all.items() if one.how.on_epoch and one.metric is None}
        every = [(one, reduced(shares)) for one, shares, _ in self._over_ranks(own) if shares]
        paths = {id(part): path for path, part in module.named_modules()}
        objects = [one for one in self._all.values() if id(one.metric) in paths]
        totals = [[one.key, *one.form, *(torch.tensor(part, dtype=torch.float64) for part in parts)] for one, parts in every]
        return totals + [[one.key, *one.form, paths[id(one.metric)]] for one in objects]

    def load_state(self, state: list[Any], module: nn.Module) -> None:
        """Continue an epoch. Its totals so far, over all ranks, become rank 0's; a metric object has its own on each rank."""
        metrics = {path: part for path, part in module.named_modules() if hasattr(part, "compute")}
        for key, name, suffix, how, *value in state:
            one = One.of(key, name, suffix, how)
            if isinstance(value[0], str):
                one.metric = metrics.get(value[0])
            elif agree.is_rank0():
                one.total.restore(*(part.tolist() for part in value))
            if one.metric is not None or one.total.value is not None:
                self._all[key] = one

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
