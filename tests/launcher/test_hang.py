"""When a run is ended because nothing moves, and above all when not: a slow run is none that hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import LaunchError, RankFailedError
from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.records import exit_record
from echelon.contracts.run_dir import RunDir, read_json
from echelon.diagnosis.stacks import main_thread
from echelon.launcher.cluster.finish_job import finish_job
from echelon.launcher.functions.launch import launch
from echelon.launcher.job import JobSpec, parse_hang_timeout
from echelon.launcher.local import hang, progress
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.gather import RankProbe
from echelon.launcher.local.hang import HangLimit
from echelon.launcher.local.progress import Progress
from echelon.launcher.local.rank_state import has_handler, waits
from echelon.launcher.local.responder import Answer
from echelon.launcher.local.worker import STACK_SIGNAL
from tests.conftest import ends_of
from tests.kit.refusals import refused
from tests.kit.two_nodes import start_nodes

OWN, COLLECTIVE = (
    '  File "/home/me/train.py", line 7 in clean',
    '  File "/lib/torch/distributed/distributed_c10d.py", line 3252 in wait',
)


class _Ranks:
    """Two ranks that a test moves, in place of `RankProbe`: positions, answers of their responders, stacks."""

    def __init__(self) -> None:
        self.pulses = self.responders = self
        self.at = {0: RankProgress(), 1: RankProgress()}
        self.answers: dict[int, Answer | None] = {0: Answer(20), 1: Answer(20)}
        self.stacks: dict[int, str | Callable[[], str]] = {0: OWN, 1: OWN}

    def read(self, rank: int) -> RankProgress:
        return self.at[rank]

    def main_stack(self, rank: int) -> str:
        stack = self.stacks[rank]
        return stack if isinstance(stack, str) else stack()

    def ask(self, ranks: Any, question: Any, wait_s: float = 0.0) -> dict[int, Answer]:
        said = {rank: self.answers[rank] for rank in cast(Iterable[int], ranks)}
        return {rank: replace(answer, main=self.main_stack(rank)) for rank, answer in said.items() if answer is not None}

    def signalled(self, rank: int) -> None:
        raise AssertionError("a rank that may be well gets no signal")

    ask_stack = signalled


class _Scene:
    """A limit of ten minutes over two ranks, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, strict: bool = False) -> None:
        self.ranks, self.now, self.cpu_s = _Ranks(), 0.0, 0.0
        self.progress, self.attempt = Progress(), Attempt(0, Path("runs/a/attempts/000"))
        self.attempt.pids = {0: os.getpid(), 1: os.getpid()}
        self.limit = HangLimit(600.0, strict, self.progress, cast(RankProbe, self.ranks), 60.0)
        monkeypatch.setattr(hang, "_used", lambda pid: (self.cpu_s, 0))

    def until_ended(self, most_s: float = 7000.0) -> float:
        """How long it takes until the attempt is ended; infinite if it is not."""
        began = self.now
        while self.now < began + most_s:
            self.now += 2.0
            self.progress.look(self.attempt.pids, [0, 1], self.ranks, self.now)  # type: ignore[arg-type]
            if self.limit.look(self.attempt) is not None:
                return self.now - began
        return float("inf")

    def steps(self, seconds_each: float = 2.0) -> None:
        for step in range(6):
            self.put(*[RankProgress(step, Phase.STEP, 0, 3 * step)] * 2)
            assert self.until_ended(seconds_each) == float("inf")

    def put(self, *standings: RankProgress) -> None:
        self.ranks.at = dict(enumerate(standings))


NEVER = float("inf")
STEP = RankProgress(6, Phase.STEP, 0, 20)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> _Scene:
    return _Scene(monkeypatch)


@pytest.mark.parametrize("other", [STEP, RankProgress(6, Phase.DATA, 0, 19)])
def test_a_loop_in_which_nothing_moves_or_one_rank_stays_behind_is_ended_after_the_limit(
    scene: _Scene, other: RankProgress
) -> None:
    scene.steps()
    scene.put(STEP, other)
    assert 600 < scene.until_ended() <= 604


@pytest.mark.full(but=("standing0",))
@pytest.mark.parametrize(
    "standing",
    [
        RankProgress(6, Phase.CHECKPOINT, 0, 20),
        RankProgress(6, Phase.BETWEEN, 0, 20),
        RankProgress(6, Phase.AFTER, 0, 20),
        RankProgress(6, Phase.EVAL_STEP, 40, 90),
        RankProgress(6, Phase.EVAL_DATA, 40, 90),
        RankProgress(6, Phase.DATA, 0, 1),
        RankProgress(6, Phase.STEP, 0, 4),
    ],
)
def test_what_takes_long_by_its_nature_has_five_times_as_long(scene: _Scene, standing: RankProgress) -> None:
    """Checkpoints, evaluations, hooks; the first data of an epoch, whose workers start, and its first steps, which compile."""
    scene.steps()
    scene.put(standing, RankProgress(7, Phase.STEP, 0, 30))
    assert 3000 < scene.until_ended() <= 3004


@pytest.mark.parametrize("computes", [True, False])
def test_a_rank_that_visibly_works_has_five_times_as_long(scene: _Scene, *, computes: bool) -> None:
    def stack() -> str:
        if computes:
            scene.cpu_s = scene.now / 2
        return OWN if computes else f"{OWN} {scene.now}"

    scene.steps()
    scene.put(STEP, STEP)
    scene.ranks.stacks = {0: stack, 1: stack}
    assert 3000 < scene.until_ended() <= 3004


def test_who_waits_in_a_collective_does_not_work_however_busily_it_waits(scene: _Scene) -> None:
    def spins() -> str:
        scene.cpu_s = scene.now
        return COLLECTIVE

    scene.steps()
    scene.put(STEP, STEP)
    scene.ranks.stacks = {0: spins, 1: spins}
    assert scene.until_ended() < 620


@pytest.mark.full
def test_nobody_is_ended_under_a_debuggers_hands(scene: _Scene) -> None:
    scene.steps()
    scene.put(STEP, STEP)
    scene.ranks.stacks = {
        0: '  File "/usr/lib/python3.12/cmd.py", line 126 in cmdloop\n  File "/usr/lib/python3.12/pdb.py", line 9 in f'
    }
    scene.ranks.stacks[1] = COLLECTIVE
    assert scene.until_ended() == NEVER


@pytest.mark.full
def test_nobody_is_ended_while_gdb_holds_a_rank_nor_as_soon_as_it_lets_go(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so: the state is t."""
    state = "S"
    monkeypatch.setattr(progress, "is_stopped", lambda pid: pid == os.getppid() and state in "Tt")
    monkeypatch.setattr(hang, "process_stat", lambda pid: [state if pid == os.getppid() else "S"])
    scene.attempt.pids = {0: os.getpid(), 1: os.getppid()}
    scene.steps()
    scene.ranks.answers = {0: Answer(21, pending=True), 1: None}
    scene.ranks.stacks[0] = COLLECTIVE
    for held in (STEP, RankProgress(6, Phase.DATA, 0, 19), RankProgress()):
        scene.put(STEP, held)
        state = "t"
        assert scene.until_ended() == NEVER
        state = "S"
        assert scene.until_ended(590) == NEVER
    scene.put(STEP, STEP)
    state = "T"
    assert 600 < scene.until_ended() <= 604


def test_a_rank_that_has_become_another_program_is_not_asked_for_its_stack() -> None:
    """The signal would end it."""
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert not has_handler(other.pid, STACK_SIGNAL)
        other.kill()
    assert has_handler(os.getpid(), signal.SIGINT)


def test_slow_steps_have_longer(scene: _Scene) -> None:
    scene.steps(seconds_each=200)
    scene.put(STEP, STEP)
    assert 2000 < scene.until_ended() <= 2004


def test_a_first_step_that_took_long_is_no_measure_of_the_others(scene: _Scene) -> None:
    for standing, seconds in ((RankProgress(0, Phase.DATA, 0, 1), 4), (RankProgress(0, Phase.STEP, 0, 2), 400)):
        scene.put(standing, standing)
        assert scene.until_ended(seconds) == NEVER
    scene.put(*[RankProgress(1, Phase.STEP, 0, 4)] * 2)
    assert 3000 < scene.until_ended() <= 3004


def test_twice_the_longest_silence_so_far_is_no_hang(scene: _Scene) -> None:
    scene.steps()
    scene.put(*[RankProgress(5, Phase.DATA, 0, 19)] * 2)
    assert scene.until_ended(550) == NEVER  # such as each tenth file
    scene.put(*[RankProgress(5, Phase.STEP, 0, 20)] * 2)
    assert 1100 <= scene.until_ended() <= 1104


@pytest.mark.full
@pytest.mark.parametrize("other", [RankProgress(), RankProgress(6, Phase.ENDED, 0, 20), STEP])
def test_a_rank_in_code_of_its_own_may_take_as_long_as_it_likes_while_the_others_wait(scene: _Scene, other: RankProgress) -> None:
    """It prepares the data, say, or writes the model: even one that sleeps may wait for something outside."""
    scene.steps()
    for mine in (RankProgress(), RankProgress(6, Phase.ENDED, 0, 20)):
        scene.put(mine, other)
        scene.ranks.stacks = {0: OWN, 1: COLLECTIVE}
        scene.ranks.answers[1] = Answer(21, pending=True)
        assert scene.until_ended() == NEVER


@pytest.mark.full
def test_ranks_that_all_wait_for_one_another_hang_in_code_of_their_own_too(scene: _Scene) -> None:
    scene.ranks.answers = {0: Answer(21, pending=True), 1: Answer(21, pending=True)}  # as gloo says, also when they have ended
    assert scene.until_ended() == NEVER
    scene.ranks.stacks = {0: COLLECTIVE, 1: COLLECTIVE.replace("distributed", "autograd")}
    assert scene.until_ended() < 780  # a stack is asked for once nothing has moved for a while


@pytest.mark.parametrize("standing", [RankProgress(), STEP])
def test_of_a_rank_that_has_ended_while_the_others_wait_it_is_said_once(scene: _Scene, standing: RankProgress) -> None:
    scene.put(standing, standing)
    scene.ranks.stacks[0], scene.ranks.answers[0] = OWN, Answer(21, pending=True)
    said = []
    for second in range(0, 120, 2):
        if second == 60:
            scene.ranks.stacks[0] = COLLECTIVE + "\n" + OWN
        scene.now += 2.0
        scene.progress.look(scene.attempt.pids, [0], scene.ranks, scene.now)  # type: ignore[arg-type]
        assert scene.limit.look(scene.attempt) is None
        if (line := scene.limit.left(scene.attempt)) is not None:
            said.append((second, line))
    ((when, line),) = said
    assert 60 <= when < 80 and line.startswith("rank 1 has ended with exit code 0") and "rank 0 stands" in line


@pytest.mark.full
@pytest.mark.parametrize("strict", [False, True])
def test_a_checkpoint_that_a_slow_disk_holds_is_no_wait_for_others(monkeypatch: pytest.MonkeyPatch, *, strict: bool) -> None:
    """Of ranks in a loop of their own, in the call of fsync that ends torch's save; also while another waits for them."""
    writes = '  File "/lib/torch/distributed/checkpoint/filesystem.py", line 413 in _write_files_from_queue\n' + OWN
    for pending in (False, True):  # as gloo goes on saying of the last collective
        scene = _Scene(monkeypatch, strict=strict)
        scene.ranks.stacks = {0: writes, 1: writes}
        scene.ranks.answers = {0: Answer(20, pending=pending), 1: Answer(20, pending=pending)}
        assert scene.until_ended() == NEVER
    scene = _Scene(monkeypatch)
    scene.ranks.stacks = {0: writes, 1: COLLECTIVE}
    scene.ranks.answers[1] = Answer(21, pending=True)
    assert scene.until_ended() == NEVER


def _innermost(file: str, call: str, *through: str) -> str:
    """A stack whose call is that line of torch's own file, under frames of these others."""
    path = os.path.join(os.path.dirname(torch.__file__), file)
    lines = Path(path).read_text().splitlines()
    frames = [*(os.path.join(os.path.dirname(torch.__file__), each) for each in through), path]
    number = next(n for n, line in enumerate(lines, 1) if call in line)
    return "".join(f'  File "{frame}", line {number if frame == path else 1} in f\n' for frame in frames) + OWN


@pytest.mark.parametrize(
    ("stack", "alone", "pending"),
    [
        (_innermost("distributed/distributed_c10d.py", "work.wait()"), True, True),
        (_innermost("distributed/_functional_collectives.py", "wait_tensor(", "_ops.py", "_library/autograd.py"), True, True),
        (_innermost("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "all_gather_work.wait()"), False, True),
        (_innermost("distributed/utils.py", "dist._verify_params_across_processes("), False, True),
        (_innermost("nn/parallel/distributed.py", "dist._broadcast_coalesced("), False, True),
        (_innermost("autograd/graph.py", "def "), False, True),
        (_innermost("distributed/tensor/_dispatch.py", "def dispatch", "_ops.py"), False, False),
        (_innermost("distributed/checkpoint/filesystem.py", "os.fsync("), False, False),
        (_innermost("distributed/rpc/api.py", "fut.wait()"), False, False),
    ],
)
def test_who_waits_for_others_is_seen_by_the_innermost_call(stack: str, *, alone: bool, pending: bool) -> None:
    """Without and with a collective that has begun: stacks as ranks had them that waited so on gloo."""
    frames = main_thread(stack)
    assert (waits(frames, pending=False), waits(frames, pending=True)) == (alone, pending)


@pytest.mark.full
def test_ranks_whose_threads_compute_while_they_wait_go_on(scene: _Scene) -> None:
    def computes() -> str:
        scene.cpu_s = scene.now / 2
        return COLLECTIVE

    scene.ranks.answers = {0: Answer(21, pending=True), 1: Answer(21, pending=True)}
    scene.ranks.stacks = {0: computes, 1: computes}
    assert scene.until_ended() == NEVER
    remote = COLLECTIVE.replace("distributed_c10d", "rpc/api")
    scene.ranks.stacks = {0: remote, 1: remote}
    assert scene.until_ended() == NEVER


def test_in_a_loop_of_ones_own_it_is_said_for_whom_others_wait(scene: _Scene) -> None:
    def lines_of(seconds: int) -> list[str]:
        lines = []
        for _ in range(seconds // 2):
            assert scene.until_ended(2) == NEVER
            lines += [line] if (line := scene.limit.quiet()) is not None else []
        return lines

    scene.ranks.stacks, scene.ranks.answers[1] = {0: OWN, 1: COLLECTIVE}, Answer(20, pending=True)
    first, second = lines_of(200)
    assert re.match(r"no collective for 6\d s: rank 0 is behind, at train\.py:7 in clean; rank 1 waits, at ", first)
    assert re.match(r"no collective for 1[23]\d s: rank 0 is behind", second)
    scene.ranks.answers = {0: Answer(21), 1: Answer(21, pending=True)}
    scene.ranks.stacks[0] = lambda: f"{OWN} {scene.now}"  # it works, which its stack shows
    assert lines_of(280) == []
    (line,) = lines_of(300)
    assert re.match(r"no collective for 30\d s: rank 0 works, at train\.py:7 in clean [\d.]+; rank 1 waits, at ", line)
    scene.ranks.stacks = {0: OWN, 1: OWN}  # nobody waits
    assert lines_of(600) == []
    scene.ranks.stacks, scene.ranks.answers = (
        {0: OWN, 1: COLLECTIVE},
        {0: Answer(0), 1: Answer(1, pending=True)},
    )  # it prepares the data
    assert lines_of(300) == []


def test_ranks_of_a_loop_of_their_own_that_call_collectives_go_on(scene: _Scene) -> None:
    for calls in range(20, 30):
        scene.ranks.answers = {0: Answer(calls, pending=True), 1: Answer(calls, pending=True)}
        assert scene.until_ended(500) == NEVER


@pytest.mark.full
def test_a_limit_that_a_person_gave_also_holds_for_a_rank_that_does_nothing_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _Scene(monkeypatch, strict=True)
    scene.ranks.stacks[1] = COLLECTIVE
    assert 600 < scene.until_ended() < 780
    scene = _Scene(monkeypatch, strict=True)
    scene.ranks.stacks[1], scene.ranks.answers[0] = COLLECTIVE, Answer(1)  # before the first collectives
    assert 3000 < scene.until_ended() <= 3004
    scene = _Scene(monkeypatch, strict=True)  # nobody waits
    assert scene.until_ended() == NEVER
    scene = _Scene(monkeypatch, strict=True)
    scene.ranks.stacks = {0: lambda: f"{OWN} {scene.now}", 1: COLLECTIVE}
    assert scene.until_ended() == NEVER  # it works, and answers
    scene.ranks.answers[0] = None  # it computes in C, and holds the interpreter's lock
    assert scene.until_ended() < 3100


def test_a_machine_that_slept_and_the_next_attempt_begin_anew(scene: _Scene) -> None:
    scene.steps()
    scene.put(STEP, STEP)
    assert scene.until_ended(500) == NEVER
    scene.now += 36000
    assert scene.until_ended(90) == NEVER
    scene.attempt = Attempt(1, Path("runs/a/attempts/001"))
    scene.attempt.pids = {0: os.getpid(), 1: os.getpid()}
    assert scene.until_ended(590) == NEVER


def test_none_turns_it_off_and_nonsense_is_refused(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hang.HANG_VARIABLE, raising=False)
    assert hang.hang_timeout(None) == (600.0, False) and hang.hang_timeout(5.0) == (5.0, True)
    monkeypatch.setenv(hang.HANG_VARIABLE, "none")
    assert hang.hang_timeout(None) == (0.0, True) and parse_hang_timeout("2m") == 120.0
    with refused(LaunchError):
        parse_hang_timeout("soon")
    scene.limit.after_s = 0.0
    scene.steps()
    assert scene.until_ended() == NEVER


class _Unit(ech.TrainUnit[Any]):
    def train_step(self, state: ech.State, data: Any) -> None:
        if self.train_progress.num_steps_completed == 6 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


def _hangs(how: str) -> None:
    ech.init_from_env()
    if how == "stopped":
        ech.train(_Unit(), [torch.ones(1)] * 20, max_epochs=1)
    for _ in range(8):
        dist.all_reduce(torch.ones(4))
    if how == "in different collectives" and dist.get_rank() == 1:
        dist.barrier()
    if how == "among many threads":
        done = threading.Event()
        for _ in range(120):
            threading.Thread(target=done.wait, daemon=True).start()
    if how in ("asleep", "among many threads") and dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))


@pytest.mark.full(but=("stopped",))
@pytest.mark.parametrize(
    ("how", "headline", "calls"),
    [
        ("stopped", "rank 1 stopped (no heartbeat for ", ["all_reduce #22", ""]),
        ("asleep", "rank 1 did not come to ", ["all_reduce #9", ""]),
        ("among many threads", "rank 1 did not come to all_reduce #9", ["all_reduce #9", ""]),
        ("in different collectives", "rank ", ["all_reduce #9", "barrier #9"]),
    ],
)
def test_a_run_that_hangs_is_ended_with_the_evidence_in_its_folder(
    how: str, headline: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_HANG_TIMEOUT", "2")
    with pytest.raises(RankFailedError) as caught:
        launch(_hangs, ranks=2, args=(how,), run_dir=tmp_path, timeout_s=120)
    assert f"echelon: {headline}" in str(caught.value) and caught.value.exit_code == 124, str(caught.value)
    (run,) = tmp_path.iterdir()
    ended = exit_record(run / "attempts" / "000" / "exit.json") or {}
    assert ended["hang"]["after_s"] > 2 and ended["exit_code"] == 124
    assert all(f"rank {rank} waited in {call} at " in str(caught.value) for rank, call in enumerate(calls) if call)
    assert [ended["seen"][rank]["stopped"] for rank in "01"] == [False, how == "stopped"]
    for rank in (0, 1):  # also of the one that was stopped
        assert "in _hangs" in (run / "dumps" / "000" / f"stack.rank{rank}.txt").read_text()
        assert "test_hang.py:" in ended["seen"][str(rank)]["where"]
    record = read_json(run / "dumps" / "000" / "flight.rank0.json") or {}
    assert f"gloo:{calls[0]}" == f"{record['entries'][-1]['profiling_name']} #{record['entries'][-1]['collective_seq_id']}"


OWN_LOOP = """
import torch, echelon as ech
ech.seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = ech.prepare(model, optimizer, loader, layout="fsdp")
for epoch in ech.epochs(loader, 2):
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if ech.rank() == 1 and window.update == 3:
            break
    seen = ech.all_mean(torch.ones(1))
"""


@pytest.mark.full
def test_a_loop_of_ones_own_that_one_rank_leaves_is_ended_with_both_calls_and_lines(tmp_path: Path, echelon_command: Any) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    done = echelon_command("run", "--ranks", "2", "--hang-timeout", "2", "train.py")
    assert done.returncode == 124, done.stderr
    assert "rank 0 called all_gather" in done.stderr and "rank 1 called all_reduce" in done.stderr, done.stderr
    assert "(rank 0 at train.py:12, rank 1 at train.py:17)" in done.stderr, done.stderr


def _is_slow(how: str) -> None:
    ech.init_from_env()
    for _ in range(20):
        dist.all_reduce(torch.ones(4))
    if how == "all sleep" or dist.get_rank() == 1:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            time.sleep(5.0) if how == "all sleep" else sum(range(20000))
    dist.all_reduce(torch.ones(4))


@pytest.mark.full
@pytest.mark.parametrize("how", ["all sleep", "one works"])
def test_slow_ranks_in_a_loop_of_their_own_go_on(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_HANG_TIMEOUT", "2")  # a busy machine may give one that works no time for a second
    launch(_is_slow, ranks=2, args=(how,), timeout_s=120)


HANGS_ON_NODE_1 = """
import os, signal, sys, torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
for _ in range(8):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1 and sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
if dist.get_rank() == 1 and sys.argv[1] == "in another":
    dist.barrier()
dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stopped", "rank 1 stopped"),
        ("in another", "rank 1 called barrier where rank 0 called"),
    ],
)
def test_on_several_nodes_the_evidence_of_all_is_one(
    how: str, said: str, tmp_path: Path, forked_programs: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(HANGS_ON_NODE_1)
    run = RunDir.create(tmp_path / "runs", "two", begin=False)
    spec = JobSpec(str(tmp_path / "train.py"), args=(how,), ranks=1, nodes=2, hang_timeout_s=2.0, grace_s=1.0)
    said_of_nodes = tmp_path / "said"
    nodes = start_nodes(run, spec, [said_of_nodes] * 2, hosts="localhost,127.0.0.1")
    assert ends_of(nodes, 120) == [124, 124], said_of_nodes.read_text()
    assert finish_job(run, 124, "7.0") == 124
    assert f"echelon: {said}" in capfd.readouterr().err
    ended = exit_record(run.path / "attempts" / "000" / "exit.json") or {}
    assert ended["first_failure"]["rank"] == 1 or how != "stopped"
    assert ended["hang"]["after_s"] > 2 and ended["world_size"] == 2 and set(ended["seen"]) == {"0", "1"}
    dumps = {path.name for path in (run.path / "dumps" / "000").iterdir()} | {"flight.rank1.json"}  # not of one that is stopped
    assert dumps == {f"{kind}.rank{rank}.{end}" for kind, end in (("stack", "txt"), ("flight", "json")) for rank in (0, 1)}


HANGS_ONCE = """
import os, time, torch, torch.distributed as dist, echelon as ech
ech.init_from_env()
for _ in range(8):
    dist.all_reduce(torch.ones(4))
if ech.RankInfo().restart_count == 0 and dist.get_rank() == 1:
    time.sleep(1000)
dist.all_reduce(torch.ones(4))
print("done")
"""


@pytest.mark.full
def test_after_a_hang_the_ranks_are_started_again_and_each_attempt_has_its_evidence(tmp_path: Path, echelon_command: Any) -> None:
    (tmp_path / "train.py").write_text(HANGS_ONCE)
    ended = echelon_command("run", "--ranks", "2", "--max-restarts", "1", "--hang-timeout", "2s", "--name", "a", "train.py")
    assert ended.returncode == 0 and "done" in ended.stdout, ended.stderr
    assert "echelon: rank 1 did not come to all_reduce #9" in ended.stderr and "restart 1 of 1" in ended.stderr
    attempts = tmp_path / "runs" / "a" / "attempts"
    first, second = (exit_record(attempts / number / "exit.json") or {} for number in ("000", "001"))
    assert first["hang"] and first["first_failure"]["rank"] == 1 and "did not come to all_reduce #9" in first["explained"]
    assert (second["exit_code"], second["hang"], second["explained"], second["world_size"]) == (0, None, None, 2)
    assert [path.name for path in (tmp_path / "runs" / "a" / "dumps").iterdir()] == ["000"]


ALONE = """
import sys, time, torch, echelon as ech

class Unit(ech.TrainUnit):
    def train_step(self, state, data):
        if sys.argv[1] == "hangs" and self.train_progress.num_steps_completed == 6:
            time.sleep(1000)

if sys.argv[1] == "own":
    time.sleep(2)
else:
    ech.train(Unit(), [torch.ones(1)] * 20, max_epochs=1)
print("done")
"""


@pytest.mark.full
def test_a_single_rank_is_ended_if_a_person_gave_a_limit(tmp_path: Path, echelon_command: Any) -> None:
    """Where it stands still in the loop; never in code of its own, where nobody waits for it, however short the limit is."""
    (tmp_path / "train.py").write_text(ALONE)
    # A limit that no step reaches on a machine that is busy with others.
    ended = echelon_command("run", "--ranks", "1", "--hang-timeout", "3s", "--name", "a", "train.py", "hangs")
    assert ended.returncode == 124 and "rank 0 was in update 7, at train.py:7 in train_step (exit" in ended.stderr, ended.stderr
    run = tmp_path / "runs" / "a"
    said = exit_record(run / "attempts" / "000" / "exit.json") or {}
    assert said["hang"] and said["seen"]["0"]["where"] == "train.py:7 in train_step"
    assert "in train_step" in (run / "dumps" / "000" / "stack.rank0.txt").read_text()
    ended = echelon_command("run", "--ranks", "1", "--hang-timeout", "0.5s", "--name", "b", "train.py", "own")
    assert ended.returncode == 0 and "done" in ended.stdout, ended.stderr
