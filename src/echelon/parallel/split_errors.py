"""What torch says when code meets parts of parameters or of features where it expects the whole, in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from echelon.contracts.errors import UsageError
from echelon.parallel.names import class_name
from echelon.parallel.tensor_layers import shared_axis, split_outputs

__all__ = ["explained"]

# What torch says of a part of the features where all are expected.
_SHAPES = ("shapes cannot be multiplied", "must match the size of tensor", "is invalid for input of size")


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Around passes of a module that is split over ranks.

    Raises:
        UsageError: in the place of torch's RuntimeError, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        if (said := _meaning(module, str(error))) is None:
            raise
        raise UsageError(f"{said} torch says: {error}") from error


def _meaning(module: nn.Module, text: str) -> str | None:
    name = class_name(module)
    if "mixed torch.Tensor and DTensor" in text:
        return (
            f"the loss must come from a call of {name} itself: its parameters are split over the ranks, and are put together in "
            "its forward only, not for a method or a part that is called directly. Let forward do it, with an argument that says "
            "what; or train under 'ddp' or 'zero1'."
        )
    if "setStorage" in text and "storage of size 0" in text:
        return (
            f"a gradient of {name}'s gradient (create_graph=True), as of a penalty on gradients, needs whole parameters after "
            "the backward pass that has given them back. Train under 'ddp' or 'zero1'."
        )
    if "Sparse" in text and "backend" in text:
        return (
            f"{name} has gradients that are sparse tensors, which cannot be split over the ranks. Make its embeddings with "
            "sparse=False, or train under 'ddp'."
        )
    if shared_axis(module) is not None and any(each in text for each in _SHAPES):
        parts = split_outputs(module)
        such = f", such as {parts[-1]}," if parts else ""
        return (
            f"tensor parallelism: code of {name} takes all features, and gets a rank's part of them, or the reverse. After a "
            f"layer that is 'colwise' in the plan{such} comes a 'rowwise' one, with functions of single features between them; "
            "'colwise_gather' gives all features, and 'rowwise_split' takes all."
        )
    return None
