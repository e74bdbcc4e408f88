"""A module as its author wrote it: names, class and Prepared, whatever wraps it; recognised once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ech
from echelon.loop.checkpointing.changes import facts
from echelon.parallel.names import plain_buffers, plain_names, unwrapped
from echelon.prover.values import named_values, parameters_of
from tests.conftest import Ranks
from tests.models import batch, net
from tests.units import Regression


class Holder(nn.Module):
    """Its author calls a layer `module`, as DistributedDataParallel calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x))


class Own(ech.TrainUnit[Any]):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.net = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        self.net(data[0]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


NAMES = ["module.weight", "module.bias", "norm.weight", "norm.bias"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def _seen() -> dict[str, Any]:
    seen = {}
    for name, wrap in {"plain": lambda m: m, "ddp": DistributedDataParallel, "fsdp": fully_shard, "dp": nn.DataParallel}.items():
        module: nn.Module = wrap(Holder())  # type: ignore[operator]
        described = Own(module).prepared_modules()["net"].describe()
        names = [n for n, _ in plain_names(module)], [n for n, _ in parameters_of(Own(module))]
        buffers = [n for n, _ in plain_buffers(module)], list(named_values(Own(module)))
        within = [n for n, _ in plain_names(nn.Sequential(module))]
        seen[name] = *names, *buffers, within, type(unwrapped(module)).__name__.removeprefix("FSDP"), described["strategy"]
    return seen


def test_names_are_the_authors_even_where_a_layer_is_called_as_a_wrapper_calls_it(ranks: Ranks) -> None:
    for seen in ranks(2, _seen):
        for wrap, found in seen.items():
            within = [f"0.{name}" for name in NAMES]
            assert found == (NAMES, NAMES, BUFFERS, BUFFERS, within, "Holder", None if wrap == "plain" else wrap)


def test_names_in_a_compiled_module_are_the_authors() -> None:
    assert [n for n, _ in plain_names(torch.compile(Holder(), backend="eager"))] == NAMES  # type: ignore[arg-type]


def test_a_module_is_recognised_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recognised: list[nn.Module] = []
    of = ech.Prepared.of

    def counted(module: nn.Module, world: ech.World) -> ech.Prepared[Any]:
        recognised.append(module)
        return of(module, world)

    monkeypatch.setattr(ech.Prepared, "of", staticmethod(counted))
    unit = Own(net())
    saver = ech.DistributedCheckpointSaver(tmp_path, save_every_n_train_steps=1)
    ech.train(unit, [batch(4, i) for i in range(5)], max_epochs=2, callbacks=[saver])
    assert recognised == [unit.net]
    unit.net = net(seed=1)
    assert unit.prepared_modules()["net"].module is unit.net and recognised == [*recognised[:1], unit.net]


def test_a_copy_of_a_unit_recognises_its_own_modules() -> None:
    import copy
    import pickle

    unit = Own(net())
    assert unit.prepared_modules()["net"].module is unit.net
    for twin in (copy.deepcopy(unit), pickle.loads(pickle.dumps(unit))):
        assert twin.prepared_modules()["net"].module is twin.net is not unit.net


def test_a_manifest_says_the_strategy_as_it_was_given_or_as_it_was_done_by_hand() -> None:
    said = [facts(unit, None)["strategy"] for unit in (Regression(strategy="noop"), Regression(strategy=ech.NOOPStrategy()))]
    assert said == ["noop", "NOOPStrategy"]
    assert [facts(Own(m), None)["strategy"] for m in (nn.DataParallel(net()), net())] == ["dp", None]
    assert facts(Own(nn.DataParallel(Holder())), None)["modules"] == {"net": "Holder"}


def _on_rank_0_alone() -> bool:
    if torch.distributed.get_rank() == 0:
        return not Regression(strategy="noop").prepared.is_replica and not Regression().prepared.is_replica
    return True


def test_one_rank_may_make_a_unit_that_is_not_parallel(ranks: Ranks) -> None:
    assert ranks(2, _on_rank_0_alone) == [True, True]
