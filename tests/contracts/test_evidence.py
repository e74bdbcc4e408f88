"""What a run leaves in its folder when it fails or hangs: positions, stacks, flight records, last collectives."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.contracts.records import exit_record, rank_record
from echelon.contracts.run_dir import RunDir, read_json
from echelon.diagnosis import Evidence
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Flight
from echelon.launcher.functions.launch import launch
from echelon.launcher.job import JobSpec
from echelon.launcher.local import end_record, flight_recorder
from echelon.launcher.local import run as local
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.memory import OomCount
from echelon.launcher.local.responder import FLIGHT, HOW_FAR, Answer, Responders
from tests.conftest import clean_environment


def _folders(runs: Path) -> tuple[Path, Path]:
    """Of the only run there: its first attempt, and what was gathered of it."""
    (run,) = runs.iterdir()
    return run / "attempts" / "000", run / "dumps" / "000"


def _raises() -> None:
    ech.init_from_env()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        raise ValueError("bad")
    dist.all_reduce(torch.ones(4))
    os.kill(os.getpid(), signal.SIGKILL)  # never: it has lost its peer


@pytest.mark.full
def test_a_rank_that_raises_leaves_its_flight_record_and_so_do_those_that_lose_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: bad"):
        launch(_raises, ranks=2, run_dir=tmp_path)
    attempt, dumps = _folders(tmp_path)
    records = [read_json(dumps / f"flight.rank{rank}.json") for rank in (0, 1)]
    assert all(records)
    calls = [[(e["profiling_name"], e["collective_seq_id"], e["input_sizes"]) for e in r["entries"]] for r in records if r]
    assert calls[1] == [("gloo:all_reduce", n, [[4]]) for n in (1, 2, 3)]
    assert calls[0] == [*calls[1], ("gloo:all_reduce", 4, [[4]])]
    said = rank_record(attempt / "exit.rank1.json") or {}
    assert said["collectives"] == {"0": "all_reduce #3"}
    ended = exit_record(attempt / "exit.json") or {}
    assert ended["world_size"] == 2 and ended["hang"] is None and set(ended["seen"]) == {"0", "1"}


def _leaves_without_a_word() -> None:
    ech.init_from_env()
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(4))


def test_of_a_rank_that_leaves_no_record_the_launcher_notes_how_its_process_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1 left with exit code 0 before the others"):
        launch(_leaves_without_a_word, ranks=2, run_dir=tmp_path)
    attempt, _ = _folders(tmp_path)
    assert not (attempt / "exit.rank1.json").exists()
    seen = (exit_record(attempt / "exit.json") or {})["seen"]
    assert seen["1"]["ended"] == 0 and seen["0"]["ended"] != 0


def _keeps_a_thread() -> None:
    ech.init_from_env()
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        threading.Thread(target=time.sleep, args=(1000,)).start()  # which Python would wait for
        raise ValueError("bad")
    time.sleep(1000)


@pytest.mark.full
def test_of_a_rank_that_still_runs_the_stack_and_the_flight_record_are_kept(tmp_path: Path) -> None:
    """The other one raises, although it has a thread that goes on."""
    with pytest.raises(RankFailedError, match="ValueError: bad"):
        launch(_keeps_a_thread, ranks=2, run_dir=tmp_path)
    attempt, dumps = _folders(tmp_path)
    assert "in _keeps_a_thread" in (dumps / "stack.rank0.txt").read_text() and not (dumps / "stack.rank1.txt").exists()
    record = read_json(dumps / "flight.rank0.json") or {}
    assert [e["collective_seq_id"] for e in record["entries"]] == [1]
    seen = (exit_record(attempt / "exit.json") or {})["seen"]["0"]
    assert seen["answers"] is True and seen["where"].endswith("in _keeps_a_thread")


def _holds_the_interpreter() -> None:
    ech.init_from_env()
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        raise ValueError("bad")
    sys.setswitchinterval(1000.0)  # no other thread gets the interpreter: as in code in C that computes
    while True:
        pass


@pytest.mark.full
def test_of_a_rank_that_holds_the_interpreters_lock_the_stack_is_kept_and_that_it_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: bad"):
        launch(_holds_the_interpreter, ranks=2, run_dir=tmp_path)
    attempt, dumps = _folders(tmp_path)
    assert "in _holds_the_interpreter" in (dumps / "stack.rank0.txt").read_text()
    assert (exit_record(attempt / "exit.json") or {})["seen"]["0"]["answers"] is False


def test_torchs_private_record_is_as_it_was_when_it_was_first_read(ranks: Any) -> None:
    """If this fails after an upgrade of torch, read launcher/local/flight_recorder.py again with its new FlightRecorder."""
    before, during, after, record = ranks(2, _records)[0]
    assert before == (0, False) or before[0] > 0
    assert during[1] and after[0] > during[0]
    entry = record["entries"][-1]
    assert entry["process_group"][0] == "0" and entry["profiling_name"] == "gloo:all_reduce"
    assert entry["input_sizes"] == [[4]] and entry["input_dtypes"] == ["Float"]
    assert flight_recorder.last_calls(record)["0"] == f"all_reduce #{entry['collective_seq_id']}"


def _records() -> Any:
    before = flight_recorder.called()
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(4))
        return None
    work = dist.all_reduce(torch.ones(4), async_op=True)
    during, record = flight_recorder.called(), flight_recorder.flight_record()
    dist.send(torch.ones(1), 1)  # only now does the other one come
    work.wait()
    until = time.monotonic() + 60
    while (
        flight_recorder.called() == during and time.monotonic() < until
    ):  # gloo's thread notes the end after it has woken this one
        time.sleep(0.01)
    return before, during, flight_recorder.called(), record


def test_a_record_is_cut_to_the_last_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(calls: int, groups: int) -> list[int]:
        given = [{"process_group": [str(n % groups), "pg"], "collective_seq_id": n} for n in range(calls)]
        monkeypatch.setattr(flight_recorder, "_dumps", lambda *, entries: [{"entries": given, "pg_status": {}}])
        return [entry["collective_seq_id"] for entry in (flight_recorder.flight_record() or {})["entries"]]

    assert kept(1000, groups=2) == [*range(600, 1000, 2), *range(601, 1001, 2)]
    assert len(kept(30000, groups=300)) == 300 * 20


def test_what_a_rank_answers_is_believed_as_little_as_a_file() -> None:
    for line in (b"", b"{}", b"[" * 10000, b'{"called": 1e400, "pending": false}', b'{"called": "1"}', b"\xff"):
        assert Answer.of(line) is None
    asked = Responders()
    try:
        with asked.make(0) as rank, asked.make(1) as silent:
            rank.sendall(b'{"called": 3, "pending": true}\n')
            assert asked.ask([0, 1, 2], HOW_FAR, 0.05) == {0: Answer(3, pending=True)}
            assert rank.recv(10) == silent.recv(10) == HOW_FAR
            rank.sendall(b"x" * 100000)  # a line without an end: it is not heard any more
            assert asked.ask([0], FLIGHT, 0.05) == {} == asked.ask([0], FLIGHT, 0.05)
    finally:
        asked.close()


def _group(folder: Path, kills: int, limit: str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 2\noom_kill {kills}\n")
    (folder / "memory.max").write_text(f"{limit}\n")


def test_an_end_by_the_oom_killer_is_told_from_others(tmp_path: Path) -> None:
    groups, own, vmstat = tmp_path / "groups", tmp_path / "cgroup", tmp_path / "vmstat"
    own.write_text("0::/job/step\n")
    _group(groups / "job", 7, str(4 << 30))
    _group(groups / "job" / "step", 3)
    attempt = Attempt(0, tmp_path / "attempts" / "000")
    attempt.oom = OomCount(groups, own, vmstat)
    attempt.pids, attempt.peaks = {0: 10, 1: 11}, {0: 1 << 20, 1: 3 << 30}
    attempt.ended = {1: (signal.SIGKILL, 5), 0: (signal.SIGKILL, 6)}
    failure = attempt.failure(1)
    assert failure is not None and not failure.oom and "by a person or a program" in failure.message
    _group(groups / "job" / "step", 4)
    killed, followed = attempt.failure(1), attempt.failure(0)
    assert killed is not None and killed.oom and followed is not None and not followed.oom  # the first was it
    assert killed.message == (
        "killed by SIGKILL: no memory was left (OOM killer); this rank had 3.0 GiB at most, of 4.0 GiB for all processes here"
    )
    vmstat.write_text("nr_free_pages 8\noom_kill 2\n")
    assert OomCount(tmp_path / "none", own, vmstat).known and not OomCount(tmp_path / "none", own, tmp_path / "no").known


def _memory_groups() -> Path | None:
    """Where this machine lets us make a group with a limit of memory."""
    for folder, name in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        probe = folder / f"echelon-probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            has = (probe / name).exists()
            probe.rmdir()
            if has:
                return folder
    return None


@contextlib.contextmanager
def _limited(groups: Path, limit: int) -> Iterator[Path]:
    group = groups / f"echelon-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")).write_text(str(limit))
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):  # until its last process has gone
                group.rmdir()
                break
            time.sleep(0.05)


GREEDY = """
import os, time, torch, echelon as ech
ech.init_from_env()
kept = []
while os.environ["RANK"] == "1":
    kept.append(torch.ones(4 << 20))
time.sleep(1000)
"""

if (GROUPS := _memory_groups()) is not None:

    @pytest.mark.full
    def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_named_so(tmp_path: Path) -> None:
        (tmp_path / "greedy.py").write_text(GREEDY)
        assert GROUPS is not None
        with _limited(GROUPS, 1 << 30) as group:
            ended = subprocess.run(
                ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group)]
                + [sys.executable, "-m", "echelon", "run", "--ranks", "2", "--name", "greedy", "greedy.py"],
                cwd=tmp_path,
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert ended.returncode == 137 and "rank 1 failed first" in ended.stderr, ended.stderr
        assert "killed by SIGKILL: no memory was left (OOM killer); this rank had" in ended.stderr, ended.stderr
        said = exit_record(tmp_path / "runs" / "greedy" / "attempts" / "000" / "exit.json") or {}
        assert said["first_failure"]["oom"] is True and said["first_failure"]["rank"] == 1


def _pickled() -> bytes:
    """What torch's watchdog writes, of this rank's own calls on gloo, whose recorder has the same form."""
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(2, 3, dtype=torch.float64))
    c10d: Any = torch._C._distributed_c10d
    return bytes(c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False))


def _dumped(run: RunDir, **files: bytes) -> RunDir:
    run.dump_path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (run.dump_path / name.replace("_", ".")).write_bytes(content)
    return run


def _flight(run: RunDir, rank: int = 0) -> Flight | None:
    return Evidence.of(run.path, 0).rank(rank).flight


def test_what_nccls_watchdog_leaves_is_read_as_a_flight_record(ranks: Any, tmp_path: Path) -> None:
    """Its files end in the rank's number. No GPU is here, so this is all that was run of it."""
    of_0, of_1 = ranks(2, _pickled)
    run = _dumped(RunDir(tmp_path), nccl_rank0=of_0, nccl_rank1=of_1, flight_rank1_json=b'{"entries": []}')
    assert _flight(run, 1) == {}  # that rank could still answer
    record = _flight(run)
    assert record is not None
    calls = [call for _, call in sorted(record["0"].calls.items())]
    assert [(call.op, call.tensors) for call in calls[-2:]] == [("all_reduce", ("f32[4]",)), ("all_reduce", ("f64[2, 3]",))]


class _Touches:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


def test_a_pickle_of_anything_else_is_no_record_and_runs_nothing(tmp_path: Path) -> None:
    run, touched = RunDir(tmp_path), tmp_path / "touched"
    loop: list[Any] = []
    loop.append(loop)
    nested: Any = ()
    for _ in range(60):  # as small as it is, whoever hashes it or shows it goes through it 2**60 times
        nested = (nested, nested)
    wide = {"process_group": ("0",), "profiling_name": "x" * 10**6, "input_sizes": [[1]] * 10**5}
    for said in ([_Touches(touched)], {"entries": [_Touches(touched)]}, []):
        assert _flight(_dumped(run, nccl_rank0=pickle.dumps(said))) is None, said
    for said in ({"entries": loop}, {"entries": [wide]}, {"entries": [nested]}):
        assert _flight(_dumped(run, nccl_rank0=pickle.dumps(said))) == {}
    of_nested = _nccl_entry(input_sizes=[nested, (4,)], input_dtypes=[nested, "Float"], output_sizes=nested, state=nested)
    record = _flight(_dumped(run, nccl_rank0=pickle.dumps({"entries": [of_nested]})))
    assert record is not None and record["0"].calls[1].tensors == ("f32[4]",)
    many = b"\x80\x02}r\xff\xff\xff\x7f."  # would number an object so high that the list of them fills the memory
    for content in (b"", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04" + b"(" * 100000, b"\x80\x04\x95" + b"\xff" * 8, many):
        assert _flight(_dumped(run, nccl_rank0=content)) is None
    assert Evidence.of(run.path, 0).notes == ("nccl.rank0 is no flight record, or too large",)
    assert not touched.exists()


def _nccl_entry(**more: Any) -> dict[str, Any]:
    said = {"process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce", "state": "completed"}
    counts = dict.fromkeys(("collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns"), 1)
    tensors = {f"{way}_{what}": each for way in ("input", "output") for what, each in (("sizes", [(4,)]), ("dtypes", ["Float"]))}
    return {**said, **counts, **tensors, "is_p2p": False, "retired": True, **more}


@pytest.mark.full
def test_a_small_pickle_does_not_become_a_large_record(tmp_path: Path) -> None:
    """A list that is in it once may be meant a million times."""
    shapes = [(2**61,) * 16] * 1000
    wide = [
        _nccl_entry(collective_seq_id=n, process_group=("0", "x" * 900), input_sizes=shapes, output_sizes=shapes)
        for n in range(20_500)
    ]
    record = _flight(_dumped(RunDir(tmp_path), nccl_rank0=pickle.dumps({"entries": wide})))
    assert record is not None and record["0"].last == 20_499 and len(record["0"].calls) <= 20_000  # the newest are kept
    assert len(record["0"].calls[20_499].alike) <= 64 and len(record["0"].description) <= 80
    for bad in ({"input_sizes": [(-1,)]}, {"input_sizes": [(2**2000,)]}, {"input_dtypes": [None]}):
        record = _flight(_dumped(RunDir(tmp_path), nccl_rank0=pickle.dumps({"entries": [_nccl_entry(**bad)]})))
        assert record is not None and record["0"].calls[1].tensors == (), bad


def test_a_watchdogs_file_is_not_read_through_links(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", RunDir(tmp_path / "run")
    elsewhere.mkdir()
    (elsewhere / "nccl.rank0").write_bytes(pickle.dumps({"entries": [_nccl_entry()]}))
    run.dumps.mkdir(parents=True)
    run.dump_path.symlink_to(elsewhere)
    assert _flight(run) is None
    run.dump_path.unlink()
    _dumped(run, nccl_rank0=(elsewhere / "nccl.rank0").read_bytes())
    assert _flight(run) is not None
    (run.dump_path / "nccl.rank0").unlink()
    (run.dump_path / "nccl.rank0").symlink_to(elsewhere / "nccl.rank0")
    assert not _flight(run)


def test_what_cannot_be_explained_does_not_hide_how_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: Evidence) -> None:
        raise MemoryError

    monkeypatch.setattr(end_record, "explain", fails)
    run = RunDir.create(tmp_path, "a", begin=False).next_attempt()
    failure = Failure(0, 1, 0, "ValueError", "bad label")
    assert end_record.record_end(run, 1, [failure], world_size=1) == failure
    assert (exit_record(run.exit_json) or {})["first_failure"]["message"] == "bad label"


def test_where_there_are_gpus_torch_is_pointed_at_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_devices", lambda env: ["0"])
    here, job = RunDir(tmp_path).at_attempt(3), JobSpec("train.py")
    env = local.rank_environment(job, here, {}, 1, restart=False)
    assert (
        env["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "dumps" / "003" / "nccl.rank") and (tmp_path / "dumps" / "003").is_dir()
    )
    mine = local.rank_environment(job, here, {"TORCH_FR_DUMP_TEMP_FILE": "/data/mine"}, 1, restart=False)
    assert mine["TORCH_FR_DUMP_TEMP_FILE"] == "/data/mine" and mine["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
