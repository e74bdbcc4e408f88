"""The judge alone, on recorded values: what rounding does passes, mistakes do not, and what cannot be seen is said."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import echelon as ech
from echelon.prover.judge import compare
from echelon.prover.micro import Micro
from echelon.prover.objects import Objects
from echelon.prover.pass_state import KeptState, Sources, drawn_between
from echelon.prover.proof import Verdict
from echelon.prover.records import RankRecord
from echelon.prover.values import wholes
from echelon.world.init import init_from_env
from tests.conftest import Ranks

SIZES = {"weight": 200, "scale": 1, "keys": 8, "bias": 16}
EXACT = {n: torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) for n, size in SIZES.items()}
EXACT["keys"].zero_()  # their true gradient


def _values(seed: int, noise: float, **changes: Any) -> dict[str, Any]:
    """An update of Adam's first step, computed with rounding of this relative size; keys move by the sign of their noise."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for name, exact in EXACT.items():
        error = noise * (torch.rand(exact.shape, generator=generator, dtype=torch.float64) * 2 - 1)
        gradients[name] = exact + error * (exact.abs().max() if exact.any() else 1.0)
    gradients |= {n: change(gradients[n]) for n, change in changes.get("gradients", {}).items()}
    parameters = {n: 0.1 - 0.01 * (g.sign() if n == "keys" else g) for n, g in gradients.items()}
    parameters |= {n: change(parameters[n]) for n, change in changes.get("parameters", {}).items()}
    error = noise * (float(torch.rand(1, generator=generator)) * 2 - 1)
    return {
        "loss": 2.0 * (1 + error) * changes.get("loss", 1.0),
        "norm": None,
        "gradients": {n: g.float() for n, g in gradients.items()},
        "parameters": {n: p.float() for n, p in parameters.items()},
        "buffers": {},
    }


def _judged(mine: dict[str, Any], right: dict[str, Any], wide: dict[str, Any], *, half: bool = False) -> Verdict:
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name, "row"), Path(name, "right"), Path(name, "right", "again-wide-0")
        start = {"parameters": {n: torch.full((size,), 0.1, dtype=mine["parameters"][n].dtype) for n, size in SIZES.items()}}
        start["buffers"] = {}
        for folder, values in zip(folders, (mine, right, wide), strict=True):
            folder.mkdir()
            torch.save(values, folder / "update-000.pt")
            torch.save(start, folder / "initial.pt")
        micro = Micro(None, b"", [], 1.0, mine["loss"], {}, 0, 1, [])
        records = [RankRecord(updates=[[micro]], norms=[None])]
        return compare(folders[0], folders[1], records, torch.float32, half=half)


seeds = st.integers(0, 10**6)
small = st.floats(-7, -6).map(lambda power: 10.0**power)  # rounding that float32 can tell from mistakes


@pytest.mark.full
@settings(max_examples=40)
@given(seeds, small)
def test_rounding_passes_and_only_elements_without_a_gradient_are_excused(seed: int, noise: float) -> None:
    verdict = _judged(_values(seed, noise), _values(seed + 1, noise), _values(seed + 2, noise * 1e-9))
    assert verdict.clear and verdict.undetermined.keys() <= {"keys"}, verdict


@pytest.mark.full
@settings(max_examples=40)
@given(seeds, small, st.sampled_from(["weight", "scale", "bias"]), st.sampled_from(["gradients", "parameters"]))
def test_a_mistake_of_a_fiftieth_in_the_smallest_tensor_is_found(seed: int, noise: float, name: str, kind: str) -> None:
    wrong = _values(seed, noise, **{kind: {name: lambda value: value * 1.02}})
    verdict = _judged(wrong, _values(seed + 1, noise), _values(seed + 2, noise * 1e-9))
    assert verdict.first is not None and verdict.first.tensor == name, verdict


@pytest.mark.full
@settings(max_examples=40)
@given(seeds, st.floats(-3, 0).map(lambda power: 10.0**power))
def test_references_that_disagree_excuse_nothing(seed: int, noise: float) -> None:
    """As with a mask that each of them draws for itself: the row is within their distance, and that proves nothing."""
    verdict = _judged(_values(seed, noise), _values(seed + 1, noise), _values(seed + 2, noise))
    assert not verdict.clear and verdict.resolved == 0, verdict


@pytest.mark.full
@settings(max_examples=40)
@given(seeds, small, st.floats(1.001, 2.0))
def test_the_loss_is_compared_even_if_nothing_else_differs(seed: int, noise: float, factor: float) -> None:
    wrong = _values(seed, noise, loss=factor)
    verdict = _judged(wrong, _values(seed + 1, noise), _values(seed + 2, noise * 1e-9))
    assert verdict.first is not None and verdict.first.tensor == "loss"


def test_in_half_precision_parameters_may_differ_by_as_many_roundings_of_float32() -> None:
    """After a small first step they are those of float32: so it is by its measure that they are compared."""
    right, wide = _values(1, 1e-3), _values(1, 1e-3)
    for roundings, agrees in ((20, True), (100, False)):
        change = {"weight": lambda value, roundings=roundings: value + roundings * 2**-23 * value.abs().max()}
        verdict = _judged(_values(1, 1e-3, parameters=change), right, wide, half=True)
        assert (verdict.first is None) == agrees, (roundings, verdict)


def test_of_complex_numbers_the_imaginary_part_is_compared_too() -> None:
    def complex_(values: dict[str, Any], factor: float) -> dict[str, Any]:
        for kind in ("gradients", "parameters"):
            each = values[kind]["weight"]
            values[kind]["weight"] = torch.complex(each, each * factor)
        return values

    right, wide = complex_(_values(1, 1e-7), 1.0), complex_(_values(2, 1e-9), 1.0)
    assert _judged(complex_(_values(3, 1e-7), 1.0), right, wide).first is None
    found = _judged(complex_(_values(3, 1e-7), 1.02), right, wide).first
    assert found is not None and found.phase == "gradient"


def test_the_same_bits_agree_however_far_rounding_reaches() -> None:
    same = _values(1, 0.1)
    verdict = _judged(same, same, _values(2, 0.1))
    assert verdict.blind and verdict.clear and verdict.bit_equal and verdict.resolved == verdict.updates == 1
    louder = _judged({**same, "loss": same["loss"] * (1 + 1e-7)}, same, _values(2, 0.1))
    assert louder.bit_equal and not louder.clear and louder.resolved == 0


def test_an_element_that_could_change_the_loss_is_not_excused() -> None:
    """Its gradient is rounding, but it is off by so much that even this counts."""
    wrong = _values(1, 1e-6, parameters={"keys": lambda value: value + 1e4})
    verdict = _judged(wrong, _values(2, 1e-6), _values(3, 1e-15))
    assert verdict.first is not None and verdict.first.tensor == "keys"


def test_values_that_are_zero_in_truth_are_not_called_unresolved() -> None:
    """A loss that has converged: float32's noise is all of it, and float64 says that there is nothing."""
    mine, right, wide = _values(1, 1e-7), _values(2, 1e-7), _values(3, 1e-15)
    mine["loss"], right["loss"], wide["loss"] = 3e-15, 1e-15, 1e-30
    verdict = _judged(mine, right, wide)
    assert not any(b.tensor == "loss" for b in verdict.blind) and verdict.first is None, verdict


class _Holder:
    """Generators in an attribute, containers, a module of torch, a closure, a bound argument and a class."""

    of_class = random.Random(0)

    def __init__(self) -> None:
        hidden = torch.Generator()
        self.held, self.inside = np.random.default_rng(0), {"a": [random.Random(1)], "b": (np.random.RandomState(2),)}
        self.module = torch.nn.Sequential(torch.nn.Linear(1, 1))
        self.module[0].own = torch.Generator()
        self.draw, self.bound = lambda: torch.rand(1, generator=hidden), functools.partial(print, random.Random(3))


def test_every_generator_that_a_unit_holds_is_found_by_its_path_and_put_back() -> None:
    unit = _Holder()
    sources = Sources(unit)
    before = sources.states()
    assert {
        *("held", "inside.a.0", "inside.b.0", "module.0.own", "draw.hidden", "bound.0", "_Holder.of_class"),
    } <= before.keys()
    drawn = unit.draw(), unit.held.random(), unit.inside["a"][0].random()
    assert drawn_between(before, sources.states()).keys() == {"draw.hidden", "held", "inside.a.0"}
    sources.restore(before)
    assert (unit.draw(), unit.held.random(), unit.inside["a"][0].random()) == drawn


class _WithLists(ech.TrainUnit[None]):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)
        self.trained, self.averages = list(self.module.parameters()), [torch.zeros(2), torch.zeros(1)]

    def train_step(self, state: ech.State, data: None) -> None:
        """Nothing is trained."""


def test_lists_of_tensors_keep_their_tensors_when_state_is_put_back() -> None:
    """A loop's list of all parameters had copies in their place: what it did to them reached no model."""
    unit = _WithLists()
    average = unit.averages[0]
    kept = KeptState(Objects(unit))
    before = kept.values()
    average += 1
    kept.restore(before)
    assert unit.averages[0] is average and not average.any()
    assert unit.trained[0] is unit.module.weight and "trained" not in before


@pytest.mark.parametrize(
    ("off", "narrowest", "differs"), [(3e-7, torch.float32, False), (3e-7, None, True), (1e-4, torch.float32, True)]
)
def test_a_norm_in_float64_of_a_model_that_computes_in_float32(
    tmp_path: Path, off: float, narrowest: torch.dtype | None, differs: bool
) -> None:
    """All references round it to the same number: by their distance alone nothing might differ."""
    right = {**_values(0, 0.0), "norm": 1.5}
    for name, norm in (("row", 1.5), ("right", 1.5), ("right/again-0", 1.5)):
        (tmp_path / name).mkdir()
        torch.save({**right, "norm": norm}, tmp_path / name / "update-000.pt")
        torch.save({"parameters": right["parameters"], "buffers": {}}, tmp_path / name / "initial.pt")
    micro = Micro(None, b"", [], 1.0, right["loss"], {}, 0, 1, [])
    records = [RankRecord(updates=[[micro]], norms=[1.5 * (1 + off)])]
    verdict = compare(tmp_path / "row", tmp_path / "right", records, torch.float64, narrowest=narrowest)
    assert (verdict.first is not None and verdict.first.tensor == "gradient norm") == differs


def _gather_many() -> None:
    init_from_env()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [((5, 3), Shard(0)), ((1,), Shard(0)), ((4, 6), Shard(1)), ((0, 3), Shard(0)), ((3,), Replicate())]
    split = {str(shape): distribute_tensor(torch.randn(shape), mesh, [placement]) for shape, placement in shapes}
    split["half"] = distribute_tensor(torch.randn(5, 2).bfloat16(), mesh, [Shard(0)])
    together = wholes({**split, "plain": torch.ones(3)})
    assert list(together) == [*split, "plain"] and torch.equal(together["plain"], torch.ones(3))
    for name, tensor in split.items():
        assert torch.equal(together[name], tensor.full_tensor()) and together[name].dtype is tensor.dtype, name


def test_tensors_that_travel_together_are_what_each_is_by_itself(ranks: Ranks) -> None:
    """Also where ranks have parts of unequal sizes, or nothing."""
    ranks(2, _gather_many)
