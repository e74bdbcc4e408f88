"""Numbers given to `state.log`: the user's own, reduced over all ranks, by rule of truth 2.

A mean weighs each value like its micro-batch in the loss, so it is the mean over the samples of the global batch, and the same
number however many ranks share them. Numbers of a training step are reduced with its update; those of an evaluation, and of a
TrainUnit with its own `train_step`, at the epoch's end.

The ranks compare what they log by a few numbers in a message that an update sends only if a rank logs: the sum of hashes of the
names, and the sum of their squares. If the hashes are equal, R times the sum of squares is the square of the sum. So an update
without logged numbers costs nothing, and one with logged numbers costs two small messages.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from echelon.checkpoint.strict import fits
from echelon.common.errors import LoggerError, RanksDisagreeError, require
from echelon.parallel.shards import whole
from echelon.world import agree

__all__ = ["NOBODY", "Logged", "Total", "one_number", "reduced", "total_of"]

R = TypeVar("R")

REDUCTIONS = ("mean", "sum", "min", "max")
NOBODY = (0.0, 0.0, 0.0, 0.0, 0.0)

# Names that records of metrics.jsonl use themselves.
_TAKEN = {"step", "update", "loss", "lr", "grad_norm", "time", "mfu", "eval_loss", "alloc_retries", "event"}
_TAKEN_ENDS = ("_per_s", "_per_s_per_device", "memory_bytes", "peak_bytes", "reserved_bytes")
_LONGEST = 100
_REMEDY = "Log the same names on all ranks in the same steps; on a rank where a value does not count, log it with weight=0."
_METRIC = "a metric"
_OF_A_METRIC = (
    "All ranks compute a metric together: log it on all of them; in a pipeline, in on_eval_step_end or on_train_step_end."
)


class Total:
    """One number so far: a sum, or a weighted sum and its weight."""

    def __init__(self, reduce: str) -> None:
        self.reduce = reduce
        self.value: Any = None
        self.weight: Any = 0.0

    def add(self, value: Any, weight: Any) -> None:
        if isinstance(weight, torch.Tensor):  # a value of weight 0, as of padding, must not count even if it is nan
            value = torch.where(weight == 0, 0.0, _on(weight.device, value))
        if self.reduce == "mean":
            value, self.weight = value * weight, self.weight + weight
        self.value = value if self.value is None else self.value + value

    def parts(self) -> tuple[list[Any], list[Any]]:
        """The numbers to sum over the ranks, and the numbers to take the maximum of."""
        value = 0.0 if self.value is None else self.value
        return ([value, self.weight] if self.reduce == "mean" else [value]), []

    def share(self) -> list[list[float]]:
        """This rank's parts, for a message."""
        return [list(map(float, parts)) for parts in self.parts()]

    def restore(self, sums: list[float], greatest: list[float]) -> None:
        """Continue from these parts."""
        self.value, self.weight = (*sums, 0.0)[:2]

    def result(self, sums: list[Any], greatest: list[Any]) -> Any:
        """The number from the reduced parts of all ranks, which are removed from the lists."""
        value = sums.pop(0)
        if self.reduce == "sum":
            return value
        weight = sums.pop(0)
        return value / weight if isinstance(weight, torch.Tensor) or weight else math.nan


_NOTHING, _NUMBER, _NAN = 0.0, 1.0, 2.0  # the maximum over the ranks tells what they have


class _Extreme(Total):
    """The maximum so far; or the minimum, for which all numbers are negated here. A nan stays."""

    def __init__(self, reduce: str) -> None:
        super().__init__(reduce)
        self._is_least = reduce == "min"

    def add(self, value: Any, weight: Any) -> None:
        value = -value if self._is_least else value
        if isinstance(weight, torch.Tensor):
            value = torch.where(weight == 0, -math.inf, _on(weight.device, value))
        self.weight = self.weight + (weight != 0)
        if self.value is None:
            self.value = value
        elif isinstance(value, torch.Tensor) or isinstance(self.value, torch.Tensor):
            device = value.device if isinstance(value, torch.Tensor) else self.value.device
            self.value = torch.maximum(_on(device, self.value), _on(device, value))
        else:
            self.value = value if math.isnan(value) else max(self.value, value)  # max keeps a nan in its first argument

    def parts(self) -> tuple[list[Any], list[Any]]:
        """Sends nan as -inf with a mark, because backends differ in the maximum of nan and a number."""
        value, weight = -math.inf if self.value is None else self.value, self.weight
        if not isinstance(value, torch.Tensor):
            return [], [-math.inf, _NAN] if math.isnan(value) else [value, _NUMBER if weight else _NOTHING]
        there = torch.where(value.isnan(), _NAN, (_on(value.device, weight) != 0).to(value))
        return [], [torch.where(value.isnan(), -math.inf, value), there]

    def restore(self, sums: list[float], greatest: list[float]) -> None:
        value, self.weight = greatest
        self.value = math.nan if self.weight == _NAN else value

    def result(self, sums: list[Any], greatest: list[Any]) -> Any:
        value, there = greatest.pop(0), greatest.pop(0)
        value = -value if self._is_least else value
        if isinstance(value, torch.Tensor):
            return torch.where(there == _NUMBER, value, math.nan)
        return value if there == _NUMBER else math.nan


def total_of(reduce: str) -> Total:
    return _Extreme(reduce) if reduce in ("min", "max") else Total(reduce)


def reduced(shares: Sequence[list[list[float]]]) -> tuple[list[float], list[float]]:
    """The parts of one number over the ranks that have shares in it."""
    sums, greatest = ([list(parts) for parts in zip(*each, strict=True)] for each in zip(*shares, strict=True))
    return [sum(parts) for parts in sums], [max(parts) for parts in greatest]


class Logged:
    """The logged numbers of a run, on this rank.

    Attributes:
        weight: the weight of a value in a mean: a number, or a 0-dim tensor.
        latest: the latest reduced numbers, by phase and name, the same on all ranks; for callbacks that monitor one.
        evaluated_at: training steps completed when the latest evaluation ended; None before the first.
        before: the run's latest numbers when the checkpoint was saved from which it goes on.
    """

    def __init__(self) -> None:
        self.weight: Any = 1.0
        self.latest: dict[str, dict[str, Any]] = {}
        self.evaluated_at: int | None = None
        self.before: dict[str, float] = {}
        self._takes_part: set[str] = set()  # phases in which this rank computes a loss, in the current update or evaluation
        self._totals: dict[str, dict[str, Total]] = {}  # by phase
        self._metrics: dict[str, dict[str, Any]] = {}
        self._settled: dict[str, Any] = {}

    def begins(self, weight: Any, phase: str = "train") -> None:
        """A micro-batch of this weight begins, and this rank computes its loss."""
        self.weight = weight
        self._takes_part.add(phase)

    def takes_part(self, phase: str) -> None:
        """This rank has samples in the phase, so it must log the same names as the other ranks."""
        self._takes_part.add(phase)

    def of_stage(self, prepared: Any, compute: Callable[..., R], *data: Any) -> R:
        """Call `compute(*data)`, a loss in a pipeline. A stage before the last, or a trial pass, logs nothing and does not make
        this rank take part.

        Args:
            prepared: its `batches.dry_run` tells a trial pass.
        """
        takes_part, metrics = set(self._takes_part), {phase: dict(each) for phase, each in self._metrics.items()}
        totals = {phase: {name: copy.copy(each[name]) for name in each} for phase, each in self._totals.items()}
        stays = False
        try:
            made = compute(*data)
            stays = not prepared.batches.dry_run
        finally:
            if not stays:
                self._takes_part, self._totals, self._metrics = takes_part, totals, metrics
        return made

    def add(self, phase: str, name: str, value: Any, weight: Any, reduce: str, *, may_be: str | None = None) -> None:
        """
        Args:
            may_be: a name that records use elsewhere, but not here.
        Raises:
            UsageError: a name that records use, several numbers at once, or another reduction than before.
        """
        _check_name(name, may_be)
        require(reduce in REDUCTIONS, "reduce", "'mean', 'sum', 'min' or 'max'", reduce, kind=LoggerError)
        if not isinstance(value, torch.Tensor) and callable(getattr(value, "compute", None)):
            self._metrics.setdefault(phase, {})[name] = value
            return
        value, weight = one_number(name, value), self.weight if weight is None else self._within(one_number(name, weight))
        total = self._totals.setdefault(phase, {}).setdefault(name, total_of(reduce))
        if total.reduce != reduce:
            raise LoggerError(f"reduce of state.log({name!r}) must be the same as before, {total.reduce!r}, got {reduce!r}.")
        if not isinstance(weight, torch.Tensor) and weight == 0:
            return  # the name counts as logged
        total.add(value, weight)

    def _within(self, weight: Any) -> Any:
        """A user's weight in a micro-batch; 0 if the micro-batch has no weight, as padding, or samples that a replica counts."""
        if isinstance(self.weight, torch.Tensor):
            return torch.where(self.weight == 0, 0.0, _on(self.weight.device, weight))
        return weight if self.weight else 0.0

    def signature(self) -> tuple[float, ...]:
        """For the message of an update: whether this rank logs, and two hashes of its names, each with its square."""
        names = sorted((name, total.reduce) for name, total in self._totals.get("train", {}).items())
        if not names:
            return NOBODY
        digest = hashlib.sha256(repr(names).encode()).digest()
        # 18 bits: float64 then holds the sum of squares of 2 ** 14 ranks exactly.
        a, b = (1 + int.from_bytes(digest[at : at + 4], "little") % ((1 << 18) - 1) for at in (0, 4))
        return 1.0, float(a), float(a * a), float(b), float(b * b)

    def end_window(self, shares: Sequence[float] | None, device: torch.device | None = None) -> None:
        """Reduce the numbers logged since the latest update. Collective if the update's message says that a rank has logged.

        Args:
            shares: the sum of all ranks' signatures, then the number of ranks; None if no message was sent.
            device: device on which to sum over the ranks without waiting; None is host memory.
        Raises:
            RanksDisagreeError: on every rank, with the names that each has logged.
        """
        if shares is None and not self._totals:  # the usual case
            self._takes_part.discard("train")
            self._settled = {}
            return
        totals, takes_part = self._totals.pop("train", {}), self._took_part("train")
        if shares is None:
            self._settled = _settle(totals, None, None) if totals else {}
            self.latest["train"] = {**self.latest.get("train", {}), **self._settled}
            return
        loggers, a, aa, b, bb, ranks = map(round, shares)
        if not loggers:
            self._settled = {}
        elif loggers == ranks and ranks * aa == a * a and ranks * bb == b * b:
            group = agree.control_group() if device is None else dist.group.WORLD
            self._settled = _settle(totals, group, device)
        else:
            self._settled = _gathered("they log in an update", totals, {}, takes_part=takes_part)
        if self._settled:
            self.latest["train"] = {**self.latest.get("train", {}), **self._settled}

    def end_phase(self, phase: str, *, together: bool) -> dict[str, float]:
        """Reduce the remaining numbers of a phase at an epoch's end. Returns them by name. Collective if `together`, or if this
        rank has logged some.

        Raises:
            RanksDisagreeError: on every rank, with the names that each has logged.
        """
        totals, metrics = self._totals.pop(phase, {}), self._metrics.pop(phase, {})
        takes_part, numbers = self._took_part(phase), {}
        together = together or bool(totals or metrics)  # in an evaluation without collectives, the ranks that log meet here
        what = f"was logged in the {phase} epoch"
        if together and (agree.unless_same(f"what {what}", sorted(_kinds(totals, metrics).items())) is not None or totals):
            numbers = _gathered(what, totals, metrics, takes_part=takes_part)
        for name in sorted(metrics):  # in the same order on all ranks: a metric's compute() is collective
            numbers[name] = float(metrics[name].compute())
            metrics[name].reset()
        self.latest[phase] = {**self.latest.get(phase, {}), **numbers}
        return numbers

    def _took_part(self, phase: str) -> bool:
        """Whether this rank took part. Resets it for the next update or epoch."""
        took_part = phase in self._takes_part
        self._takes_part.discard(phase)
        return took_part

    def state_dict(self, numbers: dict[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank has logged of the training epoch so far.

        Args:
            numbers: the run's latest numbers.
            metrics: the unit's, by attribute.
        """
        attributes = {id(metric): name for name, metric in metrics.items()}
        logged = {name: attributes.get(id(metric)) for name, metric in self._metrics.get("train", {}).items()}
        return {
            "numbers": numbers,
            "totals": {name: {total.reduce: total.share()} for name, total in self._totals.get("train", {}).items()},
            "metrics": {name: attribute for name, attribute in logged.items() if attribute is not None},
        }

    def load_state_dict(self, saved: dict[str, Any], metrics: Mapping[str, Any]) -> None:
        """Go on with the epoch. A metric that only the rest of the epoch would name is reduced, and begins anew, at its end.

        Raises:
            ValueError: `saved` is no state that this class writes.
        """
        if not fits(saved, {"numbers": {str: float}, "totals": {str: {str: [[float]]}}, "metrics": {str: str}}):
            raise ValueError("logged numbers of a checkpoint must be numbers, totals and metrics by name")
        self.before = saved["numbers"]
        for name, parts in saved["totals"].items():
            ((reduce, (sums, greatest)),) = parts.items()
            total = self._totals.setdefault("train", {})[name] = total_of(reduce)
            if reduce not in REDUCTIONS or list(map(len, total.share())) != [len(sums), len(greatest)]:
                raise ValueError(f"{name!r} of a checkpoint must be a {', '.join(REDUCTIONS)} with its parts, got {parts}")
            total.restore(sums, greatest)
        named = {name: metrics[attribute] for name, attribute in saved["metrics"].items() if attribute in metrics}
        if named:
            self._metrics["train"] = named

    @staticmethod
    def joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What this rank goes on with after a run of another number of ranks, each of which left a state to one of today's.
        Collective.

        Args:
            states: of `state_dict`, those that are left to this rank; perhaps none.
        """
        totals: dict[str, dict[str, list[Any]]] = {}
        for name, parts in ((name, parts) for each in states for name, parts in each["totals"].items()):
            for reduce, share in parts.items():
                totals.setdefault(name, {}).setdefault(reduce, []).append(share)
        known = [
            {**each, "totals": {name: next(iter(parts)) for name, parts in each["totals"].items()}}
            for of_rank in agree.gather(list(states))
            for each in of_rank
        ]
        joined: dict[str, Any] = {"numbers": {}, "totals": {}, "metrics": {}}
        for each in known:
            joined["numbers"] |= each["numbers"]
            joined["metrics"] |= each["metrics"]
            for name, reduce in each["totals"].items():
                shares = totals.get(name, {}).get(reduce)
                joined["totals"][name] = {reduce: list(reduced(shares)) if shares else total_of(reduce).share()}
        return joined

    def settled(self) -> dict[str, Any]:
        """Take the reduced numbers of the latest update: numbers, or 0-dim tensors on a device. A second call gives none."""
        settled, self._settled = self._settled, {}
        return settled

    def discard(self, phase: str = "train") -> None:
        """Forget the numbers logged in an unfinished update, or in an evaluation that was cut short."""
        self._totals.pop(phase, None)
        self._takes_part.discard(phase)


def _check_name(name: str, may_be: str | None) -> None:
    is_right = isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isprintable()
    require(is_right, "name", f"1 to {_LONGEST} characters that can be printed, on one line", name, kind=LoggerError)
    if name != may_be and (name in _TAKEN or name.endswith(_TAKEN_ENDS)):
        raise LoggerError(f"state.log: records of a run already have a number named {name!r}. Choose another name.")


def one_number(name: str, value: Any, call: str = "state.log") -> Any:
    """Convert to float64. A tensor on a device stays there, and nothing waits for it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise LoggerError(f"{call}({name!r}) must be given one number, got {value.numel()} of them. Log their mean or sum.")
        value = whole(value.detach()).reshape(())  # a number computed from a DTensor, such as a norm, may be one itself
        if value.device.type == "cpu":
            return float(value)
        return value.float() if value.device.type == "mps" else value.double()
    try:
        # NumPy refuses to convert an array with a dim, even of one number.
        return float(value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value)
    except OverflowError:
        raise LoggerError(f"{call}({name!r}) must be given a number that fits into a float, got a larger one.") from None
    except (TypeError, ValueError):
        raise LoggerError(f"{call}({name!r}) must be given a number or a metric, got a {type(value).__name__}.") from None


def _on(device: torch.device, value: Any) -> torch.Tensor:
    """A number as a tensor on the device, filled in there: a copy from the host would wait for all earlier kernels."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)


def _settle(totals: Mapping[str, Total], group: dist.ProcessGroup | None, device: torch.device | None) -> dict[str, Any]:
    """Reduce the numbers over the ranks of the group; without a group, of this rank alone. Returns them by name."""
    sums: list[Any] = []
    greatest: list[Any] = []
    for name in sorted(totals):
        more, most = totals[name].parts()
        sums += more
        greatest += most
    if group is not None:
        sums, greatest = _over(sums, dist.ReduceOp.SUM, group, device), _over(greatest, dist.ReduceOp.MAX, group, device)
    return {name: totals[name].result(sums, greatest) for name in sorted(totals)}


def _over(values: list[Any], op: Any, group: dist.ProcessGroup, device: torch.device | None) -> list[Any]:
    if not values:
        return []
    if device is None:
        host = torch.tensor([float(v) for v in values], dtype=torch.float64)
        dist.all_reduce(host, op=op, group=group)
        sums: list[Any] = host.tolist()
        return sums
    made = torch.stack([_on(device, v).double() for v in values])
    dist.all_reduce(made, op=op, group=group)
    return list(made.unbind())


def _kinds(totals: Mapping[str, Total], metrics: Mapping[str, Any]) -> dict[str, str]:
    """How each logged number is reduced, by name."""
    return {name: totals[name].reduce if name in totals else _METRIC for name in (*totals, *metrics)}


def _gathered(what: str, totals: Mapping[str, Total], metrics: Mapping[str, Any], *, takes_part: bool) -> dict[str, float]:
    """Like `_settle`, if some ranks may have logged nothing. Collective.

    Args:
        what: for the error, after "ranks disagree about what".
        takes_part: whether this rank computes a loss.
    """
    shares = {name: total.share() for name, total in totals.items()}
    shares_of_all = agree.gather([takes_part, _kinds(totals, metrics), shares])
    kinds = _agreed(what, [(part, kinds) for part, kinds, _ in shares_of_all])
    numbers: dict[str, float] = {}
    for name, reduce in sorted(kinds.items()):
        if reduce == _METRIC:
            continue
        of_ranks = [shares[name] for *_, shares in shares_of_all if name in shares]
        numbers[name] = float(total_of(reduce).result(*reduced(of_ranks)))
    return numbers


def _agreed(what: str, logged_by: Sequence[tuple[bool, dict[str, str]]]) -> dict[str, str]:
    """The names that the ranks have logged, with their reductions. Ranks that compute no loss, such as a pipeline's first stages,
    may have logged fewer.

    Args:
        logged_by: for each rank, whether it takes part, and what it has logged.
    Raises:
        RanksDisagreeError: the ranks have logged different names or reductions.
    """
    speaking = [kinds for part, kinds in logged_by if part] or [kinds for _, kinds in logged_by]
    metrics = {name for name, kind in speaking[0].items() if kind == _METRIC}
    alike = all(k == speaking[0] for k in speaking) and all(k.items() <= speaking[0].items() for _, k in logged_by)
    everywhere = all(metrics <= k.keys() for _, k in logged_by)
    if alike and everywhere:
        return speaking[0]
    same_names = all(set(kinds) == set(speaking[0]) for kinds in speaking)
    shown = []
    for rank, (_, kinds) in list(enumerate(logged_by))[:16]:
        names = [f"{name} ({kind})" if same_names else name for name, kind in sorted(kinds.items())]
        shown.append(f"rank {rank}: {', '.join(names) or 'nothing'}")
    rest = ", ..." if len(logged_by) > 16 else ""
    raise RanksDisagreeError(f"ranks disagree about what {what}: {', '.join(shown)}{rest}. {_OF_A_METRIC if alike else _REMEDY}")
