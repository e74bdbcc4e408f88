"""Ranks that run other code, versions or settings are refused before they compute: on all of them, with what differs."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.common.errors import EchelonError, LauncherEnvironmentError, RanksDisagreeError
from echelon.contracts.rank import STORE_PREFIX_VARIABLE, RankInfo, said_by
from echelon.launcher.functions.launch import launch
from echelon.launcher.local.nodes import free_port
from echelon.loop.run import train
from echelon.world import agree
from echelon.world.handshake import RankSetup, differences, refusal_of, tellers_of
from echelon.world.init import init_from_env
from echelon.world.meeting import Facts, meet
from echelon.world.program import arguments, program
from tests.kit.models import batch
from tests.kit.refusals import refused
from tests.kit.units import Regression

WAIT = timedelta(seconds=30)


def _said(**values: str) -> RankSetup:
    return RankSetup("all", {"torch": "2.13.0", **values}, {}, "host")


def _met(store: dist.Store, rank: int, size: int, said: RankSetup | None, facts: Facts, wait: timedelta) -> str:
    try:
        meet(store, RankInfo(rank=rank, world_size=size), facts, wait, fresh=True, setup=said)
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _together(every: dict[int, RankSetup], *, sizes: dict[int, int] | None = None, wait: timedelta = WAIT) -> dict[int, str]:
    """What each of these ranks, here threads, hears as it joins."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(every)) as pool:
        size = {rank: (sizes or {}).get(rank, len(every)) for rank in every}
        asked = {r: pool.submit(_met, store, r, size[r], said, Facts(host=f"h{r}"), wait) for r, said in every.items()}
        return {rank: answer.result() for rank, answer in asked.items()}


# ---- what is said -----------------------------------------------------------------------------------------------------------


def test_a_rank_with_another_version_is_named_by_value_on_all_ranks() -> None:
    said = _together({rank: _said(torch="2.12.1" if rank == 3 else "2.13.0") for rank in range(6)})
    assert len(set(said.values())) == 1
    assert said[0].startswith("RanksDisagreeError: ranks must run the same program, got torch: rank 3 (host): 2.12.1; ")
    assert "the others: 2.13.0\nStart all ranks from the same installation" in said[0]
    assert "ECHELON_HANDSHAKE" not in said[0]  # versions are compared even then


def test_all_that_differs_is_said_at_once() -> None:
    odd = _said(torch="2.12.1", **{"argument --lr": "1e-4", "module model": "abc"})
    usual = _said(**{"argument --lr": "1e-3", "module model": "def"})
    said = _together({0: usual, 1: odd, 2: usual})[2]
    assert "argument --lr: rank 1 (host): 1e-4; the others: 1e-3" in said and "torch: rank 1" in said
    assert "module model: rank 1 (host): abc; the others: def" in said and "set ECHELON_HANDSHAKE=versions for every rank" in said
    halves = _together({rank: _said(script="a" if rank < 2 else "b") for rank in range(4)})
    assert "script: ranks 0-1: a; ranks 2-3: b\n" in halves[1]
    # Modules that only some ranks have imported are no difference.
    assert set(_together({0: _said(**{"module plots": "abc"}), 1: _said(), 2: _said()}).values()) == {""}


def test_other_world_sizes_are_refused_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.world.meeting._LOOK_S", 0.1)
    want = "LauncherEnvironmentError: the world size must be the same on all ranks, got rank "
    said = _together({0: _said(), 1: _said()}, sizes={0: 3, 1: 2}, wait=timedelta(minutes=10))
    assert said[0] == said[1] and said[0].startswith(f"{want}0: 3; rank 1: 2.")
    earlier = dist.HashStore()  # a word of an earlier attempt misleads nobody
    earlier.set("facts/1", json.dumps({"world_size": 3}))
    meet(earlier, RankInfo(rank=0, world_size=2), Facts(), WAIT, fresh=False, setup=_said())
    said = _together({0: _said(), 1: _said(), 2: _said()}, sizes={0: 2, 1: 2, 2: 3})
    assert (said[0], said[1]) == ("", "") and said[2].startswith(f"{want}0: 2; rank 2: 3.")


def test_a_rank_that_may_differ_on_purpose_says_so() -> None:
    assert refusal_of({0: _said(script="a"), 1: RankSetup("versions", {"torch": "2.13.0"}, {})}, {0: [0], 1: [1]}) == ""
    assert refusal_of({0: _said(torch="1"), 1: RankSetup("none", {}, {})}, {0: [0], 1: [1]}) == ""
    assert "torch" in refusal_of({0: _said(script="a"), 1: RankSetup("versions", {"torch": "2"}, {})}, {0: [0], 1: [1]})


def test_another_gpu_is_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    every = {rank: RankSetup("all", {"torch": "1"}, {"GPU": "A100" if rank == 1 else "H100"}, f"h{rank}") for rank in range(3)}
    assert set(_together(every).values()) == {""}
    assert "ranks differ, which costs speed or the last digits: GPU: rank 1 (h1): A100; the others: H100" in caplog.text


def test_a_mode_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_HANDSHAKE", "some")
    with refused(LauncherEnvironmentError, name="ECHELON_HANDSHAKE", got="'some'"):
        RankSetup.here(RankInfo(rank=0, world_size=1), torch.device("cpu"))


def test_a_rank_that_came_to_another_jobs_store_is_told() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        met = pool.map(lambda rank: _met(store, rank, 2, _said(), Facts(), WAIT), range(2))
        assert list(met) == ["", ""]
    text = _met(store, 1, 2, _said(job="another"), Facts(), WAIT)
    assert text.startswith("LauncherEnvironmentError: two processes are rank 1 of 2 at MASTER_ADDR=127.0.0.1 ")
    text = _met(store, 2, 2 + 1, _said(job="another"), Facts(), WAIT)
    assert "the world size must be the same on all ranks, got rank 0: 2; rank 2: 3." in text
    store.delete_key("came/1")
    assert "rank 1 runs another program than the ranks that rank 0 at" in _met(store, 1, 2, _said(job="another"), Facts(), WAIT)


JOINS = """
import sys
from datetime import timedelta
import echelon.world.store
echelon.world.store._LOOK_S = echelon.world.store._SILENT_S = 0.1
import echelon
try:
    echelon.init_from_env(timeout=timedelta(seconds=2))
except echelon.world.init.LauncherEnvironmentError as error:
    sys.exit(str(error))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "127.0.0.1",
            "rank 1 of 2: a program listens at MASTER_ADDR=127.0.0.1 MASTER_PORT={port} but does not answer like rank 0.",
        ),
        ("no.such.host.invalid", "knows no address for MASTER_ADDR=no.such.host.invalid. Set it to a name of rank 0's host"),
        ("127.0.0.2", "rank 1 waits for rank 0 at MASTER_ADDR=127.0.0.2 MASTER_PORT={port}, where nothing listens yet."),
    ],
    ids=["another program that says nothing", "no such name", "nobody"],
)
def test_what_is_wrong_with_rank_0s_address_is_named(started: Any, address: str, says: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        program = started.python(started.script(JOINS), env=env)
        _, err = program.communicate(timeout=180)
    assert program.returncode == 1 and says.format(port=port) in err.decode()


@pytest.mark.full
def test_a_shell_that_holds_another_programs_ranks_is_said_and_not_by_warnings_of_torchs(started: Any) -> None:
    env = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", "0"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "4"))
    }
    program = started.python(started.script(JOINS), env={**env, "PMIX_NAMESPACE": "words"})
    err = program.communicate(timeout=180)[1].decode()
    assert program.returncode == 1 and "ranks 1-3 of 4 did not come within 2 s" in err
    assert "The world size 4 comes from OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=4: unset these" in err
    assert "waitForInput" not in err, err


def test_a_rank_that_echelon_started_is_not_told_to_unset_its_variables() -> None:
    info, env = RankInfo(rank=1, world_size=2), {"RANK": "1", "WORLD_SIZE": "2"}
    assert said_by(info, env) == "RANK=1 and WORLD_SIZE=2"
    assert said_by(info, {**env, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}) == "SLURM_PROCID=1 and SLURM_NTASKS=2"
    assert said_by(info, {**env, STORE_PREFIX_VARIABLE: "x"}) == said_by(info, {**env, "TORCHELASTIC_MAX_RESTARTS": "0"}) == ""


# ---- what a rank says of itself ---------------------------------------------------------------------------------------------


def test_arguments_are_compared_by_name_without_places_and_secrets() -> None:
    words = "--lr 1e-3 --data=/tmp/x --local-rank=3 --betas 0.9 0.99 --api-key abcdef123456 model.depth=4 gpu=3 --port 1 --fast"
    assert arguments(words.split()) == {
        "--lr": "1e-3", "--data": "(a place)", "--betas": "0.9 0.99", "--api-key": "***", "model.depth": "4", "--fast": ""
    }  # fmt: skip
    assert arguments(["--lr=1e-3"]) == arguments(["--lr", "1e-3"]) and arguments(["lr=1e-3"]) == {"lr": "1e-3"}


def test_own_modules_are_compared_and_installed_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "own"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    main, own = types.ModuleType("__main__"), types.ModuleType("own")
    main.__file__, own.__file__ = str(tmp_path / "train.py"), str(tmp_path / "own.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "own", own)
    before = program(RankInfo(rank=0, world_size=2))
    assert before["script"].startswith("train.py (") and before["world size"] == "2" and "module own" in before
    code = [name for name in before if name.startswith("module ")]
    assert not [name for name in code if name.split()[1].partition(".")[0] in ("torch", "numpy", "json", "echelon", "pytest")]
    (tmp_path / "own.py").write_text("x = 2\n")
    after = program(RankInfo(rank=1, world_size=2))
    assert {name for name in before if before[name] != after[name]} == {"module own"}


def test_nothing_secret_goes_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "hf_" + "q1W2e3R4t5Y6u7I8o9P0"
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub", canary, "--password", "open sesame", f"token={canary}"])
    monkeypatch.setenv("SECRET_KEY", canary)
    kept: dict[str, bytes] = {}

    class Kept(dist.HashStore):
        def set(self, key: str, value: Any) -> None:
            kept[key] = value.encode() if isinstance(value, str) else value
            super().set(key, value)

    store = Kept()
    said = [RankSetup.here(RankInfo(rank=rank, world_size=2), torch.device("cpu")) for rank in range(2)]
    said[1] = RankSetup("all", {**said[1].values, "torch": "1"}, {})
    with ThreadPoolExecutor(2) as pool:
        assert all(list(pool.map(lambda rank: _met(store, rank, 2, said[rank], Facts(), WAIT), range(2))))
    assert "said/1" in kept and b"--hub" in kept["said/1"]
    assert not [key for key, value in kept.items() if canary.encode() in value or b"sesame" in value]


# ---- hostile values ---------------------------------------------------------------------------------------------------------

TREE = st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda s: st.lists(s) | st.dictionaries(st.text(), s))


@settings(max_examples=50)
@given(st.binary(max_size=60) | TREE.map(lambda v: json.dumps(v).encode()))
def test_no_value_of_a_store_brings_a_rank_down(text: bytes) -> None:
    said = RankSetup.read(text)
    assert isinstance(refusal_of({0: _said(), 1: said}, {0: [0], 1: [1]}), str)


def test_what_a_rank_says_is_cut_and_made_harmless() -> None:
    values = {f"variable \x1b[2J{n}": "x" * 1000 + "\n" for n in range(500)}
    text = refusal_of({0: _said(), 1: RankSetup.read(json.dumps({"values": values}))}, {0: [0], 1: [1]})
    assert len(text) < 4000 and "\x1b" not in text and "and 481 more" in text
    assert RankSetup.read(b"[" * 100_000) == RankSetup.read(b"\xff" * (2 << 20)) == RankSetup("all", {}, {})


def test_a_rank_that_never_tells_what_it_runs_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TELL", "_LATER"):
        monkeypatch.setattr(f"echelon.world.meeting.{name}", timedelta(seconds=0.2))
    store = dist.HashStore()
    store.set("facts/1", json.dumps({"digest": "other", "world_size": 2}))
    assert "rank 1 runs another program than rank 0, and did not send it within 0.2 s" in _met(
        store, 0, 2, _said(), Facts(), WAIT
    )


# ---- scale ------------------------------------------------------------------------------------------------------------------


def test_of_many_ranks_one_of_each_kind_is_asked() -> None:
    kinds = tellers_of(["a"] * 9_000 + ["b"] + ["a"] * 7_000 + ["c"] * 383)
    assert {teller: len(ranks) for teller, ranks in kinds.items()} == {0: 16_000, 9_000: 1, 16_001: 383}
    assert len(tellers_of([str(rank) for rank in range(16_384)])) == 8
    told = {0: {"x": "1"}, 9_000: {"x": "2"}, 16_001: {"x": "1"}}
    assert differences(told, kinds, {}) == ["x: rank 9000: 2; the others: 1"]


class _Counted(dist.HashStore):
    """Counts what rank 0 asks of the store, and how much it is given."""

    calls, size = 0, 0

    def multi_get(self, keys: Any) -> list[bytes]:
        found: list[bytes] = super().multi_get(keys)
        self.calls, self.size = self.calls + 1, self.size + sum(map(len, found))
        return found


def test_rank_0_reads_a_few_words_of_each_rank_and_at_once() -> None:
    ranks, store = 16_384, _Counted()
    digest = _said().digest
    for rank in range(1, ranks):
        store.set(f"facts/{rank}", json.dumps({"digest": digest, "world_size": ranks}))
    facts = Facts(other_digest="")
    said = RankSetup("all", _said().values, {})
    for rank in range(1, ranks):
        store.set(f"facts/{rank}", json.dumps({"digest": digest, "other_digest": said.other_digest, "world_size": ranks}))
    assert _met(store, 0, ranks, said, facts, WAIT) == ""
    assert store.calls == 1 and store.size < 400 * ranks


# ---- real ranks -------------------------------------------------------------------------------------------------------------


def _joined_with(other: str) -> str:
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "__version__", "2.12.1")
            patch.setattr(sys, "argv", [*sys.argv, "--lr", "1e-4"])
        with pytest.raises(RanksDisagreeError) as caught:
            if other == "by itself":
                dist.init_process_group("gloo")
                dist.barrier()
                train(Regression(layout="ddp"), [batch(2, 0)], max_epochs=1)
            else:
                if other == "of torchrun":
                    os.environ.pop("ECHELON_STORE_PREFIX")
                init_from_env()
    assert other == "of ours" or agree.is_joined()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return str(caught.value)


def _with_a_bad_mode(group: str, bad: list[int]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) in bad:
            patch.setenv("ECHELON_HANDSHAKE", "some")
        if group == "by itself":
            dist.init_process_group("gloo", timeout=WAIT)
        with pytest.raises(EchelonError) as caught:
            init_from_env(timeout=WAIT) if group == "of ours" else train(Regression(layout="ddp"), [batch(2, 0)], max_epochs=1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(("group", "bad"), [("of ours", [1]), ("by itself", [1]), ("by itself", [0, 1])])
def test_a_mode_that_there_is_not_on_one_rank_is_told_to_the_others(group: str, bad: list[int]) -> None:
    said = launch(_with_a_bad_mode, ranks=2, args=(group, bad), timeout_s=180)
    wrong = "ECHELON_HANDSHAKE must be 'all', 'versions' or 'none', got 'some'."
    assert said[1] == wrong
    assert said[0] == wrong if 0 in bad else re.fullmatch(rf"rank 1( \(.*\))? cannot join: {re.escape(wrong)}", said[0])


@pytest.mark.parametrize("group", ["of ours", "of torchrun", "by itself"])
def test_ranks_of_every_kind_of_group_are_compared(group: str) -> None:
    said = launch(_joined_with, ranks=3, args=(group,), timeout_s=180)
    assert len(set(said)) == 1 and "  argument --lr: rank 1" in said[0] and ": 1e-4; the others: none\n" in said[0]
    assert " got torch: rank 1" in said[0] and f": 2.12.1; the others: {torch.__version__.partition('+')[0]}\n" in said[0]


SCRIPT = "import echelon\nimport own\nechelon.init_from_env()\nprint('joined')\n"


def _by_hand(started: Any, mode: str = "all") -> list[tuple[int, str]]:
    """Two copies of a script, in folders of their own, of which one imports another module `own`."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        folder = started.folder / f"copy{rank}"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "own.py").write_text("LR = 1e-3\n" if rank else "LR = 1e-4\n")
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ECHELON_HANDSHAKE": mode}
        processes.append(started.python(str(folder / "train.py"), env=env, cwd=folder))
    ends = [process.communicate(timeout=180) for process in processes]
    return [(process.returncode, (out + err).decode()) for process, (out, err) in zip(processes, ends, strict=True)]


def test_two_copies_of_the_code_that_differ_are_refused_unless_that_is_meant(started: Any) -> None:
    for code, text in _by_hand(started):
        assert code == 1 and "RanksDisagreeError: ranks must run the same program, got module own: rank 0" in text
    assert [(code, text) for code, text in _by_hand(started, "versions")] == [(0, "joined\n")] * 2
