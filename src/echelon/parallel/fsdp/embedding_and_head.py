"""The large layers around a model's blocks, embedding and head: split one by one, so that the root does not gather them all step.

They are found by what they are and where they stand: an `nn.Embedding` outside the blocks; the last `nn.Linear` after them, with
the norm in front of it. One that is small, in bytes or beside a block, or that is tied, stays with the root.

The root's parameters can be read anywhere in its forward pass, as `x @ self.embedding.weight.T` does. So can these, outside of
their own layer's forward. An embedding is gathered then, and stays so until the backward pass, now and from then on. A head's
gradients are reduced when the backward pass leaves the norm, too early for a use that came before: it has a copy of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.parallel.patching import in_front_of, replace_class
from echelon.parallel.recipe.blocks import Blocks, without_shared
from echelon.parallel.shards import is_split

__all__ = ["edges_of", "keep_readable"]

# Of the largest block, and in bytes: less is not worth a collective, whose latency is as long as so much takes to send.
_WORTH, _WORTH_BYTES = 0.25, 1 << 20


def edges_of(module: nn.Module, blocks: Blocks) -> tuple[Blocks, Blocks]:
    """(embeddings, one unit each; norm and head, which are one unit together)."""
    if not blocks:
        return [], []
    inside = tuple(f"{name}." for name, _ in blocks)
    order = [(n, m) for n, m in module.named_modules() if f"{n}.".startswith(inside) or not any(True for _ in m.children())]
    last = max(i for i, (n, _) in enumerate(order) if f"{n}.".startswith(inside))
    least = _WORTH * max(_size(block) for _, block in blocks)
    outside = [(n, m) for n, m in order if not f"{n}.".startswith(inside)]
    embeddings: Blocks = [(n, m) for n, m in outside if type(m) is nn.Embedding and _is_large(m, least)]
    after = [(n, m) for n, m in order[last + 1 :] if _size(m)]
    heads = [i for i, (_, m) in enumerate(after) if type(m) is nn.Linear and _is_large(m, least)]
    head: Blocks = []
    if heads:
        at = heads[-1]
        norm = [pair for pair in after[max(at - 1, 0) : at] if all(p.dim() == 1 for p in pair[1].parameters())]
        head = [*norm, after[at]]
    embeddings, head = without_shared(module, embeddings)[0], without_shared(module, head)[0]
    return embeddings, head if any(type(m) is nn.Linear for _, m in head) else []


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_large(module: nn.Module, least: float) -> bool:
    return _size(module) >= least and sum(p.nbytes for p in module.parameters()) >= _WORTH_BYTES


class _Within:
    """Whether the root's forward pass is under way."""

    now = False

    def enter(self, root: nn.Module, args: Any) -> None:
        self.now = True

    def leave(self, root: nn.Module, args: Any, output: Any) -> None:
        self.now = False


class _GathersWhenRead:
    """In front of the class of a module that `fully_shard` has split."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        within, mesh = vars(self).get("_echelon_edge", (None, None))
        if within is None or not within.now or getattr(value, "device_mesh", None) is not mesh:
            return value
        if not isinstance(self, nn.Embedding):
            return _whole_copy(value)
        within.now = False  # torch reads the parameters, too
        try:
            self.set_reshard_after_forward(False)
            self.unshard()
        finally:
            within.now = True
        return super().__getattr__(name)  # type: ignore[misc]


def _whole_copy(parameter: Any) -> torch.Tensor:
    """Of a shard; its gradient is averaged over the ranks into the shard's."""
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    if parameter.requires_grad and "tp" in (mesh.mesh_dim_names or ()):
        raise LayoutError(
            "the weight of the model's last layer, which is split over tensor-parallel ranks, is read before the layer itself "
            "runs. Choose what is sharded one by one without it: Layout(fsdp=FSDPStrategy(blocks=[...]))."
        )
    whole: torch.Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def keep_readable(root: nn.Module, parts: list[nn.Module]) -> None:
    """Let the parameters of `parts`, which are split, be read in the root's forward pass outside of their own."""
    within = _Within()
    for part in parts:
        mesh = next((p.device_mesh for p in part.parameters() if is_split(p)), None)  # type: ignore[attr-defined]
        if mesh is None:
            continue
        kind = type(part)
        # torch finds a module's own class by its place among the bases: two are put in front of the two of fully_shard.
        replace_class(part, "embedding_and_head", in_front_of(kind, _GathersWhenRead, _orig_cls_mro_index=4))
        vars(part)["_echelon_edge"] = (within, mesh)
    if parts:
        root.register_forward_pre_hook(torch.compiler.disable(within.enter))  # after torch's, which looks at all parameters
        root.register_forward_hook(torch.compiler.disable(within.leave), always_call=True)
