"""How long an update takes: on devices whose numbers give answers that are known."""

from __future__ import annotations

import json
import math
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from echelon.common.errors import PlanError
from echelon.planner.calibrate import calibrate
from echelon.planner.devices import DEVICES, Device, Measured, device_named, written
from echelon.planner.links import Links
from echelon.planner.steps import COPY_IN, Collective, Operator, Step, operator_of
from echelon.planner.timeline import SLOWED, Timeline, fused, operator_seconds, simulate
from tests.kit.refusals import refused

Command = Callable[..., subprocess.CompletedProcess[str]]

# A product of a GFLOP takes a second, a GB is moved in one; a tensor of a GB is gathered by 2 ranks in one.
PLAIN = Device(
    "plain",
    peak={"float32": 1e9},
    bandwidth=1e9,
    reached=1.0,
    copied=1.0,
    least=0.0,
    contention=1.0,
    collectives=(Measured("all-gather", 2, 0, 1e9),),
)
GB = 10**9


def product(writes: int, *reads: int, moment: str = "forward", seconds: float = 1.0) -> Operator:
    return Operator("aten::mm", moment, reads, (writes,), 0, "product", int(seconds * GB), "float32")


def moves(name: str, writes: int, *reads: int, moment: str = "forward", size: int = 0) -> Operator:
    return Operator(name, moment, reads, (writes,), size)


def collective(kind: str, fills: int, *reads: int, moment: str = "forward", seconds: float = 1.0) -> Collective:
    return Collective(kind, moment, (fills, *reads), (fills,), int(seconds * GB), (0, 1))


def taken(*steps: Step, device: Device = PLAIN) -> Timeline:
    return simulate(steps, device, Links(device, 8))


def test_an_operator_takes_the_longer_of_its_arithmetic_and_its_memory() -> None:
    device = replace(PLAIN, least=0.25)
    assert operator_seconds(product(1, 0), device) == 1.0
    assert operator_seconds(replace(product(1, 0), size=3 * GB), device) == 3.0
    assert operator_seconds(moves("aten::add", 1, 0, size=8), device) == 0.25
    assert operator_seconds(moves("aten::add_", 1, 0, size=8, moment="optimizer"), device) == pytest.approx(8e-9)
    assert operator_seconds(moves("aten::add_", 1, 0, size=8, moment="optimizer"), replace(device, overlaps=False)) == 0.25


def test_attention_has_a_share_of_the_peak_of_its_own_also_when_it_is_computed_again() -> None:
    device = replace(PLAIN, attention=(0.5, 0.25))
    forward = Operator("aten::attention", "forward", (0,), (1,), 0, "attention", GB, "float32")
    assert operator_seconds(forward, device) == 2.0
    assert operator_seconds(replace(forward, moment="backward"), device) == 4.0
    assert operator_seconds(replace(forward, moment="backward", is_repeated=True), device) == 2.0


def test_measured_attention_is_that_of_its_kernel_head_and_keys() -> None:
    rows = (("aten", 64, 256, 10.0), ("aten", 64, 1024, 30.0), ("aten", 128, 256, 50.0), ("mine", 64, 256, 5.0))
    device = replace(PLAIN, peak={"bfloat16": 1e9, "float32": 1e9}, attention=(0.5, 0.25), attentions=rows)

    def rate(name: str, keys: int, head: int, dtype: str = "bfloat16", backward: bool = False) -> float:
        return device.attention_rate(name, dtype, (8, keys, keys, head), backward=backward)

    assert [rate("aten::attention", keys, 64) for keys in (1, 512, 4096)] == [10.0, pytest.approx(20.0), 30.0]
    assert rate("aten::attention", 512, 80) == pytest.approx(20.0)
    assert rate("aten::attention", 512, 256) == 50.0
    assert rate("mine::attention", 512, 64) == 5.0
    assert rate("other::attention", 512, 128) == 50.0  # as torch's
    assert rate("aten::attention", 512, 64, "float32", backward=True) == 0.25e9  # not measured
    assert device.attention_rate("aten::attention", "bfloat16", (), backward=False) == 0.5e9


def test_a_causal_mask_leaves_half_of_the_keys_and_of_the_products() -> None:
    numbers: dict[int, int] = {}

    def attends(op: Any, *args: Any) -> Operator:
        made = op(*args)
        found = operator_of(op, made, args, {}, "forward", lambda t: numbers.setdefault(id(t), len(numbers)), False)
        assert found is not None
        return found

    q, k = torch.zeros(2, 3, 8, 16), torch.zeros(2, 3, 32, 16)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    whole = attends(op, q, k, k)
    assert (whole.kind, whole.shape, whole.flops) == ("attention", (6, 8, 32, 16), 2 * 2 * 6 * 8 * 32 * 16)
    half = attends(op, k, k, k, 0.0, True)
    assert (half.shape, half.flops) == ((6, 32, 16, 16), 2 * 6 * 32 * 32 * 16)
    mine = attends(torch.ops.echelon_test.attention.default, k, k, k, True)
    assert (mine.name, mine.kind, mine.shape, mine.flops) == ("echelon_test::attention", "attention", half.shape, half.flops)


def test_a_product_in_groups_is_as_many_of_equally_many_rows() -> None:
    """As of experts: 4 of 24 -> 8 features, over 64 rows, and the gradients of rows and weights."""
    numbers: dict[int, int] = {}

    def multiplies(left: torch.Tensor, right: torch.Tensor) -> tuple[Any, int]:
        made = torch.ops.aten._grouped_mm.default(left, right, ends)
        args = (left, right, ends)
        op = torch.ops.aten._grouped_mm.default
        found = operator_of(op, made, args, {}, "forward", lambda t: numbers.setdefault(id(t), len(numbers)), False)
        assert found is not None
        return found.shape, found.flops

    ends = torch.arange(16, 65, 16, dtype=torch.int32)
    rows, out, weights = (torch.zeros(*sizes, dtype=torch.bfloat16) for sizes in ((64, 24), (64, 8), (4, 8, 24)))
    assert multiplies(rows, weights.mT) == ((4, 16, 8, 24), 2 * 64 * 8 * 24)
    assert multiplies(out, weights) == ((4, 16, 24, 8), 2 * 64 * 8 * 24)
    assert multiplies(out.mT, rows) == ((4, 8, 24, 16), 2 * 64 * 8 * 24)


@torch.library.custom_op("echelon_test::attention", mutates_args=())
def _attention_of_a_script(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    return torch.empty_like(query)


register_flop_formula(torch.ops.echelon_test.attention)(lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value))


def test_a_product_that_fills_its_last_round_is_the_fastest() -> None:
    device = replace(PLAIN, processors=4)
    assert device.product_rate("float32", 1, (1, 512, 256, 64)) == 1e9
    assert device.product_rate("float32", 1, (1, 512 + 128, 256, 64)) == pytest.approx(
        1e9 * 10 / 12
    )  # 10 small tiles in 3 rounds
    assert device.product_rate("float32", 1, (1, 1, 1, 64)) == 1e9 / (4 * 128 * 128)
    assert device.product_rate("float32", 1, ()) == 1e9


def test_measured_products_are_read_between_their_sizes() -> None:
    device = replace(PLAIN, products=(("float32", 1e3, 10.0), ("float32", 1e5, 30.0)))
    assert [device.product_rate("float32", flops, ()) for flops in (1, 1e4, 1e9)] == [10.0, pytest.approx(20.0), 30.0]
    assert device.product_rate("bfloat16", 1, ()) == 1e9  # not measured
    device = replace(device, convolutions=(("float32", 1e3, 7.0),))
    assert device.product_rate("float32", 1e4, ()) == 7.0 and device.product_rate("float32", 1e4, (1, 2, 3, 4)) == 20.0


def test_operators_wait_for_the_collective_whose_result_they_read() -> None:
    made = taken(collective("all-reduce", 7), product(1, 0), product(2, 7))
    assert (made.seconds, dict(made.waits)) == (2.0, {})  # hidden behind the first
    made = taken(collective("all-reduce", 7, seconds=3), product(1, 0), product(2, 7))
    assert (made.seconds, dict(made.waits), made.communication) == (4.0, {"all-reduce": 2.0}, 3.0)
    assert taken(product(1, 0), collective("all-reduce", 1), product(2, 0)).seconds == 2.0
    assert taken(product(1, 0), collective("all-reduce", 1, seconds=5)).seconds == 6.0  # nothing ends before it


def test_collectives_of_a_group_are_one_after_another() -> None:
    reads = product(3, 7, 8)
    assert taken(collective("all-reduce", 7), collective("all-reduce", 8), reads).seconds == 3.0
    other = replace(collective("all-reduce", 8), ranks=(0, 2))
    assert taken(collective("all-reduce", 7), other, reads).seconds == 2.0


def test_a_machine_without_overlap_takes_the_sum() -> None:
    steps = (collective("all-reduce", 7), product(1, 0), product(2, 7))
    made = taken(*steps, device=replace(PLAIN, overlaps=False))
    assert (made.seconds, dict(made.waits)) == (3.0, {"all-reduce": 1.0})


def test_operators_are_slower_while_a_collective_runs_beside_them() -> None:
    half = replace(PLAIN, contention=2.0)
    made = taken(collective("all-reduce", 7), product(1, 0), device=half)
    assert (made.seconds, made.busy[SLOWED]) == (1.5, 0.5)  # half of it in the first second
    long = taken(collective("all-reduce", 7, seconds=4), product(1, 0), product(2, 0), device=half)
    assert (long.seconds, long.busy[SLOWED]) == (4.0, 2.0)
    apart = taken(product(1, 0), collective("all-reduce", 1), product(2, 1), device=half)
    assert (apart.seconds, apart.busy[SLOWED]) == (3.0, 0.0)
    both = taken(collective("all-reduce", 7), replace(collective("all-reduce", 8), ranks=(0, 2)), product(1, 0), device=half)
    assert (both.seconds, both.busy[SLOWED]) == (1.5, 0.5)  # two at a time are no worse than one


def test_a_gather_slows_the_layer_that_is_traced_before_it() -> None:
    forward = [step for layer in range(2) for step in gathered(layer)]
    made = taken(*forward, device=replace(PLAIN, contention=2.0))
    # The first gather; half of the first product beside the second gather, and the other half; the second product.
    assert (made.seconds, made.busy[SLOWED]) == (3.5, 0.5)


def gathered(layer: int, moment: str = "forward", seconds: float = 1.0) -> list[Step]:
    """A layer of `fully_shard`: its parameters are 10 + n, its buffer 20 + n; 100 is what the layers compute with."""
    buffer, whole = 20 + layer, 30 + layer
    return [
        moves("aten::_to_copy", 40 + layer, 10 + layer),
        moves(COPY_IN, buffer, 40 + layer),
        collective("all-gather", buffer, moment=moment, seconds=seconds),
        moves("fsdp::split_with_sizes_copy", whole, buffer, moment=moment),
        product(100, 100, whole, moment=moment),
    ]


def test_parameters_are_gathered_while_the_layer_before_computes() -> None:
    forward = [step for layer in range(4) for step in gathered(layer)]
    made = taken(*forward)
    assert (made.seconds, dict(made.waits)) == (5.0, {"all-gather": 1.0})  # the first has nothing to hide behind
    slow = taken(*[step for layer in range(4) for step in gathered(layer, seconds=2.0)])
    assert slow.seconds == 9.0 and slow.waits["all-gather"] == 5.0
    # The gather of a third layer waits until the first's parameters were copied out: no more than two are held beside.
    quick = taken(*[step for layer in range(4) for step in gathered(layer, seconds=0.25)])
    assert quick.seconds == 4.25


def test_gathers_wait_for_the_step_of_the_optimizer_that_writes_what_they_gather() -> None:
    step = replace(moves("aten::add_", 10, 10, size=GB, moment="optimizer"))
    assert taken(step, *gathered(0)).seconds == 3.0


def reduced(layer: int, seconds: float = 1.0) -> list[Step]:
    """A layer's backward pass: its gradients go into 50 + n, their sum into 60 + n, and from there into 70 + n."""
    given = Collective("reduce-scatter", "backward", (60 + layer, 50 + layer), (60 + layer,), int(seconds * GB), (0, 1))
    return [
        product(100, 100, moment="backward"),
        moves("fsdp::chunk_cat", 50 + layer, 100, moment="backward"),
        given,
        moves("aten::_to_copy", 70 + layer, 60 + layer, moment="backward", size=GB // 4),
    ]


def test_gradients_are_reduced_while_the_next_layer_computes() -> None:
    device = replace(PLAIN, collectives=(Measured("reduce-scatter", 2, 0, 1e9),))
    backward = [step for layer in range(3) for step in reduced(layer, seconds=0.5)]
    made = taken(*backward, moves("aten::add_", 9, 70, 71, 72, moment="optimizer"), device=device)
    assert made.seconds == 3.75 and dict(made.waits) == {"reduce-scatter": 0.75}  # the last, and what becomes of it
    slow = taken(*[step for layer in range(3) for step in reduced(layer, seconds=2.0)], device=device)
    assert slow.seconds == 1 + 3 * 2.25 and slow.waits["reduce-scatter"] == pytest.approx(4.75)


def test_a_compiler_leaves_out_what_lives_between_its_operators_alone() -> None:
    steps: list[Step] = [
        moves("aten::mul", 1, 0, size=2 * GB),
        moves("aten::add", 2, 1, size=2 * GB),
        product(3, 2),
        moves("aten::mul", 4, 3, size=2 * GB),
    ]
    made = fused(steps)
    assert [each.size for each in made] == [2 * GB, 0, 2 * GB]  # reads 0 and writes 2; 1 is never there
    assert taken(*made).seconds == 5.0 and taken(*steps).seconds == 7.0
    kept = fused([*steps, moves("aten::mul", 5, 1, size=2 * GB, moment="backward")])
    assert kept[0].size == 3 * GB  # the backward pass reads 1


# --- links


def test_a_fast_network_costs_latency_alone_and_one_rank_nothing() -> None:
    fast = replace(DEVICES["h100-sxm"], node=math.inf, network=math.inf)
    links = Links(fast, 8)
    assert links.seconds("all-reduce", GB, (0,)) == 0.0
    assert links.seconds("all-gather", GB, range(8)) == pytest.approx(6.6e-6 + 7 * 0.6e-6)
    assert links.seconds("all-gather", GB, range(16)) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 2.7e-6)


def test_large_tensors_take_their_share_of_a_ring() -> None:
    device = DEVICES["h100-sxm"]
    links = Links(device, 8)
    gather, reduce = (links.seconds(kind, 8 * GB, range(8)) for kind in ("all-gather", "all-reduce"))
    assert gather == pytest.approx(7 / 8 * 8 * GB / device.node, rel=0.01)
    assert reduce == pytest.approx(2 * gather, rel=0.01)
    apart = links.seconds("all-gather", 8 * GB, range(0, 64, 8))  # one of each node: by one adapter
    assert apart == pytest.approx(7 / 8 * 8 * GB / device.network, rel=0.01)
    all_of_two = links.seconds("all-gather", 8 * GB, range(16))  # by eight
    assert all_of_two == pytest.approx(15 / 16 * 8 * GB / device.node, rel=0.01)
    assert links.seconds("all-gather", 8 * GB, (*range(4), *range(8, 12))) == pytest.approx(
        7 * GB / (4 * device.network), rel=0.01
    )
    assert Links(DEVICES["gb200"], 4).seconds("all-gather", GB, range(72)) < Links(DEVICES["b200"], 8).seconds(
        "all-gather", GB, range(72)
    )


def test_small_sums_over_many_nodes_go_by_a_tree() -> None:
    links = Links(DEVICES["h100-sxm"], 8)
    assert links.seconds("all-reduce", 8, range(1024)) < links.seconds("all-gather", 8, range(1024))


def test_measured_collectives_grow_with_the_steps_of_a_ring() -> None:
    device = replace(PLAIN, collectives=(Measured("all-reduce", 2, 0.5, 1e9), Measured("all-gather", 4, 0.5, 2e9)))
    links = Links(device, 8)
    assert links.seconds("all-reduce", GB, range(2)) == 1.5
    assert links.seconds("all-gather", GB, range(4)) == 1.0
    assert links.seconds("all-reduce", GB, range(4)) == pytest.approx(0.5 * 3 + 1.5)
    assert links.seconds("broadcast", GB, range(2)) == 1.5  # as the first that was


# --- devices in files


def test_a_device_is_read_as_it_was_written(tmp_path: Path) -> None:
    mine = Device(
        "mine", 2**30, {"float32": 1e9}, 1e9, processors=4, overlaps=False, node=2e9, domain=2, attention=(0.5, 0.25),
        products=(("bfloat16", 1e3, 1e9), ("float32", 1e6, 1e9)), collectives=(Measured("all-reduce", 2, 1e-5, 1e9),),
        convolutions=(("float32", 1e6, 5e8),), attentions=(("aten", 64, 256, 1e9), ("mine", 128, 512, 2e9)),
    )  # fmt: skip
    for device in (mine, DEVICES["gb200"], PLAIN):
        if all(each.latency for each in device.collectives):
            (tmp_path / "device.toml").write_text(written(device))
            assert device_named(str(tmp_path / "device.toml")) == device


@pytest.mark.parametrize(
    "text",
    [
        "bandwith = 1e9",
        "bandwidth = -1.0",
        "bandwidth = true",
        "bandwidth = inf",
        "memory = '80 parsecs'",
        "name = 3",
        "processors = 1.5",
        "overlaps = 1",
        "contention = 0.9",
        "attention = [0.5]",
        "capability = [9.0, 0]",
        "peak = 5",
        "[peak]\nfloat32 = 0",
        "[[products]]\ndtype = 'float32'\nflop = 1e9",
        "[[attentions]]\nkernel = 3\nhead = 64\nkeys = 512\nrate = 1e9",
        "[[collectives]]\nkind = 'all-reduce'\nranks = 2\nlatency = 'short'\nbandwidth = 1e9",
        "peak = ",
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "device.toml").write_text(text)
    with refused(PlanError):
        device_named(str(tmp_path / "device.toml"))


def test_devices_that_are_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    with refused(PlanError):
        device_named(str(tmp_path / "none.toml"))
    with pytest.raises(PlanError, match="rtx4090"):
        device_named("tpu")


def test_all_devices_of_the_table_are_timed() -> None:
    for device in DEVICES.values():
        assert device.is_timed and device.node and device.network and device.processors
        assert device.peak["bfloat16"] > device.peak["tf32"] >= device.peak["float32"]


@pytest.mark.full
def test_a_machine_is_measured_by_ranks_that_compute_at_a_time(tmp_path: Path) -> None:
    made = calibrate(2, "here", quick=True)
    assert made.is_timed and not made.overlaps and {kind for kind, _, _ in made.products} == {"float32", "bfloat16"}
    assert [(each.kind, each.ranks) for each in made.collectives] == [
        (kind, 2) for kind in ("all-reduce", "all-gather", "reduce-scatter")
    ]
    assert made.attention[0] > 0 and made.least > 0 and made.memory > 0
    assert {kind for kind, _, _ in made.convolutions} == {"float32", "bfloat16"} and all(row[2] > 0 for row in made.convolutions)
    assert [row[:3] for row in made.attentions] == [("aten", 64.0, 256.0)]  # in bfloat16
    (tmp_path / "here.toml").write_text(written(made))
    again = device_named(str(tmp_path / "here.toml"))
    assert again.bandwidth == pytest.approx(made.bandwidth, rel=1e-5) and len(again.collectives) == 3


# --- of a script

WIDTH, ROWS = 1024, 512
SCRIPT = f"""
import torch
import echelon as ech

ech.init_from_env()
with ech.on_meta():
    model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters())
data = torch.utils.data.TensorDataset(torch.zeros(1, 1).expand({4 * ROWS}, {WIDTH}))
loader = ech.Loader(data, global_batch={ROWS}, accumulate=2)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="ddp")
for (x,) in loader:
    with ech.window(model) as window:
        window.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.full
def test_the_time_of_a_script_is_that_of_its_products_where_all_else_is_free(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    free = Device("free", 2**34, {"float32": 1e12}, 1e30, reached=1.0, least=1e-30, node=1e30, network=1e30)
    slow = replace(free, name="slow", node=1e9)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for device in (free, slow):
        (tmp_path / "device.toml").write_text(written(device))
        done = echelon_command("plan", "--gpus", "2", "--device", "device.toml", "--layout", "fsdp", "--json", "train.py")
        assert done.returncode == 0, done.stderr
        found[device.name] = {each["layout"]: each for each in json.loads(done.stdout)["layouts"]}
    ddp, fsdp = found["free"]["ddp"], found["free"]["fsdp"]
    products = 2 * ROWS // 2 * WIDTH * WIDTH * (3 * 4 - 1)  # a rank's rows; the first layer's input has no gradient
    assert ddp["samples"] == ROWS and ddp["micro_batches"] == 2 and ddp["tokens"] == 0
    assert ddp["seconds"] == pytest.approx(products / 1e12, rel=0.15)  # a few sums of a scalar take a collective's latency
    assert ddp["busy"]["product"] == pytest.approx(products / 1e12) and fsdp["busy"]["product"] == ddp["busy"]["product"]
    assert ddp["mfu"] == pytest.approx(products / 1e12 / ddp["seconds"])
    sent = 4 * 4 * WIDTH * WIDTH  # bytes of all gradients; what two ranks send in an all-reduce, and in each fsdp's collectives
    waited = found["slow"]["ddp"]["waits"]["all-reduce"]
    assert 0 < waited < sent / 1e9 * 1.05 and found["slow"]["ddp"]["seconds"] > ddp["seconds"] + 0.9 * waited
    assert sum(found["slow"]["fsdp"]["waits"].values()) > waited  # parameters are gathered in each of two micro-batches
