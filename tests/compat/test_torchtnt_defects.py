"""Defects that were reproduced in TorchTNT: what of them our design could have, and the test that it has not.

Each id is the one under which it was recorded; the upstream file or thread is in docs/moving where users would notice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import echelon as ech
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.framework.callbacks.checkpointer_types import RestoreOptions
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.units import Regression

TESTS = Path(__file__).resolve().parents[1]

# Where a defect has its test; those without a name of a file stand below.
TESTED = {
    "B1: a resume in mid-epoch loses the batch that was read ahead": "test_no_batch_is_lost_or_leaks",
    "B2: a batch read ahead leaks into the next epoch": "loop/test_loop.py::test_every_epoch_runs_as_many_steps_as_allowed",
    "B3: every other epoch is empty if max_steps_per_epoch is the length": (
        "loop/test_loop.py::test_every_epoch_runs_as_many_steps_as_allowed"
    ),
    "B3b: every other evaluation is empty, and windows end early": "test_evaluations_of_limited_length_are_whole",
    "B4: two optimizers or two groups over sharded modules cannot be saved": "test_two_sharded_modules_with_groups_are_saved",
    "B5: fsdp2 by name always raises": (
        "parallel/test_strategies.py::test_tied_weights_and_batches_of_ones_own_under_every_strategy"
    ),
    "B6: DDPStrategy(process_group=...) raises": "test_a_strategy_takes_groups_and_states_that_cannot_be_copied",
    "B8: a module on the meta device trains on garbage": (
        "parallel/test_materialize.py::test_every_strategy_gives_the_values_of_a_plain_build_and_trains"
    ),
    "B9: a monitored 0.0 counts as missing": "compat/test_torchtnt_callbacks.py::test_the_metric_0_is_a_metric",
    "B10: folders and metrics with odd names hide checkpoints": "test_folders_and_metrics_may_have_any_name",
    "B12: max_steps or a stop in mid-epoch skips the rest of it": "test_no_batch_is_lost_or_leaks",
    "B14: the last, shorter window is scaled wrongly or leaks": (
        "loop/test_window.py::test_ranks_equal_one_process_and_plain_pytorch"
    ),
    "B15: Ctrl-C calls no on_exception, modules stay in train mode": (
        "loop/test_loop.py::test_whatever_ends_a_run_is_told_and_leaves_modules_in_their_mode"
    ),
    "B16: garbage collection stays off, flags stay set": "loop/test_callbacks_process.py::test_garbage_collection_is_on_again",
    "B17: the old checkpoint goes before the new one is there": (
        "checkpoint/test_checkpoint_commit.py::test_nothing_is_removed_before_the_new_one_is_there"
    ),
    "B18: streams are not told of tensors within tuples and dicts": (
        "compat/test_torchtnt_distributed.py::test_a_stream_is_told_of_data_however_deep"
    ),
    "B20: each rank makes up a file or a port of its own": (
        "compat/test_torchtnt_distributed.py::test_several_ranks_meet_by_every_method"
    ),
    "B23: restore changes the caller's options": "test_options_of_a_restore_stay_as_they_are",
    "B24: HSDP is impossible": "parallel/test_strategies.py::test_shards_stay_on_a_machine_and_there_are_two_copies_at_least",
    "B28: an empty evaluation runs after a stop": "loop/test_loop.py::test_a_stop_ends_after_the_step_and_runs_no_evaluation",
    "B32: averages fail under fsdp by name": "loop/test_averaged.py::test_averages_equal_torchs_on_one_process",
    "B35: clipping fails over mixed meshes": "parallel/test_gradients.py::test_one_norm_for_any_mixture_in_one_message_per_axis",
    "B37: a loader without state starts over without a word": (
        "loop/test_loop.py::test_going_on_in_mid_epoch_with_a_loader_without_state_warns"
    ),
    "B50: the second predict does nothing": (
        "loop/test_loop.py::test_predict_runs_as_often_as_it_is_called_and_test_is_a_phase_of_its_own"
    ),
    "B59: TorchSnapshotSaver.restore_with_id does nothing": "compat/test_torchtnt_callbacks.py::test_savers_save_and_restore",
    "4.2: what one strategy saves another cannot read": (
        "checkpoint/test_checkpoint_matrix.py::test_every_strategy_and_size_reads_what_every_other_wrote"
    ),
    "#1056: the last checkpoint is written twice": "checkpoint/test_checkpoint.py::test_a_step_is_saved_once",
    "a missing monitored attribute raises on rank 0 alone": (
        "loop/test_callbacks_control.py::test_what_is_no_number_of_the_units_is_an_error_on_all_ranks"
    ),
    "the averages' count of updates is lost at a resume": ("compat/test_torchtnt_prepare.py::test_averages_go_on_after_a_resume"),
}


@pytest.mark.parametrize("defect", TESTED)
def test_every_defect_has_a_test(defect: str) -> None:
    file, _, name = TESTED[defect].rpartition("::")
    tree = ast.parse((TESTS / (file or "compat/test_torchtnt_defects.py")).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


class Resumable:
    """As torchdata's StatefulDataLoader: its state is how many batches it has handed out; its length is a whole epoch's."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.given, self.start = batches, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Watching(Regression):
    seen: list[float]
    evaluated: list[float]

    def compute_loss(self, state: ech.State, data: Any) -> Any:
        phase = state.active_phase
        (self.seen if phase is ech.units.ActivePhase.TRAIN else self.evaluated).append(float(data[0][0, 0]))
        return super().compute_loss(state, data)


def watching(**options: Any) -> Watching:
    unit = Watching(lr=1e-3, **options)
    unit.seen, unit.evaluated = [], []
    return unit


def numbered(count: int) -> list[Any]:
    """Batches whose first number is their own."""
    made = [batch(4, i) for i in range(count)]
    for number, (x, _) in enumerate(made):
        x[0, 0] = number
    return made


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_batch_is_lost_or_leaks(tmp_path: Path, prefetch: bool, accumulate: int) -> None:
    """Training ends in the middle of the second epoch, and goes on from there with another process's loader."""
    options = {"accumulate": accumulate, "options": ech.UnitOptions(prefetch=prefetch)}
    first = watching(**options)
    saver = DistributedCheckpointSaver(str(tmp_path))
    ech.train(first, Resumable(numbered(6)), max_updates=8 // accumulate, callbacks=[saver])
    second, loader = watching(**options), Resumable(numbered(6))
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path), second, train_dataloader=loader)
    ech.train(second, loader, max_epochs=3)
    assert first.seen + second.seen == [0, 1, 2, 3, 4, 5] * 3
    whole_run = watching(**options)
    ech.train(whole_run, Resumable(numbered(6)), max_epochs=3)
    assert largest_difference(whole(second.module), whole(whole_run.module)) == 0


def test_evaluations_of_limited_length_are_whole() -> None:
    unit, plain = watching(accumulate=2), watching(accumulate=2)
    data = numbered(4)
    ech.fit(unit, data, data[:2], max_epochs=4, max_eval_steps_per_epoch=2, evaluate_every_n_updates=1)
    assert unit.evaluated == [0, 1] * 8
    ech.train(plain, data, max_epochs=4)
    assert largest_difference(whole(unit.module), whole(plain.module)) == 0


class Two(ech.TrainUnit[Any]):
    """Two modules, one optimizer with two groups for each."""

    def __init__(self, seed: int, shard: Any) -> None:
        super().__init__()
        self.a, self.b = shard(net(seed)), shard(net(seed + 1))
        for name in ("a", "b"):
            first, *rest = getattr(self, name).parameters()
            groups = [{"params": [first], "lr": 0.2}, {"params": rest}]
            setattr(self, f"optimizer_{name}", torch.optim.Adam(groups, lr=0.1))

    def train_step(self, state: ech.State, data: Any) -> None:
        for module, optimizer in ((self.a, self.optimizer_a), (self.b, self.optimizer_b)):
            nn.functional.mse_loss(module(data[0]), data[1]).backward()
            optimizer.step()
            optimizer.zero_grad()


def _by_fully_shard(module: nn.Module) -> nn.Module:
    return fully_shard(module)


def _by_fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def _alike(a: nn.Module, b: nn.Module) -> bool:
    """On this rank: of the older FSDP some parameters are empty."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(*(p.to_local() if isinstance(p, DTensor) else p.detach() for p in pair)) for pair in pairs)


def _two(folder: str) -> list[bool]:
    same = []
    rank, world = dist.get_rank(), dist.get_world_size()
    shares = [(x[rank::world], y[rank::world]) for x, y in (batch(8, i) for i in range(4))]
    for shard in (_by_fully_shard, _by_fsdp1):
        place = f"{folder}/{shard.__name__}"
        unit = Two(0, shard)
        ech.train(unit, shares[:2], max_epochs=1, callbacks=[DistributedCheckpointSaver(place)])
        other = Two(50, shard)
        assert DistributedCheckpointSaver.restore_from_latest(place, other)
        for each in (unit, other):
            ech.train(each, shares[2:], max_epochs=2)
        same += [_alike(unit.a, other.a), _alike(unit.b, other.b)]
    return same


@pytest.mark.full
def test_two_sharded_modules_with_groups_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _two, str(tmp_path)) == [[True] * 4] * 2


def _own_group() -> list[float]:
    group = dist.new_group()
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    options = [{"process_group": group}, {"comm_state": group, "comm_hook": allreduce_hook}]
    units = [Regression(layout=ech.DDPStrategy(**each)) for each in ({}, *options)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for unit in units:
        ech.train(unit, [tuple(each[rank::world] for each in batch(8, i)) for i in range(3)], max_epochs=1)
    return [largest_difference(whole(unit.module), whole(units[0].module)) for unit in units[1:]]


@pytest.mark.full
def test_a_strategy_takes_groups_and_states_that_cannot_be_copied(ranks: Ranks) -> None:
    for differences in ranks(2, _own_group):
        assert max(differences) < 1e-12


@pytest.mark.parametrize("name", ["my_train_step_runs", "epoch_1_train_step_2", "50% = x"])
def test_folders_and_metrics_may_have_any_name(tmp_path: Path, name: str) -> None:
    unit = Regression()
    setattr(unit, "loss/on-eval", 0.25)
    best = ech.callbacks.BestCheckpointConfig(monitored_metric="loss/on-eval", mode="min")
    saver = DistributedCheckpointSaver(str(tmp_path / name), save_every_n_epochs=1, best_checkpoint_config=best)
    ech.train(unit, [batch(2, 0)], max_epochs=1, callbacks=[saver])
    assert DistributedCheckpointSaver.restore_from_latest(str(tmp_path / name), Regression())
    assert DistributedCheckpointSaver.restore_from_best(str(tmp_path / name), Regression(), "loss/on-eval", "min")


def test_options_of_a_restore_stay_as_they_are(tmp_path: Path) -> None:
    data = [batch(2, 0)]
    unit = Regression()
    ech.fit(unit, data, data, max_epochs=1, callbacks=[DistributedCheckpointSaver(str(tmp_path), save_every_n_eval_epochs=1)])
    options = RestoreOptions()
    before = repr(options)
    DistributedCheckpointSaver.restore_from_latest(str(tmp_path), Regression(), restore_options=options)
    assert repr(options) == before
