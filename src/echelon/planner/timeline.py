"""The time of an update on a device: simulates its operators and collectives, each started as early as possible.

    operators       one after another, in the traced order; each waits for the collectives whose results it reads or overwrites
    collectives     one after another within their group; each waits for the operators before it
    `fully_shard`   gathers in a stream of its own, ahead of the operators: in the forward pass, once the gathered parameters
                    before the previous ones were copied out; in the backward pass, once the previous ones were. A reduction
                    waits for the gradients; operators on its result run in its stream; the next reduction waits for it

An operator takes the longer of its arithmetic and its memory traffic, and at least `Device.least`; beside a collective it takes
`Device.contention` times as long.

    pipelines       each rank first has its own timeline, in which no message arrives late; then `run_together` shifts them. If a
                    message arrives late, the rank is late by the same time from there on, and so are the collectives of its
                    stage. Messages between two ranks follow one another

Data loading, checkpoints, and a host slower than its device are left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.common.errors import PlanError
from echelon.planner.devices import Device
from echelon.planner.links import Links
from echelon.planner.steps import COPY_IN, Collective, Operator, Step

__all__ = ["SLOWED", "Message", "Timeline", "fused", "operator_seconds", "run_together", "simulate"]

SLOWED = "slowed by collectives"
_REDUCE_IN = "fsdp::chunk_cat"
_RECENT = 4096  # number of latest operators that a collective may have run beside


@dataclass(frozen=True, slots=True)
class Message:
    """A message between stages of a pipeline.

    Args:
        at: seconds at which it is sent, or at which its content is needed.
        peer: the rank to which it goes, or from which it comes.
        number: counts the messages between the two ranks in this direction, from 0.
        size: bytes.
    """

    at: float
    sends: bool
    peer: int
    number: int
    size: int


@dataclass
class Timeline:
    """
    Attributes:
        seconds: of the update.
        passes: seconds before the optimizer's step.
        busy: seconds of operators by kind: product, attention, memory; and the time that they lost beside collectives.
        waits: seconds in which operators waited for collectives, by kind.
        communication: seconds of collectives, hidden or not.
        spans: (begin, end, kind, whether it is a collective) of operators and collectives.
        messages: to and from other stages of a pipeline. In one timeline they arrive in time; `run_together` makes several
            timelines wait for each other.
    """

    seconds: float = 0.0
    passes: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    communication: float = 0.0
    spans: list[tuple[float, float, str, bool]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def shares(self, parts: int) -> dict[tuple[str, bool], list[float]]:
        """By (kind, whether it is a collective): for each of `parts` equal parts of the update, the share that the kind takes."""
        made: dict[tuple[str, bool], list[float]] = defaultdict(lambda: [0.0] * parts)
        each = self.seconds / parts or 1.0
        for begins, ends, kind, collective in self.spans:
            shares = made[kind, collective]
            for part in range(int(begins / each), min(parts, int(ends / each) + 1)):
                shares[part] += max(0.0, min(ends, (part + 1) * each) - max(begins, part * each)) / each
        return made


def operator_seconds(step: Operator, device: Device) -> float:
    moved = step.size / (device.bandwidth * device.copied)
    if step.host and device.host:  # an optimizer's tensors are all in the host's memory then
        return (step.size if step.moment == "optimizer" else step.host) / device.host
    least = device.least * step.in_turn
    if step.moment == "optimizer" and device.overlaps:
        least = 0.0  # on a GPU one kernel steps many parameters; in the CPU's trace each has its own
    if not step.flops:
        return max(moved, least if step.size else 0.0)
    if step.kind == "attention":
        backward = step.moment == "backward" and not step.is_repeated
        computed = step.flops / device.attention_rate(step.name, step.dtype, step.shape, backward=backward)
    else:
        computed = step.flops / device.product_rate(step.dtype, step.flops, step.shape)
    return max(moved, computed, least)


def fused(steps: Sequence[Step]) -> list[Step]:
    """Steps after a compiler: neighbours that only move memory become one step, without the bytes of tensors that only they use.

    An upper bound of the time with torch's Inductor, which also fuses across views and within graphs, and recomputes cheap
    results.
    """
    last = {number: at for at, step in enumerate(steps) for number in (*step.reads, *step.writes)}
    made: list[Step] = []
    run: list[Operator] = []

    def end(at: int) -> None:
        if len(run) > 1:
            sizes: Counter[int] = Counter()
            for each in run:  # an operator's bytes are split equally over its tensors: most have one size
                touched = (*each.reads, *each.writes)
                for number in touched:
                    sizes[number] = max(sizes[number], each.size // len(touched))
            written = {number for each in run for number in each.writes}
            inner = {number for number in written if last[number] < at}
            reads = {number for each in run for number in each.reads} - written
            size = sum(much for number, much in sizes.items() if number not in inner)
            first = run[0]
            made.append(
                Operator("fused", first.moment, tuple(reads), tuple(written - inner), size, "", 0, "", (), first.is_repeated)
            )
        else:
            made.extend(run)
        run.clear()

    for at, step in enumerate(steps):
        if _is_pointwise(step) and (not run or run[-1].moment == step.moment):
            assert isinstance(step, Operator)
            run.append(step)
            continue
        end(at)
        if _is_pointwise(step):
            assert isinstance(step, Operator)
            run.append(step)
        else:
            made.append(step)
    end(len(steps))
    return made


def _is_pointwise(step: Step) -> bool:
    return isinstance(step, Operator) and not step.flops and not step.host and step.size > 0 and step.name.startswith("aten::")


def simulate(steps: Iterable[Step], device: Device, links: Links) -> Timeline:
    """The timeline of an update that starts when the previous one has ended."""
    return _Simulation(device, links).of(list(steps))


class _Simulation:
    def __init__(self, device: Device, links: Links) -> None:
        self._device, self._links = device, links
        self._made = Timeline()
        self._now = 0.0  # end of the operators so far
        self._free: dict[tuple[int, ...], float] = defaultdict(float)  # end of each group's collectives so far
        self._pending: dict[int, tuple[float, str, tuple[int, ...]]] = {}  # storage -> end, kind, group of its collective
        self._written: dict[int, float] = defaultdict(float)  # when an operator filled a storage
        self._received: dict[int, Message] = {}  # by the storage that another stage fills
        self._count: Counter[tuple[str, int]] = Counter()  # messages by direction and peer
        self._gathers: set[int] = set()  # storages of `fully_shard`'s gathers; below, those of its reductions
        self._reductions: set[int] = set()
        self._copied_out = [0.0, 0.0]  # when the last two gathered parameters were copied out
        self._last_reduction = 0.0
        self._shared: list[tuple[float, float]] = []  # spans of collectives from now on
        self._charged = 0.0  # up to this time, operators are already slowed by collectives
        self._alone: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # spans in which operators ran at full speed

    def of(self, steps: list[Step]) -> Timeline:
        beside = _beside(steps)
        for at, step in enumerate(steps):
            if self._received:
                self._needs(step)
            if step.moment != "optimizer":
                self._made.passes = self._now
            if isinstance(step, Collective):
                if step.peer is None:
                    self._collective(step)
                else:
                    self._message(step, step.peer)
            elif at in beside:
                self._fills_a_gather(step)
            else:
                self._operator(step)
        made = self._made
        end = max([self._now, *(until for until, _, _ in self._pending.values())])
        if end > self._now:
            made.waits[max(self._pending.values())[1]] += end - self._now
        made.seconds = end
        return made

    def _message(self, step: Collective, peer: int) -> None:
        number = self._count[step.kind, peer]
        self._count[step.kind, peer] += 1
        if step.kind == "send":
            ready = max([self._now, *(self._pending[each][0] for each in step.reads if each in self._pending)])
            self._made.messages.append(Message(ready, True, peer, number, step.size))
        else:
            self._received.update(dict.fromkeys(step.writes, Message(0.0, False, peer, number, step.size)))

    def _needs(self, step: Step) -> None:
        """Record the messages of other stages that the step reads."""
        for each in step.reads:
            if (message := self._received.pop(each, None)) is not None:
                self._made.messages.append(replace(message, at=self._now))

    def _operator(self, step: Operator) -> None:
        seconds = operator_seconds(step, self._device)
        touched = [self._pending[number] for number in {*step.reads, *step.writes} if number in self._pending]
        reduced = step.moment == "backward" and not step.flops and self._reductions.intersection(step.reads)
        if reduced and touched and self._device.overlaps:  # runs in the reduction's stream
            until, kind, ranks = max(touched)
            self._free[ranks] = max(self._free[ranks], until) + seconds
            for number in step.writes:
                self._pending[number] = self._free[ranks], kind, ranks
                self._reductions.add(number)
            return
        for until, kind, _ in touched:
            self._wait(until, kind)
        for number in (*step.reads, *step.writes):
            self._pending.pop(number, None)
        if self._gathers.intersection(step.reads):
            self._copied_out = [self._copied_out[1], self._now + seconds]
            self._gathers.difference_update(step.reads)
        began = self._now
        self._compute(seconds)
        if step.size:
            kind = "host" if step.host else step.kind or "memory"
            self._made.busy[kind] += seconds
            self._made.spans.append((began, self._now, kind, False))
        for number in step.writes:
            self._written[number] = self._now
        if step.name == _REDUCE_IN:
            self._reductions.update(step.writes)

    def _fills_a_gather(self, step: Operator) -> None:
        """An operator in the stream of `fully_shard`'s gathers; starts when the parameters are written."""
        seconds = operator_seconds(step, self._device)
        if not self._device.overlaps:
            self._now += seconds
        ready = max([self._written[number] for number in step.reads], default=0.0)
        for number in step.writes:
            self._written[number] = ready + seconds
        if step.name == COPY_IN:
            self._gathers.update(step.writes)

    def _collective(self, step: Collective) -> None:
        seconds = self._links.seconds(step.kind, step.size, step.ranks)
        self._made.communication += seconds
        ready = self._now
        if not self._device.overlaps:
            self._made.spans.append((self._now, self._now + seconds, step.kind, True))
            self._wait(self._now + seconds, step.kind)
            return
        if self._gathers.intersection(step.reads):
            filled = max(self._written[number] for number in step.reads)
            ready = max(filled, self._copied_out[step.moment == "backward"])
        elif self._reductions.intersection(step.reads):
            if step.kind == "reduce-scatter":
                self._wait(self._last_reduction, step.kind)
                ready = self._now
            self._reductions.update(step.writes)
        ready = max([ready, *(self._pending[number][0] for number in step.reads if number in self._pending)])
        end = max(ready, self._free[step.ranks]) + seconds
        self._free[step.ranks] = end
        self._made.spans.append((end - seconds, end, step.kind, True))
        self._share(end - seconds, end)
        if self._reductions.intersection(step.writes) and step.kind == "reduce-scatter":
            self._last_reduction = end
        for number in step.writes:
            self._pending[number] = end, step.kind, step.ranks

    def _compute(self, seconds: float) -> None:
        """An operator of `seconds`; it takes longer while collectives run beside it."""
        slower, began, left = self._device.contention, self._now, seconds
        while left > 0:
            while self._shared and self._shared[0][1] <= self._now:
                self._shared.pop(0)
            start, end = self._shared[0] if self._shared else (math.inf, math.inf)
            pace, until = (slower, end) if start <= self._now else (1.0, start)
            took = min(left * pace, until - self._now)
            if pace == 1.0:
                self._alone.append((self._now, self._now + took))
            self._now, left = self._now + took, left - took / pace
            left = left if left > 1e-15 else 0.0
        self._made.busy[SLOWED] += self._now - began - seconds

    def _share(self, start: float, end: float) -> None:
        """A collective runs from `start` to `end`. Operators in this span so far were timed at full speed: add what they lost."""
        slower, shared = self._device.contention, max(start, self._charged)
        done = sum(min(b, end) - max(a, shared) for a, b in self._alone if b > shared and a < end)
        more = min(done * (slower - 1), (end - shared) * (1 - 1 / slower))
        if more > 0:
            self._now += more
            self._made.busy[SLOWED] += more
        self._charged = max(self._charged, min(end, self._now))
        if end > self._now:
            self._shared.append((max(start, self._now), end))
            self._shared.sort()

    def _wait(self, until: float, kind: str) -> None:
        if until > self._now:
            self._made.waits[kind] += until - self._now
            self._now = until


def _beside(steps: Sequence[Step]) -> set[int]:
    """Indices of the operators that fill the buffers of `fully_shard`'s gathers, and of the casts just before them."""
    places: set[int] = set()
    for at, step in enumerate(steps):
        if isinstance(step, Operator) and step.name == COPY_IN:
            places.add(at)
            needed, before = set(step.reads), at - 1
            while before >= 0 and _writes_only(steps[before], needed):
                places.add(before)
                needed.update(steps[before].reads)
                before -= 1
    return places


def _writes_only(step: Step, needed: set[int]) -> bool:
    return isinstance(step, Operator) and not step.flops and bool(step.writes) and needed.issuperset(step.writes)


def run_together(timelines: Mapping[int, Timeline], links: Links) -> float:
    """Seconds of the update of a pipeline, whose ranks wait for each other's messages.

    Args:
        timelines: by rank of the world.
    Raises:
        PlanError: a rank waits for a message that no rank sends.
    """
    late = dict.fromkeys(timelines, 0.0)
    at = dict.fromkeys(timelines, 0)
    arrived: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by sender and receiver
    moves = True
    while moves:
        moves = False
        for rank, timeline in timelines.items():
            while at[rank] < len(timeline.messages):
                each = timeline.messages[at[rank]]
                if each.sends:
                    way = arrived[rank, each.peer]
                    starts = max(each.at + late[rank], way[-1] if way else 0.0)
                    way.append(starts + links.seconds("send", each.size, (rank, each.peer)))
                elif each.number < len(arrived[each.peer, rank]):
                    late[rank] = max(late[rank], arrived[each.peer, rank][each.number] - each.at)
                else:
                    break
                at[rank] += 1
                moves = True
    if stuck := [rank for rank, timeline in timelines.items() if at[rank] < len(timeline.messages)]:
        raise PlanError(
            f"rank {stuck[0]} waits for a message that no stage sends: the stages of the pipeline do not fit together."
        )
    return max(timeline.seconds + late[rank] for rank, timeline in timelines.items())
