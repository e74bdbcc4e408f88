"""A training loop of one's own, as other people write it: what stands behind an epoch's batches, other orders, several loops."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import echelon as ech
from echelon.checkpoint import manifest
from echelon.common.errors import EchelonError, OwnLoopError
from echelon.contracts.stopping import REQUEUE
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, whole
from tests.kit.own_loops import own_loop, prepared, step
from tests.kit.saving import Held

pytestmark = pytest.mark.standing_ranks

DATA = TensorDataset(*batch(22, 0))  # with batches of 8: two whole ones and one of 6


def _strategy() -> str:
    return "fsdp" if dist.is_initialized() else "none"


# --- what stands behind the batches of an epoch


class Killed(Exception): ...


def _by_epoch(folder: Path, at: tuple[int, str] = (-1, ""), *, signals: bool = False, counts: bool = False) -> tuple[Any, ...]:
    """A rate that falls by epoch, behind an evaluation; it ends in the epoch, at the place, by an error or a signal."""
    model, tally, code = net(dropout=0.2), Held([]), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler, tally, loader, held_out = ech.prepare(
        *(model, optimizer, scheduler, tally, DataLoader(DATA, 8, shuffle=True), DataLoader(DATA, 8)),
        layout=_strategy(),
        checkpoints=folder,
    )

    def passes(*here: Any) -> None:
        if here == at and signals:
            os.kill(os.getpid(), signal.SIGTERM)
        elif here == at:
            raise Killed

    try:
        for epoch in range(3) if counts else ech.epochs(loader, 3):
            for i, (x, y) in enumerate(loader):
                step(model, optimizer, x, y)
                passes(epoch, f"step {i}")
            with ech.evaluating(model):
                for x, _ in held_out:
                    model(x)
                passes(epoch, "evaluation")
            scheduler.step()
            tally.value.append(scheduler.get_last_lr()[0])
            passes(epoch, "end")
    except Killed:
        pass
    except SystemExit as ended:
        code = ended.code
    return whole(model), optimizer.param_groups[0]["lr"], tally.value, code


PLACES = ["step 0", "step 2", "evaluation", "end"]


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_what_an_epoch_does_behind_its_batches_is_in_its_checkpoint(tmp_path: Path, place: str) -> None:
    want, rate, rates, _ = _by_epoch(tmp_path / "straight")
    assert _by_epoch(tmp_path / "killed", (1, place))[1] > rate
    got, *rest = _by_epoch(tmp_path / "killed")
    assert largest_difference(got, want) == 0 and rest == [rate, rates, None]
    for counts in (False, True):  # a loop that counts its epochs itself repeats what is behind them, but for the schedule
        _by_epoch(tmp_path / str(counts), (1, place), counts=counts)
        got, resumed_rate, resumed_rates, _ = _by_epoch(tmp_path / str(counts), counts=counts)
        assert largest_difference(got, want) == 0 and resumed_rate == rate
        assert counts or resumed_rates == rates


@pytest.mark.full
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("place", ["step 2", "evaluation", "end"])
def test_a_signal_behind_the_batches_waits_for_the_epochs_end(ranks: Ranks, tmp_path: Path, place: str) -> None:
    want = ranks(2, _by_epoch, tmp_path / "straight")
    stopped = ranks(2, _by_epoch, tmp_path / "stopped", (1, place), signals=True)
    assert [code for *_, code in stopped] == [REQUEUE] * 2 and len(stopped[0][2]) == 2
    for (got, *rest), (wanted, *others) in zip(ranks(2, _by_epoch, tmp_path / "stopped"), want, strict=True):
        assert largest_difference(got, wanted) == 0 and rest == others


def _broken_off(folder: Path, dies: bool) -> float:
    """Epochs that a `break` ends, counted by the loop, with two schedulers, as for an average of the last weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    averaging = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1.0, anneal_epochs=2)
    given = model, optimizer, falling, averaging, DataLoader(DATA, 8)
    model, optimizer, falling, averaging, loader = ech.prepare(*given, layout="none", checkpoints=folder)
    for epoch in range(4):
        for i, (x, y) in enumerate(loader):
            if dies and epoch == 3:
                return 0.0
            step(model, optimizer, x, y)
            if i == 1:
                break
        if epoch > 1:
            averaging.step()
        else:
            falling.step()
    return float(optimizer.param_groups[0]["lr"])


def test_schedules_by_epochs_that_a_break_ends_are_resumed(tmp_path: Path) -> None:
    want = _broken_off(tmp_path / "straight", False)
    _broken_off(tmp_path / "killed", True)
    assert _broken_off(tmp_path / "killed", False) == want > 0.1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_that_checkpoints_would_not_have_is_refused(tmp_path: Path, when: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OwnLoopError, match="must be given each scheduler, got a SGD with a scheduler"):
        made = torch.optim.lr_scheduler.StepLR(optimizer, 1) if when == "before" else None
        model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout="none", checkpoints=tmp_path)
        made = made or torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for x, y in loader:
            step(model, optimizer, x, y)


# --- other orders

PLAIN_RATES = [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]


def _schedule_first(place: str, accumulation: int) -> list[float]:
    model, rates = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = ech.Loader(DATA, 8, accumulate=accumulation)
    model, optimizer, scheduler, loader = ech.prepare(model, optimizer, scheduler, loader, layout="none")
    for _ in ech.epochs(loader, 2):
        for x, y in loader:
            if place == "top":
                scheduler.step()
            with ech.window(model) as window:
                window.backward(nn.functional.mse_loss(model(x), y))
                if place == "window":
                    scheduler.step()
                if window.is_last:
                    rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
    return rates


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("place", ["top", "window"])
def test_a_schedule_that_steps_before_the_optimizer_steps_once_an_update(place: str) -> None:
    for accumulation in (1, 2):
        assert _schedule_first(place, accumulation) == PLAIN_RATES


# --- several loops

LOOKS: dict[str, Callable[[Any], Any]] = {
    "a batch": lambda loader: next(iter(loader)),
    "all": list,
    "nothing": lambda loader: None,
}


def _looks_first(look: str, folder: Path | None = None, counts: bool = False) -> tuple[list[float], list[str]]:
    saver = None if folder is None else ech.DistributedCheckpointSaver(folder, save_every_n_updates=1)
    model, optimizer, loader = prepared(DataLoader(DATA, 8), layout=_strategy(), checkpoints=saver)
    losses = []
    LOOKS[look](loader)
    saved = [] if folder is None or not folder.exists() else [each.name for each in folder.iterdir() if each.is_dir()]
    for _ in range(2) if counts else ech.epochs(loader, 2):
        losses += [float(step(model, optimizer, x, y).loss) for x, y in loader]
    return losses, saved


@pytest.mark.full
@pytest.mark.parametrize("look", ["a batch", "all"])
def test_looking_at_the_data_first_changes_nothing(ranks: Ranks, tmp_path: Path, look: str) -> None:
    """It counted as an epoch, or was refused."""
    want, _ = _looks_first("nothing")
    for counts in (False, True):
        losses, saved = _looks_first(look, tmp_path / str(counts), counts)
        assert losses == want and not [name for name in saved if not name.startswith(".")]
    assert ranks(2, _looks_first, look)[0][0] == pytest.approx(want, rel=1e-12)


def _two_loops(folder: Path, dies_in: int = -1) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
    seen, saved = [], ech.Checkpoints(folder, every="epoch")
    model, optimizer, loader = prepared(DataLoader(DATA, 8, shuffle=True), layout="none", checkpoints=saved)
    for phase, number in enumerate((1, 2)):
        for epoch in ech.epochs(loader, number):
            seen.append((phase, epoch))
            for x, y in loader:
                step(model, optimizer, x, y)
                if len(seen) == dies_in:
                    return seen, whole(model)
    return seen, whole(model)


def test_a_second_loop_trains_its_own_epochs(tmp_path: Path) -> None:
    """In place of range(number): it trained none, or fewer."""
    seen, want = _two_loops(tmp_path / "straight")
    assert seen == [(0, 0), (1, 0), (1, 1)]
    assert _two_loops(tmp_path / "died", 3)[0] == seen
    seen, got = _two_loops(tmp_path / "died")
    assert seen == [(1, 1)] and largest_difference(got, want) == 0


# --- what is refused


def _twice_an_epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for _ in ech.epochs(loader, 2):
        for _ in range(2):
            for x, y in loader:
                step(model, optimizer, x, y)


def _goes_on_after_an_error(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with contextlib.suppress(RuntimeError), ech.window(model) as window:
            window.backward(nn.functional.mse_loss(model(x), y))
            raise RuntimeError("out of memory")


def _in_pairs(model: Any, optimizer: Any, loader: Any) -> None:
    for (x, y), _ in zip(loader, loader, strict=True):
        step(model, optimizer, x, y)


def _compiled_afterwards(model: Any, optimizer: Any, loader: Any) -> None:
    with ech.window(torch.compile(model, backend="eager")):
        pass


def _again(what: str) -> Callable[[Any, Any, Any], None]:
    """A second prepare, for example for each fold: of the same, or of the model that an earlier call was given."""

    def body(model: Any, optimizer: Any, loader: Any) -> None:
        module = getattr(model, "module", model)
        again = optimizer if what == "all" else torch.optim.SGD(module.parameters(), lr=0.1)
        ech.prepare(model if what == "all" else module, again, DataLoader(DATA, 8), layout=LAYOUT)

    return body


LAYOUT = "ddp"
REFUSED = {
    "by one loop at a time": _in_pairs,
    "iterated over once in each epoch of echelon.epochs.*, got a second time": _twice_an_epoch,
    "the next batch after RuntimeError: out of memory": _goes_on_after_an_error,
    r"Compile by prepare\(compile=True\)": _compiled_afterwards,
    r"must be new to prepare\(\).*for example for each fold": _again("all"),
    r"must be new to prepare\(\).*for example for each fold.": _again("the model"),
}


def _refusals() -> list[str]:
    told = []
    for body in REFUSED.values():
        with pytest.raises(EchelonError) as caught:
            body(*prepared(DataLoader(DATA, 8), layout=LAYOUT))
        told.append(str(caught.value))
    return told


@pytest.mark.full
def test_what_would_train_something_else_is_refused_by_name(ranks: Ranks) -> None:
    for told in ranks(2, _refusals):
        for words, text in zip(REFUSED, told, strict=True):
            assert re.search(words, text, re.DOTALL), (words, text)


def _another_optimizer(layout: str) -> float:
    """A second prepare of the same model with an optimizer of its parameters that is new."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for again in (False, True):
        model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout=None if again else layout)
        for x, y in loader:
            step(model, optimizer, x, y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return float(whole(model)["last.bias"])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_second_prepare_takes_another_optimizer(ranks: Ranks, layout: str) -> None:
    a, b = ranks(2, _another_optimizer, layout)
    assert a == b


# --- what stays


def _let_go() -> list[bool]:
    left = []
    for layout in ("ddp", "zero1", "fsdp"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = [weakref.ref(model), weakref.ref(optimizer)]
        model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout=layout)
        for x, y in loader:
            step(model, optimizer, x, y)
        copied = copy.deepcopy(model) if layout == "ddp" else None
        del optimizer, loader
        with ech.evaluating(model):  # which the model alone is enough for
            model(x)
        del model
        gc.collect()
        left += [each() is not None for each in held]
        del copied
    return left


@pytest.mark.full
def test_a_model_that_is_dropped_is_freed(ranks: Ranks) -> None:
    """Each call of prepare kept its model and optimizer for good."""
    assert ranks(2, _let_go) == [[False] * 6] * 2


# --- random numbers


def _drawing(folder: Path, stops_after: int, counts: bool) -> dict[str, torch.Tensor]:
    """Draws before its first epoch, and before each epoch's batches."""
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=1)
    model, optimizer, loader = prepared(DataLoader(DATA, 8), module=net(dropout=0.4), layout=_strategy(), checkpoints=saver)
    held_out = list(DataLoader(DATA, 8))  # its order draws a number
    steps = 0
    for _ in range(3) if counts else ech.epochs(loader, 3):
        assert held_out and float(torch.rand(())) < 1
        for x, y in loader:
            step(model, optimizer, x, y)
            steps += 1
            if steps == stops_after:
                return {}
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize(("stops_after", "counts"), [(2, False), (4, False), (5, True)])
def test_what_a_loop_draws_before_its_batches_changes_no_resumed_run(
    ranks: Ranks, tmp_path: Path, stops_after: int, counts: bool
) -> None:
    """Dropout was another after each restart, if anything was drawn between `prepare` and the first batch."""
    wanted = ranks(2, _drawing, tmp_path / "once", -1, counts)
    ranks(2, _drawing, tmp_path / "again", stops_after, counts)
    got = ranks(2, _drawing, tmp_path / "again", -1, counts)
    assert [largest_difference(a, b) for a, b in zip(wanted, got, strict=True)] == [0, 0]


# --- what scripts do with what `prepare` returned


def _as_scripts_do(layout: str) -> tuple[Any, ...]:
    """As scripts for DistributedDataParallel ask and tell their loaders."""
    ranks = max(1, dist.get_world_size() if dist.is_initialized() else 1)
    data = TensorDataset(*batch(16, 0))
    sampler = DistributedSampler(data, num_replicas=ranks, rank=dist.get_rank() if dist.is_initialized() else 0, shuffle=True)
    given = DataLoader(data, 8 // ranks, sampler=sampler), DataLoader(data, 4)
    model, optimizer, loader, held_out = prepared(*given, layout=layout)
    assert (loader.batch_size, held_out.batch_size, loader.dataset, len(loader)) == (8 // ranks, 4, data, 2)
    assert loader.sampler is sampler and loader.batch_sampler.sampler is sampler and not loader.drop_last
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        loader.batch_sampler.sampler.set_epoch(epoch)
        for x, y in loader:
            step(model, optimizer, x, y)
    return (whole(model),)


def test_a_loader_can_be_asked_and_told_as_before(ranks: Ranks) -> None:
    ((wanted,),) = [_as_scripts_do("none")]
    for (got,) in ranks(2, _as_scripts_do, "ddp"):
        assert largest_difference(got, wanted) < 1e-12


def _sets_epochs(folder: str, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    """`set_epoch` is called for epochs that were trained, too, before the run comes to where it goes on."""
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=1)
    model, optimizer, loader = prepared(ech.Loader(TensorDataset(*batch(24, 0)), 8), checkpoints=saver, layout="none")
    steps = 0
    for epoch in range(2):
        loader.set_epoch(epoch)
        for x, y in loader:
            if steps == stop_after:
                return whole(model)
            step(model, optimizer, x, y)
            steps += 1
    return whole(model)


def test_epochs_that_a_script_sets_do_not_undo_where_a_run_goes_on(tmp_path: Path) -> None:
    wanted = _sets_epochs(str(tmp_path / "whole"))
    _sets_epochs(str(tmp_path / "parts"), stop_after=4)
    assert largest_difference(_sets_epochs(str(tmp_path / "parts")), wanted) == 0


def _counts(folder: Path, epochs: int) -> None:
    rows, saved = TensorDataset(*batch(24, 0)), ech.Checkpoints(folder, every=1)
    model, optimizer, loader = prepared(ech.Loader(rows, 8), checkpoints=saved, layout="none")
    for _ in ech.epochs(loader, epochs):
        for count, (x, y) in enumerate(loader):
            if epochs == 1 and count == 2:
                return
            step(model, optimizer, x, y)


def test_an_epoch_that_goes_on_in_its_middle_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whose batches a script may count: its learning rate was another after a restart, in silence."""
    _counts(tmp_path, epochs=1)
    assert "enumerate" not in caplog.text
    _counts(tmp_path, epochs=2)
    assert caplog.text.count("after its first 2 batches") == 1


def test_a_scheduler_can_be_pickled_and_copied_after_prepare() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ech.prepare(model, optimizer, scheduler, [batch(2, 0)], layout="none")
    for copied in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert type(copied) is torch.optim.lr_scheduler.StepLR and copied.state_dict() == scheduler.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: a copy of an optimizer does not know who counts its steps
            copied.step()
        assert copied.last_epoch == 1 and scheduler.last_epoch == 0


def _epochs_in(folder: Path, epochs: int, checkpoints: Any = None) -> list[str]:
    saved = checkpoints or ech.Checkpoints(folder, every="epoch")
    own_loop(net(), DataLoader(DATA, 11), epochs=epochs, layout="none", checkpoints=saved)
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))


def test_a_folder_keeps_the_last_checkpoints_and_what_others_put_there(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "ck", [f"step-{2 * epoch:08d}" for epoch in range(1, 10)]
    folder.mkdir()
    (folder / "best.pt").write_bytes(b"mine")
    assert _epochs_in(folder, 5) == ["best.pt", *wanted[2:5]]
    assert _epochs_in(folder, 7) == ["best.pt", *wanted[4:7]]  # over restarts as well
    assert _epochs_in(folder, 8, ech.DistributedCheckpointSaver(folder, save_every_n_epochs=1)) == ["best.pt", *wanted[4:8]]
    other = tmp_path / "all"  # checkpoints that a run meant to keep stay
    other.mkdir()
    assert _epochs_in(other, 4, ech.DistributedCheckpointSaver(other, save_every_n_epochs=1)) == wanted[:4]
    assert _epochs_in(other, 9) == [*wanted[:4], *wanted[6:9]]


def _resumed_by_hand(kind: str, layout: str, late: bool = False) -> dict[str, torch.Tensor]:
    """The script has loaded its own files before `prepare`, or the optimizer's after it."""
    options = {"momentum": 0.9} if kind == "SGD" else {"amsgrad": True} if kind == "AdamW" else {}
    files: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = net()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        if files:
            model.load_state_dict(files[0])
            if not late:
                optimizer.load_state_dict(files[1])
            break
        for x, y in DataLoader(DATA, 8):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        files = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
    model, optimizer, loader = ech.prepare(model, optimizer, DataLoader(DATA, 8), layout=layout)
    if late:
        optimizer.load_state_dict(files[1])
    for x, y in loader:
        step(model, optimizer, x, y)
    return whole(model)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "late"), [("SGD", True), ("AdamW", False), ("AdamW", True), ("Adagrad", False)])
def test_a_script_may_resume_by_files_of_its_own(ranks: Ranks, kind: str, late: bool) -> None:
    wanted = _resumed_by_hand(kind, "none")
    for layout in ("ddp", "fsdp"):
        for got in ranks(2, _resumed_by_hand, kind, layout, late):
            assert largest_difference(got, wanted) < 1e-12, layout


def _evaluated_loss(folder: Path, name: str) -> tuple[list[str], dict[str, float]]:
    model, optimizer, loader = prepared(ech.Loader(DATA, 8), checkpoints=ech.Checkpoints(folder, best=name))
    for _ in ech.epochs(loader, 1):
        for x, y in loader:
            step(model, optimizer, x, y)
        with ech.evaluating(model) as evaluation:
            evaluation.log("loss", 1.0 + ech.rank())
    return sorted(path.name for path in folder.glob("step-*")), evaluation.numbers


@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_an_evaluation_of_ones_own_has_a_loss_by_which_a_checkpoint_is_the_best(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """A unit's loss is there by itself; a loop's is whatever it logs."""
    for names, numbers in ranks(2, _evaluated_loss, tmp_path, name):
        assert len(names) == 1 and numbers == {"loss": 1.5}
    told = manifest.read(tmp_path / names[0])
    assert told["metrics"] == {name: 1.5} and told["best"] == {"name": name, "mode": "min"}


# --- gradients that are left from one update to the next


def _leaving(layout: str, *, set_to_none: bool = True) -> dict[str, torch.Tensor]:
    """Cleared every third update; the epoch's last batch is a short one."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model, optimizer, loader = ech.prepare(module, optimizer, ech.Loader(DATA, 8, shuffle=False), layout=layout)
    for _ in ech.epochs(loader, 3):
        for x, y in loader:
            with ech.window(model) as window:
                if window.update % 3 == 1:
                    optimizer.zero_grad(set_to_none=set_to_none)
                window.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
    return whole(model)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero1"])
def test_gradients_that_are_left_count_as_they_are(ranks: Ranks, layout: str) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for update in range(9):
        x, y = (each[update % 3 * 8 :][:8] for each in DATA.tensors)
        if update % 3 == 1:
            optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in module.named_parameters()}
    for got in ranks(2, _leaving, layout):
        assert largest_difference(got, wanted) < 1e-12
    for got in ranks(2, _leaving, layout, set_to_none=False):
        assert largest_difference(got, wanted) < 1e-12
