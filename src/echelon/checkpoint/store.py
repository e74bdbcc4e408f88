"""Read what `snapshot` wrote into states, at any number of ranks, under any layout.

The planner of torch.distributed.checkpoint says which parts of which pieces this rank wants; only these are read, into its
tensors, so that no rank ever holds more than its own tensors. Each rank reads by itself; a failure on one is raised on all.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from echelon.checkpoint import plain, renamed
from echelon.checkpoint.layout import STATE, NamedState, Stateful, own_file, this_rank
from echelon.checkpoint.location import Location
from echelon.checkpoint.renamed import Naming
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.common import errors
from echelon.common.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from echelon.common.terminal import columns, one_line
from echelon.world import agree

__all__ = ["Report", "compare", "fill", "has_own", "on_each", "read_rank", "read_ranks", "read_states", "table", "untied"]

T = TypeVar("T")


@dataclass
class Report:
    """What a load could not restore exactly as it was saved.

    Attributes:
        missing, unexpected: what a load with strict=False left alone: states and tensors that the checkpoint lacks, and saved
            ones that no rank wanted. If a tied parameter was saved under several names with different values, the first name's
            values are taken, and the other names are unexpected.
        cast: tensors that were saved with another dtype than they have now: name -> (saved dtype, present dtype).
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_states(
    folder: Location,
    states: dict[str, Stateful],
    manifest: dict[str, Any] | None = None,
    *,
    strict: bool = True,
    forgotten: Callable[[list[str]], tuple[list[str], list[str]]] | None = None,
    may_begin: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    naming: Naming | None = None,
) -> Report:
    """Read what a snapshot wrote into the given states, whatever number of ranks wrote it. Collective.

    Args:
        forgotten: takes the names of saved states; returns those that are left over, an error when strict, and those that are
            only reported. By default, saved states that are not wanted are ignored.
        may_begin: states that the checkpoint may lack: they stay as they are.
        rename, naming: the user's mapping, and the function that applies it to the name of a state or a tensor.
        manifest: the checkpoint's, if it was read already.
    Raises:
        CheckpointCorruptError: the files are not what was written; at most some tensors were changed.
        CheckpointMismatchError: a state or a parameter is missing, left over, or has another shape; with a table. With
            strict=False, missing and leftover ones are left alone, and reported. Also if ranks want different states.
    """
    _same_states(states)
    with contextlib.ExitStack() as stack:
        files = on_each(folder, lambda: stack.enter_context(local_files(folder, manifest)))
        rest, saved = on_each(folder, lambda: (files.state(STATE), Tensors(files)))
        if rename and naming is not None:
            rest = on_each(folder, lambda: renamed.rename(rest, saved, states, rename, naming))
        over, listed = forgotten(sorted(rest)) if forgotten is not None else ([], [])
        new = sorted(name for name in states if name in may_begin and name not in rest)
        states = {name: state for name, state in states.items() if name not in new}
        report = fill(folder, states, rest, saved, strict=strict, over=over)
        report.unexpected += listed
        report.missing += new
    return report


def fill(
    folder: Location, states: dict[str, Stateful], rest: dict[str, Any], saved: Tensors, *, strict: bool, over: Sequence[str] = ()
) -> Report:
    """Fill states from `rest`, and with tensors that are read now. Collective.

    Args:
        rest: by state, its values that are not tensors.
        over: saved states that are left over.
    """
    named = {n: s for n, s in states.items() if isinstance(s, NamedState) and n in rest}
    values, lacking = on_each(folder, lambda: _targets(folder, named, saved, rest))
    wanted = {f"{n}.{k}": v for n, state in values.items() for k, v in state.items() if isinstance(v, torch.Tensor)}
    groups = [[f"{n}.{k}" for k in names] for n, state in named.items() for names in getattr(state, "tied", list)()]
    lost = on_each(folder, lambda: untied(groups, wanted, saved))
    report = compare(folder, states, rest, wanted, saved, strict, lacking, over, lost)
    for n, state in values.items():
        state.update({k: wanted[lost[f"{n}.{k}"]] for k in state if f"{n}.{k}" in lost})
    tensors = {k: v for k, v in wanted.items() if k in saved.index and k not in lost}
    on_each(folder, lambda: saved.read_into(tensors))
    on_each(folder, lambda: _load(named, values, rest))
    on_each(folder, lambda: _load({n: s for n, s in states.items() if n in rest and n not in named}, {}, rest))
    return report


def _load(states: dict[str, Any], values: dict[str, dict[str, Any]], rest: dict[str, Any]) -> None:
    for name, stateful in states.items():
        state = rest[name]
        if name in values:
            state = {**values[name], **{k: v for k, v in state.items() if k in values[name] or _plans(stateful)}}
        stateful.load_state_dict(state)


def _same_states(states: dict[str, Stateful]) -> None:
    """Refuse ranks with different units: their collectives would not match, and they would hang."""
    kinds = {name: type(state).__name__ for name, state in states.items()}
    if len(agree.kinds(kinds)) == 1:
        return
    kinds_of_all = agree.gather(kinds)
    names = sorted({name for each in kinds_of_all for name in each})
    rows = [row for n in names if len(set((row := (n, *(each.get(n, "-") for each in kinds_of_all)))[1:])) > 1]
    if rows:
        shown = table(("state", *(f"rank {r}" for r in range(len(kinds_of_all)))), rows)
        raise CheckpointMismatchError(f"ranks restore different units:\n{shown}Build the same unit on every rank.")


def _targets(
    folder: Location, named: dict[str, Any], saved: Tensors, rest: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """By state, the values to fill; and the names that the checkpoint lacks. An optimizer's values depend on what was saved."""
    if odd := [name for name in named if not isinstance(rest[name], dict)]:
        raise CheckpointCorruptError(
            f"{folder / STATE} is not what echelon writes: {odd[0]!r} is not a dict.", path=str(folder / STATE)
        )
    kinds = {name: (plain.dtype_of(entry["dtype"]), entry["shape"]) for name, entry in saved.index.items()}
    values: dict[str, dict[str, Any]] = {}
    lacking: list[str] = []
    for name, stateful in named.items():
        if _plans(stateful):
            values[name], unknown = stateful.targets(name, kinds, rest[name])
            lacking += [f"{name}.{each}" for each in unknown]
        else:
            room = getattr(stateful, "room", None)  # a module's buffers may have had other shapes
            values[name] = {**stateful.state_dict(), **({} if room is None else room(name, kinds))}
    return values, lacking


def _plans(stateful: Any) -> bool:
    return hasattr(stateful, "targets")


def _untrained(stateful: Any, values: Any) -> list[str]:
    """Names of what an optimizer held when it was saved, and does not hold now."""
    untrained = getattr(stateful, "untrained", None)
    return [] if untrained is None else untrained(values)


def on_each(folder: Location, act: Callable[[], T]) -> T:
    """Run `act` on every rank; if it fails on one, all ranks raise the first one's error. Collective."""
    problem: list[Any] | None = None
    value, own = None, None
    try:
        value = act()
    except (CheckpointError, errors.UsageError) as error:
        problem, own = agree.in_json(error), error
    except Exception as error:  # perhaps of a user's load_state_dict: the other ranks must not wait for this one
        own = error  # type: ignore[assignment]
        known = isinstance(error, (OSError, RuntimeError, ValueError, KeyError, TypeError))
        problem = ["CheckpointError", f"{folder} could not be read: {str(error) if known else repr(error)}", {}]
    if (first := agree.first_not_none(problem)) is not None:
        kind: type[errors.EchelonError] = getattr(errors, first[0])
        raise kind(first[1], **first[2]) from own
    return value  # type: ignore[return-value]


def untied(groups: Sequence[Sequence[str]], wanted: Mapping[str, Any], saved: Tensors) -> dict[str, str]:
    """Names of tied parameters that were saved with other values than the first name of the same parameter: name -> first name.

    Each rank compares what it holds. Nothing is changed.

    Args:
        groups: the names of each tied parameter.
    """
    lost = {}
    for names in groups:
        there = [k for k in names if k in saved.index and k in wanted and saved.shape(k) == list(wanted[k].size())]
        if len(there) < 2:
            continue
        first, *others = there
        values, more = torch.empty_like(wanted[first]), torch.empty_like(wanted[first])
        saved.read_into({first: values})
        for name in others:
            saved.read_into({name: more})
            if not all(map(torch.equal, _parts_here(values), _parts_here(more))):
                lost[name] = first
    return lost


def _parts_here(tensor: Any) -> list[torch.Tensor]:
    """This rank's parts of a tensor, however it is sharded."""
    if hasattr(tensor, "local_shards"):  # of the older FullyShardedDataParallel
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor]


def compare(
    folder: Location,
    states: dict[str, Stateful],
    rest: dict[str, Any],
    wanted: dict[str, Any],
    saved: Tensors,
    strict: bool,
    lacking: Sequence[str] = (),
    over: Sequence[str] = (),
    lost: Mapping[str, str] = MappingProxyType({}),
) -> Report:
    """Compare what is wanted with what was saved, before anything is changed. Collective: ranks may want different parts.

    Args:
        lost: as `untied` gives them.
    """
    both = {k: v for k, v in wanted.items() if k in saved.index}
    asked = [name for name in states if name in rest]
    of_asked = [k for k in saved.index if any(k.startswith(f"{name}.") for name in asked)]
    problems = [
        [*(k for k in wanted if k not in saved.index), *lacking],
        [[k, saved.shape(k), list(v.size())] for k, v in both.items() if saved.shape(k) != list(v.size())],
        [[k, saved.index[k]["dtype"], str(v.dtype)] for k, v in both.items() if saved.index[k]["dtype"] != str(v.dtype)],
        list(over),
        [f"{n}.{each}" for n, state in states.items() if n in rest for each in _untrained(state, rest[n])],
        hashlib.sha256("\n".join(of_asked).encode()).hexdigest(),
        dict(lost),
    ]
    problems_of_all = agree.kinds(problems)
    if any(each[5] != problems_of_all[0][5] for each in problems_of_all):
        raise CheckpointMismatchError(f"ranks restore {folder} under different names. Give all of them the same `rename`.")
    over = sorted({name for each in problems_of_all for name in each[3]})
    untrained = sorted({name for each in problems_of_all for name in each[4]})
    missing = sorted({k for each in problems_of_all for k in each[0]} | {name for name in states if name not in rest})
    shapes = {k: (a, b) for each in problems_of_all for k, a, b in each[1]}
    by_anyone = agree.any_ranks([k in wanted for k in of_asked])
    unexpected = sorted(k for k, is_wanted in zip(of_asked, by_anyone, strict=True) if not is_wanted) + list(over)
    unexpected += untrained
    tied = {k: first for each in problems_of_all for k, first in each[6].items()}
    cast = {k: (a.removeprefix("torch."), b.removeprefix("torch.")) for each in problems_of_all for k, a, b in each[2]}
    rows = [(k, str(tuple(a)), str(tuple(b))) for k, (a, b) in sorted(shapes.items())]
    if strict:
        rows += [(k, "-", _shape_of(wanted.get(k))) for k in missing]
        rows += [(k, str(tuple(saved.shape(k))) if k in saved.index else "saved", "-") for k in unexpected]
        rows += [(k, "other values", f"is {first}") for k, first in sorted(tied.items())]
        # Weights are cast on purpose, but an optimizer's averages stop moving if they lose their last bits.
        rows += [(k, a, b) for k, (a, b) in sorted(cast.items()) if ".state." in k and _loses(a, b)]
    rows.sort(key=lambda row: ".state." in row[0] or ".param_groups." in row[0])  # an optimizer's rows come last
    if rows:
        hint = "A new run starts in another folder, or an empty one."
        hint += "" if shapes else " RestoreOptions(strict=False) leaves these alone, and casts."
        if untrained:
            hint += (
                f" {len(untrained)} parameters that the saved optimizer trained would not be trained then: give them to the "
                "optimizer before it is restored, as the saved run did, or freeze them."
            )
        new = [name for name in states if name not in rest]
        left = [f"{', '.join(over)} out, for good: later checkpoints lack it"] if over else []
        left += [f"{', '.join(new)} as the script made it"] if new else []
        if left:
            hint += f" allow_changes={(*over, *new)!r} leaves only {'; and '.join(left)}."
        if tied:
            hint += (
                " Names that are one parameter now were saved with different values: build the module untied, or strict=False "
                "takes the first name's."
            )
        hint += renamed.hint(states, wanted, {k: saved.shape(k) for k in saved.index}, missing, unexpected)
        raise CheckpointMismatchError(
            f"{folder} does not fit this model:\n{table(('state', 'saved', 'now'), rows, most=16)}{hint}",
            changed=[name for name, *_ in rows],
        )
    return Report(missing, sorted({*unexpected, *tied}), cast)


def _shape_of(value: Any) -> str:
    return f"wanted {tuple(value.size())}" if isinstance(value, torch.Tensor) else "wanted"


def _loses(saved: str, now: str) -> bool:
    """Whether a dtype cannot hold all values of the saved one."""
    return torch.promote_types(plain.dtype_of(saved), plain.dtype_of(now)) != plain.dtype_of(now)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int = 12) -> str:
    """Rows in columns: the first `most`, and how many more. Made printable, since an untrusted file may be their source."""
    shown = [head, *(tuple(map(one_line, row)) for row in rows[:most])]
    more = [f"and {len(rows) - most} more"] if len(rows) > most else []
    return "".join(f"  {line}\n" for line in [*columns(shown), *more])


def read_rank(folder: Location, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's own state; None if the checkpoint was written by another number of ranks."""
    return read_ranks(folder, manifest)[0] if has_own(manifest) else None


def read_ranks(folder: Location, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The own states with which this rank goes on: its own; of a checkpoint of another number of ranks, those of the ranks whose
    number is this rank's, modulo the number of today's ranks.
    """
    rank, size = this_rank()
    with local_files(folder, manifest) as files:
        return [files.state(own_file(number)) for number in range(rank, _ranks(manifest), size)]


def has_own(manifest: dict[str, Any]) -> bool:
    """Whether as many ranks wrote a checkpoint as there are today, so that it has each rank's own state."""
    return _ranks(manifest) == this_rank()[1]


def _ranks(manifest: dict[str, Any]) -> int:
    return sum(name.startswith("rank-") for name in manifest["files"])
