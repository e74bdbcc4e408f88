"""Detects a forward pass that writes its module's parameters under `fully_shard`: it writes gathered copies, which are freed.

MoCo's momentum encoder, a spectral norm's vector and a codebook by moving averages are often parameters that `forward` changes.
Under `fully_shard` they would keep their first values, and nothing would fail (tests/parallel/test_strategy_limits.py).

Detected are a replaced parameter, replaced memory, and changed values, whether autograd knows of the write or not; and, as the
next update begins, a gradient that the script has put into a gathered parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.common.errors import LayoutError
from echelon.contracts.overrides import overrides
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import class_name, plain_name
from echelon.parallel.shards import GatheredInPasses, is_fully_sharded, is_split, local, reshard

__all__ = ["LostWrites"]

_UPDATES = 10  # a moving average of the weights first changes after their first step, in which a warm-up may not change them


class _Gathered(NamedTuple):
    """A parameter as it was before the forward pass of its block."""

    tensor: torch.Tensor
    address: int
    total: float

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Gathered:
        values = local(tensor.detach())
        if type(values) is not torch.Tensor:  # quantized: its class may have no sum
            return cls(tensor, 0, 0.0)
        values = torch.view_as_real(values) if values.is_complex() else values
        return cls(tensor, values.data_ptr(), float(values.sum(dtype=torch.float32)))

    def is_still(self, tensor: torch.Tensor) -> bool:
        if tensor is not self.tensor:
            return False
        now = _Gathered.of(tensor)
        same = now.total == self.total or (now.total != now.total and self.total != self.total)  # nan equals nan
        return same and now.address == self.address


class LostWrites(Guard):
    """Checks the first updates of a module that `fully_shard` has split."""

    def __init__(self, module: nn.Module, passes: GatheredInPasses, set_on_gathered: Callable[[nn.Module], bool]) -> None:
        self._module, self._passes, self._set_on_gathered, self._updates = module, passes, set_on_gathered, 0
        self._hooks: list[RemovableHandle] = []
        self._shards: dict[tuple[nn.Module, str], tuple[str, torch.Tensor]] = {}  # each parameter's name and shard
        self._gathered: dict[tuple[nn.Module, str], _Gathered] = {}

    def evaluating(self) -> AbstractContextManager[Any]:
        return self._passes.shared(self._module)

    def evaluated(self) -> None:
        self._passes.settle(self._module)  # what hooks write at the end would be lost

    def begin_pass(self, *, first: bool) -> None:
        self._updates += first
        if first and 1 < self._updates <= _UPDATES and self._set_on_gathered(self._module):
            raise LayoutError(
                f"a gradient must not be put into a parameter of {class_name(self._module)} that was gathered for a pass, as by "
                "`p.grad = torch.autograd.grad(...)[0]`: parameters are split over the ranks, the optimizer steps shards, and "
                "the next pass would add this gradient to its own. Write what is to be differentiated as one loss; or train "
                "under 'ddp' or 'zero1', with gradients that are alike on all ranks, by `ech.all_mean(...)`."
            )
        self._gathered = {}  # entries may be left of blocks that the backward pass recomputed
        if first and self._updates == 1 and not overrides().observes:
            self._listen()
        elif self._updates > _UPDATES and self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._shards = [], {}

    def discard(self) -> None:
        self._gathered = {}

    def _listen(self) -> None:
        reshard(self._module)
        blocks: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, part in self._module.named_modules():
            block = path
            while not is_fully_sharded(self._module.get_submodule(block)) and block:
                block = block.rpartition(".")[0]
            for name, parameter in part._parameters.items():
                if parameter is not None and is_split(parameter):
                    self._shards[part, name] = plain_name(f"{path}.{name}" if path else name), parameter
                    blocks.setdefault(block, []).append((part, name))
        for block, held in blocks.items():
            self._follow(self._module.get_submodule(block), held)

    def _follow(self, block: nn.Module, held: list[tuple[nn.Module, str]]) -> None:
        def before(*_: object) -> None:
            for each in held if self._shards else ():
                parameter = each[0]._parameters[each[1]]
                if parameter is not None and parameter is not self._shards[each][1]:
                    self._gathered[each] = _Gathered.of(parameter)

        def after(*_: object) -> None:
            for each in held:
                if each in self._gathered:
                    self._look(*each)
                    del self._gathered[each]  # a later read outside of the block gets another copy

        self._hooks.append(block.register_forward_pre_hook(torch.compiler.disable(before)))
        self._hooks.append(block.register_forward_hook(torch.compiler.disable(after), prepend=True))  # before it is split again

    def _look(self, owner: nn.Module, name: str) -> None:
        now = owner._parameters.get(name)
        plain, shard = self._shards[owner, name]
        if now is None or now is shard or self._gathered[owner, name].is_still(now):
            return
        raise LayoutError(
            f"{plain} is written in the forward pass of {class_name(self._module)}, and the new value is lost: parameters are "
            "split over the ranks, and forward has copies that are gathered for the pass. Make it a buffer (register_buffer), "
            "which forward may write; write parameters between updates, in on_train_step_end or after optimizer.step(), by "
            "p.copy_(...) or p.lerp_(q, 0.1) under torch.no_grad(); or train under 'ddp' or 'zero1'."
        )
