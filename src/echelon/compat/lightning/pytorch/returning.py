"""What ranks have trained, back in the module of the process that started them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.common.errors import UsageError

__all__ = ["bring_back", "keeps"]

_LEFT = "weights.pt"


def bring_back(trainer: Any, module: Any, datamodule: Any, path: Path) -> None:
    """Load the weights at `path`. Layers that the ranks made in `configure_model` or `setup` are made here by the same hooks.

    Raises:
        UsageError: the module is still another one; names the file, which then stays, so that the training is not lost.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    hooks = [] if datamodule is None else [lambda: datamodule.setup("fit")]  # in the order of the ranks
    module.trainer = trainer
    try:
        for hook in (*hooks, lambda: module.setup("fit"), module.configure_model):
            if not _differs(module, saved):
                break
            hook()
        module.load_state_dict(saved)
    except Exception as error:
        left = path.rename(path.with_name(_LEFT))
        raise UsageError(
            f"{type(module).__name__} has been trained, but here it has not the layers that its ranks had ({error}). Their "
            f"weights are in {left}: torch.load gives a state_dict. Make all layers in __init__ or configure_model; or start the "
            "script by `echelon run`, whose ranks keep their module."
        ) from error


def keeps(folder: Path) -> bool:
    """Whether somebody was told to look into this folder."""
    return (folder / _LEFT).exists()


def _differs(module: nn.Module, saved: dict[str, Any]) -> bool:
    return module.state_dict().keys() != saved.keys()
