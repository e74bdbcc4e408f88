"""Checks of a checkpoint's files beyond their checksums, which anyone who can write to the folder can forge.

    index.json          name -> its type, its shape, its pieces: where each begins, its sizes, the file that holds it
    tensors-N           exactly the pieces that the index says, of that type and shape; together they fill their tensors
    state, rank-N       a nested state (`plain`), whose tensors are exactly those of the file

Works without torch, so that `echelon ckpt verify` and a restore make the same checks. They do not depend on the model.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from echelon.checkpoint import header as headers
from echelon.checkpoint import strict
from echelon.checkpoint.header import OTHERS, SIZES, Header, shape_of, size_of_all
from echelon.checkpoint.location import Location, open_file
from echelon.checkpoint.manifest import INDEX, STATE_KEY, TENSORS, checksums, in_file
from echelon.checkpoint.strict import Wrong, short
from echelon.common.errors import CheckpointCorruptError, CheckpointUnreadableError

__all__ = ["problems", "read_index", "state_of"]

Index = dict[str, dict[str, Any]]

# Limit of dimensions along which a tensor is sharded: no mesh has so many axes.
_MOST_CUT = 8
_NUMPY = re.compile(r"[<>|]([biufc])(\d{1,2})")
_NUMPY_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32)}
_DEVICE = re.compile(r"[a-z_]{1,32}(:\d{1,9})?")


def problems(folder: Location, manifest: Mapping[str, Any], part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, one line a file. Checks this part's share of the files.

    Raises:
        CheckpointUnreadableError: a file exists but cannot be read.
    """
    wrong: list[str] = []
    index: Index = {}

    def look(name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Wrong as error:
            wrong.append(f"{folder / name} is not what echelon writes: {error}")
        except CheckpointCorruptError as error:
            wrong.append(str(error).removesuffix("."))
        except FileNotFoundError:
            wrong.append(f"{folder / name} is missing")
        except OSError as error:
            raise CheckpointUnreadableError(f"{folder / name} is there but cannot be read: {error}.") from error

    look(INDEX, lambda: index.update(read_index(folder, manifest)))
    if wrong:
        return wrong
    by_file = _by_file(index)
    for name in sorted(manifest["files"].keys() - {INDEX})[part::parts]:
        look(name, functools.partial(_check_file, folder / name, by_file.get(name, {}), name))
    return wrong


def _check_file(path: Location, pieces: Mapping[str, tuple[str, list[int]]], name: str) -> None:
    with open_file(path) as (file, size):
        header = headers.read(file, size)
    if not TENSORS.fullmatch(name):
        state_of(header)
        return
    if header.entries.keys() != pieces.keys():
        odd = next(iter(header.entries.keys() ^ pieces.keys()))
        raise Wrong(f"{short(odd)} is {'in it and not in' if odd in header.entries else 'not in it but in'} {INDEX}")
    for key, (dtype, sizes) in pieces.items():
        if not header.entries[key].holds(dtype, sizes):
            raise Wrong(f"{short(key)} is {short(list(header.entries[key][:2]))}, in {INDEX} {short([dtype, sizes])}")


def read_index(folder: Location, manifest: Mapping[str, Any]) -> Index:
    """Read a checkpoint's index, after verifying its checksums.

    Raises:
        Wrong, CheckpointCorruptError: it is not what was written, or its pieces do not make up the tensors.
    """
    entry = manifest["files"][INDEX]
    with open_file(folder / INDEX) as (file, _):
        data = file.read(entry["size"] + 1)
    if len(data) != entry["size"] or checksums(data) != entry["crc32"]:
        raise CheckpointCorruptError(f"{folder / INDEX} is not what was written: its checksum differs.", path=str(folder / INDEX))
    index = strict.mapping(strict.loads(data), INDEX)
    for name, tensor in index.items():
        _check_tensor(name, tensor, manifest["files"])
    _by_file(index)
    return index


def _by_file(index: Index) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """File -> {name of a piece in it: (dtype, sizes)}."""
    pieces_of: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, tensor in index.items():
        for offsets, sizes, file in tensor["pieces"]:
            pieces, key = pieces_of.setdefault(file, {}), in_file(name, tuple(offsets))
            if key in pieces:
                raise Wrong(f"two pieces are called {short(key)}")
            pieces[key] = (tensor["dtype"], sizes)
    return pieces_of


def _check_tensor(name: str, tensor: Any, files: Mapping[str, Any]) -> None:
    shown = short(name)
    strict.mapping(tensor, shown, {"dtype", "shape", "pieces"})
    if strict.text(tensor["dtype"], f"the type of {shown}") not in SIZES:
        raise Wrong(f"{shown} is of type {short(tensor['dtype'])}, which this echelon does not know")
    shape = shape_of(tensor["shape"], f"the shape of {shown}")
    strict.whole(size_of_all(tensor["dtype"], shape), f"the size of {shown}")
    boxes = []
    for piece in strict.listing(tensor["pieces"], f"the pieces of {shown}"):
        offsets, sizes, file = strict.listing(piece, f"a piece of {shown}", 3)
        strict.text(file, f"the file of {shown}")
        if not TENSORS.fullmatch(file) or file not in files:
            raise Wrong(f"{shown} lies in {short(file)}, which the manifest does not list")
        shape_of(offsets, f"an offset of {shown}")
        shape_of(sizes, f"a size of {shown}")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise Wrong(f"a piece of {shown}, of shape {short(shape)}, is {short([offsets, sizes])}")
        if any(begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise Wrong(f"a piece of {shown}, of shape {short(shape)}, reaches beyond it: {short([offsets, sizes])}")
        boxes.append((offsets, sizes))
    if not _fill(shape, boxes):
        raise Wrong(f"the pieces of {shown}, of shape {short(shape)}, have a gap or overlap")


def _fill(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    """Whether boxes cover each element of a shape exactly once.

    The corners of a box, with alternating signs, are the derivative of its indicator function along all dimensions. So boxes fill
    the shape if and only if their corners add up to those of the shape. Linear in the number of boxes.
    """
    if 0 in shape:
        return bool(boxes) and all(0 in sizes for _, sizes in boxes)
    if any(0 in sizes for _, sizes in boxes):
        return False
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in boxes)]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes, sign in itertools.chain(((o, s, 1) for o, s in boxes), [([0] * len(shape), shape, -1)]):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            at = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[at] += sign if sum(ends) % 2 == 0 else -sign
    return not any(corners.values())


# --- nested states


def state_of(header: Header) -> dict[str, Any]:
    """The nested state in a file, as JSON that `plain.decode` can decode.

    Raises:
        Wrong: it is not a nested state, or its tensors are not those of the file.
    """
    if STATE_KEY not in header.metadata:
        raise Wrong("it holds no state")
    state = strict.mapping(strict.loads(header.metadata[STATE_KEY]), "the state")
    strict.check_depth(state)
    if "~" in state:
        raise Wrong("the state is not an object")
    missing = set(header.entries)
    _check_value(state, header, missing)
    if missing:
        raise Wrong(f"the tensor {short(min(missing))} belongs to no value")
    return state


def _check_value(value: Any, header: Header, missing: set[str], hashable: bool = False) -> None:
    """Check one encoded value, and those in it.

    Args:
        missing: names of tensors that no value has used yet.
        hashable: the value is in a set, or is a key.
    """
    if not isinstance(value, (list, dict)):
        return
    if isinstance(value, list) or "~" not in value:
        if hashable:
            raise Wrong(f"a key is {short(value)}")
        for each in value if isinstance(value, list) else value.values():
            _check_value(each, header, missing)
    else:
        tag = value["~"]
        if not isinstance(tag, str) or tag not in _CHECKS:
            raise Wrong(f"it holds a {short(tag)}, which this echelon does not know")
        if hashable and tag in _UNHASHABLE:
            raise Wrong(f"a key is a {tag}")
        _CHECKS[tag](value, header, missing, hashable)


def _tensor(value: dict[str, Any], header: Header, missing: set[str], _: bool) -> None:
    strict.mapping(value, "a tensor", {"~", "v", "dtype", "shape"})
    dtype, shape = strict.text(value["dtype"], "the type of a tensor"), shape_of(value["shape"], "the shape of a tensor")
    if dtype not in SIZES:
        raise Wrong(f"a tensor is of type {short(dtype)}, which this echelon does not know")
    name = _claimed(value["v"], missing)
    if not header.entries[name].holds(dtype, shape):
        raise Wrong(f"the tensor {short(name)} must be {short([dtype, shape])}, got {short(list(header.entries[name][:2]))}")


def _array(value: dict[str, Any], header: Header, missing: set[str], _: bool) -> None:
    strict.mapping(value, "an array", {"~", "v", "dtype", "shape"})
    match = _NUMPY.fullmatch(strict.text(value["dtype"], "the type of an array"))
    if match is None or int(match[2]) not in _NUMPY_SIZES[match[1]]:
        raise Wrong(f"an array is of type {short(value['dtype'])}")
    size = int(match[2])
    for dim in shape_of(value["shape"], "the shape of an array"):
        size *= dim
    if value["~"] == "number" and value["shape"]:
        raise Wrong(f"a number has the shape {short(value['shape'])}")
    name = _claimed(value["v"], missing)
    entry = header.entries[name]
    if entry.dtype != "torch.uint8" or entry.shape != [size or 1]:  # an empty array is written as one byte
        raise Wrong(f"the array {short(name)} of {size} bytes is {short(list(entry[:2]))}")


def _claimed(name: Any, missing: set[str]) -> str:
    if not isinstance(name, str) or name not in missing:
        raise Wrong(f"the tensor {short(name)} is missing, or is two values at once")
    missing.remove(name)
    return name


def _pairs(value: dict[str, Any], header: Header, missing: set[str], _: bool) -> None:
    strict.mapping(value, "a dict", {"~", "v"})
    for pair in strict.listing(value["v"], "a dict"):
        key, item = strict.listing(pair, "an item of a dict", 2)
        _check_value(key, header, missing, hashable=True)
        _check_value(item, header, missing)


def _many(value: dict[str, Any], header: Header, missing: set[str], hashable: bool) -> None:
    strict.mapping(value, "a tuple or set", {"~", "v"})
    for each in strict.listing(value["v"], "a tuple or set"):
        if value["~"] == "size":
            strict.whole(each, "a size")
        _check_value(each, header, missing, hashable or value["~"] in ("set", "frozenset"))


def _deque(value: dict[str, Any], header: Header, missing: set[str], _: bool) -> None:
    strict.mapping(value, "a deque", {"~", "v", "maxlen"})
    items = strict.listing(value["v"], "a deque")
    if value["maxlen"] is not None and strict.whole(value["maxlen"], "the length of a deque") < len(items):
        raise Wrong(f"a deque of at most {value['maxlen']} values has {len(items)}")
    for each in items:
        _check_value(each, header, missing)


def _defaultdict(value: dict[str, Any], header: Header, missing: set[str], _: bool) -> None:
    strict.mapping(value, "a defaultdict", {"~", "v", "factory"})
    if strict.text(value["factory"], "what a defaultdict begins with") not in _FACTORIES:
        raise Wrong(f"a defaultdict begins with {short(value['factory'])}, which this echelon does not know")
    inner = value["v"]
    if not isinstance(inner, dict) or inner.get("~", "dict") != "dict":
        raise Wrong(f"a defaultdict holds {short(inner)}")
    _check_value(inner, header, missing)


def _texts(value: dict[str, Any], *_: Any) -> None:
    strict.mapping(value, "a value", {"~", "v"})
    inner = strict.text(value["v"], "a value")
    if value["~"] == "dtype" and f"torch.{inner}" not in SIZES.keys() | OTHERS:
        raise Wrong(f"a type is {short(inner)}, which this echelon does not know")
    if value["~"] == "device" and not _DEVICE.fullmatch(inner):
        raise Wrong(f"a device is {short(inner)}")
    if value["~"] == "bytes":
        try:
            base64.b64decode(inner, validate=True)
        except ValueError as error:
            raise Wrong(f"bytes: {error}") from None


def _complex(value: dict[str, Any], *_: Any) -> None:
    strict.mapping(value, "a complex number", {"~", "v"})
    if not all(isinstance(n, float) for n in strict.listing(value["v"], "a complex number", 2)):
        raise Wrong(f"a complex number is {short(value['v'])}")


_CHECKS: dict[str, Callable[[dict[str, Any], Header, set[str], bool], None]] = {
    "tensor": _tensor,
    **dict.fromkeys(("array", "number"), _array),
    **dict.fromkeys(("dict", "ordered", "counter"), _pairs),
    **dict.fromkeys(("tuple", "set", "frozenset", "size"), _many),
    "deque": _deque,
    "defaultdict": _defaultdict,
    **dict.fromkeys(("bytes", "dtype", "device"), _texts),
    "complex": _complex,
}
_UNHASHABLE: Iterable[str] = {"array", "dict", "ordered", "counter", "set", "deque", "defaultdict"}
_FACTORIES = {"None", "bool", "int", "float", "str", "list", "tuple", "dict", "set"}
