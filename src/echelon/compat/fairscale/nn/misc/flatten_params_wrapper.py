"""`FlattenParamsWrapper`: a module whose parameters are one long tensor, of which the module has views. No sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn

from echelon.common.errors import UsageError

__all__ = ["FlatParameter", "FlattenParamsWrapper"]

_INNER = "_fpw_module."
_FLAT = "flat_param_"

Place = tuple[str, str]  # the module's name within the wrapper, the parameter's within that


class FlattenError(UsageError, AssertionError):
    """Parameters that cannot be one tensor, or a wrapper that is in the other form."""


class FlatParameter(nn.Parameter):
    """Several parameters as one of a single dim.

    Raises:
        ValueError: not a list or tuple of parameters, none, or a flat one among them.
    """

    _shapes: list[torch.Size]
    places: list[Place]  # of each one, in the wrapper that made it
    also: list[tuple[Place, Place]]  # another place of the same parameter, and that in `places`

    def __new__(cls, params: Sequence[nn.Parameter], requires_grad: bool = True) -> FlatParameter:
        if not isinstance(params, (list, tuple)) or not params:
            raise UsageError("An non-empty list or tuple argument is needed")
        if not all(isinstance(p, torch.Tensor) for p in params):
            raise UsageError("List items need to be Parameter types")
        if any(isinstance(p, FlatParameter) for p in params):
            raise UsageError("Nesting FlatParameter is not supported")
        made: FlatParameter = super().__new__(cls, torch.cat([p.detach().reshape(-1) for p in params]), requires_grad)
        return made

    def __init__(self, params: Sequence[nn.Parameter], requires_grad: bool = True) -> None:
        self._shapes = [p.shape for p in params]
        self.places, self.also = [], []

    def get_param_views(self, external_data: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """The parameters again, as views: of `external_data`, by default of this tensor.

        Raises:
            ValueError: it has another number of elements.
        """
        data = self if external_data is None else external_data
        sizes = [shape.numel() for shape in self._shapes]
        if data.numel() != sum(sizes):
            raise UsageError(f"Incorrect numel of supplied data: got {data.numel()} but expected {sum(sizes)}")
        return (part.view(shape) for part, shape in zip(data.split(sizes), self._shapes, strict=True))

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Names, shapes and numbers of elements."""
        return [".".join(place) for place in self.places], self._shapes, [shape.numel() for shape in self._shapes]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.detach(), self.requires_grad, self._shapes, self.places, self.also)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        memo[id(self)] = copied = _restored(self.detach().clone(), self.requires_grad, self._shapes, self.places, self.also)
        return copied


class FlattenParamsWrapper(nn.Module):
    """Optimizers see the flat parameters; the module, `state_dict` and whoever reads its attributes see what it was written with.

    Args:
        module: changed in place.
        param_list: the parameters to flatten, or lists of them, each list into a tensor of its own; by default all into one.
        flat_param_names: of the flat ones, after "flat_param_"; by default their numbers.
    Attributes:
        flat_params: the flat parameters; `flat_param` if there is one.
        is_flattened: False within `unflatten_params`.
    Raises:
        ValueError: a parameter in two lists; names that are not one for each list.
        FlattenError: an AssertionError; types or `requires_grad` differ within a list.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[Sequence[nn.Parameter]] | Sequence[nn.Parameter] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        given: Any = list(module.parameters()) if param_list is None else list(param_list)
        lists: list[set[nn.Parameter]] = [
            set(each) for each in ([given] if given and isinstance(given[0], nn.Parameter) else given)
        ]
        # In which the module's state dict has them.
        self._order: list[Place] = [(path, name) for path, each in self.named_modules() for name in each._parameters]
        self.num_params_managed = sum(map(len, lists))
        if len(set().union(*lists)) != self.num_params_managed:
            raise UsageError(f"Incorrect param groups: {self.num_params_managed} parameters, some of them in two lists.")
        found = [flat for each in lists if (flat := self._joined(each)) is not None]
        names = [str(i) for i in range(len(found))] if flat_param_names is None else list(flat_param_names)
        if len(names) != len(found):
            raise UsageError("Names and number of param lists must be equal")
        if len(set(names)) != len(names):
            raise UsageError("Each flat param must be given a unique name")
        self.flat_param_names = [_FLAT + name for name in names]
        self.flat_params: list[FlatParameter] = []
        self.is_flattened, self._is_whole = False, True
        self._flatten(found)
        self.register_state_dict_post_hook(_without_inner)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_inner)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> Any:
        return self._fpw_module

    @property
    def flat_param(self) -> FlatParameter:
        if len(self.flat_params) != 1:
            raise FlattenError(f"Incorrect access to flat_param: len(self.flat_params)={len(self.flat_params)}")
        return self.flat_params[0]

    def forward(self, *inputs: Any, **kwinputs: Any) -> Any:
        if self.is_flattened:
            self._show()
        return self.module(*inputs, **kwinputs)

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Inside, the module has its own parameters again, in the memory of the flat ones, or of these tensors."""
        if flat_params is not None and not self.is_flattened:
            raise FlattenError("Unflattening with external flat_param requires current instance to be flattened")
        if not self.is_flattened:
            yield
            return
        flat = self.flat_params
        self._unflatten(flat_params)
        try:
            yield
        finally:
            self._flatten(flat)

    def get_param_views(self, external_data_list: Sequence[torch.Tensor | None] | None = None) -> Iterator[torch.Tensor]:
        """All parameters as views, of the flat ones or of these tensors."""
        given = [None] * len(self.flat_params) if external_data_list is None else external_data_list
        if len(given) != len(self.flat_params):
            raise FlattenError(f"Incorrect external data list: {len(given)} vs. {len(self.flat_params)}")
        return chain(*(flat.get_param_views(data) for flat, data in zip(self.flat_params, given, strict=True)))

    def metadata(self, flat_param_idx: int) -> tuple[list[str], list[torch.Size], list[int]]:
        """As FlatParameter's, of one of them."""
        return self.flat_params[flat_param_idx].metadata()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if not self.is_flattened or not self._is_whole:
            return super().state_dict(*args, **kwargs)
        with self.unflatten_params():
            return super().state_dict(*args, **kwargs)

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """With the flat parameters as they are."""
        if not self.is_flattened:
            raise FlattenError("flat_state_dict within unflatten_params: call it outside.")
        self._is_whole = False
        try:
            return self.state_dict(*args, **kwargs)
        finally:
            self._is_whole = True

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Either form."""
        if "flat_param" in state_dict:  # of old releases
            state_dict = {_FLAT + "0" if key == "flat_param" else key: value for key, value in state_dict.items()}
        if not self.is_flattened or any(key.startswith(_FLAT) for key in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        with self.unflatten_params():
            return super().load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fpw_module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._show()  # views were unpickled as tensors of their own

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        places = [flat.places for flat in self.flat_params]
        with self.unflatten_params():  # views cannot be copied
            inner = deepcopy(self.module, memo)
        copied = type(self)(inner, [], [])
        lists = [[copied.get_submodule(path)._parameters[name] for path, name in each] for each in places]
        copied.__init__(inner, lists, [name.removeprefix(_FLAT) for name in self.flat_param_names])  # type: ignore[misc]
        memo[id(self)] = copied
        return copied.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._show()
        return self

    def _joined(self, parameters: set[nn.Parameter]) -> FlatParameter | None:
        places: dict[nn.Parameter, list[Place]] = {}
        for path, each in self.named_modules():
            for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
                if parameter in parameters:
                    places.setdefault(parameter, []).append((path, name))
        if not places:
            return None
        for what in ("dtype", "requires_grad"):
            if len({getattr(p, what) for p in places}) > 1:
                shown = ", ".join(f"{'.'.join(at[0]).removeprefix(_INNER)}: {getattr(p, what)}" for p, at in places.items())
                raise FlattenError(f"expects all parameters to have same {what}: {shown}")
        flat = FlatParameter(list(places), next(iter(places)).requires_grad)
        flat.places = [at[0] for at in places.values()]
        flat.also = [(other, at[0]) for at in places.values() for other in at[1:]]
        return flat

    def _flatten(self, flat_params: list[FlatParameter]) -> None:
        self.flat_params = flat_params
        for name, flat in zip(self.flat_param_names, flat_params, strict=True):
            self.register_parameter(name, flat)
        self.is_flattened = True
        self._show()

    def _show(self) -> None:
        """Give the module views as plain attributes: new ones, since autograd knows of the old ones what was true then."""
        for flat in self.flat_params if self.is_flattened else ():
            for place, view in zip(flat.places, flat.get_param_views(), strict=True):
                self._put(place, view)
        for flat in self.flat_params:
            for place, source in flat.also:
                self._put(place, getattr(self.get_submodule(source[0]), source[1]))

    def _unflatten(self, data: Sequence[torch.Tensor] | None) -> None:
        views = list(self.get_param_views(data))
        flat_params, self.flat_params, self.is_flattened = self.flat_params, [], False
        for name in self.flat_param_names:
            delattr(self, name)
        places = [(place, flat.requires_grad) for flat in flat_params for place in flat.places]
        own = {place: nn.Parameter(view.detach(), grad) for (place, grad), view in zip(places, views, strict=True)}
        own |= {place: own[source] for flat in flat_params for place, source in flat.also}
        for place in self._order:
            kept = self.get_submodule(place[0])._parameters.get(place[1])
            self._put(place, own.get(place, kept))

    def _put(self, place: Place, value: torch.Tensor | None) -> None:
        module, name = self.get_submodule(place[0]), place[1]
        if name in module.__dict__ or name in module._parameters:
            delattr(module, name)
        if value is None or isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            setattr(module, name, value)


def _restored(data: torch.Tensor, requires_grad: bool, shapes: list[torch.Size], places: Any, also: Any) -> FlatParameter:
    made = FlatParameter([nn.Parameter(data, data.is_floating_point())], requires_grad)
    made._shapes, made.places, made.also = shapes, places, also
    return made


def _without_inner(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After `state_dict`: names as in the module itself."""
    _rename(state, prefix + _INNER, prefix)


def _with_inner(module: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
    """Before loading: names as they are here, and what belongs to a flat parameter in one piece."""
    assert isinstance(module, FlattenParamsWrapper)
    for name, flat in zip(module.flat_param_names, module.flat_params, strict=False):
        keys = [prefix + ".".join(place).removeprefix(_INNER) for place in flat.places]
        if all(key in state for key in keys):
            state[prefix + name] = torch.cat([state.pop(key).reshape(-1) for key in keys])
            for place, _ in flat.also:
                state.pop(prefix + ".".join(place).removeprefix(_INNER), None)
    _rename(state, prefix, prefix + _INNER, but=tuple(prefix + name for name in module.flat_param_names))


def _rename(state: dict[str, Any], old: str, new: str, but: tuple[str, ...] = ()) -> None:
    """In place, and in order."""
    items = list(state.items())
    state.clear()
    for key, value in items:
        state[new + key.removeprefix(old) if key.startswith(old) and key not in but else key] = value
