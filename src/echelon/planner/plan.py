"""A plan of a script or of two functions: memory and time of an update under each layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.common.errors import EchelonError, PlanError, RankFailedError, require
from echelon.common.numbers import number, whole
from echelon.launcher.functions.launch import launch
from echelon.loop.target import Target
from echelon.planner.bill import Bill, Goal, bill_lines, bill_of
from echelon.planner.devices import Cluster, bytes_of, device_named
from echelon.planner.memory import Answer, Setting, lines, plan_memory
from echelon.planner.page import page
from echelon.planner.search import search as searched

__all__ = ["Plan", "Spending", "plan", "plan_of", "setting_of"]

_PRECISIONS = ("fp32", "bf16", "fp16", "float8")


@dataclass(frozen=True)
class Spending:
    """The input of the bill of a whole training.

    Args:
        goal: an amount, such as "300B tokens".
        price: of a device for an hour.
        mtbf: hours between failures of a device.
        save_time: seconds for which a save stops training.
    """

    goal: str
    price: float | None = None
    mtbf: float | None = None
    save_time: float = 60.0


@dataclass(frozen=True)
class Plan:
    """A plan. `str()` gives the table.

    Args:
        setting: the devices.
        layouts: the script's own first; after a search the fastest first. Memory in bytes, times in seconds.
        left_out: after a search: layouts that do not fit, and why.
        bill: of the goal, with the first layout.
        goal: as it was given.
    """

    setting: Setting
    layouts: list[Answer]
    left_out: list[Answer]
    bill: Bill | None = None
    goal: str = ""

    @property
    def best(self) -> Answer | None:
        """The fastest layout that fits, or else the fastest that may fit; None if there is none."""
        order = {"fits": 0, "": 1, "at risk": 1}
        known = [each for each in self.layouts if each.peak and each.verdict in order]
        return min(known, key=lambda each: (order[each.verdict], -each.rate), default=None)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        bill = asdict(self.bill) if self.bill else None
        made = {"ranks": self.setting.ranks, "per_node": self.setting.per_node, "budget": self.setting.budget, "bill": bill}
        return made | {"layouts": [each.to_json() for each in (*self.layouts, *self.left_out)]}

    def to_html(self, title: str = "echelon plan") -> str:
        """A page that works offline: the table, memory by layout, and the update of the first few layouts over time."""
        return page(self.layouts, self.setting.budget or 0, str(self), title)

    def __str__(self) -> str:
        device = self.setting.device.name if self.setting.device else ""
        rows = lines([*self.layouts, *self.left_out], self.setting.ranks, device, self.setting.budget)
        return "\n".join([*rows, *(bill_lines(self.bill, self.goal, self.layouts[0].layout) if self.bill else [])])


def setting_of(
    gpus: int | None = None,
    nodes: int | None = None,
    device: str | None = None,
    cluster: str | None = None,
    budget: str | None = None,
    precision: str | None = None,
    shapes: Mapping[str, int] | None = None,
) -> Setting:
    """Where a script would train; see `plan`."""
    for line, count in (shapes or {}).items():
        require(re.fullmatch(r".+:[0-9]+", line) is not None, "shapes", "of lines, such as train.py:8", line, kind=PlanError)
        whole(f"shapes[{line!r}]", count, at_least=1, kind=PlanError)
    require(precision in (None, *_PRECISIONS), "precision", f"one of {', '.join(_PRECISIONS)}", precision, kind=PlanError)
    alone = gpus is None and nodes is None and device is None
    require(alone or not cluster, "cluster", "given without gpus, nodes and device, which it says", cluster, kind=PlanError)
    all_of_it = Cluster.of(cluster) if cluster else None
    chosen = all_of_it.device if all_of_it else device_named(device) if device else None
    most = bytes_of(budget, "budget") if budget else (chosen.memory or None) if chosen else None
    if all_of_it:
        ranks, per_node = all_of_it.nodes * all_of_it.per_node, all_of_it.per_node
        return Setting(ranks, per_node, most, chosen, precision, shapes=tuple((shapes or {}).items()))
    if gpus is None:
        raise PlanError(
            "plan must know the devices, got none. Give gpus=8 (--gpus 8), or cluster='16x8xH100' (--cluster 16x8xH100)."
        )
    gpus = whole("gpus", gpus, at_least=1, kind=PlanError)
    nodes = -(-gpus // 8) if nodes is None else whole("nodes", nodes, at_least=1, kind=PlanError)
    require(gpus % nodes == 0, "gpus", f"the same number on each of {nodes} nodes", gpus, kind=PlanError)
    return Setting(gpus, gpus // nodes, most, chosen, precision, shapes=tuple((shapes or {}).items()))


def plan(
    make_unit: Callable[[], Any],
    make_data: Callable[[], Any],
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    device: str | None = None,
    cluster: str | None = None,
    budget: str | None = None,
    layouts: Sequence[str] = (),
    precision: str | None = None,
    shapes: Mapping[str, int] | None = None,
    search: bool = False,
    goal: str | None = None,
    price: float | None = None,
    mtbf: float | None = None,
    save_time: float = 60.0,
) -> Plan:
    """The memory of training and the time of an update under each layout; `echelon plan` for two functions.

    The functions run in processes of their own, as one rank of a world that need not exist, with tensors that have no memory.
    Build a model that this machine cannot hold under `on_meta()`.

    Args:
        make_unit: builds the unit.
        make_data: builds the loader.
        gpus: number of devices, one rank on each.
        nodes: number of machines, with equally many devices each; by default machines of 8 devices.
        device: a known name, such as "h100-sxm", or a TOML file from `echelon plan --calibrate`. By default no time is
            estimated.
        cluster: nodes, devices per node and device in one word, such as "16x8xH100".
        budget: memory of a device, such as "80GiB"; by default the device's.
        layouts: layouts to try besides the unit's own; by default those that the devices allow.
        precision: "fp32", "bf16", "fp16" or "float8"; replaces the unit's own.
        shapes: number of elements that a line selects, where it depends on values, as for `x[mask]`: {"train.py:8": 64}.
        search: search for the fastest layout that fits, instead of trying these.
        goal: the amount of the whole training, such as "300B tokens": adds days, device-hours and cost to the plan.
        price: of a device for an hour.
        mtbf: hours between failures of one device.
        save_time: seconds for which a save stops training.
    Raises:
        UsageError: no devices or unknown devices are named; nothing could be traced.
    """
    require(callable(make_unit), "make_unit", "a function that builds the unit", make_unit, kind=PlanError)
    require(callable(make_data), "make_data", "a function that builds the loader", make_data, kind=PlanError)
    target, setting = (
        Target(make_unit=make_unit, make_data=make_data, device="cpu"),
        setting_of(gpus, nodes, device, cluster, budget, precision, shapes),
    )
    for name, given in (("price", price), ("mtbf", mtbf), ("save_time", save_time)):
        if given is not None:
            number(name, given, "above 0", lambda found: 0 < found < math.inf, kind=PlanError)
    spending = Spending(goal, price, mtbf, save_time) if goal else None
    if goal:
        Goal.of(goal)  # raises before anything is traced
    try:
        # The tracing processes are forked, which is not safe here: this process may have compute threads.
        made: Plan = launch(_plan, ranks=1, args=(target, setting, tuple(layouts), search, spending), quiet=True)[0]
    except RankFailedError as error:
        if isinstance(error.__cause__, EchelonError):
            raise error.__cause__ from None
        raise
    return made


def _plan(target: Target, setting: Setting, layouts: Sequence[str], searches: bool, spending: Spending | None) -> Plan:
    made = plan_of(target, setting, layouts=layouts, searches=searches, spending=spending)
    if not any(each.peak for each in (*made.layouts, *made.left_out)):
        raise PlanError(f"nothing could be traced: {(made.layouts or made.left_out)[0].why}")
    return made


def plan_of(
    target: Target,
    setting: Setting,
    *,
    layouts: Sequence[str] = (),
    only: str | None = None,
    searches: bool = False,
    spending: Spending | None = None,
) -> Plan:
    """See `plan`. Forks this process.

    Args:
        only: plan only this layout; "yours" is the script's own.
    """
    goal = Goal.of(spending.goal) if spending else None
    out: list[Answer] = []
    if not searches:
        answers = plan_memory(target, setting, layouts=layouts, only=only)
    elif setting.budget is None or setting.device is None or not setting.device.is_timed:
        got = setting.device.name if setting.device else None
        raise PlanError(
            f"a search must know a device's memory and speed, got {got}. Give device= (--device), or cluster= (--cluster)."
        )
    else:
        answers, out = searched(target, setting)
    bill = _bill(goal, spending, answers, setting.ranks) if goal and spending and answers else None
    return Plan(setting, answers, out, bill, spending.goal if spending else "")


def _bill(goal: Goal, spending: Spending, answers: Sequence[Answer], ranks: int) -> Bill:
    """The bill with the first layout that has a time."""
    best = next((each for each in answers if each.seconds), None)
    if best is None:
        raise PlanError(
            "a goal must have a layout that could be timed, got none. Give device= (--device), or cluster= (--cluster)."
        )
    per_update = {"tokens": best.tokens, "samples": best.samples, "updates": 1}[goal.unit]
    require(per_update > 0, "goal", "samples or updates, since the batches have no rows of tokens", spending.goal, kind=PlanError)
    price, mtbf = spending.price or 0.0, spending.mtbf or 0.0
    return bill_of(goal, per_update, best.seconds, ranks, price=price, mtbf=mtbf, save=spending.save_time)
