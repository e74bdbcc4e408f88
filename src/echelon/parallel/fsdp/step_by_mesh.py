"""An optimizer over DTensors and plain tensors, or over DTensors of several meshes: it steps on one kind at a time.

torch's optimizers pass a parameter group to operators as one list (`foreach`, the default on a GPU, and `fused`), and no operator
takes a list of several kinds. So during a step a mixed group is split into several groups with the same options. Between steps,
also after a step that raised, it is the one group that schedulers and checkpoints know.

If the user's own optimizer reads numbers, as LAMB reads norms, it gets those of the whole parameter, not of a rank's shard.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from echelon.common.errors import PrecisionError
from echelon.parallel.guards.messages import explain_step
from echelon.parallel.patching import replace
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.shards import is_split, local, numbers_of_whole, watch_numbers
from echelon.parallel.state.sharded import part_like, tell_when_optimizer_is_pickled

__all__ = ["step_by_kind"]

_handled: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Split] = weakref.WeakKeyDictionary()


def step_by_kind(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer step by kind from now on. Costs next to nothing if every group has one kind.

    Raises:
        UsageError: LBFGS over several kinds. In a step: torch cannot do an operation on split parameters.
    """
    mixed = any(len(_kinds(group["params"])) > 1 for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.LBFGS) and mixed:
        raise PrecisionError(
            "LBFGS must have parameters of one kind, which it joins to a vector, got some that are split over different ranks "
            "from the rest, or whole. Train under 'ddp', whose parameters are whole."
        )
    watch_numbers()
    if optimizer not in _handled:
        _handled[optimizer] = _Split(optimizer)
        tell_when_optimizer_is_pickled(optimizer)
        optimizer.register_load_state_dict_post_hook(_split_state)
        _split_state(optimizer)  # the state may have been loaded since the module was sharded


def _split_state(optimizer: torch.optim.Optimizer) -> None:
    """Split the whole tensors of a loaded state, which are equal on all ranks, like their parameters."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    for parameter, state in optimizer.state.items():
        if not is_split(parameter) or not (is_torchs or local(parameter).shape != parameter.shape):
            continue  # another author's optimizer may keep plain tensors for this rank's part
        for key, value in state.items():
            if type(value) is torch.Tensor and value.dim() and value.shape == parameter.shape:
                state[key] = part_like(value, parameter)


class _Noted(list[Any]):
    """A group's parameters, which record whether a step has read them."""

    is_read = False

    def __iter__(self) -> Iterator[Any]:
        self.is_read = True
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        self.is_read = True
        return super().__getitem__(at)


class _Split:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._sizes: list[int] | None = None
        self._depth = 0  # of calls of steps under way
        self._kinds: dict[int, list[list[torch.Tensor]]] = {}  # by group index, for groups with several kinds
        self._whole: dict[int, list[torch.Tensor]] = {}  # the original lists by group index, during a step
        self._look(optimizer)
        replace(optimizer, "step", "step_by_mesh", _Guarded(optimizer, self))
        self._reads_all = type(optimizer).__module__.startswith("torch.")  # all groups; a user's optimizer has yet to show it
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # a subclass's step calls its base's, whose hooks torch calls again
            return
        self._look(optimizer)
        groups = optimizer.param_groups
        for i, (first, *others) in self._kinds.items():
            self._whole[i] = groups[i]["params"]
            groups[i]["params"] = first if self._reads_all else _Noted(first)
            groups += [{**groups[i], "params": kind if self._reads_all else _Noted(kind)} for kind in others]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        noted = [group["params"] for group in optimizer.param_groups if isinstance(group["params"], _Noted)]
        self.restore(optimizer)
        if not any(each.is_read for each in noted):  # the optimizer may keep a list of its own
            return
        if not all(each.is_read for each in noted):
            raise PrecisionError(
                f"{type(optimizer).__name__}.step must go through all of self.param_groups, got one that read "
                f"{sum(each.is_read for each in noted)} of {len(noted)}: during a step, parameters that are split differently "
                "are in separate groups, so some were not trained. Write `for group in self.param_groups`."
            )
        self._reads_all = True

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes  # the first look, or a group was added
        kinds_of_groups = {i: _kinds(group["params"]) for i, group in enumerate(groups)}
        self._kinds = {i: kinds for i, kinds in kinds_of_groups.items() if len(kinds) > 1}

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the groups that schedulers and checkpoints know."""
        self._depth = 0
        if self._whole:
            assert self._sizes is not None
            del optimizer.param_groups[len(self._sizes) :]
            for i, parameters in self._whole.items():
                optimizer.param_groups[i]["params"] = parameters
            self._whole = {}


class _Guarded:
    """The step of an optimizer over split parameters, which restores the groups if it raises: torch then calls no post hook.

    Learning-rate schedulers wrap the `__func__` of an optimizer's step, so this has one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, split: _Split) -> None:
        step = optimizer.step
        method = getattr(step, "__func__", None)
        functools.update_wrapper(self, step if method is None else method)
        self._optimizer = weakref.ref(optimizer)
        reads_whole = not type(optimizer).__module__.startswith("torch.") or isinstance(optimizer, torch.optim.LBFGS)

        def guarded(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                with numbers_of_whole() if reads_whole else NO_CONTEXT:
                    return step(*args, **kwargs) if method is None else method(optimizer, *args, **kwargs)
            except BaseException as error:
                split.restore(optimizer)
                if isinstance(error, RuntimeError | AssertionError):
                    explain_step(optimizer, error)
                raise

        if method is not None:
            del step  # it would keep the optimizer alive
        self.__func__ = guarded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._optimizer(), *args, **kwargs)  # type: ignore[arg-type]


def _kinds(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(kinds.values())
