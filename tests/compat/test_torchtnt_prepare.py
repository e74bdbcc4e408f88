"""torchtnt.utils' half about modules and optimizers: prepared by hand they train what one process trains."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import UsageError
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.utils import checkpoint, fsdp_utils, precision, stateful
from echelon.compat.torchtnt.utils import prepare_module as tnt
from echelon.compat.torchtnt.utils.optimizer import extract_lr_from_optimizer
from echelon.compat.torchtnt.utils.progress import Progress
from echelon.compat.torchtnt.utils.swa import AveragedModel
from tests.compat.fairscale import mine, updates
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
STEPS = 4


def _mse(module: nn.Module, data: Any) -> torch.Tensor:
    return nn.functional.mse_loss(module(data[0]), data[1])


def _trained(module: nn.Module, *, clip: bool = False) -> dict[str, torch.Tensor]:
    """A program's own loop: windows of two micro-batches of this rank's rows."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    data = mine(updates(2, steps=2 * STEPS))
    for first, last in zip(data[::2], data[1::2], strict=True):
        with module.no_sync():  # type: ignore[operator]
            (_mse(module, first) / 2).backward()
        if hasattr(module, "set_requires_gradient_sync"):
            assert all(p.grad is None for p in module.parameters())  # nothing was sent yet
        (_mse(module, last) / 2).backward()
        if clip:
            module.clip_grad_norm_(0.5)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
    return whole(module)


def _trained_each_step(module: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for data in mine(updates(2, steps=STEPS)):
        _mse(module, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(module)


class _Hook:
    """State of a communication hook that cannot be copied: it holds a lock."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0


def _count(state, bucket):  # torch compares annotations, which are strings here, with its own types
    state.calls += 1
    dist.all_reduce(bucket.buffer().div_(2))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())  # no callback, which gloo's thread would run while a dying Reducer has the interpreter
    return done


def _by_hand() -> dict[str, Any]:
    hook, group = _Hook(), dist.new_group([0, 1])
    ddp = tnt.DDPStrategy(process_group=group, comm_state=hook, comm_hook=_count)
    with torch.device("meta"):
        unborn = Net().double()
    unborn = tnt.prepare_fsdp2(unborn, CPU)
    predicates = tnt.FSDP2Strategy(shard_predicates=[lambda name, m: name.startswith("blocks.") and name.count(".") == 1])
    found: dict[str, Any] = {
        "windows": {
            "ddp": _trained(tnt.prepare_ddp(net(), CPU)),
            "fsdp": _trained(tnt.prepare_fsdp(net(), CPU)),
            "fsdp string": _trained(tnt.prepare_module(net(), CPU, strategy="fsdp")),
        },
        "clipped": _trained(tnt.prepare_fsdp(net(), CPU, tnt.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")), clip=True),
        "steps": {
            "ddp string": _trained_each_step(tnt.prepare_module(net(), CPU, strategy="ddp")),
            "ddp with a group and a hook": _trained_each_step(tnt.prepare_ddp(net(), CPU, ddp)),
            "fsdp2": _trained_each_step(tnt.prepare_fsdp2(net(), CPU)),
            "fsdp2 string": _trained_each_step(tnt.prepare_module(net(), CPU, strategy="fsdp2")),
            "all modules": _trained_each_step(tnt.prepare_fsdp2(net(), CPU, tnt.FSDP2Strategy(modules_to_shard="all"))),
            "predicates": _trained_each_step(tnt.prepare_fsdp2(net(), CPU, predicates)),
            "recomputed": _trained_each_step(
                tnt.prepare_module(net(), CPU, strategy="fsdp2", activation_checkpoint_params=_recompute())
            ),
        },
        "hook": hook.calls,
    }
    found["born"] = max(float(p.full_tensor().abs().max()) for p in unborn.parameters())  # type: ignore[attr-defined]
    found["error"] = _error(AveragedModel, unborn)
    return found


def _recompute() -> tnt.ActivationCheckpointParams:
    return tnt.ActivationCheckpointParams(check_fn=lambda m: isinstance(m, nn.Sequential))


def _error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as said:
        call(*args, **kwargs)
    return str(said.value)


@pytest.mark.full
def test_modules_prepared_by_hand_train_what_one_process_trains(ranks: Ranks) -> None:
    data = updates(2, steps=2 * STEPS)
    pairs = [[*a, *b] for a, b in zip(data[::2], data[1::2], strict=True)]
    windows, _, norms = plain_training(pairs)
    clipped, _, _ = plain_training(pairs, clip=0.5)
    assert max(norms) > 0.5
    steps = plain_training(updates(2, steps=STEPS))[0]
    for found in ranks(2, _by_hand):
        for name, got in found["windows"].items():
            assert largest_difference(got, windows) < 1e-12, name
        assert largest_difference(found["clipped"], clipped) < 1e-12
        for name, got in found["steps"].items():
            assert largest_difference(got, steps) < 1e-12, name
        assert found["hook"] >= STEPS
        assert 0 < found["born"] < 1  # TorchTNT leaves what the memory had, up to 1e34
        assert "skip_deepcopy=True" in found["error"]


def _counting() -> Any:
    module = net()
    module.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
    return module


def _averages(method: Any) -> dict[str, Any]:
    """Of a sharded module, in a second one of the same kind."""
    trained, average = (tnt.prepare_fsdp2(_counting(), CPU) for _ in range(2))
    averaged = AveragedModel(average, skip_deepcopy=True, ema_decay=0.5, averaging_method=method, use_buffers=True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    for data in mine(updates(2, steps=STEPS)):
        _mse(trained, data).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.seen += 1
        averaged.update_parameters(trained)
    assert float(averaged.module.seen[0]) < STEPS
    return {n.removeprefix("module."): p for n, p in whole(averaged).items()}


@pytest.mark.parametrize("method", ["ema", "swa"])
def test_averages_of_a_sharded_module(ranks: Ranks, method: Any) -> None:
    """Its buffers are whole, which torch's function refused beside sharded parameters."""
    plain = _counting()
    want = AveragedModel(plain, ema_decay=0.5, averaging_method=method, use_buffers=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for each in updates(2, steps=STEPS):
        _mse(plain, [torch.cat(parts) for parts in zip(*each, strict=True)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.seen += 1
        want.update_parameters(plain)
    for found in ranks(2, _averages, method):
        assert largest_difference(found, whole(want.module)) < 1e-12


# --- without other ranks


def test_names_become_strategies_and_types() -> None:
    kinds = {"ddp": tnt.DDPStrategy, "fsdp": tnt.FSDPStrategy, "fsdp2": tnt.FSDP2Strategy, "noop": tnt.NOOPStrategy}
    for name, kind in kinds.items():
        assert type(tnt.convert_str_to_strategy(name)) is kind
    with refused(UsageError):
        tnt.convert_str_to_strategy("deepspeed")
    convert = precision.convert_precision_str_to_dtype
    assert [convert(n) for n in ("fp16", "bf16", "fp32")] == [torch.float16, torch.bfloat16, None]
    with refused(UsageError):
        convert("int8")
    native = fsdp_utils.ShardingStrategy.to_native_sharding_strategy(fsdp_utils.ShardingStrategy.HYBRID_SHARD)
    assert native is ShardingStrategy.HYBRID_SHARD
    assert fsdp_utils.BackwardPrefetch.to_native_backward_prefetch("BACKWARD_POST") is BackwardPrefetch.BACKWARD_POST
    assert fsdp_utils.StateDictType.to_native_state_dict_type("SHARDED_STATE_DICT") is StateDictType.SHARDED_STATE_DICT
    with refused(UsageError):
        fsdp_utils.ShardingStrategy.to_native_sharding_strategy("MOST")
    mixed = fsdp_utils.MixedPrecision("fp16", "torch.float32", "bfloat16", _module_classes_to_ignore=("torch.nn.LayerNorm",))
    assert (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype) == (torch.float16, torch.float32, torch.bfloat16)
    made = mixed.to_native_mixed_precision()
    assert vars(made) == vars(mixed) and type(made) is not type(mixed) and mixed._module_classes_to_ignore == (nn.LayerNorm,)
    with refused(UsageError):
        fsdp_utils.MixedPrecision("nn")


def test_one_process_and_what_is_changed_in_place() -> None:
    module = net()
    assert tnt.prepare_module(module, CPU) is module
    other = net()
    tnt.apply_torch_compile(other, tnt.TorchCompileParams(backend="eager", recursive_module_types=["Linear"]))
    assert other._compiled_call_impl is None and other.first._compiled_call_impl is not None
    tnt.apply_ac(other, _recompute())
    assert type(other.blocks[0].forward).__name__ == "Recompute"
    with torch.device("meta"):
        unborn = nn.Linear(3, 3)
    assert tnt.on_meta_device(unborn) and not tnt.on_meta_device(module)
    tnt.materialize_meta_params(unborn, CPU)
    assert not tnt.on_meta_device(unborn) and 0 < float(unborn.weight.detach().abs().max()) <= 3**-0.5


def test_learning_rates_by_group() -> None:
    p, q, r = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [p], "lr": 0.1}, {"params": [q], "name": "a", "lr": 0.2}, {"params": [r], "name": "a", "lr": 0.3}]
    assert extract_lr_from_optimizer(torch.optim.SGD(groups), "optim") == {"optim/pg:0": 0.1, "optim/a:0": 0.2, "optim/a:1": 0.3}


def _average_of(values: list[float], model: AveragedModel, source: nn.Linear) -> None:
    for value in values:
        with torch.no_grad():
            source.weight.fill_(value)
        model.update_parameters(source)


def test_averages_go_on_after_a_resume() -> None:
    """TorchTNT does not save how many updates there were, so that a resumed average forgets nearly all."""
    source = nn.Linear(1, 1, bias=False).double()
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    want = values[0]
    for n, value in enumerate(values[1:], start=2):
        decay = min(0.9, (1 + n) / (10 + n))
        want = decay * want + (1 - decay) * value
    through = AveragedModel(source, use_lit=True, ema_decay=0.9)
    _average_of(values, through, source)
    first, second = (AveragedModel(source, use_lit=True, ema_decay=0.9) for _ in range(2))
    _average_of(values[:3], first, source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _average_of(values[3:], pickle.loads(pickle.dumps(second)), source)
    resumed = second
    _average_of(values[3:], resumed, source)
    assert through.module.weight.item() == pytest.approx(want, abs=1e-15)
    assert resumed.module.weight.item() == pytest.approx(want, abs=1e-15)
    alike = AveragedModel(source, averaging_method="swa")
    _average_of(values, alike, source)
    assert alike.module.weight.item() == pytest.approx(sum(values) / 5)
    assert alike(torch.ones(1, 1, dtype=torch.float64)).item() == pytest.approx(sum(values) / 5)
    own = nn.Linear(1, 1, bias=False).double()
    kept = AveragedModel(own, skip_deepcopy=True)
    assert kept.module is own and "n_averaged" in kept.state_dict()
    for bad, said in (
        ({"averaging_method": "mean"}, "Unknown averaging method: mean"),
        (
            {"use_lit": True, "averaging_method": "swa"},
            "LitEMA is only supported for EMA",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            AveragedModel(source, **bad)  # type: ignore[arg-type]


def test_checkpoints_of_a_run_are_found(tmp_path: Path) -> None:
    folder = str(tmp_path / "run train_step_1")  # TorchTNT loses sight of checkpoints under such a name
    assert checkpoint.get_latest_checkpoint_path(folder) is None and checkpoint.get_checkpoint_dirpaths(folder) == []

    class Scored(Regression):
        loss_at = 1.0

        def on_train_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.loss_at = (0.5, 0.0, 0.7)[self.train_progress.num_steps_completed]

    unit = Scored(module=net())
    best = checkpoint.BestCheckpointConfig("loss_at")
    saver = DistributedCheckpointSaver(folder, save_every_n_train_steps=1, best_checkpoint_config=best)
    ech.train(unit, [batch(1, i) for i in range(3)], max_epochs=1, callbacks=[saver])
    found = checkpoint.get_checkpoint_dirpaths(folder, ".metadata", "loss_at")
    assert [p.step[checkpoint.Phase.TRAIN] for p in found] == [1, 2, 3, 3] and found[1].metric_data == checkpoint.MetricData(
        "loss_at", 0.0
    )
    assert found[1].more_optimal_than(found[0], "min") and checkpoint.get_checkpoint_dirpaths(folder, None, "other") == []
    assert checkpoint.get_latest_checkpoint_path(folder) == found[3].path == str(max(found))
    assert checkpoint.get_best_checkpoint_path(folder, "loss_at", "min") == found[1].path
    assert checkpoint.get_best_checkpoint_path(folder, "other", "max") is None
    assert checkpoint.does_checkpoint_exist(found[0].path, [".metadata"])
    (Path(found[0].path) / manifest.MANIFEST).unlink()
    assert not checkpoint.does_checkpoint_exist(found[0].path, ".metadata")
    assert len(checkpoint.get_checkpoint_dirpaths(folder, ".metadata")) == 3
    files = pytest.importorskip("fsspec").filesystem("file")
    assert checkpoint.get_latest_checkpoint_path(folder, ".metadata", file_system=files) == found[3].path


def test_several_states_as_one() -> None:
    module, progress = net(), Progress(2, 5, 1)
    several = stateful.MultiStateful({"module": module, "progress": progress})
    saved = copy.deepcopy(several.state_dict())
    other = stateful.MultiStateful({"module": net(seed=1), "progress": Progress()})
    assert isinstance(several, stateful.Stateful)
    other.load_state_dict(saved)
    assert largest_difference(whole(other.stateful_objs["module"]), whole(module)) == 0
    assert other.stateful_objs["progress"].num_steps_completed == 5
    del saved["module"]["first.bias"]
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        other.load_state_dict(saved)
    stateful.MultiStateful(other.stateful_objs, strict=False).load_state_dict(saved)
    only = stateful.MultiStateful({"progress": Progress()})
    only.load_state_dict({"progress": saved["progress"]})
    assert only.stateful_objs["progress"].num_steps_completed == 5
    with pytest.raises(KeyError, match="unknown"):
        only.load_state_dict({"unknown": {}})


def test_a_plain_average_of_buffers_takes_the_newest_count_of_batches() -> None:
    """`SWAParams` averages buffers by default, also a batch norm's: of whole numbers torch has no mean, and ends in an error."""
    source = nn.BatchNorm1d(2)
    averaged = AveragedModel(source, averaging_method="swa", use_buffers=True)
    for mean in (1.0, 2.0, 6.0):
        source(torch.full((4, 2), mean))
        averaged.update_parameters(source)
    assert averaged.module.num_batches_tracked == source.num_batches_tracked == 3
    means = [0.1, 0.9 * 0.1 + 0.2, 0.9 * (0.9 * 0.1 + 0.2) + 0.6]
    assert averaged.module.running_mean.tolist() == pytest.approx([sum(means) / 3] * 2)
