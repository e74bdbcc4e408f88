"""A training loop of one's own keeps what the units' loop keeps: exact windows, resumption, stops, proof; else it says why."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import echelon as ech
from echelon.common.errors import EchelonError
from echelon.contracts.stopping import REQUEUE
from echelon.loop.target import Target
from echelon.prover.matrix import matrix
from echelon.prover.prove import prove_target
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.units import EACH

pytestmark = pytest.mark.standing_ranks

ROWS, EPOCHS = 22, 2  # with batches of 8: two whole ones and one of 6, which two ranks and two micro-batches share unevenly
DATA = TensorDataset(*batch(ROWS, 0))


def _parts(dropout: float = 0.0, lr: float = 0.1, **loader: Any) -> tuple[Any, ...]:
    model = net(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return model, optimizer, scheduler, ech.Loader(DATA, 8, seed=1, **loader)


# --- the numbers


def _plain() -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """The same training as anybody writes it for one process: one pass over each global batch."""
    model, optimizer, scheduler, loader = _parts()
    losses, norms = [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            weights = _tokens(y)
            loss = (((model(x) - y) ** 2).squeeze(1) * weights).sum() / weights.sum()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return {n: p.detach() for n, p in model.named_parameters()}, losses, norms


def _tokens(y: torch.Tensor) -> torch.Tensor:
    """How much each row weighs in its batch."""
    return (y > 0).squeeze(1) * 2.0 + 1.0


def _own(layout: str, accumulation: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    model, optimizer, scheduler, loader = ech.prepare(*_parts(accumulation=accumulation), layout=layout)
    losses, norms = [], []
    for _ in ech.epochs(loader, EPOCHS):
        for x, y in loader:
            weights = _tokens(y)
            with ech.window(model, weight=weights.sum()) as window:
                optimizer.zero_grad()
                window.backward((((model(x) - y) ** 2).squeeze(1) * weights).sum() / weights.sum())
                norm = window.clip_grad_norm_(0.5)
                optimizer.step()
                scheduler.step()
            if window.is_last:
                losses.append(float(window.loss))
                norms.append(float(norm))
            else:
                assert norm is None
    return whole(model), losses, norms


@pytest.mark.parametrize("layout", EACH)
def test_the_numbers_are_those_of_plain_pytorch(ranks: Ranks, layout: str) -> None:
    """Uneven shares, a short last batch that is accumulated, weights by token, clipping and a schedule, in float64."""
    wanted, losses, norms = _plain()
    for accumulation in (1, 2):
        for got, own_losses, own_norms in ranks(2, _own, layout, accumulation):
            assert largest_difference(got, wanted) < 1e-12
            assert own_losses == pytest.approx(losses, rel=1e-12)
            assert own_norms == pytest.approx(norms, rel=1e-12)


def test_in_one_process_as_well() -> None:
    wanted, losses, _ = _plain()
    got, own_losses, _ = _own("none", 2)
    assert largest_difference(got, wanted) < 1e-12 and own_losses == pytest.approx(losses)


def _usual_order(layout: str, wrapped: bool) -> dict[str, torch.Tensor]:
    """Steps behind the window, a scheduler made later, the unwrapped model called."""
    model, optimizer, _, loader = _parts()
    original = model
    made, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for _ in range(EPOCHS):
        for x, y in loader:
            with ech.window(optimizer) as window:
                window.backward(nn.functional.mse_loss((made if wrapped else original)(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return whole(made)


@pytest.mark.full
def test_other_orders_of_the_same_lines_train_the_same(ranks: Ranks) -> None:
    for layout in ("ddp", "fsdp", "zero1"):
        for model in (True, False):
            a, b = ranks(2, _usual_order, layout, model)
            assert largest_difference(a, b) == 0
            assert largest_difference(a, _usual_order("none", True)) < 1e-12, (layout, model)


def _left_early(layout: str) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """Epochs that a `break` ends in the middle of a window; on rank 1 it comes in another way."""
    model, optimizer, _, loader = ech.prepare(*_parts(accumulation=2), layout=layout)
    seen = []
    for epoch in ech.epochs(loader, 3):
        for i, (x, y) in enumerate(loader):
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(epoch)
            if i == 2:
                break
    return whole(model), seen, int(loader.epoch)


def test_a_loop_may_leave_an_epoch_in_the_middle_of_an_update(ranks: Ranks) -> None:
    one = _left_early("none")
    assert one[1] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and one[2] == 2
    for got, seen, _ in ranks(2, _left_early, "fsdp"):
        assert largest_difference(got, one[0]) < 1e-12 and seen == one[1]


def _in_bf16(layout: str) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    model = net(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(*batch(16, 0, dtype=torch.float32))
    model, optimizer, loader, held_out = ech.prepare(
        model, optimizer, DataLoader(data, 8), DataLoader(data, 8), layout=layout, precision="bf16"
    )
    for x, y in loader:
        with ech.window(model) as window:
            out = model(x)
            window.backward(nn.functional.mse_loss(out.float(), y))
            optimizer.step()
            optimizer.zero_grad()
    with ech.evaluating(model):
        evaluated = {model(x).dtype for x, _ in held_out}
    assert model.training
    return {out.dtype} | evaluated, {p.dtype for p in model.parameters()}, float(window.loss)


def test_precision_is_that_of_the_window_and_of_evaluations(ranks: Ranks) -> None:
    for layout in ("ddp", "fsdp"):
        for computed, kept, loss in ranks(2, _in_bf16, layout):
            assert computed == {torch.bfloat16} and kept == {torch.float32} and loss == loss


# --- loaders and evaluation


def _loaded(kind: str) -> tuple[list[int], int]:
    numbers = TensorDataset(torch.arange(16.0).reshape(16, 1))
    sampler = DistributedSampler(numbers, shuffle=False) if kind == "distributed" else None
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, _, loader = ech.prepare(model, optimizer, DataLoader(numbers, 4, sampler=sampler))
    return [int(v) for (x,) in loader for v in x.flatten()], len(loader)


def test_a_data_loader_is_shared_by_the_ranks(ranks: Ranks) -> None:
    """Its batch size is one process's; with a DistributedSampler each rank's."""
    assert ranks(2, _loaded, "plain") == [([0, 1, 4, 5, 8, 9, 12, 13], 4), ([2, 3, 6, 7, 10, 11, 14, 15], 4)]
    assert ranks(2, _loaded, "distributed") == [([0, 1, 2, 3, 8, 9, 10, 11], 2), ([4, 5, 6, 7, 12, 13, 14, 15], 2)]


def _evaluated(layout: str, rows: int) -> float:
    model, optimizer, _, loader = _parts()
    held_out = TensorDataset(*batch(rows, 2))
    model, optimizer, loader, held_out = ech.prepare(model, optimizer, loader, DataLoader(held_out, 3), layout=layout)
    mean = ech.Mean()
    with ech.evaluating(model):
        for x, y in held_out:
            mean.update(nn.functional.mse_loss(model(x), y), len(x))
    return mean.compute()


def _only_prepared(layout: str, rows: int, global_batch: int) -> str:
    model, optimizer, _, loader = _parts()
    held_out = ech.Loader(TensorDataset(*batch(rows, 2)), global_batch, shuffle=False)
    try:
        ech.prepare(model, optimizer, loader, held_out, layout=layout)
    except EchelonError as error:
        return str(error)
    return ""


def test_an_evaluation_counts_each_sample_once(ranks: Ranks) -> None:
    for rows in (8, 9):
        one = _evaluated("none", rows)
        for layout in ("ddp", "fsdp"):
            if (layout, rows) != ("fsdp", 9):
                assert ranks(2, _evaluated, layout, rows) == pytest.approx([one, one], rel=1e-12)


def test_an_evaluation_that_the_ranks_cannot_divide_is_refused_by_prepare(ranks: Ranks) -> None:
    """It was when the loader was iterated over, after the first epoch."""
    for refused in ranks(2, _only_prepared, "fsdp", 9, 4):
        assert "must have a sample for each rank" in refused
    for refused in ranks(2, _only_prepared, "ddp", 9, 3):
        assert "global_batch 3 cannot be divided by 2 ranks" in refused
    assert ranks(2, _only_prepared, "ddp", 9, 4) == ranks(2, _only_prepared, "fsdp", 10, 4) == ["", ""]


# --- resumption and stops


class Average:
    """Something of the script's own that is to be saved."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Killed(Exception): ...


def _interrupted(
    folder: Path | None, layout: str, fails_at: int = -1, number: int = 0, counts: bool = False
) -> tuple[dict[str, torch.Tensor], float, list[int], int | None]:
    """Parameters, the average, the steps that were taken, and the exit code."""
    average, steps, code = Average(), [], None
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=1) if folder is not None else None
    model, optimizer, scheduler, loader, average = ech.prepare(
        *_parts(dropout=0.3, accumulation=2), average, layout=layout, checkpoints=saver
    )
    try:
        for _ in range(3) if counts else ech.epochs(loader, 3):
            for x, y in loader:
                with ech.window(model) as window:
                    window.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                average.value += float(window.loss) if window.is_last else 0.0
                steps.append(len(steps))
                if len(steps) == fails_at and number:
                    os.kill(os.getpid(), number)
                elif len(steps) == fails_at:
                    raise Killed
    except Killed:
        pass
    except SystemExit as ended:
        code = ended.code
    return whole(model), average.value, steps, code  # type: ignore[return-value]


@pytest.mark.full(but=("ddp",))
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero1"])
def test_a_loop_that_died_goes_on_to_the_same_bits(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """With dropout, in the middle of an epoch and of an update; whether the loop counts its epochs itself or not."""
    wanted = ranks(2, _interrupted, None, layout)
    for counts in (False, True):
        folder = tmp_path / str(counts)
        ranks(2, _interrupted, folder, layout, fails_at=11, counts=counts)
        resumed = ranks(2, _interrupted, folder, layout, counts=counts)
        for (got, average, steps, _), (want, total, every, _) in zip(resumed, wanted, strict=True):
            assert largest_difference(got, want) == 0 and average == pytest.approx(total)
            assert len(steps) == len(every) - 10


@pytest.mark.full
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("moment", [3, 18])
def test_a_signal_saves_and_leaves_with_75_and_the_loop_goes_on(ranks: Ranks, tmp_path: Path, moment: int) -> None:
    """At a step in the middle; in the very last step there is nothing left to go on with."""
    wanted = ranks(2, _interrupted, None, "fsdp")
    stopped = ranks(2, _interrupted, tmp_path, "fsdp", fails_at=moment, number=signal.SIGTERM)
    assert {code for *_, code in stopped} == ({REQUEUE} if moment == 3 else {None})
    for (got, *_), (want, *_) in zip(ranks(2, _interrupted, tmp_path, "fsdp"), wanted, strict=True):
        assert largest_difference(got, want) == 0


def _epochs_seen(folder: Path, number: int) -> list[int]:
    model, optimizer, _, loader = ech.prepare(*_parts(), layout="none", checkpoints=folder)
    seen = []
    for epoch in ech.epochs(loader, number):
        seen.append(epoch)
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return seen


def test_a_finished_run_trains_no_more_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    assert [_epochs_seen(tmp_path, n) for n in (0, 2, 2, 3)] == [[], [0, 1], [], [2]]


@pytest.mark.full
def test_layouts_change_between_runs(ranks: Ranks, tmp_path: Path) -> None:
    """Saved under fsdp on two ranks, gone on with in one process, and the other way round."""
    ranks(2, _interrupted, tmp_path, "fsdp", fails_at=11)
    one = _interrupted(tmp_path, "none", fails_at=7)
    assert len(one[2]) == 7
    assert all(len(steps) == 2 for _, _, steps, _ in ranks(2, _interrupted, tmp_path, "zero1"))


PROGRAM = """
    import sys, torch, echelon as ech
    from torch.utils.data import TensorDataset, DataLoader
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = ech.prepare(
        model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True), layout="fsdp",
        checkpoints="checkpoints",
    )
    for epoch in ech.epochs(loader, 3):
        for x, y in loader:
            with ech.window(model) as window:
                window.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if len(sys.argv) > 1 and epoch == 1 and torch.distributed.get_rank() == 1:
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
    print("ended with", float(window.loss))
"""


@pytest.mark.full
def test_as_a_program_killed_and_restarted(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(textwrap.dedent(PROGRAM))
    killed = echelon_command("run", "--ranks", "2", "loop.py", "die")
    assert killed.returncode and "SIGKILL" in killed.stderr
    resumed = echelon_command("run", "--ranks", "2", "loop.py")
    (tmp_path / "checkpoints").rename(tmp_path / "before")
    straight = echelon_command("run", "--ranks", "2", "loop.py")
    ends = [re.findall(r"ended with (\S+)", run.stdout) for run in (resumed, straight)]
    assert ends[0] and ends[0] == ends[1], resumed.stdout + resumed.stderr
    assert "update 24/24" in straight.stderr + straight.stdout


# --- proof

PLANTED = Path(__file__).parents[1] / "planted"


@pytest.mark.full
@pytest.mark.parametrize("script", ["own_loop", "own_loop_breaks"])
def test_prove_passes_a_loop_that_is_right(script: str) -> None:
    rows = matrix(["ddp", "fsdp"], [2], [1, 2], sgd=script == "own_loop")
    proof = prove_target(Target(script=str(PLANTED / f"{script}.py")), rows, 5, True)
    assert all(row.is_equal for row in proof.results), [(r.label, r.verdict, r.message) for r in proof.results]


@pytest.mark.full
def test_prove_passes_bit_equal_loops() -> None:
    rows = [row for row in matrix(["ddp", "fsdp"], [1, 2], [1], sgd=False, parts=4) if row.parts]
    proof = prove_target(Target(script=str(PLANTED / "own_loop.py")), rows, 3, True)
    assert rows and {row.verdict for row in proof.results} == {"bit-equal"}, [(r.label, r.causes) for r in proof.results]


@pytest.mark.full
def test_prove_names_a_mistake_in_a_loop() -> None:
    rows = matrix(["ddp"], [2], [1], sgd=False)
    (row,) = prove_target(Target(script=str(PLANTED / "own_loop.py"), args=["wrong"]), rows, 3, False).results
    assert row.first is not None and row.first.update == 0 and row.causes


# --- what is refused


def _training(body: Callable[..., None], **options: Any) -> str:
    """What a loop with this body is refused with."""
    model, optimizer, _, loader = ech.prepare(*_parts(accumulation=2), layout="ddp", **options)
    try:
        for x, y in loader:
            body(model, optimizer, loader, lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
    except EchelonError as error:
        return str(error)
    return "nothing"


def _step_before(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    optimizer.step()


def _torchs_backward(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model):
        loss().backward()
        optimizer.step()


def _no_backward(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model):
        loss()


def _two_backwards(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())
        window.backward(loss())


def _backward_outside(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        value = loss()
        window.backward(value)
    window.backward(value)


def _two_windows(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for _ in range(2):
        with ech.window(model) as window:
            window.backward(loss())


def _no_step(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())


def _two_steps(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())
        optimizer.step()
        optimizer.step()


def _late_clip(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())
        optimizer.step()
        window.clip_grad_norm_(1.0)


def _early_clip(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.clip_grad_norm_(1.0)


def _closure(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())
        optimizer.step(loss)


def _cleared(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss())
        optimizer.step()
    model.zero_grad()


def _not_scalar(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(model) as window:
        window.backward(loss().expand(2))


def _strange_model(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    with ech.window(nn.Linear(1, 1)):
        pass


REFUSED = {
    _step_before: r"optimizer.step\(\) must follow window.backward",
    _torchs_backward: r"without it. loss.backward\(\) would not weigh",
    _no_backward: r"ended without window.backward",
    _two_backwards: r"must be called once in a window.*sum; to train on several batches in one update.*accumulate=",
    _backward_outside: "must be called inside its window",
    _two_windows: "once for each batch",
    _no_step: r"must end with optimizer.step\(\)",
    _two_steps: "must be called once in an update",
    _late_clip: r"must come before optimizer.step\(\)",
    _early_clip: "must come after window.backward",
    _closure: "without a closure",
    _cleared: "must be kept until its last batch",
    _not_scalar: "a loss of shape",
    _strange_model: "what echelon.prepare.* returned",
}


def _all_refused() -> list[str]:
    return [_training(body) for body in REFUSED]


@pytest.mark.full
def test_what_comes_in_the_wrong_order_is_refused_by_name_on_all_ranks(ranks: Ranks) -> None:
    for told in ranks(2, _all_refused):
        for (body, words), text in zip(REFUSED.items(), told, strict=True):
            assert re.search(words, text), (body.__name__, text)


def _unprepared_loader() -> None:
    model, optimizer, _, loader = _parts()
    model, optimizer, _ = ech.prepare(model, optimizer, loader)
    for _ in loader:
        with ech.window(model):
            pass


def _stepped_optimizer() -> None:
    model, _, _, loader = _parts()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    ech.prepare(model, optimizer, loader, layout="fsdp")


def _other_parameters(only_rank_1: bool) -> None:
    model, optimizer, _, loader = _parts()
    if not only_rank_1 or dist.get_rank() == 1:
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    ech.prepare(model, optimizer, loader)


def _drawn_with_weights() -> None:
    model, optimizer, _, _ = _parts()
    ech.prepare(model, optimizer, DataLoader(DATA, 2, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS)))


def _wrong(call: str) -> None:
    model, optimizer, _, loader = _parts()
    others = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    given = {
        "no model": (optimizer, loader),
        "a scheduler of another optimizer": (model, optimizer, torch.optim.lr_scheduler.StepLR(others, 1), loader),
        "two optimizers of one parameter": (model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1), loader),
        "no loader": (model, optimizer),
        "a number": (model, optimizer, loader, 3),
    }[call]
    ech.prepare(*given)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a loader that was not prepared": (_unprepared_loader, (), "training loader that prepare.. returned, got none"),
    "an optimizer that has stepped": (_stepped_optimizer, (), "must be new when its model is sharded"),
    "an optimizer of other parameters": (_other_parameters, (False,), "must hold parameters of the Net"),
    "on one rank": (_other_parameters, (True,), "must hold parameters of the Net"),
    "a sampler of its own": (_drawn_with_weights, (), "WeightedRandomSampler has an order"),
    "no model": (_wrong, ("no model",), "must have a model and an optimizer"),
    "a scheduler": (_wrong, ("a scheduler of another optimizer",), "that of an optimizer among the objects"),
    "two optimizers": (_wrong, ("two optimizers of one parameter",), "each parameter must be in one optimizer"),
    "no loader": (_wrong, ("no loader",), "must have the training loader"),
    "a number": (_wrong, ("a number",), "got int"),
}


def _refusal(name: str) -> str:
    call, args, _ = CALLS[name]
    try:
        call(*args)
    except EchelonError as error:
        return str(error)
    return "nothing"


def test_what_cannot_be_prepared_is_refused_on_all_ranks(ranks: Ranks) -> None:
    told = ranks(2, lambda: [_refusal(name) for name in CALLS])
    for texts in told:
        for (name, (_, _, words)), text in zip(CALLS.items(), texts, strict=True):
            assert re.search(words, text), (name, text)
