"""Pipelines: GPT's stages written by hand for torch's 1F1B, and a model of sleeping blocks, whose steps are timed in sleeps."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _by_hand import GPT, ByHand, make_optimizer
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import echelon as ech
from echelon.parallel.pipeline.schedules import SCHEDULES


class Front(nn.Module):
    def __init__(self, gpt: GPT, blocks: Any) -> None:
        super().__init__()
        self.bytes, self.positions, self.blocks = gpt.bytes, gpt.positions, nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return h


class Between(nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class Back(nn.Module):
    def __init__(self, gpt: GPT, blocks: Any) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), gpt.norm, gpt.head

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PipelineByHand(ByHand):
    """One stage per rank with an equal part of the blocks, one gradient norm over all stages; the last stage sends the losses."""

    def __init__(self, model: GPT, accumulation: int, clip: float | None) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        each = len(model.blocks) // size
        blocks = list(model.blocks)[rank * each : (rank + 1) * each]
        stage: nn.Module = Front(model, blocks) if rank == 0 else Between(blocks)
        self.module = Back(model, blocks) if rank == size - 1 else stage
        self.optimizer = make_optimizer(self.module)
        self.accumulation, self.clip = accumulation, clip
        self.first, self.last = rank == 0, rank == size - 1
        stage_of_torch = PipelineStage(self.module, rank, size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage_of_torch, accumulation, loss_fn=loss)

    def train(self, batches: list[Any]) -> None:
        for start in range(0, len(batches), self.accumulation):
            inputs, targets = (torch.cat(part) for part in zip(*batches[start : start + self.accumulation], strict=True))
            losses: list[torch.Tensor] = []
            told = {"target": targets, "losses": losses} if self.last else {}
            self.schedule.step(*([inputs] if self.first else []), **told, return_outputs=False)
            mean = torch.stack(losses).mean().detach() if self.last else torch.empty(())
            dist.broadcast(mean, src=dist.get_world_size() - 1)
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(grads) ** 2
            dist.all_reduce(norm)
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.clip or float("inf"), norm.sqrt())
            self.optimizer.step()
            self.optimizer.zero_grad()


# --- sleeping blocks


class Slept(torch.autograd.Function):
    """Sleeps in the forward pass, and in the backward pass, which is that of the input or that of the weight.

    Attributes:
        busy_s: seconds that this process has slept in passes. A sleep takes up to 2% longer than asked; that is not idle time.
    """

    busy_s = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        _sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _sleep(ctx.backward_s)
        return gradients[0], None, None


def _sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    Slept.busy_s += time.perf_counter() - began if seconds else 0.0


class SleepingBlock(nn.Module):
    """Sleeps `sleep_s` in the forward pass, in the backward pass of the input, and in that of the weight."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s, self.weight = sleep_s, nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Slept.apply(self.weight.weight, 0.0, self.sleep_s)
        return Slept.apply(x, self.sleep_s, self.sleep_s) * weight


class Sleepers(nn.Module):
    def __init__(self, depth: int, sleep_s: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(sleep_s) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sleeping(ech.AutoUnit[Any]):
    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        out = self.module(data)
        return out.mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), lr=0.0), None


def slept(schedule: str, per_rank: int, micro_batches: int, sleep_s: float, steps: int) -> list[Any]:
    """For each update of a pipeline over all ranks: its seconds, from the end of the previous update, and how many of these were
    slept in passes. The first two updates are not counted.
    """
    torch.set_num_threads(1)
    ech.init_from_env()
    ranks = dist.get_world_size()
    unit = Sleeping(
        module=Sleepers(ranks * per_rank, sleep_s / per_rank),
        layout=ech.Layout(pp=ranks, schedule=schedule),
        accumulate=micro_batches,
    )
    ends: list[tuple[float, float]] = []
    unit.configure()
    unit.optimizer.register_step_post_hook(lambda *_: ends.append((time.perf_counter(), Slept.busy_s)))
    ech.train(unit, [torch.ones(1, 1)] * (micro_batches * (steps + 2)), max_epochs=1)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(ends[1:])]


def slept_by_hand(schedule: str, per_rank: int, micro_batches: int, sleep_s: float, steps: int) -> list[Any]:
    """The same with torch's schedule alone; each stage is one sleeping block."""
    torch.set_num_threads(1)
    ech.init_from_env()
    x, seconds = torch.ones(micro_batches, 1), []
    made, stages = _schedule_of_torch(schedule, per_rank, micro_batches, sleep_s)
    for _ in range(steps + 2):
        dist.barrier()
        began, busy = time.perf_counter(), Slept.busy_s
        given = {"target": x} if any(stage.is_last for stage in stages) else {}
        made.step(*([x] if any(stage.is_first for stage in stages) else []), **given, return_outputs=False)
        dist.barrier()
        seconds.append((time.perf_counter() - began, Slept.busy_s - busy))
    return seconds[2:]


def _schedule_of_torch(schedule: str, per_rank: int, micro_batches: int, sleep_s: float) -> tuple[Any, list[PipelineStage]]:
    rank, ranks, kind = dist.get_rank(), dist.get_world_size(), SCHEDULES[schedule]
    count, own = ranks * per_rank, [rank, rank + ranks] if not kind.folded else [rank, 2 * ranks - 1 - rank]
    stages = [
        PipelineStage(
            SleepingBlock(sleep_s / per_rank),
            stage,
            count,
            torch.device("cpu"),
            input_args=torch.empty(1, 1, device="meta", requires_grad=stage > 0),
            output_args=torch.empty(1, 1, device="meta", requires_grad=True),
        )
        for stage in own[:per_rank]
    ]
    make = getattr(pipelining, kind.torch)
    made = make(stages[0] if schedule in ("gpipe", "1f1b") else stages, micro_batches, loss_fn=lambda x, _: x.mean())
    return made, stages


def order_takes(schedule: str, per_rank: int, micro_batches: int) -> float:
    """The time of a step in torch's order, in units of a pass through all layers of a rank. All passes take equally long."""
    ech.init_from_env()
    order = _schedule_of_torch(schedule, per_rank, micro_batches, 0.0)[0].pipeline_order
    last = dist.get_world_size() * per_rank - 1
    waiting = {rank: [re.fullmatch(r"(\d+)([FIWB])(\d+)", str(each)) for each in acts if each] for rank, acts in order.items()}
    ends: dict[tuple[int, str, int], float] = {}
    now = dict.fromkeys(order, 0.0)
    while any(waiting.values()):
        before = len(ends)
        for rank, acts in waiting.items():
            while acts and acts[0]:
                stage, kind, number = int(acts[0][1]), acts[0][2], int(acts[0][3])
                needs = [(stage, "F", number)] if kind in "IB" else [(stage, "I", number)] if kind == "W" else []
                needs += [(stage - 1, "F", number)] if kind == "F" and stage else []
                needs += [(stage + 1, "I", number)] if kind in "IB" and stage < last else []
                if any(each not in ends for each in needs):
                    break
                now[rank] = max([now[rank], *(ends[each] for each in needs)]) + (2 if kind == "B" else 1) / per_rank
                ends[stage, "I" if kind == "B" else kind, number] = now[rank]
                acts.pop(0)
        assert len(ends) > before, "an order that cannot be played"
    return max(now.values())
