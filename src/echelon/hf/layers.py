"""Adapters of PEFT around layers, and layers that transformers leaves out at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.common.errors import TensorParallelError

__all__ = ["layer_drop", "with_adapters", "without_adapter"]


# Layers with LoRA adapters of PEFT, in a plan of tensor parallelism.


def without_adapter(layer: nn.Module) -> nn.Module:
    """The layer inside a LoRA adapter of PEFT; any other layer unchanged."""
    return layer.get_submodule("base_layer") if hasattr(layer, "base_layer") and hasattr(layer, "lora_A") else layer


def with_adapters(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """The styles with adapted layers replaced by the layers inside: the base layer, and the LoRA layer on its split side.

    For a layer that PEFT trains in full (modules_to_save), the original and its trained copies are split alike.

    Raises:
        UsageError: an adapter is not of LoRA, needs the whole weight (DoRA), or is on an embedding.
    """
    inside_adapters: dict[str, Any] = {}
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if hasattr(layer, "base_layer") and hasattr(layer, "adapter_layer_names") and not hasattr(layer, "lora_A"):
            adapter = type(layer).__module__.rpartition(".")[0].rpartition(".")[2]
            raise TensorParallelError(
                f"tensor-parallel plan: {name} has an adapter of PEFT ({adapter}) that cannot be split; only LoRA's can. "
                "Leave it out of the plan, which Layout(plan=...) takes; or train under 'fsdp'."
            )
        if isinstance(copies := getattr(layer, "modules_to_save", None), nn.ModuleDict) and hasattr(layer, "original_module"):
            inside = ["original_module", *(f"modules_to_save.{adapter}" for adapter in copies)]
            inside_adapters |= {f"{name}.{each}": style for each in inside}
            continue
        if without_adapter(layer) is layer or not isinstance(style, str):
            inside_adapters[name] = style
            continue
        magnitudes = list(getattr(layer, "lora_magnitude_vector", ()))
        if magnitudes or isinstance(without_adapter(layer), nn.Embedding):
            kind = "DoRA, which needs the whole weight" if magnitudes else "an Embedding"
            raise TensorParallelError(
                f"tensor-parallel plan: {name} is an adapter of {kind}. Leave it out of the plan, which Layout(plan=...) takes; "
                "or train under 'fsdp'."
            )
        side = "lora_B" if style.startswith("colwise") else "lora_A"
        inside_adapters[f"{name}.base_layer"] = style
        inside_adapters |= {f"{name}.{side}.{adapter}": style for adapter, _ in layer.get_submodule(side).named_children()}
    return inside_adapters


# Models that leave out layers at random in training (LayerDrop), such as transformers' speech models and BART.

_NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def layer_drop(module: nn.Module) -> tuple[str, float] | None:
    """The option that makes a part of the module leave out layers at random, and its probability; None if there is none."""
    for part in module.modules():
        for name in _NAMES:
            for owner in (part, getattr(part, "config", None)):
                often = getattr(owner, name, 0)
                if isinstance(often, (int, float)) and often > 0:
                    return name, often
    return None
