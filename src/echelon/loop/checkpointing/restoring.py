"""Restore a unit from a checkpoint: choose the checkpoint and the state, and compare what has changed since the save."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.checkpoint import commit, foreign, store
from echelon.checkpoint.location import Location, absolute
from echelon.checkpoint.renamed import Naming, moved
from echelon.checkpoint.store import Report
from echelon.checkpoint.strict import fits
from echelon.common.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointOptionError,
    UsageError,
    require,
)
from echelon.common.terminal import printable
from echelon.data.base import BaseLoader
from echelon.data.fingerprint import checksum
from echelon.data.generators import is_between_epochs, load_state_between_epochs, state_between_epochs
from echelon.data.loader import Loader
from echelon.data.replayed import Replayed, with_state
from echelon.hf.conversion import lays_for
from echelon.loop.checkpointing import changes
from echelon.loop.checkpointing.frozen import train_as_saved, without_frozen
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.records.logged import Logged
from echelon.loop.records.metrics import join_shares, load_share, reset
from echelon.loop.unit import TrainedUnit, Unit
from echelon.loop.validate import accumulation_of
from echelon.parallel.meta.materialize import check_kept
from echelon.parallel.names import plain_name
from echelon.parallel.shards import authors_classes
from echelon.parallel.state.optimizer_state import OptimizerState
from echelon.parallel.state.state import states_by_name
from echelon.world import agree, rng

__all__ = ["BY_RANK", "chosen_of", "differs_by_rank", "read_on_beside", "restore", "restore_first"]

logger = logging.getLogger(__name__)

# Keys of per-rank state that do not belong to a layout.
_OWN = ("streams", "metrics", "logged", "others", "train_dataloader", "eval_dataloader", "predict_dataloader")


def restore_first(
    dirpath: Location,
    ordered: list[Location],
    unit: Unit,
    loader: Iterable[Any] | None,
    options: RestoreOptions,
    fall_back: bool,
    *,
    rolls_back: bool = False,
) -> bool:
    """Restore the first of these checkpoints that is valid; False if the list is empty.

    Args:
        rolls_back: the same run goes back to an earlier state.
    Raises:
        CheckpointCorruptError: all of them are corrupt; or, without `fall_back`, the first is.
    """
    check_unit(unit)
    wrong: list[str] = []
    for path in ordered:
        try:
            manifest = commit.verify(path)
            # If this finds damage after it has loaded a part, an older checkpoint overwrites that part.
            _restore(path, manifest, unit, loader, options, rolls_back=rolls_back)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            if not fall_back:
                raise CheckpointCorruptError(f"{path} is corrupt, and fall_back is False: {error}", path=str(path)) from error
            wrong.append(str(error))
            logger.warning("%s is corrupt and passed over: %s", path, printable(str(error)))
            continue
        if wrong:
            logger.warning("went on from %s instead", path)
        return True
    if wrong:
        raise CheckpointCorruptError(
            f"every checkpoint in {dirpath} is corrupt: {' '.join(wrong)} To start over and set these aside, use "
            "`echelon run --restart`, or give the saver SaveOptions(restart=True) and do not restore."
        )
    return False


def check_unit(unit: Any) -> None:
    """
    Raises:
        UsageError: the object has no state to restore.
    """
    has_state = callable(getattr(unit, "app_state", None)) and not isinstance(unit, type)
    require(has_state, "unit", "a unit such as an AutoUnit", unit, kind=CheckpointOptionError)


def restore(path: Location, unit: Unit, loader: Iterable[Any] | None, options: RestoreOptions) -> Report:
    check_unit(unit)
    if isinstance(path, Path) and foreign.is_weights(path):
        modules = unit.prepared_modules()
        if len(modules) != 1:
            raise CheckpointOptionError(
                f"{path} holds the weights of one module, but the unit has {len(modules)}: {', '.join(modules)}."
            )
        (module,) = modules.values()
        report = foreign.read_weights(
            path,
            module.state(),
            strict=options.strict,
            rename=options.rename,
            lays=None if options.rename else lays_for(module.unwrapped, plain_name, authors_classes),
            keeps=lambda kept: check_kept(module.module, kept),
        )
        _log(report, path)
        return report
    try:
        manifest = commit.verify(path)
    except CheckpointNotFoundError as error:
        if inside := commit.candidates(path) or commit.candidates(path / "checkpoints"):
            raise CheckpointNotFoundError(
                f"{path} is a folder of checkpoints, not a checkpoint. The newest in it is {inside[0]}; restore_from_latest "
                "restores it.",
                path=str(path),
            ) from error
        raise
    return _restore(path, manifest, unit, loader, options)


def _restore(
    path: Location, manifest: dict[str, Any], unit: Unit, loader: Any, options: RestoreOptions, *, rolls_back: bool = False
) -> Report:
    chosen = chosen_of(unit, options)
    if loader is not None:
        accumulation_of(unit, loader)  # the saved position counts micro-batches, so their number must be settled first
    allowed = options.allow_changes
    seeks = hasattr(with_state(loader), "load_state_dict") or state_between_epochs(loader) is not None
    config = changes.renamed(manifest.get("config", {}), options.rename)
    restored = [
        k for k, is_ in (("optimizers", options.restore_optimizers), ("schedulers", options.restore_lr_schedulers)) if is_
    ]
    if isinstance(loader, Loader):
        loader.take_seed(config.get("data"))
    table, meant = changes.check(config, unit, loader, restored=restored, allowed=allowed)
    if table and options.show_changes and agree.is_rank0():
        # Harmless changes are shown, too: a new learning rate, for example, is not used.
        logger.warning("since %s was saved, this has changed:\n%s", path, table)
    if meant & {name for kind in restored for name in config.get(kind, {})}:
        chosen = {name: value for name, value in chosen.items() if name not in meant}
    if isinstance(unit, TrainedUnit) and options.restore_optimizers and options.restore_train_progress:
        train_as_saved(manifest.get("trained"), unit, path, options.rename, rolls_back=rolls_back)
    # Computed over the whole state, then filtered: an optimizer's names come from its modules, restored or not.
    states = {name: state for name, state in states_by_name(unit.app_state()).items() if name in chosen}
    frozen, note = manifest.get("frozen", {}), not options.takes_weights_only  # a script takes weights only at every start
    states = without_frozen(states, frozen, unit, path, strict=options.strict, note=note)
    if seeks:
        states["train_dataloader"] = _IfSaved(
            loader, meant, lambda: store.read_rank(path, manifest), in_epoch=bool(config.get("position"))
        )
    elif config.get("position") and isinstance(unit, TrainedUnit) and options.restore_train_progress and agree.is_rank0():
        logger.warning(
            "%s holds the position of a %s in the middle of an epoch; give the loader, too: train_dataloader=. Without it, "
            "training reads the epoch's first batches again.",
            path,
            printable(config["position"]),
        )
    goes_on = not options.takes_weights_only and (store.has_own(manifest) or isinstance(unit, TrainedUnit))
    own = store.on_each(path, lambda: _own(path, manifest)) if goes_on else []
    report = store.read_states(
        path,
        states,
        manifest,
        strict=options.strict,
        forgotten=lambda names: _forgotten(config, names, unit, options),
        may_begin=allowed,
        rename=options.rename,
        naming=_naming(options.rename, states) if options.rename else None,
    )
    _log(report, path)
    if goes_on and store.has_own(manifest):
        _load_own(path, own[0], unit, states, options)
    elif goes_on and isinstance(unit, TrainedUnit):
        _join_own(own, unit, options, manifest.get("by_rank", []))
    if not options.takes_weights_only:
        read_on_beside(path, getattr(unit, "beside", ()), manifest.get("beside", {}))
    unit.restored()
    if options.restore_train_progress:
        unit.restored_from = str(absolute(path))
    return report


def _own(path: Location, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Per-rank state: RNG states, shares of metrics, what was logged, layouts' extras. See `store.read_ranks`."""
    states = store.read_ranks(path, manifest)
    for own in states:
        # The state of a local SGD worker is checked where it is loaded.
        extras = {key: {str: dict if key == "worker" else [str]} for key in own if key not in _OWN}
        own.setdefault("logged", {"numbers": {}, "totals": {}, "metrics": {}})  # of an older release
        wanted = {"streams": dict, "metrics": {str: dict}, "logged": dict, "others": {str: dict}, **extras}
        if not fits({"others": {}, **own}, wanted) or not _can_go_on(own["logged"]):
            raise CheckpointCorruptError(
                f"{path} holds per-rank state that echelon does not write: {', '.join(map(repr, own))}.", path=str(path)
            )
    return states


def _can_go_on(logged: dict[str, Any]) -> bool:
    try:
        Logged().load_state_dict(logged, {})
    except ValueError:
        return False
    return True


def _load_own(path: Location, own: dict[str, Any], unit: Unit, restored: dict[str, Any], options: RestoreOptions) -> None:
    """Load this rank's own state, from a checkpoint of as many ranks.

    Args:
        restored: what was restored, by name.
    """
    store.on_each(path, lambda: _load_streams(path, own["streams"]))
    unit.resumes_with, unit.resumes_logged = own["streams"], own["logged"] if options.restore_metrics else None
    for name, metric in unit.tracked_metrics().items():
        if options.restore_metrics and name in own["metrics"]:
            load_share(metric, own["metrics"][name])
    others = unit.tracked_misc_statefuls()
    own_states = [(others[name], state) for name, state in own.get("others", {}).items() if name in others]
    store.on_each(path, lambda: [each.load_state_dict(state) for each, state in own_states])
    kept = [(restored[name].whole(), state) for name, state in own.get("others", {}).items() if _keeps(restored.get(name))]
    store.on_each(path, lambda: [now[key].copy_(was[key]) for now, was in kept for key in now.keys() & was.keys()])
    for name, prepared in unit.prepared_modules().items():
        prepared.extras.load_state_dict({key: own[key][name] for key in own if key not in _OWN and name in own[key]})


def _join_own(states: Sequence[dict[str, Any]], unit: TrainedUnit, options: RestoreOptions, by_rank: Any) -> None:
    """Start new random streams, and join what the ranks of another number of them had counted. Collective."""
    unit.resumes_with = unit.resumes_logged = None  # may be left from another checkpoint
    rng.renew(unit.train_progress.num_updates_completed)
    if by_rank and fits(by_rank, [str]) and agree.is_rank0():
        logger.warning(
            "saved by another number of ranks: the state of %s differed between them, and all ranks now have the same",
            printable(", ".join(by_rank)),
        )
    if not options.restore_metrics:
        return
    unit.resumes_logged = Logged.joined([each["logged"] for each in states])
    metrics = unit.tracked_metrics()
    shares = {name: [each["metrics"][name] for each in states if name in each["metrics"]] for name in metrics}
    failed = [name for name, metric in metrics.items() if not join_shares(metric, shares[name])]
    if lost := sorted({name for each in agree.kinds(failed) for name in each}):
        for name in lost:
            reset(metrics[name])
        kept = {name: attribute for name, attribute in unit.resumes_logged["metrics"].items() if attribute not in lost}
        unit.resumes_logged["metrics"] = kept
        logger.warning("saved by another number of ranks: the per-rank shares of %s start over", ", ".join(lost))


def _keeps(state: Any) -> bool:
    return isinstance(state, OptimizerState) and state.may_differ


def read_on_beside(path: Location, beside: Iterable[Any], states: Any) -> None:
    try:
        for number, each in enumerate(beside, 1):
            if str(number) in states:
                each.go_on(states[str(number)])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointCorruptError(
            f"{path} holds an invalid position of a loader beside the training loader: {error!r}.", path=str(path)
        ) from None


def _load_streams(path: Location, saved: dict[str, Any]) -> None:
    try:
        rng.load_states(saved)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointCorruptError(f"{path} holds invalid RNG states: {error!r}.", path=str(path)) from None


def chosen_of(unit: Unit, options: RestoreOptions) -> dict[str, Any]:
    """The part of a unit's app state to restore, without metrics."""
    state = unit.app_state()  # first, because it builds attributes that are built at first use
    wanted = {**_wanted(options), "metrics": False}  # each rank has a share of its own
    dropped = {name for kind, is_wanted in wanted.items() if not is_wanted for name in getattr(unit, f"tracked_{kind}")()}
    phases = ("train", "eval", "predict")
    dropped |= {f"{phase}_progress" for phase in phases if not getattr(options, f"restore_{phase}_progress")}
    return {name: value for name, value in state.items() if name not in dropped}


def _wanted(options: RestoreOptions) -> dict[str, bool]:
    """The kinds of a unit's state, and whether to restore each. Fine-tuning takes neither averages nor the user's other state."""
    return {
        "modules": options.restore_modules,
        "optimizers": options.restore_optimizers,
        "lr_schedulers": options.restore_lr_schedulers,
        "misc_statefuls": not options.takes_weights_only,
    }


def _log(report: Report, path: Location) -> None:
    if report.missing:
        logger.warning("%s has no state for these; they stay as they are: %s", path, printable(", ".join(report.missing)))
    if report.cast and agree.is_rank0():
        kinds = Counter(report.cast.values())
        shown = ", ".join(f"{n} from {a} to {b}" for (a, b), n in kinds.items())
        logger.warning("%s: tensors cast: %s; the first is %s", path, shown, printable(next(iter(report.cast))))
    if report.unexpected:
        logger.warning("%s also has state that this unit does not use: %s", path, printable(", ".join(report.unexpected)))


# Stands for a loader's state that differs between ranks: each rank's state is in its own file.
BY_RANK = {"by_rank": True}
BETWEEN_BY_RANK = {"by_rank": True, "between": True}  # the same for the state of generators between two epochs


def differs_by_rank(state: Any) -> bool:
    """Whether the ranks have different states, as other libraries' loaders with shards do. Collective."""
    sums = agree.kinds(checksum(state)) if agree.is_joined() else [0]
    return sums[0] is None or len(sums) > 1


class _IfSaved:
    """The loader's state. A checkpoint from an epoch's end holds only the state of its generators; the next epoch then begins.

    Args:
        meant: names of changes that are allowed, besides those that the loader itself accepts.
        own: reads this rank's state; None if another number of ranks saved it.
        in_epoch: for a loader of another library: the checkpoint is from the middle of an epoch. Otherwise such a loader is not
            asked for its state, since that may make it begin an iteration.
    """

    def __init__(self, loader: Any, meant: set[str], own: Callable[[], dict[str, Any] | None], *, in_epoch: bool) -> None:
        self._given, self._loader, self._meant, self._own = loader, with_state(loader), meant, own
        self._in_epoch = hasattr(self._loader, "load_state_dict") and (in_epoch or isinstance(loader, BaseLoader))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict() if self._in_epoch else {}
        return state

    def _begins_anew(self, why: str) -> None:
        if agree.is_rank0():
            logger.warning(
                "the order of the %s is drawn anew, as in a run's first epochs: %s. echelon.Loader continues its order",
                self._given.__class__.__name__,
                why,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        if state_dict in (BY_RANK, BETWEEN_BY_RANK):
            own = self._own()
            if own is None and state_dict == BETWEEN_BY_RANK:
                self._begins_anew("another number of ranks saved it")
                return
            if own is None and isinstance(self._loader, Replayed):  # it starts the epoch over, which the loop tells
                return
            if own is None:
                raise CheckpointMismatchError(
                    f"each rank saved the state of its own {self._given.__class__.__name__}, so the number of ranks must be the "
                    "same. Use as many ranks, or do not restore the loader; echelon.Loader resumes on any number."
                )
            if not isinstance(own.get("train_dataloader"), dict):
                raise CheckpointCorruptError("the checkpoint should hold the state of this rank's loader, but does not.")
            state_dict = own["train_dataloader"]
        if is_between_epochs(state_dict):
            if not load_state_between_epochs(self._given, state_dict) and not isinstance(self._loader, BaseLoader):
                self._begins_anew("the saved loader had other generators")
            return
        if not hasattr(self._loader, "load_state_dict"):
            return
        if not isinstance(self._loader, Loader):
            self._loader.load_state_dict(state_dict)
            return
        if state_dict.keys() >= Replayed.STATE:
            raise CheckpointOptionError(
                "the checkpoint was written on one rank, in the middle of an epoch of a DataLoader in torch's own order. "
                "Resume on one rank, or from a checkpoint of an epoch's end."
            )
        try:
            self._loader.load_state_dict(state_dict, accept=self._meant)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorruptError(f"the checkpoint's loader state is not that of a Loader: {error!r}.") from None


# --- state in a checkpoint that the program no longer has, and renamed layers


def _forgotten(
    config: Mapping[str, Any], names: Collection[str], unit: Unit, options: RestoreOptions
) -> tuple[list[str], list[str]]:
    """Names of states in a checkpoint that the unit no longer has: those to refuse when strict, and those only to list.

    A run without such a state would be another run, and its next checkpoint would lack it. A unit that does not train, or takes
    weights only, ignores the state of training silently.
    """
    kind_of = {**dict.fromkeys(names, "misc_statefuls"), **config.get("states", {})}
    # Metrics are in the ranks' own files, not among `names`. Any other state that is not among `names` has been renamed.
    kind_of = {name: kind for name, kind in kind_of.items() if name in names or kind == "metrics"}
    kind_of.pop("train_dataloader", None)
    trains = isinstance(unit, TrainedUnit) and not options.takes_weights_only
    wanted = {**_wanted(options), "progress": False, "metrics": options.restore_metrics}
    if not trains:
        wanted |= dict.fromkeys(("optimizers", "lr_schedulers", "metrics"), False)
    gone = sorted(name for name, kind in kind_of.items() if wanted.get(kind, True) and name not in unit.app_state())
    meant = {*options.allow_changes, *unit.may_lack}
    refused = [name for name in gone if trains and name not in meant]
    return refused, [name for name in gone if name not in refused]


def _naming(renames: Mapping[str, str], states: Mapping[str, Any]) -> Naming:
    """A function from names in a checkpoint to today's names, for states, tensors and an optimizer's state of these tensors.

    Args:
        renames: beginnings of names, including the state's name, such as `{"module.encoder": "module.backbone"}`.
        states: the states to restore, by name.
    """
    back = {new: old for old, new in renames.items()}
    # For each optimizer, the prefix of a parameter's full name that its own names lack: in the checkpoint, and here.
    fronts: dict[str, tuple[str, str]] = {}
    for name, state in states.items():
        if hasattr(state, "full_names"):
            full = state.full_names()
            olds = {moved(each, back).partition(".")[0] for each in full.values()}
            # An optimizer's names begin with the module's name only if it holds parameters of several modules.
            before = f"{olds.pop()}." if len(olds) == 1 else ""
            fronts[name] = before, next((each.removesuffix(name_here) for name_here, each in full.items()), "")

    def now(name: str) -> str:
        state, _, key = moved(name, renames).partition(".")
        kind, _, rest = key.partition(".")
        # Names that begin with ~ are of parameters outside modules.
        if kind in ("state", "param_groups") and state in fronts and not rest.startswith("~"):
            before, after = fronts[state]
            return f"{state}.{kind}.{moved(before + rest, renames).removeprefix(after)}"
        return f"{state}.{key}" if key else state

    return now
