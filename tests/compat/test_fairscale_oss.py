"""OSS: an optimizer whose state is divided, and looks whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import CheckpointError, NotHereError, OptimizerError, UsageError
from echelon.compat.fairscale.nn import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS
from tests.compat.fairscale import far, loss, mine, updates, values
from tests.conftest import Ranks, clean_environment
from tests.kit import forked
from tests.kit.models import Batch, Net, batch, largest_difference, net, plain_training, same_bits
from tests.kit.refusals import refused

pytestmark = pytest.mark.standing_ranks


def _groups(module: Net) -> list[dict[str, Any]]:
    return [{"params": module.first.parameters()}, {"params": module.blocks.parameters(), "lr": 0.05, "weight_decay": 0.1}]


def _optimizer(module: Net, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """AdamW with groups, one of them added later."""
    optimizer = make(_groups(module), lr=0.1)
    optimizer.add_param_group({"params": list(module.last.parameters()), "lr": 0.02})
    return optimizer


def _steps(module: nn.Module, optimizer: Any, data: list[list[Batch]], size: int, schedule: Any = None) -> None:
    """Each update on all rows of the global batch, of which this rank has its share."""
    for window in data:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        rows = slice(dist.get_rank(), None, size) if size > 1 else slice(None)

        def closure(x: torch.Tensor = x[rows], y: torch.Tensor = y[rows]) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(module, (x, y))
            found.backward()
            return found

        assert optimizer.step(closure) is not None
        if schedule is not None:
            schedule.step()


def _plain(data: list[list[Batch]], state: Any = None, schedule: bool = True) -> tuple[Net, torch.optim.Optimizer, Any]:
    module = net()
    optimizer = _optimizer(module, torch.optim.AdamW)
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if state is not None:
        module.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        lr.load_state_dict(state[2])
    _steps(module, optimizer, data, 1, lr)
    return module, optimizer, lr


def _saved_and_loaded(before: list[list[Batch]], after: list[list[Batch]], folder: Path) -> dict[str, Any]:
    """Trains, saves, goes on; and from whatever is in the folder goes on as well."""
    size, rank = dist.get_world_size(), dist.get_rank()
    done: dict[str, Any] = {}

    def built() -> tuple[Net, ShardedDataParallel, OSS, Any]:
        module = net()
        optimizer = _optimizer(module, partial(OSS, optim=torch.optim.AdamW))
        assert isinstance(optimizer, OSS) and isinstance(optimizer, torch.optim.Optimizer)
        model = ShardedDataParallel(module, optimizer)
        return module, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    for path in sorted(folder.glob("*.pt")):
        module, model, optimizer, lr = built()
        state = torch.load(path)
        untouched = copy.deepcopy(state)
        module.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        lr.load_state_dict(state[2])
        _steps(model, optimizer, after, size, lr)
        done[f"from {path.stem}"] = values(module)
        assert same_bits(state, untouched), "the caller's dict was changed"
    module, model, optimizer, lr = built()
    _steps(model, optimizer, before, size, lr)
    with refused(CheckpointError):
        optimizer.state_dict()
    last = size - 1
    optimizer.consolidate_state_dict(last)
    if rank == last:
        done["state"] = optimizer.state_dict()
    else:
        with pytest.raises(RuntimeError):
            optimizer.state_dict()
    everyones = optimizer.state_dict(all_ranks=True)
    done["everyones"] = everyones
    done["own"] = len(optimizer.optim.state), [len(g["params"]) for g in optimizer.param_groups]
    if rank == 0:
        torch.save((module.state_dict(), everyones, lr.state_dict()), folder / f"{size} ranks.pt")
    _steps(model, optimizer, after, size, lr)
    with pytest.raises(CheckpointError):  # as it was before the steps
        optimizer.state_dict()
    done["straight"] = values(module)
    with pytest.raises(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}] * 3})
    return done


@pytest.mark.full
def test_state_is_the_plain_optimizers_and_goes_to_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    data = updates(4, steps=7)
    before, after = data[:3], data[3:]
    plain, optimizer, lr = _plain(before)
    state = copy.deepcopy((plain.state_dict(), optimizer.state_dict(), lr.state_dict()))
    torch.save(state, tmp_path / "one process.pt")
    want = values(_plain(after, copy.deepcopy(state))[0])
    seen = []
    for size in (2, 4):
        everyones = ranks(size, _saved_and_loaded, before, after, tmp_path)
        assert sum(done["own"][0] for done in everyones) == 12 and everyones[0]["own"][1] == [2, 8, 2]
        for done in everyones:
            for name, got in done.items():
                if name.startswith(("from", "straight")):
                    assert largest_difference(got, want) < 1e-12, (size, name)
                    seen.append(name)
                elif name in ("state", "everyones"):
                    assert far(got, state[1]) < 1e-12, (size, name)
        again, _, _ = _plain(after, torch.load(tmp_path / f"{size} ranks.pt"))
        assert largest_difference(values(again), want) < 1e-12
    assert {"from one process", "from 2 ranks", "straight"} <= set(seen)


def _odds_and_ends() -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = net()
    optimizer = OSS(module.named_parameters(), torch.optim.SGD, lr=0.1, broadcast_fp16=True, force_broadcast_object=True)
    model = ShardedDataParallel(module, optimizer)
    loss(model, batch(4, dist.get_rank())).backward()
    for norm_type in (1.0, 2.0, float("inf")):
        found[f"norm {norm_type}"] = float(optimizer.clip_grad_norm(1e9, norm_type))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = values(module)
    optimizer.step()
    found["moved"] = largest_difference(before, values(module))
    found["names"] = optimizer.state_dict(all_ranks=True)["param_groups"][0]["param_names"][0]
    for kind, message in ((torch.optim.LBFGS, "cannot shard LBFGS, which needs all parameters at once"),):
        with pytest.raises(UsageError, match=message):
            OSS(module.parameters(), kind)
    with refused(UsageError):
        optimizer.consolidate_state_dict(2)
    with refused(NotHereError):
        optimizer.partition_parameters()
    frozen = nn.Linear(2, 1).requires_grad_(False)
    late = OSS([*nn.Linear(2, 2).parameters(), *frozen.parameters()])
    frozen.requires_grad_(True)
    frozen(torch.ones(2)).sum().backward()
    with refused(OptimizerError):
        late.step()
    part = net()
    part.first.requires_grad_(False)
    made = [kind(part.parameters(), lr=0.1) for kind in (partial(OSS, optim=torch.optim.Adagrad), torch.optim.Adagrad)]
    whole, plain = (each.state_dict(**more) for each, more in zip(made, ({"all_ranks": True}, {}), strict=True))
    found["with a frozen layer"] = far(whole["state"], plain["state"]), len(whole["state"]) - len(plain["state"])
    return found


def test_norms_names_options_and_errors(ranks: Ranks) -> None:
    module = net()
    loss(module, tuple(torch.cat(p) for p in zip(batch(4, 0), batch(4, 1), strict=True))).backward()  # type: ignore[arg-type]
    for found in ranks(2, _odds_and_ends):
        for norm_type in (1.0, 2.0, float("inf")):
            want = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
            assert found[f"norm {norm_type}"] == pytest.approx(float(want), rel=1e-12)
        assert found["moved"] == 0 and found["names"] == "first.weight" and found["with a frozen layer"] == (0, 0)


def _muon(divide: bool) -> dict[str, torch.Tensor]:
    module = net()
    matrices = [p for p in module.parameters() if p.dim() == 2]
    optimizer = OSS(matrices, torch.optim.Muon, lr=0.1) if divide else torch.optim.Muon(matrices, lr=0.1)
    model = ShardedDataParallel(module, optimizer) if divide else module
    for window in updates(2, steps=3):
        for data in mine([window]) if divide else window:
            (loss(model, data) / (1 if divide else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: v for n, v in values(module).items() if v.dim() == 2}


def test_an_optimizer_that_needs_whole_matrices(ranks: Ranks) -> None:
    want = _muon(False)
    for got in ranks(2, _muon, True):
        # Its iteration computes in bfloat16, which turns a last bit of a gradient into more.
        assert largest_difference(got, want) < 1e-3


def _in_a_part_of_the_world() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Two groups of two ranks, each with a model of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, place = groups[dist.get_rank() % 2], dist.get_rank() // 2
    module = net(seed=dist.get_rank() % 2)
    optimizer = OSS(module.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9)
    model = ShardedDataParallel(module, optimizer, group)
    for window in updates(2):
        loss(model, window[place]).backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(1)
    return values(model), optimizer.state_dict()["state"] if place == 1 else {}


@pytest.mark.full
def test_groups_that_are_parts_of_the_world(ranks: Ranks) -> None:
    done = ranks(4, _in_a_part_of_the_world)
    for rank, (got, state) in enumerate(done):
        want = plain_training(updates(2), module=net(seed=rank % 2), clip=0.5)[0]
        assert largest_difference(got, want) < 1e-12
        assert len(state) == (12 if rank >= 2 else 0)


ENDS = """
import gc, weakref
import torch
import torch.distributed as dist
from echelon.compat.fairscale import groups
from echelon.compat.fairscale.nn import ShardedDataParallel
from echelon.compat.fairscale.optim import OSS

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.Linear(2, 2)
    optimizer = OSS(module.parameters(), lr=0.1)
    ShardedDataParallel(module, optimizer)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    return group

group = train()
gc.collect()
assert group() is not None, "freed right after a collective, where gloo can hang"
groups._let_go()
assert group() is None, "held until the interpreter is taken down"
"""


def test_a_group_is_freed_neither_at_once_nor_with_the_interpreter() -> None:
    done = forked.run([sys.executable, "-c", ENDS], env=clean_environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_ranks_of_spawn_end(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.compat.programs.fairscale_spawn", str(tmp_path)]
    done = forked.run(program, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("ended") == 2, done.stdout + done.stderr
