"""Sequence parallelism: between split layers, each rank that shares them works on its part of the sequence.

The sequence is split before the first block of the model and gathered after the last. A child of a block with split layers reads
the whole sequence, gathered at its entrance; its rowwise layer reduce-scatters its output along the sequence. Together they send
as much as one all-reduce. The modules between (norms, dropout, residual sums) work on a part only, instead of the same whole on
every rank, and need that much less memory. Any length is allowed: the last part is padded with zeros that nothing reads.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.common.errors import TensorParallelError
from echelon.parallel.patching import replace
from echelon.parallel.tensor.layers import DropoutOfPart, PartOfSequence, exchanged, first_of, with_first

__all__ = ["check_sequence", "split_sequence"]


def check_sequence(module: nn.Module, styles: Mapping[str, Any]) -> list[str]:
    """The blocks that work on a split sequence, in the order in which they are called.

    Raises:
        UsageError: there is not exactly one list of blocks, or code in a block would take a part of the sequence for the whole.
    """
    kind = type(module).__name__
    if any(not isinstance(style, str) for style in styles.values()):
        raise TensorParallelError(
            "sequence_parallel needs a plan of style names such as 'colwise'. With torch's ParallelStyles, use torch's own."
        )
    lists = list(dict.fromkeys(module_list for name in styles if (module_list := _list_of(module, name)) is not None))
    if len(lists) != 1:
        why = (
            f"got {', '.join(lists)}. An encoder and a decoder would split their sequences at different places. Leave"
            if lists
            else "got none: the sequence is split before the first block and gathered after the last. Add such a list, or leave"
        )
        raise TensorParallelError(
            f"sequence_parallel: {kind} must have one ModuleList or Sequential of blocks with split layers, {why} "
            "sequence_parallel out."
        )
    holder = module.get_submodule(lists[0])
    blocks = [f"{lists[0]}.{name}" for name, _ in holder.named_children()]
    for block in blocks:
        inside = {name: style for name, style in styles.items() if name.startswith(f"{block}.")}
        if not inside:
            raise TensorParallelError(
                f"sequence_parallel: {kind}.{block} has no split layer, unlike others of {lists[0]}. Name one."
            )
        for name, style in inside.items():
            if style.startswith("colwise") and name.endswith(".base_layer"):
                raise TensorParallelError(
                    f"sequence_parallel: {kind}.{name.removesuffix('.base_layer')} has an adapter of PEFT, whose first layer "
                    "would take a part of the sequence for the whole. Leave sequence_parallel out."
                )
            if style.startswith("colwise") and name.count(".") != block.count(".") + 2:
                raise TensorParallelError(
                    f"sequence_parallel: {kind}.{name} must lie in a child of the block {block}, whose entrance gathers the "
                    "sequence: other code would take a part of it for the whole. Put attention and the MLP into such children."
                )
        _check_parts(module, block, inside)
    return blocks


def _check_parts(module: nn.Module, block: str, inside: Mapping[str, str]) -> None:
    """Refuse whole modules that mix tokens, or that lie inside a submodule with split layers."""
    readers = _readers(inside)
    for name, part in module.get_submodule(block).named_modules():
        name = f"{block}.{name}" if name else block
        own = [parameter for _, parameter in part.named_parameters(recurse=False)]
        if not own or name in inside:
            continue
        each = isinstance(part, (nn.Linear, nn.LayerNorm, nn.RMSNorm)) or all(p.dim() == 1 for p in own)
        if not each or isinstance(part, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
            raise TensorParallelError(
                f"sequence_parallel: {type(module).__name__}.{name} is a {type(part).__name__}, which may need more than this "
                "rank's part of the sequence. Split it by the plan, or leave sequence_parallel out."
            )
        reader = next((r for r in readers if name.startswith(f"{r}.")), None)
        if reader is not None and not _comes_after(inside, reader, name, module):
            raise TensorParallelError(
                f"sequence_parallel: {type(module).__name__}.{name} lies in {reader} beside split layers, and it is not known "
                'whether it reads a part of the sequence. Name it "summed" if it works on split features, or move it out.'
            )


def _comes_after(inside: Mapping[str, str], reader: str, name: str, module: nn.Module) -> bool:
    """Whether the module follows the rowwise layers of its submodule, in the order of construction."""
    order = [n for n, _ in module.named_modules()]
    ends = [n for n, style in inside.items() if n.startswith(f"{reader}.") and style.startswith("rowwise")]
    return bool(ends) and all(order.index(name) > order.index(end) for end in ends)


def _readers(inside: Mapping[str, str]) -> list[str]:
    """The submodules that read the whole sequence: those with a colwise layer."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, style in inside.items() if style.startswith("colwise")))


def _list_of(module: nn.Module, name: str) -> str | None:
    """The outermost list of blocks that contains a layer."""
    parts = name.split(".")
    for i in range(len(parts) - 1):
        holder = ".".join(parts[:i])
        if isinstance(module.get_submodule(holder), (nn.ModuleList, nn.Sequential)):
            return holder
    return None


def split_sequence(module: nn.Module, blocks: Sequence[str], styles: Mapping[str, str], part: PartOfSequence) -> None:
    """Make the blocks work on parts of the sequence. Their layers must be split already."""
    for block in blocks:
        inside = {name: style for name, style in styles.items() if name.startswith(f"{block}.")}
        for reader in _readers(inside):
            module.get_submodule(reader).register_forward_pre_hook(_Collects(part), with_kwargs=True)
        for name, each in module.get_submodule(block).named_modules():
            name = f"{block}.{name}" if name else block
            if isinstance(each, nn.Dropout):
                replace(each, "forward", "sequence", DropoutOfPart(each, part))
            elif name not in inside and any(True for _ in each.parameters(recurse=False)):
                replace(each, "forward", "sequence", _OnPart(each, part))
    siblings = [name for name, _ in module.get_submodule(blocks[0].rpartition(".")[0]).named_children()]
    runs = _runs(blocks, siblings)
    for run in runs:
        module.get_submodule(run[0]).register_forward_pre_hook(_Begins(part, run[0]), with_kwargs=True, prepend=True)
        module.get_submodule(run[-1]).register_forward_hook(_Ends(part))
    if len(blocks) == len(siblings):  # otherwise a pipeline stage, where the call of the module does not end
        order = _Order(blocks)
        for block in blocks:
            module.get_submodule(block).register_forward_pre_hook(order.calls(block), prepend=True)
        module.register_forward_pre_hook(order.starts)
        module.register_forward_hook(order.ends)


def _runs(blocks: Sequence[str], siblings: Sequence[str]) -> list[list[str]]:
    """Group the blocks into consecutive runs: between a rank's stages may lie stages of other ranks."""
    runs: list[list[str]] = []
    before = None
    for block in blocks:
        at = siblings.index(block.rpartition(".")[2])
        if before is None or at != before + 1:
            runs.append([])
        runs[-1].append(block)
        before = at
    return runs


class _Order:
    """Checks that within a call of the model every split of the sequence is gathered before the next split.

    Recomputations in a backward pass call the blocks in another order, but outside of the model's call.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        self._first, self._last = blocks[0], blocks[-1]
        self._runs = self._split = False

    def starts(self, module: nn.Module, args: Any) -> None:
        self._runs, self._split = True, False

    def calls(self, block: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._runs and self._split == (block == self._first):
                self._refuse(f"a call of {block} {'between' if self._split else 'outside of'} these")
            self._split = block != self._last

        return hook

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._runs = False
        if self._split:
            self._refuse(f"none of {self._last} at the end")

    def _refuse(self, got: str) -> None:
        raise TensorParallelError(
            f"sequence_parallel: calls of blocks must begin with {self._first} and end with {self._last}, since the sequence is "
            f"split before the first and gathered after the last, got {got}. Leave sequence_parallel out."
        )


class _Hook:
    def __init__(self, part: PartOfSequence) -> None:
        self._part = part


class _Begins(_Hook):
    """Splits the sequence before the first block."""

    def __init__(self, part: PartOfSequence, name: str) -> None:
        super().__init__(part)
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = first_of(args, kwargs)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or not hidden.is_floating_point():
            got = f"shape {tuple(hidden.shape)}" if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            raise TensorParallelError(
                f"sequence_parallel: {self._name} must be called with (batch, sequence, features) first, got {got}."
            )
        others = [v for v in (*args, *kwargs.values()) if v is not hidden and _is_alike(v, hidden)]
        if others:
            raise TensorParallelError(
                f"sequence_parallel: {self._name} is called with two tensors of shape {tuple(hidden.shape)}, and the second "
                "would not be split. Leave sequence_parallel out."
            )
        return with_first(args, kwargs, self._part.begin(hidden))


def _is_alike(value: Any, hidden: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == hidden.shape


class _Collects(_Hook):
    """Gathers the sequence at the entrance of a submodule with split layers."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = first_of(args, kwargs)
        return with_first(args, kwargs, self._part.collect(hidden)) if self._part.is_part(hidden) else None


class _Ends(_Hook):
    """Gathers the sequence after the last block."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return type(output)([self._part.end(output[0]), *output[1:]])
        return self._part.end(output)


class _OnPart:
    """Replaces the `forward` of a module with whole parameters."""

    def __init__(self, layer: nn.Module, part: PartOfSequence) -> None:
        self._layer, self._part, self._forward = layer, part, layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._part.is_part(first_of(args, kwargs)):
            return self._forward(*args, **kwargs)
        own = {name: self._part.same(p) for name, p in self._layer.named_parameters(recurse=False)}
        with exchanged(self._layer, own):
            return self._forward(*args, **kwargs)
