"""This rank's part of the parameters as a state dict, back, and many ranks' parts as one whole.

Keys and forms are FairScale's. The elements that a rank holds are those that torch gives it, so parts are loaded on as many ranks
as have saved them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import Piece, forget_whole, length, pieces, plain, shared_names

__all__ = ["consolidated", "load_local_state", "local_metadata", "local_state", "padding"]

_FLAT = "flat_param_0"


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` of a module returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def local_state(module: TorchFSDP, prefix: str = "") -> dict[str, torch.Tensor]:
    """This rank's elements, by wrapper or by parameter, and the buffers."""
    found: dict[str, torch.Tensor] = {}
    for path, wrapper in _wrappers(module):
        for key, held in _parts(wrapper).items():
            own = torch.cat([piece.values for piece in held])
            found[f"{prefix}{path}{key}"] = torch.cat([own, own.new_zeros(padding(wrapper, held))])
    # In mixed precision, buffers are low between forwards.
    low = bool(getattr(module, "mixed_precision", False))
    for name, buffer in _buffers(module):
        found[prefix + name] = buffer.detach().float() if low and buffer.is_floating_point() else buffer.detach()
    return found


@torch.no_grad()
def load_local_state(module: TorchFSDP, state: Mapping[str, torch.Tensor], strict: bool = True) -> IncompatibleKeys:
    """Take what `local_state` of a rank of this number, of as many ranks, gave.

    Raises:
        RuntimeError: a tensor of another size; or, if `strict`, keys that are missing or unexpected.
    """
    wanted: dict[str, list[torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    for path, wrapper in _wrappers(module):
        for key, held in _parts(wrapper).items():
            wanted[path + key] = [piece.values for piece in held]
            sizes[path + key] = sum(piece.parameter.numel() for piece in held) + padding(wrapper, held)
    wanted |= {name: [buffer] for name, buffer in _buffers(module)}
    missing, unexpected = [k for k in wanted if k not in state], [k for k in state if k not in wanted]
    errors = [f"size mismatch for {k}: {tuple(state[k].shape)}, not ({n},)" for k, n in sizes.items() if _other(state, k, n)]
    if strict:
        errors += [f"Missing key(s) in state_dict: {missing}"] * bool(missing)
        errors += [f"Unexpected key(s) in state_dict: {unexpected}"] * bool(unexpected)
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(errors))
    for key, tensors in wanted.items():
        if key in state:
            given = (
                state[key].split([t.numel() for t in tensors] + [sizes[key] - sum(map(len, tensors))])
                if key in sizes
                else [state[key]]
            )
            for tensor, values in zip(tensors, given, strict=False):  # what is left over is padding
                tensor.copy_(values)
    for _, wrapper in _wrappers(module):
        forget_whole(wrapper)
    return IncompatibleKeys(missing, unexpected)


def local_metadata(module: TorchFSDP) -> dict[str, Any]:
    """What `consolidated` must know about this rank's part."""
    rows = []
    for path, wrapper in _wrappers(module):
        parameters = {
            key: {
                "names": [piece.name for piece in held],
                "shapes": [piece.shape for piece in held],
                "numels": [piece.shape.numel() for piece in held],
                "padding": padding(wrapper, held),
            }
            for key, held in _parts(wrapper).items()
        }
        rows.append(
            {
                "fsdp_path": path.removesuffix("."),
                "params": parameters,
                "no_broadcast_optim_state": bool(getattr(wrapper, "no_broadcast_optim_state", False)),
                "shared_param_info": shared_names(wrapper),
            }
        )
    return {"param_metadata": rows, "buffer_names": [name for name, _ in _buffers(module)]}


def consolidated(
    weights: list[dict[str, torch.Tensor]], metadata: list[dict[str, Any]], with_buffers: bool, strict: bool
) -> dict[str, torch.Tensor]:
    """The state dict of the unwrapped module, from every rank's `local_state` and `local_metadata`; no process group is needed.

    Raises:
        ValueError: not as many weights as metadata, or none.
    """
    if len(weights) != len(metadata) or not weights:
        raise ValueError("Require metadata for each shard and non-empty shards")
    whole: dict[str, torch.Tensor] = {}
    for number, of_wrapper in enumerate(metadata[0]["param_metadata"]):
        path = f"{of_wrapper['fsdp_path']}." if of_wrapper["fsdp_path"] else ""
        alone = of_wrapper["no_broadcast_optim_state"]  # a group of one rank: its part is the whole
        for key, parameters in of_wrapper["params"].items():
            if path + key not in weights[0] and not strict:
                continue
            parts = []
            for state, each in list(zip(weights, metadata, strict=True))[: 1 if alone else None]:
                part = state[path + key].flatten()
                parts.append(part[: part.numel() - each["param_metadata"][number]["params"][key]["padding"]])
            tensors = torch.cat(parts).split(parameters["numels"])
            for name, shape, tensor in zip(parameters["names"], parameters["shapes"], tensors, strict=True):
                whole[path + name] = tensor.view(shape)
        for source, target in of_wrapper["shared_param_info"]:
            whole[path + target] = whole[path + source]
    if with_buffers:
        whole |= {name: weights[0][name] for name in metadata[0]["buffer_names"] if strict or name in weights[0]}
    return whole


def _wrappers(module: TorchFSDP) -> Iterator[tuple[str, TorchFSDP]]:
    """(path with a point at its end, wrapper) of this one and those in it."""
    for name, each in module.named_modules():
        if isinstance(each, TorchFSDP):
            yield f"{plain(name)}." if plain(name) else "", each


def _parts(wrapper: TorchFSDP) -> dict[str, list[Piece]]:
    """By key of the state dict: all of a wrapper's in one, or each by itself."""
    held = pieces(wrapper)
    if getattr(wrapper, "flatten_parameters", True):
        return {_FLAT: held} if held else {}
    return {piece.name: [piece] for piece in held}


def padding(wrapper: TorchFSDP, held: list[Piece]) -> int:
    """Ranks' parts of a flattened wrapper are of one size."""
    if not getattr(wrapper, "flatten_parameters", True):
        return 0
    return length(wrapper) - sum(piece.parameter.numel() for piece in held)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                yield plain(f"{path}.{name}" if path else name), buffer


def _other(state: Mapping[str, torch.Tensor], key: str, size: int) -> bool:
    return key in state and state[key].numel() != size
