"""torchtnt.utils' half about modules and optimizers: prepared by hand they train what one process trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import LayoutError, NotHereError, PrecisionError, UsageError
from echelon.compat.torchtnt.framework.auto_unit import AutoPredictUnit, AutoUnit
from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
from echelon.compat.torchtnt.utils import checkpoint, extract_lr_from_optimizer
from echelon.compat.torchtnt.utils import prepare_module as tnt
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
    return found


def _recompute() -> tnt.ActivationCheckpointParams:
    return tnt.ActivationCheckpointParams(check_fn=lambda m: isinstance(m, nn.Sequential))


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


# --- without other ranks


def test_names_become_strategies_and_types() -> None:
    kinds = {"ddp": tnt.DDPStrategy, "fsdp": tnt.FSDPStrategy, "fsdp2": tnt.FSDP2Strategy, "noop": tnt.NOOPStrategy}
    for name, kind in kinds.items():
        assert type(tnt.convert_str_to_strategy(name)) is kind
    with refused(LayoutError):
        tnt.convert_str_to_strategy("deepspeed")
    convert = tnt.convert_precision_str_to_dtype
    assert [convert(n) for n in ("fp16", "bf16", "fp32")] == [torch.float16, torch.bfloat16, None]
    with refused(PrecisionError):
        convert("int8")
    assert tnt.ShardingStrategy is ShardingStrategy
    mixed = tnt.MixedPrecision("fp16", "torch.float32", "bfloat16", _module_classes_to_ignore=("torch.nn.LayerNorm",))
    assert mixed._module_classes_to_ignore == (nn.LayerNorm,)
    assert (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype) == (torch.float16, torch.float32, torch.bfloat16)
    with refused(PrecisionError):
        tnt.MixedPrecision("nn")


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


def test_options_of_an_fsdp_strategy_may_be_strings() -> None:
    assert tnt.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_PRE").name == "zero2"
    with refused(LayoutError):
        tnt.prepare_fsdp(net(), CPU, tnt.FSDPStrategy(sharding_strategy="other"))


def test_what_cannot_be_prepared_is_refused() -> None:
    device = torch.device("cpu")
    with refused(LayoutError):
        tnt.convert_str_to_strategy("foo")
    with refused(LayoutError):
        tnt.prepare_module(net(), device, strategy=3)  # type: ignore[arg-type]
    with refused(NotHereError):
        tnt.prepare_module(net(), device, strategy="noop", enable_compiled_autograd=True)
    with refused(NotHereError):
        tnt.prepare_fsdp2(net(), device, global_mesh=object())
    with pytest.raises(TypeError, match="no_such_argument"):
        tnt.prepare_fsdp2(net(), device, no_such_argument=None)


def test_submodules_of_some_kinds_are_compiled() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    tnt.apply_torch_compile(module, tnt.TorchCompileParams(backend="eager", recursive_module_types=["ReLU", nn.Linear]))
    assert [part._compiled_call_impl is not None for part in module.modules()] == [False, True, False, True, True]


def test_an_option_that_cannot_be_is_refused_when_the_strategy_is_made() -> None:
    with refused(UsageError):
        tnt.FSDPStrategy(limit_all_gathers=False)


def test_older_options_without_effect_say_so(caplog: pytest.LogCaptureFixture) -> None:
    tnt.FSDPStrategy(backward_prefetch=None, state_dict_type="FULL_STATE_DICT")
    assert "backward_prefetch=...) has no effect" in caplog.text and "state_dict_type=...) has no effect" in caplog.text
    assert tnt.ActivationCheckpointParams("REENTRANT", every=2).every == 2


def test_words_of_echelons_unit_are_answered_with_torchtnts() -> None:
    class Fit(AutoUnit[Any]):
        def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, Any]:
            return self.module(data).mean(), None

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return torch.optim.SGD(module.parameters(), lr=0.1), None

    for word in ("layout", "accumulate", "prefetch"):
        with refused(UsageError):
            Fit(module=net(), **{word: None})
    with refused(UsageError):
        Fit(module=net(), compile=True, torch_compile_params=tnt.TorchCompileParams(backend="eager"))
    with refused(UsageError):
        Fit(module=net(), detect_anomalies=True)
    with refused(UsageError):
        AutoPredictUnit(module=net(), layout="ddp")
    assert Fit(module=net(), deterministic=None).training
