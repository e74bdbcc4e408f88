"""`prepare`, `epochs`, `window` and `evaluating`: a user's own training loop on many processes.

    model, optimizer, loader = echelon.prepare(model, optimizer, loader, layout="fsdp", checkpoints="checkpoints")
    for epoch in echelon.epochs(loader, 3):
        for x, y in loader:
            with echelon.window(model) as window:
                window.backward(loss_of(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

Behind it is a unit (`loop/own/loop_unit.py`) with an AutoUnit's Update, so that gradients are weighed, runs saved and resumed,
and stops agreed on as in `train`. All other code in the loop runs as written.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon.checkpoint.layout import Stateful
from echelon.common.errors import OwnLoopError
from echelon.common.older_words import renames
from echelon.contracts.overrides import overrides
from echelon.data.base import BaseLoader
from echelon.data.chain import Chain
from echelon.data.torch_loader import is_distributed
from echelon.loop.auto.optimizer_checks import are_alike
from echelon.loop.auto.unit_options import AutoOptions
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.checkpoints import Checkpoints, saver_of, take_up
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.loop.modes import begin_training, in_mode
from echelon.loop.own.batch_window import OwnWindow
from echelon.loop.own.batches import EvaluationBatches, TrainingBatches, check_shares, refuse_prepared, training_loader
from echelon.loop.own.loop_unit import LoopUnit
from echelon.loop.own.session import Session
from echelon.loop.records.record import Recorder
from echelon.loop.unit import LRScheduler
from echelon.observe.sinks.folder import default_sinks
from echelon.parallel.ddp.wrapper import read_as_wrapped
from echelon.parallel.guards.guard import explain
from echelon.parallel.meta.materialize import is_recorded, on_meta_tensors
from echelon.parallel.names import plain_names
from echelon.parallel.parallelize import parallelize
from echelon.parallel.patching import for_now
from echelon.parallel.prepared import combined
from echelon.parallel.recipe.activation import Preset
from echelon.parallel.recipe.compilation import Compile
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.shards import is_split
from echelon.parallel.state.partition import parameters_of
from echelon.parallel.state.sharded import part_like
from echelon.parallel.strategy import Strategy
from echelon.world import agree, clock
from echelon.world.clock import Part
from echelon.world.handshake import check_same_setup
from echelon.world.init import init_from_env
from echelon.world.rng import GENERATORS

__all__ = ["epochs", "evaluating", "prepare", "window"]

logger = logging.getLogger(__name__)


@renames(strategy="layout", gradient_accumulation_steps="accumulate", activation_checkpoint_params="recompute")
def prepare(
    *objects: Any,
    layout: Strategy | str | None = "ddp",
    precision: str | torch.dtype | Precision | Float8 | None = None,
    accumulate: int | None = None,
    checkpoints: str | Path | Checkpoints | DistributedCheckpointSaver | None = None,
    callbacks: Sequence[Callback] = (),
    compile: Compile = None,
    recompute: Preset = None,
    device: torch.device | None = None,
) -> Any:
    """Make a loop's model, optimizer and loaders parallel. Every rank calls it; it joins the ranks if they have not joined yet.

    The model is put in train mode, except for parts that are in eval mode on purpose: frozen ones, and single layers. Modes that
    the loop sets later stay as set.

    Args:
        objects: in any order: a model, an optimizer over its parameters, and one training loader; optionally schedulers, loaders
            to evaluate on (all after the first loader), and what else is to be saved: generators of random numbers, and objects
            with `state_dict` and `load_state_dict`. Modules that no optimizer trains are saved, too; a copy of the model, such as
            an average of its weights, is sharded like the model. Several models, optimizers and schedulers train together: see
            `window`. A torch DataLoader's batch size is the global one, which the ranks share; with a DistributedSampler, it is
            each rank's.
        layout, precision, compile, recompute, device: as in AutoUnit. If you give a device, call `init_from_env` before.
        accumulate: batches per update on each rank, 1 by default. That many batches of a DataLoader make an update; a Loader
            splits its global batch into that many.
        checkpoints: a folder, or a Checkpoints, which says when to save there and what to keep. The newest checkpoint there is
            restored before this returns. Or a DistributedCheckpointSaver.
        callbacks: as in `train`.
    Returns:
        the given objects, in the same order: the model as the layout made it, the same optimizer and scheduler, and loaders that
        give this rank's batches on its device. A single object is returned without a tuple.
    Raises:
        UsageError: on all ranks: an optimizer over other parameters, a scheduler of another optimizer, or an object of another
            kind; with `checkpoints`, here or at the first batch: no scheduler of an optimizer that has one.
    """
    refuse_prepared(objects, layout)
    parts = _Parts.of(objects)
    device = device or init_from_env()
    check_same_setup()
    loader, steps = training_loader(parts.loader, accumulate)
    options = AutoOptions(
        layout=layout,
        precision=precision,
        accumulate=steps,
        compile=compile,
        recompute=recompute,
        device=device,
    )
    unit = _unit(parts, options)
    evaluation = {id(each): EvaluationBatches(each, unit, number) for number, each in enumerate(parts.evaluation, 1)}
    unit.beside = list(evaluation.values())
    batches = _joined(parts, unit, loader, list(callbacks), checkpoints)
    made = {id(parts.loader): batches, **dict(zip(map(id, parts.models), _as_made(parts, unit), strict=True)), **evaluation}
    returned = tuple(made.get(id(each), each) for each in objects)
    return returned[0] if len(returned) == 1 else returned


def _unit(parts: _Parts, options: AutoOptions) -> LoopUnit:
    """Make the model parallel, and the optimizer hold the parameters that it has then."""
    module = parts.models[0] if len(parts.models) == 1 else nn.ModuleList(parts.models)
    names = {p: name for name, p in plain_names(module)}  # taken now: a layout may undo the user's wrapper
    followed = [*parts.models, *(part for each in parts.copies for part in _followed(each, parts.models))] if parts.copies else []
    shapes = [{name: p.shape for name, p in plain_names(model)} for model in followed]
    held = {p for optimizer, _ in parts.optimizers for p in parameters_of(optimizer)}
    left = [[p for p in model.parameters() if p.requires_grad and p not in held] for model in (*parts.models, *parts.copies)]
    for optimizer, _ in parts.optimizers:
        problem = _check_optimizer(optimizer, module, names, left=left if len(parts.optimizers) > 1 else None)
        agree.raise_on_all(problem)
    for model in parts.models:
        if not model.training and not hasattr(type(model), "from_pretrained") and agree.is_rank0():
            logger.warning(
                "the %s was in eval mode; prepare() puts it in train mode. To train in eval mode, call model.eval() afterwards",
                type(model).__name__,
            )
        begin_training(model)
    if on_meta_tensors(module) and is_recorded(module) and not all(map(is_recorded, parts.copies)):
        raise OwnLoopError(
            "a copy of a model must have values, got a copy of one on the meta device, which was made without the recording that "
            "on_meta() keeps. Make it within on_meta(), right behind the model."
        )
    several = len(parts.models) > 1 or len(parts.optimizers) > 1
    unit = LoopUnit(module, parts.optimizers, options, several=several)
    for optimizer, _ in parts.optimizers:
        _refit(unit.prepared, optimizer, names)
    if several:
        unit.configure()
    for i, each in enumerate(parts.copies):
        for of_model in shapes:
            _divide_alike(each, unit, of_model, options.layout)
        read_as_wrapped(each)
        setattr(unit, f"copy_{i}", each.to(unit.device))
    for i, each in enumerate(parts.stateful):
        setattr(unit, f"stateful_{i}", each)
    return unit


def _as_made(parts: _Parts, unit: LoopUnit) -> list[nn.Module]:
    """The models as the layout has made them."""
    return [unit.module] if len(parts.models) == 1 else list(unit.module.children())


def _joined(
    parts: _Parts,
    unit: LoopUnit,
    loader: Any,
    callbacks: list[Callback],
    checkpoints: str | Path | Checkpoints | DistributedCheckpointSaver | None,
) -> TrainingBatches:
    """Make the session and the training loader that the loop gets, and restore a checkpoint."""
    saver = None if checkpoints is None else saver_of(checkpoints, own_loop=True)
    if saver is not None:
        callbacks.append(saver)
    if isinstance(parts.loader, DataLoader):
        check_shares(parts.loader, unit)
        unit.shares_batches = not is_distributed(parts.loader)
    session = Session(unit, loader, callbacks, None if overrides().observes else saver)
    session.take_over()
    batches = TrainingBatches(loader, parts.loader, session)
    objects = (*parts.models, *(optimizer for optimizer, _ in parts.optimizers), batches)
    session.adopt(_as_made(parts, unit), parts.copies, *objects)
    if saver is not None:
        take_up(checkpoints, saver, unit, loader)
    return batches


def epochs(prepared: Any, number: int | None = None, *, max_updates: int | None = None) -> Iterator[int]:
    """Iterate over the epochs of a run, starting where a restored run stands. Replaces `range(number)`.

        for epoch in echelon.epochs(loader, max_updates=100_000):  # in place of counting steps
            for batch in loader:
                ...

    After the last epoch, and after a stop, the run is saved and ended before the code after the loop runs. After a signal, the
    process exits here with code 75, once the run is saved.

    Args:
        prepared: the training loader, model or optimizer from `prepare`.
        number: number of epochs; in a second call, of further epochs. None leaves the end to `max_updates`.
        max_updates: the loader stops giving batches after this many updates, including those before a restart and those of
            earlier calls. One of `number` and `max_updates` is needed.
    """
    return Session.of(prepared, "echelon.epochs(...)").epochs(number, max_updates)


def window(prepared: Any, *others: Any, weight: float | torch.Tensor | None = None) -> OwnWindow:
    """Context of one batch: forward pass, `window.backward(loss)`, clipping and the optimizer's step.

    Within it the model computes in the precision given to `prepare`. Gradients are reduced over the ranks with an update's last
    batch.

    With several optimizers, `backward` may be called several times. Each optimizer's step trains on the gradients that its
    parameters have got since they were last cleared, over all ranks and all batches of the update, as in plain PyTorch. Call its
    `step` in every batch of an update, inside the window; before the last batch it does nothing. To step in some updates only,
    such as a generator after five steps of a critic, decide by `window.update`. An update is counted whichever optimizers step.

    Args:
        prepared, others: the model or optimizer from `prepare`; one of several that train together is enough.
        weight: weight of this rank's batch in the mean over the global batch; default: its number of samples. If the loss is a
            mean over tokens, their number: `weight=(y != -100).sum()`.
    """
    session = Session.of(prepared, "echelon.window(...)")
    if others and any(Session.of(each, "echelon.window(...)") is not session for each in others):
        raise OwnLoopError(
            "echelon.window(...) must be given objects that one echelon.prepare(...) returned, got objects of several calls. "
            "Prepare together what trains in one window: prepare(generator, critic, its_optimizer, ..., loader)."
        )
    return OwnWindow(session, weight) if session.unit.reference is None else session.unit.reference.window(session, weight)


@contextlib.contextmanager
def evaluating(prepared: Any) -> Iterator[LoopEvaluation]:
    """Context of an evaluation in a user's own loop: eval mode, no gradients, `prepare`'s precision. Every rank enters it.

        with echelon.evaluating(model) as evaluation:
            for x, y in held_out:
                evaluation.log("accuracy", (model(x).argmax(1) == y).float().mean())
        evaluation.numbers["accuracy"]  # over all samples and ranks

    With `Checkpoints(folder, best="accuracy")` the evaluated weights are saved, and the best checkpoint is kept.
    """
    session = Session.of(prepared, "echelon.evaluating(...)")
    unit, evaluation = session.unit, LoopEvaluation(session)
    unit.prepared.before_evaluation()
    guards = combined(*(guard.evaluating() for guard in unit.prepared.guards))
    with clock.during(Part.EVAL), in_mode(unit, "eval"), guards, torch.no_grad(), unit.autocast():
        try:
            yield evaluation
        except BaseException as error:
            session.logged.discard("eval")
            explain(unit.prepared.guards, error)
            raise
    for guard in unit.prepared.guards:
        guard.evaluated()
    evaluation.end()
    if session.run is not None and session.state.recorder is not None:
        session.state.recorder.pause_clock()


@dataclass
class _Parts:
    """The arguments of `prepare`, by kind."""

    models: list[nn.Module]
    optimizers: list[tuple[torch.optim.Optimizer, Any]]  # with the first scheduler of each, if it has one
    loader: Any
    copies: list[nn.Module]
    evaluation: list[Any] = field(default_factory=list)
    stateful: list[Any] = field(default_factory=list)  # also further schedulers

    @classmethod
    def of(cls, objects: Sequence[Any]) -> _Parts:
        by_kind: dict[str, list[Any]] = {kind: [] for kind in ("model", "optimizer", "scheduler", "loader", "stateful")}
        for each in objects:
            by_kind[_kind(each)].append(each)
        given = [type(each).__name__ for each in objects]
        held = {p for optimizer in by_kind["optimizer"] for group in optimizer.param_groups for p in group["params"]}
        trained = [model for model in by_kind["model"] if _is_trained(model, by_kind["model"], held)]
        models = trained or by_kind["model"][:1]
        copies = [model for model in by_kind["model"] if all(model is not each for each in models)]
        if not models or not by_kind["optimizer"]:
            raise OwnLoopError(
                f"objects must have a model and an optimizer over its parameters, got {', '.join(given)}. To evaluate or predict "
                "only, write an EvalUnit or a PredictUnit."
            )
        schedulers: dict[int, Any] = {}
        further: list[Any] = []
        for scheduler in by_kind["scheduler"]:
            if all(scheduler.optimizer is not optimizer for optimizer in by_kind["optimizer"]):
                raise OwnLoopError(
                    f"a scheduler must belong to an optimizer among the objects, got a {type(scheduler).__name__} of another "
                    f"{type(scheduler.optimizer).__name__}. Give prepare() both."
                )
            if schedulers.setdefault(id(scheduler.optimizer), scheduler) is not scheduler:
                further.append(scheduler)
        if not by_kind["loader"]:
            raise OwnLoopError(
                f"objects must have the training loader, a torch DataLoader or an echelon.Loader, got {', '.join(given)}. If the "
                "loop makes its samples itself, put them into the loader's dataset, whose samples may change in each epoch."
            )
        first, *others = by_kind["loader"]
        optimizers = [(optimizer, schedulers.get(id(optimizer))) for optimizer in by_kind["optimizer"]]
        return cls(models, optimizers, first, copies, others, [*by_kind["stateful"], *further])


def _is_trained(model: nn.Module, models: Sequence[nn.Module], held: set[nn.Parameter]) -> bool:
    """Whether the optimizers hold parameters of the model itself, and not only of other ones in it, as an average may keep the
    model that it follows, or the part of a model.
    """
    inside = [part for part in model.modules() if part is not model and any(part is each for each in models)]
    inner = {p for part in inside for p in part.parameters()}
    own = [p for p in model.parameters() if p in held and p not in inner]
    # Both the average of a part and the model with that part may have nothing of their own: the average also has a copy of each.
    others = {p for each in models if each is not model for p in each.parameters()}
    copies = Counter(p.shape for p in model.parameters() if p not in held)
    is_average = others.issuperset(own) and Counter(p.shape for p in own) <= copies
    return not is_average


def _followed(copy: nn.Module, models: Sequence[nn.Module]) -> list[nn.Module]:
    """The models, and parts of them, that a copy keeps: what it is an average of."""
    parts = {part for model in models for part in model.modules()}
    return [part for child in copy.children() for part in ([child] if child in parts else _followed(child, models))]


def _kind(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, LRScheduler):
        return "scheduler"
    if isinstance(thing, (DataLoader, BaseLoader, Chain)):
        return "loader"
    if isinstance(thing, (Stateful, *GENERATORS)):
        return "stateful"
    if isinstance(thing, Iterable) and not isinstance(thing, (str, bytes, type)):
        return "loader"
    raise OwnLoopError(
        "objects must be models, optimizers, schedulers, loaders, generators of random numbers or objects with state_dict and "
        f"load_state_dict, got {type(thing).__name__}."
    )


# --- an evaluation: its logged numbers, over all ranks, and what they decide


class LoopEvaluation:
    """The value of `with evaluating(...) as`.

    Attributes:
        numbers: after the block, the numbers logged in it by name, over all ranks and the same on each.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._logs, session.unit.has_evaluated = session, False, False
        self.numbers: dict[str, float] = {}

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """Log a number of this evaluation, reduced over all its batches and ranks; see `State.log`. In metrics.jsonl its name
        begins with `eval_`. Every rank logs the same names.

        Args:
            value: a number, a tensor with one element, or a metric such as those of torchmetrics.
            weight: weight of the value in the mean; default: the number of samples in the current batch of an evaluation loader,
                or 1 outside the loop over its batches.
        """
        session, unit = self._session, self._session.unit
        counts = 1 if unit.evaluated is None else unit.weight(unit.evaluated)
        self._logs = True
        with for_now(session.logged, weight=0 if unit.prepared.data.is_replica else counts):
            session.logged.add("eval", name, value, weight, reduce, may_be="loss")  # "loss" is free: nothing else logs it here

    def end(self) -> None:
        """Reduce the numbers over all ranks. Collective if a number was logged, or decides which checkpoint is kept.

        Raises:
            RanksDisagreeError, UsageError: on all ranks: they logged different names; the deciding number is not among them.
        """
        session, unit = self._session, self._session.unit
        best = session.best
        logs = agree.any_rank(self._logs) if unit.leaves_out_ranks else self._logs
        if not (logs or best is not None):
            return
        if unit.has_evaluated:
            session.logged.takes_part("eval")
        self.numbers = session.logged.end_phase("eval", together=True)
        if not self.numbers or unit.reference is not None:
            return
        progress = unit.train_progress
        steps, updates = progress.num_steps_completed, progress.num_updates_completed
        if session.run is not None:
            steps, updates = session.run.done
        session.logged.evaluated_at = steps
        self._record(updates, {f"eval_{name}": value for name, value in self.numbers.items()})
        if best is not None:
            session.evaluated(updates)

    def _record(self, update: int, numbers: dict[str, float]) -> None:
        session = self._session
        if session.run is not None and session.state.recorder is not None:
            session.state.recorder.numbers(update, numbers)
        elif agree.is_rank0() and (sinks := default_sinks()):  # between two runs of a loop that counts its epochs itself
            recorder = Recorder(sinks, session.unit.weight_unit)
            recorder.numbers(update, numbers)
            recorder.close()


# --- objects made before their model was sharded: an optimizer gets the new parameters; a copy is sharded like the model


_Names = Mapping[nn.Parameter, str]


def _check_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, names: _Names, *, left: Sequence[Sequence[nn.Parameter]] | None
) -> str | None:
    """Describe what is wrong with an optimizer for this module, which is not parallel yet; None if nothing is.

    Args:
        left: with several optimizers, for each model the trained parameters that none of them holds.
    """
    held = parameters_of(optimizer)
    if any(p in names for p in held) or (left is not None and not any(are_alike(held, each) for each in left)):
        return None
    shape = f" (first: {tuple(held[0].shape)})" if held else ""
    return (
        f"the optimizer must hold parameters of the {type(module).__name__} that is given to prepare() with it, got a "
        f"{type(optimizer).__name__} with {len(held)} others{shape}. Make it from that model's parameters(), before prepare()."
    )


def _refit(prepared: Any, optimizer: torch.optim.Optimizer, names: _Names) -> None:
    """Replace the optimizer's parameters by those that the module has now.

    Args:
        names: names of the parameters that the module had before.
    Raises:
        UsageError: the optimizer has state of replaced parameters that cannot be split as they are.
    """
    now = dict(prepared.named_parameters(every_name=True))
    replaced = {p: now[name] for p, name in names.items() if name in now and now[name] is not p}
    if not replaced:
        return
    begun = {p: optimizer.state[p] for p in replaced if optimizer.state.get(p)}
    if any(_is_of_parts(value, p, replaced[p]) for p, state in begun.items() for value in state.values()):
        raise OwnLoopError(
            f"the {type(optimizer).__name__} must be new when its model is sharded, got one that has stepped, and whose state "
            "does not have its parameters' shapes. Call prepare() before the first step; to go on from an earlier run, restore "
            "its checkpoint."
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    for parameter, state in begun.items():  # state that the script has loaded, or that the constructor made, as Adagrad's does
        optimizer.state[replaced[parameter]] = {key: _like(value, parameter, replaced[parameter]) for key, value in state.items()}


def _divide_alike(copy: nn.Module, unit: Any, shapes: Mapping[str, torch.Size], layout: Any) -> None:
    """Shard a copy of the unit's model, or the copies that a wrapper holds, if the model is sharded: an average needs the same
    shards of both.

    Args:
        shapes: shapes of the model's parameters, by name, before it was sharded.
    """
    if not any(is_split(p) for p in unit.prepared.module.parameters()):
        if on_meta_tensors(copy):
            parallelize(copy, None, unit.device)
        return
    for inner in list(copy.modules()):
        own = dict(plain_names(inner))
        if {name: p.shape for name, p in own.items()} == shapes and not any(map(is_split, own.values())):
            parallelize(inner, layout, unit.device, overridden=overrides().layout)


def _is_of_parts(value: Any, before: nn.Parameter, now: nn.Parameter) -> bool:
    """Whether an optimizer's state cannot be divided into shards, such as Adafactor's rows and columns."""
    if not is_split(now):
        return False
    other = isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != before.shape
    return other or (isinstance(value, list | tuple | dict) and bool(value))


def _like(value: Any, before: nn.Parameter, now: nn.Parameter) -> Any:
    """A value of an optimizer's state, split if the parameter is."""
    if isinstance(value, torch.Tensor) and value.shape == before.shape and is_split(now):
        return part_like(value, now)
    return value
