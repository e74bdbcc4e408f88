"""Every layout gives the numbers of plain PyTorch, and every option has its meaning or is refused with what to do."""

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.common.errors import LayoutError
from echelon.compat.older_options import FSDPStrategy
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from echelon.parallel.fsdp.fsdp import replicas_default
from echelon.parallel.fsdp.units import unsplittable
from echelon.parallel.older_torch import ddp_options
from echelon.parallel.recipe.blocks import blocks_by_policy, without_shared
from echelon.parallel.recipe.recipe import Recipe
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import KINDS, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


def _frozen() -> nn.Module:
    module = net()
    module.first.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    return module


def _tied() -> nn.Module:
    """Across blocks, which are split one by one."""
    module = net()
    module.blocks[1][0].weight = module.blocks[0][0].weight
    return module


def _tied_inside() -> nn.Module:
    module = net()
    module.blocks[1][2].weight = module.blocks[1][0].weight
    return module


class _Listed(nn.Linear):
    """Its method takes no `recurse`, as that of dragen1860's MAML."""

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters())


def _listed() -> nn.Module:
    module = net()
    module.blocks[0][0] = seeded(_Listed, in_features=8, out_features=8).double()
    return module


def _unusual() -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for make, layout in itertools.product((_tied_inside, _listed), KINDS):
        unit = Regression(module=make(), layout=layout, clip_grad_norm=0.3, optimizer="AdamW")
        ech.train(unit, [batch(4, 10 * i + dist.get_rank()) for i in range(3)], max_epochs=1)
        found[f"{make.__name__}, {layout}"] = whole(unit.module)
    return found


@pytest.mark.full
def test_weights_that_are_tied_in_a_block_and_methods_of_ones_own(ranks: Ranks) -> None:
    """test_equivalence.py has weights that two blocks have in common."""
    windows = [[batch(4, 10 * i + r) for r in range(2)] for i in range(3)]
    for found in ranks(2, _unusual):
        for make, layout in itertools.product((_tied_inside, _listed), KINDS):
            want, _, _ = plain_training(windows, clip=0.3, optimizer="AdamW", module=make())
            assert largest_difference(found[f"{make.__name__}, {layout}"], want) < 1e-11, (make.__name__, layout)


# --- options


def _mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])


def _groups() -> Any:
    """As the older FSDP takes them: (ranks of one copy, ranks with the same shard)."""
    rank = dist.get_rank()
    rows, columns = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def _fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def _policy_by_size() -> Any:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return functools.partial(size_based_auto_wrap_policy, min_num_params=100)


# Options of DistributedDataParallel that came after torch 2.11.
NEWER: Any = {"batched_grad_copy": True} if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters else {}

# What each makes may not change a number.
OPTIONS: dict[str, Any] = {
    "ddp": lambda: ech.DDPStrategy(init_sync=True, forward_sync_buffers=False, bucket_cap_mb_list=[1], **NEWER),
    "ddp mesh": lambda: ech.DDPStrategy(device_mesh=_mesh(dist.get_world_size()), skip_all_reduce_unused_params=True),
    "ddp static": lambda: ech.DDPStrategy(static_graph=True, find_unused_parameters=True, bucket_cap_mb=1),
    "ddp checked": lambda: ech.DDPStrategy(broadcast_buffers=False, check_reduction=True),
    "ddp device_ids": lambda: ech.DDPStrategy(device_ids=[CPU.index], output_device=CPU.index),  # as TorchTNT's page has it
    "ddp hook": lambda: ech.DDPStrategy(comm_hook=_mean_hook, comm_state=HOOKED),
    "fsdp group": lambda: FSDPStrategy(process_group=dist.group.WORLD, backward_prefetch=None, use_orig_params=False),
    "fsdp groups": lambda: ech.FSDPStrategy(process_group=_groups(), sharding_strategy="HYBRID_SHARD"),
    "fsdp mesh": lambda: ech.FSDPStrategy(device_mesh=_mesh(2, 2), auto_wrap_policy={nn.Sequential}),
    "fsdp hybrid": lambda: FSDPStrategy(sharding_strategy="_HYBRID_SHARD_ZERO2", state_dict_type="FULL_STATE_DICT"),
    "fsdp grads": lambda: ech.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy=_policy_by_size()),
    "fsdp offload": lambda: ech.FSDPStrategy(cpu_offload=True, forward_prefetch=True),
    "fsdp offload 1": lambda: ech.FSDPStrategy(cpu_offload=_torch("CPUOffload")(offload_params=True)),
    "fsdp float64": lambda: ech.FSDPStrategy(mixed_precision=_torch("MixedPrecision")(param_dtype=torch.float64)),
    "fsdp one block whole": lambda: ech.FSDPStrategy(reshard_after_forward={"blocks.1": False}),
    "fsdp2 all": lambda: FSDP2Strategy(modules_to_shard="all", shard_on_largest_dim=True),
    "fsdp2 names": lambda: FSDP2Strategy(modules_to_shard=["first"], shard_predicates=[lambda n, m: n == "blocks.0"]),
    "fsdp2 offload": lambda: FSDP2Strategy(cpu_offload=_torch("CPUOffloadPolicy")(pin_memory=True), mesh=_mesh(2, 2)),
    "hsdp": lambda: ech.Layout(dp_replicate=-1, dp_shard=4, fsdp=ech.FSDPStrategy(cpu_offload=True)),
    "hsdp 2": lambda: ech.Layout(dp_replicate=4, fsdp=ech.FSDPStrategy(reshard_after_forward=False)),
    "zero2 offload": lambda: ech.FSDPStrategy(reshard_after_forward=False, cpu_offload=True),
    "zero3 options": lambda: ech.FSDPStrategy(forward_prefetch=True),
}


# Two ranks cannot be divided in two ways.
NEEDS_FOUR = ("fsdp groups", "fsdp mesh", "fsdp hybrid", "fsdp2 offload", "hsdp", "hsdp 2")


def _torch(name: str) -> Any:
    import torch.distributed.fsdp

    return getattr(torch.distributed.fsdp, name)


HOOKED: list[int] = []


def _mean_hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _with_options(names: list[str]) -> dict[str, Any]:
    world, done = ech.launching.World.current(CPU), {}
    for name in names:
        module = net(seed=world.rank)  # all start from rank 0's
        unit = Regression(module=module, layout=OPTIONS[name](), clip_grad_norm=0.3, optimizer="AdamW")
        ech.train(unit, [batch(4, 10 * i + world.rank) for i in range(3)], max_epochs=1)
        assert (unit.prepared.data.rank, unit.prepared.data.size) == (world.rank, world.size), name
        done[name] = whole(unit.module)
    assert ([0, 0, 0] if "ddp hook" in names else []) == HOOKED  # one bucket in each of three updates
    return done


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_options_change_no_number(ranks: Ranks, size: int) -> None:
    windows = [[batch(4, 10 * i + r) for r in range(size)] for i in range(3)]
    want, _, _ = plain_training(windows, clip=0.3, optimizer="AdamW")
    names = [name for name in OPTIONS if (name in NEEDS_FOUR) == (size == 4)]
    for done in ranks(size, _with_options, names, timeout_s=240):
        for name, got in done.items():
            difference = max(float((got[n] - want[n]).abs().max()) for n in want)
            assert difference < 1e-11, (name, difference)


def _placements() -> dict[str, Any]:
    """The mesh and what a rank holds of the first layer's 8 x 4 weight, and of a block's first."""
    made = {}
    for name, layout in {
        "fsdp": ech.FSDPStrategy(),
        "hsdp": ech.FSDPStrategy(sharding_strategy="HYBRID_SHARD"),
        "hybrid": ech.FSDPStrategy(sharding_strategy=_torch("ShardingStrategy").HYBRID_SHARD),
        "copies": ech.Layout(dp_replicate=-1, dp_shard=1, fsdp=ech.FSDPStrategy()),
        "largest": FSDP2Strategy(shard_on_largest_dim=True),
        "ignored": ech.FSDPStrategy(ignored_modules=[(frozen := _frozen()).first]),
        "ignored 2": ech.FSDPStrategy(ignored_states=list((again := _frozen()).first.parameters())),
    }.items():
        module = {"ignored": frozen, "ignored 2": again}.get(name) or net()
        weight: Any = Regression(module=module, layout=layout).module.first.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        made[name] = tuple(weight.device_mesh.shape) if hasattr(weight, "device_mesh") else None, tuple(local.shape)
    return made


@pytest.mark.full
def test_what_a_rank_of_four_holds(ranks: Ranks) -> None:
    assert ranks(4, _placements)[3] == {
        "fsdp": ((4,), (2, 4)),
        "hsdp": ((2, 2), (4, 4)),
        "hybrid": ((2, 2), (4, 4)),
        "copies": ((4, 1), (8, 4)),
        "largest": ((4,), (2, 4)),
        "ignored": (None, (8, 4)),
        "ignored 2": (None, (8, 4)),
    }


def test_shards_stay_on_a_machine_and_there_are_two_copies_at_least() -> None:
    worlds = {(16, 8): 8, (8, 8): 4, (4, 4): 2, (2, 2): 1, (1, 1): 1, (6, 4): 3, (9, 9): 3}  # by ranks in all and on a machine
    assert {world: replicas_default(*world) for world in worlds} == worlds


def _from_meta() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("meta"):
        module = _tied()
    unit = Regression(module=module, layout=ech.FSDPStrategy(param_init_fn=_fill))
    plain: Any = unit.prepared.unwrapped
    assert plain.blocks[0][0].weight is plain.blocks[1][0].weight
    return whole(unit.module)


def test_param_init_fn_fills_what_is_on_meta(ranks: Ranks) -> None:
    first, second = ranks(2, _from_meta)
    assert all(torch.equal(first[n], second[n]) and 0 < float(first[n].abs().max()) < 1 for n in first)


def with_norm() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)))


def _synchronised(layout: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    rank, module = dist.get_rank(), with_norm()
    if not isinstance(layout, ech.DDPStrategy):  # by hand, as for GPUs
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    unit = Regression(module=module, layout=layout)
    ech.train(unit, [batch(2 + 3 * rank, 10 * i + rank) for i in range(5)], max_epochs=1)
    unit.module.eval()
    out = unit.module(batch(3, 99)[0]).detach()
    return whole(unit.module), dict(unit.prepared.unwrapped.named_buffers()), out


@pytest.mark.full
@pytest.mark.parametrize("layout", [ech.DDPStrategy(sync_batchnorm=True), "ddp", "fsdp", "zero1"])
def test_batch_norm_over_the_global_batch(ranks: Ranks, layout: Any) -> None:
    """Torch's own layers, too, work in host memory."""
    module = with_norm()
    want, _, _ = plain_training([[batch(2, 10 * i), batch(5, 10 * i + 1)] for i in range(5)], module=module)
    module.eval()
    for got, buffers, out in ranks(2, _synchronised, layout):
        assert all(torch.allclose(got[n], want[n], rtol=0, atol=1e-12) for n in want)
        assert all(torch.allclose(buffers[n], b, rtol=0, atol=1e-12) for n, b in module.named_buffers())
        assert torch.allclose(out, module(batch(3, 99)[0]), rtol=0, atol=1e-12)


def _normalised_in_bf16() -> tuple[torch.Tensor, torch.Tensor]:
    module = ech.DDPStrategy(sync_batchnorm=True).prepare(nn.BatchNorm1d(4), ech.launching.World.current(CPU), Recipe()).unwrapped
    rows = (torch.randn(1001, 4, generator=torch.Generator().manual_seed(dist.get_rank())) + 1).bfloat16()
    return rows, module(rows).detach()


def test_batch_norm_over_the_global_batch_counts_in_float32(ranks: Ranks) -> None:
    """In bfloat16 a count of 2,002 is 2,000, and a sum of as many numbers has two digits."""
    found = ranks(2, _normalised_in_bf16)
    want = nn.BatchNorm1d(4)(torch.cat([rows for rows, _ in found])).detach()
    assert torch.allclose(torch.cat([out for _, out in found]).float(), want.float(), rtol=0, atol=0.02)


def test_one_process_needs_no_others_for_its_batch_norm(ranks: Ranks) -> None:
    module = with_norm()
    want, _, _ = plain_training([[batch(4, 10 * i)] for i in range(3)], module=module)
    unit = Regression(module=nn.SyncBatchNorm.convert_sync_batchnorm(with_norm()), layout="none")
    ech.train(unit, [batch(4, 10 * i) for i in range(3)], max_epochs=1)
    assert largest_difference(whole(unit.module), want) < 1e-12
    first, second = ranks(2, _one_value)
    assert first == second and "more than one value per channel over all ranks" in first


def _one_value() -> str:
    unit = Regression(module=nn.SyncBatchNorm.convert_sync_batchnorm(with_norm()), layout="ddp")
    rows = [batch(1, 0)] if dist.get_rank() == 0 else [tuple(t[:0] for t in batch(1, 0))]
    return refusal(ech.train, unit, rows, max_epochs=1, kind=ValueError).partition(", got")[0]


def test_fully_shard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows in no number on a CPU."""
    told: list[dict[str, Any]] = []
    real, policy, offload = _torch("fully_shard"), _torch("CPUOffloadPolicy"), _torch("CPUOffload")
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda m, **options: (told.append(options), real(m, **options))[1])
    for layout in (
        ech.FSDPStrategy(cpu_offload=policy()),
        FSDP2Strategy(cpu_offload=True),
        ech.FSDPStrategy(sharding_strategy="HYBRID_SHARD", cpu_offload=True),
        ech.FSDPStrategy(cpu_offload=offload(offload_params=True), reshard_after_forward=False),
    ):
        told.clear()
        Regression(layout=layout)
        assert [options["offload_policy"] for options in told] == [policy(pin_memory=False)] * 3  # there is nothing to pin for
    told.clear()
    for kind in (_torch("OffloadPolicy")(), offload(offload_params=False), None, False):
        Regression(layout=ech.FSDPStrategy(cpu_offload=kind, reshard_after_forward=False))
    assert not any("offload_policy" in options or options["reshard_after_forward"] for options in told)
    dist.destroy_process_group()


# --- which blocks


def test_policies_of_the_older_fsdp_choose_the_same_blocks() -> None:
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

    blocks = ["blocks.0", "blocks.1"]
    for policy in (
        ModuleWrapPolicy({nn.Sequential}),
        CustomPolicy(lambda m: isinstance(m, nn.Sequential)),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Sequential)),
        _policy_by_size(),
        {nn.Sequential},
    ):
        assert sorted(n for n, _ in blocks_by_policy(net(), policy, set())) == blocks, policy
    with refused(LayoutError):
        blocks_by_policy(
            net(), CustomPolicy(lambda m: {"sharding_strategy": 1} if isinstance(m, nn.Sequential) else False), set()
        )
    with refused(LayoutError):
        blocks_by_policy(net(), 3, set())


def test_blocks_that_share_a_parameter_with_others_are_left_to_the_root() -> None:
    def kept(module: Any) -> list[str]:
        return [n for n, _ in without_shared(module, [(f"blocks.{i}", module.blocks[i]) for i in (0, 1)])]

    assert (kept(net()), kept(_tied_inside()), kept(_tied())) == (["blocks.0", "blocks.1"], ["blocks.0", "blocks.1"], [])


# --- options that an older torch spells otherwise, or lacks: torch 2.11 against 2.13, by constructors of both shapes


def of_2_11(module: Any, device_ids: Any = None, *, broadcast_buffers: bool = True, init_sync: bool = True) -> None: ...


def of_2_13(
    module: Any, *, broadcast_buffers: bool = True, forward_sync_buffers: bool = True, batched_grad_copy: bool = False
) -> None: ...


OF_2_13 = {"forward_sync_buffers": False, "batched_grad_copy": True}
EVERYWHERE = {"broadcast_buffers": False, "bucket_cap_mb": 25, "static_graph": True}


@pytest.mark.parametrize(
    ("constructor", "given", "passed"),
    [
        (of_2_13, OF_2_13, OF_2_13),
        (of_2_11, {"forward_sync_buffers": False, "init_sync": False}, {"broadcast_buffers": False, "init_sync": False}),
        (of_2_11, {"batched_grad_copy": False}, {}),
        (of_2_11, {"batched_grad_copy": None}, {}),
        (DistributedDataParallel, EVERYWHERE, EVERYWHERE),  # the installed torch
    ],
)
def test_an_option_is_passed_on_where_torch_has_it(constructor: Any, given: dict[str, Any], passed: dict[str, Any]) -> None:
    """By the name that it has there, or left out if it asks for nothing."""
    assert ddp_options(constructor, given) == passed


@pytest.mark.parametrize(("version", "whole"), [("2.11.0+cpu", True), ("2.12.1", True), ("2.13.0", False), ("2.15.0", False)])
def test_an_older_torch_does_not_split_integers(monkeypatch: pytest.MonkeyPatch, version: str, whole: bool) -> None:
    """`fully_shard` of torch 2.11 makes a parameter with a gradient of every shard, which integers cannot have."""
    module = nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    assert unsplittable(module) == ({module.codes} if whole else set())
