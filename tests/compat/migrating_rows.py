"""Rows of docs/moving as programs: those that no test of a part's own tries already. By the row's first words."""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from tests.compat.fairscale import far, loss, mine, oss, updates, values
from tests.kit.models import batch, largest_difference, net
from tests.kit.units import Regression

Program = Callable[[], None]
ALONE: dict[str, Program] = {}  # in one process
TOGETHER: dict[str, Program] = {}  # on two ranks


def row(of: dict[str, Program], words: str) -> Callable[[Program], Program]:
    return lambda program: of.setdefault(words, program)


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


@row(TOGETHER, "in `eval()` ShardedDataParallel reduces nothing")
def reduced_in_eval() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    optimizer = oss(module)
    steps_as_one_process(ShardedDataParallel(module, optimizer).eval(), optimizer)


@row(TOGETHER, "a parameter that is unfrozen without `refresh_trainable`")
def unfrozen() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    module.first.requires_grad_(False)
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer, auto_refresh_trainable=False)
    module.first.requires_grad_(True)
    loss(model, batch(2, 0)).backward()
    with pytest.raises(UsageError, match="refresh_trainable"):
        optimizer.step()


@row(TOGETHER, "`reduce_fp16` is switched off unless")
def half_with_buckets() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    for size in (0, 2**23):
        module = net(dtype=torch.float32)
        model = ShardedDataParallel(module, oss(module), reduce_fp16=True, reduce_buffer_size=size)
        loss(model, batch(4, dist.get_rank(), torch.float32)).backward()
        had = [p.grad for p in module.parameters() if p.grad is not None]
        assert had and all(g.dtype == torch.float32 and torch.equal(g, g.half().float()) for g in had)


@row(TOGETHER, "an exception in `no_sync` leaves")
def no_sync_ends() -> None:
    from echelon.compat.fairscale.nn import ShardedDataParallel

    module = net()
    optimizer = oss(module)
    model = ShardedDataParallel(module, optimizer)
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    steps_as_one_process(model, optimizer)


@row(TOGETHER, "`broadcast_fp16=True` rounds the parameters")
def broadcast_fp16() -> None:
    found = []
    for more in ({}, {"broadcast_fp16": True}):
        module = net(dtype=torch.float32)
        optimizer = oss(module, **more)
        loss(module, batch(4, 0, torch.float32)).backward()
        optimizer.step()
        found.append(values(module))
    assert largest_difference(*found) == 0


@row(TOGETHER, "`gather_full_optim_state_dict` numbers parameters")
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
    everyones: list[Any] = [full]
    dist.broadcast_object_list(everyones)
    own = torch.optim.AdamW(groups(model), lr=1.0)
    own.load_state_dict(model.get_shard_from_optim_state_dict(everyones[0]))
    assert far(own.state_dict()["state"], optimizer.state_dict()["state"]) == 0


@row(TOGETHER, "`enable_wrap` wants `wrapper_cls`")
def default_wrapper() -> None:
    from echelon.compat.fairscale.nn import FullyShardedDataParallel, enable_wrap, wrap

    with enable_wrap():
        assert isinstance(wrap(nn.Linear(2, 2)), FullyShardedDataParallel)


# --- TorchTNT: training


@row(ALONE, "`results.loss` of a step is divided")
def loss_of_a_step() -> None:
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


class StopsOnRank1(ech.Callback):
    def on_eval_step_end(self, state: Any, unit: Any) -> None:
        if dist.get_rank() == 1:
            state.stop()


@row(ALONE, "a stop in an evaluation or a prediction")
@row(TOGETHER, "a stop in an evaluation or a prediction")
def stop_in_an_evaluation() -> None:
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


@row(ALONE, "on a GPU, gloo is not there beside nccl")
def both_backends() -> None:
    from unittest.mock import patch

    from echelon.world.init import ensure_group

    with patch.object(dist, "init_process_group") as starts:
        ensure_group(torch.device("cuda", 0))
    assert starts.call_args.args == ("cpu:gloo,cuda:nccl",)


# --- TorchTNT: ranks, modules


@row(TOGETHER, "compiling with `FSDPStrategy` wants `use_orig_params=True`")
def compiles_sharded() -> None:
    from echelon.compat.torchtnt.utils.prepare_module import FSDPStrategy, TorchCompileParams, prepare_module

    params = TorchCompileParams(backend="eager")
    made = prepare_module(net(), torch.device("cpu"), strategy=FSDPStrategy(), torch_compile_params=params)
    x = batch(3, 0)[0]
    assert torch.allclose(made(x), net()(x))


# --- Lightning


@row(ALONE, "in manual optimization an evaluation within an epoch")
def gradients_wait_while_it_evaluates() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    from echelon.compat.lightning.pytorch import LightningModule, Trainer

    class Waits(LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net, self.sums = net(), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.net(batch[0]).mean())
            gradient = self.net.last.bias.grad
            assert gradient is not None
            self.sums.append(float(gradient))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, data = Waits(), DataLoader(TensorDataset(batch(6, 0)[0]), 2)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    Trainer(max_epochs=1, val_check_interval=1, check_val_every_n_epoch=None, **options).fit(module, data, data)
    assert module.sums == [1, 2, 3]


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


def failures(programs: dict[str, Program]) -> list[str]:
    found = []
    for words, program in programs.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program()
        except BaseException as error:  # of each row by itself
            if isinstance(error, KeyboardInterrupt):
                raise
            found.append(f"{words}: {type(error).__name__}: {error}"[:600])
    return found
