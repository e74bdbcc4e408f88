"""float8: torchao computes the matrix products of a model's blocks in 8 bits; everything else is as in bf16.

torchao replaces nn.Linear by its own class, in place: parameters keep their names and stay float32. Layers outside of the
repeated blocks (embedding, head) compute in bf16, as is usual in float8 training at scale; so do layers whose sizes the
hardware's 8-bit products do not support.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from echelon.common.arguments import flags_of, several
from echelon.common.errors import PrecisionError, require
from echelon.parallel.names import names_of_each
from echelon.parallel.recipe.blocks import blocks_to_shard

if TYPE_CHECKING:
    from echelon.parallel.prepared import Prepared

__all__ = ["Float8", "convert", "scales_after_step"]

_MULTIPLE = 16  # rows and columns must be multiples of this in 8-bit products (torch's _scaled_mm)
_SHARDED = {"fsdp", "fsdp2", "hsdp", "zero2"}


@dataclass(frozen=True)
class Float8:
    """How `precision="float8"` computes. Options have torchao's and torchtitan's names.

    Args:
        recipe: "rowwise" has a scale for each row, which limits the harm of outliers; "tensorwise" has one for each tensor, is
            faster, and sharded weights can be gathered in 8 bits.
        filter_fqns: linear layers with one of these in their name stay bf16: `["wk", "blocks.0."]`.
        enable_fsdp_float8_all_gather: gather sharded weights in 8 bits, a quarter of float32's traffic. Only for "tensorwise".
        emulate: compute in float32 what 8 bits would give, on any device, slowly. Without it a GPU needs compute capability 9.0
            (8.9 for "tensorwise"), else torch raises.
    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """

    recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    filter_fqns: Sequence[str] = ()
    enable_fsdp_float8_all_gather: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        flags_of(self, kind=PrecisionError)
        require(self.recipe in ("rowwise", "tensorwise"), "recipe", "'rowwise' or 'tensorwise'", self.recipe, kind=PrecisionError)
        names = several(
            "filter_fqns", self.filter_fqns, "a list of parts of names", lambda name: isinstance(name, str), kind=PrecisionError
        )
        object.__setattr__(self, "filter_fqns", names)
        if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
            raise PrecisionError("enable_fsdp_float8_all_gather needs one scale for each tensor. Set recipe='tensorwise'.")


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise PrecisionError(
            f"precision 'float8' needs torchao, which cannot be imported ({error}). pip install 'echelon[float8]', or use "
            "precision='bf16'."
        ) from error


def convert(module: nn.Module, float8: Float8 | None, layout: str) -> None:
    """Make the chosen linear layers compute in 8 bits, in place, before the module is made parallel.

    Args:
        float8: None converts nothing.
        layout: name of the layout that will be applied.
    Raises:
        UsageError: no layer is chosen, or the layout is not supported.
    """
    if float8 is None:
        return
    torchao = _torchao()
    if layout == "tp" or "tp=" in layout:
        raise PrecisionError("precision 'float8' does not support layout 'tp' yet. Use 'fsdp', or precision='bf16'.")
    chosen = _chosen(module, float8)
    if not chosen:
        raise PrecisionError(
            f"precision 'float8' finds no suitable linear layer in {type(module).__name__}: in its repeated blocks, with sizes "
            f"that are multiples of {_MULTIPLE}, and not in filter_fqns. Use precision='bf16'."
        )
    config = replace(
        torchao.Float8LinearConfig.from_recipe_name(float8.recipe),
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather and layout in _SHARDED,
        emulate=float8.emulate,
    )
    torchao.convert_to_float8_training(module, config=config, module_filter_fn=lambda layer, name: name in chosen)


def _chosen(module: nn.Module, float8: Float8) -> set[str]:
    owners = names_of_each(module.named_parameters(remove_duplicate=False))
    blocks = [f"{name}." for name, _ in blocks_to_shard(module)]
    return {
        name
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear  # a subclass may compute something else
        and name
        and (not blocks or any(name.startswith(block) for block in blocks))
        and not any(part in name for part in float8.filter_fqns)
        and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
        and isinstance(layer.weight, nn.Parameter)
        and len(owners[layer.weight]) == 1
    }


def scales_after_step(prepared: Prepared[Any], float8: Float8 | None) -> None:
    """If weights are gathered in 8 bits: compute their scales after each update in one all-reduce instead of one per weight."""
    if float8 is not None and float8.enable_fsdp_float8_all_gather:
        compute = _torchao().precompute_float8_dynamic_scale_for_fsdp
        prepared._follow_step(lambda: compute(prepared.module))
