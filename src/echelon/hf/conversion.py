"""Where the tensors of a model of transformers, with or without PEFT, lie in its files.

Files and models differ in names (a task head adds or removes a prefix), in how weights are divided (separate experts, fused
projections), and in the modules that an adapter adds around a layer. transformers converts the weights of a class of models while
it loads them. Here the same conversion is described as slices of the files, so that each rank reads only its part.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.common.errors import CheckpointOptionError

__all__ = ["Block", "Computed", "Held", "Layout", "Lays", "lays_for"]

Shapes = Mapping[str, list[int]]
AuthorsClasses = Callable[[nn.Module], AbstractContextManager[None]]


def lays_for(module: nn.Module, plain_name: Callable[[str], str], authors_classes: AuthorsClasses) -> Lays | None:
    """A function that lays out a module's files; None if the module is neither of transformers nor of PEFT.

    Args:
        plain_name: returns a name without what wrappers have inserted.
        authors_classes: context in which a module and its submodules have their authors' classes.
    """
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    adapted = peft is not None and isinstance(module, peft.PeftModel)
    base = module.get_base_model() if adapted else module  # type: ignore[operator]
    of_transformers = transformers is not None and isinstance(base, transformers.PreTrainedModel)
    if not adapted and not of_transformers:
        return None

    def lays(held: Mapping[str, Held], state: Shapes) -> Layout:
        names, kept = _of_base(module, base, state, plain_name) if adapted else ({name: name for name in state}, set[str]())
        known: dict[str, list[str]] = {}  # several names for a module that is trained in full beside an adapter
        for name, plain in names.items():
            known.setdefault(plain, []).append(name)
        shapes = {plain: state[each[0]] for plain, each in known.items()}
        layout = _Conversion(base, held, shapes, authors_classes).layout if of_transformers else _as_they_are(held, shapes)
        blocks = {name: block for plain, block in layout.blocks.items() for name in known[plain]}
        computed = {name: each for plain, each in layout.computed.items() for name in known[plain]}
        return Layout(blocks, computed, layout.unused, kept | {name for plain in layout.kept for name in known[plain]})

    return lays


# --- PEFT


def _of_base(module: Any, base: nn.Module, state: Shapes, plain_name: Callable[[str], str]) -> tuple[dict[str, str], set[str]]:
    """Names in the base model by name in the state, and the names that belong to adapters."""
    layers = sys.modules["peft"].tuners.tuners_utils.BaseTunerLayer
    at = next(plain_name(path) for path, part in module.named_modules() if part is base)
    own = {
        plain_name(f"{path}.{name}")
        for path, part in module.named_modules()
        if isinstance(part, layers)
        for name in (*part.adapter_layer_names, *part.other_param_names)
    }
    names, kept = {}, set()
    for name in state:
        words = name.split(".")
        if not name.startswith(f"{at}.") or any(".".join(words[:n]) in own for n in range(1, len(words) + 1)):
            kept.add(name)
            continue
        plain = re.sub(r"\.(token_adapter(?=\.base_layer)|base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)
        names[name] = plain.removeprefix(f"{at}.")
    return names, kept


def _as_they_are(held: Mapping[str, Held], shapes: Shapes) -> Layout:
    return Layout({name: Block.of(name, each.shape) for name, each in held.items() if name in shapes})


# --- transformers


class _Conversion:
    """The conversion that transformers would apply to these files for a model.

    Attributes:
        layout: the layout, by the model's own names.
    """

    def __init__(self, model: Any, held: Mapping[str, Held], shapes: Shapes, authors_classes: AuthorsClasses) -> None:
        self.model, self.held, self.layout = model, held, Layout()
        self._authors_classes = authors_classes
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:  # an older version 5 does not have these functions
            self.layout = _as_they_are(held, shapes)
            return
        with authors_classes(model):
            known = get_model_conversion_mapping(model)
        renamings = [each for each in known if isinstance(each, WeightRenaming)]
        converters = [each for each in known if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, there = model.base_model_prefix, dict(shapes)
        groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for name in sorted(held, key=_natural):
            now, pattern = rename_source_key(name, renamings, converters, prefix, there)
            if now not in shapes and name in shapes:
                now, pattern = name, None
            if now not in shapes:
                self._unknown(name, now)
            elif pattern is None:
                self.layout.blocks[now] = Block.of(name, held[name].shape)
            else:
                _, sources = groups.setdefault(now, (by_pattern[pattern], {}))
                sources.setdefault(pattern, []).append(name)
        for first, (converter, sources) in groups.items():
            self._convert(first, converter, sources)
        missing = re.compile("|".join(self._ignored("missing")) or r"\A(?!)")
        self.layout.kept = {name for name in shapes if not self._is_given(name) and missing.search(name)}

    def _is_given(self, name: str) -> bool:
        return name in self.layout.blocks or name in self.layout.computed

    def _ignored(self, what: str) -> list[str]:
        """The patterns of a class of transformers for `missing` or `unexpected` names that are not errors."""
        return list(getattr(self.model, f"_keys_to_ignore_on_load_{what}", None) or ())

    def _unknown(self, name: str, now: str) -> None:
        """Handle a name that the model does not have: not an error for a buffer that the model computes itself."""
        computed = {name for name, _ in self.model.named_buffers()}
        if now in computed or any(re.search(pattern, now) for pattern in self._ignored("unexpected")):
            self.layout.unused.add(name)

    def _convert(self, first: str, converter: Any, sources: dict[str, list[str]]) -> None:
        """Lay out the targets of a conversion whose first target is `first`."""

        def converted(read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
            fresh = copy.deepcopy(converter)
            for pattern, names in sources.items():
                for name in names:
                    fresh.add_tensor(first, name, pattern, lambda name=name: read(name))
            with self._authors_classes(self.model):
                made = fresh.convert(first, model=self.model, config=self.model.config)
            return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

        def on_meta(name: str) -> torch.Tensor:
            dtype, shape = self.held[name]
            return torch.empty(shape, dtype=vars(torch)[dtype.removeprefix("torch.")], device="meta")

        try:
            targets = converted(on_meta)
        except Exception as error:
            names = [name for each in sources.values() for name in each]
            raise CheckpointOptionError(
                f"transformers cannot make {first} from {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: {error}"
            ) from error
        blocks = self._blocks(converter, sources)
        for at, (name, target) in enumerate(targets.items()):
            if blocks is not None and len(blocks) == len(targets) and blocks[at].shape == list(target.shape):
                self.layout.blocks[name] = blocks[at]
            else:
                value = lambda read, name=name: converted(read)[name]  # noqa: E731
                self.layout.computed[name] = Computed(str(target.dtype), list(target.shape), value)
                self.layout.unused |= {name for each in sources.values() for name in each}

    def _blocks(self, converter: Any, sources: dict[str, list[str]]) -> list[Block] | None:
        """The targets of a conversion in order, if it only moves data; None if it computes."""
        now = {pattern: [Block.of(name, self.held[name].shape) for name in names] for pattern, names in sources.items()}
        for operation in converter.operations:
            kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
            if kind == "MergeModulelist":
                now = {pattern: [stacked(blocks, dim)] for pattern, blocks in now.items()}
            elif kind == "Concatenate":
                ordered = [block for pattern in converter.source_patterns for block in now.get(pattern, ())]
                now = {"": [joined(ordered, dim)]}
            elif kind == "Chunk" and operation.num_shards_attribute is None and len(now) == 1:
                (blocks,) = now.values()
                count = len(converter.target_patterns)
                if len(blocks) != 1 or blocks[0].shape[dim] % count:
                    return None
                now = {str(at): [block] for at, block in enumerate(chunks(blocks[0], count, dim))}
            else:
                return None
        return [block for blocks in now.values() for block in blocks]


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


# Where the tensors of a model lie in another program's files, if not one by one under the same names.
#
# A tensor of a file may be a slice of a stacked parameter (one expert); a fused matrix may become three parameters.


class Held(NamedTuple):
    """A tensor of a file: torch's name of its dtype, and its shape."""

    dtype: str
    shape: list[int]


class Piece(NamedTuple):
    """A part of a tensor that is a slice of one tensor of a file.

    Args:
        offsets, sizes: the slice of the tensor.
        source: the name in the file.
        viewed: the source's shape, viewed with the tensor's number of dims.
        begins: where the slice begins in the source.
    """

    offsets: list[int]
    sizes: list[int]
    source: str
    viewed: list[int]
    begins: list[int]


@dataclass(frozen=True)
class Block:
    """A tensor, as the pieces that it consists of."""

    shape: list[int]
    pieces: list[Piece]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Block:
        begins = [0] * len(shape)
        return cls(list(shape), [Piece(begins, list(shape), name, list(shape), begins)])


class Computed(NamedTuple):
    """A tensor computed from whole tensors of the files: `value(read)` computes it, `read(name)` reads one of a file."""

    dtype: str
    shape: list[int]
    value: Callable[[Callable[[str], torch.Tensor]], torch.Tensor]


@dataclass
class Layout:
    """Where the tensors of a model's state come from.

    Attributes:
        blocks, computed: the tensors by name in the model's state.
        unused: names in the files that the model does not use; they are not errors.
        kept: names in the model's state that the files need not contain.
    """

    blocks: dict[str, Block] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


# Called with the tensors of the files, and the shapes of the model's state.
Lays = Callable[[Mapping[str, Held], Mapping[str, list[int]]], Layout]


def stacked(blocks: Sequence[Block], dim: int) -> Block:
    """The layout of `torch.stack`."""
    pieces = [
        Piece(_with(p.offsets, dim, at), _with(p.sizes, dim, 1), p.source, _with(p.viewed, dim, 1), _with(p.begins, dim, 0))
        for at, block in enumerate(blocks)
        for p in block.pieces
    ]
    return Block(_with(blocks[0].shape, dim, len(blocks)), pieces)


def joined(blocks: Sequence[Block], dim: int) -> Block:
    """The layout of `torch.cat`."""
    starts = itertools.accumulate((block.shape[dim] for block in blocks), initial=0)
    pieces = [
        p._replace(offsets=_moved(p.offsets, dim, start))
        for block, start in zip(blocks, starts, strict=False)
        for p in block.pieces
    ]
    shape = list(blocks[0].shape)
    shape[dim] = sum(block.shape[dim] for block in blocks)
    return Block(shape, pieces)


def chunks(block: Block, count: int, dim: int) -> list[Block]:
    """The layouts of `torch.chunk` into equal parts."""
    size, rest = divmod(block.shape[dim], count)
    if rest:
        raise ValueError(f"{block.shape[dim]} is not {count} equal parts")
    return [_cut(block, dim, at * size, size) for at in range(count)]


def _cut(block: Block, dim: int, begin: int, length: int) -> Block:
    pieces = []
    for p in block.pieces:
        first, last = max(p.offsets[dim], begin), min(p.offsets[dim] + p.sizes[dim], begin + length)
        if first < last:
            inside = first - p.offsets[dim]
            offsets, begins = _moved(p.offsets, dim, inside - begin), _moved(p.begins, dim, inside)
            sizes = [*p.sizes[:dim], last - first, *p.sizes[dim + 1 :]]
            pieces.append(Piece(offsets, sizes, p.source, p.viewed, begins))
    return Block([*block.shape[:dim], length, *block.shape[dim + 1 :]], pieces)


def _with(numbers: list[int], dim: int, number: int) -> list[int]:
    return [*numbers[:dim], number, *numbers[dim:]]


def _moved(numbers: list[int], dim: int, by: int) -> list[int]:
    return [n + by if d == dim else n for d, n in enumerate(numbers)]
