"""Facts about a run in its checkpoints, and their comparison with the run that resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.checkpoint import strict
from echelon.checkpoint.renamed import moved, state_in
from echelon.checkpoint.store import table
from echelon.common.errors import CheckpointCorruptError, CheckpointMismatchError, UsageError
from echelon.common.redact import redacted_fields
from echelon.contracts.overrides import overrides
from echelon.contracts.run_dir import RunDir, read_json
from echelon.contracts.version import __version__
from echelon.data import resume
from echelon.data.loader import Loader
from echelon.data.stream import StreamLoader
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.unit import LRScheduler, Unit
from echelon.parallel.layouts import in_words, resolve
from echelon.parallel.state.keys import HOW
from echelon.parallel.state.partition import Partition
from echelon.world import agree
from echelon.world.init import World

__all__ = ["check", "command_here", "facts", "renamed"]

_HARMLESS = ("world_size", "mesh", "layout", "torch", "echelon", "python", "command")
# Options that a schedule changes, and the keys with their original values.
_SCHEDULED = {"lr": ("initial_lr",), "momentum": ("max_momentum",), "betas": ("max_momentum",)}

_KINDS = ("modules", "optimizers", "lr_schedulers", "progress", "misc_statefuls", "metrics")  # of a unit's states

# Longest text of one of the user's values.
_MOST_BYTES = 1 << 20

Row = tuple[str, str, str, str, bool]  # name, saved, now, meaning, whether it is harmful


def facts(unit: Unit, loader: Any) -> dict[str, Any]:
    """A run's facts for the manifest, as plain numbers and text. Most are compared at a restore."""
    described = {name: prepared.describe() for name, prepared in unit.prepared_modules().items()}
    axes: dict[str, int] = max((each["mesh"] for each in described.values()), key=len, default={})
    dp_size = _dp_size(unit)
    return {
        "world_size": World.current(torch.device("cpu")).size,
        "dp_size": dp_size,
        "mesh": axes or ({"data": dp_size} if dp_size else {}),  # sizes of axes by name; only "data" if nothing is sharded
        "layout": _layout(unit, described),
        "torch": torch.__version__,
        "echelon": __version__,
        "python": platform.python_version(),
        "modules": {name: each["module"] for name, each in described.items()},
        "optimizers": {name: type(Partition.behind(o)).__name__ for name, o in unit.tracked_optimizers().items()},
        "schedulers": {name: _kind(_parts(each)) for name, each in unit.tracked_lr_schedulers().items()},
        "options": {name: [_options(group) for group in o.param_groups] for name, o in unit.tracked_optimizers().items()}
        | {name: [_arguments(part) for part in _parts(each)] for name, each in unit.tracked_lr_schedulers().items()},
        "data": _of_loader(loader),
        "states": {name: kind for kind in _KINDS for name in getattr(unit, f"tracked_{kind}")()},
        "user": _users(unit),
        "command": command_here(),
    }


def _dp_size(unit: Unit) -> int | None:
    """Number of shares of every global batch; None if unknown."""
    try:
        return None if (data := unit.data_rank_and_size) is None else data[1]
    except UsageError:  # undeclared, which is allowed with a loader of the user's own
        return None


def _layout(unit: Unit, described: Mapping[str, Mapping[str, Any]]) -> str | None:
    given = unit.auto_options.layout if isinstance(unit, OptimizedUnit) else None
    if isinstance(imposed := overrides().layout, str) and given is not None:  # set by --layout
        given = imposed
    if given is not None:
        return in_words(value).partition("(")[0] if (value := resolve(given)) is not None else None
    return "+".join(sorted({each["layout"] for each in described.values()} - {None})) or None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options as the script gave them, without those whose original value a schedule has overwritten."""
    options = {}
    for key, value in group.items():
        moved = next((group[k] for k in _SCHEDULED.get(key, ()) if k in group), None)
        if key in HOW or key in ("params", "initial_lr") or (moved is not None and key != "lr"):
            continue
        given = moved if moved is not None else value
        options[key] = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
    return _plain(options)


def _parts(scheduler: Any) -> list[Any]:
    """A scheduler, and the schedulers that it consists of."""
    inner = [each for value in vars(scheduler).values() if isinstance(value, (list, tuple)) for each in value]
    return [scheduler, *(part for each in inner if isinstance(each, LRScheduler) for part in _parts(each))]


def _kind(parts: Sequence[Any]) -> str:
    own, *inner = (type(part).__name__ for part in parts)
    return f"{own} of {', '.join(inner)}" if inner else own


def _arguments(scheduler: Any) -> dict[str, Any]:
    """A scheduler's constructor arguments, if it keeps them as attributes of the same names."""
    names = inspect.signature(type(scheduler).__init__).parameters.keys() & vars(scheduler).keys() - {"optimizer", "last_epoch"}
    return _plain({name: vars(scheduler)[name] for name in sorted(names)})


def _of_loader(loader: Any) -> dict[str, Any]:
    """Facts about a loader of this library; states of other loaders are opaque."""
    own = {} if getattr(loader, "samples_of_a_rank", None) is None else {"samples_of_a_rank": loader.samples_of_a_rank}
    if isinstance(loader, Loader):
        return {**resume.facts(loader.state_dict()), **own}
    if isinstance(loader, StreamLoader):
        return {
            "global_batch": loader.global_batch,
            "accumulation": loader.accumulation,
            "num_workers": loader.num_workers,
            **own,
        }
    return {}


def _users(unit: Unit) -> dict[str, Any]:
    """The unit's attribute `config` (a dict, a dataclass, or an object such as a Namespace), as far as JSON can hold it."""
    config = getattr(unit, "config", None)
    if isinstance(config, (nn.Module, type)) or config is None:
        return {}
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    elif not isinstance(config, Mapping):
        config = getattr(config, "__dict__", {})
    fields: dict[str, Any] = redacted_fields(_plain(config))  # readable by everyone who can read the checkpoint
    return fields


def _plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values that JSON can hold and that are small enough for the manifest, as they will be read back."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(value)
            strict.check_depth([[[[value]]]])
            if len(text) <= _MOST_BYTES:
                plain[str(name)] = json.loads(text)
    return plain


def command_here() -> list[str]:
    """The command that started this run; [] if no launcher recorded it."""
    run = RunDir.current()
    about = read_json(run.run_json) if run is not None else None
    return [str(word) for word in (about or {}).get("command", [])]


_OF_STATES = ("modules", "optimizers", "schedulers", "options", "states")


def renamed(saved: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """A checkpoint's facts under today's names of states."""
    by_state = {k: each for k, each in saved.items() if k in _OF_STATES and isinstance(each, dict)}
    return {**saved, **{k: {state_in(moved(n, renames)): v for n, v in each.items()} for k, each in by_state.items()}}


def check(
    saved: Mapping[str, Any], unit: Unit, loader: Any, *, restored: Iterable[str], allowed: Iterable[str]
) -> tuple[str, set[str]]:
    """Compare a checkpoint's facts with this run. Collective: a difference on one rank is an error on all.

    Args:
        restored: which of "optimizers" and "schedulers" will be restored.
    Returns:
        a table of changes, "" if there are none, and the names of changes that are not harmless but allowed.
    Raises:
        CheckpointMismatchError: a change is neither harmless nor allowed; with the table.
        CheckpointCorruptError: `saved` does not have the form of `facts`.
    """
    now, allowed, problem = facts(unit, loader), set(allowed), None
    rows: list[Row] = []
    try:
        for name in (*_OF_STATES, "user", "data"):
            strict.mapping(saved.get(name, {}), name)
        for kind in (*saved.get("states", {}).values(), saved.get("position") or ""):
            strict.text(kind, "the kind of a state or a loader")
        rows = _changes(saved, now, restored)
        if isinstance(loader, Loader):
            allowed |= loader.accept_changes
            if saved.get("data"):
                rows += [(c.name, c.saved, c.now, c.meaning, c.harmful) for c in resume.changes(saved["data"], now["data"])]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # `saved` has not the form of `facts`
        problem = repr(error)
    facts_of_all = agree.kinds([rows, sorted(allowed), problem])
    if odd := next((text for *_, text in facts_of_all if text is not None), None):
        raise CheckpointCorruptError(f"the checkpoint's description of its run is not what echelon writes: {odd}.")
    everyones = dict.fromkeys(tuple(row) for each, *_ in facts_of_all for row in each)
    if not everyones:
        return "", set()
    allowed = {name for _, each, _ in facts_of_all for name in each}
    shown = [
        (name, a, b, meaning if not harmful else f"{'allowed' if name in allowed else 'NOT harmless'}: {meaning}")
        for name, a, b, meaning, harmful in sorted(everyones, key=lambda row: (row[4], row[0]))
    ]
    text = table(("what", "saved", "now", ""), shown, most=40)
    harmful = {name for name, *_, is_harmful in everyones if is_harmful}
    refused = sorted(harmful - allowed)
    if refused:
        raise CheckpointMismatchError(
            f"this run is not the one that was saved:\n{text}"
            "Start a new run in another folder, or an empty one. To continue the saved run with these changes, pass "
            f"Checkpoints(folder, restore_options=RestoreOptions(allow_changes={tuple(refused)!r})), of echelon.callbacks.",
            changed=refused,
        )
    return text, harmful


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any], restored: Iterable[str]) -> list[Row]:
    """Differences, other than the loader's."""
    rows: list[Row] = []
    for name in _HARMLESS:
        if name in saved and saved[name] != now[name]:
            rows.append((name, _shown(saved[name]), _shown(now[name]), "harmless", False))
    before, after = saved.get("user", {}), now["user"]
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            was, is_ = before.get(name, "-"), after.get(name, "-")
            rows.append((f"config.{name}", _shown(was), _shown(is_), "harmless: yours", False))
    for name, kind, is_ in ((n, k, now[of].get(n, k)) for of in restored for n, k in saved.get(of, {}).items()):
        if kind != is_:
            rows.append((name, _shown(kind), _shown(is_), "it begins without the saved state", True))
        elif name in now["options"] and len(saved.get("options", {}).get(name, ())) == len(now["options"][name]):
            rows += _given(name, saved["options"][name], now["options"][name])
    return rows


def _given(name: str, saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[Row]:
    """Options that differ between the script and the checkpoint. As in torch, the saved values win."""
    rows: list[Row] = []
    for index, (was, is_) in enumerate(zip(saved, now, strict=True)):
        where = name if len(saved) == 1 else f"{name}[{index}]"
        for key in sorted(was.keys() & is_.keys()):
            if was[key] != is_[key]:
                rows.append((f"{where}.{key}", _shown(was[key]), _shown(is_[key]), "harmless: the saved value is used", False))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " x ".join(f"{name} {size}" for name, size in value.items()) or "-"
    text = " ".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
