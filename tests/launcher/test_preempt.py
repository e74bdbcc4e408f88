"""A request to stop: heard at any moment, agreed on, saved, and answered with exit code 75; the run goes on as if nothing was."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.checkpoint import commit, manifest
from echelon.contracts.stopping import REQUEUE, leave
from echelon.world import stop
from tests.conftest import Ranks, clean_environment
from tests.kit import forked
from tests.kit.models import Batch, batch, largest_difference, net, whole
from tests.kit.started import wait_until
from tests.kit.units import Regression

DATA, EVAL = torch.utils.data.TensorDataset(*batch(48, 0)), torch.utils.data.TensorDataset(*batch(24, 1))
STEPS, EVERY = 14, 3


class Interrupted(Regression):
    """Sends itself a signal at a moment of its own choice, on one rank or all."""

    def __init__(self, layout: str, moment: str = "", number: int = 0, only: int | None = None) -> None:
        def plateau(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

        super().__init__(module=net(dropout=0.2), layout=layout, optimizer="AdamW", lr=0.05, schedule=plateau)
        self.moment, self.number, self.only = moment, number, only
        self.evaluated: list[tuple[int, float]] = []

    def send(self, *_: Any) -> None:
        if self.only is None or self.only == dist.get_rank():
            os.kill(os.getpid(), self.number)

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, out = super().compute_loss(state, data)
        step = self.train_progress.num_steps_completed
        if not self.module.training:
            loss = loss + 0.01 * torch.rand((), dtype=loss.dtype)  # as the noise of a diffusion model
            if self.moment == "evaluation" and step == 6 and self.eval_progress.num_steps_completed_in_epoch == 1:
                self.send()
            if self.moment == "last evaluation" and step == STEPS and self.eval_progress.num_steps_completed_in_epoch == 1:
                self.send()
        elif step == {"forward": 5, "last step": STEPS - 1}.get(self.moment):
            self.send()
        elif step == 5 and self.moment == "backward":
            out.register_hook(self.send)
        return loss, out

    def on_eval_epoch_end(self, state: ech.State) -> None:
        self.evaluated.append((self.train_progress.num_steps_completed, self.eval_loss))


def _fit(unit: Interrupted, folder: Path | None, restored: bool = False, **options: Any) -> int | None:
    loader = ech.Loader(DATA, 8, seed=1)
    saver = ech.DistributedCheckpointSaver
    if restored:
        assert folder is not None and saver.restore_from_latest(folder, unit, train_dataloader=loader)
    callbacks: list[ech.Callback] = [saver(folder, **options)] if folder is not None else []
    try:
        ech.fit(
            unit,
            loader,
            ech.Loader(EVAL, 4, shuffle=False),
            max_updates=STEPS,
            evaluate_every_n_updates=EVERY,
            evaluate_every_n_epochs=None,
            callbacks=callbacks,
        )
    except SystemExit as ended:
        return ended.code  # type: ignore[return-value]
    return None


def _undisturbed(layout: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    unit = Interrupted(layout)
    assert _fit(unit, None) is None
    return whole(unit.module), unit.evaluated


def _stopped(folder: Path, layout: str, moment: str, number: int, only: int | None) -> tuple[Any, ...]:
    unit = Interrupted(layout, moment, number, only)
    options: dict[str, Any] = {}
    if moment == "save":
        publish, options = commit.publish, {"save_every_n_updates": 5}

        def interrupted(*args: Any) -> Any:
            if unit.train_progress.num_steps_completed == 5:
                unit.send()
            return publish(*args)

        commit.publish = interrupted
    timer = threading.Timer(0.05 + 0.15 * dist.get_rank(), lambda: os.kill(os.getpid(), number))
    if moment == "any":
        compute = unit.compute_loss

        def slowly(*args: Any) -> Any:
            if timer.ident is None:
                timer.start()
            if unit.train_progress.num_steps_completed == STEPS - 1:
                timer.join()  # however late it is
            time.sleep(0.03)
            return compute(*args)

        unit.compute_loss = slowly  # type: ignore[method-assign]
    code = _fit(unit, folder, **options)
    if timer.ident is not None:
        timer.join()
    os.kill(os.getpid(), number)  # a late one
    return code, unit.train_progress.num_steps_completed, unit.evaluated


def _went_on(folder: Path, layout: str) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    unit = Interrupted(layout)
    assert _fit(unit, folder, restored=True) is None
    return whole(unit.module), unit.evaluated


MOMENTS = [
    ("ddp", "forward", signal.SIGTERM, None),
    pytest.param("ddp", "backward", signal.SIGUSR1, 1, marks=pytest.mark.full),
    ("fsdp", "backward", signal.SIGHUP, 0),
    ("ddp", "evaluation", signal.SIGTERM, 1),
    pytest.param("fsdp", "evaluation", signal.SIGUSR1, 0, marks=pytest.mark.full),
    ("fsdp", "save", signal.SIGTERM, None),
    ("ddp", "any", signal.SIGTERM, None),
    ("ddp", "last step", signal.SIGUSR1, 1),
    pytest.param("ddp", "last evaluation", signal.SIGTERM, 0, marks=pytest.mark.full),
    ("fsdp", "last evaluation", signal.SIGUSR1, None),
]

ENDS = {"last step": {STEPS}, "last evaluation": {STEPS}, "any": set(range(STEPS + 1))}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What two ranks compute that no signal reaches, by layout."""
    return {}


@pytest.mark.full(but=("ddp-any",))
@pytest.mark.parametrize(("layout", "moment", "number", "only"), MOMENTS)
def test_a_signal_at_any_moment_is_agreed_on_saved_and_leaves_no_trace(
    ranks: Ranks, undisturbed: dict[str, Any], tmp_path: Path, layout: str, moment: str, number: int, only: int | None
) -> None:
    """Dropout, AdamW, and a schedule that the evaluations drive: one evaluation more or less would be seen."""
    if layout not in undisturbed:
        undisturbed[layout] = ranks(2, _undisturbed, layout)[0]
    want, evaluations = undisturbed[layout]
    ended = ranks(2, _stopped, tmp_path / "c", layout, moment, number, only)
    assert {code for code, _, _ in ended} == {REQUEUE}
    steps = {step for _, step, _ in ended}
    assert len(steps) == 1 and steps <= ENDS.get(moment, {5, 6, 7})
    assert commit.latest(tmp_path / "c") == tmp_path / "c" / f"step-{steps.pop():08d}"
    got, after = ranks(2, _went_on, tmp_path / "c", layout)[0]
    assert largest_difference(got, want) == 0
    assert ended[0][2] + after == evaluations  # none is lost, none comes twice


def _best(folder: Path, first: bool, moment: str = "") -> tuple[Any, ...]:
    unit = Interrupted("ddp", moment, signal.SIGTERM, 1)
    best = ech.callbacks.BestCheckpointConfig("eval_loss", "min")
    code = _fit(unit, folder, restored=not first, best_checkpoint_config=best, keep_last_n_checkpoints=2)
    return code, unit.eval_loss, [manifest.read(path)["metrics"] for path in commit.committed(folder)]


@pytest.mark.full
@pytest.mark.parametrize("moment", ["last step", "last evaluation"])
def test_the_number_of_the_last_checkpoint_is_known_once_its_evaluation_was_made(
    ranks: Ranks, tmp_path: Path, moment: str
) -> None:
    """It was saved before, as the signal came, and would never be the best. A run that is complete knows its loss, too."""
    code, _, metrics = ranks(2, _best, tmp_path / "c", True, moment)[0]
    assert (code, metrics[-1]) == (REQUEUE, {})
    code, loss, metrics = ranks(2, _best, tmp_path / "c", False)[0]
    assert (code, metrics[-1]) == (None, {"eval_loss": loss})
    commit.verify(commit.latest(tmp_path / "c"))
    for _ in range(2):
        assert ranks(2, _best, tmp_path / "c", False)[1] == (None, loss, metrics)


def _asked_before(folder: Path) -> tuple[int | None, int]:
    with stop.listening(lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)  # as the loop before this one ended
    unit = Interrupted("ddp")
    return _fit(unit, folder), unit.train_progress.num_steps_completed


def test_who_was_asked_before_the_loop_began_does_no_step(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _asked_before, tmp_path / "c") == [(REQUEUE, 0)] * 2


def _at_the_end() -> int | None:
    unit = Interrupted("ddp")
    unit.on_train_end = unit.send  # type: ignore[method-assign]
    unit.number = signal.SIGTERM
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    assert before[0] is signal.SIG_DFL and before[1] is leave
    code = _fit(unit, None)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before  # nobody called init_from_env
    return code


@pytest.mark.full
def test_a_signal_after_the_last_step_does_not_make_a_complete_run_incomplete(ranks: Ranks) -> None:
    assert ranks(2, _at_the_end) == [None, None]


def _outside(moment: str, number: int, only: int | None) -> list[str]:
    """What was reached, in order; the last word is how it ended."""
    reached = []

    def send(*_: Any) -> None:
        if only is None or only == dist.get_rank():
            os.kill(os.getpid(), number)

    def at(name: str) -> None:
        reached.append(name)
        if moment == name:
            send()

    class Stops(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            if unit.train_progress.num_steps_completed == 2 and moment == "stopped by its script":
                send()
                state.stop()

        def on_train_end(self, state: ech.State, unit: Any) -> None:
            at("last save")

        def on_eval_step_end(self, state: ech.State, unit: Any) -> None:
            at("evaluate")

        def on_predict_step_end(self, state: ech.State, unit: Any) -> None:
            at("predict")

        def on_test_step_end(self, state: ech.State, unit: Any) -> None:
            at("test")

    try:
        ech.init_from_env("cpu")
        at("joined")
        unit, loader = Regression(layout="ddp"), ech.Loader(DATA, 8, seed=1)
        at("before training")
        ech.train(unit, loader, max_updates=3, callbacks=[Stops()])
        at("between")
        for run in (ech.evaluate, ech.predict, ech.units.test):
            if moment == run.__name__ or moment == "last save":
                data = EVAL.tensors[0] if run is ech.predict else EVAL
                run(unit, ech.Loader(data, 8, shuffle=False), callbacks=[Stops()])  # type: ignore[arg-type]
        at("after")
        ech.train(unit, loader, max_updates=6, callbacks=[])
        reached.append("trained again")
    except SystemExit as end:
        return [*reached, str(end.code)]
    return [*reached, "end"]


OUTSIDE = {
    ("joined", None): ["joined", "75"],
    ("before training", None): ["joined", "before training", "75"],
    ("between", None): ["joined", "before training", "last save", "between", "75"],
    ("evaluate", None): ["joined", "before training", "last save", "between", "evaluate", "75"],
    ("predict", None): ["joined", "before training", "last save", "between", "predict", "75"],
    ("test", None): ["joined", "before training", "last save", "between", "test", "75"],
    # That training is complete, but what follows of ours does not begin; the signal of one rank is known to all.
    ("last save", 1): ["joined", "before training", "last save", "between", "75"],
    ("stopped by its script", 1): ["joined", "before training", "last save", "between", "after", "75"],
}


@pytest.mark.full
def test_from_init_from_env_on_a_signal_ends_the_rank_with_75_wherever_it_comes(ranks: Ranks) -> None:
    numbers = itertools.cycle([signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM])
    for (moment, only), want in OUTSIDE.items():
        assert ranks(2, _outside, moment, next(numbers), only) == [want] * 2, moment


def test_handlers_of_the_users_own_and_ignored_signals_stay() -> None:
    def own(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, own), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with stop.listening(lambda: None):
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == (own, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


FORKS = """
    import os, signal, time
    from echelon.world import stop

    with stop.listening(lambda: None):
        heard, says = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(says, b"up")
            time.sleep(600)
            os._exit(0)
        os.read(heard, 2)  # Python forgets what reaches a child before it is set up
        os.kill(child, signal.SIGUSR1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.asked())
"""


@pytest.mark.usefixtures("forked_programs")
def test_a_child_that_the_program_forked_dies_of_its_own_signal() -> None:
    """It has nothing to save: with our handler in it, `terminate()` would wait for ever."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKS)], capture_output=True, text=True, timeout=120, env=clean_environment()
    )
    assert ran.stdout.split() == [str(-signal.SIGTERM), "None"], ran.stderr


RESTORING = """
    import sys, time
    from pathlib import Path

    import torch

    import echelon as ech
    from echelon.checkpoint import store
    from tests.kit.models import batch
    from tests.kit.units import Regression

    DATA = torch.utils.data.TensorDataset(*batch(48, 0))
    slowly, steps = sys.argv[1] == "slowly", int(sys.argv[2])
    ech.init_from_env()
    ech.seed(0)
    unit, loader = Regression(layout="ddp"), ech.Loader(DATA, 8, seed=1)
    if slowly:
        read = store.read_states

        def read_states(*args, **options):
            Path("restoring").touch()
            time.sleep(600)
            return read(*args, **options)

        store.read_states = read_states
    saver = ech.DistributedCheckpointSaver("c")
    saver.restore_from_latest("c", unit, train_dataloader=loader)
    print("begins at", unit.train_progress.num_steps_completed)
    ech.train(unit, loader, max_updates=steps, callbacks=[saver])
"""


@pytest.mark.full
def test_a_signal_during_a_restore_ends_the_run_at_once_and_costs_nothing(tmp_path: Path) -> None:
    """There is nothing to save before the state is there."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "train.py").write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n" + textwrap.dedent(RESTORING))

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "echelon", "run", "--ranks", "2", "--grace", "300", "train.py", *args]
        return forked.popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment()
        )

    first = start("quickly", "3")
    assert first.communicate(timeout=120)[0] and first.returncode == 0
    second = start("slowly", "6")
    wait_until(lambda: (tmp_path / "restoring").exists() or second.poll() is not None, "it restores")
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=120)  # before the grace time is over
    assert second.returncode == REQUEUE
    commit.verify(tmp_path / "c" / "step-00000003")
    third = start("quickly", "6")
    output = third.communicate(timeout=120)[0]
    assert third.returncode == 0 and "begins at 3" in output, output


ALONE = """
    import os, signal, sys
    from pathlib import Path

    import torch

    import echelon as ech
    from tests.kit.models import batch
    from tests.kit.units import Regression

    DATA, EVAL = torch.utils.data.TensorDataset(*batch(48, 0)), torch.utils.data.TensorDataset(*batch(24, 1))

    def own(number, frame):
        print("my own", flush=True)

    moment, number = sys.argv[1], int(sys.argv[2])

    class Unit(Regression):
        def eval_step(self, state, data):
            if moment == "evaluation" and not Path("sent").exists():
                Path("sent").touch()
                os.kill(os.getpid(), number)
            return super().eval_step(state, data)

    if moment == "own":
        signal.signal(number, own)
    ech.seed(0)
    ech.init_from_env()
    if moment in ("joined", "own"):
        os.kill(os.getpid(), number)
    unit, loader = Unit(), ech.Loader(DATA, 8, seed=1)
    saver = ech.DistributedCheckpointSaver("c")
    saver.restore_from_latest("c", unit, train_dataloader=loader)
    ech.fit(unit, loader, ech.Loader(EVAL, 8), max_updates=4, callbacks=[saver])
    print("after fit:", unit.train_progress.num_steps_completed, unit.eval_loss == unit.eval_loss)
"""


def _alone(folder: Path, *args: str) -> tuple[int, str]:
    root = Path(__file__).resolve().parents[2]
    (folder / "train.py").write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n" + textwrap.dedent(ALONE))
    ran = forked.run(
        [sys.executable, "train.py", *args], cwd=folder, capture_output=True, text=True, timeout=120, env=clean_environment()
    )
    return ran.returncode, ran.stdout


@pytest.mark.full
def test_plain_python_leaves_with_75_too_unless_it_has_a_handler_of_its_own_and_the_same_command_goes_on(tmp_path: Path) -> None:
    assert _alone(tmp_path, "evaluation", str(int(signal.SIGUSR1))) == (REQUEUE, "")
    assert _alone(tmp_path, "evaluation", str(int(signal.SIGUSR1))) == (0, "after fit: 4 True\n")
    shutil.rmtree(tmp_path / "c")
    assert _alone(tmp_path, "joined", str(int(signal.SIGTERM))) == (REQUEUE, "")
    assert _alone(tmp_path, "own", str(int(signal.SIGTERM))) == (0, "my own\nafter fit: 4 True\n")
