"""One call of a Trainer with a LightningModule, in a rank: the set-up, the loaders, the run."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch import data, saving
from echelon.compat.lightning.pytorch.absent import HOOKS
from echelon.compat.lightning.pytorch.automatic import AutomaticUnit
from echelon.compat.lightning.pytorch.callbacks import Callback, ModelCheckpoint
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.hooking import Hooking
from echelon.compat.lightning.pytorch.hooks import ModuleHooks, overridden
from echelon.compat.lightning.pytorch.logged import meets
from echelon.compat.lightning.pytorch.loggers import InFolders, Online
from echelon.compat.lightning.pytorch.manual import ManualUnit
from echelon.compat.lightning.pytorch.module import LightningModule
from echelon.compat.lightning.pytorch.steps import gather_when_alone
from echelon.compat.trainer.launched import Work, state_of
from echelon.compat.trainer.rank import RUNS
from echelon.data.chain import Chain
from echelon.loop.modes import tell_of_eval_mode
from echelon.loop.progress import Progress
from echelon.loop.run import evaluate, run_training
from echelon.loop.state import PhaseState
from echelon.parallel.layouts import resolve
from echelon.parallel.names import kind_of
from echelon.parallel.patching import for_now
from echelon.parallel.shards import whole
from echelon.world import agree, rng
from echelon.world.init import World, init_from_env

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_LIMITS = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
_ACCUMULATES = ("accumulate_grad_batches", "optimizer.step() in every n-th batch")
# A unit's attributes that say how far it has trained.
_COUNTS = {"train_progress", "window", "optimizer_steps"}
_WEIGHTS = "weights.pt"  # of ranks, for their caller
# What the caller's Trainer gets from rank 0's Trainer after a run.
_KNOWN = (
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "current_epoch",
    "should_stop",
    "state",
    "progress_before",
    "num_training_batches",
    "num_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "ckpt_path",
)
# A module's attributes that are torch's or belong to one run: they do not come back.
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_trainer", "_hook", "_within_step", "_toggled", "_wanted"}


class Session(Hooking, Work):
    """
    Args:
        datamodule: None if the call has none.
    Attributes:
        optimizers: what `self.optimizers()` returns.
        validates: `fit` evaluates.
        handles: handles of hooks that the next call removes.
    """

    def __init__(
        self, trainer: Any, phase: str, loaders: tuple[Any, Any], ckpt_path: str | None, module: LightningModule, datamodule: Any
    ) -> None:
        Hooking.__init__(self, trainer, module)
        Work.__init__(self, phase, loaders, ckpt_path)
        self.given_datamodule = datamodule
        self.datamodule = datamodule if datamodule is not None else LightningDataModule()
        self.optimizers: list[Any] = []
        self.validates = False
        self.handles: list[Any] = []
        self.added_to_module: set[str] = set()  # what the strategy added, for this process
        self._train_loader: Any = None

    def here(self, trainer: Any) -> Any:
        """Run the call, and return its result: a list of dicts of numbers, or of predictions; None for `fit`."""
        device = init_from_env("cpu" if trainer.accelerator == "cpu" else None)
        self.ckpt_path = agree.from_rank0(lambda: self.ckpt_path)
        self._begin(device)
        try:
            self._set_up()
            done = self._fit() if self.phase == "fit" else self._evaluate()  # type: ignore[func-returns-value]
            self._end()
        except BaseException as error:
            trainer.state.status = "interrupted"
            self._tell_of(error)
            raise
        trainer.state.status, trainer.state.stage = "finished", None
        return done

    # --- to ranks that the Trainer starts, and back

    @contextmanager
    def sent(self, trainer: Any, folder: Path) -> Iterator[Session]:
        device = self.module.device
        self.module.cpu()
        trainer.lightning_module, trainer.datamodule, trainer.session = self.module, self.given_datamodule, None
        trainer.state.fn, trainer.state.status = self.phase, "interrupted"  # unless it finishes
        self._close_trackers()  # rank 0 continues their runs
        try:
            yield self
        finally:
            self.module.to(device)

    def leave(self, trainer: Any, folder: Path) -> tuple[Any, Any]:
        self._close_trackers()
        if self.phase == "fit":
            (prepared,) = trainer.unit.prepared_modules().values()
            state = {name: whole(t).detach().cpu() for name, t in prepared.state().state_dict().items()}
            if agree.is_rank0():
                torch.save(state, folder / _WEIGHTS)
        return trainer.unit, trainer.predict_dataloaders

    def _close_trackers(self) -> None:
        for each in self.trainer.loggers:
            if isinstance(each, Online):
                each.close()

    def take_back(self, trainer: Any, folder: Path) -> None:
        """Load the weights. Layers that the ranks made in `configure_model` or `setup` are made here by the same hooks.

        Raises:
            UsageError: the module still has other parameters. The error names the file, so that no training is lost.
        """
        module, path = self.module, folder / _WEIGHTS
        module.trainer = trainer
        if self.phase != "fit":
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        try:  # in the same order as on the ranks
            for hook in (lambda: self.datamodule.setup("fit"), lambda: module.setup("fit"), module.configure_model):
                if module.state_dict().keys() != saved.keys():
                    hook()
            module.load_state_dict(saved)
        except Exception as error:
            raise UsageError(
                f"{type(module).__name__} has been trained, but here it has not the layers that its ranks had ({error}). Their "
                f"weights are in {path}: torch.load gives a state_dict. Make all layers in __init__ or configure_model; or start "
                "the script by `echelon run`, whose ranks keep their module."
            ) from error

    def own(self, trainer: Any) -> list[tuple[object, Mapping[str, Any]]]:
        left_out = _OF_TORCH | (trainer.session.added_to_module if trainer.session is not None else set())
        own = {name: value for name, value in vars(self.module).items() if name not in left_out}
        others = [(each, state_of(each)) for each in (*trainer.lightning_callbacks, *trainer.loop_callbacks, *trainer.loggers)]
        return [(self.module, own), (trainer, {name: getattr(trainer, name) for name in _KNOWN}), *others]

    # --- before it runs

    def _begin(self, device: torch.device) -> None:
        trainer, module = self.trainer, self.module
        if (before := trainer.session) is not None:
            for handle in before.handles:
                handle.remove()
            for results in before.results.values():
                results.reset()
            self.optimizers = before.optimizers if self.phase != "fit" else []
        trainer.session = self
        trainer.lightning_module, trainer.datamodule, trainer.root_device = module, self.given_datamodule, device
        module.trainer = self.datamodule.trainer = trainer
        call = self.phase
        trainer.state.fn, trainer.state.status, trainer.state.stage = call, "running", "train" if call == "fit" else call
        trainer.ckpt_path = self.ckpt_path
        self._forget_numbers()
        trainer.should_stop = False
        own = module.configure_callbacks()
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        kinds = tuple(type(each) for each in own)
        every = [*(each for each in trainer.lightning_callbacks if type(each) not in kinds), *own]
        # Callbacks that save come last, so that they see what the others have changed.
        trainer.lightning_callbacks = sorted(every, key=lambda each: isinstance(each, ModelCheckpoint))
        trainer.callbacks = [*trainer.lightning_callbacks, *trainer.loop_callbacks]
        for each in trainer.lightning_callbacks:
            each.log, each.log_dict = module.log, module.log_dict
        for each in trainer.loggers:
            if isinstance(each, InFolders):
                each.choose_version()

    def _forget_numbers(self) -> None:
        trainer = self.trainer
        trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = {}, {}, {}

    def _set_up(self) -> None:
        trainer, module = self.trainer, self.module
        self._check()
        agree.same_on_all(
            "the callbacks in which they meet",
            [type(each).__name__ for each in trainer.lightning_callbacks if getattr(each, "meets", False) is True],
            "Give all ranks the same callbacks, without `if rank == 0`: who writes is decided within them.",
        )
        _set_determinism(trainer)
        data.prepare_data(module, self.datamodule)
        self.datamodule.setup(self.phase)
        self.call("setup", self.phase)
        module.configure_model()
        trains = self.phase == "fit"
        options = {name: value for name, value in trainer.unit_options.items() if trains or name == "precision"}
        if module.automatic_optimization:
            options["training"] = trains
        kind = AutomaticUnit if module.automatic_optimization else ManualUnit
        before = set(vars(module))
        self.unit = kind(self, module, layout=self._layout(), **options)
        self.added_to_module = set(vars(module)) - before
        if self.ckpt_path is not None:
            saving.restore_module(Path(self.ckpt_path), self, trains=trains)
        elif trains:
            self._go_on()
        if trains:
            self.unit.configure()
            self.call("on_fit_start")
        self._log_hyperparams()

    def _go_on(self) -> None:
        """Count from where this Trainer's latest `fit` ended, as Lightning does: with the same limits, nothing is left."""
        trainer, unit = self.trainer, self.unit
        if (before := trainer.progress_before) is not None:
            for name in _COUNTS & before.keys() & vars(unit).keys():
                getattr(unit, name).load_state_dict(before[name])
            unit.restored()
            trainer.current_epoch = unit.train_progress.num_epochs_completed

    def _log_hyperparams(self) -> None:
        module = self.module
        if module.hparams and vars(module).get("_hparams_logged", True):
            for each in self.trainer.loggers if agree.is_rank0() else ():
                each.log_hyperparams(module.hparams_initial)
                each.save()

    def _end(self) -> None:
        trainer, unit, call = self.trainer, self.unit, self.phase
        if call == "fit":
            self.call("on_fit_end")
        self.datamodule.teardown(call)
        self.call("teardown", call)
        if call == "fit":
            trainer.progress_before = {name: getattr(unit, name).state_dict() for name in _COUNTS & vars(unit).keys()}
            self.has_stepped = False
        self._finalize("success")
        self.handles += gather_when_alone(self.module)

    def _tell_of(self, error: BaseException) -> None:
        """Call `on_exception` and end the loggers. No collective here: other ranks may not have the error."""
        if isinstance(self.unit, ManualUnit):
            self.unit.stop_averaging()
        self._call_callbacks("on_exception", self.trainer.lightning_callbacks, (error,))
        self.datamodule.on_exception(error)
        self._finalize("failed")

    def _finalize(self, status: str) -> None:
        for each in self.trainer.loggers if agree.is_rank0() else ():
            each.finalize(status)

    def _layout(self) -> Any:
        given = self.trainer.layout
        if kind_of(self.module) is not None:  # sharded in place by an earlier call
            return None
        chosen = ("ddp" if World.current().size > 1 else None) if given == "auto" else given
        if getattr(resolve(chosen), "name", None) == "dp":
            raise UsageError("strategy 'dp' cannot run a LightningModule's steps. Use 'ddp'.")
        return chosen

    def _check(self) -> None:
        """Refuse what is not supported, by name, before anything runs."""
        module, call, trainer = self.module, self.phase, self.trainer
        name = type(module).__name__
        needs = {"fit": ["training_step", "configure_optimizers"], "validate": ["validation_step"], "test": ["test_step"]}
        for step in needs.get(call, []):
            if not overridden(step, module, LightningModule):
                raise UsageError(f"{name} has no {step}, which trainer.{call} needs.")
        for each in (module, *trainer.lightning_callbacks):
            for gone in sorted(name for name in HOOKS.keys() & set(dir(type(each))) if _is_hook(each, name)):
                raise UsageError(f"{type(each).__name__}.{gone} is a hook that nothing calls here. Instead: {HOOKS[gone]}.")
        if overridden("backward", module, LightningModule) and module.automatic_optimization:
            raise UsageError(f"{name}.backward: a backward pass of your own needs `self.automatic_optimization = False`.")
        if not module.automatic_optimization and call == "fit":
            own = trainer.unit_options
            clips = own.get("clip_grad_norm") is not None or own.get("clip_grad_value") is not None
            if clips or own.get("accumulate", 1) != 1:
                option, instead = ("gradient_clip_val", "self.clip_gradients(optimizer, ...)") if clips else _ACCUMULATES
                raise UsageError(
                    f"{name} has automatic_optimization = False. In place of {option} call {instead} in training_step."
                )

    # --- loaders

    def _data_size(self) -> int:
        rank_and_size: tuple[int, int] | None = self.unit.data_rank_and_size
        return (rank_and_size or (0, World.current().size))[1]

    def train_loader(self) -> tuple[Any, int | None]:
        """(loader, limit of its batches on this rank), made at first use."""
        if self._train_loader is None:
            trainer = self.trainer
            loaders = data.given_loaders("train", self.loaders[0], self.module, self.given_datamodule)
            if loaders is None:
                raise UsageError("trainer.fit needs train_dataloaders, a datamodule, or a train_dataloader() of the module.")
            if trainer.overfit_batches:
                loaders = data.without_shuffling(loaders)
            accumulation = trainer.unit_options.get("accumulate") or 1
            path = Path(self.ckpt_path) if self.ckpt_path is not None else None
            divides = trainer.use_distributed_sampler
            loader = data.one_loader("fit", loaders, self._data_size(), accumulation, divides=divides, path=path)
            trainer.train_dataloader = loader
            self._train_loader = loader, data.limit_of("limit_train_batches", trainer.limit("train"), loader)
        made: tuple[Any, int | None] = self._train_loader
        return made

    def _evaluation_loader(self, phase: str, given: Any) -> Chain | None:
        trainer, name = self.trainer, _LIMITS[phase]
        chosen, limit = data.given_loaders(name, given, self.module, self.given_datamodule), trainer.limit(name)
        if chosen is None or limit == 0:
            return None
        if trainer.overfit_batches and phase == "validation":
            chosen = data.without_shuffling(chosen)
        made = self.chains[phase] = data.chain(name, chosen, self._data_size(), limit, divides=trainer.use_distributed_sampler)
        if phase == "predict" and len(made.loaders) > 1:
            raise UsageError("trainer.predict with several dataloaders: call it once for each.")
        setattr(trainer, f"{name}_dataloaders", made.loaders[0] if len(made.loaders) == 1 else made.loaders)
        setattr(trainer, f"num_{name}_batches", [data.batches_of(*each) for each in zip(made.loaders, made.limits, strict=True)])
        return made

    # --- what runs

    def _fit(self) -> None:
        trainer, unit, module = self.trainer, self.unit, self.module
        loader, limit = self.train_loader()
        has_step = overridden("validation_step", module, LightningModule)
        evaluation = self._evaluation_loader("validation", self.loaders[1]) if has_step else None
        self.validates = evaluation is not None and (
            trainer.check_val_every_n_epoch is not None or trainer.val_check_interval != 1.0
        )
        if self.ckpt_path is not None:
            saving.restore_training(Path(self.ckpt_path), unit, loader)
        manual = not module.automatic_optimization
        self.max_updates, self.may_stop = trainer.max_updates if manual else None, _may_stop(trainer)
        trainer.num_training_batches = data.batches_of(loader, limit)
        if self._is_complete():
            return
        # As in Lightning, parts keep their mode in training; those in eval mode are named.
        tell_of_eval_mode([name or type(module).__name__ for name, part in module.named_modules() if not part.training])
        self.results["train"].meets = meets([module, *trainer.lightning_callbacks])
        if evaluation is not None and self.validates:
            self._sanity_check(evaluation)
        training = PhaseState(
            dataloader=loader,
            max_epochs=math.inf if manual and trainer.max_epochs is None else trainer.max_epochs,
            max_updates=None if manual else trainer.max_updates,
            max_steps_per_epoch=limit,
        )
        validation = None
        if evaluation is not None and self.validates:
            training.evaluate_every_n_steps, training.evaluate_every_n_epochs = self._intervals()
            validation = PhaseState(dataloader=evaluation)
        run_training(unit, training, validation, [self, *trainer.loop_callbacks], None)

    def _is_complete(self) -> bool:
        """Whether an earlier `fit`, or the run of the checkpoint, has reached the limits."""
        trainer, progress = self.trainer, self.unit.train_progress
        epochs, updates = trainer.max_epochs, trainer.max_updates
        by_epochs = epochs is not None and progress.num_epochs_completed >= epochs
        by_updates = updates is not None and self.unit.updates >= updates
        if not progress.num_steps_completed or progress.evaluation_due or not (by_epochs or by_updates):
            return False
        if agree.is_rank0():
            limit = f"max_epochs={epochs}" if by_epochs else f"max_steps={updates}"
            logger.warning("trainer.fit: %s is reached, so nothing is left to train. Give a larger one, or a new Trainer", limit)
        return True

    def _intervals(self) -> tuple[int | None, int | None]:
        """(steps, epochs) after which `fit` evaluates.

        Raises:
            UsageError: an epoch is not a multiple of the interval of evaluations within it.
        """
        trainer = self.trainer
        interval, epochs, batches = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
            return None, epochs
        if not math.isfinite(interval):
            raise UsageError(
                f"val_check_interval={trainer.val_check_interval}: the dataloader has no length. Give a number of batches."
            )
        if epochs is None:
            return interval, None
        if epochs != 1 or batches % interval:
            raise UsageError(
                f"val_check_interval={interval} with epochs of {batches} batches and check_val_every_n_epoch={epochs}: "
                "evaluations within an epoch must divide it, in every epoch. Give a divisor, or check_val_every_n_epoch=None to "
                "count over epochs."
            )
        return interval, None

    def _sanity_check(self, chain: Chain) -> None:
        trainer, unit = self.trainer, self.unit
        count = trainer.num_sanity_val_steps
        if not count or trainer.fast_dev_run or unit.train_progress.num_steps_completed:
            return
        few = chain if count == -1 else chain.cut(count)
        trainer.state.stage = "sanity_check"
        with rng.unchanged(), for_now(trainer, sanity_checking=True):
            self.call("on_sanity_check_start")
            with for_now(unit, eval_progress=Progress()), for_now(self, chains={"validation": few}):
                evaluate(unit, few, callbacks=[self])
            self.call("on_sanity_check_end")
            self.results["validation"].reset()
            self._forget_numbers()
        trainer.state.stage = "train"

    def _evaluate(self) -> list[Any]:
        trainer, call = self.trainer, self.phase
        phase, (run, limited) = "validation" if call == "validate" else call, RUNS[call]
        chain = self._evaluation_loader(phase, self.loaders[0])
        if chain is None and trainer.limit(limited) == 0:
            return []
        if chain is None:
            raise UsageError(f"trainer.{call} needs dataloaders, a datamodule, or a {limited}_dataloader().")
        run(self.unit, chain, callbacks=[self, *trainer.loop_callbacks])
        if call == "predict":
            return self.outputs
        numbers = {name: float(value) for name, value in self.evaluated.items()}
        loaders, count = self.results[phase].loaders_of(), len(chain.loaders)
        return [{n: v for n, v in numbers.items() if not loaders.get(n) or i in loaders[n]} for i in range(count)]


def _is_hook(thing: Any, name: str) -> bool:
    """Whether Lightning could have called this method: a program's own method of that name takes other arguments."""
    given = 2 if not isinstance(thing, LightningModule) else 0 if name.startswith(("on_", "configure_")) else 1
    try:
        inspect.signature(getattr(thing, name)).bind(*range(given))
    except (TypeError, ValueError):
        return False
    return True


def _may_stop(trainer: Any) -> bool:
    """Whether user code runs after each step: it may set `trainer.should_stop`."""
    name = "on_train_batch_end"
    return overridden(name, trainer.lightning_module, ModuleHooks) or any(
        overridden(name, each, Callback) and not type(each).__module__.startswith(__package__)
        for each in trainer.lightning_callbacks
    )


def _set_determinism(trainer: Any) -> None:
    if trainer.deterministic is not None:
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = bool(trainer.benchmark)
