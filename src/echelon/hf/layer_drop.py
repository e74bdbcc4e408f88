"""Models that leave out layers at random while they train (LayerDrop), as transformers has them for speech and BART."""

from __future__ import annotations

from torch import nn

__all__ = ["layer_drop"]

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
