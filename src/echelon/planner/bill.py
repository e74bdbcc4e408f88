"""The bill of a whole training: days, device-hours, cost, failures, and how often to save."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from echelon.common.errors import PlanError, require

__all__ = ["Bill", "Goal", "bill_lines", "bill_of"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DAY_S = 86_400


@dataclass(frozen=True)
class Goal:
    """
    Args:
        unit: tokens, samples or updates.
    """

    amount: float
    unit: str

    @classmethod
    def of(cls, text: str) -> Goal:
        """Parse "300B tokens", "2.5M samples" or "100000 updates".

        Raises:
            PlanError: the text has another form.
        """
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmbt]?) ?(tokens|samples|updates)", text.strip().lower(), re.ASCII)
        amount = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if match is None or not amount:
            raise PlanError(f"--goal must be an amount of tokens, samples or updates, such as '300B tokens', got {text!r}.")
        return cls(amount, match[3])


@dataclass(frozen=True)
class Bill:
    """
    Args:
        updates: number of updates that reach the goal.
        seconds: of the updates alone.
        device_hours: of all devices, including failures and saves.
        cost: of the device-hours; 0 without a price.
        failures: expected number; this and the next two are 0 without a time between failures.
        save_every: seconds between saves.
        lost: share of the time that is lost to saves and failures.
    """

    updates: int
    seconds: float
    device_hours: float
    cost: float = 0.0
    failures: float = 0.0
    save_every: float = 0.0
    lost: float = 0.0

    @property
    def days(self) -> float:
        """Days, including failures and saves."""
        return self.seconds / (1 - self.lost) / _DAY_S


def bill_of(
    goal: Goal,
    per_update: float,
    seconds: float,
    devices: int,
    *,
    price: float = 0.0,
    mtbf: float = 0.0,
    save: float = 60.0,
) -> Bill:
    """The bill of reaching the goal, with a save every sqrt(2 * save * M) seconds, where M is the time between failures of any
    device. This interval minimizes the time lost to saves and repeated updates (Young 1974; first order of Daly 2006).

    Args:
        per_update: amount of the goal's unit in an update.
        seconds: of an update.
        price: of a device for an hour.
        mtbf: hours between two failures of one device.
        save: seconds for which a save stops training; a restart takes as long.
    Raises:
        PlanError: failures are so frequent that no time would be left for training.
    """
    updates = math.ceil(goal.amount / per_update)
    alone = updates * seconds
    every = lost = 0.0
    if mtbf:
        between = mtbf * 3600 / devices
        every = math.sqrt(2 * save * between)
        lost = save / every + (every / 2 + save) / between
        require(
            lost < 1,
            "--mtbf",
            f"so long that {devices} devices get somewhere, with saves of {save:g} s",
            f"{mtbf:g} hours, a failure every {between:,.0f} s",
            kind=PlanError,
        )
    total = alone / (1 - lost)
    hours = total / 3600 * devices
    return Bill(updates, alone, hours, hours * price, total / 3600 * devices / mtbf if mtbf else 0.0, every, lost)


def bill_lines(bill: Bill, goal: str, layout: str) -> list[str]:
    """The bill as lines of text."""
    time = f"{_number(bill.days)} days" if bill.days >= 1 else f"{_number(bill.days * 24)} hours"
    cost = f", {_number(bill.cost)} at that price" if bill.cost else ""
    made = [f"{goal} by {layout}: {bill.updates:,} updates, {time}, {_number(bill.device_hours)} device-hours{cost}."]
    if bill.save_every:
        expected, minutes = _number(bill.failures), _number(bill.save_every / 60)
        lost = f"saves and repeated updates take {bill.lost:.1%} of the time"
        made.append(f"Expect {expected} failures. Save every {minutes} minutes: {lost}.")
    return made


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
