"""Read what `snapshot` wrote into states, at any number of ranks, under any strategy.

The planner of torch.distributed.checkpoint says which parts of which pieces this rank wants; they are copied out of the mapped
files, so that no rank ever holds more than its own tensors. Reading is each rank's own; what fails on one is told to all.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from echelon.checkpoint import manifest as manifests
from echelon.checkpoint import plain, renamed, structure
from echelon.checkpoint.layout import INDEX, STATE, NamedState, Stateful, in_file, own_file, this_rank
from echelon.checkpoint.manifest import BLOCK_BYTES
from echelon.checkpoint.place import Place, Remote, create, open_file
from echelon.checkpoint.renamed import Naming
from echelon.checkpoint.strict import Wrong
from echelon.checkpoint.tensorfile import Span, TensorFile
from echelon.contracts import errors
from echelon.contracts.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from echelon.contracts.terminal import printable
from echelon.world import agree

__all__ = ["Files", "Report", "Tensors", "compare", "local_files", "on_each", "read_rank", "read_states", "table"]

T = TypeVar("T")

# Of mapped files, what may stay in a rank's memory while it copies its part out of them.
_MAPPED_BYTES = 32 << 20


@dataclass
class Report:
    """What a load could not restore exactly as it was saved.

    Attributes:
        missing, unexpected: left alone by a load that is not strict: states and tensors that the checkpoint lacks, and those
            that nobody asked for.
        cast: tensors that were saved in another type than they have now: name -> (type saved, type now).
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)


@contextlib.contextmanager
def local_files(folder: Place, manifest: dict[str, Any] | None = None) -> Iterator[Files]:
    """Context with the files of a checkpoint on this machine: those of a Remote are fetched when they are first asked for.

    Args:
        manifest: the checkpoint's, if it was read already.
    """
    manifest = manifest or manifests.read(folder)
    if isinstance(folder, Path):
        yield Files(folder, folder, manifest)
        return
    temporary = Path(tempfile.mkdtemp(prefix="echelon-"))
    try:
        yield Files(folder, temporary, manifest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Files:
    """The files that a checkpoint's manifest lists, and no others."""

    def __init__(self, folder: Place, here: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest, self._here = folder, manifest, here
        self._open: dict[str, TensorFile] = {}

    def _path(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise CheckpointCorruptError(f"{self.folder} has no {name!r}: its manifest does not list it.")
        here, source = self._here / name, self.folder / name
        if isinstance(source, Remote) and not here.exists():
            _fetch(source, self.manifest["files"][name], here)
        return here

    def open(self, name: str, *, verify: bool = False) -> TensorFile:
        if name not in self._open:
            path = self._path(name)
            self._open[name] = TensorFile(path, self.manifest["files"][name], verify=verify)
        return self._open[name]

    def state(self, name: str) -> dict[str, Any]:
        """The nested state in a file."""
        file = self.open(name, verify=True)
        try:
            value: dict[str, Any] = plain.decode(structure.state_of(file.header), file.tensor)
        except (Wrong, TypeError, ValueError, KeyError) as error:
            raise CheckpointCorruptError(f"{file.path} is not what echelon writes: {error}.") from None
        return value


def _fetch(source: Remote, entry: dict[str, Any], to: Path) -> None:
    """Copy a file here, as far as it is what the manifest says: what was verified may have been exchanged since."""
    sums, left = [], entry["size"]
    with open_file(source) as (stream, _), create(to) as file:
        while left:
            block, now = min(left, BLOCK_BYTES), 0
            left -= block
            while block and (piece := stream.read(min(block, 4 << 20))):
                file.write(piece)
                block, now = block - len(piece), zlib.crc32(piece, now)
            sums.append(f"{now:08x}")
            if block:
                break
        whole = not left and not stream.read(1)
    if not whole or sums != entry["crc32"]:
        to.unlink()
        raise CheckpointCorruptError(f"{source} is not what was written: its size or checksum differs.")


class Tensors:
    """The tensors of a checkpoint: what there is, and any part of it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        try:
            self.index: dict[str, Any] = structure.read_index(files.folder, files.manifest)
        except Wrong as error:
            raise CheckpointCorruptError(f"{files.folder / INDEX} is not what echelon writes: {error}.") from None
        self._written_as: dict[str, str] = {}

    def rename(self, naming: Naming) -> None:
        """Call tensors by other names from now on.

        Raises:
            CheckpointMismatchError: two would have the same.
        """
        names = renamed.by_old(self.index, naming)
        self._written_as = {new: self._written_as.get(old, old) for old, new in names.items()}
        self.index = {names[old]: entry for old, entry in self.index.items()}

    @property
    def manifest(self) -> dict[str, Any]:
        return self._files.manifest

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self.index[name]["shape"]
        return shape

    def metadata(self, names: list[str]) -> Metadata:
        """As torch's planners want it."""
        known: dict[str, Any] = {}
        for name in names:
            entry = self.index[name]
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in entry["pieces"]]
            properties = TensorProperties(dtype=plain.dtype_of(entry["dtype"]))
            known[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(known)

    def piece(self, name: str, offsets: list[int], sizes: list[int], written_in: str) -> torch.Tensor:
        """A piece as it was written: a view of its file."""
        file = self._files.open(written_in)
        written_as = self._written_as.get(name, name)
        return file.tensor(in_file(written_as, tuple(offsets)), plain.dtype_of(self.index[name]["dtype"]), sizes)

    def part(self, name: str, storage_offsets: torch.Size | None, begins: torch.Size, lengths: torch.Size) -> torch.Tensor:
        """A part of the piece that begins at `storage_offsets`."""
        pieces = self.index[name]["pieces"]
        offsets, sizes, written_in = next(p for p in pieces if storage_offsets is None or tuple(p[0]) == tuple(storage_offsets))
        part = self.piece(name, offsets, sizes, written_in)
        for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        return part

    def read_into(self, tensors: dict[str, Any]) -> None:
        """Fill tensors, or what this rank holds of them, with what the checkpoint has under their names."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors, self.metadata(list(tensors)))
        mapped = 0
        for item in planner.create_local_plan().items:
            part = self.part(item.storage_index.fqn, item.storage_index.offset, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).detach().copy_(part)
            mapped += part.nbytes
            if mapped > _MAPPED_BYTES:
                self.forget()
                mapped = 0
        self.forget()

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor: a view if it was written in one piece."""
        entry = self.index[name]
        pieces = entry["pieces"]
        if len(pieces) == 1:
            return self.piece(name, *pieces[0])
        made = torch.empty(entry["shape"], dtype=plain.dtype_of(entry["dtype"]))
        for offsets, sizes, written_in in pieces:
            target = made
            for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, begin, length)
            target.copy_(self.piece(name, offsets, sizes, written_in))
        return made

    def spans(self, name: str) -> list[tuple[Span, str]]:
        """Where the pieces of a tensor lie, and in which of the checkpoint's files."""
        dtype, written_as = plain.dtype_of(self.index[name]["dtype"]), self._written_as.get(name, name)
        return [
            (self._files.open(written_in).span(in_file(written_as, tuple(offsets)), dtype, sizes), written_in)
            for offsets, sizes, written_in in self.index[name]["pieces"]
        ]

    def span(self, name: str) -> Span | None:
        """Where a tensor lies, if it was written in one piece."""
        found = self.spans(name)
        return found[0][0] if len(found) == 1 else None

    def forget(self) -> None:
        for file in self._files._open.values():
            file.forget()


def read_states(
    folder: Place,
    states: dict[str, Stateful],
    manifest: dict[str, Any] | None = None,
    *,
    strict: bool = True,
    forgotten: Callable[[list[str]], tuple[list[str], list[str]]] | None = None,
    rename: Mapping[str, str] | None = None,
    naming: Naming | None = None,
) -> Report:
    """Read what a snapshot wrote into the given states, whatever number of ranks wrote it. Collective.

    Args:
        forgotten: of the saved states' names, those that are left over, an error when strict, and those that are only listed.
            By default what is not asked for is no matter.
        rename, naming: what was asked for, and what it makes of the name of a state or a tensor.
        manifest: the checkpoint's, if it was read already.
    Raises:
        CheckpointCorruptError: it is not what was written; nothing was changed yet, but perhaps some tensors.
        CheckpointMismatchError: a state or a parameter is missing, left over, or has another shape; with a table. With
            strict=False the missing and the left over are left alone, and returned. Ranks that do not ask for the same.
    """
    _same_states(states)
    with contextlib.ExitStack() as stack:
        files = on_each(folder, lambda: stack.enter_context(local_files(folder, manifest)))
        rest, saved = on_each(folder, lambda: (files.state(STATE), Tensors(files)))
        if rename and naming is not None:
            rest = on_each(folder, lambda: renamed.rename(rest, saved, states, rename, naming))
        over, listed = forgotten(sorted(rest)) if forgotten is not None else ([], [])
        named = {n: s for n, s in states.items() if isinstance(s, NamedState) and n in rest}
        values, lacking = on_each(folder, lambda: _targets(folder, named, saved, rest))
        wanted = {f"{n}.{k}": v for n, state in values.items() for k, v in state.items() if isinstance(v, torch.Tensor)}
        report = compare(folder, states, rest, wanted, saved, strict, lacking, over)
        report.unexpected += listed
        tensors = {k: v for k, v in wanted.items() if k in saved.index}
        on_each(folder, lambda: saved.read_into(tensors))
    on_each(folder, lambda: _load(named, values, rest))
    on_each(folder, lambda: _load({n: s for n, s in states.items() if n in rest and n not in named}, {}, rest))
    return report


def _load(states: dict[str, Any], values: dict[str, dict[str, Any]], rest: dict[str, Any]) -> None:
    for name, stateful in states.items():
        state = rest[name]
        if name in values:
            state = {**values[name], **{k: v for k, v in state.items() if k in values[name] or _plans(stateful)}}
        stateful.load_state_dict(state)


def _same_states(states: dict[str, Stateful]) -> None:
    """Refuse ranks with different units: their collectives would not match, and they would hang."""
    told = agree.gather({name: type(state).__name__ for name, state in states.items()})
    names = sorted({name for each in told for name in each})
    rows = [row for n in names if len(set((row := (n, *(each.get(n, "-") for each in told)))[1:])) > 1]
    if rows:
        shown = table(("state", *(f"rank {r}" for r in range(len(told)))), rows)
        raise CheckpointMismatchError(f"ranks restore different units:\n{shown}Build the same unit on every rank.")


def _targets(
    folder: Place, named: dict[str, Any], saved: Tensors, rest: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """By state what is to be filled, and what of it the checkpoint does not know. An optimizer's depend on what was saved."""
    if odd := [name for name in named if not isinstance(rest[name], dict)]:
        raise CheckpointCorruptError(f"{folder / STATE} is not what echelon writes: {odd[0]!r} is not a dict.")
    kinds = {name: (plain.dtype_of(entry["dtype"]), entry["shape"]) for name, entry in saved.index.items()}
    values: dict[str, dict[str, Any]] = {}
    lacking: list[str] = []
    for name, stateful in named.items():
        if _plans(stateful):
            values[name], unknown = stateful.targets(name, kinds, rest[name])
            lacking += [f"{name}.{each}" for each in unknown]
        else:
            values[name] = dict(stateful.state_dict())
    return values, lacking


def _plans(stateful: Any) -> bool:
    return hasattr(stateful, "targets")


def on_each(folder: Place, act: Callable[[], T]) -> T:
    """What every rank does by itself; if one fails, all do, with the first one's error. Collective."""
    problem: list[str] | None = None
    value, own = None, None
    try:
        value = act()
    except (CheckpointError, errors.UsageError) as error:
        problem, own = [type(error).__name__, str(error)], error
    except Exception as error:  # perhaps of a user's load_state_dict: the other ranks must not wait for this one
        own = error  # type: ignore[assignment]
        known = isinstance(error, (OSError, RuntimeError, ValueError, KeyError, TypeError))
        problem = ["CheckpointError", f"{folder} could not be read: {str(error) if known else repr(error)}"]
    told = agree.gather(problem)
    first = next((each for each in told if each is not None), None)
    if first is not None:
        kind: type[errors.EchelonError] = getattr(errors, first[0])
        raise kind(first[1]) from own
    return value  # type: ignore[return-value]


def compare(
    folder: Place,
    states: dict[str, Stateful],
    rest: dict[str, Any],
    wanted: dict[str, Any],
    saved: Tensors,
    strict: bool,
    lacking: Sequence[str] = (),
    over: Sequence[str] = (),
) -> Report:
    """What does not fit, before anything is changed. Collective: ranks of a divided optimizer each want a part."""
    both = {k: v for k, v in wanted.items() if k in saved.index}
    asked = [name for name in states if name in rest]
    of_asked = [k for k in saved.index if any(k.startswith(f"{name}.") for name in asked)]
    mine = [
        [*(k for k in wanted if k not in saved.index), *lacking],
        [[k, saved.shape(k), list(v.size())] for k, v in both.items() if saved.shape(k) != list(v.size())],
        [k for k in of_asked if k not in wanted],
        [[k, saved.index[k]["dtype"], str(v.dtype)] for k, v in both.items() if saved.index[k]["dtype"] != str(v.dtype)],
        list(over),
    ]
    told = agree.gather(mine)
    over = sorted({name for each in told for name in each[4]})
    missing = sorted({k for each in told for k in each[0]} | {name for name in states if name not in rest})
    shapes = {k: (a, b) for each in told for k, a, b in each[1]}
    unexpected = sorted(set(told[0][2]).intersection(*(each[2] for each in told[1:]))) + list(over)
    cast = {k: (a.removeprefix("torch."), b.removeprefix("torch.")) for each in told for k, a, b in each[3]}
    rows = [(k, str(tuple(a)), str(tuple(b))) for k, (a, b) in sorted(shapes.items())]
    if strict:
        rows += [(k, "-", _shape_of(wanted.get(k))) for k in missing]
        rows += [(k, str(tuple(saved.shape(k))) if k in saved.index else "saved", "-") for k in unexpected]
        # Weights are cast on purpose; an optimizer's averages that lose their last bits stand still.
        rows += [(k, a, b) for k, (a, b) in sorted(cast.items()) if ".state." in k and _loses(a, b)]
    rows.sort(key=lambda row: ".state." in row[0] or ".param_groups." in row[0])  # what an optimizer knows of them comes last
    if rows:
        hint = "" if shapes else " RestoreOptions(strict=False) leaves these alone, and casts."
        if over:
            hint += f" allow_changes={tuple(over)!r} leaves only {', '.join(over)} out, for good: later checkpoints lack it."
        hint += renamed.hint(states, wanted, {k: saved.shape(k) for k in saved.index}, missing, unexpected)
        raise CheckpointMismatchError(
            f"{folder} does not fit this model:\n{table(('state', 'saved', 'now'), rows, most=16)}{hint}"
        )
    return Report(missing, unexpected, cast)


def _shape_of(value: Any) -> str:
    return f"wanted {tuple(value.size())}" if isinstance(value, torch.Tensor) else "wanted"


def _loses(saved: str, now: str) -> bool:
    """Whether a type cannot hold all values of the one that was saved."""
    return torch.promote_types(plain.dtype_of(saved), plain.dtype_of(now)) != plain.dtype_of(now)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int = 12) -> str:
    """Rows in columns; of many the first few and how many more. They may be of a file that somebody else wrote."""
    shown = [head, *(tuple(printable(cell).replace("\n", "?").replace("\t", " ") for cell in row) for row in rows[:most])]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "\n".join([*lines, *([f"  and {len(rows) - most} more"] if len(rows) > most else [])]) + "\n"


def read_rank(folder: Place, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """What this rank wrote for itself; None if the checkpoint was written by another number of ranks."""
    rank, size = this_rank()
    written = sum(name.startswith("rank-") for name in manifest["files"])
    if written != size:
        return None
    with local_files(folder, manifest) as files:
        return files.state(own_file(rank))
