"""Ending to go on later, time limits, starting over, going on with fewer ranks: as a person meets them, and in their parts."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech
from echelon.common.errors import EchelonError, LaunchError, UsageError
from echelon.contracts.overrides import Overrides, impose
from echelon.contracts.restart_notes import note_loader, read_loaders
from echelon.contracts.run_dir import RunDir
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import Failure
from echelon.launcher.functions import launch as functions
from echelon.launcher.functions.launch import launch
from echelon.launcher.job import JobSpec, Outcome, parse_duration, parse_rank_range
from echelon.launcher.local import rendezvous
from echelon.launcher.local import run as local
from echelon.launcher.local.relay import SilentScreen
from echelon.launcher.local.shrink import next_ranks
from tests.conftest import Ranks
from tests.kit.models import batch, largest_difference, net, plain_training, whole
from tests.kit.refusals import refused
from tests.kit.started import Started, wait_until
from tests.kit.units import Regression

ROOT = str(Path(__file__).resolve().parents[2])

# ---- the words ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("55m", 3300), ("1h30m", 5400), ("2d", 172_800), ("1.5h", 5400), ("1m30", 90)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "m", "1x", "30m1h", "-5", "1 h", "nan", "1h 30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with refused(LaunchError):
        parse_duration(text)


def test_a_range_of_ranks_is_read() -> None:
    assert parse_rank_range("3") == (None, 3) and parse_rank_range("2:4") == (2, 4)
    assert parse_rank_range("1:auto") == (1, parse_rank_range("auto")[1])


@pytest.mark.parametrize("text", ["4:2", "0:2", ":2", "2:", "1:2:3", "a:b"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rank_range(text)


# ---- how many ranks go on -----------------------------------------------------------------------------------------------------


def _killed(rank: int, kind: str = "SIGKILL") -> Failure:
    return Failure(rank, 128 + signal.Signals[kind], rank, kind, f"killed by {kind}", reported=False)


def _raised(rank: int) -> Failure:
    return Failure(rank, 1, -100_000_000, "ValueError", "bad data", traceback="ValueError: bad data\n")


def _loader(divisible: int, together: int = 1, fixed: bool = False) -> dict[str, Any]:
    return {"global_batch": divisible, "accumulation": 1, "divisible": divisible, "ranks_per_place": together, "fixed": fixed}


@pytest.mark.parametrize(
    ("ranks", "least", "failures", "loaders", "want", "says"),
    [
        (4, 1, [_killed(1)], [], 3, "rank 1 was killed by SIGKILL"),
        (4, 1, [_killed(1), _killed(3)], [], 2, "rank 1, 3 were killed by SIGKILL"),
        (4, 1, [_killed(1)], [_loader(8)], 2, "rank 1 was killed by SIGKILL, and 3 ranks cannot divide global_batch 8"),
        (4, 1, [_killed(1)], [_loader(12), _loader(6)], 3, "SIGKILL"),
        (4, 1, [_killed(1)], [_loader(12), _loader(4)], 2, "3 ranks cannot divide global_batch 4"),
        (4, 1, [_killed(1)], [_loader(8, together=2)], 2, "cannot divide"),
        (4, 3, [_killed(1)], [_loader(8)], 0, "no number of ranks from 3 to 3 can divide global_batch 8"),
        (4, 3, [_killed(1), _killed(2)], [], 0, "leaves 2 of 4 ranks, and --ranks wants at least 3"),
        (2, 1, [_killed(0), _killed(1)], [], 0, "leaves 0 of 2 ranks"),
        (4, 1, [_killed(1)], [_loader(8, fixed=True)], 4, "StreamLoader can go on only with the same number of ranks"),
        (4, 1, [_raised(1)], [], 4, "no rank was lost"),
        (4, 1, [_raised(1), _killed(2, "SIGSEGV")], [], 4, "no rank was lost"),  # it fell in consequence
        (4, 1, [_killed(1), _raised(2), _killed(3, "SIGABRT")], [], 3, "rank 1 was killed by SIGKILL"),
        (4, 1, [_killed(1, "SIGABRT")], [], 4, "no rank was lost"),
    ],
)
def test_the_ranks_that_are_left_go_on_if_they_can_share_the_batches(
    ranks: int, least: int, failures: list[Failure], loaders: list[dict[str, Any]], want: int, says: str
) -> None:
    plan = next_ranks(ranks, least, failures, loaders)
    assert plan.ranks == want and says in plan.why


def test_a_loader_is_noted_once_and_only_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_loader(8, 1, divisible=8, ranks_per_place=1)
    assert not list(tmp_path.iterdir())
    run = RunDir(tmp_path).at_attempt(3)
    for name, value in run.to_env().items():
        monkeypatch.setenv(name, value)
    for global_batch in (8, 8, 4):
        note_loader(global_batch, 1, divisible=global_batch, ranks_per_place=1)
    assert read_loaders(run.attempt_path) == [_loader(8), _loader(4)]


# The first that dies has the others ended, which are to have said their words.
DIES = """
import os, signal, time
print(os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open("said" + os.environ["RANK"], "w").close()
    while os.environ["RANK"] == "1":
        if all(os.path.exists(f"said{rank}") for rank in range(3)):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    time.sleep(600)
"""


def _run_local(folder: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, RunDir]:
    (folder / "dies.py").write_text(DIES)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "usable_cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = JobSpec(str(folder / "dies.py"), ranks=3, max_restarts=1, min_ranks=least, grace_s=1.0)
    run = RunDir.create(folder, "x")
    return local.run_local(job, run, screen=SilentScreen(), server=functions.shared_server()), run


@pytest.mark.full
def test_a_restart_with_fewer_ranks_gives_each_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, run = _run_local(tmp_path, 1, monkeypatch)
    logs = [(run.path / f"attempts/00{n}/rank0.log").read_text() for n in range(2)]
    assert logs == ["3 4\n", "2 6\n"] and outcome.exit_code == 0 and outcome.restarts == 1
    assert not (run.path / "attempts/001/rank2.log").exists()


def test_too_few_ranks_give_up_and_name_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, run = _run_local(tmp_path, 3, monkeypatch)
    assert outcome.exit_code == 137 and "leaves 2 of 3 ranks, and --ranks wants at least 3" in outcome.note
    assert outcome.restarts == 0 and not (run.path / "attempts/001").exists()


# ---- micro-batches that are no larger than was planned ---------------------------------------------------------------------

SAMPLES, GLOBAL_BATCH, EPOCHS, CLIP = 37, 16, 2, 0.5  # the last global batch has 5 samples


def _data() -> TensorDataset:
    """Rows with a number of tokens each, by which they weigh."""
    tokens = torch.randint(1, 6, (SAMPLES,), generator=torch.Generator().manual_seed(3)).double()
    return TensorDataset(*batch(SAMPLES, 0), tokens)


def _token_loss(out: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return ((out - y).squeeze(1).square() * tokens).sum() / tokens.sum()


class Tokens(Regression):
    """Weighs by tokens; remembers the largest batch that it computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(clip_grad_norm=CLIP, **options)
        self.largest, self.moved = 0, 0

    def weight(self, data: Any) -> torch.Tensor:
        return data[2].sum()

    def move_data_to_device(self, state: ech.State, data: Any, non_blocking: bool) -> Any:
        self.moved += 1
        return super().move_data_to_device(state, data, non_blocking)

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        x, y, tokens = data
        self.largest = max(self.largest, len(x))
        return _token_loss(self.module(x), y, tokens), tokens


def _train_in_parts(layout: str | None, planned: int | None, accumulation: int, **more: Any) -> dict[str, Any]:
    impose(Overrides(planned_ranks=planned))
    try:
        unit = Tokens(layout=layout, accumulate=accumulation)
        accumulate, reduced = unit.prepared.accumulate, list[bool]()
        unit.prepared.accumulate = lambda last: reduced.append(last) or accumulate(last)  # type: ignore[method-assign,func-returns-value]
        loader = ech.Loader(_data(), GLOBAL_BATCH, seed=5, accumulate=accumulation)
        ech.train(unit, loader, **({"max_epochs": EPOCHS} | more))
    finally:
        impose(None)
    return {
        "parameters": whole(unit.module),
        "norms": unit.norms,
        "largest": unit.largest,
        "reduced": sum(reduced),
        "moved": unit.moved,
        "updates": unit.train_progress.num_updates_completed,
        "said": unit.gradient_accumulation_steps,
    }


def _under_each(planned: int | None) -> dict[str, Any]:
    return {s: _train_in_parts(s, planned, 2) for s in ("ddp", "fsdp", "zero2")}


def _plain() -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, plain PyTorch: each global batch at once."""
    module, norms = net(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = ech.Loader(_data(), GLOBAL_BATCH, seed=5)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for x, y, tokens in loader:
            _token_loss(module(x), y, tokens).backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in module.named_parameters()}, norms


@pytest.mark.full
def test_fewer_ranks_than_planned_train_the_same_in_no_more_memory(ranks: Ranks) -> None:
    want, norms = _plain()
    alone = {"alone": _train_in_parts(None, 4, 2)}
    two = ranks(2, _under_each, 4)[0]
    for name, got in {**alone, **two}.items():
        assert largest_difference(got["parameters"], want) < 1e-11, name
        assert got["norms"] == pytest.approx(norms, rel=1e-11), name
        assert got["reduced"] == len(norms), name  # no gradient traffic before the last micro-batch of an update
        assert got["largest"] == GLOBAL_BATCH // 2 // 4, name  # what four ranks compute at once
    assert alone["alone"]["moved"] == 2 * two["ddp"]["moved"]


@pytest.mark.parametrize(("planned", "accumulation", "largest"), [(4, 1, 4), (4, 2, 2), (3, 1, 4), (16, 2, 1), (5, 4, 1)])
def test_updates_stay_what_they_are(planned: int, accumulation: int, largest: int) -> None:
    """Also where a micro-batch cannot be divided into as many alike parts: then they are smaller."""
    parts, plain = _train_in_parts(None, planned, accumulation), _train_in_parts(None, None, accumulation)
    assert parts["updates"] == plain["updates"] == 3 * EPOCHS and parts["said"] == plain["said"] == accumulation
    assert largest_difference(parts["parameters"], plain["parameters"]) < 1e-11
    assert parts["largest"] == largest


def test_a_run_goes_on_in_mid_epoch_with_smaller_micro_batches_and_larger_ones_again(tmp_path: Path) -> None:
    want = _train_in_parts(None, None, 2)
    for planned, until in ((None, 1), (4, 4), (2, 5), (None, 6)):
        found = _train_in_parts(None, planned, 2, checkpoints=tmp_path, max_updates=until)
        assert found["updates"] == until
    assert largest_difference(found["parameters"], want["parameters"]) < 1e-11


class OwnStep(Tokens):
    def train_step(self, state: ech.State, data: Any) -> Any:
        return super().train_step(state, data)


@pytest.mark.parametrize(
    ("kind", "ours", "says"), [(OwnStep, True, "overrides its step"), (Tokens, False, "not an echelon.Loader")]
)
def test_what_is_computed_whole_is_said(caplog: pytest.LogCaptureFixture, kind: type[Tokens], ours: bool, says: str) -> None:
    impose(Overrides(planned_ranks=4))
    try:
        unit = kind()
        ech.train(unit, ech.Loader(_data(), 16) if ours else DataLoader(_data(), 16), max_epochs=1)
    finally:
        impose(None)
    assert unit.largest == 16
    (said,) = [r.getMessage() for r in caplog.records if "planned ranks" in r.getMessage()]
    assert says in said and "4 planned ranks" in said and "4 times the memory" in said


# ---- ending to go on later ----------------------------------------------------------------------------------------------------


def _leave_while_a_peer_waits() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        raise SystemExit(REQUEUE)
    dist.all_reduce(torch.ones(1))


def _leave_or_fail(folder: str) -> None:
    saves = Path(folder) / "saves"
    if os.environ["RANK"] == "0":
        wait_until(saves.exists, "the other one saves")
        raise SystemExit(REQUEUE)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # as one that saves already
    saves.touch()
    raise ValueError("the save went wrong")


def test_who_loses_a_peer_that_left_has_not_failed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        launch(_leave_while_a_peer_waits, ranks=2, max_restarts=1, run_dir=tmp_path, timeout_s=120)
    assert ended.value.code == REQUEUE
    assert len(list(tmp_path.glob("*/attempts/*"))) == 1  # and it is not started again


def test_a_failure_beside_ranks_that_left_is_the_outcome(tmp_path: Path) -> None:
    with pytest.raises(ech.EchelonError, match="the save went wrong"):
        launch(_leave_or_fail, ranks=2, args=(str(tmp_path),), max_restarts=1, run_dir=tmp_path, timeout_s=120)
    assert len(list(tmp_path.glob("*/attempts/*"))) == 1


# Each rank says that it is there; then what the arguments say.
WAITS = """
import os, signal, sys, time
rank = os.environ["RANK"]
if "deaf" in sys.argv and rank == "1":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if rank == "0" else 0))
open(f"ready{rank}", "w").close()
while True:
    time.sleep(0.05)
"""


# Rank 0 comes late, and the other already waits for it.
MEETS = """
import os, threading, time
rank = os.environ["RANK"]
if rank == "0":
    open("ready0", "w").close()
    time.sleep(600)
import echelon as ech
threading.Timer(1.0, lambda: open(f"ready{rank}", "w").close()).start()
ech.init_from_env()
"""


def _exit_json(started: Started, attempt: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((started.folder / f"runs/x/attempts/{attempt:03d}/exit.json").read_text())
    return value


@pytest.mark.parametrize("count", [1, 2])
def test_sigusr1_before_training_ends_the_ranks_with_75(started: Started, count: int) -> None:
    restarts = ["--max-restarts", "1"] if count > 1 else []
    launcher = started.run("--ranks", str(count), *restarts, "--name", "x", started.script(WAITS))
    started.ranks_run(count)
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == REQUEUE, err.decode()
    assert "echelon: stopped; go on with the same command" in err.decode() and b"failed" not in err
    assert _exit_json(started)["exit_code"] == REQUEUE and _exit_json(started)["first_failure"] is None
    assert not (started.folder / "runs/x/attempts/001").exists()
    started.all_gone()


def test_sigusr1_ends_ranks_that_wait_for_one_that_has_not_come(started: Started) -> None:
    """The late one leaves at once; a wait in C++ heard no signal, and lasted until the job's limit."""
    launcher = started.run("--ranks", "2", "--grace", "300", "--name", "x", started.script(MEETS))
    started.ranks_run()
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=120)  # before the grace time is over
    assert launcher.returncode == REQUEUE, err.decode()
    started.all_gone()


SWALLOWS = """
import os, signal
if os.environ["RANK"] == "0":
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    except SystemExit:
        pass
    import echelon as ech
    ech.init_from_env()
"""


def test_a_request_to_stop_that_was_lost_before_the_ranks_meet_is_heard_as_they_do(started: Started) -> None:
    """As where Python compiles an import: it drops what a signal's handler raises. The rank waited for those that had left."""
    launcher = started.run("--ranks", "2", "--grace", "300", "--name", "x", started.script(SWALLOWS))
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == REQUEUE and b"SIGUSR1 came before" in err, err.decode()


@pytest.mark.full
def test_who_does_not_leave_with_the_others_is_stopped_after_the_grace_time(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--grace", "0.5", "--name", "x", started.script(WAITS), "deaf")
    started.ranks_run()
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == REQUEUE, err.decode()
    assert re.search("rank (0, )?1 did not end within 0.5 s", err.decode()), err.decode()  # a busy machine is late with both
    started.all_gone()


@pytest.mark.full
def test_ranks_that_save_when_they_are_terminated_make_it_75(started: Started) -> None:
    launcher = started.run("--ranks", "2", "--name", "x", started.script(WAITS), "saves")
    started.ranks_run()
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == REQUEUE, err.decode()  # else it is 143: test_cli has that
    assert _exit_json(started)["exit_code"] == REQUEUE


TRAINS_ON = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from pathlib import Path
import torch
import echelon as ech
from tests.kit.models import batch
from tests.kit.units import Regression

class Unit(Regression):
    def on_train_step_end(self, *args, **kwargs):
        Path("ready" + os.environ["RANK"]).touch()
        time.sleep(0.02)

ech.init_from_env()
ech.seed(0)
loader = ech.Loader(torch.utils.data.TensorDataset(*batch(48, 0)), 8, seed=1)
unit = Unit(lr=1e-6, layout="ddp" if os.environ["WORLD_SIZE"] != "1" else "none")
ech.train(unit, loader, max_epochs=10**6, callbacks=[ech.DistributedCheckpointSaver("c")])
"""


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_closes_asks_ranks_to_save_as_sigterm_does(started: Started, count: int, number: int) -> None:
    launcher = started.run("--ranks", str(count), "--grace", "300", "--name", "x", started.script(TRAINS_ON))
    ready = [started.folder / f"ready{rank}" for rank in range(count)]
    wait_until(lambda: launcher.poll() is not None or all(path.exists() for path in ready), "the ranks run")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=180)
    assert launcher.returncode == REQUEUE, err.decode()
    assert _exit_json(started)["exit_code"] == REQUEUE and "go on with the same command" in err.decode()
    assert list((started.folder / "c").glob("step-*"))
    started.all_gone()


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_time_limit_ends_the_run_with_75(started: Started, count: int, deaf: bool) -> None:
    script = started.script(WAITS.replace('and rank == "1"', ""))
    arguments = ["--ranks", str(count), "--stop-after", "0.2s", "--grace", "0.2", "--name", "x", script, *(["deaf"] * deaf)]
    launcher = started.run(*arguments)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == REQUEUE and "0.2 s are over" in err.decode(), err.decode()
    assert _exit_json(started)["exit_code"] == REQUEUE
    started.all_gone()


# ---- training that is interrupted, under the launcher -------------------------------------------------------------------------

# 2 epochs of 5 steps; the arguments name what happens, in the first attempt.
TRAINS = """
import os, signal, sys, time
import torch
import echelon as ech
from tests.kit.models import batch, whole
from tests.kit.units import Regression

what, workers = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])

class Slow(Regression):
    largest = 0

    def compute_loss(self, state, data):
        step = self.train_progress.num_steps_completed
        self.largest = max(self.largest, len(data[0]))
        if attempt == 0 and what == "kill" and rank == 3 and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "group" and step == 6:
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.2)
        if what == "usr1" and step == 6 and rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)  # one rank is its own launcher
            time.sleep(0.5)
        if attempt == 1 and what == "dies" and step == 4:
            raise ValueError("it dies")
        return super().compute_loss(state, data)

ech.init_from_env()
unit = Slow(layout="ddp")
loader = ech.Loader(torch.utils.data.TensorDataset(*batch(38, 0)), 8, seed=1, num_workers=workers)
saver = ech.DistributedCheckpointSaver
went_on = saver.restore_from_latest("ckpt", unit, train_dataloader=loader)
print("at step", unit.train_progress.num_steps_completed, "of", os.environ["WORLD_SIZE"])
if attempt == 0 and what == "dies":
    raise ValueError("it dies before it trains")
ech.train(unit, loader, max_epochs=2, callbacks=[saver("ckpt", save_every_n_updates=3)])
if rank == 0:
    torch.save(whole(unit.module), "final.pt")
    print("largest", unit.largest)
"""


def _train(started: Started, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    started.script(TRAINS, "train.py")
    done = started.run("--name", "x", *arguments, env={"PYTHONPATH": ROOT, **(env or {})})
    out, err = done.communicate(timeout=120)
    return done.returncode, out.decode(), err.decode()


def _as_undisturbed(folder: Path) -> float:
    loader = ech.Loader(TensorDataset(*batch(38, 0)), 8, seed=1)
    windows = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        windows += [[(x, y)] for x, y in loader]
    return largest_difference(torch.load(folder / "final.pt"), plain_training(windows)[0])


@pytest.mark.full
@pytest.mark.parametrize(("what", "ranks", "workers"), [("group", 2, 2), ("usr1", 1, 0)])
def test_training_that_is_asked_to_end_saves_and_the_same_command_goes_on(
    started: Started, what: str, ranks: int, workers: int
) -> None:
    """A signal to a rank's whole process group reaches its data workers too, which it still needs."""
    code, _, err = _train(started, "--ranks", str(ranks), "train.py", what, str(workers))
    assert code == REQUEUE and "worker" not in err, err
    step = int(err.partition("echelon: stopped after update ")[2].partition(";")[0])
    assert (started.folder / f"ckpt/step-{step:08d}").exists()
    code, out, err = _train(started, "--ranks", "1", "train.py", "nothing", "0")
    assert code == 0 and f"at step {step} of 1" in out, err
    assert _as_undisturbed(started.folder) < 1e-11
    started.all_gone()


def test_a_machine_that_cannot_reach_itself_is_told_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback interface that is down, or without its address; here one of an address that no machine has (RFC 5737)."""
    monkeypatch.setattr(rendezvous, "_LOOPBACK", "192.0.2.1")
    with refused(EchelonError):
        rendezvous.OneNodeRendezvous().meet()


@pytest.mark.full
def test_a_lost_rank_leaves_fewer_that_go_on_in_the_memory_that_was_planned(started: Started) -> None:
    """Of four ranks three are left, which cannot divide the global batch of 8; two can."""
    code, out, err = _train(started, "--ranks", "2:4", "--max-restarts", "2", "train.py", "kill", "0")
    assert code == 0, err
    assert "restart 1 of 2 with 2 ranks: rank 3 was killed by SIGKILL, and 3 ranks cannot divide global_batch 8" in err
    assert "at step 6 of 2" in out and "largest 2" in out
    assert _as_undisturbed(started.folder) < 1e-11


@pytest.mark.full
def test_restart_begins_anew_once_and_what_was_saved_is_kept(started: Started) -> None:
    """Attempts go on from what this command saved, not from what was there before it, however early the first one died."""
    assert _train(started, "--ranks", "1", "train.py", "nothing", "0")[0] == 0
    code, out, err = _train(started, "--ranks", "2", "--restart", "--max-restarts", "2", "train.py", "dies", "0")
    assert code == 0 and "restart 2 of 2\n" in err, err
    assert [line for line in out.splitlines() if line.startswith("at step")] == [f"at step {n} of 2" for n in (0, 0, 3)]
    assert _as_undisturbed(started.folder) < 1e-11
    assert [p.name for p in (started.folder / "ckpt").iterdir() if "replaced" in p.name]


# ---- data workers -------------------------------------------------------------------------------------------------------------

# Signals its whole group while its workers start and while they read; then what the argument says.
READS = """
import os, signal, sys, threading, time
import torch
import echelon as ech

NUMBERS, rank = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), os.getpid()
for number in NUMBERS:
    signal.signal(number, lambda *_: os.getpid() == rank or os._exit(9))  # as `world.stop` has it

def storm():
    for _ in range(200):
        for number in NUMBERS:
            os.killpg(0, number)
        time.sleep(0.002)

class Slow:
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(600 if index >= 8 else 0)
        return index

# For how long torch waits for a worker that is to end, and how often a worker looks for its parent.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5
batches = iter(ech.Loader(list(range(400)), 4, num_workers=2))
thread = threading.Thread(target=storm)
thread.start()
time.sleep(0.01)
next(batches)
thread.join()
print(sum(1 for _ in batches) if sys.argv[1] == "all" else next(batches) is not None, flush=True)
if sys.argv[1] == "killed":
    time.sleep(600)
if sys.argv[1] == "stuck":
    kept, closed = (iter(ech.Loader(Slow(), 4, shuffle=False, num_workers=2)) for _ in range(2))
    next(kept)
    next(closed)
    time.sleep(0.2)
    closed.close()
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["all", "stuck", "killed"])
def test_a_signal_to_the_whole_group_leaves_the_workers_at_work_and_they_end_with_their_parent(
    started: Started, how: str
) -> None:
    """Also one that is stuck; and if the parent is killed."""
    process = started.python(started.script(READS), how, process_group=0)
    if how == "killed":
        assert process.stdout is not None
        process.stdout.readline()
        assert len(psutil.Process(process.pid).children()) == 2
        process.kill()
    else:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and (out == b"99\n" or how == "stuck"), err.decode()
    started.all_gone()
