"""Layers that were renamed since the save: apply a mapping of names, or suggest one by equal shapes."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from echelon.checkpoint.layout import NamedState
from echelon.common.errors import CheckpointMismatchError

__all__ = ["Naming", "by_old", "check", "hint", "moved", "rename", "state_in", "suggest"]

# From a name in a checkpoint to its present name.
Naming = Callable[[str], str]

Shapes = Mapping[str, list[int]]


def moved(name: str, renames: Mapping[str, str]) -> str:
    """A dotted name whose longest prefix in `renames` is replaced."""
    for old in sorted(renames, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return renames[old] + name[len(old) :]
    return name


def state_in(name: str) -> str:
    """The name of the state, with which a dotted name begins."""
    return name.partition(".")[0]


def by_old(names: Iterable[str], naming: Naming) -> dict[str, str]:
    """Old name -> new name.

    Raises:
        CheckpointMismatchError: two names would become the same.
    """
    made = {name: naming(name) for name in names}
    twice = [new for new, count in Counter(made.values()).items() if count > 1]
    if twice:
        raise _of_one_name([old for old, new in made.items() if new == twice[0]], twice[0])
    return made


def _of_one_name(olds: Sequence[str], new: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(f"rename must give every state a name of its own: {' and '.join(olds)} would both be {new}.")


def check(renames: Mapping[str, str], names: Sequence[str]) -> None:
    """Check that the old names of a mapping are in the checkpoint.

    Raises:
        CheckpointMismatchError: `renames` has a name that the checkpoint lacks.
    """
    for old in renames:
        if not any(name == old or name.startswith(f"{old}.") for name in names):
            shown = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
            more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
            raise CheckpointMismatchError(
                f"rename has {old!r}, which the checkpoint does not. It has {', '.join(shown[:12])}{more}."
            )


def rename(
    rest: Mapping[str, Any], saved: Any, states: Mapping[str, Any], renames: Mapping[str, str], naming: Naming
) -> dict[str, Any]:
    """Give tensors, states, and entries of states that are keyed by parameter name their present names.

    Args:
        rest, saved: the nested states of a checkpoint, and its `tensors.Tensors`, which are renamed in place.
        states: the states to restore, by their present names.
    Returns:
        the nested states by their present names.
    """
    check(renames, [*rest, *saved.index])
    homes: dict[str, set[str]] = {}  # old state -> new states: a module may have been split, or be part of another
    for name in saved.index:
        homes.setdefault(state_in(name), set()).add(state_in(naming(name)))
    saved.rename(naming)
    made: dict[str, Any] = {}
    for old, now in by_old(rest, naming).items():
        news = homes.get(old, {state_in(now)})
        if any(isinstance(states.get(new), NamedState) for new in news):
            made |= {new: made.get(new, {}) for new in news}
            for key, full in by_old([f"{old}.{key}" for key in rest[old]], naming).items():
                made.setdefault(state_in(full), {})[full.partition(".")[2]] = rest[old][key.removeprefix(f"{old}.")]
        elif (new := state_in(now)) in made and new in states:
            raise _of_one_name([before for before in rest if state_in(naming(before)) == new], new)
        else:
            made[new] = rest[old]
    return made


def hint(
    states: Mapping[str, Any], wanted: Mapping[str, Any], saved: Shapes, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    """A sentence that suggests a mapping; "" if no leftover tensor has the shape of a missing one.

    Args:
        wanted, saved: all tensors, and all shapes, by name.
        missing, unexpected: names of tensors and states.
    """
    modules = {name for name, state in states.items() if isinstance(state, NamedState) and not hasattr(state, "targets")}
    now = {k: list(wanted[k].size()) for k in missing if k in wanted and k.partition(".")[0] in modules}
    for name in modules.intersection(missing):
        now |= {f"{name}.{k}": list(v.size()) for k, v in states[name].state_dict().items() if isinstance(v, torch.Tensor)}
    left = {name for name in unexpected if name not in saved}
    was = {k: v for k, v in saved.items() if k.partition(".")[0] in left or (k in unexpected and k.partition(".")[0] in modules)}
    mapping = suggest(was, now)
    return f" If they have other names now: RestoreOptions(rename={mapping!r})." if mapping else ""


def suggest(saved: Shapes, now: Shapes) -> dict[str, str]:
    """Match saved names with present ones by equal shapes: whole submodules first, then tensors of a unique shape.

    Args:
        saved, now: shapes by name, of tensors that were saved and are not wanted, and of those wanted and not saved.
    """
    saved, now = dict(saved), dict(now)
    mapping: dict[str, str] = {}
    candidates = {_without_common_end(u, m) for u, shape in saved.items() for m, other in now.items() if shape == other}
    ranks = {pair: _rank(pair[0], pair[1], saved, now) for pair in candidates}
    for old, new in sorted(candidates, key=ranks.__getitem__):
        ours, theirs = _under(old, saved), _under(new, now)
        if ours and ours == theirs:
            mapping[old] = new
            saved = {k: v for k, v in saved.items() if moved(k, {old: ""}) == k}
            now = {k: v for k, v in now.items() if moved(k, {new: ""}) == k}
    for name, shape in saved.items():
        alike = [m for m, other in now.items() if other == shape]
        if len(alike) == 1 and sum(other == shape for other in saved.values()) == 1:
            mapping[name] = alike[0]
    return mapping


def _under(prefix: str, shapes: Shapes) -> dict[str, list[int]]:
    """The shapes of names that begin with a prefix, by the rest of the name."""
    return {k[len(prefix) :]: v for k, v in shapes.items() if k == prefix or k.startswith(f"{prefix}.")}


def _without_common_end(a: str, b: str) -> tuple[str, str]:
    ours, theirs = a.split("."), b.split(".")
    while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)


def _rank(old: str, new: str, saved: Shapes, now: Shapes) -> tuple[object, ...]:
    """Sort key: large submodules first, then similar names, then equal positions, with numbers compared as numbers."""
    count = len(_under(old, saved))
    similar = difflib.SequenceMatcher(None, _letters(old), _letters(new)).ratio()
    places = [sorted(shapes, key=_natural).index(_first(name, shapes)) for name, shapes in ((old, saved), (new, now))]
    return -count, -round(similar, 3), abs(places[0] - places[1]), _natural(old), _natural(new)


def _first(prefix: str, shapes: Shapes) -> str:
    return min((k for k in shapes if k == prefix or k.startswith(f"{prefix}.")), key=_natural)


def _letters(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
