"""A training loop of one's own keeps what the units' loop keeps: exact windows, resumption, stops, proof; else it says why."""

from __future__ import annotations

import contextlib
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import echelon as ech
from echelon.common.errors import EchelonError
from echelon.contracts.overrides import Overrides, impose
from echelon.contracts.stopping import REQUEUE
from echelon.loop.target import Target
from echelon.prover.matrix import matrix
from echelon.prover.prove import prove_target
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import prepared, squares, step
from tests.kit.saving import Held
from tests.kit.units import EACH

pytestmark = pytest.mark.standing_ranks

ROWS, EPOCHS = 22, 2  # with batches of 8: two whole ones and one of 6, which two ranks and two micro-batches share unevenly
DATA = TensorDataset(*batch(ROWS, 0))


def _parts(dropout: float = 0.0, **loader: Any) -> tuple[Any, ...]:
    model = net(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
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
    model, optimizer, scheduler, loader = ech.prepare(*_parts(accumulate=accumulation), layout=layout)
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


@pytest.mark.parametrize("layout", ["none", *EACH])
def test_the_numbers_are_those_of_plain_pytorch(ranks: Ranks, layout: str) -> None:
    """Uneven shares, a short last batch that is accumulated, weights by token, clipping and a schedule, in float64."""
    wanted, losses, norms = _plain()
    for accumulation in (1, 2):
        for got, own_losses, own_norms in (
            [_own(layout, accumulation)] if layout == "none" else ranks(2, _own, layout, accumulation)
        ):
            assert largest_difference(got, wanted) < 1e-12
            assert own_losses == pytest.approx(losses, rel=1e-12)
            assert own_norms == pytest.approx(norms, rel=1e-12)


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
    """Epochs that a `break` ends in the middle of a window."""
    model, optimizer, _, loader = ech.prepare(*_parts(accumulate=2), layout=layout)
    seen = []
    for epoch in ech.epochs(loader, 3):
        for i, (x, y) in enumerate(loader):
            step(model, optimizer, x, y)
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
    loaders = [DataLoader(TensorDataset(*batch(16, 0, dtype=torch.float32)), 8) for _ in range(2)]
    model, optimizer, loader, held_out = ech.prepare(model, optimizer, *loaders, layout=layout, precision="bf16")
    computed: set[torch.dtype] = set()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        computed.add(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    for x, y in loader:
        window = step(model, optimizer, x, y, loss=loss)
    with ech.evaluating(model):
        computed |= {model(x).dtype for x, _ in held_out}
    assert model.training
    return computed, {p.dtype for p in model.parameters()}, float(window.loss)


def test_precision_is_that_of_the_window_and_of_evaluations(ranks: Ranks) -> None:
    for layout in ("ddp", "fsdp"):
        for computed, kept, loss in ranks(2, _in_bf16, layout):
            assert computed == {torch.bfloat16} and kept == {torch.float32} and loss == loss


# --- loaders and evaluation


def _loaded(kind: str) -> tuple[list[int], int]:
    numbers = TensorDataset(torch.arange(16.0).reshape(16, 1))
    sampler = DistributedSampler(numbers, shuffle=False) if kind == "distributed" else None
    _, _, loader = prepared(DataLoader(numbers, 4, sampler=sampler), module=nn.Linear(1, 1))
    return [int(v) for (x,) in loader for v in x.flatten()], len(loader)


def test_a_data_loader_is_shared_by_the_ranks(ranks: Ranks) -> None:
    """Its batch size is one process's; with a DistributedSampler each rank's."""
    assert ranks(2, _loaded, "plain") == [([0, 1, 4, 5, 8, 9, 12, 13], 4), ([2, 3, 6, 7, 10, 11, 14, 15], 4)]
    assert ranks(2, _loaded, "distributed") == [([0, 1, 2, 3, 8, 9, 10, 11], 2), ([4, 5, 6, 7, 12, 13, 14, 15], 2)]


class _Moved(nn.Module):
    """Moves its input by a buffer, which a training step makes another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.by += ech.rank() + 1
        return x + self.by


def _evaluated(layout: str, rows: int, batch_size: int, own: bool = False) -> float:
    model = nn.Sequential(_Moved(), net()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader, held_out = DataLoader(DATA, 4), DataLoader(TensorDataset(*batch(rows, 2)), batch_size)
    model, optimizer, loader, held_out = ech.prepare(model, optimizer, loader, held_out, layout=layout)
    for x, y in loader:
        step(model, optimizer, x, y)
    mean = ech.Mean()
    with torch.no_grad() if own else ech.evaluating(model):
        model.eval()
        for x, y in held_out:
            mean.update(nn.functional.mse_loss(model(x), y), len(x))
    return mean.compute()


def _evaluated_under_another_accumulation(*how: Any) -> float:
    impose(Overrides(accumulation=2))
    try:
        return _evaluated(*how)
    finally:
        impose(None)


def _only_prepared(layout: str, rows: int, global_batch: int, said: str = "") -> None:
    model, optimizer, _, loader = _parts()
    held_out = ech.Loader(TensorDataset(*batch(rows, 2)), global_batch, shuffle=False)
    with pytest.raises(EchelonError, match=said) if said else contextlib.nullcontext():
        ech.prepare(model, optimizer, loader, held_out, layout=layout)


def test_an_evaluation_that_the_ranks_cannot_divide_is_refused_by_prepare(ranks: Ranks) -> None:
    ranks(2, _only_prepared, "fsdp", 9, 2, "must have a sample for each rank")
    ranks(2, _only_prepared, "ddp", 9, 3, "global_batch 3 cannot be divided by 2 ranks")
    for layout, rows in (("ddp", 9), ("fsdp", 9)):
        ranks(2, _only_prepared, layout, rows, 4)


def test_an_evaluation_counts_each_sample_once(ranks: Ranks) -> None:
    """Also where the last batch has one sample: it gets one of the batch before it, or a rank has none."""
    for rows, size in ((8, 4), (9, 4), (9, 2)):
        one = pytest.approx([_evaluated("none", rows, size)] * 2, rel=1e-12)
        for layout, own in (("ddp", False), ("ddp", True), ("fsdp", False)):
            assert ranks(2, _evaluated, layout, rows, size, own) == one
    one = pytest.approx([_evaluated_under_another_accumulation("none", 8, 2)] * 2, rel=1e-12)
    assert ranks(2, _evaluated_under_another_accumulation, "fsdp", 8, 2) == one


# --- resumption and stops


class Killed(Exception): ...


def _interrupted(
    folder: Path | None, layout: str, fails_at: int = -1, number: int = 0, counts: bool = False, epochs: int = 3
) -> tuple[dict[str, torch.Tensor], float, list[int], int | None]:
    """Parameters, the average, the epochs of the steps that were taken, and the exit code."""
    average, steps, code = Held(0.0), list[int](), None
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=1) if folder is not None else None
    model, optimizer, scheduler, loader, average = ech.prepare(
        *_parts(dropout=0.3, accumulate=2), average, layout=layout, checkpoints=saver
    )
    try:
        for epoch in range(epochs) if counts else ech.epochs(loader, epochs):
            for x, y in loader:
                window = step(model, optimizer, x, y)
                scheduler.step()
                average.value += float(window.loss) if window.is_last else 0.0
                steps.append(epoch)
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


@pytest.mark.full
def test_layouts_change_between_runs(ranks: Ranks, tmp_path: Path) -> None:
    """Saved under fsdp on two ranks, gone on with in one process, and the other way round."""
    ranks(2, _interrupted, tmp_path, "fsdp", fails_at=11)
    one = _interrupted(tmp_path, "none", fails_at=7)
    assert len(one[2]) == 7
    assert all(len(steps) == 2 for _, _, steps, _ in ranks(2, _interrupted, tmp_path, "zero1"))


def test_a_finished_run_trains_no_more_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    seen = [_interrupted(tmp_path, "none", epochs=n)[2] for n in (0, 1, 1, 2)]
    assert [sorted(set(each)) for each in seen] == [[], [0], [], [1]]


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


KEPT = """
    import torch, echelon as ech

    class Told(ech.Callback):
        def on_exception(self, state, unit, error):
            print("left by", type(error).__name__, "after", unit.train_progress.num_updates_completed)

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([torch.ones(1)] * 8, batch_size=2)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, callbacks=[Told()])
    batches = iter(loader)
    for _ in range(2):
        batch = next(batches)
        with ech.window(model) as window:
            window.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_script_may_end_with_an_iterator_that_it_keeps(started: Any) -> None:
    """As one that counts its steps does. Its module's names were gone when Python closed the iterator."""
    process = started.python(started.script(textwrap.dedent(KEPT)), fresh=True)
    out, err = (each.decode() for each in process.communicate(timeout=120))
    assert process.returncode == 0 and out == "left by GeneratorExit after 1\n", out + err
    assert "Traceback" not in err


# --- gradients cleared between the passes

CLEARED: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model.zero_grad(),
    "none": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "zeros": lambda model: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
    "nothing": lambda model: None,
}


def _cleared(layout: str, how: str, accumulate: int, wrapped: bool, before: bool = False) -> dict[str, torch.Tensor] | str:
    torch.manual_seed(0)
    raw = net()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
    loader = ech.Loader(DATA, 8, seed=1, accumulate=accumulate)
    model, optimizer, loader = ech.prepare(raw, optimizer, loader, layout=layout)
    try:
        for _ in ech.epochs(loader, EPOCHS):
            for x, y in loader:
                with ech.window(model) as window:
                    if before:
                        CLEARED[how](model if wrapped else raw)
                    loss = squares(model, x, y)
                    if not before:
                        CLEARED[how](model if wrapped else raw)
                    window.backward(loss)
                    optimizer.step()
    except EchelonError as error:
        return error.code
    return whole(model)


def _all_cleared(layout: str, wrapped: bool) -> dict[str, Any]:
    between = {f"{how} {n}": _cleared(layout, how, n, wrapped) for how in CLEARED for n in (1, 2)}
    return {**between, "none 2 before": _cleared(layout, "none", 2, wrapped, before=True)}


@pytest.mark.parametrize("layout", EACH)
def test_gradients_that_a_loop_clears_between_the_passes_are_cleared_under_every_layout(ranks: Ranks, layout: str) -> None:
    """Where the model shows whole parameters then, whose gradients are not those of its shards; in the middle of an update it is
    refused, or does nothing.
    """
    wanted = {how: _cleared("none", how, 1, wrapped=False) for how in ("model", "nothing")}
    assert largest_difference(wanted["model"], wanted["nothing"]) > 1e-3  # type: ignore[arg-type]
    for wrapped in (True, False):
        for found in ranks(2, _all_cleared, layout, wrapped):
            for name, got in found.items():
                how, n, *_ = name.split()
                if n == "2" and isinstance(got, str):
                    assert got == "E-OWN-LOOP" and how != "nothing", (name, got)
                else:
                    assert largest_difference(got, wanted["nothing" if how == "nothing" else "model"]) < 1e-12, name


# --- proof

PLANTED = Path(__file__).parents[1] / "planted"


@pytest.mark.full
@pytest.mark.parametrize("script", ["own_loop", "own_loop_breaks"])
def test_prove_passes_a_loop_that_is_right(script: str) -> None:
    rows = matrix(["ddp", "fsdp"], [2], [1, 2], sgd=script == "own_loop")
    proof = prove_target(Target(script=str(PLANTED / f"{script}.py")), rows, 5, True)
    assert all(row.is_equal for row in proof.results), [(r.label, r.verdict, r.message) for r in proof.results]


@pytest.mark.full
def test_prove_passes_bit_equal_loops_and_names_a_mistake_in_one() -> None:
    script = str(PLANTED / "own_loop.py")
    rows = [row for row in matrix(["ddp", "fsdp"], [1, 2], [1], sgd=False, parts=4) if row.parts]
    proof = prove_target(Target(script=script), rows, 3, True)
    assert rows and {row.verdict for row in proof.results} == {"bit-equal"}, [(r.label, r.causes) for r in proof.results]
    rows = matrix(["ddp"], [2], [1], sgd=False)
    (row,) = prove_target(Target(script=script, args=["looks"]), rows, 3, True).results  # at its data first
    assert row.is_equal, (row.verdict, row.message)
    (row,) = prove_target(Target(script=script, args=["wrong"]), rows, 3, False).results
    assert row.first is not None and row.first.update == 0 and row.causes


# --- what is refused


# What a loop does with each batch, line by line, and what it is refused with. `loss()` computes one.
IN_A_WINDOW = {
    "step": r"optimizer.step\(\) must follow window.backward",
    "nothing": r"ended without window.backward",
    "backward; backward": r"must be called once in a window.*sum. To train on several batches in one update.*=.*TrainUnit",
    "torch's backward; step": r"before window.backward. loss.backward\(\) does not weigh",
    "backward; end; backward": "must be called inside its window",
    "backward; end; window; backward": "once for each batch",
    "backward": r"must end with optimizer.step\(\)",
    "backward; step; step": "must be called once in an update",
    "backward; step; clip": r"must come before optimizer.step\(\)",
    "clip": "must come after window.backward",
    "backward; step with a closure": "without a closure",
    "backward; step; end; clear": "must be kept until its last batch",
    "backward of no scalar": "a loss of shape",
}


def _told_of(lines: str) -> str:
    model, optimizer, _, loader = ech.prepare(*_parts(accumulate=2), layout="ddp")

    def batch_of_it(x: torch.Tensor, y: torch.Tensor) -> None:
        with contextlib.ExitStack() as stack:
            if lines != "step":
                window = stack.enter_context(ech.window(model))
            acts: dict[str, Callable[[], Any]] = {
                "nothing": lambda: squares(model, x, y),
                "window": lambda: stack.enter_context(ech.window(model)),
                "end": stack.close,
                "backward": lambda: window.backward(squares(model, x, y)),
                "backward of no scalar": lambda: window.backward(squares(model, x, y).expand(2)),
                "torch's backward": lambda: squares(model, x, y).backward(),
                "step": optimizer.step,
                "step with a closure": lambda: optimizer.step(lambda: squares(model, x, y)),
                "clip": lambda: window.clip_grad_norm_(1.0),
                "clear": model.zero_grad,
            }
            for line in lines.split("; "):
                acts[line]()

    try:
        for x, y in loader:
            batch_of_it(x, y)
    except EchelonError as error:
        return str(error)
    return "nothing"


@pytest.mark.full
def test_what_comes_in_the_wrong_order_is_refused_by_name_on_all_ranks(ranks: Ranks) -> None:
    for told in ranks(2, lambda: [_told_of(lines) for lines in IN_A_WINDOW]):
        for (lines, words), text in zip(IN_A_WINDOW.items(), told, strict=True):
            assert re.search(words, text), (lines, text)


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


def _strange_model() -> None:
    ech.prepare(*_parts())
    with ech.window(nn.Linear(1, 1)):
        pass


def _of_size(size: int) -> Any:
    model, optimizer, *_ = _parts()
    return ech.prepare(model, optimizer, DataLoader(DATA, size))


def _given(*what: str) -> Callable[[], Any]:
    """A call of `prepare` with these, of a kind or of another model."""

    def call() -> Any:
        model, optimizer, _, loader = _parts()
        others = torch.optim.SGD(net().parameters(), lr=0.1)
        made = {
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "another's optimizer": others,
            "another's optimizer on rank 1": others if dist.get_rank() == 1 else optimizer,
            "another's scheduler": torch.optim.lr_scheduler.StepLR(others, 1),
            "a second optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "a number": 3,
        }
        return ech.prepare(*(made[name] for name in what))

    return call


CALLS: dict[str, Callable[[], Any]] = {
    "training loader that prepare.. returned, got no current batch": _unprepared_loader,
    "must be new when its model is sharded": _stepped_optimizer,
    "that echelon.prepare.* returned, got another": _strange_model,
    "must hold parameters of the Net": _given("model", "another's optimizer", "loader"),
    "must hold parameters of the Net.": _given("model", "another's optimizer on rank 1", "loader"),
    "batch_size must be a multiple of the 2 ranks that share each batch, got 3": lambda: _of_size(3),
    "must have a model and an optimizer.* write an EvalUnit": _given("optimizer", "loader"),
    "belong to an optimizer among the objects": _given("model", "optimizer", "another's scheduler", "loader"),
    "each parameter must be in one optimizer": _given("model", "optimizer", "a second optimizer", "loader"),
    "must have the training loader.* into the loader's dataset": _given("model", "optimizer"),
    "got int": _given("model", "optimizer", "loader", "a number"),
}


def _refusals() -> list[str]:
    found = []
    for call in CALLS.values():
        with pytest.raises(EchelonError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_prepared_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for told in ranks(2, _refusals):
        for words, text in zip(CALLS, told, strict=True):
            assert re.search(words, text), (words, text)
