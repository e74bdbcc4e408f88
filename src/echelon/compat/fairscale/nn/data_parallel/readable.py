"""What programs read of a FullyShardedDataParallel, and what it is doing at the moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import UsageError
from echelon.compat.fairscale.nn.data_parallel.local_state import padding
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import is_whole, pieces

__all__ = ["Readable", "StateError", "TrainingState", "get_fsdp_instances"]


class StateError(UsageError, AssertionError):
    """A method that has no meaning at this moment, or for a wrapper that lies in another one."""


class TrainingState(Enum):
    """What a wrapper is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()

    @classmethod
    def of(cls, torchs: Enum) -> TrainingState:
        """torch has one name for a forward and a backward."""
        return cls.__members__.get(torchs.name, cls.FORWARD)


class Readable:
    """FairScale's attributes that torch's class has not."""

    training_state: Any
    flatten_parameters: bool
    verbose: bool
    parameters: Any
    params: Any
    _is_root: Any

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.grad is not None]

    @property
    def has_full_params(self) -> bool:
        """Whether its own parameters are whole at the moment."""
        return self.training_state is TrainingState.SUMMON_FULL_PARAMS or is_whole(self)  # type: ignore[arg-type]

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Elements that fill up this rank's part of the wrapper's own parameters."""
        wrapper: Any = self
        held = pieces(wrapper)
        return [padding(wrapper, held)] if self.flatten_parameters and held else [0 for _ in held]

    @property
    def buffer_size(self) -> int:
        """Elements of the wrapper's own parameters."""
        wrapper: Any = self
        return sum(math.prod(piece.shape) for piece in pieces(wrapper))

    def non_shared_params(self) -> list[nn.Parameter]:
        """The wrapper's own parameters: one if flattened."""
        return list(self.params) if self.flatten_parameters else [piece.parameter for piece in pieces(self)]  # type: ignore[arg-type]

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """
        Raises:
            StateError: a ValueError; this wrapper is doing something else.
        """
        states = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in states:
            raise StateError(f"expected to be in states {states} but current state is {self.training_state}")

    def assert_outermost(self, what: str) -> None:
        """
        Raises:
            StateError: an AssertionError; a wrapper around this one has run.
        """
        if self._is_root is False:
            raise StateError(what)

    def extra_repr(self) -> str:
        shown = ["world_size", "flatten_parameters", "mixed_precision"]
        if self.verbose:
            shown = ["rank", *shown, "reshard_after_forward", "compute_dtype", "buffer_dtype", "fp32_reduce_scatter"]
            shown += ["compute_device", "move_params_to_cpu", "move_grads_to_cpu", "bucket_cap_mb", "clear_autocast_cache"]
            shown += ["force_input_to_fp32"]
        said = f"self={id(self)} is_root={self._is_root}, " if self.verbose else ""
        return said + "".join(f"{name}={getattr(self, name)}, " for name in shown)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[TorchFSDP]:
    """The FullyShardedDataParallel modules within a module; `skip_empty` leaves out those without parameters of their own."""
    return [each for each in _instances(mod) if not skip_empty or pieces(each)]


def _instances(module: nn.Module) -> Iterator[TorchFSDP]:
    yield from (each for each in module.modules() if isinstance(each, TorchFSDP))
