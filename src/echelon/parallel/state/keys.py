"""How an optimizer's state is keyed: "state.<parameter>.<what>" and "param_groups.<parameter>.<option>"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from echelon.common.errors import CheckpointMismatchError

__all__ = ["Saved", "by_parameter", "known", "leaves", "mine", "nested", "options", "tensor_options"]

# (dtype, shape) of a checkpoint's tensors by name.
Saved = Mapping[str, tuple[torch.dtype, list[int]]]

# Implementation flags, not hyperparameters: the script chooses them to suit its machine and layout, so they are not restored.
HOW = {"foreach", "fused", "capturable", "differentiable"}


def leaves(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A flattened state, keyed by path."""
    values: dict[str, Any] = {}
    for key, value in state.items():
        values |= leaves(f"{prefix}.{key}", value) if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return values


def nested(prefix: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, last = path.removeprefix(f"{prefix}.").split(".")
        inner = made
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return made


def known(keys: Iterable[str]) -> set[str]:
    """The parameters whose options are among the keys: all parameters of the saved optimizer."""
    return {k.removeprefix("param_groups.").rpartition(".")[0] for k in keys if k.startswith("param_groups.")}


def tensor_options(me: str, saved: Saved) -> dict[str, torch.Tensor]:
    """Empty tensors for options that were saved as tensors, such as a learning rate on a GPU."""
    kinds = mine(me, saved).items()
    return {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in kinds if key.startswith("param_groups.")}


def mine(me: str, saved: Saved) -> Saved:
    """The tensors of the state with the name `me` in a checkpoint."""
    return {key.removeprefix(f"{me}."): kind for key, kind in saved.items() if key.startswith(f"{me}.")}


def by_parameter(keys: Iterable[str], names: Collection[str]) -> dict[str, list[str]]:
    """The keys of a state, "state.<parameter>.<what>", by parameter. Both parts may contain dots."""
    every, keys_of = set(names), dict[str, list[str]]()
    for key in keys:
        first, *parts = key.split(".")
        ends = range(len(parts) - 1, 0, -1) if first == "state" else ()
        name = next((n for end in ends if (n := ".".join(parts[:end])) in every), None)
        if name is not None:
            keys_of.setdefault(name, []).append(key)
    return keys_of


def options(group: Mapping[str, Any], names: list[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as its parameters were saved; the group's current ones if the checkpoint lacks them.

    Raises:
        CheckpointMismatchError: the parameters were saved in groups with different options.
    """
    options = {k: v for k, v in group.items() if k != "params"}
    prefixes = [f"param_groups.{name}." for name in names]
    if not prefixes:
        return options
    had = {k.removeprefix(prefixes[0]) for k in saved if k.startswith(prefixes[0])}
    for key in sorted(had - HOW):
        value = saved[prefixes[0] + key]
        for name, prefix in zip(names, prefixes, strict=True):
            if saved.get(prefix + key) != value:
                raise CheckpointMismatchError(
                    f"{names[0]} and {name} are in one parameter group, but were saved with different {key}: {value} and "
                    f"{saved.get(prefix + key)}. Group the parameters as the saved run did, or leave the optimizer out: "
                    "RestoreOptions(restore_optimizers=False)."
                )
        options[key] = value
    return options
