"""What transformers and PEFT do with single layers: adapters around them, and layers left out at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.common.errors import TensorParallelError

__all__ = ["layer_drop", "with_adapters", "without_adapter"]


# Layers with LoRA adapters of PEFT around them, in a plan of tensor parallelism.


def without_adapter(layer: nn.Module) -> nn.Module:
    """What a LoRA adapter of PEFT is around; any other layer is itself."""
    return layer.get_submodule("base_layer") if hasattr(layer, "base_layer") and hasattr(layer, "lora_A") else layer


def with_adapters(module: nn.Module, styles: Mapping[str, Any]) -> dict[str, Any]:
    """The layers inside LoRA adapters in their place: the small layer beside the split side is split, too. Of a layer that PEFT
    trains in full (modules_to_save), the layer as it was and its trained copies are split alike.

    Raises:
        UsageError: an adapter that works with the values of the whole weight, or of an embedding.
    """
    inside_adapters: dict[str, Any] = {}
    for name, style in styles.items():
        layer = module.get_submodule(name)
        if hasattr(layer, "base_layer") and hasattr(layer, "adapter_layer_names") and not hasattr(layer, "lora_A"):
            adapter = type(layer).__module__.rpartition(".")[0].rpartition(".")[2]
            raise TensorParallelError(
                f"tensor-parallel plan: {name} has an adapter of PEFT ({adapter}) that is not split; of these only LoRA's is. "
                "Leave it out of the plan: Layout(plan=...) takes one; or train under 'fsdp'."
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
                f"tensor-parallel plan: {name} is an adapter of {kind}. Leave it out of the plan: Layout(plan=...) takes "
                "one; or train under 'fsdp'."
            )
        side = "lora_B" if style.startswith("colwise") else "lora_A"
        inside_adapters[f"{name}.base_layer"] = style
        inside_adapters |= {f"{name}.{side}.{adapter}": style for adapter, _ in layer.get_submodule(side).named_children()}
    return inside_adapters


# Models that leave out layers at random while they train (LayerDrop), as transformers has them for speech and BART.

_NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def layer_drop(module: nn.Module) -> tuple[str, float] | None:
    """The option by which a part of the module leaves out layers at random, and how often; None where none does."""
    for part in module.modules():
        for name in _NAMES:
            for owner in (part, getattr(part, "config", None)):
                often = getattr(owner, name, 0)
                if isinstance(often, (int, float)) and often > 0:
                    return name, often
    return None
