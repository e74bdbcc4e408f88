"""Activation checkpointing: activations are computed a second time in the backward pass instead of being kept.

A recomputed module stays the same object of the same class, with another `forward`, so its parameters keep their names. Built on
the non-reentrant `torch.utils.checkpoint`, which draws the same dropout masks again. This file adds what torch lacks: the second
pass begins with the buffers and counters of the first and changes none, keyword arguments are saved like positional ones, and
a cache of keys and values (transformers' `use_cache`), which would grow in the second pass, is left out with gradients.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.common.arguments import flags, flags_of, several
from echelon.common.errors import RecomputeError, require
from echelon.common.numbers import number, whole
from echelon.parallel import patching
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe.blocks import blocks_by_policy, blocks_to_shard
from echelon.parallel.recipe.compilation import may_draw
from echelon.parallel.shards import is_split

__all__ = ["ActivationCheckpointParams", "Preset", "Recompute", "checkpoint_activations", "checkpoint_wrapper"]

logger = logging.getLogger(__name__)

Contexts = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class ActivationCheckpointParams:
    """Recompute activations in the backward pass instead of keeping them.

    Args:
        check_fn: chooses the submodules to recompute, each separately; by default the repeated blocks of the model. If it is true
            for the module itself, the whole module is recomputed at once, which keeps nothing in between.
        auto_wrap_policy: another way to choose, as in the older FullyShardedDataParallel.
        context_fn: as in `torch.utils.checkpoint.checkpoint`, to decide operator by operator what is kept.
        every: recompute only each `every`-th of the chosen modules, for a half or a third of the cost.
        save_ops: keep the results of these operators, for example `[torch.ops.aten.mm.default]`, and recompute the rest.
        memory_budget: from 0 to 1: each compiled graph keeps at most this fraction of its activations, the most expensive ones,
            as torch's partitioner chooses (`torch._functorch.config.activation_memory_budget`; torchtitan's word). Results of
            random operators are always kept. Replaces the other options, and needs `compile`.
        offload_to_cpu: keep the inputs of the recomputed modules in host memory.
    """

    check_fn: Callable[[nn.Module], bool] | None = None
    auto_wrap_policy: Any = None
    context_fn: Contexts | None = None
    every: int = 1
    save_ops: Sequence[Any] = ()
    offload_to_cpu: bool = False
    memory_budget: float | None = None

    def __post_init__(self) -> None:
        flags_of(self, kind=RecomputeError)
        if self.memory_budget is not None:
            number("memory_budget", self.memory_budget, "from 0 to 1", lambda part: 0 <= part <= 1, kind=RecomputeError)
            if replace(self, memory_budget=None) != ActivationCheckpointParams():
                raise RecomputeError("memory_budget must be the only option, since torch.compile then chooses what is kept.")
        object.__setattr__(self, "every", whole("every", self.every, at_least=1, kind=RecomputeError))
        for name, function in (("check_fn", self.check_fn), ("context_fn", self.context_fn)):
            require(function is None or callable(function), name, "a function or None", function, kind=RecomputeError)
        operators = "operators such as torch.ops.aten.mm.default"
        object.__setattr__(self, "save_ops", several("save_ops", self.save_ops, f"a list of {operators}", kind=RecomputeError))
        if self.check_fn is not None and self.auto_wrap_policy is not None:
            raise RecomputeError("check_fn and auto_wrap_policy both choose the submodules to recompute. Give one of them.")
        if self.context_fn is not None and self.save_ops:
            raise RecomputeError("context_fn and save_ops both choose what is kept. Give one of them.")

    @classmethod
    def of(cls, value: Any, option: str) -> ActivationCheckpointParams | None:
        """From a preset or an ActivationCheckpointParams. "none" or None: nothing. "blocks": recompute the repeated blocks.
        "selective": the same, but keep results of matrix products, attention and collectives, so that only cheap ones are
        recomputed.

        Raises:
            UsageError: anything else. Names `option`.
        """
        if isinstance(value, cls) or value is None or value == "none":
            return None if isinstance(value, str) else value
        presets = "'none', 'blocks', 'selective' or ActivationCheckpointParams(...), such as (memory_budget=0.6)"
        require(value in ("blocks", "selective"), option, presets, value, kind=RecomputeError)
        return cls(save_ops=_dear()) if value == "selective" else cls()

    def chosen(self, module: nn.Module) -> list[nn.Module]:
        """The modules to recompute, in the order of the model."""
        check, policy = self.check_fn, self.auto_wrap_policy
        if check is not None:
            modules = [m for m in module.modules() if check(m)]
        elif policy is not None:
            modules = [m for _, m in blocks_by_policy(module, policy, set())]
        else:
            modules = [m for _, m in blocks_to_shard(module)]
        return modules[:: self.every]

    def contexts(self, *, keep_random: bool = False) -> Contexts | None:
        """What decides operator by operator what is kept; None recomputes all.

        Args:
            keep_random: results of random operators are kept, too, unless the user's `context_fn` decides.
        """
        if self.context_fn is not None or not (self.save_ops or keep_random):
            return self.context_fn
        # fully_shard tells a profiler of its steps. Parts of a block that are sharded by themselves, such as norms in float32 on
        # a CPU, have other steps when the block is recomputed, for which torch would look among the block's operators (2.13).
        records = (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit)
        SAC_IGNORED_OPS.update(getattr(each, overload) for each in records for overload in each.overloads())
        kept: Any = partial(_kept_or_random, frozenset(self.save_ops)) if keep_random else list(self.save_ops)
        return partial(create_selective_checkpoint_contexts, kept)


def _kept_or_random(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in kept or may_draw(operator)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


Preset = ActivationCheckpointParams | Literal["none", "blocks", "selective"] | None

# Operators whose results "selective" keeps: these few take most of a block's time.
_DEAR = {
    "aten": (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "_c10d_functional": ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
}


def _dear() -> list[Any]:
    """The operators of `_DEAR` that this torch has."""
    operators = [getattr(getattr(torch.ops, library), name, None) for library, names in _DEAR.items() for name in names]
    return [operator.default for operator in operators if operator is not None]


def checkpoint_activations(module: nn.Module, params: ActivationCheckpointParams | None, *, compiled: bool = False) -> nn.Module:
    """Make the chosen submodules recompute, in place; those that already do are left alone.

    Args:
        compiled: the module will be compiled.
    Raises:
        UsageError: no submodule was chosen.
    """
    if params is None or params.memory_budget is not None:
        return module
    chosen = params.chosen(module)
    if not chosen:
        raise RecomputeError(
            f"recompute chose no submodule of {type(module).__name__}. Give a check_fn that returns True for its blocks."
        )
    # A graph with a mesh, which comes with parameters in DTensors, cannot also have the RNG states with which a recomputed
    # attention or dropout would draw again: torch (2.13) takes one for the other.
    contexts = params.contexts(keep_random=compiled and any(map(is_split, module.parameters())))
    for block in chosen:
        checkpoint_wrapper(block, offload_to_cpu=params.offload_to_cpu, context_fn=contexts)
    return module


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False, *, context_fn: Contexts | None = None) -> nn.Module:
    """Make a module recompute its activations in the backward pass. Returns the same module, changed in place.

    Args:
        module: left as it is if it already recomputes.
        offload_to_cpu: keep the module's inputs in host memory until the backward pass.
        context_fn: as in `torch.utils.checkpoint.checkpoint`.
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, kind=RecomputeError)
    flags(offload_to_cpu=offload_to_cpu, kind=RecomputeError)
    if not isinstance(module.forward, Recompute):
        patching.replace(module, "forward", "recompute", Recompute(module, offload_to_cpu, context_fn))
    return module


class Recompute:
    """The recomputing `forward` of a module. A class, so that the module can still be copied and pickled."""

    def __init__(self, module: nn.Module, offload_to_cpu: bool, contexts: Contexts | None) -> None:
        self._module, self._forward = module, module.forward
        self._offload, self._contexts = offload_to_cpu, contexts
        self._changing: _Changing = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if any(_is_cache(value) for value in (*args, *kwargs.values())):
            args, kwargs = self._without_cache(args, kwargs)
        # Pass all by position: torch saves, frees and offloads tensors among positional arguments only.
        inputs, names = (*args, *kwargs.values()), tuple(kwargs)
        if torch.compiler.is_compiling():  # the compiler supports only torch's own contexts
            options: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
            call = partial(self._traced, [], names)
            return checkpoint(call, *inputs, use_reentrant=False, **options)
        with self._offloaded() if self._offload else NO_CONTEXT:
            return checkpoint(partial(self._call, names), *inputs, use_reentrant=False, context_fn=self.contexts)

    def _without_cache(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments as with use_cache=False. Evaluation and generation, which compute no gradients, keep their cache.

        Raises:
            UsageError: the cache already holds tokens, so the result depends on it.
        """
        own = next((i for m in self._module.modules() if isinstance(i := getattr(m, "layer_idx", None), int)), 0)
        if any(_is_cache(value) and _holds(value, own) for value in (*args, *kwargs.values())):
            raise RecomputeError(
                f"{type(self._module).__name__} recomputes its activations and got keys and values of earlier tokens "
                "(past_key_values, as in prefix tuning). Leave out recompute for this model."
            )
        _note_cache()
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return tuple(None if _is_cache(value) else value for value in args), kwargs

    def _call(self, names: tuple[str, ...], *values: Any) -> Any:
        count = len(values) - len(names)
        return self._forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    def _traced(self, calls: list[_Began], names: tuple[str, ...], *values: Any) -> Any:
        """The call for the compiler, whose graphs change the state once. If it cannot trace the module, this runs twice."""
        if torch.compiler.is_compiling():
            return self._call(names, *values)
        if calls:
            with _Again(calls[0]):
                return self._call(names, *values)
        calls.append(_Began(self._module, self._changing))
        with calls[0]:
            return self._call(names, *values)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the forward pass and of the recomputation."""
        if self._contexts is None:
            began = _Began(self._module, self._changing)
            return began, _Again(began)
        first, again = map(_CastsAnew, self._contexts())
        began = _Began(self._module, self._changing, first)
        return began, _Again(began, again)

    def _offloaded(self) -> AbstractContextManager[Any]:
        on_gpu = any(p.device.type == "cuda" for p in self._module.parameters())
        return torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)


def _is_cache(value: Any) -> bool:
    """Whether it is an object that collects keys and values layer by layer, such as transformers' Cache."""
    if value is None or isinstance(value, (torch.Tensor, nn.Module, bool, int, float, str, tuple)):
        return False
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _holds(cache: Any, layer: int) -> bool:
    """Whether the cache holds earlier tokens for this layer: keys and values, or the state of a linear attention."""
    try:
        return bool(cache.get_seq_length(layer) > 0)
    except ValueError:  # transformers has no token count for a state
        return bool(cache.has_previous_state(layer))


@functools.cache
def _note_cache() -> None:
    """Warn once in a process."""
    logger.warning(
        "blocks with activation checkpointing get no cache of keys and values while gradients are computed, as with "
        "use_cache=False; then the model's past_key_values are empty. Evaluation and generation use the cache as before."
    )


class _CastsAnew:
    """A context in which autocast also casts a weight at each use. Of a weight that blocks share, the first block's forward pass
    would else keep a copy for the others, whose recomputation would run a cast that their forward pass did not.
    """

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self._kept: list[bool] = []

    def __enter__(self) -> None:
        self._kept.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        torch.set_autocast_cache_enabled(self._kept.pop())
        return self._inner.__exit__(*raised)


_PLAIN = (bool, int, float, str, type(None))  # no tensors: as attributes they may be as large as activations
# By the modes of the parts of a module: what its forward pass changes, as (part, name).
_Changing = dict[tuple[bool, ...], list[tuple[nn.Module, str]]]


class _Began:
    """Context of a forward pass that will be recomputed. Notes the state with which it begins: the buffers and plain attributes
    that the pass changes, such as running statistics, the vectors of a spectral norm, and counters. Which these are is learned in
    the first pass in each combination of modes.

    Attributes:
        state: their values, by (part, name).
    """

    def __init__(self, module: nn.Module, changing: _Changing, also: AbstractContextManager[Any] = NO_CONTEXT) -> None:
        self._module, self._changing, self._also = module, changing, also
        self.state: dict[tuple[nn.Module, str], Any] = {}

    def __enter__(self) -> None:
        parts = list(self._module.modules())
        self._modes = tuple(part.training for part in parts)
        names = self._changing.get(self._modes)
        self._learns = names is None
        if names is None:
            names = [(part, name) for part in parts for name in _state_of(part)]
            self._was = [(part, name, value := getattr(part, name), _version(value)) for part, name in names]
        self.state = {(part, name): _copy(getattr(part, name)) for part, name in names}
        self._also.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        if self._learns:
            was, self._was = self._was, []
            changed = [
                (part, name)
                for part, name, value, version in was
                if (now := getattr(part, name, None)) is not value or _version(now) != version or _is_statistic(part, name)
            ]
            self.state = {each: self.state[each] for each in changed}
            if raised[0] is None:
                self._changing[self._modes] = changed
        return self._also.__exit__(*raised)


class _Again:
    """Context of a recomputation: it begins with the state with which the forward pass began, and its changes are thrown away.

    torch may enter the same context again, and an inner module's context lies within an outer one's. `also` is entered last: it
    may watch all operations, which must be the same as in the forward pass.
    """

    def __init__(self, began: _Began, also: AbstractContextManager[Any] = NO_CONTEXT) -> None:
        self._began, self._also = began, also
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for (part, name), value in self._began.state.items():
                stack.callback(setattr, part, name, getattr(part, name))
                setattr(part, name, _copy(value))
            stack.enter_context(self._also)
            self._entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def _is_statistic(part: nn.Module, name: str) -> bool:
    """Whether it is a norm's running statistic that the pass updates: torch's operator writes it without a new version."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    return name in names and part.training and bool(getattr(part, "track_running_stats", False))


def _state_of(part: nn.Module) -> list[str]:
    plain = [name for name, value in vars(part).items() if isinstance(value, _PLAIN)]
    return [*(name for name, _ in part.named_buffers(recurse=False)), *plain]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
