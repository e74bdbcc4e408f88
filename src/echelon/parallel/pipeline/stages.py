"""Where a module is cut: which of its submodules belong to which stage.

A *unit* is a submodule that lies in one stage as a whole: a repeated block, or a module registered before, between or after the
blocks, such as an embedding or a head. Units keep the order in which they are registered. Modules without parameters and
persistent buffers are not units: every stage has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from echelon.common.errors import PipelineError
from echelon.parallel.names import plain_name
from echelon.parallel.recipe.blocks import blocks_to_shard

__all__ = ["Splits", "Unit", "check_splits", "units_of"]

# The names at which further stages begin; or for each stage, the names of its modules.
Splits = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Unit:
    """A submodule that lies in one stage."""

    name: str
    module: nn.Module
    stage: int


def check_splits(value: Any) -> Splits | None:
    """`stages` as tuples.

    Raises:
        UsageError: it is neither names nor lists of names.
    """
    if value is None:
        return None

    def are_names(each: Any) -> bool:
        return isinstance(each, Sequence) and not isinstance(each, str) and all(isinstance(name, str) for name in each)

    if are_names(value):
        return tuple(value)
    lists = isinstance(value, Sequence) and not isinstance(value, str) and all(are_names(each) for each in value)
    if not lists:
        raise PipelineError(
            "stages must be the names of the modules at which further stages begin, such as ['blocks.4'], or a list of names for "
            f"each stage, got {value!r}."
        )
    return tuple(tuple(each) for each in value)


def units_of(module: nn.Module, stages: Splits | None, pp: int, per_rank: int | None) -> list[Unit]:
    """The units of a module and their stages. The same on all ranks; not collective.

    Args:
        stages: as the user gave it; None balances the repeated blocks by their parameters.
        pp: ranks along the pipeline.
        per_rank: stages of each rank that the schedule requires; None accepts the number that `stages` gives.
    Raises:
        UsageError: a stage would have no parameters, the number of stages is wrong, or a name is unknown.
    """
    kind = type(module).__name__
    if stages and isinstance(stages[0], str):
        units = _at_points(module, [str(name) for name in stages])
    elif stages:
        units = _as_listed(module, stages)
    else:
        units = _balanced(module, pp * (per_rank or 1))
    count = max((unit.stage for unit in units), default=-1) + 1
    wanted = pp * per_rank if per_rank is not None else pp * max(1, count // pp)
    if count != wanted:
        begun = f"names {len(stages or ())} points at which one begins" if stages and isinstance(stages[0], str) else "lists them"
        raise PipelineError(
            f"{kind} must have {wanted} stages for pp={pp} and its schedule, got {count}: stages= {begun}. "
            f"Give {wanted - 1} points, or one list of names for each of {wanted} stages."
        )
    for stage in range(count):
        if not any(True for unit in units if unit.stage == stage for _ in unit.module.parameters()):
            names = ", ".join(unit.name for unit in units if unit.stage == stage) or "nothing"
            raise PipelineError(f"stage {stage} of {kind} must have parameters, but it holds {names}. Cut elsewhere.")
    return units


def _chain(module: nn.Module, points: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The largest submodules with none of these points and no repeated blocks inside, in the order of registration."""
    names = {*points, *(plain_name(name) for name, _ in blocks_to_shard(module))}
    chain: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()  # a module registered in several places counts at the first

    def visit(prefix: str, parent: nn.Module) -> None:
        for child_name, child in parent.named_children():
            if child in seen or isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # these are read, not called
                continue
            seen.add(child)
            name = plain_name(f"{prefix}{child_name}")  # without the parts that torch.compile inserts
            within = any(other.startswith(f"{name}.") for other in names)
            if not name:
                visit("", child)
            elif within or (isinstance(child, (nn.ModuleList, nn.ModuleDict)) and name not in names):
                visit(f"{name}.", child)
            elif child.state_dict(keep_vars=True):
                chain.append((name, child))

    visit("", module)
    return chain


def _cost(module: nn.Module) -> int:
    """The number of its parameters, without embeddings, which cost no time."""
    tables = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return sum(p.numel() for p in module.parameters() if p not in tables)


def _made(chain: list[tuple[str, nn.Module]], numbers: Sequence[int]) -> list[Unit]:
    return [Unit(name, part, stage) for (name, part), stage in zip(chain, numbers, strict=True)]


def _at_points(module: nn.Module, points: list[str]) -> list[Unit]:
    chain, stage, numbers = _chain(module, points), 0, []
    _refuse_unknown(module, points, chain)
    if repeated := [name for i, name in enumerate(points) if name in points[:i]]:
        raise PipelineError(f"stages must name each point once, got {repeated[0]!r} twice.")
    order = [name for name, _ in chain if name in points]
    if order != points:
        raise PipelineError(f"stages must name points in the order of the modules, {order}, got {points}.")
    for name, _ in chain:
        stage += name in points
        numbers.append(stage)
    return _made(chain, numbers)


def _as_listed(module: nn.Module, stages: Splits) -> list[Unit]:
    listed = [str(name) for names in stages for name in names]
    chain = _chain(module, listed)
    known = {plain_name(name) for name, _ in module.named_modules() if plain_name(name)}
    number: dict[str, int] = {}
    for stage, names in enumerate(stages):
        for name in names:
            if name not in known:
                _refuse_unknown(module, [name], chain)
            inside = [unit for unit, _ in chain if unit == name or unit.startswith(f"{name}.")]
            for unit in inside:
                if number.setdefault(unit, stage) != stage:
                    raise PipelineError(f"{unit} must be in one stage, but stages= has it in {number[unit]} and {stage}.")
    if left := [name for name, _ in chain if name not in number]:
        raise PipelineError(f"stages must list all of {type(module).__name__}, but {', '.join(left[:6])} are in none. Add them.")
    ordered = sorted(chain, key=lambda pair: number[pair[0]])
    return _made(ordered, [number[name] for name, _ in ordered])


def _refuse_unknown(module: nn.Module, points: Sequence[str], chain: list[tuple[str, nn.Module]]) -> None:
    names = [name for name, _ in chain]
    for point in points:
        if point not in names:
            raise PipelineError(
                f"stages names {point!r}, which is no module with parameters in {type(module).__name__}. Modules that can begin "
                f"a stage: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}."
            )


def _balanced(module: nn.Module, count: int) -> list[Unit]:
    """Cut before blocks so that the costliest stage costs as little as possible."""
    chain = _chain(module, ())
    blocks = {plain_name(name) for name, _ in blocks_to_shard(module)}
    kind = type(module).__name__
    places = [i for i, (name, _) in enumerate(chain) if name in blocks]
    if not places:
        raise PipelineError(
            f"{kind} has no repeated blocks at which a pipeline could be cut. Name the modules at which further stages begin: "
            f"stages=[...], for example {', '.join(name for name, _ in chain[:12])}."
        )
    if len(places) < count:
        raise PipelineError(
            f"{kind} has {len(places)} repeated blocks, too few for {count} stages. Use fewer stages, or name other modules at "
            "which stages begin: stages=[...]."
        )
    starts = [0, *places[1:], len(chain)]
    costs = [sum(_cost(part) for _, part in chain[a:b]) for a, b in pairwise(starts)]
    groups = _partition(costs, count)
    numbers = [stage for stage, (first, last) in enumerate(groups) for _ in range(starts[first], starts[last])]
    return _made(chain, numbers)


def _partition(costs: list[int], count: int) -> list[tuple[int, int]]:
    """Split into consecutive, nonempty groups with the least largest sum; among these, with the most equal sums."""
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i]: (largest sum, sum of squares) of the best split of the first i costs; begins[i]: where its last group begins.
    best: list[tuple[int, int] | None] = [(0, 0)] + [None] * len(costs)
    cuts: list[list[int]] = []
    for _ in range(count):
        following: list[tuple[int, int] | None] = [None] * (len(costs) + 1)
        begins = [0] * (len(costs) + 1)
        for end in range(1, len(costs) + 1):
            for begin in range(end):
                before = best[begin]
                if before is None:
                    continue
                own = total[end] - total[begin]
                value = (max(before[0], own), before[1] + own * own)
                now = following[end]
                if now is None or value < now:
                    following[end], begins[end] = value, begin
        best = following
        cuts.append(begins)
    groups, end = [], len(costs)
    for begins in reversed(cuts):
        groups.append((begins[end], end))
        end = begins[end]
    return groups[::-1]
