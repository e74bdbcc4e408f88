"""Layers of experts divided over all ranks, written by hand with torch alone. bench/strategies.py compares `ep` with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _by_hand import ByHand, make_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import echelon as ech

RATE = 0.001  # of the biases that balance the experts: echelon's default


class Exchanged(torch.autograd.Function):
    """`sent[i]` rows go to rank i, `received[i]` come from it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.parts = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Exchanged.apply(grads[0], *ctx.parts), None, None


class DividedMoE(nn.Module):
    """This rank's part of the experts of an echelon.nn.MoE with GroupedExperts, under the same names."""

    def __init__(self, layer: ech.nn.MoE) -> None:
        super().__init__()
        self.router, self.experts = nn.Module(), nn.Module()
        self.router.gate = layer.router.gate
        self.k, self.count = layer.router.top_k, layer.router.num_experts
        for name, stack in layer.experts.named_parameters():
            part = stack.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            self.experts.register_parameter(name, nn.Parameter(part))
        self.register_buffer("bias", torch.zeros(self.count))
        self.counted = torch.zeros(self.count, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, ranks = x.flatten(0, 1), dist.get_world_size()
        p = F.linear(tokens, self.router.gate.weight).softmax(-1)
        chosen = (p.detach() + self.bias).topk(self.k).indices.sort(-1).values
        weights = p.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        self.counted += counts
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        arriving = arriving.view(ranks, -1)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        mine = Exchanged.apply(tokens[order // self.k], sent, received)
        experts = torch.arange(arriving.shape[1]).repeat(ranks).repeat_interleave(arriving.flatten())
        by_expert = experts.argsort(stable=True)
        rows, ends = mine[by_expert], arriving.sum(0).cumsum(0).to(torch.int32)
        w1, w2, w3 = self.experts.w1, self.experts.w2, self.experts.w3
        hidden = F.silu(F.grouped_mm(rows, w1.mT, offs=ends)) * F.grouped_mm(rows, w3.mT, offs=ends)
        done = F.grouped_mm(hidden, w2.mT, offs=ends)
        back = Exchanged.apply(torch.empty_like(done).index_copy(0, by_expert, done), received, sent)
        made = torch.empty_like(back).index_copy(0, order, back).view(len(tokens), self.k, -1)
        return (made * weights[..., None]).sum(1).view_as(x)


class ExpertsByHand(ByHand):
    """`fully_shard` on all but the experts, one gradient norm over both, and updates of the routers' biases."""

    def __init__(self, model: nn.Module, clip: float | None) -> None:
        for block in model.blocks:
            block.moe = DividedMoE(block.moe)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.experts = {p for block in model.blocks for p in block.moe.experts.parameters()}
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, ignored_params=self.experts)
        self.module, self.clip = model, clip
        self.optimizer = make_optimizer(model)

    def train(self, batches: list[Any]) -> None:
        for inputs, targets in batches:
            F.cross_entropy(self.module(inputs).flatten(0, 1), targets.flatten()).backward()
            for p in self.experts:
                assert p.grad is not None
                p.grad /= dist.get_world_size()  # it is the sum over all ranks' losses
            grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in self.module.parameters()]
            norm = nn.utils.get_total_norm(grads) ** 2
            dist.all_reduce(norm)
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm.sqrt() + 1e-6), max=1.0))
            self.optimizer.step()
            self._balance()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _balance(self) -> None:
        layers = [block.moe for block in self.module.blocks]
        counts = torch.stack([layer.counted for layer in layers])
        dist.all_reduce(counts)
        for layer, choices in zip(layers, counts, strict=True):
            layer.bias += RATE * torch.sign(choices.mean() - choices).float()
            layer.counted.zero_()
