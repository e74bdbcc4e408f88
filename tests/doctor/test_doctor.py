"""`echelon doctor`: each planted fault is named with its host and what to do; nothing hangs, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.common.errors import ClusterError, EchelonError
from echelon.doctor.judge import judged
from echelon.doctor.reports import MARK, Checkup
from echelon.doctor.row import Row, as_json, table
from echelon.launcher.cluster.checkup import allocation, on_nodes
from echelon.world.checkup import __main__ as program
from echelon.world.checkup import host
from echelon.world.checkup.ranks import MOST_PAIRED, rounds
from tests.kit.refusals import refused

Command = Callable[..., subprocess.CompletedProcess[str]]

# What a healthy rank of a healthy host tells, as numbers: faults are planted in here.
WELL: Mapping[str, Any] = {
    "machine": {"cores": 8, "GPUs": 0, "InfiniBand": False, "boot": "a"},
    "versions": {"python": "3.11.7", "echelon": "0.1.0", "echelon's code": "abc", "driver": ""},
    "disks": {
        "working folder": {"path": "/run", "free_mib": 100_000, "free_files": None, "writable": True, "number": 7},
        "temporary folder": {"path": "/tmp", "free_mib": 100_000, "free_files": 10**6, "writable": True, "number": 8},
    },
    "shared memory": [8000, 8000],
    "limits": {"open files": 65536, "processes": None, "locked memory": None},
    "memory": [64_000, 64_000],
    "resolution": {"own": ["10.0.0.1"], "unknown": []},
    "interfaces": ["lo", "eth0"],
    "settings": {"NCCL_DEBUG": "WARN"},
    "script": "aaa",
    "torch": {"torch": "2.13.0", "CUDA of torch": ""},
    "joined": {"s": 0.2, "device": "cpu", "connect_ms": 0.1},
    "clocks": [1000.0, 1001.0, 1002.0],
    "sums": [{"device": "cpu", "wrong": 0, "first": None, "mib_s": 500.0}],
    "pairs": [],
    "products": {"gflop_s": 100.0, "device": "cpu", "threads": 4, "wrong": 0},
    "left": True,
    "end": True,
}


def _checkup(
    planted: Mapping[int, Mapping[str, Any]], *, ranks: int = 4, hosts: int = 4, without: Mapping[int, str] | None = None
):  # type: ignore[no-untyped-def]
    """`ranks` ranks over so many hosts, all well but for what is planted, by rank; `without` is a part in which a rank hangs."""
    checkup = Checkup(ranks)
    lines = []
    for rank in range(ranks):
        told = {
            "here": {"host": f"node{rank % hosts}"},
            **WELL,
            "pairs": [[p, 100.0, 0] for p in rounds(rank, ranks) if p is not None],
        }
        for name, value in {**told, **planted.get(rank, {})}.items():
            lines.append(f"{MARK}{json.dumps([rank, 'doing', name])}")
            if (without or {}).get(rank) == name:
                break
            lines.append(f"{MARK}{json.dumps([rank, name, value])}")
    checkup.read(lines)
    return checkup


def _bad(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state != "ok"]


def test_a_healthy_cluster_is_well() -> None:
    rows = judged(_checkup({}))
    assert _bad(rows) == [] and {"ranks", "torch", "clocks", "all-reduce", "bandwidth", "matmul"} <= {row.name for row in rows}
    assert table(rows)[-1] == "all is well"


def _place(**planted: Any) -> dict[str, Any]:
    return {**WELL["disks"]["working folder"], **planted}


# What rank 2, alone on node2, has of its own; the row that says so, its state, words in it, words of the remedy.
FAULTS: list[tuple[Mapping[str, Any], str, str, str, str]] = [
    ({"torch": {"torch": "2.12.1"}}, "torch", "fail", "2.13.0, but node2 (rank 2): 2.12.1", "same version everywhere"),
    ({"versions": {"python": "3.12.1"}}, "python", "fail", "but node2 (rank 2): 3.12.1", "same version"),
    ({"versions": {"echelon's code": "def"}}, "echelon's code", "fail", "abc, but node2 (rank 2): def", "shared folder"),
    ({"clocks": [1031.0, 1032.5, 1033.0]}, "clocks", "fail", "node2 is +31.0 s from rank 0's host", "Have node2 ask"),
    ({"clocks": [998.0, 999.0, 1000.0]}, "clocks", "warn", "node2 is -2.0 s", "time server"),
    ({"disks": {"working folder": _place(free_mib=500)}}, "working folder", "fail", "0.5 GiB free in /run on node2", "another"),
    ({"disks": {"working folder": _place(writable=False)}}, "working folder", "fail", "node2 (rank 2): /run cannot be", "folder"),
    ({"disks": {"working folder": _place(free_files=3)}}, "working folder", "fail", "only 3 more files in /run on node2", "df"),
    ({"disks": {"working folder": _place(number=9)}}, "shared folder", "fail", "node2 (rank 2): the working", "shared"),
    ({"disks": {"temporary folder": _place(free_mib=5000)}}, "temporary folder", "warn", "4.9 GiB free in /run on", "TMPDIR"),
    ({"shared memory": [64, 64]}, "shared memory", "fail", "64 MiB free in /dev/shm on node2", "--shm-size"),
    ({"limits": {"open files": 256}}, "open files", "fail", "at most 256 on node2", "ulimit -n"),
    (
        {"machine": {"InfiniBand": True}, "limits": {"open files": 65536, "locked memory": 8}},
        "locked memory", "fail", "at most 8 MiB of locked memory on node2", "ulimit -l unlimited",
    ),
    ({"memory": [200, 64_000]}, "memory", "warn", "0.2 GiB available on node2, for 1 rank", "fewer ranks"),
    ({"resolution": {"unknown": ["node3"]}}, "names", "fail", "node2 (rank 2): no address for the name node3", "/etc/hosts"),
    ({"limits": {"processes": 100}}, "processes", "warn", "at most 100 processes and threads on node2", "ulimit -u"),
    ({"resolution": {"own": ["127.0.1.1"]}}, "names", "warn", "node2: its own name resolves to 127.x", "/etc/hosts"),
    (
        {"settings": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0"}},
        "interface", "fail", "node2 (rank 2): NCCL_SOCKET_IFNAME=ib0, but there is only lo, eth0", "ip link",
    ),
    ({"settings": {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}}, "settings", "fail", "NCCL_ALGO: Ring, unset", "for all ranks"),
    ({"machine": {"GPUs": 8}}, "devices", "warn", "node2 (rank 2): on the CPU of a host that has GPUs", "built for CUDA"),
    (
        {"sums": [{"device": "cpu", "wrong": 7, "first": "3 in place of 4", "mib_s": 1.0}]},
        "all-reduce", "fail", "gloo: wrong sums on node2 (rank 2), such as 3 in place of 4", "Do not train",
    ),
    ({"pairs": [[3, 4.0, 0], [0, 100.0, 0]]}, "bandwidth", "fail", "rank 2 (node2) and rank 3 (node3): 4", "cable"),
    ({"pairs": [[3, 100.0, 9]]}, "bandwidth", "fail", "bytes arrive changed between ranks 2 and 3", "Do not train"),
    ({"products": {"gflop_s": 40.0, "device": "cpu"}}, "matmul", "fail", "Slow: rank 2 (node2): 40.0", "nvidia-smi"),
    ({"products": {"gflop_s": 100.0, "device": "cpu", "wrong": 1}}, "matmul", "fail", "products on node2 (rank 2)", "memtest"),
    ({"script": "fff"}, "script", "fail", "aaa, but node2 (rank 2): fff", "Copy it"),
    ({"error": ["script", "OSError: train.py"]}, "script", "fail", "node2 (rank 2): OSError: train.py", "Copy"),
    ({"error": ["torch", "ImportError: libcudart.so"]}, "torch", "fail", "node2 (rank 2): ImportError: libcudart.so", "again"),
]  # fmt: skip


@pytest.mark.parametrize(("planted", "name", "state", "says", "remedy"), FAULTS, ids=[f"{f[1]}-{f[2]}" for f in FAULTS])
def test_a_planted_fault_is_named_with_its_host_and_what_to_do(
    planted: Mapping[str, Any], name: str, state: str, says: str, remedy: str
) -> None:
    planted = {
        part: {**WELL[part], **v} if isinstance(v, dict) and isinstance(WELL.get(part), dict) else v
        for part, v in planted.items()
    }
    rows = judged(_checkup({2: planted}))
    found = [row for row in _bad(rows) if row.name == name]
    assert len(found) == 1, rows
    assert found[0].state == state and says in found[0].said and remedy in found[0].remedy
    assert len(_bad(rows)) == 1, "and nothing else is accused"


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("NCCL_DEBUG", "BOGUS", "warn"), ("NCCL_DEBUG", "info", "ok"), ("NCCL_DEBUG", "", "warn"), ("NCCL_PROTO", "L128", "warn"),
        ("NCCL_PROTO", "^LL128", "ok"), ("NCCL_PROTO", "LL,Simple", "ok"), ("NCCL_PROTO", "allreduce:ll;broadcast:simple", "ok"),
        ("NCCL_P2P_LEVEL", "NEAR", "warn"), ("NCCL_P2P_LEVEL", "SYS", "ok"), ("NCCL_IB_DISABLE", "yes", "warn"),
        ("NCCL_IB_DISABLE", "0", "ok"), ("NCCL_FUTURE", "x", "ok"),
    ],
)  # fmt: skip
def test_a_value_that_nccl_does_not_know_is_told(name: str, value: str, state: str) -> None:
    """As NCCL_DEBUG=DEBUG, with which NCCL shows nothing."""
    rows = judged(_checkup({rank: {"settings": {name: value}} for rank in range(4)}))
    (row,) = [row for row in rows if row.name == "settings"]
    assert row.state == state and (state == "ok" or f"{name}={value}" in row.said)


def test_every_line_that_is_not_well_says_what_to_do_in_80_columns() -> None:
    for planted, *_ in FAULTS:
        rows = judged(_checkup({2: planted}))
        assert all(row.remedy for row in _bad(rows))
        assert max(map(len, table(rows))) <= 80


def test_ranks_that_hang_or_never_come_are_named_with_where_they_are() -> None:
    hangs = judged(_checkup({}, without={3: "sums"}))
    assert [(r.name, r.said) for r in _bad(hangs)] == [("unfinished", "node3 (rank 3) did not get beyond 'sums'")]
    checkup = _checkup({})
    checkup.size = 6
    assert "4 of 6 ranks answer, on 4 hosts; ranks 4-5 did not" in judged(checkup)[0].said
    checkup.silent = {"node7": "said nothing within 60 s"}
    assert judged(checkup)[0].said.endswith("Without an answer: node7: said nothing within 60 s")
    assert [row.name for row in judged(Checkup(2))] == ["ranks"] and judged(Checkup(2))[0].state == "fail"


def test_a_torch_that_cannot_be_imported_is_a_line_of_the_table(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    done = echelon_command("doctor", "--ranks", "2", env={"PYTHONPATH": str(tmp_path / "broken")}, fresh=True)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "0 of 2 ranks answer" in said and "ImportError: libcudart.so.13: no such file" in said
    assert "Traceback" not in done.stderr


def test_a_quick_look_accuses_nobody_of_being_slow() -> None:
    slow = {2: {"products": {"gflop_s": 1.0, "device": "cpu"}, "pairs": [[3, 1.0, 0]]}}
    checkup = _checkup(slow)
    assert _bad(judged(checkup))
    checkup.quick = True
    assert not _bad(judged(checkup))
    # And of ranks of one host it is a warning.
    rows = _bad(judged(_checkup({2: {"products": {"gflop_s": 1.0, "device": "cpu"}}}, hosts=1)))
    assert [(row.name, row.state) for row in rows] == [("matmul", "warn")]


TREE = st.recursive(
    st.none() | st.floats() | st.text(max_size=4), lambda s: st.lists(s, max_size=4) | st.dictionaries(st.text(), s)
)
VALUES = st.sampled_from(["here", "error", *WELL]).flatmap(lambda name: st.tuples(st.integers(-1, 4), st.just(name), TREE))


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=6))
def test_nothing_that_ranks_may_tell_brings_the_table_down(values: list[Any]) -> None:
    checkup = _checkup({})
    checkup.read([f"{MARK}{json.dumps(value)}" for value in values] + [f"{MARK}[", MARK, "x", f"{MARK}[1,2,3]"])
    rows = judged(checkup)
    assert all(char.isprintable() or ord(char) > 127 for line in table(rows) for char in line)
    json.dumps(as_json(rows, checkup))


# ---- who is paired with whom ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 9, 16, 33])
def test_partners_are_each_others_in_every_round(ranks: int) -> None:
    every = [rounds(rank, ranks) for rank in range(ranks)]
    assert all(every[p][t] == r and p != r for r, partners in enumerate(every) for t, p in enumerate(partners) if p is not None)
    pairs = {frozenset((r, p)) for r, partners in enumerate(every) for p in partners if p is not None}
    if ranks <= MOST_PAIRED:
        assert len(pairs) == ranks * (ranks - 1) // 2
    else:
        assert {r for pair in pairs for r in pair} == set(range(ranks)) and len(every[0]) == (ranks - 1).bit_length()


# ---- a rank's part ----------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such mount, password=hunter2abc")

    monkeypatch.setattr(host, "PARTS", {"disks": broken, "memory": host.PARTS["memory"]})
    monkeypatch.setattr("echelon.world.checkup.ranks.PARTS", {})
    monkeypatch.delenv("ECHELON_HANDSHAKE", raising=False)
    monkeypatch.setenv("ECHELON_HANDSHAKE", "all")  # put back at the end
    assert program.main(["--to", str(tmp_path), "--quick"]) == 0
    checkup = Checkup(1)
    checkup.read((tmp_path / "rank0.jsonl").read_text().splitlines())
    said = checkup.ranks[0]
    assert said.errors == {"disks": "OSError: no such mount, password=***"} and said.numbers("memory", 2) and said.values["end"]


def test_a_disk_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(host, "_PATIENCE_S", 0.05)
    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
        host.in_time(hang.wait)
    hang.set()


# ---- real ranks -------------------------------------------------------------------------------------------------------------


def test_two_ranks_of_this_machine(echelon_command: Command, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a module of the user with the name of one of Python')\n")
    (tmp_path / "t").mkdir()
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "nope", "TMPDIR": str(tmp_path / "t")}
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "nowhere[1-2]"}
    done = echelon_command("doctor", "--here", "--ranks", "2", "--quick", "--json", "--script", "random.py", env=env)
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["rows"]}
    assert done.returncode == 1 and said["ok"] is False, "an interface that there is not"
    assert "NCCL_SOCKET_IFNAME=nope, but there is only lo" in rows["interface"]["said"]
    assert rows["all-reduce"]["said"].startswith("gloo: exact on 2 ranks") and rows["ranks"]["state"] == "ok"
    assert len(said["ranks"]["1"]["script"]) == 12 and rows["script"]["state"] == "ok"
    (partner, speed, wrong), = said["ranks"]["0"]["pairs"]  # fmt: skip
    assert (partner, wrong) == (1, 0) and speed > 0 and said["ranks"]["1"]["products"]["wrong"] == 0
    assert sorted(os.listdir(tmp_path)) == ["random.py", "t"] and os.listdir(tmp_path / "t") == []


def test_ranks_that_cannot_meet_are_told_within_the_limit(echelon_command: Command) -> None:
    done = echelon_command("doctor", "--ranks", "2", "--quick", "--time-limit", "20s", env={"GLOO_SOCKET_IFNAME": "nope"})
    assert done.returncode == 1 and "fail  joined" in done.stdout and "nope" in done.stdout, done.stdout
    assert "-> The ranks cannot reach one another" in " ".join(done.stdout.split())


# ---- the nodes of an allocation ---------------------------------------------------------------------------------------------

SRUN = """#!/bin/sh
echo "$@" "rank=$RANK" "$MASTER_ADDR" "device=$ECHELON_DEVICE" >> {log}
case "$*" in
*--nodelist=a,b,c*) {first} ;;
*) echo 'echelon-doctor [0, "here", {{"host": "a"}}]'; echo 'echelon-doctor [0, "end", true]' ;;
esac
"""
HERE = """echo 'echelon-doctor [0, "here", {"host": "a"}]'; echo 'echelon-doctor [1, "here", {"host": "c"}]'"""


def _with_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> Path:
    srun, log = tmp_path / "srun", tmp_path / "log"
    srun.write_text(SRUN.format(log=log, first=first))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return log


def _third_of_the_limit_passes_once_two_have_spoken(monkeypatch: pytest.MonkeyPatch) -> float:
    """The checkup's clock goes ahead by what this returns when it has read of two hosts, however long that takes."""
    ahead_s, passed_s = 60.0, 0.0
    heard: set[str] = set()

    def search(line: str) -> re.Match[str] | None:
        found = re.search(r'^echelon-doctor \[\d+, "here", {"host": "(\w+)"', line)
        heard.update(found.groups() if found else ())
        return found

    def sleep(seconds: float) -> None:
        nonlocal passed_s
        time.sleep(seconds)
        if len(heard) == 2:
            passed_s = ahead_s

    monkeypatch.setattr("echelon.launcher.cluster.checkup._HERE", SimpleNamespace(search=search))
    monkeypatch.setattr(
        "echelon.launcher.cluster.checkup.time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=sleep)
    )
    return ahead_s


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("echo 'srun: error: Task launch for StepId=2.0 failed on node b: Connection failure' >&2; exit 1",
         "Task launch for StepId=2.0 failed on node b: Connection failure"),
        ("echo 'srun: error: Task launch for StepId=2.0 failed on node b: Connection failure' >&2; for n in a c; do "
         "echo 'slurmstepd: error: *** STEP 2.0 ON a CANCELLED ***' >&2; echo \"srun: error: $n: task 0: Terminated\" "
         ">&2; done; exit 1",
         "Task launch for StepId=2.0 failed on node b: Connection failure"),
        ("echo '1: ImportError: No echelon' >&2; echo 'srun: error: b: task 1: Exited with exit code 1' >&2; exit 1",
         "Exited with exit code 1: ImportError: No echelon"),
        (f"{HERE}; exec sleep 600", "said nothing within "),
    ],
    ids=["srun names it", "srun names it and ends the others", "it has no echelon", "it is silent"],
)  # fmt: skip
def test_a_node_that_does_not_answer_is_named_and_the_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, why: str
) -> None:
    log = _with_srun(tmp_path, monkeypatch, first)
    told: list[str] = []
    waited_s = _third_of_the_limit_passes_once_two_have_spoken(monkeypatch) if "sleep" in first else 60.0
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    lines, silent, ended = on_nodes(["a", "b", "c"], 2, ["--quick"], {"ECHELON_DEVICE": "cpu"}, 3 * waited_s, told.append)
    assert list(silent) == ["b"] and silent["b"].startswith(why) and ended == ""
    assert len(lines) == 2 and told == ["no answer from b; asking the others without it"]
    calls = log.read_text().splitlines()
    assert calls[0].endswith(" rank=  device=cpu")
    assert len(calls) == 2 and "--nodelist=a,c --ntasks=4 --ntasks-per-node=2" in calls[1]


def test_all_nodes_silent_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_srun(tmp_path, monkeypatch, "exec sleep 600")
    lines, silent, ended = on_nodes(["a", "b", "c"], 1, [], {}, 0.6)
    assert lines == [] and list(silent) == ["a", "b", "c"] and ended.startswith("Time was up")


def test_an_allocation_is_seen_and_many_doctors_at_once_are_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert allocation({}) == []
    assert allocation({"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-3]"}) == ["n1", "n2", "n3"]
    with refused(ClusterError):
        allocation({"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(EchelonError):
        on_nodes(["a"], 1, [], {}, 1.0)
