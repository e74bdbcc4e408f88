"""NCCL's watchdog kills the ranks that waited: the one that they waited for is named, by what their logs say."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from echelon.contracts.pulse import Phase, Standing
from echelon.contracts.run_dir import RunDir
from echelon.launcher.aborted import last_words
from echelon.launcher.failure import render
from echelon.launcher.job import Failure
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.judge import record_end
from echelon.launcher.local.rank_state import RankState

# As torch 2.13 writes them (ProcessGroupNCCL.cpp), with the stacks that follow.
TIMED_OUT = (
    "[E1122 09:00:00 ProcessGroupNCCL.cpp:700] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=10000) ran for 10031 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: "
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    + "frame #0: c10::Error::Error (libc10.so)\n"
    * 40
)
TOLD = "[E1122 ProcessGroupNCCL.cpp:1700] [Rank {rank}] Received a dump signal due to a collective timeout from  rank 0 and we\n"
REMOTE = (
    "  what():  [PG ID 0 Rank {rank}] Process group watchdog thread terminated with exception: NCCL error: remote process exited "
    "or there was a network error, NCCL version 2.27.3\n"
)
ILLEGAL = (
    "  what():  [PG ID 0 Rank {rank}] Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
    "access was encountered\n"
)


def _aborted(folder: Path, texts: dict[int, str]) -> list[Failure]:
    attempt = Attempt(0, folder)
    for rank, text in texts.items():
        attempt.pids[rank], attempt.ended[rank] = 1000 + rank, (signal.SIGABRT, time.monotonic_ns() + rank)
        attempt.log_path(rank).write_text("step 1\n" * 1000 + text.format(rank=rank))
    return attempt.failures()


def _blamed(folder: Path, failures: list[Failure], *steps: int) -> Failure:
    """Who is named, of ranks that had come so far."""
    here = RunDir(folder / "run").at_attempt(0)
    seen = {rank: RankState(Standing(step, Phase.STEP)) for rank, step in enumerate(steps)}
    first = record_end(here, 1, failures, seen=seen, world_size=len(steps))
    assert first is not None
    return first


def test_a_rank_that_the_watchdog_ended_only_waited(tmp_path: Path) -> None:
    """Rank 0 aborts first; rank 1, which hangs, still runs: before, rank 0 was named."""
    failures = _aborted(tmp_path, {0: TIMED_OUT})
    assert failures[0].waited
    first = _blamed(tmp_path, failures, 7, 6)
    assert first.rank == 1 and first.headline.startswith("rank 1 was behind the others")
    assert "Watchdog caught collective operation timeout" in render(first, 2) and "frame #0" not in render(first, 2)


def test_one_that_heard_of_the_timeout_and_was_ended_too_is_named_if_it_is_behind(tmp_path: Path) -> None:
    failures = _aborted(tmp_path, {0: TIMED_OUT, 1: TOLD, 2: TIMED_OUT})
    assert _blamed(tmp_path, failures, 7, 6, 7).rank == 1
    assert _blamed(tmp_path, failures, 7, 7, 7).rank == 0  # nobody knows who


def test_a_lost_peer_is_no_failure_of_its_own_and_a_device_error_is(tmp_path: Path) -> None:
    killed = Failure(2, 137, time.monotonic_ns() + 10**9, "SIGKILL", "killed by SIGKILL", reported=False)
    lost = _aborted(tmp_path, {0: REMOTE, 1: REMOTE})
    assert all(f.is_victim for f in lost) and Failure.first([*lost, killed]).rank == 2
    mixed = _aborted(tmp_path, {0: TIMED_OUT, 1: ILLEGAL})
    first = _blamed(tmp_path, mixed, 7, 7)
    assert first.rank == 1 and "CUDA error: an illegal memory access" in render(first, 2)


@pytest.mark.parametrize("text", ["", "free(): invalid pointer\n"])
def test_another_abort_is_the_ranks_own(tmp_path: Path, text: str) -> None:
    (failure,) = _aborted(tmp_path, {0: text})
    assert not failure.is_victim
    assert failure.message.splitlines() == ["killed by SIGABRT", *text.splitlines()]
    assert last_words(text) == text.strip()
