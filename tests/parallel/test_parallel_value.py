"""`Layout`: one value for every direction of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon as ech
from echelon.common.errors import LayoutError, UsageError
from echelon.parallel import LAYOUTS, resolve
from echelon.parallel.layouts import in_words
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.units import Regression

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


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"ep": -1}, {"cp": -2}, {"pp": 1.5}, {"dp_shard": "2"}])
def test_sizes_are_whole_numbers(sizes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ech.Layout(**sizes).dims(4)


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
