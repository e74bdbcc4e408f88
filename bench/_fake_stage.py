"""An update of one stage of a pipeline of fake ranks. The forms of the other stages' tensors are computed beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bench._fake import Step, Traced, fake_tensors, fake_world
from bench.gpu.llama import Size
from torch import nn
from torch.distributed.pipelining import PipelineStage

import echelon as ech
from echelon.parallel.parallelize import parallelize
from echelon.parallel.pipeline.pipeline import Learned, Pipeline
from echelon.parallel.pipeline.values import Form, Leaf, form_of
from echelon.parallel.prepared import MicroBatch
from echelon.parallel.recipe.activation import ActivationCheckpointParams
from echelon.parallel.recipe.recipe import Recipe

__all__ = ["trace_stage"]

CPU = torch.device("cpu")


def trace_stage(
    make: Callable[[Size], nn.Module],
    size: Size,
    ranks: int,
    layout: ech.Layout,
    stage: int,
    micro_batches: int,
    axes: Callable[[Any], dict[str, str]],
) -> tuple[Traced, list[str]]:
    """Trace the second update on the first rank of the stage (the first sets up). Also returns the names of the stage's units.

    Args:
        make: makes the model of a size.
        axes: maps the axes' sizes to the axis of each group, by torch's name of the group.
    """
    kinds = _kinds(make, size, ranks, layout)
    dims = layout.dims(ranks)
    rank = next(rank for rank in range(ranks) if dims.place(rank)["pp"] == stage)
    with fake_world(ranks, rank):
        with fake_tensors() as mode:
            model = make(size).eval()  # dropout draws a seed as a number, and fake tensors have no values
        prepared: Any = parallelize(model, layout, CPU, _recipe())
        step = Step(axes(dims))
        batch = tuple(torch.randint(0, size.vocabulary, (1, size.context)) for _ in range(2))
        window = [MicroBatch(batch, 1, number == micro_batches - 1) for number in range(micro_batches)]
        with fake_tensors(mode):
            optimizer = torch.optim.AdamW(prepared.module.parameters())
        names = [unit.name for unit in prepared.pipeline.cut.units if unit.stage == stage]

        def update(tracing: Any) -> None:
            prepared._is_checked = True  # no other rank exists whose loss could be compared
            with _told(prepared.pipeline, kinds), fake_tensors(mode), tracing:
                prepared.forward_backward_window(
                    window,
                    lambda each: (prepared.module(*each.data), None),
                    lambda loss, each: loss.backward() if loss.requires_grad else None,
                    outputs=False,
                )
                optimizer.step()
                optimizer.zero_grad()

        update(contextlib.nullcontext())
        step.keep(prepared.module.parameters(), *(state.values() for state in optimizer.state.values()))
        update(step)
    return step.traced, names


def _recipe() -> Recipe:
    return Recipe(ActivationCheckpointParams(), None, ech.layouts.Precision.of("bf16"))


def _kinds(make: Callable[[Size], nn.Module], size: Size, ranks: int, layout: ech.Layout) -> dict[str, Form]:
    """The forms of the outputs of a model's units, by the unit's name. Found with two blocks, without a pipeline."""
    found: dict[str, Form] = {}
    # Tensor parallelism does not change these forms.
    whole = dataclasses.replace(layout, pp=1, tp=1, dp_shard=-1)
    with fake_world(ranks):
        with fake_tensors() as mode:
            model = make(dataclasses.replace(size, depth=2))
        prepared: Any = parallelize(model, whole, CPU, _recipe())
        inner = prepared.unwrapped
        units = {"tokens": inner.tokens, "blocks": inner.blocks[0], "norm": inner.norm, "head": inner.head}
        for name, unit in units.items():
            unit.register_forward_hook(lambda unit, given, made, name=name: found.update({name: form_of(made)[0]}))
        batch = tuple(torch.randint(0, size.vocabulary, (1, size.context)) for _ in range(2))
        with prepared.accumulate(True), fake_tensors(mode):
            found["loss"] = form_of(prepared.module(*batch))[0]
    return found


@contextlib.contextmanager
def _told(pipeline: Pipeline, kinds: dict[str, Form]) -> Iterator[None]:
    """Context that provides what ranks learn from each other before the first update."""
    units = pipeline.cut.units
    forms = {f"{unit.name}:1": kinds[unit.name.partition(".")[0]] for unit in units}
    last = {unit.stage: f"{unit.name}:1" for unit in units}
    loss: Leaf = kinds["loss"].tensors[0]
    sent = [[last[stage]] for stage in range(pipeline.cut.count - 1)]
    learned = Learned(forms, sent, loss)

    def learn(signature: Any, *others: Any) -> None:
        pipeline._learned[signature] = learned

    yes = SimpleNamespace(item=lambda: 1)  # stages vote that they know all shapes
    with (
        mock.patch.object(pipeline, "_learn", learn),
        mock.patch.object(PipelineStage, "_warmup_forward_vote", lambda *args, **kwargs: yes),
        mock.patch.object(PipelineStage, "_warmup_backward_result", lambda *args, **kwargs: yes),
    ):
        yield
