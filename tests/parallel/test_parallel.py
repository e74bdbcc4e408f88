"""Layouts as users meet them: which blocks are sharded, modules prepared for one's own unit, options, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import LayoutError, UsageError
from echelon.parallel import LAYOUTS, resolve
from echelon.parallel.layouts import in_words
from echelon.parallel.recipe.blocks import blocks_to_shard
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks
from tests.kit.averaged import Averaged
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import KINDS, Hooks, Regression

pytestmark = pytest.mark.standing_ranks


def test_repeated_blocks_are_sharded_and_single_layers_are_not() -> None:
    assert [name for name, _ in blocks_to_shard(net())] == ["blocks.0", "blocks.1"]
    assert blocks_to_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # layers alone: a collective each is dear
    nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([net(), net()]))
    assert [name for name, _ in blocks_to_shard(nested)] == ["1.0", "1.1"]  # outermost
    lists = nn.ModuleList(nn.ModuleList(net().blocks) for _ in range(2))  # stages of blocks, as in a funnel
    assert [name for name, _ in blocks_to_shard(lists)] == ["0.0", "0.1", "1.0", "1.1"]
    pairs = [nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), net(), nn.Linear(2, 2)]) for _ in range(2)]  # a layer is a list
    assert [name for name, _ in blocks_to_shard(nn.ModuleList(pairs))] == ["0.0", "0.1", "1.0", "1.1"]
    layer = net()
    twice = nn.ModuleList(nn.ModuleList([layer, net()]) for _ in range(2))
    assert [name for name, _ in blocks_to_shard(twice)] == ["0.0", "0.1", "1.1"]


def _chosen_blocks(blocks: Any) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    unit = Regression(layout=ech.FSDPStrategy(blocks=blocks))
    return [name for name, m in unit.module.named_modules() if isinstance(m, FSDPModule)]


def test_blocks_can_be_chosen_by_name_and_class(ranks: Ranks) -> None:
    assert ranks(2, _chosen_blocks, ["blocks.1", "last"])[0] == ["", "blocks.1", "last"]
    assert ranks(2, _chosen_blocks, [nn.Sequential])[0] == ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ech.FSDPStrategy(blocks=["blocks.7"]), "no submodule named 'blocks.7'"),
        (
            ech.FSDPStrategy(reshard_after_forward={"block.*": False}),
            "reshard_after_forward has 'block.*', which matches no module that is sharded one by one: blocks.0, blocks.1.",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(ranks: Ranks, layout: Any, message: str) -> None:
    assert all(message in text for text in ranks(2, lambda: refusal(Regression, layout=layout)))


# Of each way, what is trained after so many micro-batches, in windows of two: from one of its keys to the next.
FREEZING: dict[str, dict[int, list[str]]] = {
    # Gradual unfreezing, as in fine-tuning.
    "all but one": {0: ["blocks", "last"], 4: ["first", "blocks", "last"]},
    "all": {0: ["last"], 4: ["first", "blocks", "last"]},
    # In the middle of a window, at its end, and trained again.
    "later": {
        0: ["first", "blocks", "last"],
        2: ["first", "blocks.0", "last"],
        3: ["blocks", "last"],
        6: ["first", "blocks", "last"],
    },
}


def _freezes(module: nn.Module, way: str, step: int) -> None:
    for name, parameter in module.named_parameters() if step in FREEZING[way] else ():
        parameter.requires_grad_(name.startswith(tuple(FREEZING[way][step])))


def _trained_in_part(layout: str, way: str, hook: str) -> dict[str, torch.Tensor]:
    module = net()
    _freezes(module, way, 0)
    unit = Regression(module=module, layout=layout, accumulate=2)
    freezes: Any = {hook: lambda _, u: _freezes(u.prepared.unwrapped, way, u.train_progress.num_steps_completed)}
    evaluations = {"eval": [batch(4, 100)], "eval_every": 2} if "eval" in hook else {}
    data = [batch(4, 10 * i + dist.get_rank()) for i in range(8)]
    ech.train(unit, data, max_epochs=1, callbacks=[Hooks(**freezes)], **evaluations)
    return whole(unit.prepared)


def _trained_in_a_loop(layout: str, way: str, _: str) -> dict[str, torch.Tensor]:
    """As `_trained_in_part`, with evaluations that the loop makes itself, after each of which layers are frozen and unfrozen."""
    module = net()
    _freezes(module, way, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    data = [batch(4, 10 * i + rank) for i in range(8) for rank in range(2)]
    whole_batches = TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True)))
    model, optimizer, loader = ech.prepare(
        module, optimizer, DataLoader(whole_batches, batch_size=8), layout=layout, accumulate=2
    )
    for step, (x, y) in enumerate(loader):
        with ech.window(model) as window:
            window.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        _freezes(model, way, step + 1)
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("ddp", "all but one"),
        ("ddp", "all"),
        ("fsdp", "all but one"),
        ("zero1", "all but one"),
        *((each, "later") for each in KINDS),
    ],
)
def test_layers_that_are_frozen_and_unfrozen_during_training_are_averaged_while_they_train(
    ranks: Ranks, layout: str, way: str
) -> None:
    module = net()
    _freezes(module, way, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        (x, y), (more_x, more_y) = batch(4, 10 * step), batch(4, 10 * step + 1)
        (nn.functional.mse_loss(module(torch.cat([x, more_x])), torch.cat([y, more_y])) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        _freezes(module, way, step + 1)
    runs: list[tuple[Any, str]] = [(_trained_in_part, "on_train_step_end")]
    if (layout, way) == ("fsdp", "all but one"):
        runs += [(_trained_in_part, "on_eval_epoch_end"), (_trained_in_a_loop, "")]
    for run, hook in runs:
        for trained in ranks(2, run, layout, way, hook):
            assert largest_difference(trained, whole(module)) < 1e-12


# --- a layout of the future is one file and one line: what it needs is in the seam

ROWS_OF_RANKS = [(4, 3), (2, 4), (3, 5), (5, 3), (4, 1)]  # of each micro-batch, by rank; the last of three updates is short


def _averaged() -> tuple[dict[str, torch.Tensor], list[float], float]:
    LAYOUTS["averaged"] = Averaged  # the one line
    unit, rank = Regression(layout="averaged", accumulate=2, clip_grad_norm=0.3), dist.get_rank()
    ech.train(unit, [batch(rows[rank], 10 * i + rank) for i, rows in enumerate(ROWS_OF_RANKS)], max_epochs=1)
    norms = list(unit.norms)
    ech.evaluate(unit, [batch(4 - rank, 100 + rank)])
    return whole(unit.module), norms, unit.eval_loss


def test_a_layout_of_ones_own_trains_and_evaluates_as_one_process_does(ranks: Ranks) -> None:
    made = [[batch(rows, 10 * i + rank) for rank, rows in enumerate(both)] for i, both in enumerate(ROWS_OF_RANKS)]
    windows = [[each for micro in made[start : start + 2] for each in micro] for start in (0, 2, 4)]
    want, _, norms = plain_training(windows, clip=0.3)
    alone = Regression()
    alone.module.load_state_dict(want)
    ech.evaluate(alone, [batch(4, 100), batch(3, 101)])
    for got, seen, evaluated in ranks(2, _averaged):
        assert largest_difference(got, want) < 1e-12 and seen == pytest.approx(norms, rel=1e-11)
        assert evaluated == pytest.approx(alone.eval_loss, rel=1e-11)


# --- `Layout`: one value for every direction of parallelism


SIZES = st.integers(1, 4)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("dp_shard=2,tp=4", {"dp_shard": 2, "tp": 4}),
        (" pp=2 , dp_replicate = -1", {"pp": 2, "dp_replicate": -1}),
        ("cp=2,ep=2", {"cp": 2, "ep": 2}),
        ("dp_shard=2+cp=2", {"dp_shard": 2, "cp": 2}),
        *((axis, {axis: -1}) for axis in ("pp", "dp_replicate", "dp_shard", "cp")),  # alone it takes all ranks
    ],
)
def test_text_names_the_axes(text: str, want: dict[str, int]) -> None:
    assert resolve(text) == ech.Layout(**want)
    assert "=" not in text or ech.Layout.parse(text) == ech.Layout(**want)


@pytest.mark.parametrize("text", ["dp_shard=2,tp", "dp=2", "tp=x", "tp=2,tp=2", "tp=2,", "=2", "tp=²", "fsdp,tp=2"])
def test_text_that_names_no_axis_is_refused(text: str) -> None:
    with refused(LayoutError):
        resolve(text)


WORDS_OF_OTHERS = {
    "noop": "none",
    "single_device": "none",
    "zero3": "fsdp",
    "fsdp2": "fsdp",
    "full_shard": "fsdp",
    "FULL_SHARD": "fsdp",
    "deepspeed_stage_3": "fsdp",
    "deepspeed_stage_2": "zero2",
    "shard_grad_op": "zero2",
    "deepspeed_stage_1": "zero1",
    "hybrid_shard": "hsdp",
    "ddp_spawn": "ddp",
    "no_shard": "ddp",
    "tp": "tp=-1",
    "dp_shard=2,tp=2": "dp_shard=2,tp=2",
}


@pytest.mark.parametrize(("word", "here"), WORDS_OF_OTHERS.items())
def test_words_of_other_libraries_are_one_of_ours(word: str, here: str) -> None:
    assert resolve(word) == resolve(here)
    assert in_words(resolve(word)) == here


def test_what_a_word_of_another_library_says_beside_the_layout_is_kept() -> None:
    assert resolve("ddp_find_unused_parameters_true") == ech.DDPStrategy(find_unused_parameters=True)
    assert resolve("ddp_spawn_find_unused_parameters_false") == resolve("ddp")


@pytest.mark.parametrize(("text", "near"), [("fdsp", "fsdp"), ("zero", "zero"), ("ddpp", "ddp"), ("horovod", "")])
def test_an_unknown_word_is_refused_with_those_there_are(text: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(text)
    assert f"layout must be one of {', '.join(map(repr, LAYOUTS))}" in str(caught.value)
    assert near in str(caught.value)


VALUES = [
    ech.Layout(dp_shard=2, tp=2),
    ech.Layout(pp=4),
    ech.Layout(dp_replicate=2, cp=2, ep=2),
    ech.DDPStrategy(),
    ech.FSDPStrategy(),
    ech.layouts.LocalSGDStrategy(),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_text_that_gives_it_back(value: Any) -> None:
    assert resolve(in_words(value)) == value


def test_older_keywords_are_understood_and_say_the_new_one() -> None:
    net = torch.nn.Linear(2, 1)
    with pytest.warns(DeprecationWarning, match=r"prepare_module\(strategy=\.\.\.\) is now layout="):
        ech.layouts.prepare_module(net, torch.device("cpu"), strategy="noop")
    with refused(UsageError):
        ech.layouts.prepare_module(net, torch.device("cpu"), strategy="noop", layout="none")
    with pytest.warns(DeprecationWarning, match=r"Trainer\(strategy=\.\.\.\) is now layout="):
        assert ech.Trainer(1, strategy="fsdp2").layout == ech.FSDPStrategy()
    with pytest.warns(DeprecationWarning, match=r"Parallel\(...\) is now Layout\(tp=2\)"):
        assert ech.Parallel(tp=2) == ech.Layout(tp=2)
    with pytest.warns(DeprecationWarning, match=r"TPStrategy\(...\) is now Layout\(tp=2, sequence_parallel=True\)"):
        assert ech.TPStrategy(size=2, sequence_parallel=True) == ech.Layout(tp=2, sequence_parallel=True)
    with pytest.warns(DeprecationWarning, match=r"ZeROStrategy\(...\) is now DDPStrategy\(shard_optimizer=True\)"):
        assert ech.ZeROStrategy(1) == resolve("zero1")
    with pytest.warns(DeprecationWarning, match=r"is now FSDPStrategy\(reshard_after_forward=False\)"):
        assert ech.layouts.ZeROStrategy(2) == resolve("zero2")
    with pytest.warns(DeprecationWarning, match=r"HSDPStrategy\(...\) is now Layout\(dp_replicate=2, fsdp=FSDPStrategy\(\)\)"):
        ech.layouts.HSDPStrategy(replicate_size=2)
    with pytest.raises(AttributeError, match=r"FSDP2Strategy is now echelon.compat.torchtnt.utils"):
        ech.FSDP2Strategy  # noqa: B018


class Leaving(torch.nn.Module):
    """Its second layer is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.step = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.first(x) if self.step % 2 else self.first(x) + self.second(x)


def _left_unused(layout: str) -> int:
    unit = Regression(module=Leaving().double(), layout=layout)
    ech.train(unit, [batch(4, i) for i in range(4)], max_epochs=1)
    return unit.train_progress.num_updates_completed


@pytest.mark.parametrize("layout", ["tp", "cp", "pp", "dp_shard"])
def test_axes_of_one_rank_take_models_that_leave_layers_unused(ranks: Ranks, layout: str) -> None:
    assert ranks(1, _left_unused, layout) == [4]


@pytest.mark.full
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_one_place_and_the_data_are_shared_once(pp: int, copies: int, shards: int, cp: int, tp: int) -> None:
    world = pp * copies * shards * cp * tp
    dims = ParallelDims.of(world, pp=pp, dp_replicate=copies, cp=cp, tp=tp)
    assert dims.dp_shard == shards and dims.size == world
    assert len({tuple(dims.place(rank).items()) for rank in range(world)}) == world
    speakers = [rank for rank in range(world) if dims.speaks(rank)]
    # one for each part of each share of the samples
    assert sorted((dims.dp_rank(r), dims.place(r)["cp"]) for r in speakers) == [
        (d, c) for d in range(dims.dp_size) for c in range(cp)
    ]
    neighbours = [dims.place(rank) for rank in range(tp)]  # a tensor-parallel group
    assert all({**place, "tp": 0} == neighbours[0] for place in neighbours)
