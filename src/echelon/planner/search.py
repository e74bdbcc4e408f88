"""Search for the layout that trains fastest on a cluster among those that fit. Each layout has the fewest micro-batches that its
memory allows, and recomputes blocks if that is faster or is needed to fit. If nothing fits, the state goes to the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.loop.target import Target
from echelon.planner.memory import PASSING, Answer, Job, Setting, all_traced, equal_parts, size, traced

__all__ = ["Candidate", "Trace", "candidates", "command_of", "found_best", "options_of", "search"]


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Args:
        parameters, optimizer: number of ranks over which it splits the parameters, and the optimizer's state.
        ways: number of ranks with different samples.
        stages: number of pipeline stages.
    """

    layout: str
    parameters: int
    optimizer: int
    ways: int
    stages: int = 1


_PIPELINES = (2, 4, 8)  # numbers of stages to try; each pipeline is traced as one rank of every stage
_MICRO_BATCHES = 4  # per stage, so that filling and emptying the pipeline takes about a fifth of the update


def candidates(ranks: int, per_node: int, experts: int = 0) -> list[Candidate]:
    """The layouts to try: dp_replicate x dp_shard x tp, with tp within a node, and shards over all data-parallel ranks or those
    of a node. On several nodes also pp x dp_shard, with whole layers or tp over a node. Experts, if a layer has enough, are also
    divided over 2, 4, ... of the sharding ranks; with pipelines, within a node.
    """
    layouts = [Candidate("ddp", 1, 1, ranks), Candidate("zero1", 1, ranks, ranks)] if ranks > 1 else []
    tensor = [tp for tp in (1, 2, 4, 8) if tp <= per_node and ranks % tp == 0 and ranks > tp]
    for tp in tensor:
        ways = ranks // tp
        shards = {ways} | ({per_node // tp} if ranks > per_node and ranks % per_node == 0 and per_node > tp else set())
        for shard in sorted(shards, reverse=True):
            axes = {"dp_replicate": ways // shard, "dp_shard": shard, "tp": tp}
            words = ",".join(f"{axis}={many}" for axis, many in axes.items() if many > 1)
            layouts.append(Candidate("fsdp" if shard == ranks else words, shard * tp, shard * tp, ways))
    for pp in [each for each in _PIPELINES if ranks > per_node and ranks % (each * per_node) == 0]:
        for tp in sorted({1, min(8, per_node)}):
            axes = {"pp": pp, "dp_shard": ranks // pp // tp, "tp": tp}
            words = ",".join(f"{axis}={many}" for axis, many in axes.items() if many > 1)
            layouts.append(Candidate(words, ranks, ranks, ranks // pp // tp, pp))
            if tp == 1 and experts and (ep := math.gcd(axes["dp_shard"], per_node, experts)) > 1:
                layouts.append(Candidate(f"{words},ep={ep}", ranks, ranks, ranks // pp, pp))
    divided = math.gcd(ranks, experts) if experts else 1
    layouts += [Candidate(f"ep={ep}", ranks, ranks, ranks) for ep in _powers_of_two(divided)]
    if ranks > per_node and ranks % per_node == 0:
        copies = f"dp_replicate={ranks // per_node},dp_shard={per_node}"
        within = _powers_of_two(math.gcd(per_node, divided))
        layouts += [Candidate(f"{copies},ep={ep}", per_node, per_node, ranks) for ep in within[-1:]]
    return layouts


def _powers_of_two(most: int) -> list[int]:
    """The powers of two that divide `most`, from 2 on."""
    return [2**by for by in range(1, most.bit_length()) if most % 2**by == 0]


Try = tuple[str, int, bool]  # a layout, its number of micro-batches, whether blocks are recomputed
Trace = Callable[[Sequence[Try]], list[Answer]]


def search(target: Target, setting: Setting) -> tuple[list[Answer], list[Answer]]:
    """See `found_best`. If the script cannot be traced under its own layout, that is the only result, as one left out."""
    first = traced(target, None, setting)
    if first.why:
        return [], [first]
    known = (first.layout, first.micro_batches, False)

    def trace(tries: Sequence[Try]) -> list[Answer]:
        wanted = [each for each in tries if each != known]
        answers = iter(all_traced([Job(target, layout, setting, many, recompute) for layout, many, recompute in wanted]))
        return [first if each == known else replace(next(answers), layout=each[0], recompute=each[2]) for each in tries]

    fit, out = found_best(first, setting, trace)
    if not fit and setting.ranks > 1 and first.samples % setting.ranks == 0:
        answer = _offloaded(target, setting, first.samples // setting.ranks)
        (out if answer.why or answer.verdict == "does not fit" else fit).append(answer)
    return fit, out


def _offloaded(target: Target, setting: Setting, rows: int) -> Answer:
    """The last resort: shards of the state in the host's memory, and recomputed blocks if the model has repeated blocks."""

    def looked_at(recompute: bool) -> Answer:
        looks = _fewest("fsdp", rows, 1, setting.budget or 0, recompute=recompute)
        layout, many, _ = next(looks)
        while True:
            answer = all_traced([Job(target, layout, setting, many, recompute, offload=True)])[0]
            try:
                layout, many, _ = looks.send(answer)
            except StopIteration:
                return replace(answer, layout=layout, recompute=recompute, offload=True)

    answer = looked_at(recompute=True)
    return looked_at(recompute=False) if answer.why else answer


def found_best(first: Answer, setting: Setting, trace: Trace) -> tuple[list[Answer], list[Answer]]:
    """The layouts that fit, the fastest first; and those left out, with `why`.

    A layout is not traced if its shards of parameters and optimizer state alone are too large. A traced layout that does not fit
    is traced again with as many micro-batches as would make its activations fit, until a micro-batch has one sample. If one
    micro-batch was too large, the same is done with recomputed blocks, starting from one; the better of both counts.

    Args:
        first: the plan of the script's own layout.
        setting: must have a budget.
        trace: traces the next try of each layout, all at the same time.
    """
    out: list[Answer] = []
    looked_at: dict[str, Looks] = {}
    budget, held = setting.budget or 0, (first.by_kind or {}).get("parameters", 0)
    # Bytes of optimizer state per byte of parameters; unknown if the layout splits only one of them.
    optimizer = (first.by_kind or {}).get("optimizer", 0) / held if held and not first.layout.startswith("zero") else 0.0
    for each in candidates(setting.ranks, setting.per_node, first.experts):
        alone = int(first.parameter_bytes * (1 / each.parameters + optimizer / each.optimizer))
        if alone > budget and each.layout != first.layout:
            why = f"parameters and the optimizer's state alone are {size(alone)} on a rank"
        elif first.samples % each.ways:
            why = f"a global batch of {first.samples} has no equal parts for {each.ways} ways"
        elif first.samples // each.ways < each.stages:
            why = f"a stage has {first.samples // each.ways} samples of an update, too few for {each.stages} stages"
        else:
            rows = first.samples // each.ways
            least = equal_parts(rows, _MICRO_BATCHES * each.stages) if each.stages > 1 else 1
            looked_at[each.layout] = _better(each.layout, rows, least, budget)
            continue
        out.append(Answer(each.layout, False, why=why))
    answers = _together(looked_at, trace)
    out += [each for each in answers if each.why or each.verdict == "does not fit"]
    fit = [each for each in answers if each not in out]
    if not any(each.is_own for each in (*fit, *out)):
        (out if first.verdict == "does not fit" else fit).append(first)
    return sorted(fit, key=_order), out


def _order(answer: Answer) -> tuple[int, float]:
    return ("fits", "at risk", "does not fit", "").index(answer.verdict), -answer.rate


Looks = Generator[Try, Answer, Answer]  # the tries of one layout; returns its best plan


def _together(looked_at: Mapping[str, Looks], trace: Trace) -> list[Answer]:
    answers: dict[str, Answer] = {}
    asks = {layout: next(looks) for layout, looks in looked_at.items()}
    while asks:
        results, asks = zip(asks, trace(list(asks.values())), strict=True), {}
        for layout, answer in results:
            try:
                asks[layout] = looked_at[layout].send(answer)
            except StopIteration as end:
                answers[layout] = end.value
    return [answers[layout] for layout in looked_at]


def _better(layout: str, rows: int, least: int, budget: int) -> Looks:
    """The better plan of the layout with and without recomputed blocks."""
    answer = yield from _fewest(layout, rows, least, budget, recompute=False)
    if answer.why or (answer.micro_batches == least and answer.verdict == "fits"):
        return answer
    again = yield from _fewest(layout, rows, least, budget, recompute=True)
    # A model may have no repeated blocks, and a script may recompute them already.
    return answer if again.why or _order(answer) <= _order(again) else again


def _fewest(layout: str, rows: int, least: int, budget: int, *, recompute: bool) -> Looks:
    many = least
    while True:
        answer = yield layout, many, recompute
        if answer.why or answer.verdict != "does not fit" or many == rows:
            return answer
        kinds = answer.by_kind or {}
        scales = sum(kinds.get(kind, 0) for kind in PASSING)
        room = budget - (answer.peak - scales)
        if room <= 0:
            return answer
        wanted = -(-scales * many // room)
        many = equal_parts(rows, max(many + 1, wanted))


def options_of(best: Answer, precision: str | None = None) -> str:
    """The options that the script must set besides the command, as text."""
    given = [f"accumulate={best.micro_batches}"] if best.micro_batches > 1 else []
    given += ["recompute='blocks'"] if best.recompute else []
    given += ["layout=FSDPStrategy(cpu_offload=True)"] if best.offload else []
    return ", ".join([*given, f"precision={precision!r}"] if precision else given)


def command_of(best: Answer, ranks: int, script: str, arguments: Sequence[str]) -> list[str]:
    """The command that trains with this layout."""
    return ["echelon", "run", "--ranks", str(ranks), "--layout", best.layout, script, *arguments]
