"""The files of a checkpoint, opened as they are needed, and the tensors in them: their index, and reads of any part."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from echelon.checkpoint import manifest as manifests
from echelon.checkpoint import plain, renamed, structure
from echelon.checkpoint.checksum import Sums
from echelon.checkpoint.layout import INDEX, in_file
from echelon.checkpoint.location import Location, Remote, create, open_file
from echelon.checkpoint.renamed import Naming
from echelon.checkpoint.strict import Wrong
from echelon.checkpoint.tensorfile import Span, TensorFile
from echelon.common.errors import CheckpointCorruptError

__all__ = ["Files", "Tensors", "local_files"]


@contextlib.contextmanager
def local_files(folder: Location, manifest: dict[str, Any] | None = None) -> Iterator[Files]:
    """Context with the files of a checkpoint on this machine; a Remote's files are fetched on first use.

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

    def __init__(self, folder: Location, local_folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest, self._here = folder, manifest, local_folder
        self._open: dict[str, TensorFile] = {}

    def _path(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise CheckpointCorruptError(f"{self.folder} has no {name!r}: its manifest does not list it.", path=str(self.folder))
        local, source = self._here / name, self.folder / name
        if isinstance(source, Remote) and not local.exists():
            _fetch(source, self.manifest["files"][name], local)
        return local

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
            raise CheckpointCorruptError(f"{file.path} is not what echelon writes: {error}.", path=str(file.path)) from None
        return value


def _fetch(source: Remote, entry: dict[str, Any], to: Path) -> None:
    """Copy a remote file here and compare it with the manifest: it may have been replaced since it was verified."""
    sums = Sums()
    with open_file(source) as (stream, _), create(to) as file:
        while sums.size <= entry["size"] and (piece := stream.read(4 << 20)):
            file.write(piece)
            sums.add(memoryview(piece))
    if sums.entry() != entry:
        to.unlink()
        raise CheckpointCorruptError(f"{source} is not what was written: its size or checksum differs.", path=str(source))


class Tensors:
    """The tensors of a checkpoint: their index, and reads of any part."""

    def __init__(self, files: Files) -> None:
        self._files = files
        try:
            self.index: dict[str, Any] = structure.read_index(files.folder, files.manifest)
        except Wrong as error:
            raise CheckpointCorruptError(
                f"{files.folder / INDEX} is not what echelon writes: {error}.", path=str(files.folder / INDEX)
            ) from None
        self._written_as: dict[str, str] = {}
        # The name of the tensor that was read last, and its pieces by their offsets.
        self._begins: tuple[str, dict[tuple[int, ...], list[Any]]] = ("", {})

    def rename(self, naming: Naming) -> None:
        """Rename tensors, for all later calls.

        Raises:
            CheckpointMismatchError: two names would become the same.
        """
        names = renamed.by_old(self.index, naming)
        self._written_as = {new: self._written_as.get(old, old) for old, new in names.items()}
        self.index = {names[old]: entry for old, entry in self.index.items()}
        self._begins = ("", {})

    @property
    def manifest(self) -> dict[str, Any]:
        return self._files.manifest

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self.index[name]["shape"]
        return shape

    def metadata(self, names: list[str]) -> Metadata:
        """The index of these tensors in the form of torch's planners."""
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

    def fill(
        self, into: torch.Tensor, name: str, storage_offsets: torch.Size | None, begins: torch.Size, lengths: torch.Size
    ) -> None:
        """Fill a tensor with a part of the piece that begins at `storage_offsets`."""
        offsets, sizes, written_in = self._piece_at(name, storage_offsets)
        written_as, dtype = self._written_as.get(name, name), plain.dtype_of(self.index[name]["dtype"])
        self._files.open(written_in).read_part(in_file(written_as, tuple(offsets)), begins, lengths, into, dtype, sizes)

    def _piece_at(self, name: str, offsets: torch.Size | None) -> list[Any]:
        if offsets is None:
            return self.index[name]["pieces"][0]  # type: ignore[no-any-return]
        if self._begins[0] != name:  # few ranks that restore read the many pieces of a tensor in a row
            self._begins = name, {tuple(piece[0]): piece for piece in self.index[name]["pieces"]}
        return self._begins[1][tuple(offsets)]

    def read_into(self, tensors: dict[str, Any]) -> None:
        """Fill tensors, or this rank's parts of them, from the checkpoint's tensors of the same names."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors, self.metadata(list(tensors)))
        for item in planner.create_local_plan().items:
            target = planner.resolve_tensor(item).detach()
            self.fill(target, item.storage_index.fqn, item.storage_index.offset, item.storage_offsets, item.lengths)

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
        """Where the pieces of a tensor are, and in which of the checkpoint's files."""
        dtype, written_as = plain.dtype_of(self.index[name]["dtype"]), self._written_as.get(name, name)
        return [
            (self._files.open(written_in).span(in_file(written_as, tuple(offsets)), dtype, sizes), written_in)
            for offsets, sizes, written_in in self.index[name]["pieces"]
        ]

    def span(self, name: str) -> Span | None:
        """Where a tensor is, if it was written in one piece."""
        spans = self.spans(name)
        return spans[0][0] if len(spans) == 1 else None

    def forget(self) -> None:
        for file in self._files._open.values():
            file.forget()
