"""Rows of docs/moving as programs: those that no test of a part's own tries already. By the row's first words."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import CheckpointError, EchelonError, UsageError
from tests.compat.fairscale import far, loss, mine, oss, updates, values
from tests.kit.models import batch, largest_difference, net
from tests.kit.units import Regression

ALONE: dict[str, Callable[[Path], None]] = {}  # in one process; each gets an empty folder
TOGETHER: dict[str, Callable[[], None]] = {}  # on two ranks


def alone(row: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    return lambda program: ALONE.setdefault(row, program)


def together(row: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    return lambda program: TOGETHER.setdefault(row, program)


def refused(call: Callable[[], Any], says: str) -> None:
    try:
        call()
    except UsageError as error:
        assert says in str(error), f"{says!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"nothing was refused, instead of {says!r}")


# --- FairScale


def steps_as_one_process(model: nn.Module, optimizer: Any) -> None:
    """A first step of `net()` on two ranks, compared."""
    plain = net()
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    (data,) = updates(2, steps=1)
    loss(model, mine([data])[0]).backward()
    (sum(loss(plain, each) for each in data) / 2).backward()  # type: ignore[attr-defined]
    optimizer.step()
    other.step()
    assert largest_difference(values(model), values(plain)) < 1e-12


@together("`ShardedDataParallel.zero_grad()` writes zeros")
def zero_grad() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer)
    loss(model, batch(2, 0)).backward()
    model.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    loss(model, batch(2, 0)).backward()
    had = [p for p in module.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=False)
    assert had and all(p.grad is not None and not p.grad.any() for p in had)


@together("in `eval()` ShardedDataParallel reduces nothing")
def reduced_in_eval() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    optimizer = oss(module)
    steps_as_one_process(ShardedDataParallel(module, optimizer).eval(), optimizer)


@together("a parameter that is unfrozen without `refresh_trainable`")
def unfrozen() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    module.first.requires_grad_(False)
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer, auto_refresh_trainable=False)
    module.first.requires_grad_(True)
    loss(model, batch(2, 0)).backward()
    refused(optimizer.step, "refresh_trainable")


@together("`reduce_fp16` is switched off unless")
def half_with_buckets() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    for size in (0, 2**23):
        module = net(dtype=torch.float32)
        model = ShardedDataParallel(module, oss(module), reduce_fp16=True, reduce_buffer_size=size)
        loss(model, batch(4, dist.get_rank(), torch.float32)).backward()
        had = [p.grad for p in module.parameters() if p.grad is not None]
        assert had and all(torch.equal(gradient, gradient.half().float()) for gradient in had)


@together("an exception in `no_sync` leaves")
def no_sync_ends() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer)
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    steps_as_one_process(model, optimizer)


@alone("`auto_wrap_bn(single_rank_pg=True)` gives")
def batch_norms_of_one_rank(folder: Path) -> None:
    from echelon.compat.fairscale.nn import auto_wrap_bn

    refused(lambda: auto_wrap_bn(nn.BatchNorm1d(2), single_rank_pg=True), "SyncBatchNorm")


@together("the optimizer's state is sent as pickles")
def no_pickles() -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle travels")

    module = net()
    optimizer = oss(module, "AdamW")
    loss(module, batch(2, 0)).backward()
    optimizer.step()
    names = ("broadcast_object_list", "gather_object", "all_gather_object", "send_object_list", "scatter_object_list")
    kept = {name: getattr(dist, name) for name in names}
    try:
        for name in names:
            setattr(dist, name, fails)
        optimizer.consolidate_state_dict(1)
        assert len(optimizer.state_dict(all_ranks=True)["state"]) == len(list(module.parameters()))
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


@together("`broadcast_fp16=True` rounds the parameters")
def broadcast_fp16() -> None:
    found = []
    for more in ({}, {"broadcast_fp16": True}):
        module = net(dtype=torch.float32)
        optimizer = oss(module, **more)
        loss(module, batch(4, 0, torch.float32)).backward()
        optimizer.step()
        found.append(values(module))
    assert largest_difference(*found) == 0


@together("`gather_full_optim_state_dict` numbers parameters")
def full_state_of_groups() -> None:
    from echelon.compat.fairscale.nn import FullyShardedDataParallel

    def groups(module: Any) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [
            {"params": [p for n, p in named if "bias" in n]},
            {"params": [p for n, p in named if "bias" not in n], "lr": 0.01},
        ]

    module, plain = net(), net()
    model = FullyShardedDataParallel(module, flatten_parameters=False)
    optimizer, other = torch.optim.AdamW(groups(model), lr=0.1), torch.optim.AdamW(groups(plain), lr=0.1)
    for data in updates(2, steps=2):
        loss(model, mine([data])[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        (sum(loss(plain, each) for each in data) / 2).backward()  # type: ignore[attr-defined]
        other.step()
        other.zero_grad()
    full = model.gather_full_optim_state_dict(optimizer)
    if dist.get_rank() == 0:
        again = torch.optim.AdamW(groups(net()), lr=1.0)
        again.load_state_dict(full)
        assert far(again.state_dict()["state"], other.state_dict()["state"]) < 1e-12
        assert [g["lr"] for g in again.param_groups] == [0.1, 0.01]


@together("FSDP's parameters are one flat tensor for each wrapper")
def parameters_stay() -> None:
    from echelon.compat.fairscale.nn import FullyShardedDataParallel

    for flat in (True, False):
        model = FullyShardedDataParallel(net(), flatten_parameters=flat)
        assert len(list(model.parameters())) == len(list(net().parameters()))


def _draws(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    module(x).sum().backward()
    return next(module.parameters()).grad.clone()  # type: ignore[union-attr]


@alone("`checkpoint_wrapper` turns a dict into a tuple of its keys")
def dict_outputs(folder: Path) -> None:
    from echelon.compat.fairscale.nn import checkpoint_wrapper

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.layer(x)}

    assert set(checkpoint_wrapper(Named())(torch.ones(1, 2))) == {"out"}


@alone("... draws the same dropout again")
def same_dropout(folder: Path) -> None:
    from echelon.compat.fairscale.nn import checkpoint_wrapper

    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(4, 8)  # needs no gradient
    assert torch.equal(_draws(checkpoint_wrapper(copy.deepcopy(plain)), x), _draws(plain, x))


@together("`enable_wrap` wants `wrapper_cls`")
def default_wrapper() -> None:
    from echelon.compat.fairscale.nn import FullyShardedDataParallel, enable_wrap, wrap

    with enable_wrap():
        assert isinstance(wrap(nn.Linear(2, 2)), FullyShardedDataParallel)


# --- TorchTNT: training


@alone("`results.loss` of a step is divided")
def loss_of_a_step(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import AutoUnit, train

    seen: list[torch.Tensor] = []

    class Unit(AutoUnit[Any]):
        def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, Any]:
            return loss(self.module, data), None

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
            return torch.optim.SGD(module.parameters(), lr=0.0), None

        def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
            seen.append(results.loss)

    data = [batch(4, i) for i in range(3)]
    train(Unit(module=net(), gradient_accumulation_steps=2), data, max_epochs=1)
    for got, each in zip(seen, data, strict=True):
        assert not got.requires_grad and torch.allclose(got, loss(net(), each))


@alone("a StopIteration out of a step ends the epoch")
def stop_iteration(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import TrainUnit, train

    class Unit(TrainUnit[Any]):
        def train_step(self, state: Any, data: Any) -> None:
            raise StopIteration

    class Fetches(TrainUnit[Any]):
        def train_step(self, state: Any, data: Iterator[Any]) -> None:
            next(data)

    with contextlib.suppress(EchelonError):
        train(Unit(), [1, 2], max_epochs=1)
        raise AssertionError("the error was lost")
    unit = Fetches()
    train(unit, [1, 2], max_epochs=2)
    assert unit.train_progress.num_epochs_completed == 2


class StopsOnRank1(ech.Callback):
    def on_eval_step_end(self, state: Any, unit: Any) -> None:
        if dist.get_rank() == 1:
            state.stop()


@alone("a stop in an evaluation or a prediction")
def stop_in_an_evaluation(folder: Path) -> None:
    _stop_in_an_evaluation()


@together("a stop in an evaluation or a prediction")
def _stop_in_an_evaluation() -> None:
    from echelon.compat.torchtnt.framework import Callback, EvalUnit, PredictUnit, evaluate, predict

    class Both(EvalUnit[Any], PredictUnit[Any]):
        def eval_step(self, state: Any, data: Any) -> None:
            state.stop()

        predict_step = eval_step

    ends: list[str] = []

    class Ends(Callback):
        def on_eval_epoch_end(self, state: Any, unit: Any) -> None:
            ends.append("eval")

        def on_predict_epoch_end(self, state: Any, unit: Any) -> None:
            ends.append("predict")

    unit = Both()
    evaluate(unit, [1, 2, 3], callbacks=[Ends()])
    predict(unit, [1, 2, 3], callbacks=[Ends()])
    assert ends == [] and unit.eval_progress.num_epochs_completed == unit.predict_progress.num_epochs_completed == 0
    for strategy in ("fsdp", "ddp") if dist.is_initialized() else ():  # on one rank alone: whether or not it is waited for
        auto = Regression(module=net(), layout=strategy)
        evaluate(auto, [batch(2, i) for i in range(6)], callbacks=[StopsOnRank1(), Ends()])
        assert ends == [] and auto.eval_progress.num_epochs_completed == 0


# --- TorchTNT: callbacks, loggers, checkpoints


@alone("`TQDMProgressBar` has a bar for an epoch that is resumed")
def bar_of_a_resumed_epoch(folder: Path) -> None:
    from echelon.compat.torchtnt.framework.callbacks import TQDMProgressBar

    bars: list[int] = []

    class Looks(ech.Callback):
        def on_train_step_end(self, state: Any, unit: Any) -> None:
            bars.append(unit.train_progress.num_steps_completed)

    unit = Regression(module=net())
    data = [batch(4, i) for i in range(4)]
    loader = ech.Loader([tuple(part[0] for part in each) for each in data], 1, shuffle=False)
    ech.train(unit, loader, max_updates=2)
    ech.train(unit, loader, max_epochs=1, callbacks=[TQDMProgressBar(), Looks()])
    assert bars == [3, 4]


@alone("`StdoutLogger` writes nothing at the process's end")
def stdout_ends(folder: Path) -> None:
    import io

    from echelon.compat.torchtnt.utils.loggers import StdoutLogger

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        logger = StdoutLogger()
        logger.log("loss", 0.5, 0)
        logger.close()
        shown = said.getvalue()
        del logger
    assert "loss=0.5" in shown and said.getvalue() == shown


@alone("Each checkpoint is complete or absent. Its `.metadata`")
def metadata_is_the_manifest(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import train
    from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
    from echelon.compat.torchtnt.utils.checkpoint import does_checkpoint_exist, get_latest_checkpoint_path

    saver = DistributedCheckpointSaver(str(folder), save_every_n_train_steps=1)
    train(Regression(module=net()), [batch(2, 0), batch(2, 1)], max_epochs=1, callbacks=[saver])
    latest = get_latest_checkpoint_path(str(folder), metadata_fname=".metadata")
    assert latest is not None and does_checkpoint_exist(latest, metadata_fname=".metadata")
    (Path(latest) / "manifest.json").unlink()
    assert not does_checkpoint_exist(latest, metadata_fname=".metadata")


@alone("`restore_from_latest` passes over a checkpoint that is corrupt")
def corrupt_ones_are_passed_over(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import train
    from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver

    saver = DistributedCheckpointSaver(str(folder), save_every_n_train_steps=1)
    train(Regression(module=net()), [batch(2, 0), batch(2, 1)], max_epochs=1, callbacks=[saver])
    file = next((folder / "epoch_1_train_step_2").glob("tensors-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    unit = Regression(module=net())
    with contextlib.suppress(CheckpointError):
        DistributedCheckpointSaver.restore_from_latest(str(folder), unit, fall_back=False)
        raise AssertionError("a corrupt checkpoint was restored")
    assert DistributedCheckpointSaver.restore_from_latest(str(folder), unit)
    assert unit.train_progress.num_epochs_completed == 0


@alone("a metric of 1e-05 makes a folder")
def small_metrics(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import train
    from echelon.compat.torchtnt.framework.callbacks import DistributedCheckpointSaver
    from echelon.compat.torchtnt.utils.checkpoint import BestCheckpointConfig, get_best_checkpoint_path

    unit = Regression(module=net())
    unit.number = 1e-05  # type: ignore[attr-defined]
    best = BestCheckpointConfig(monitored_metric="number", mode="min")
    saver = DistributedCheckpointSaver(str(folder), save_every_n_train_steps=1, best_checkpoint_config=best)
    train(unit, [batch(2, 0)], max_epochs=1, callbacks=[saver])
    found = get_best_checkpoint_path(str(folder), metric_name="number", mode="min")
    assert found is not None and "number=1e-05" in found


@alone("a second call leaves `float32_matmul_precision`")
def matmul_precision(folder: Path) -> None:
    from echelon.compat.torchtnt.utils import init_from_env

    before = torch.get_float32_matmul_precision()
    try:
        init_from_env(device_type="cpu", float32_matmul_precision="high")
        init_from_env(device_type="cpu", float32_matmul_precision="medium")
        assert torch.get_float32_matmul_precision() in ("medium", before)  # on a CPU it is left alone
    finally:
        torch.set_float32_matmul_precision(before)


@alone("on a GPU, gloo is not there beside nccl")
def both_backends(folder: Path) -> None:
    from unittest.mock import patch

    from echelon.world.init import ensure_group

    with patch.object(dist, "init_process_group") as starts:
        ensure_group(torch.device("cuda", 0))
    assert starts.call_args.args == ("cpu:gloo,cuda:nccl",)


@alone("`NOOPStrategy` leaves the module where it is")
def noop_moves(folder: Path) -> None:
    from echelon.compat.torchtnt.utils.prepare_module import NOOPStrategy, prepare_module

    class Asked(nn.Linear):
        went: Any = None

        def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
            self.went = torch.device(device)
            return self

    module = Asked(2, 2)
    assert prepare_module(module, torch.device("cpu"), strategy=NOOPStrategy()) is module
    assert module.went == torch.device("cpu")


# --- TorchTNT: ranks, modules


@together("compiling with `FSDPStrategy` wants `use_orig_params=True`")
def compiles_sharded() -> None:
    from echelon.compat.torchtnt.utils.prepare_module import FSDPStrategy, TorchCompileParams, prepare_module

    params = TorchCompileParams(backend="eager")
    made = prepare_module(net(), torch.device("cpu"), strategy=FSDPStrategy(), torch_compile_params=params)
    x = batch(3, 0)[0]
    assert torch.allclose(made(x), net()(x))


@alone('`MixedPrecision("fp16", ...)` is its own class')
def mixed_precision(folder: Path) -> None:
    from torch.distributed.fsdp import MixedPrecision as Torchs

    from echelon.compat.torchtnt.utils.fsdp_utils import MixedPrecision

    made = MixedPrecision("fp16")
    assert isinstance(made, Torchs) and made.param_dtype == torch.float16


@alone("`app_state()` of an AutoUnit also has `window`")
def app_state(folder: Path) -> None:
    from echelon.compat.torchtnt.framework import AutoUnit

    class Unit(AutoUnit[Any]):
        def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, Any]:
            return loss(self.module, data), None

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
            return torch.optim.SGD(module.parameters(), lr=0.1), None

    assert {"window", "test_progress", "module", "optimizer", "train_progress"} <= set(Unit(module=net()).app_state())


def _script(folder: Path, **fields: Any) -> str:
    config = ech.SlurmConfig(mode="slurm", job_name="row", **fields).set_output_path(folder / "runs")
    script: str = ech.slurm_fn(no_partition)[config].script(folder)
    return script


@alone("an empty `partition` is refused")
def no_partition(folder: Path) -> None:
    assert "--partition" not in _script(folder, partition="") and "--partition=gpus" in _script(folder, partition="gpus").replace(
        '"', ""
    )


@alone("`timeout_min` is without end by default")
def no_timeout(folder: Path) -> None:
    assert "--time=" not in _script(folder) and "--time=" in _script(folder, timeout_min=3)


# --- what is not there


def not_there(rows: list[str]) -> list[str]:
    """Of a table "What is not here": what is wrong with a name or a module, which can be imported and says what to take."""
    wrong = []
    for names in rows:
        for name in re.findall("`([^`]+)`", names):
            whole = f"echelon.compat.fairscale.{name}"
            module, _, last = whole.rpartition(".")
            found: Any
            try:
                found = importlib.import_module(whole)
            except ModuleNotFoundError:
                found = getattr(importlib.import_module(module), last)
            try:
                found.anything() if isinstance(found, ModuleType) else found()
            except UsageError as error:
                if "Instead: " not in str(error):
                    wrong.append(f"{name}: {error}")
            except AttributeError:
                wrong.append(f"{name} does not say what to take instead")
            else:
                wrong.append(f"{name} can be used")
    return wrong


def failures(programs: dict[str, Any], *args: Any) -> list[str]:
    found = []
    for row, program in programs.items():
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")
                program(*(Path(folder),) if programs is ALONE else args)
        except BaseException as error:  # of each row by itself
            if isinstance(error, KeyboardInterrupt):
                raise
            found.append(f"{row}: {type(error).__name__}: {error}"[:600])
    return found
