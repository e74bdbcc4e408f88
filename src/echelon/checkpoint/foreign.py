"""Weights of other programs: safetensors, in one file or in several with an index, and torch's own files.

torch's files are read without unpickling code, unless the caller trusts them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from echelon.checkpoint import renamed, strict, structure
from echelon.checkpoint.header import FOREIGN_BYTES, SIZES
from echelon.checkpoint.layout import NamedState
from echelon.checkpoint.location import Location, read_file
from echelon.checkpoint.plain import dtype_of
from echelon.checkpoint.renamed import Naming
from echelon.checkpoint.store import Report, compare, on_each, untied
from echelon.checkpoint.strict import Wrong, short
from echelon.checkpoint.tensorfile import Span, TensorFile
from echelon.checkpoint.tensors import Tensors, local_files
from echelon.common.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from echelon.common.terminal import printable
from echelon.hf.conversion import Block, Computed, Held, Layout, Lays
from echelon.world import agree

__all__ = ["INDEX", "ONE", "is_weights", "read_weights", "tensors_of"]

logger = logging.getLogger(__name__)

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"
# Limit of wrappers around a saved module, one inside the other, such as DistributedDataParallel's and torch.compile's.
_WRAPPERS = 3
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def is_weights(path: Path) -> bool:
    """Whether a path holds another program's weights, rather than a checkpoint of ours."""
    return path.is_file() or (path / INDEX).is_file() or (path / ONE).is_file()


class _Foreign(Tensors):
    """Weights of another program, as if a checkpoint held them under `prefix`."""

    def __init__(self, path: Path, prefix: str, trust_pickle: bool = False) -> None:
        self._loaded: dict[str, torch.Tensor] = {}
        self._source: dict[str, TensorFile] = {}
        if path.is_dir() and (path / INDEX).is_file():
            try:
                index = strict.mapping(strict.loads(read_file(path / INDEX, FOREIGN_BYTES)), INDEX)
                listed = strict.mapping(index.get("weight_map"), "weight_map")
                parts = sorted({_plain_name(name) for name in listed.values()})
            except Wrong as error:
                raise CheckpointCorruptError(
                    f"{path / INDEX} is not a safetensors index: {error}.", path=str(path / INDEX)
                ) from None
            self._map([path / name for name in parts], listed)
        elif path.is_dir():
            self._map([path / ONE])
        elif path.suffix in _TORCH:
            self._loaded = _load_torch(path, trust_pickle)
        else:
            self._map([path])
        shapes = {n: (str(t.dtype), list(t.shape)) for n, t in self._loaded.items()}
        shapes |= {n: (e.dtype, e.shape) for n, f in self._source.items() for e in [f.header.entries[n]]}
        self._shapes = shapes
        self._written_as = {}
        self._blocks: dict[str, Block] = {}
        self._computed: dict[str, Computed] = {}
        self._name(prefix, "")

    def _name(self, prefix: str, outer: str) -> None:
        """Name the tensors as the file does, with `prefix` in place of a leading `outer`."""
        self._in_file = {prefix + name.removeprefix(outer): name for name in self._shapes}
        self.index = {
            name: {"dtype": dtype, "shape": shape, "pieces": [[[0 for _ in shape], shape, ""]]}
            for name, (dtype, shape) in zip(self._in_file, self._shapes.values(), strict=True)
        }

    @property
    def held(self) -> dict[str, Held]:
        """The dtype and shape of each tensor in the files, by its name there."""
        return {name: Held(dtype, list(shape)) for name, (dtype, shape) in self._shapes.items()}

    def lay_out(self, prefix: str, blocks: dict[str, Block], computed: dict[str, Computed], unused: set[str]) -> None:
        """Build tensors from the files' tensors as a layout says. Tensors that it does not mention keep their names."""
        self._blocks = {prefix + name: block for name, block in blocks.items()}
        self._computed = {prefix + name: each for name, each in computed.items()}
        used = unused | {piece.source for block in blocks.values() for piece in block.pieces}
        self.index = {name: entry for name, entry in self.index.items() if self._in_file[name] not in used}
        for name, block in self._blocks.items():
            pieces = [[p.offsets, p.sizes, p.source] for p in block.pieces]
            self.index[name] = {"dtype": self._shapes[block.pieces[0].source][0], "shape": block.shape, "pieces": pieces}
        for name, each in self._computed.items():
            self.index[name] = {"dtype": each.dtype, "shape": each.shape, "pieces": [[[0 for _ in each.shape], each.shape, ""]]}

    def unwrap(self, prefix: str, wanted: Collection[str]) -> None:
        """Drop the prefix of a wrapper with which the module was saved, such as DistributedDataParallel's "module."."""
        if any(prefix + name in self.index for name in wanted):
            return
        parts = [name.split(".") for name in self._shapes]
        outers = {".".join([*words[:depth], ""]) for words in parts for depth in range(1, min(len(words), _WRAPPERS + 1))}
        matches = {outer: sum(outer + name in self._shapes for name in wanted) for outer in sorted(outers, key=len)}
        outer = max(matches, key=matches.__getitem__, default="")
        if matches.get(outer):
            logger.info("names are taken without the %r with which the module was saved", outer)
            self._name(prefix, outer)

    def rename(self, naming: Naming) -> None:
        super().rename(naming)
        self._in_file = {new: self._in_file[old] for new, old in self._written_as.items()}

    def _map(self, paths: list[Path], listed: Mapping[str, object] | None = None) -> None:
        """Open the files, and note which file each tensor is read from.

        Args:
            listed: tensor name -> file name; it decides for tensors that several files hold.
        """
        for path in paths:
            if not path.exists():
                raise CheckpointNotFoundError(f"{path} is missing.", path=str(path))
            file = TensorFile(path)
            for name in file.header.entries:
                if name not in self._source or (listed or {}).get(name) == path.name:
                    self._source[name] = file

    def piece(self, name: str, offsets: list[int], sizes: list[int], written_in: str) -> torch.Tensor:
        plain = self._in_file[name]
        return self._loaded[plain] if plain in self._loaded else self._source[plain].tensor(plain)

    def fill(
        self, into: torch.Tensor, name: str, storage_offsets: torch.Size | None, begins: torch.Size, lengths: torch.Size
    ) -> None:
        if name in self._blocks:
            pieces = self._blocks[name].pieces
            piece = next(p for p in pieces if storage_offsets is None or tuple(p.offsets) == tuple(storage_offsets))
            at = [begin + inside for begin, inside in zip(piece.begins, begins, strict=True)]
            self._read(piece.source, at, lengths, into, piece.viewed)
        elif name in self._computed:
            into.copy_(_narrowed(self._computed[name].value(self._whole), begins, lengths))
        else:
            self._read(self._in_file[name], begins, lengths, into, self._shapes[self._in_file[name]][1])

    def _read(self, name: str, begins: Sequence[int], lengths: Sequence[int], into: torch.Tensor, shape: Sequence[int]) -> None:
        if name in self._source:
            self._source[name].read_part(name, begins, lengths, into, viewed=shape)
        else:
            into.copy_(_narrowed(self._loaded[name].reshape(tuple(shape)), begins, lengths))

    def _whole(self, name: str) -> torch.Tensor:
        dtype, shape = self._shapes[name]
        whole = torch.empty(shape, dtype=dtype_of(dtype))
        self._read(name, [0 for _ in shape], shape, whole, shape)
        return whole

    def span(self, name: str) -> Span | None:
        plain = self._in_file[name]
        return None if plain in self._loaded else self._source[plain].span(plain)

    def forget(self) -> None:
        for file in set(self._source.values()):
            file.forget()


def _narrowed(tensor: torch.Tensor, begins: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or "/" in name or "\0" in name or name.startswith("."):
        raise Wrong(f"{short(name)} points outside the folder")
    return name


def _load_torch(path: Path, trust_pickle: bool) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=not trust_pickle)
    except Exception as error:
        hint = "" if trust_pickle else " If it holds more than tensors and you trust its author, pass --trust-pickle."
        why = printable((str(error) or repr(error)).splitlines()[0])
        raise CheckpointError(f"{path} could not be read: {why}.{hint}") from error
    for key in ("state_dict", "model"):  # some programs keep the weights under such a key
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()):
        raise CheckpointError(f"{path} holds no state_dict of tensors.")
    size = path.stat().st_size
    for name, tensor in loaded.items():
        if tensor.layout != torch.strided or tensor.is_meta or str(tensor.dtype) not in SIZES:
            raise CheckpointError(f"{path} holds {short(name)} as a {tensor.layout} of {tensor.dtype} on {tensor.device}.")
        if tensor.nbytes > size:  # an expanded view of a small storage
            raise CheckpointError(f"{path} has {size} bytes, fewer than the {tensor.nbytes} of {short(name)} in it.")
    return dict(loaded)


def _named(
    saved: _Foreign,
    values: Mapping[str, object],
    path: Path,
    lays: Lays | None,
    rename: Mapping[str, str] | None,
    is_cut: bool,
) -> Layout:
    """Rename the files' tensors to the names of the state. Collective.

    Args:
        is_cut: ranks hold different parts of the module, as pipeline stages do.
    """
    layout = Layout()
    # Shapes of the whole module, not of this rank's part alone: all ranks must arrive at the same names.
    shapes = {k: list(v.size()) for k, v in values.items() if isinstance(v, torch.Tensor)}
    if is_cut:
        shapes = {k: shape for each in agree.kinds(shapes) for k, shape in each.items()}
    if lays is not None:
        layout = on_each(path, lambda: lays(saved.held, shapes))
        if is_cut:  # the buffer that makes a saved tensor useless may be on one rank only
            layout.unused.update(name for each in agree.kinds(sorted(layout.unused)) for name in each)
    if layout.blocks or layout.computed:
        saved.lay_out("module.", layout.blocks, layout.computed, layout.unused)
    else:
        saved.unwrap("module.", list(shapes))
    if rename:
        on_each(path, lambda: renamed.check(rename, list(saved.index)))
        on_each(path, lambda: saved.rename(lambda name: renamed.moved(name, rename)))
    return layout


def read_weights(
    path: Path,
    module: NamedState,
    *,
    strict: bool = True,
    trust_pickle: bool = False,
    rename: Mapping[str, str] | None = None,
    lays: Lays | None = None,
    keeps: Callable[[set[str]], None] = lambda kept: None,
) -> Report:
    """Fill a module's state, however it is sharded or cut into stages, from a file of another program. Collective.

    Missing and unexpected names are judged over all ranks: a tensor that one stage does not want may belong to another.

    Args:
        lays: finds where the state's tensors are in the files, if not under their own names.
        keeps: called before anything is read, with the names for which the files need not have a value.
    Raises:
        CheckpointMismatchError: names or shapes differ, with a table.
    """
    saved = on_each(path, lambda: _Foreign(path, "module.", trust_pickle))
    values = on_each(path, lambda: dict(module.state_dict()))
    layout = _named(saved, values, path, lays, rename, getattr(module, "is_cut", False))
    # Other programs save a tied parameter under one of its names, or under all.
    for names in getattr(module, "tied", list)():
        without_prefix = [n for n in names if f"module.{n}" in saved.index]
        values |= {n: values[without_prefix[0]] for n in names if without_prefix and n not in without_prefix}
    tensors_only = {f"module.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
    there = {id(v) for k, v in tensors_only.items() if k in saved.index}
    wanted = {k: v for k, v in tensors_only.items() if k in saved.index or id(v) not in there}
    wanted = {k: v for k, v in wanted.items() if k in saved.index or k.removeprefix("module.") not in layout.kept}
    groups = [[f"module.{n}" for n in names] for names in getattr(module, "tied", list)()]
    lost = on_each(path, lambda: untied(groups, wanted, saved))
    report = compare(path, {"module": module}, {"module": {}}, wanted, saved, strict, lost=lost)
    values |= {n.removeprefix("module."): wanted[first] for n, first in lost.items()}
    on_each(path, lambda: keeps(layout.kept))
    tensors = {k: v for k, v in wanted.items() if k in saved.index and k not in lost}
    on_each(path, lambda: saved.read_into(tensors))
    on_each(path, lambda: module.load_state_dict(values))
    return report


@contextlib.contextmanager
def tensors_of(path: Location, trust_pickle: bool = False) -> Iterator[Tensors]:
    """Context with the tensors of a checkpoint of ours, or of another program's weights."""
    if isinstance(path, Path) and is_weights(path):
        yield _Foreign(path, "", trust_pickle)
        return
    with local_files(path) as files:
        if wrong := structure.problems(path, files.manifest):
            raise CheckpointCorruptError(f"{'; '.join(wrong[:8])}.")
        yield Tensors(files)
