"""One call of a Trainer with a LightningModule, in a rank: what is set up, what runs, and which hooks are around it."""

from __future__ import annotations

import inspect
import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import data, saving
from echelon.compat.lightning.pytorch.absent import HOOKS
from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.callbacks.base import Callback
from echelon.compat.lightning.pytorch.hooking import Hooking
from echelon.compat.lightning.pytorch.hooks import ModuleHooks, overridden
from echelon.compat.lightning.pytorch.manual import ManualUnit
from echelon.compat.lightning.pytorch.meeting import meets
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.stepping import gather_when_alone
from echelon.contracts.rank import RankInfo
from echelon.data.replayed import Replayed
from echelon.loop.modes import tell_of_eval_mode
from echelon.loop.run import evaluate, predict, run_training, test
from echelon.loop.state import PhaseState
from echelon.parallel.layouts import resolve
from echelon.parallel.registry import kind_of
from echelon.world import agree, rng
from echelon.world.init import World, init_from_env

__all__ = ["PHASES", "Session", "Work"]

logger = logging.getLogger(__name__)

PHASES = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
_LIMITS = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class Work:
    """What a rank is to do.

    Args:
        call: "fit", "validate", "test" or "predict".
        loaders: for training and evaluation; or the phase's, and None.
    """

    call: str
    module: LightningModule
    loaders: tuple[Any, Any]
    datamodule: Any
    ckpt_path: str | None
    seeds: list[int] = field(default_factory=lambda: [0, 0, 0])


class Session:
    """
    Args:
        trainer: whose options count, and which the module's code sees.
    """

    def __init__(self, trainer: Any, work: Work) -> None:
        self.trainer, self.work, self.module = trainer, work, work.module
        self.unit: Any = None
        self._train_loader: Any = None

    def run(self) -> Any:
        """What the call returns: a list of dicts of numbers, or of predictions; None of `fit`."""
        trainer, work = self.trainer, self.work
        device = init_from_env("cpu" if trainer.accelerator == "cpu" else None)
        self.work = work = replace(work, ckpt_path=agree.from_rank0(lambda: self.work.ckpt_path))
        trainer.begin_call(work, device)
        try:
            self._set_up(device)
            done = getattr(self, f"_{work.call}")()
            trainer.call_at_end(work.call)
            trainer.handles += gather_when_alone(self.module)
        except BaseException as error:
            trainer.state.status = "interrupted"
            trainer.tell_of(error)
            raise
        trainer.state.status, trainer.state.stage = "finished", None
        return done

    # --- before it runs

    def _set_up(self, device: torch.device) -> None:
        trainer, module, work = self.trainer, self.module, self.work
        self._check()
        agree.same_on_all(
            "the callbacks in which they meet",
            [type(each).__name__ for each in trainer.lightning_callbacks if getattr(each, "meets", False) is True],
            "Give all ranks the same callbacks, without `if rank == 0`: who writes is decided within them.",
        )
        _set_determinism(trainer)
        _prepare_data(module, work.datamodule)
        trainer.set_up_hooks(work.call)
        module.configure_model()
        trains = work.call == "fit"
        options = dict(trainer.options_of_unit) if trains else {}
        if "precision" in trainer.options_of_unit:
            options["precision"] = trainer.options_of_unit["precision"]
        strategy = self._strategy()
        kind = AutomaticUnit if module.automatic_optimization else ManualUnit
        if module.automatic_optimization:
            options["training"] = trains
        before = set(vars(module))
        self.unit = trainer.unit = kind(trainer, module, layout=strategy, **options)
        trainer.added_to_module = set(vars(module)) - before  # by the strategy, for this process
        trainer.find_train_loader = self.train_loader
        if work.ckpt_path is not None:
            saving.restore_module(Path(work.ckpt_path), trainer, self.unit, trains=trains)
        elif trains:
            trainer.go_on(self.unit)
        if trains:
            trainer.lightning_optimizers = []
            self.unit.configure()
            trainer.call("on_fit_start")
            trainer.log_hyperparams()

    def _strategy(self) -> Any:
        given = self.trainer.layout
        if kind_of(self.module) is not None:  # of an earlier call: it was sharded in place
            return None
        chosen = ("ddp" if World.current().size > 1 else None) if given == "auto" else given
        if getattr(resolve(chosen), "name", None) == "dp":
            raise UsageError("strategy 'dp' cannot run a LightningModule's steps. Use 'ddp'.")
        return chosen

    def _check(self) -> None:
        """What cannot be, by name, before anything runs."""
        module, call, trainer = self.module, self.work.call, self.trainer
        name = type(module).__name__
        needs = {"fit": ["training_step", "configure_optimizers"], "validate": ["validation_step"], "test": ["test_step"]}
        for step in needs.get(call, []):
            if not overridden(step, module, LightningModule):
                raise UsageError(f"{name} has no {step}, which trainer.{call} needs.")
        for each in (module, *trainer.lightning_callbacks):
            for gone in sorted(name for name in HOOKS.keys() & set(dir(type(each))) if _is_hook(each, name)):
                raise UsageError(
                    f"{type(each).__name__}.{gone} is a hook of Lightning 1, which nothing calls. Instead: {HOOKS[gone]}."
                )
        if overridden("backward", module, LightningModule) and module.automatic_optimization:
            raise UsageError(f"{name}.backward: a backward pass of your own needs `self.automatic_optimization = False`.")
        if not module.automatic_optimization and call == "fit":
            own = trainer.options_of_unit
            clips = own.get("clip_grad_norm") is not None or own.get("clip_grad_value") is not None
            for refused, option, instead in (
                (clips, "gradient_clip_val", "self.clip_gradients(optimizer, ...)"),
                (
                    own.get("accumulate", 1) != 1,
                    "accumulate_grad_batches",
                    "optimizer.step() in every n-th batch",
                ),
            ):
                if refused:
                    raise UsageError(
                        f"{name} has automatic_optimization = False. In place of {option} call {instead} in training_step."
                    )

    # --- loaders

    def _data_size(self) -> int:
        found: tuple[int, int] | None = self.unit.data_rank_and_size
        return (found or (0, World.current().size))[1]

    def train_loader(self) -> tuple[Any, int | None]:
        """(loader, how many batches of it count on this rank), made when it is first asked for."""
        if self._train_loader is None:
            trainer = self.trainer
            found = data.given_loaders("train", self.work.loaders[0], self.module, self.work.datamodule)
            if found is None:
                raise UsageError("trainer.fit needs train_dataloaders, a datamodule, or a train_dataloader() of the module.")
            if trainer.overfit_batches:
                found = data.without_shuffling(found)
            accumulation = trainer.options_of_unit.get("accumulate") or 1
            path = Path(self.work.ckpt_path) if self.work.ckpt_path is not None else None
            divides = trainer.use_distributed_sampler
            loader = data.one_loader("fit", found, self._data_size(), accumulation, divides=divides, path=path)
            trainer.train_dataloader = loader.loader if isinstance(loader, Replayed) else loader
            self._train_loader = loader, data.limit_of("limit_train_batches", trainer.limit("train"), loader)
        made: tuple[Any, int | None] = self._train_loader
        return made

    def _evaluation_loader(self, phase: str, given: Any) -> Any:
        trainer, name = self.trainer, f"limit_{_LIMITS[phase]}_batches"
        found = data.given_loaders(phase, given, self.module, self.work.datamodule)
        limit = trainer.limit(_LIMITS[phase])
        if found is None or (limit == 0 and phase == "validation"):
            return None
        if trainer.overfit_batches and phase == "validation":
            found = data.without_shuffling(found)
        loaders = data.several_loaders(found, self._data_size(), divides=trainer.use_distributed_sampler)
        if phase == "predict" and len(loaders) > 1:
            raise UsageError("trainer.predict with several dataloaders: call it once for each.")
        limits = [data.limit_of(name, limit, loader) for loader in loaders]
        trainer.note_loaders(_LIMITS[phase], loaders, limits)
        if len(loaders) == 1:
            trainer.num_loaders[phase] = [None]
            trainer.batches[phase] = limits[0]
            return loaders[0]
        chain = data.Chain(loaders, limits)
        trainer.num_loaders[phase], trainer.batches[phase] = chain.lengths(), None
        return chain

    # --- what runs

    def _fit(self) -> None:
        trainer, unit, module = self.trainer, self.unit, self.module
        loader, limit = self.train_loader()
        has_step = overridden("validation_step", module, LightningModule)
        evaluation = self._evaluation_loader("validation", self.work.loaders[1]) if has_step else None
        trainer.validates = evaluation is not None and (
            trainer.check_val_every_n_epoch is not None or trainer.val_check_interval != 1.0
        )
        if self.work.ckpt_path is not None:
            saving.restore_training(Path(self.work.ckpt_path), unit, loader)
        manual = not module.automatic_optimization
        hooking = Hooking(trainer, trainer.updates_at_most if manual else None, may_stop=_may_stop(trainer))
        callbacks = [hooking, *trainer.loop_callbacks]
        trainer.num_training_batches = data.batches_of(loader, limit)
        if self._is_complete():
            return
        # Lightning trains parts in the mode in which they are, too.
        tell_of_eval_mode([name or type(module).__name__ for name, part in module.named_modules() if not part.training])
        trainer.results["train"].meets = meets([module, *trainer.lightning_callbacks])
        if trainer.validates:
            self._sanity_check(evaluation, hooking)
        training = PhaseState(
            dataloader=loader,
            max_epochs=trainer.epochs_at_most,
            max_updates=None if manual else trainer.updates_at_most,
            max_steps_per_epoch=limit,
        )
        validation = None
        if evaluation is not None and trainer.validates:
            training.evaluate_every_n_steps, training.evaluate_every_n_epochs = self._intervals(loader, limit)
            validation = PhaseState(dataloader=evaluation, max_steps_per_epoch=trainer.batches["validation"])
        run_training(unit, training, validation, callbacks, None)

    def _is_complete(self) -> bool:
        """Whether an earlier `fit`, or the run that was saved, has reached the limits."""
        trainer, progress = self.trainer, self.unit.train_progress
        epochs, updates = trainer.epochs_at_most, trainer.updates_at_most
        by_epochs = epochs is not None and progress.num_epochs_completed >= epochs
        by_updates = updates is not None and self.unit.updates >= updates
        if not progress.num_steps_completed or progress.evaluation_due or not (by_epochs or by_updates):
            return False
        if agree.is_rank0():
            limit = f"max_epochs={epochs}" if by_epochs else f"max_steps={updates}"
            logger.warning("trainer.fit: %s is reached, so nothing is left to train. Give a larger one, or a new Trainer", limit)
        return True

    def _intervals(self, loader: Any, limit: int | None) -> tuple[int | None, int | None]:
        """(steps, epochs) after which `fit` evaluates.

        Raises:
            UsageError: evaluations within an epoch that do not divide it.
        """
        interval, epochs = self.trainer.val_check_interval, self.trainer.check_val_every_n_epoch
        if isinstance(interval, float) and interval == 1.0:
            return None, epochs
        batches = data.batches_of(loader, limit)
        if isinstance(interval, float):
            if not math.isfinite(batches):
                raise UsageError(f"val_check_interval={interval}: the dataloader has no length. Give a number of batches.")
            interval = max(int(batches * interval), 1)
        if epochs is None:
            return interval, None
        if epochs != 1 or batches % interval:
            raise UsageError(
                f"val_check_interval={interval} with epochs of {batches} batches and check_val_every_n_epoch={epochs}: "
                "evaluations within an epoch must divide it, in every epoch. Give a divisor, or check_val_every_n_epoch=None to "
                "count over epochs."
            )
        return interval, None

    def _sanity_check(self, loader: Any, hooking: Hooking) -> None:
        trainer, unit = self.trainer, self.unit
        count = trainer.num_sanity_val_steps
        if not count or trainer.fast_dev_run or unit.train_progress.num_steps_completed:
            return
        limit, lengths = trainer.batches["validation"], trainer.num_loaders["validation"]
        most = None if count == -1 else count if limit is None else min(count, limit)
        if isinstance(loader, data.Chain) and most is not None:  # so many of each
            loader, most = loader.cut(most), None
            trainer.num_loaders["validation"] = loader.lengths()
        before, progress = rng.states(), vars(unit.eval_progress).copy()
        trainer.sanity_checking = True
        trainer.call_callbacks("on_sanity_check_start")
        try:
            evaluate(unit, loader, max_steps_per_epoch=most, callbacks=[hooking])
        finally:
            vars(unit.eval_progress).update(progress)
            rng.put_back(before)
            trainer.num_loaders["validation"] = lengths
        trainer.call_callbacks("on_sanity_check_end")
        trainer.results["validation"].reset()
        trainer.sanity_checking = False

    def _validate(self) -> list[dict[str, float]]:
        return self._evaluate("validation", evaluate)

    def _test(self) -> list[dict[str, float]]:
        return self._evaluate("test", test)

    def _evaluate(self, phase: str, run: Any) -> list[dict[str, float]]:
        trainer = self.trainer
        loader = self._evaluation_loader(phase, self.work.loaders[0])
        if loader is None and trainer.limit(_LIMITS[phase]) == 0:
            return []
        if loader is None:
            raise UsageError(f"trainer.{self.work.call} needs dataloaders, a datamodule, or a {_LIMITS[phase]}_dataloader().")
        hooking = Hooking(trainer, None, may_stop=False)
        run(self.unit, loader, max_steps_per_epoch=trainer.batches[phase], callbacks=[hooking, *trainer.loop_callbacks])
        numbers = {name: float(value) for name, value in hooking.evaluated.items()}
        count = len(trainer.num_loaders[phase])
        loaders = trainer.results[phase].loaders_of()
        return [{n: v for n, v in numbers.items() if not loaders.get(n) or i in loaders[n]} for i in range(count)]

    def _predict(self) -> list[Any]:
        trainer = self.trainer
        loader = self._evaluation_loader("predict", self.work.loaders[0])
        if loader is None:
            raise UsageError("trainer.predict needs dataloaders, a datamodule, or a predict_dataloader().")
        hooking = Hooking(trainer, None, may_stop=False)
        limit = trainer.batches["predict"]
        predict(self.unit, loader, max_steps_per_epoch=limit, callbacks=[hooking, *trainer.loop_callbacks])
        return hooking.outputs


def _is_hook(thing: Any, name: str) -> bool:
    """Whether Lightning 1 could have called it; a program's own method of that name takes something else."""
    given = 2 if not isinstance(thing, LightningModule) else 0 if name.startswith(("on_", "configure_")) else 1
    try:
        inspect.signature(getattr(thing, name)).bind(*range(given))
    except (TypeError, ValueError):
        return False
    return True


def _may_stop(trainer: Any) -> bool:
    """Whether somebody's code runs after each step, which may set `trainer.should_stop`."""
    name = "on_train_batch_end"
    return overridden(name, trainer.lightning_module, ModuleHooks) or any(
        overridden(name, each, Callback) and not type(each).__module__.startswith(__package__)
        for each in trainer.lightning_callbacks
    )


def _prepare_data(module: LightningModule, datamodule: Any) -> None:
    """On the first rank of each node; the others wait."""
    problem = None
    if RankInfo.from_env().local_rank == 0:
        try:
            if datamodule is not None:
                datamodule.prepare_data()
            module.prepare_data()
        except Exception as error:  # whatever a download raises; the others would wait
            problem = error
    if agree.is_joined() and (agree.any_rank(problem is not None)) and problem is None:
        raise UsageError("prepare_data failed on another rank.")
    if problem is not None:
        raise problem


def _set_determinism(trainer: Any) -> None:
    if trainer.deterministic is not None:
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = bool(trainer.benchmark)
