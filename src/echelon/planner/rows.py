"""What a layout would do with each layer of a module, without doing it. `echelon plan --layers` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from echelon.parallel.composed import Layout
from echelon.parallel.experts.distribute import count, stacked_experts
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.fsdp.units import units_of
from echelon.parallel.names import class_name, plain_name
from echelon.parallel.pipeline.plan import Stages
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.parallel.tensor.tensor import Chosen

__all__ = ["Layers", "Row", "layers_of"]

_GATHERED = "gathered with"


@dataclass(frozen=True)
class Row:
    """Layers of one kind that the layout treats alike.

    Args:
        name: with the numbers of all, as in `blocks.{0..3}.up`; "" is the module itself.
        kind: the layers' class.
        parameters: of all of them; a tied parameter counts only where it comes first.
        told: what the layout does with them, by axis.
    """

    name: str
    kind: str
    parameters: int
    told: Mapping[str, str]


@dataclass(frozen=True)
class Layers:
    """The layers of a module under a layout.

    Args:
        kind: the module's class.
        layout: the layout's name, or its axes.
        notes: on more than one layer.
        styles: the styles of tensor parallelism that occur.
    """

    kind: str
    layout: str
    ranks: int
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()


def layers_of(module: nn.Module, layout: Strategy, ranks: int) -> Layers:
    """Which layers `layout` splits over `ranks` ranks, and how. Needs no process group, and does not change the module.

    Args:
        module: not yet made parallel; may be on the meta device.
    Raises:
        UsageError: training would be refused: heads, layers or experts that do not divide, or a plan that names no module.
    """
    axes: dict[str, Callable[[str, nn.Module], str]] = {}
    notes: list[str] = []
    styles: list[str] = []
    text = layout.name
    several = _as_axes(layout, ranks)
    if several is not None:
        dims = several.dims(ranks)
        text = ",".join(f"{axis}={size}" for axis, size in dims.used.items()) or text
        stages, chosen = several.check(module, dims, Recipe())
        if chosen is not None:
            axes["tp"] = _tensor(module, chosen)
            styles = sorted({_style(style) for style in chosen.styles.values()})
            notes.append(f"tp: {chosen.plan.source}")
            notes += [f"tp leaves {name} whole: {why}" for name, why in chosen.plan.whole.items()]
        if stages is not None:
            axes["pp"] = _pipeline(stages)
            notes += [f"{name} is on ranks {_listed(at)} of pp, which add up its gradients" for name, at in stages.shared.items()]
        if dims.ep > 1:
            axes["ep"] = _experts(module, dims.ep)
        if dims.cp > 1:
            notes.append(f"cp: each rank computes a part of 1/{dims.cp} of each sequence; layers stay whole")
    sharded = None if several is not None and several.pp > 1 else _sharded(layout, several, ranks)
    if sharded is not None:
        axes[_GATHERED] = _gathered(module, sharded)
    if not axes:
        notes.append("every rank has all layers whole")
    return Layers(class_name(module), text, ranks, _rows(module, axes), notes, styles)


def _as_axes(layout: Strategy, ranks: int) -> Layout | None:
    if isinstance(layout, Layout):
        dims = layout.dims(ranks)
        return replace(layout, **{axis: getattr(dims, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")})
    return None


def _sharded(layout: Strategy, several: Layout | None, ranks: int) -> FSDPStrategy | None:
    """The strategy that shards the parameters; None if nothing does."""
    if several is not None:
        dims = several.dims(ranks)
        return several.fsdp or FSDPStrategy() if dims.dp_shard * dims.cp > 1 else None
    return layout if isinstance(layout, FSDPStrategy) else None


# --- a function for each axis: maps a layer's name and the layer to what the axis does with it


def _tensor(module: nn.Module, chosen: Chosen) -> Callable[[str, nn.Module], str]:
    styles = {module.get_submodule(name): _style(style) for name, style in chosen.styles.items()}
    in_parts = tuple(f"{plain_name(block)}." for block in chosen.blocks)

    def told(name: str, layer: nn.Module) -> str:
        if layer in styles:
            return styles[layer]
        return "whole, on a part of the sequence" if name.startswith(in_parts) and in_parts else "whole"

    return told


def _style(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _pipeline(stages: Stages) -> Callable[[str, nn.Module], str]:
    def told(name: str, layer: nn.Module) -> str:
        for unit in stages.units:
            if name == unit.name or name.startswith(f"{unit.name}."):
                return f"stage {unit.stage}, rank {stages.ranks[unit.stage]}"
        return "every stage"

    return told


def _experts(module: nn.Module, ep: int) -> Callable[[str, nn.Module], str]:
    divided = {part: count(experts) for experts in stacked_experts(module).values() for part in experts.modules()}
    return lambda name, layer: f"{divided[layer] // ep} of {divided[layer]} experts" if layer in divided else "as the rest"


def _gathered(module: nn.Module, sharded: FSDPStrategy) -> Callable[[str, nn.Module], str]:
    units = units_of(module, sharded.blocks_of(module), None, None, True, torch.device("cpu"))
    held: dict[nn.Parameter, str] = {}
    for unit in units:
        name = plain_name(unit.name)
        for part in unit.modules:
            for parameter in part.parameters():
                held.setdefault(parameter, _template(name)[0])

    def told(name: str, layer: nn.Module) -> str:
        return held.get(next(layer.parameters(recurse=False)), "the root")

    return told


# --- the rows


def _rows(module: nn.Module, axes: Mapping[str, Callable[[str, nn.Module], str]]) -> list[Row]:
    alike: dict[Any, list[tuple[list[int], int]]] = {}
    counted: set[nn.Parameter] = set()
    for full, layer in module.named_modules():
        own = list(layer.parameters(recurse=False))
        if not own:
            continue
        name = plain_name(full)
        notes = {axis: tell(name, layer) for axis, tell in axes.items()}
        template, numbers = _template(name)
        size = sum(p.numel() for p in own if p not in counted)
        counted.update(own)
        shapes = tuple(tuple(p.shape) for p in own)
        alike.setdefault((template, class_name(layer), shapes, size > 0, tuple(notes.items())), []).append((numbers, size))
    return [
        Row(
            _name(template, [numbers for numbers, _ in those]),
            kind,
            sum(size for _, size in those),
            {axis: _each(text, [numbers for numbers, _ in those]) if axis == _GATHERED else text for axis, text in notes},
        )
        for (template, kind, _, _, notes), those in alike.items()
    ]


def _template(name: str) -> tuple[str, list[int]]:
    """The name with `*` in place of each number, and the numbers."""
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    return ".".join("*" if part.isdecimal() else part for part in parts), numbers


def _name(template: str, numbers: Sequence[Sequence[int]]) -> str:
    ranges: Iterator[str] = (_range(sorted(set(each))) for each in zip(*numbers, strict=True))
    return ".".join(next(ranges) if part == "*" else part for part in template.split("."))


def _each(template: str, numbers: Sequence[Sequence[int]]) -> str:
    """The name of the module with which each of the layers is gathered, with `*` for numbers in which the layers differ."""
    alike = iter([str(each[0]) if len(set(each)) == 1 else "*" for each in zip(*numbers, strict=True)])
    return ".".join(next(alike) if part == "*" else part for part in template.split("."))


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if all(b - a == 1 for a, b in pairwise(numbers)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
