"""Stand-ins for what a script uses before it trains and a plan does not have: memory for parameters, CUDA, weights from files.

The script runs unchanged. When it builds a model, parameters lose their memory as soon as a module registers them. When it asks
for CUDA, it is told of the planned devices, and its tensors stay on this machine's CPU. When it loads pretrained weights, it gets
the model of their configuration; weights are neither read nor downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.common.errors import PlanError
from echelon.loop.auto.prepared_unit import PreparedUnit
from echelon.loop.auto.unit_options import AutoOptions
from echelon.planner.devices import Device, device_named
from echelon.planner.pretended import FakeTensor, NoMemory, recurrent_functions, without_overrides
from echelon.planner.recurrent import recurrent_layer

__all__ = ["stand_ins"]

_CUDA = re.compile(r"cuda(:\d+)?")


@contextlib.contextmanager
def stand_ins(mode: NoMemory, *, gpus: int, device: Device | None = None, memory: int | None = None) -> Iterator[None]:
    """Context in which a script runs.

    Args:
        gpus: number of GPUs of this node that the script is told of; 0 in a plan for CPUs.
        device: their kind; by default an H100.
        memory: bytes of each; by default those of `device`.
    """

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        with without_overrides():  # within on_meta, tensors on meta report the CPU
            if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
                return None
            with mode:
                empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            return made

    register: Any = register_module_parameter_registration_hook  # its annotation omits that a hook may return a parameter
    hook = register(without_memory)
    cuda, accelerator = _answers(gpus, device or device_named("h100"), memory)
    try:
        with (
            mock.patch.multiple(torch.cuda, **cuda),
            mock.patch.multiple(torch.accelerator, **accelerator),
            mock.patch.multiple(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing),
            mock.patch.object(dist, "init_process_group", _nothing),  # the group exists already
            mock.patch.object(PreparedUnit, "_prepare", _prepare_here),
            mock.patch.object(DistributedDataParallel, "__init__", _wrap_here),
            mock.patch.object(FullyShardedDataParallel, "__init__", _refuse_fsdp1),
            mock.patch.object(torch, "Generator", _Generator),
            mock.patch.object(torch, "set_default_device", _set_default_device),
            mock.patch.object(torch, "save", _save),
            mock.patch.object(torch, "load", _load),
            mock.patch.object(torch.autocast, "__init__", _autocast),
            _loaded("transformers.modeling_utils", _leave_weights_out),
            _loaded("transformers.masking_utils", _look_at_masks),
            mock.patch.dict(vars(F), _KERNELS if gpus else {}),
            mock.patch.multiple(recurrent_functions, **_RECURRENT) if gpus else contextlib.nullcontext(),
            mock.patch.object(torch.autograd.graph, "save_on_cpu", functools.partial(_OnHost, mode) if gpus else _real_on_host),
            mock.patch.object(torch.optim.Optimizer, "add_param_group", _add_group if gpus else _real_add_group),
            _Here(),
        ):
            yield
    finally:
        hook.remove()


def _answers(gpus: int, device: Device, memory: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stand-ins for functions of torch.cuda and torch.accelerator, for a script that is planned for these devices."""
    major, minor = device.capability
    total = memory or device.memory or 80 << 30
    properties = SimpleNamespace(
        name=device.name, major=major, minor=minor, total_memory=total, multi_processor_count=device.processors or 132
    )
    cuda: dict[str, Any] = {
        **dict.fromkeys(_WITHOUT_EFFECT, _nothing),
        **dict.fromkeys(_BYTES, lambda *args, **kwargs: 0),
        "current_device": lambda: 0,
        "get_device_name": lambda *args, **kwargs: device.name,
        "get_device_capability": lambda *args, **kwargs: (major, minor),
        "get_device_properties": lambda *args, **kwargs: properties,
        "is_bf16_supported": lambda *args, **kwargs: major >= 8,
        "memory_summary": lambda *args, **kwargs: "",
        "mem_get_info": lambda *args, **kwargs: (total, total),
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "Stream": _Stream,
        "Event": _Stream,
        "is_available": _told(torch.cuda.is_available, gpus > 0),
        "device_count": _told(torch.cuda.device_count, gpus),
    }
    accelerator = {
        **dict.fromkeys(("set_device_index", "synchronize"), _nothing),
        "current_device_index": lambda: 0,
        "is_available": _told(torch.accelerator.is_available, gpus > 0),
        "device_count": _told(torch.accelerator.device_count, gpus),
        "current_accelerator": _told(torch.accelerator.current_accelerator, torch.device("cuda") if gpus else None),
    }
    return cuda, accelerator


# Functions of torch.cuda.
_WITHOUT_EFFECT = ("set_device", "synchronize", "init", "reset_peak_memory_stats", "empty_cache", "ipc_collect")
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _told(real: Callable[..., Any], planned: Any) -> Callable[..., Any]:
    """A function that gives a script the planned answer. torch, torchvision and the like, and echelon get the real answer."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return real(*args, **kwargs) if asking == "echelon" or asking.startswith("torch") else planned

    return ask


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Stream:
    """A stand-in for a stream or an event, for which a script may wait."""

    __init__ = record = wait = synchronize = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Here(TorchFunctionMode):
    """Replaces CUDA devices in calls of torch by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)  # a script may look at its device
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):  # torch reads memory
            args = (tree_map_only(FakeTensor, FakeTensor.tolist, args[0]), *args[1:])
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        if any(map(_is_cuda, args)):
            args = tuple("cpu" if _is_cuda(each) else each for each in args)
        if (device := kwargs.get("device")) is not None and (_is_cuda(device) or type(device) is int):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and _CUDA.fullmatch(value) is not None


_real_autocast: Any = torch.autocast.__init__


def _autocast(context: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Autocast for "cuda" becomes that for "cpu": without CUDA torch disables it, and the plan would be that of float32."""
    _real_autocast(context, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)


_real_prepare: Any = PreparedUnit._prepare


def _prepare_here(unit: PreparedUnit, module: nn.Module, options: AutoOptions) -> None:
    """A unit computes on the CPU, whatever device it is given."""
    _real_prepare(unit, module, replace(options, device=None))


_real_wrap: Any = DistributedDataParallel.__init__


@functools.wraps(_real_wrap)  # its signature shows which options this torch has
def _wrap_here(
    wrapper: DistributedDataParallel,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **options: Any,
) -> None:
    """A module that a script wraps by hand stays on the CPU, whatever devices are named."""
    _real_wrap(wrapper, module, None, None, *args, **options)


@functools.wraps(FullyShardedDataParallel.__init__)
def _refuse_fsdp1(wrapper: FullyShardedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
    raise PlanError(
        "a module must be plain, or wrapped by DistributedDataParallel or fully_shard, to be planned, got a "
        f"{type(module).__name__} that FullyShardedDataParallel flattens. layout='fsdp' shards the plain one."
    )


_real_default = torch.set_default_device


def _set_default_device(device: Any) -> None:
    _real_default("cpu" if _is_cuda(device) else device)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if _is_cuda(device) else device)  # type: ignore[call-arg]


_real_save, _real_load = torch.save, torch.load


def _save(obj: Any, *args: Any, **kwargs: Any) -> None:
    """Writes nothing if the object has tensors without values."""
    if not any(isinstance(each, FakeTensor) for each in tree_leaves(obj)):
        _real_save(obj, *args, **kwargs)


def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _real_load(f, "cpu" if map_location is None or _is_cuda(map_location) else map_location, *args, **kwargs)


# --- functions that are one kernel on a GPU, and on a CPU several, which keep more for the backward pass

_real_rms_norm, _real_dropout, _real_attention = F.rms_norm, F.dropout, F.scaled_dot_product_attention


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """By the kernel of layer norm, which keeps as much, and one mean more for each row."""
    if weight is not None and weight.dtype != input.dtype:
        return _real_rms_norm(input, list(normalized_shape), weight, eps)
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 0.0)[0]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """By the fused kernel, which keeps a mask of bytes."""
    if not training or inplace or not 0 < p < 1:
        return _real_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Without dropout, as a GPU's kernel keeps no mask and draws it again in the backward pass. For a learned mask, such as T5's
    bias, a CPU has no kernel, so a GPU's is traced.
    """
    if attn_mask is None or not attn_mask.requires_grad or query.dim() != 4 or query.shape[1] != key.shape[1]:
        return _real_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    to = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value, mask = (each.to(to) for each in (query, key, value, attn_mask))
    mask = mask.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    made: torch.Tensor = kernel(query, key, value, mask, True, 0.0, is_causal, scale=options.get("scale"))[0]
    return made


_real_on_host = torch.autograd.graph.save_on_cpu


class _OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Stand-in for `save_on_cpu`: a saved tensor goes to the host's memory, and comes back as another tensor."""

    def __init__(self, mode: NoMemory, pin_memory: bool = False, device_type: str = "cuda") -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            there = tensor.clone()
            mode.on_host(there)
            return there

        super().__init__(pack, torch.clone)


_real_add_group = torch.optim.Optimizer.add_param_group


def _add_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Sets `foreach`, a GPU's default: it steps all parameters together, with a temporary tensor as large as each."""
    _real_add_group(optimizer, param_group)
    group = optimizer.param_groups[-1]
    if "foreach" in group and not any(group.get(name) is not None for name in ("foreach", "fused")):
        group["foreach"] = not group.get("differentiable", False)


_RECURRENT: dict[str, Any] = {
    name: recurrent_layer(gates) for name, gates in [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)]
}
_KERNELS: dict[str, Any] = {"rms_norm": _rms_norm, "dropout": _dropout, "scaled_dot_product_attention": _attention}


# --- pretrained weights


@contextlib.contextmanager
def _loaded(name: str, change: Callable[[ModuleType], Callable[[], Any]]) -> Iterator[None]:
    """Change a module when the script imports it, so that plans of other scripts need not import it.

    Args:
        change: changes the module and returns a function that undoes this.
    """
    if (there := sys.modules.get(name)) is not None:
        undo = change(there)
        try:
            yield
        finally:
            undo()
        return
    undos: list[Callable[[], Any]] = []

    class Finder:
        @staticmethod
        def find_spec(wanted: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if wanted != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    undos.append(change(module))

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(Finder)
        for undo in undos:
            undo()


def _leave_weights_out(modeling: ModuleType) -> Callable[[], Any]:
    """`from_pretrained` builds the model that the configuration describes, and reads only the configuration."""
    base: Any = modeling.PreTrainedModel
    real = base.from_pretrained.__func__

    def from_pretrained(cls: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None:
            return real(cls, *args, config=config, **kwargs)
        name, *more = args or (kwargs.pop("pretrained_model_name_or_path"),)
        if not hasattr(config, "to_dict"):
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        if config.dtype is None:
            config.dtype = torch.float32
        kwargs.pop("device_map", None)
        logging = sys.modules["transformers.utils.logging"]
        before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()  # it would list all weights as newly initialized
        logging.disable_progress_bar()
        try:
            return real(cls, None, *more, config=config, **kwargs, state_dict={})
        finally:
            logging.set_verbosity(before)
            if bars:
                logging.enable_progress_bar()

    patch = mock.patch.object(base, "from_pretrained", classmethod(from_pretrained))
    patch.start()
    return patch.stop


def _look_at_masks(masks: ModuleType) -> Callable[[], Any]:
    """transformers would take fake tensors for tracing, never leave a mask out, and attention would compute the whole square of a
    causal mask. A plan knows the values of masks and positions, so they can be looked at.
    """
    real = masks.is_tracing
    patch = mock.patch.object(masks, "is_tracing", lambda tensor=None: real())
    patch.start()
    return patch.stop
