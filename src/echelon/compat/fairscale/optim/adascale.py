"""`AdaScale`: a larger rate for a larger batch, by as much as the gradients of the batch's parts differ from one another.

With S times the batch, a step is worth r steps of the base batch, 1 <= r <= S: r near S where the gradients are mostly noise,
near 1 where they agree. The rate is multiplied by r, and r is what a program counts its steps by.
Source: Johnson et al. 2020, "AdaScale SGD", section 3 for the gain, appendix B.3 for the estimates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from echelon.common.errors import UsageError
from echelon.parallel.gradients.after_backward import after_backward
from echelon.parallel.state.partition import Partition

__all__ = ["AdaScale", "AdaScaleWrapper"]

_STATE = "adascale"
_LEAST_VARIANCE = 1e-6  # the gain of a gradient of zero would have no value


class AdaScaleError(UsageError, AssertionError):
    """A method was called in the middle of an update's backward passes, or with a number that has no meaning."""


class AloneError(UsageError, RuntimeError):
    """One gradient has no variance."""


class AdaScale(torch.optim.Optimizer):
    """An optimizer around another one, whose rate it multiplies by the gain in every step. Schedulers go on it.

    Each rank's gradients are looked at before they are averaged, and after: use it with DistributedDataParallel, or around OSS
    with that or ShardedDataParallel. Everything else is the optimizer's own. Collective in the last backward pass of an update.

    Args:
        optimizer: made for the base batch; meant for SGD.
        world_size: how many ranks; by default all.
        scale: by how much the batch is larger than that the rate was found for; by default `world_size` times
            `num_gradients_to_accumulate`.
        smoothing: of the moving averages, from 0 (the last update alone); by default 1 - gradients per update / 1000.
        num_gradients_to_accumulate: backward passes of an update.
        is_scaled_loss: whether losses are divided by that number.
        debias_ewma: divide the averages by the weight they have so far; else they begin as plain means.
    Raises:
        AloneError: a RuntimeError; one rank without accumulation.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        # Not the base class's: state and groups are the optimizer's own.
        self._hook_handles: list[Any] = []
        self._optimizer = optimizer
        self._local_grad_sqr: torch.Tensor | None = None  # by group; in an update's backward passes
        self._world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._num_backward_calls = self._last_final_backward_call = 0
        self._is_last_queued = False
        self._debias_ewma, self._is_scaled_loss = debias_ewma, is_scaled_loss
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            self._smoothing = smoothing
        if self._gradients <= 1:
            raise AloneError("AdaScale does not support a single worker without grad accumulation.")
        groups = len(optimizer.param_groups)
        first = {"grad_sqr_avg": _numbers(1.0, groups), "grad_var_avg": _numbers(0.0, groups)}
        optimizer.state.setdefault(_STATE, first)  # type: ignore[call-overload]
        self._scale = float(self._gradients)
        self.set_scale(self._gradients if scale is None else scale, update_estimate=False)
        self._hook()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's, also after it has loaded others."""
        return self._optimizer.param_groups

    @property
    def scale(self) -> float:
        """By how much the batch is larger than the base batch."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """The weight of what came before in the moving averages."""
        return self._smoothing

    def gain(self, pg_idx: int | None = None) -> float:
        """How many steps of the base batch the next one is worth: of all parameters, or of a group.

        Args:
            pg_idx: the group's place in `param_groups`.
        """
        variance, square = self._grad_var_avg(pg_idx), self._grad_sqr_avg(pg_idx)
        return (variance + square) / (variance / self.scale + square)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Say that the batch has another size from now on; the variance's estimate, which is in base batches, follows.

        Args:
            scale: >= 1.
        """
        self._between_updates("Don't change scale in backward phase")
        if scale < 1:
            raise AdaScaleError(f"Scale must be at least 1, got {scale}.")
        if update_estimate:
            for name in ("grad_var_avg", "grad_var_avg_biased" if self._debias_ewma else "grad_var_avg_total"):
                if name in self._state:
                    self._state[name] = self._state[name] * (self._scale / scale)
        self._scale = scale

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Say how many backward passes an update has from now on; mostly together with `set_scale`."""
        self._between_updates("Don't change num_grad_to_accum in backward")
        if num_gradients_to_accumulate < 1:
            raise AdaScaleError(f"Invalid value {num_gradients_to_accumulate}: an update has at least one backward pass.")
        self._num_grads_to_accum = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = max(1 - self._gradients / 1000, 0)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide what has accumulated of losses that were not divided, before the step."""
        self._between_updates("Only call this after backward")
        if self._num_grads_to_accum == 1 or self._is_scaled_loss:
            raise AdaScaleError("Must be accumulating gradients, and must use unscaled loss (is_scaled_loss=False).")
        for gradient in self._gradients_of(self.param_groups):
            gradient.div_(self._num_grads_to_accum)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, with each group's rate multiplied by the group's gain."""
        self._between_updates("Don't step without finishing backward phase")
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for number, group in enumerate(groups):
                group["lr"] = group["lr"] * self.gain(number)
            return self._optimizer.step(*args, **kwargs)
        finally:
            for rate, group in zip(rates, groups, strict=True):
                group["lr"] = rate

    def add_param_group(self, pg: dict[str, Any]) -> None:
        """The new group begins as the first ones did."""
        self._between_updates("Can't add parameter group during backward")
        self._optimizer.add_param_group(pg)
        self.unhook()
        self._hook()
        for name, values in self._state.items():
            if not name.endswith("_count"):
                self._state[name] = torch.cat([values, _numbers(float(name == "grad_sqr_avg"), 1)])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._between_updates("Don't zero_grad in backward")
        self._optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the averages under "adascale"."""
        self._between_updates("Don't checkpoint in backward")
        return self._optimizer.state_dict()

    def load_state_dict(self, data: dict[str, Any]) -> None:
        self._between_updates("Don't load checkpoint in backward")
        self._optimizer.load_state_dict(data)
        for name, values in self._state.items():  # FairScale's are arrays; and the caller's stay as they are
            self._state[name] = torch.as_tensor(values, dtype=torch.float64).clone()

    def unhook(self) -> None:
        """Look at gradients no longer, so that parameters can be freed."""
        while self._hook_handles:
            self._hook_handles.pop().remove()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def _gradients(self) -> int:
        return self._world_size * self._num_grads_to_accum

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._optimizer.state[_STATE]  # type: ignore[index]
        return found

    def _grad_sqr_avg(self, pg_idx: int | None = None) -> float:
        return _of(self._state["grad_sqr_avg"], pg_idx)

    def _grad_var_avg(self, pg_idx: int | None = None) -> float:
        return _of(self._state["grad_var_avg"], pg_idx)

    def _between_updates(self, message: str) -> None:
        if self._local_grad_sqr is not None:
            raise AdaScaleError(message)

    def _hook(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._hook_handles.append(parameter.register_hook(functools.partial(self._arrived, number)))

    @torch.no_grad()
    def _arrived(self, group: int, gradient: torch.Tensor) -> None:
        """A rank's own gradient, before it is averaged."""
        square = _square(gradient)
        if self._local_grad_sqr is None:
            self._local_grad_sqr = square.new_zeros(len(self._optimizer.param_groups))
        self._local_grad_sqr[group] += square
        self._is_last_queued = False
        after_backward(self._queue)

    def _queue(self) -> None:
        """What averages the gradients may be queued as well, so once more behind it."""
        if not self._is_last_queued:
            self._is_last_queued = True
            after_backward(self._averaged)

    @torch.no_grad()
    def _averaged(self) -> None:
        self._is_last_queued = False
        self._num_backward_calls += 1
        if self._num_backward_calls - self._last_final_backward_call == self._num_grads_to_accum:
            self._learn(*self._squares())
            self._last_final_backward_call = self._num_backward_calls
            self._local_grad_sqr = None

    def _squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By group: the sum of the squares of all gradients of the update, and the square of their mean."""
        assert self._local_grad_sqr is not None
        partition = Partition.of(self) or Partition.of(self._optimizer)
        # A divided optimizer's gradients may be with their owners alone.
        groups = self._optimizer.param_groups
        if partition is not None:
            groups = [{"params": [p for p in each if partition.owns(p)]} for each in partition.groups]
        zero = self._local_grad_sqr.new_zeros(())
        mean = torch.stack([sum(map(_square, self._gradients_of([group])), zero) for group in groups])
        local = self._local_grad_sqr
        if self._world_size > 1:
            sent = local if partition is None else torch.cat([local, mean])
            dist.all_reduce(sent, group=None if partition is None else partition.group)
            if partition is not None:
                local, mean = sent.chunk(2)
        passes = float(self._num_grads_to_accum)
        local, mean = local.double().cpu(), mean.double().cpu()
        return (local * passes**2, mean) if self._is_scaled_loss else (local, mean / passes**2)

    def _learn(self, local: torch.Tensor, mean: torch.Tensor) -> None:
        """Appendix B.3, with a scale that need not be the number of gradients."""
        scale, count = self._scale, self._gradients
        variance = local * (scale / count) / (count - 1) - mean * scale / (count - 1)
        square = mean - variance / scale
        self._update_avg("grad_sqr_avg", square.clamp(min=0.0), self.smoothing)
        self._update_avg("grad_var_avg", variance.clamp(min=_LEAST_VARIANCE), self.smoothing)

    def _update_avg(self, name: str, value: torch.Tensor, factor: float) -> None:
        state = self._state
        if self._debias_ewma:
            zero = torch.zeros_like(value)
            state[f"{name}_biased"] = factor * state.get(f"{name}_biased", zero) + (1.0 - factor) * value
            state[f"{name}_unbias"] = factor * state.get(f"{name}_unbias", zero) + (1.0 - factor)
            state[name] = state[f"{name}_biased"] / state[f"{name}_unbias"]
            return
        count = state[f"{name}_count"] = state.get(f"{name}_count", _numbers(0.0, 1)) + 1
        if float(count) * (1 - self._smoothing) < 1:
            state[f"{name}_total"] = state.get(f"{name}_total", torch.zeros_like(value)) + value
            state[name] = state[f"{name}_total"] / count
        else:
            state[name] = factor * state[name] + (1.0 - factor) * value

    @staticmethod
    def _gradients_of(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]


class AdaScaleWrapper(AdaScale):
    """AdaScale that makes its optimizer itself, so that it stands where a class of optimizers does, as in OSS.

    Args:
        params: of the optimizer.
        optim_cls: its class; `additional_optim_args` are its arguments. The rest is AdaScale's.
    """

    def __init__(
        self,
        params: Any,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **additional_optim_args: Any,
    ) -> None:
        optimizer = optim_cls(params, **additional_optim_args)
        super().__init__(optimizer, world_size, scale, smoothing, num_gradients_to_accumulate, debias_ewma=debias_ewma)


def _numbers(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float64)


def _of(values: torch.Tensor, number: int | None) -> float:
    return float(values.sum() if number is None else values[number])


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """In float32: the square of a large half-precision norm would overflow."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(dense.detach(), dtype=torch.promote_types(dense.dtype, torch.float32))
    return norm.square()
