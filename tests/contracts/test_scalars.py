"""Scalar parameters under every layout: whole, with the gradient that one process has, saved and restored everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from tests.conftest import Ranks
from tests.kit.models import Batch, Net, batch, largest_difference, plain_training, whole
from tests.kit.units import FORMS, KINDS, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A block that is sharded by itself, with a scalar of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.gate


class Temperature(Net):
    """Scalars in the root and in blocks, one tied, one frozen, one that some steps do not use; and parameters of few elements, or
    of complex ones.
    """

    tp_plan = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(8) for _ in range(3))
        self.blocks[2].gate = self.blocks[1].gate
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.sometimes = nn.Parameter(torch.tensor(0.1))
        self.phases = nn.Parameter(torch.linspace(-0.1, 0.1, 6, dtype=torch.float64).to(torch.complex128) * (1 + 0.5j))
        self.one, self.none = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        extra = self.sometimes if self.calls % 2 else 0.0
        turned = (x.sum(1, keepdim=True) * self.phases).square()
        extra = extra + (turned.real + 0.3 * turned.imag).sum(1, keepdim=True)
        return super().forward(x) * torch.exp(self.temperature) / self.fixed * self.one + extra + self.none.sum()


def _module() -> nn.Module:
    torch.manual_seed(0)
    return Temperature().double()


UPDATES = 4


def _rows(rank: int) -> list[Batch]:
    return [batch(1 + (i + rank) % 3, 10 * i + rank) for i in range(2 * UPDATES - 1)]


def _strategy(name: str) -> Any:
    unused = ech.DDPStrategy(find_unused_parameters=True)
    return {"ddp": unused, "zero1": unused.but(shard_optimizer=True)}.get(name, name)


def _train(layouts: list[str], optimizer: str) -> dict[str, Any]:
    done = {}
    for name in layouts:
        options = {"gradient_accumulation_steps": 2, "clip_grad_norm": 0.2, "lr": 0.02, "optimizer": optimizer}
        unit = Regression(module=_module(), layout=_strategy(name), **options)
        ech.train(unit, _rows(dist.get_rank()), max_epochs=1)
        done[name] = whole(unit.module), unit.norms
    return done


def _want(ranks: int, optimizer: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Micro-batch by micro-batch, for the model looks at how often it was called."""
    module, norms = _module(), []
    kind = getattr(torch.optim, optimizer)
    opt = kind(module.parameters(), lr=0.02, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    shares = [_rows(r) for r in range(ranks)]
    for start in range(0, len(shares[0]), 2):
        micros = [b for i in range(start, min(start + 2, len(shares[0]))) for b in (share[i] for share in shares)]
        total = sum(len(x) for x, _ in micros)
        for i, (x, y) in enumerate(micros):
            module.calls = start + i // ranks
            (nn.functional.mse_loss(module(x), y) * len(x) / total).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)))
        opt.step()
        opt.zero_grad()
    return {n: p.detach() for n, p in module.named_parameters()}, norms


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, KINDS),
        (2, FORMS),
        (4, ["fsdp", "hsdp", "zero2"]),
    ],
)
def test_scalars_are_trained_as_in_one_process(ranks: Ranks, size: int, layouts: list[str]) -> None:
    for optimizer in ("SGD", "AdamW") if size == 2 else ("AdamW",):
        want, norms = _want(size, optimizer)
        all_done = ranks(size, _train, layouts, optimizer)
        for done in all_done:
            for name, (got, got_norms) in done.items():
                assert got_norms == pytest.approx(norms, rel=1e-10), (name, optimizer)
                assert largest_difference(got, want) < 1e-11, (name, optimizer)
                assert largest_difference(got, all_done[0][name][0]) == 0, (name, optimizer)


class Skipping(Temperature):
    """Only the first rank's loss has anything to do with the scalars."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = Net.forward(self, x).detach()
        first = self.first(x).sum()
        return out + first * (torch.exp(self.temperature) if dist.get_rank() == 0 else 1.0)


def _skipping() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unit = Regression(module=Skipping().double(), layout="fsdp")
    ech.train(unit, [batch(2, i) for i in range(3)], max_epochs=1)
    return whole(unit.module)


def test_a_rank_may_leave_a_scalar_out(ranks: Ranks) -> None:
    first, second = ranks(2, _skipping)
    assert largest_difference(first, second) == 0
    assert first["temperature"] != 0.3 and first["blocks.0.gate"] == 0.5  # that no rank used: no weight decay, no momentum


class ByHand(ech.TrainUnit[Batch]):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, foreach=True)
        self.micros = 0

    def train_step(self, state: ech.State, data: Batch) -> None:
        self.micros += 1
        (nn.functional.mse_loss(self.module(data[0]), data[1]) / 2).backward()
        if self.micros % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _by_hand() -> dict[str, torch.Tensor]:
    unit = ByHand(ech.layouts.prepare_fsdp(_module(), CPU))
    ech.train(unit, [batch(2, 10 * i + dist.get_rank()) for i in range(4)], max_epochs=1)
    return whole(unit.module)


@pytest.mark.full
def test_in_a_unit_of_ones_own_too(ranks: Ranks) -> None:
    alone = ByHand(_module())
    # Two micro-batches of one process at a time, with the calls of one rank.
    for i in range(4):
        for rank in range(2):
            alone.module.calls = i
            (nn.functional.mse_loss(alone.module(batch(2, 10 * i + rank)[0]), batch(2, 10 * i + rank)[1]) / 4).backward()
        if i % 2:
            alone.optimizer.step()
            alone.optimizer.zero_grad()
    want = whole(alone.module)
    for got in ranks(2, _by_hand):
        assert largest_difference(got, want) < 1e-11


def _save(folder: str, layout: str) -> dict[str, Any]:
    unit = Regression(module=_module(), layout=_strategy(layout), optimizer="AdamW", swa_params=ech.units.SWAParams(0, 1))
    saver = ech.DistributedCheckpointSaver(folder)
    ech.train(unit, [batch(2, 10 * i + dist.get_rank()) for i in range(3)], max_epochs=1, callbacks=[saver])
    return _state(unit)


def _state(unit: Any) -> dict[str, Any]:
    named = dict(unit.prepared.unwrapped.named_parameters())
    averages = {f"swa {n}": _whole(t).clone() for n, t in unit.swa_model.state_dict().items() if isinstance(t, torch.Tensor)}
    moments = {}
    if not isinstance(unit.module, nn.parallel.DistributedDataParallel):
        moments = {f"{n} {k}": _whole(v).clone() for n, p in named.items() for k, v in unit.optimizer.state.get(p, {}).items()}
    return {**whole(unit.module), **averages, **moments}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _load(folder: str, layouts: list[str]) -> dict[str, Any]:
    done = {}
    for layout in layouts:
        unit = Regression(module=_module(), layout=_strategy(layout), optimizer="AdamW", swa_params=ech.units.SWAParams(0, 1))
        ech.DistributedCheckpointSaver.restore_from_latest(folder, unit)
        before = _state(unit)
        ech.train(unit, [batch(2, 77)], max_epochs=2)
        done[layout] = before, whole(unit.module)
    return done


@pytest.mark.full
def test_scalars_go_through_checkpoints_to_every_strategy(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, _save, str(tmp_path), "fsdp")[0]
    layouts = ["fsdp", "ddp", "zero1", "zero2"]
    for done in ranks(2, _load, str(tmp_path), layouts):
        for before, after in done.values():
            assert largest_difference(before, {n: saved[n] for n in before}) == 0
            assert largest_difference(after, done["ddp"][1]) < 1e-12
    assert largest_difference(saved, ranks(2, _load, str(tmp_path), ["fsdp"])[1]["fsdp"][0]) == 0


def _half() -> list[Any]:
    module = _module().float()
    module.phases = nn.Parameter(module.phases.detach().to(torch.complex64), requires_grad=False)  # torch scales no complex ones
    unit = Regression(module=module, layout="fsdp", precision=ech.layouts.Precision(torch.float16, init_scale=2.0**40))
    ech.train(unit, [batch(2, i + dist.get_rank(), torch.float32) for i in range(3)], max_epochs=1)
    return [float(unit.prepared.unwrapped.temperature.detach()), unit.grad_scaler.get_scale()]


def test_an_inf_in_a_scalars_gradient_skips_the_update_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, _half)
    assert first == second and first[1] < 2.0**40 and first[0] == pytest.approx(0.3)


def _bitwise(layout: str) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank() if dist.is_initialized() else 0, dist.get_world_size() if dist.is_initialized() else 1
    unit = Regression(module=_module().float(), layout=layout, deterministic="bitwise", clip_grad_norm=0.3)
    micros = [batch(2, 10 * (i * size + rank), torch.float32) for i in range(3 * 4 // size)]
    unit.prepared.unwrapped.calls = 1  # as many calls on each number of ranks would be another model: they are all odd
    unit.prepared.unwrapped.register_forward_pre_hook(lambda module, args: setattr(module, "calls", 0))
    ech.train(unit, micros, max_epochs=1)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.fresh_ranks
def test_bit_equal_training_holds_for_scalars(ranks: Ranks) -> None:
    want = ranks(1, _bitwise, "none")[0]
    for size in (2, 4):
        for got in ranks(size, _bitwise, "fsdp"):
            assert largest_difference(got, want) == 0, size


def _tensor_parallel() -> str:
    module = _module()
    with pytest.raises(UsageError) as caught:
        Regression(module=module, layout=ech.Layout(tp=-1, plan={"blocks.*.inner": "colwise_gather"}))
    return str(caught.value)


def test_tensor_parallelism_cannot_know_what_a_scalars_gradient_is(ranks: Ranks) -> None:
    assert all("Temperature.temperature is a scalar" in text for text in ranks(2, _tensor_parallel))


@pytest.mark.full
def test_tensor_parallelism_over_one_rank_has_no_such_question(ranks: Ranks) -> None:
    want, _ = _want(2, "SGD")
    for got in ranks(2, _over_data):
        assert largest_difference(got, want) < 1e-11


def _over_data() -> dict[str, torch.Tensor]:
    layout = ech.Layout(tp=1, plan={"blocks.*.inner": "colwise_gather"})
    unit = Regression(module=_module(), layout=layout, accumulate=2, clip_grad_norm=0.2, lr=0.02)
    ech.train(unit, _rows(dist.get_rank()), max_epochs=1)
    return whole(unit.module)


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 1, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale.double())


def _of_two_types() -> tuple[float, bool]:
    unit, rank = Regression(module=TwoTypes(), layout="fsdp", lr=0.1, optimizer="SGD"), dist.get_rank()
    ech.train(unit, [batch(4, 10 * i + rank) for i in range(3)], max_epochs=1)
    rows = [[batch(4, 10 * i), batch(4, 10 * i + 1)] for i in range(3)]
    want, _, _ = plain_training(rows, module=TwoTypes(), lr=0.1, optimizer="SGD")
    return largest_difference(whole(unit.module), want), hasattr(unit.module.scale, "device_mesh")


@pytest.mark.full
def test_what_is_of_another_type_than_its_surroundings_stays_whole(ranks: Ranks) -> None:
    for far, is_split in ranks(2, _of_two_types):
        assert far < 1e-6 and not is_split
