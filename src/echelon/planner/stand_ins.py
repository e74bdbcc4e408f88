"""What a script does on its way to training that a plan goes without: memory for parameters, CUDA, weights from files.

A script is run as it stands. Where it builds a model, the parameters have shapes alone from the moment at which a module gets
them; where it names a CUDA device, its tensors stay here; where it loads pretrained weights, it gets the model of their
configuration, and nothing of the weights is read or downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from echelon.planner.pretended import FakeTensor, NoMemory, without_overrides

__all__ = ["stand_ins"]

_CUDA = re.compile(r"cuda(:\d+)?")


@contextlib.contextmanager
def stand_ins(mode: NoMemory) -> Iterator[None]:
    """Context in which a script runs."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        with without_overrides():  # within on_meta, tensors say that they lie on the CPU
            if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
                return None
            with mode:
                empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            return made

    register: Any = register_module_parameter_registration_hook  # its annotation leaves out that the hook may give another
    hook = register(without_memory)
    answers: dict[str, Any] = {
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "init": lambda: None,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "planned",
    }
    try:
        with (
            mock.patch.multiple(torch.cuda, **answers),
            mock.patch.object(torch, "save", _save),
            mock.patch.object(torch.autocast, "__init__", _autocast),
            _loaded("transformers.modeling_utils", _leave_weights_out),
            _Here(),
        ):
            yield
    finally:
        hook.remove()


class _Here(TorchFunctionMode):
    """What names a CUDA device means the one where the plan is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
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
    """Without CUDA torch leaves its autocast out, and a plan would be that of float32."""
    _real_autocast(context, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)


_real_save = torch.save


def _save(obj: Any, *args: Any, **kwargs: Any) -> None:
    """What has no values is not written."""
    if not any(isinstance(each, FakeTensor) for each in tree_leaves(obj)):
        _real_save(obj, *args, **kwargs)


# --- pretrained weights


@contextlib.contextmanager
def _loaded(name: str, change: Callable[[ModuleType], Callable[[], Any]]) -> Iterator[None]:
    """Have a module changed when the script imports it; a plan of another script does not wait for that import.

    Args:
        change: gives what undoes it.
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
    """`from_pretrained` gives the model that the configuration describes, and reads that alone."""
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
        logging.set_verbosity_error()  # it would list all weights as newly drawn
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
