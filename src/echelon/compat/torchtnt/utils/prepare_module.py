"""torchtnt.utils.prepare_module: make a module parallel, for those who write their own unit."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import UsageError
from echelon.compat import older_options
from echelon.compat.older_options import ActivationCheckpointParams
from echelon.compat.torchtnt.utils.distributed import get_global_rank
from echelon.compat.torchtnt.utils.fsdp2 import FSDP2Strategy
from echelon.compat.torchtnt.utils.fsdp_utils import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from echelon.compat.torchtnt.utils.optimizer import make_state
from echelon.parallel import parallelize
from echelon.parallel.composed import Layout
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.fsdp import fsdp
from echelon.parallel.gradients.clip import clip_by_norm_
from echelon.parallel.layouts import resolve
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.patching import in_front_of, replace_class
from echelon.parallel.recipe.activation import checkpoint_activations
from echelon.parallel.recipe.recipe import Recipe, TorchCompileParams
from echelon.parallel.state.state import states_by_name
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.nn.parallel import DistributedDataParallel

    from echelon.compat.torchtnt.utils.device_mesh import GlobalMeshCoordinator

__all__ = [
    "ActivationCheckpointParams",
    "DDPStrategy",
    "FSDP2OptimizerWrapper",
    "FSDP2Strategy",
    "FSDPOptimizerWrapper",
    "FSDPStrategy",
    "NOOPStrategy",
    "Strategy",
    "TPStrategy",
    "TorchCompileParams",
    "apply_ac",
    "apply_torch_compile",
    "convert_str_to_strategy",
    "get_module_state_dict",
    "materialize_meta_params",
    "on_meta_device",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
]

logger = logging.getLogger(__name__)

# What a string may mean there.
_OF_STRINGS: dict[str, Any] = {
    "sharding_strategy": ShardingStrategy.to_native_sharding_strategy,
    "backward_prefetch": BackwardPrefetch.to_native_backward_prefetch,
    "state_dict_type": StateDictType.to_native_state_dict_type,
}


class FSDPStrategy(older_options.FSDPStrategy):
    """`echelon.FSDPStrategy` with the older FullyShardedDataParallel's other options. Strings are torch's own values then.

    Raises:
        UsageError, a ValueError: a string that is none of their names.
    """

    def __init__(self, process_group: Any = None, sharding_strategy: Any = None, *others: Any, **options: Any) -> None:
        names = list(inspect.signature(older_options.FSDPStrategy).parameters)
        given = {**dict(zip(names, (process_group, sharding_strategy, *others), strict=False)), **options}
        for name, native in _OF_STRINGS.items():
            if isinstance(value := given.get(name), str):
                given[name] = native(value)
        if isinstance(mixed := given.get("mixed_precision"), MixedPrecision):
            given["mixed_precision"] = mixed.to_native_mixed_precision()
        super().__init__(**given)
        older = {"limit_all_gathers": True, "use_orig_params": False, "backward_prefetch": _BACKWARD_PRE}
        for name in ("state_dict_type", "state_dict_config", "optim_state_dict_config", *older):
            object.__setattr__(self, name, given.get(name, older.get(name)))

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        options = {field.name: getattr(self, field.name) for field in fields(fsdp.FSDPStrategy)}
        return fsdp.FSDPStrategy(**{**options, "backward_prefetch": None}).prepare(module, world, recipe)


_BACKWARD_PRE = BackwardPrefetch.to_native_backward_prefetch("BACKWARD_PRE")


@dataclass(frozen=True)
class TPStrategy(Strategy):
    """Tensor parallelism with TorchTNT's arguments; `echelon.Layout` has more.

    Args:
        tp_plan: submodule names to torch's ParallelStyles, or to "colwise", "rowwise", "colwise_gather".
        fsdp2_strategy: how the ranks that see different samples share the parameters.
    """

    name = "tp"

    tp_plan: Mapping[str, str | ParallelStyle] | ParallelStyle
    fsdp2_strategy: FSDP2Strategy | None = None

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        """Over all ranks."""
        return self.over(None).prepare(module, world, recipe)

    def over(self, global_mesh: GlobalMeshCoordinator | None) -> Layout:
        if not isinstance(self.tp_plan, Mapping):
            raise UsageError("TPStrategy(tp_plan=...): a dict of submodule names. Put the style under the name of the layer.")
        dims = global_mesh.dims if global_mesh is not None else None
        if global_mesh is not None and global_mesh.tp_mesh is None:
            raise UsageError("TPStrategy: the global mesh has no tensor-parallel axis. GlobalMeshCoordinator(tp=...) makes it.")
        return Layout(
            plan=self.tp_plan,
            tp=dims.tp if dims is not None else -1,
            dp_replicate=dims.dp_replicate if dims is not None else 1,
            fsdp=self.fsdp2_strategy,
        )


class BackendError(UsageError, RuntimeError):
    """torch.compile has no such backend."""


class NotCompiledError(UsageError, RuntimeError):
    """What only a compiled module has was asked of another."""


def convert_str_to_strategy(strategy: str) -> Strategy:
    """A strategy with its defaults: "ddp", "fsdp", "fsdp2", "noop", and echelon's other names.

    Raises:
        UsageError, a ValueError: an unknown name.
    """
    if strategy in (own := {"fsdp": FSDPStrategy, "fsdp2": FSDP2Strategy}):
        return own[strategy]()  # type: ignore[no-any-return]
    try:
        found = resolve(strategy)
    except UsageError as error:
        raise UsageError(
            f"Strategy {strategy} not supported. Please use one of ['ddp', 'fsdp', 'fsdp2', 'noop']. {error}"
        ) from None
    assert found is not None
    return found


def prepare_module(
    module: nn.Module,
    device: torch.device,
    *,
    strategy: Strategy | str | None = None,
    torch_compile_params: TorchCompileParams | None = None,
    activation_checkpoint_params: ActivationCheckpointParams | None = None,
    enable_compiled_autograd: bool = False,
    global_mesh: GlobalMeshCoordinator | None = None,
) -> nn.Module:
    """As `echelon.layouts.prepare_module`.

    Args:
        enable_compiled_autograd: compile backward passes, too, from now on in this process.
        global_mesh: the ranks as a grid, for `TPStrategy`, `FSDP2Strategy` and "fsdp2".
    Raises:
        UsageError: a mesh, or compiled autograd, for what does not use it.
    """
    if enable_compiled_autograd:
        compile_backward(torch_compile_params)
    if isinstance(strategy, TPStrategy) and global_mesh is None:
        raise UsageError("TPStrategy expects global_mesh (GlobalMeshCoordinator) to be defined. Got None.")
    if isinstance(strategy, str):
        strategy = convert_str_to_strategy(strategy)
    elif strategy is not None and not isinstance(strategy, Strategy):
        raise UsageError(
            f"Unknown strategy received: {strategy}. Expect either str (one of 'ddp', 'fsdp', or 'noop') or Strategy dataclass"
        )
    chosen = on_mesh(strategy, global_mesh)
    made = parallelize.prepare_module(
        module,
        device,
        layout=chosen,
        compile=compilable(torch_compile_params),
        recompute=activation_checkpoint_params,
    )
    return _with_older_methods(made) if isinstance(chosen, fsdp.FSDPStrategy) and not isinstance(chosen, FSDP2Strategy) else made


def prepare_ddp(module: nn.Module, device: torch.device, strategy: DDPStrategy | None = None) -> DistributedDataParallel:
    """As `echelon.layouts.prepare_ddp`."""
    return parallelize.prepare_ddp(module, device, strategy)


def prepare_fsdp(module: nn.Module, device: torch.device, strategy: FSDPStrategy | None = None) -> nn.Module:
    """As `echelon.layouts.prepare_fsdp`: `fully_shard` in place, with the older class's `no_sync` and `clip_grad_norm_`."""
    return _with_older_methods(parallelize.prepare_fsdp(module, device, strategy))


def prepare_fsdp2(
    module: nn.Module,
    device: torch.device,
    strategy: FSDP2Strategy | None = None,
    global_mesh: GlobalMeshCoordinator | None = None,
) -> nn.Module:
    """`fully_shard` in place, with its own options; a mesh with several copies keeps them."""
    chosen = on_mesh(strategy or FSDP2Strategy(), global_mesh)
    assert isinstance(chosen, FSDP2Strategy)
    return parallelize.prepare_fsdp(module, device, chosen)


def on_mesh(strategy: Strategy | str | None, global_mesh: GlobalMeshCoordinator | None) -> Strategy | None:
    """The strategy with the ranks' grid, which TorchTNT gives beside it."""
    chosen = convert_str_to_strategy(strategy) if isinstance(strategy, str) else strategy
    if global_mesh is None:
        return chosen
    if isinstance(chosen, TPStrategy):
        return chosen.over(global_mesh)
    if not isinstance(chosen, FSDP2Strategy):
        kind = "no strategy" if chosen is None else type(chosen).__name__
        raise UsageError(f"global_mesh is for TPStrategy and FSDP2Strategy; here it meets {kind}. Leave it out.")
    if chosen.device_mesh is not None:
        raise UsageError("FSDP2Strategy(mesh=...) and global_mesh both choose the ranks. Give one of them.")
    return chosen.but(device_mesh=global_mesh.dp_mesh)


def compilable(params: Any) -> Any:
    """The same parameters.

    Raises:
        BackendError, a RuntimeError: torch has no such backend.
    """
    backend = getattr(params, "backend", None)
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise BackendError(f"Invalid backend: {backend!r}, see `torch._dynamo.list_backends()` for available backends.")
    return params


def compile_backward(torch_compile_params: TorchCompileParams | None) -> None:
    """Compile backward passes, too, from now on in this process.

    Raises:
        UsageError: the module is not compiled.
    """
    if torch_compile_params is None:
        raise NotCompiledError("Compiled autograd should only be used when the module is compiled. Give torch_compile_params.")
    import torch._dynamo  # its config has no other door

    torch._dynamo.config.compiled_autograd = True


class _OlderMethods:
    """What programs for FullyShardedDataParallel call on a module."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only add gradients up on each rank."""
        sharded: Any = self
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before. Collective."""
        module: Any = self
        return clip_by_norm_(module.parameters(), max_norm, norm_type)


def _with_older_methods(module: nn.Module) -> nn.Module:
    kind = type(module)
    if not isinstance(module, _OlderMethods):
        replace_class(module, "torchtnt", in_front_of(kind, _OlderMethods))  # as `fully_shard` itself does it
    return module


def apply_ac(module: nn.Module, activation_checkpoint_params: ActivationCheckpointParams) -> None:
    """Let submodules recompute their activations, in place."""
    checkpoint_activations(module, activation_checkpoint_params)


def apply_torch_compile(module: nn.Module, torch_compile_params: TorchCompileParams) -> None:
    """Compile the module, or the submodules that the parameters name, in place."""
    Recipe(torch_compile=compilable(torch_compile_params)).compile(module)


def on_meta_device(module: nn.Module) -> bool:
    """Whether the module's own parameters, not those of its submodules, are on the meta device."""
    first = next(module.parameters(recurse=False), None)
    return first is not None and first.is_meta


def materialize_meta_params(module: nn.Module, device: torch.device) -> None:
    """Give a module that was built on the meta device the values of its initialisation. Collective.

    Raises:
        UsageError: nothing gives a value to one of its tensors.
    """
    materialize(module, device)


def get_module_state_dict(module: nn.Module, rank0_only: bool = False) -> dict[str, Any]:
    """The module's state; of a sharded one with whole tensors, by the names that its author gave them. Collective if sharded.

    Args:
        rank0_only: of a sharded module the other ranks get nothing, and the state is gathered in host memory.
    """
    logger.info("Generating module state dict")
    if not _is_sharded(module):
        if rank0_only:
            logger.warning(
                "Provided rank0_only=True, but this is no-op for DDP or no strategy. Returning state dict in module's device."
            )
        return (module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module).state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # On a CPU torch 2.13 crashes if an older FSDP is told to offload.
    offload = rank0_only and any(p.device.type != "cpu" for p in module.parameters())
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    return {} if rank0_only and get_global_rank() else dict(whole)


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(hasattr(p, "device_mesh") for p in module.parameters()) or any(
        isinstance(part, FullyShardedDataParallel) for part in module.modules()
    )


class FSDPOptimizerWrapper:
    """An optimizer's state by parameter name, for `torch.distributed.checkpoint`; the methods are collective.

    echelon's own checkpoints name every optimizer's state without a wrapper. State that is not there yet is made first
    (`utils.optimizer.make_state`), so that a checkpoint can be read into it.

    Args:
        module: the sharded module; of the optimizer's parameters it may have more.
    """

    keyed_by_name = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def _by_name(self) -> Any:
        return states_by_name({"module": self.module, "optimizer": self.optimizer})["optimizer"]

    def state_dict(self) -> dict[str, Any]:
        make_state(self.optimizer)
        state: dict[str, Any] = self._by_name().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._by_name().load_state_dict(state_dict)


FSDP2OptimizerWrapper = FSDPOptimizerWrapper
