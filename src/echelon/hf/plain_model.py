"""Rebuild a model of transformers, with or without PEFT, from its configuration, to write or merge it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.common.errors import CheckpointOptionError

__all__ = ["can_be_built", "of_adapters", "plain_model"]


def of_adapters(module: Any, stand_ins: Mapping[str, torch.Tensor]) -> set[str] | None:
    """The names of the weights that PEFT writes: without the base model's. None for a model without adapters.

    Args:
        stand_ins: meta tensors for all weights, by name.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return None
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    chosen: set[str] = set()
    for adapter in module.peft_config:
        for value in peft.get_peft_model_state_dict(module, state_dict=dict(stand_ins), adapter_name=adapter).values():
            if id(value) not in names:
                return set(stand_ins)  # PEFT computes new tensors: it may need all weights
            chosen.add(names[id(value)])
    return chosen


def can_be_built(module: nn.Module) -> bool:
    """Whether `plain_model` can rebuild the module."""
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is not None and isinstance(module, peft.PeftModel):
        module = module.get_base_model()
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


@torch.no_grad()
def plain_model(module: Any, state: Mapping[str, torch.Tensor], *, is_cut: bool) -> Any:
    """Rebuild the model with its library from its configuration, unsharded and whole, with these weights.

    Args:
        module: the model, with its authors' classes.
        state: all weights; unneeded ones are on the meta device.
        is_cut: whether the model is cut into pipeline stages.
    Raises:
        UsageError: the rebuilt model has other weights than `state`.
    """
    peft = sys.modules.get("peft")
    adapted = peft is not None and isinstance(module, peft.PeftModel)
    base = module.get_base_model() if adapted else module
    kind = type(base)
    with torch.device("meta"):
        plain = kind(copy.deepcopy(base.config))
        made = _adapted(plain, module) if adapted else plain
    given = made.load_state_dict({name: t.requires_grad_(False) for name, t in state.items()}, strict=False, assign=True)
    if given.missing_keys or given.unexpected_keys:
        adapters = " with these adapters" if adapted else ""
        remedy = " Write the adapter (merged=False); PEFT merges it." if adapted and not is_cut else ""
        raise CheckpointOptionError(
            f"a plain {kind.__name__}{adapters} has other weights than the trained one: "
            f"{', '.join([*given.missing_keys, *given.unexpected_keys][:3])}.{remedy}"
        )
    if hasattr(plain, "tie_weights"):
        plain.tie_weights()
    if getattr(base, "generation_config", None) is not None:
        plain.generation_config = base.generation_config
    if adapted:
        made.set_adapter(module.active_adapters if len(module.peft_config) > 1 else next(iter(module.peft_config)))
        made.peft_config.update(copy.deepcopy(module.peft_config))
    return made


def _adapted(plain: nn.Module, module: Any) -> Any:
    """PEFT's model around the rebuilt one, with the adapters of the trained one."""
    configs = copy.deepcopy(module.peft_config)
    for config in configs.values():
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # the values come from `state`
    (first, config), *others = configs.items()
    made = type(module)(plain, config, adapter_name=first)
    for name, config in others:
        made.add_adapter(name, config)
    return made
