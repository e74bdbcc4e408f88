"""Hand the weights of a checkpoint to other programs, and compare checkpoints, in bounded memory and without a process group.

Tensors are read and written one by one: the memory is one tensor's and some pages, whatever the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from echelon.checkpoint import manifest as manifests
from echelon.checkpoint import tensorfile
from echelon.checkpoint.foreign import INDEX, ONE, is_weights, tensors_of
from echelon.checkpoint.location import Location, exists, sync
from echelon.checkpoint.manifest import BLOCK_BYTES
from echelon.checkpoint.plain import dtype_of
from echelon.checkpoint.tensorfile import Span, TensorFile
from echelon.checkpoint.tensors import Tensors
from echelon.common.errors import CheckpointCorruptError, CheckpointOptionError

__all__ = ["convert", "differences", "export_safetensors", "export_torch"]

_AT_ONCE = 1 << 24  # elements that are compared at once


def _chosen(saved: Tensors, state: str | None, path: Location) -> dict[str, str]:
    """Name in the export -> name in the checkpoint, of one state's tensors. The export drops the state's name."""
    if state is None:
        modules = sorted({name.split(".", 1)[0] for name in saved.index if ".state." not in name})
        if not modules:
            raise CheckpointOptionError(f"{path} holds no tensors of a module.")
        if len(modules) > 1:
            raise CheckpointOptionError(f"{path} holds several states: {', '.join(modules)}. Choose one with --state.")
        state = modules[0]
    chosen = {name.removeprefix(f"{state}."): name for name in saved.index if name.startswith(f"{state}.")}
    if not chosen:
        raise CheckpointOptionError(f"{path} holds no tensors of the state {state!r}.")
    if all(short.startswith(("parameters.", "buffers.")) for short in chosen):  # averaged weights: named as the module's own
        return {short.partition(".")[2]: name for short, name in chosen.items()}
    return chosen


def _bytes(saved: Tensors, name: str) -> int:
    return dtype_of(saved.index[name]["dtype"]).itemsize * math.prod(saved.shape(name))


def export_safetensors(path: Location, to: Path, *, state: str | None = None, shard_bytes: int = 5 << 30) -> list[Path]:
    """Write a checkpoint's weights as safetensors into the folder `to`, with an index if they fill several files.

    Args:
        state: which attribute of the unit; may be left out if only one has tensors.
        shard_bytes: size limit of a file; a larger tensor gets a file of its own.
    Raises:
        CheckpointCorruptError: the checkpoint's files are not what was saved; the export is removed.
    """
    with tensors_of(path) as saved:
        chosen = _chosen(saved, state, path)
        return _in_shards(path, saved, chosen, to, shard_bytes)


def export_torch(path: Location, to: Path, *, state: str | None = None) -> Path:
    """Write a checkpoint's weights as one file for `torch.load`, a state_dict that needs no unpickling of code."""
    with tensors_of(path) as saved:
        chosen = _chosen(saved, state, path)
        with _published(to.parent, [to.name]) as aside, _checked(path, saved, chosen.values()):
            # First all tensors whole in one file: torch.save then reads them from its mapping while it writes.
            _write(aside / "parts", saved, chosen)
            whole = TensorFile(aside / "parts")
            types = {short: (dtype_of(saved.index[name]["dtype"]), saved.shape(name)) for short, name in chosen.items()}
            torch.save({short: whole.tensor(short, *kind) for short, kind in types.items()}, aside / to.name)
            sync(aside / to.name)
    return to


def convert(path: Path, to: Path, *, shard_bytes: int = 5 << 30, trust_pickle: bool = False) -> list[Path]:
    """Write another program's weights as safetensors, which `restore` takes.

    Raises:
        CheckpointError: a file can be read only by unpickling code, and is not trusted.
    """
    with tensors_of(path, trust_pickle) as saved:
        return _in_shards(path, saved, {name: name for name in saved.index}, to, shard_bytes)


@contextlib.contextmanager
def _published(to: Path, names: list[str]) -> Iterator[Path]:
    """Context with a private folder. At its end, the files of these names are moved from there into `to`.

    Raises:
        UsageError: a file of such a name exists already. Nothing is ever overwritten.
    """
    if there := [str(to / name) for name in names if exists(to / name)]:
        raise CheckpointOptionError(f"{there[0]} exists already. Choose another name.")
    to.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".export-", dir=to))
    try:
        yield aside
        for name in names:
            if exists(to / name):
                raise CheckpointOptionError(f"{to / name} was created by another program meanwhile. Choose another name.")
            os.rename(aside / name, to / name)
        sync(to)
    finally:
        shutil.rmtree(aside)


@contextlib.contextmanager
def _checked(path: Location, saved: Tensors, names: Iterable[str]) -> Iterator[None]:
    """Context that verifies a checkpoint's checksums in a thread, while files are written from it.

    Raises:
        CheckpointCorruptError: a file of the checkpoint is not what was saved.
    """
    if isinstance(path, Path) and is_weights(path):
        yield
        return
    manifest = saved.manifest
    only = {file: {0} for file in manifest["files"]}
    for span, file in (each for name in names for each in saved.spans(name)):
        only[file] |= set(range(span.offset // BLOCK_BYTES, (span.offset + max(span.size, 1) - 1) // BLOCK_BYTES + 1))
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(manifests.problems, path, manifest, only=only)
        yield
        if wrong.result():
            raise CheckpointCorruptError(f"{'; '.join(wrong.result())}. Nothing was exported.", path=str(path))


def _in_shards(path: Location, saved: Tensors, chosen: dict[str, str], to: Path, shard_bytes: int) -> list[Path]:
    groups: list[list[str]] = [[]]
    room = shard_bytes
    for name in chosen:
        size = _bytes(saved, chosen[name])
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    if there := [str(p) for p in (to / ONE, to / INDEX) if exists(p)]:
        raise CheckpointOptionError(f"{there[0]} exists already. Choose another folder.")
    count = len(groups)
    files = [ONE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = [*files, *([INDEX] if count > 1 else [])]  # the index comes last, after the files that it lists
    with _published(to, names) as aside, _checked(path, saved, chosen.values()):
        for file, group in zip(files, groups, strict=True):
            _write(aside / file, saved, {name: chosen[name] for name in group})
        if count > 1:
            weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
            total = sum(_bytes(saved, name) for name in chosen.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
            tensorfile.write_text(aside / INDEX, text)
    return [to / name for name in names]


def _write(path: Path, saved: Tensors, names: dict[str, str]) -> None:
    def values(name: str) -> torch.Tensor | Span:
        span = saved.span(name)
        if span is not None:
            return span
        saved.forget()  # frees what was read before, so that one tensor is in memory
        return saved.whole(name)

    sources = [
        (short, dtype_of(saved.index[name]["dtype"]), saved.shape(name), functools.partial(values, name))
        for short, name in names.items()
    ]
    tensorfile.assemble(path, sources, {"format": "pt"})


def differences(a: Location, b: Location) -> tuple[list[tuple[str, float, str]], tuple[list[str], list[str]]]:
    """Compare two checkpoints, or weights, tensor by tensor.

    Returns:
        for each tensor in both (name, largest difference relative to the largest value, a note if the shapes differ); the names
        only in `a`, and those only in `b`.
    """
    with tensors_of(a) as one, tensors_of(b) as other:
        rows = []
        for name in sorted(one.index.keys() & other.index.keys()):
            if one.shape(name) != other.shape(name):
                rows.append((name, float("inf"), f"shapes {tuple(one.shape(name))} and {tuple(other.shape(name))}"))
                continue
            rows.append((name, _relative(one.whole(name), other.whole(name)), ""))
            one.forget()
            other.forget()
        return rows, (sorted(one.index.keys() - other.index.keys()), sorted(other.index.keys() - one.index.keys()))


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """max |x - y| / max |x|; nan if one has a nan where the other has none."""
    worst = scale = 0.0
    for start in range(0, x.numel(), _AT_ONCE):
        p, q = (t.reshape(-1)[start : start + _AT_ONCE] for t in (x, y))
        if p.dtype == q.dtype and torch.equal(p, q):
            scale = max(scale, float(p.abs().max()) if p.dtype != torch.bool else 1.0)
            continue
        p, q = (t if t.is_complex() else t.double() for t in (p, q))
        if not torch.equal(p.isnan(), q.isnan()):
            return float("nan")
        scale = max(scale, float(p.nan_to_num().abs().max()))
        worst = max(worst, float((p - q).nan_to_num().abs().max()))
    return worst / scale if worst and scale else worst
