"""The arguments of AutoUnit besides the module, as values from which a unit can be rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from echelon.common.arguments import Given
from echelon.common.errors import LoopError
from echelon.common.numbers import plain
from echelon.common.older_words import translated
from echelon.loop.auto.averaged import SWAParams
from echelon.parallel.layouts import resolve
from echelon.parallel.recipe.activation import ActivationCheckpointParams, Preset
from echelon.parallel.recipe.compilation import Compile, TorchCompileParams
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.strategy import Strategy

__all__ = ["OLDER_WORDS", "AutoOptions", "BuiltAtFirstUse", "UnitOptions", "changes_of", "options_from"]

_given = Given(LoopError)


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """Options of AutoUnit that few units need: `AutoUnit(..., options=UnitOptions(lr_interval="epoch"))`.

    Args:
        device: default: the device of `init_from_env()`, which also joins the ranks.
        lr_interval: step the scheduler after every "update" or every "epoch". Lengths of schedules count these.
        lr_monitor: name of the number that a ReduceLROnPlateau follows: one that evaluations log, or an attribute of the unit.
            Default: the loss of the evaluation.
        clip_grad_value: largest absolute value of a gradient element.
        averaging: averages of the weights, held by `swa_model`; AutoUnit's `ema` is short for the usual one.
        detect_anomaly: stop at the first loss that is inf or nan, before it reaches the parameters, with rank and value, and
            trace the operation that produced it (`torch.autograd.set_detect_anomaly`; slow).
        stop_after_nonfinite_losses: end the run with NonFiniteError after this many updates in a row whose loss over the global
            batch is inf or nan; None never stops. 10 tolerates the few bad batches that a run may survive and loses little
            time. A run without any finite loss also ends with this error, however short it is.
        deterministic: "bitwise" makes the parameters after any number of steps bit-equal on 1, 2, 4, ... ranks, for noop,
            ddp, fsdp and zero1 to zero3. `gradients/fixed_order` says how, BENCHMARKS.md what it costs. A global batch then has
            `bitwise_parts` micro-batches, over all ranks.
        prefetch: copy the next batch to a GPU while this one computes.
        zero_grad_first: clear gradients before an update instead of after it, so that hooks can look at them.
        retain_graph: passed to `backward`.
        training: False builds no optimizer.
    Raises:
        UsageError: an invalid value; raised before any rank waits for another.
    """

    device: torch.device | None = None
    lr_interval: Literal["update", "epoch"] = "update"
    lr_monitor: str | None = None
    clip_grad_value: float | None = None
    averaging: SWAParams | None = None
    detect_anomaly: bool | None = None
    stop_after_nonfinite_losses: int | None = 10
    deterministic: Literal["bitwise"] | None = None
    prefetch: bool = True
    zero_grad_first: bool = False
    retain_graph: bool | None = None
    training: bool = True

    def __post_init__(self) -> None:
        _given.flags_of(self)
        is_device = isinstance(self.device, torch.device | None)
        _given.require(is_device, "device", "a torch.device or None", self.device, "By default init_from_env() picks it.")
        _given.require(self.lr_interval in ("update", "epoch"), "lr_interval", "'update' or 'epoch'", self.lr_interval)
        is_name = self.lr_monitor is None or (isinstance(self.lr_monitor, str) and self.lr_monitor != "")
        _given.require(is_name, "lr_monitor", "the name of a number, or None for the loss of evaluations", self.lr_monitor)
        _limit("clip_grad_value", self.clip_grad_value)
        _given.require(isinstance(self.averaging, SWAParams | None), "averaging", "SWAParams(...) or None", self.averaging)
        _given.require(self.deterministic in (None, "bitwise"), "deterministic", "'bitwise' or None", self.deterministic)
        if self.stop_after_nonfinite_losses is not None:
            _given.whole(
                "stop_after_nonfinite_losses", self.stop_after_nonfinite_losses, at_least=1, or_none="to go on regardless"
            )


@dataclass(frozen=True, kw_only=True)
class AutoOptions(UnitOptions):
    """All arguments of AutoUnit, which describes them, with its UnitOptions; `averaging` holds `ema`."""

    layout: Strategy | str | None = None
    precision: str | torch.dtype | Precision | Float8 | None = None
    accumulate: int | None = None
    clip_grad_norm: float | None = None
    compile: Compile = None
    recompute: Preset = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate is not None:
            _given.whole("accumulate", self.accumulate, at_least=1, or_none="for the loader's")
        _limit("clip_grad_norm", self.clip_grad_norm)
        object.__setattr__(self, "compile", TorchCompileParams.of(self.compile, "compile"))
        object.__setattr__(self, "recompute", ActivationCheckpointParams.of(self.recompute, "recompute"))
        Precision.of(self.precision)
        resolve(self.layout)


def _limit(name: str, value: Any) -> None:
    if value is not None:
        _given.number(name, value, "above 0, or None for no clipping", lambda most: most > 0)


_NESTED = tuple(field.name for field in fields(UnitOptions))
_OWN = tuple(field.name for field in fields(AutoOptions) if field.name not in _NESTED)
# Older names of AutoUnit's arguments, which are also TorchTNT's names.
OLDER_WORDS = {
    "strategy": "layout",
    "gradient_accumulation_steps": "accumulate",
    "torch_compile_params": "compile",
    "activation_checkpoint_params": "recompute",
    "step_lr_interval": "lr_interval",
    "swa_params": "averaging",
    "enable_prefetch": "prefetch",
    "zero_grad_at_train_step_start": "zero_grad_first",
    "loss_backward_retain_graph": "retain_graph",
}


def options_from(function: str, options: UnitOptions | None, older: Mapping[str, Any], **own: Any) -> AutoOptions:
    """Collect AutoUnit's arguments. Older names are translated with a warning.

    Raises:
        UsageError: an unknown name; two values for one option.
    """
    _given.require(isinstance(options, UnitOptions | None), "options", "UnitOptions(...) or None", options)
    base = {field.name: getattr(options, field.name) for field in fields(options)} if options is not None else {}
    values = {field.name: base[field.name] for field in fields(options) if base[field.name] != field.default} if options else {}
    values |= {name: value for name, value in own.items() if value is not None}
    known = OLDER_WORDS | {name: name for name in _NESTED}
    words = translated(function, _in_values(older), known, values, others=(*own, "module", "options"), where=_where)
    return AutoOptions(**{**base, **_with_averages(words)})


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `Trainer(unit_options=...)`, which takes names of AutoUnit or UnitOptions and older ones, to AutoOptions."""
    changes = {name: value for name, value in given.items() if name in (*_OWN, *_NESTED, "ema")}
    options, older = given.get("options"), {name: value for name, value in given.items() if name not in (*changes, "options")}
    _given.require(isinstance(options, UnitOptions | None), "options", "UnitOptions(...) or None", options)
    if options is not None:
        changes = {**{field.name: getattr(options, field.name) for field in fields(options)}, **changes}
    known = (*_OWN, "ema", "options", *_NESTED)
    return _with_averages(translated("unit_options", _in_values(older), OLDER_WORDS, changes, others=known))


def _in_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the older value "step" of `step_lr_interval`: it is "update" now."""
    is_step = given.get("step_lr_interval") == "step"
    return {**given, "step_lr_interval": "update"} if is_step else dict(given)


def _where(name: str) -> str:
    return f"{name}=..." if name in _OWN else f"options=UnitOptions({name}=...)"


def _with_averages(words: dict[str, Any]) -> dict[str, Any]:
    """Replace `ema` by the SWAParams that it stands for."""
    ema = words.pop("ema", None)
    if ema is None:
        return words
    if words.get("averaging") is not None:
        raise LoopError("ema and averaging both say which averages of the weights to keep. Give one of them.")
    if not isinstance(ema, SWAParams):
        _given.number("ema", ema, "a decay from 0 to below 1, such as 0.999, or SWAParams(...)", lambda decay: 0 <= decay < 1)
        # Average from the first update on, with a smaller decay at first: an average of few updates must not keep the initial
        # weights.
        ema = SWAParams(0, 1, averaging_method="ema", ema_decay=float(plain(ema)), use_lit=True, use_in_evaluation=True)
    return {**words, "averaging": ema}


class BuiltAtFirstUse:
    """An attribute that `configure` sets. A `__getattr__` of the unit would slow down other attribute look-ups."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, unit: Any, owner: type | None = None) -> Any:
        if unit is None or not unit.__dict__.get("training"):
            raise AttributeError(f"no {self._name}: the unit was built with training=False, or its __init__ has not run")
        unit.configure()
        return unit.__dict__.get(self._name)  # lr_scheduler is None if the user has assigned the optimizer
