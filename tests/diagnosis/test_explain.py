"""Why a run stopped, concluded from records: whoever is named must be guilty, and what an enemy wrote must do no harm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cli.main import main
from echelon.common.traces import in_library, named_in_library
from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.run_dir import RunDir, write_json
from echelon.diagnosis import Evidence, RankEvidence, evidence, explain, show
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Call, expected, first_mismatch, parse, waits
from echelon.diagnosis.stacks import Frame, crash_stack, main_thread, of_traceback, user_frame, waits_in
from echelon.diagnosis.words import who
from echelon.launcher.local.end_record import record_end, write_exit
from echelon.launcher.local.raised import describe
from tests.kit.left_records import CLOSED, TIMED_OUT, Left, entry, failed, killed, record, seen

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path / "run")


TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"


# ---- who did it ---------------------------------------------------------------------------------------------------------------


def test_a_rank_that_raised_is_named_with_its_line_and_what_the_others_waited_in(left: Left) -> None:
    left.end(1, failed(0, f"RuntimeError: {CLOSED}", -1.0), failed(2), failed(3, f"RuntimeError: {CLOSED}", -1.0), world_size=4)
    for rank in (0, 3):
        left.flight(rank, *map(entry, range(1, 119)))
    left.flight(1, *map(entry, range(1, 118)), entry(118, retired=False)).flight(2, *map(entry, range(1, 118)))
    verdict = left.verdict
    assert verdict.guilty == (2,) and verdict.cause == "exception"
    assert verdict.paragraph == (
        "Rank 2 raised ValueError at train.py:41 in load while ranks 0, 1, 3 waited in all_reduce #118: bad label."
    )


def test_one_that_called_something_else_than_the_others(left: Left) -> None:
    for rank in range(4):
        last = entry(3, "all_gather", [8], retired=False) if rank == 1 else entry(3, retired=False)
        left.flight(rank, entry(1), entry(2), last)
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), world_size=4, seen={str(r): seen() for r in range(4)})
    verdict = left.verdict
    assert verdict.guilty == (1,) and verdict.cause == "mismatched order"
    assert verdict.headline == "rank 1 called all_gather (f32[8]) where the others called all_reduce (f32[4])"
    assert {line.split(" at ")[0] for line in verdict.seen} >= {"rank 1 waited in all_gather #3"}


@pytest.mark.parametrize(("guilty", "others"), [(0, 1), (1, 0)])
def test_of_two_the_one_whose_call_is_not_as_before(left: Left, guilty: int, others: int) -> None:
    before = [entry(1), entry(2, "broadcast"), entry(3), entry(4, "broadcast")]
    left.flight(guilty, *before, entry(5, "broadcast", retired=False)).flight(others, *before, entry(5, retired=False))
    left.end(1, failed(others, f"RuntimeError: {TIMED_OUT}"), world_size=2, hang={"after_s": 12.0})
    verdict = left.verdict
    assert verdict.guilty == (guilty,) and f"rank {guilty} called broadcast" in verdict.headline
    assert "By the calls before, all_reduce (f32[4]) was due." in verdict.paragraph


def test_of_two_that_are_one_call_apart_at_the_end_of_a_loop_nobody_knows_which(left: Left) -> None:
    """One step too many on one rank leaves the same records as one too few on the other."""
    before = list(map(entry, range(1, 11)))
    left.flight(0, *before, entry(11, retired=False)).flight(1, *before, entry(11, "barrier", retired=False))
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), world_size=2)
    verdict = left.verdict
    assert verdict.guilty == (0, 1) and "nothing tells which" in verdict.paragraph


def test_a_rank_that_is_stopped(left: Left) -> None:
    waits = {str(r): seen(silent_s=12.4) for r in range(4)}
    waits["3"] = seen(6, Phase.STEP, stopped=True, silent_s=12.4)
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), seen=waits, world_size=4).stack(3, ("/home/me/train.py", 7, "load"))
    verdict = left.verdict
    assert verdict.guilty == (3,) and verdict.cause == "stopped"
    assert verdict.headline == "rank 3 stopped (no heartbeat for 12 s), in update 7 at train.py:7 in load"


def test_a_rank_that_did_not_come_is_named_with_its_line_and_its_step(left: Left) -> None:
    for rank in range(4):
        left.flight(rank, *map(entry, range(1, 9)), *([] if rank == 2 else [entry(9, retired=False)]))
    at = {str(r): seen(6 if r == 2 else 7, Phase.DATA if r == 2 else Phase.STEP) for r in range(4)}
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), world_size=4, seen=at).stack(2, ("/home/me/train.py", 5, "load"))
    verdict = left.verdict
    assert verdict.guilty == (2,) and verdict.cause == "slow data"
    assert verdict.headline == "rank 2 did not come to all_reduce #9"
    assert "waiting for the data of update 7 at train.py:5 in load" in verdict.paragraph
    assert "It was 1 update behind the others." in verdict.paragraph


@pytest.mark.parametrize(
    "words",
    [
        "Received a dump signal due to a collective timeout from  rank 0",
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
    ],
)
def test_a_rank_that_was_aborted_with_those_that_waited_for_it_did_not_come(left: Left, words: str) -> None:
    """NCCL's watchdogs tell one another: all ranks end by SIGABRT, the one for which they waited, too."""
    timed_out = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600020 milliseconds"
    said = {0: timed_out, 1: words, 2: timed_out}
    left.end(134, *(killed(r, "SIGABRT", message=f"killed by SIGABRT\n{w}", traceback=w) for r, w in said.items()), world_size=3)
    for rank in said:
        left.flight(rank, *map(entry, range(1, 9)), *([entry(9, retired=False)] if rank != 1 else []))
    verdict = left.verdict
    assert (verdict.guilty, verdict.cause) == ((1,), "did not come") and "in which ranks 0, 2 waited" in verdict.paragraph
    assert "rank 1 waited" not in " ".join(verdict.seen)


def test_the_error_that_ended_a_thread_is_told_of_a_rank_that_waits_for_it(left: Left) -> None:
    left.flight(0, entry(1), entry(2, retired=False)).flight(1, entry(1))
    left.stack(0, (TORCH, 9, "all_reduce")).stack(1, ("/x/threading.py", 3, "wait"), ("/home/me/train.py", 24, "feed"))
    left.end(124, hang={"after_s": 60.0}, world_size=2, seen={str(r): seen(answers=True) for r in range(2)})
    said = """Exception in thread Thread-1 (read):
Traceback (most recent call last):
  File "/home/me/data.py", line 7, in read
    shard["id"]
KeyError: 'id\\x1b[31m'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/data.py", line 9, in read
    raise LookupError("shard 3 \x1b[31m") from None
LookupError: shard 3 \x1b[31m
and this rank said something later
"""
    (left.here / "rank1.log").write_text(said)
    assert "A thread of rank 1 had ended with LookupError: shard 3 ?[31m at data.py:9 in read." in left.verdict.paragraph
    (left.here / "rank1.log").write_text("no Exception in thread here\n")
    assert "A thread" not in left.verdict.paragraph and left.verdict.guilty == (1,)


def test_the_root_of_a_chain_of_waits_is_named(left: Left) -> None:
    """Rank 0 waits for rank 1 in one group, which waits for rank 2 in another."""
    groups = {"groups": {"5": {"ranks": [0, 1]}, "6": {"ranks": [1, 2]}}}
    left.flight(0, entry(1), entry(1, process_group=["5", "a"], retired=False), **groups)
    left.flight(1, entry(1), entry(1, process_group=["6", "b"], retired=False), **groups)
    left.flight(2, entry(1), **groups).end(1, hang={"after_s": 5.0}, world_size=3)
    assert left.verdict.guilty == (2,) and "all_reduce #1 of group '6'" in left.verdict.headline


def test_ranks_that_wait_for_one_another_in_two_groups(left: Left) -> None:
    for rank, group in ((0, "5"), (1, "6")):
        groups = {name: {"ranks": [0, 1]} for name in ("5", "6")}
        left.flight(rank, entry(1), entry(1, process_group=[group, ""], retired=False), groups=groups)
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), world_size=2)
    assert left.verdict.guilty == (0, 1) and left.verdict.cause == "mismatched order"
    assert "waited for one another" in left.verdict.headline


def test_a_rank_that_left_as_if_done(left: Left) -> None:
    left.flight(0, *map(entry, range(1, 10))).rank(1, 0, collectives={"0": "all_reduce #8"}).rank(0, 1, time_ns=5)
    left.end(1, failed(0, f"RuntimeError: {CLOSED}"), world_size=2)
    assert left.verdict.guilty == (1,) and left.verdict.cause == "left early"
    assert "rank 1 left with exit code 0 before the others" in left.verdict.headline


def test_one_that_left_behind_its_update_is_not_said_to_have_made_fewer(left: Left) -> None:
    """In a loop of one's own it is in the update until it asks for the next batch: whether it was made, nobody knows."""
    left.flight(0, *map(entry, range(1, 10))).rank(1, 0, collectives={"0": "all_reduce #8"}).rank(0, 1, time_ns=5)
    at = {str(rank): seen(6 - rank, Phase.STEP) for rank in range(2)}
    left.end(1, failed(0, f"RuntimeError: {CLOSED}"), world_size=2, seen=at)
    assert "before the others, in update 6 where others were in update 7, while" in left.verdict.paragraph


def test_dmesg_is_not_recommended_where_the_launcher_has_seen_that_the_kernel_killed_nothing(left: Left) -> None:
    assert "dmesg" in left.end(137, killed(1), world_size=2).verdict.paragraph
    said = "killed by SIGKILL, by a person or a program: the kernel has killed nothing here for want of memory"
    assert "dmesg" not in left.end(137, killed(1, message=said), world_size=2).verdict.paragraph


@pytest.mark.parametrize(
    ("stack", "did"), [((TORCH, 9, "all_reduce"), "waited in all_reduce #6"), (("train.py", 9, "main"), "stood")]
)
def test_a_call_that_the_death_of_a_peer_has_ended_is_where_a_rank_waited(
    left: Left, stack: tuple[str, int, str], did: str
) -> None:
    """Gloo's records have it as ended from then on, a moment before it raises; ranks are asked at any moment."""
    left.flight(0, *map(entry, range(1, 7))).stack(0, stack, ("/home/me/train.py", 36, "main"))
    left.flight(1, *map(entry, range(1, 6)))
    left.end(1, failed(1, "ValueError: no labels"), world_size=2, seen={"0": seen(answers=True)})
    assert left.verdict.guilty == (1,) and f"while rank 0 {did}" in left.verdict.paragraph
    left.flight(1, *map(entry, range(1, 7)))  # it came to that call, which then ended as it should
    assert "all_reduce #6" not in left.verdict.paragraph


def test_one_of_four_that_waits_in_a_further_call_has_made_it_too_many(left: Left) -> None:
    for rank in (0, 1, 3):
        left.rank(rank, 0, collectives={"0": "all_reduce #9"})
    left.flight(2, *map(entry, range(1, 10)), entry(10, "barrier", retired=False)).rank(2, 1, time_ns=5)
    left.end(1, failed(2, f"RuntimeError: {CLOSED}"), world_size=4)
    assert left.verdict.guilty == (2,) and left.verdict.cause == "left early"
    assert "rank 2 called barrier #10" in left.verdict.headline and "a call too many" in left.verdict.paragraph


def test_of_two_nobody_knows_whether_one_call_is_too_many_or_one_too_few(left: Left) -> None:
    left.flight(1, *map(entry, range(1, 10)), entry(10, "barrier", retired=False)).rank(1, 1, time_ns=5)
    left.rank(0, 0, collectives={"0": "all_reduce #9"}, finished=True)
    left.end(1, failed(1, f"RuntimeError: {CLOSED}"), world_size=2)
    assert left.verdict.guilty == (0, 1) and "nothing tells which" in left.verdict.paragraph
    left.rank(0, 0, collectives={"0": "all_reduce #9"})  # as after sys.exit(0), or a return before its group was destroyed
    assert left.verdict.guilty == (0,) and "rank 0 left with exit code 0" in left.verdict.headline


@pytest.mark.parametrize(("op", "differs"), [("broadcast", "`src` or `dst`"), ("all_to_all", "sizes of what each sends")])
def test_ranks_that_wait_in_a_call_to_which_all_have_come_gave_it_what_no_record_holds(left: Left, op: str, differs: str) -> None:
    """Of broadcasts with another root; ranks 1 and 3 are through."""
    for rank in (0, 2):
        left.flight(rank, entry(1), entry(2, op, retired=False)).stack(rank, (TORCH, 9, op), ("/home/me/train.py", 36, "main"))
    for rank in (1, 3):
        left.flight(rank, entry(1), entry(2, op), entry(3, retired=False)).stack(rank, (TORCH, 9, "all_reduce"))
    left.end(124, hang={"after_s": 60.0}, world_size=4, seen={str(r): seen(answers=True) for r in range(4)})
    verdict = left.verdict
    assert verdict.guilty == (0, 2) and verdict.cause == "mismatched arguments" and differs in verdict.paragraph
    assert f"waited for one another in {op} #2" in verdict.headline and "train.py:36" in verdict.paragraph


def test_one_that_ended_after_the_failure_because_it_was_asked_to_is_not_accused(left: Left) -> None:
    left.rank(1, 0, time_ns=9).rank(0, 1, time_ns=5).end(1, failed(0, f"RuntimeError: {CLOSED}"), world_size=2)
    assert left.verdict.guilty == () and left.verdict.cause == "unknown"


@pytest.mark.parametrize(
    ("failure", "cause", "says"),
    [
        (killed(1, oom=True), "host out of memory", "out-of-memory killer"),
        (killed(1), "killed", "killed by SIGKILL"),
        (killed(1, "SIGSEGV"), "crash", "crashed: SIGSEGV"),
        (killed(1, "SIGTERM"), "killed", "ended by SIGTERM"),
        (killed(1, "SIGALRM"), "killed", "A timer that the program itself had set"),
        (killed(1, "SIGXCPU"), "CPU limit", "CPU time"),
        (failed(1, "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
         "host out of memory", "ulimit -v"),
        (failed(1, "MemoryError: "), "host out of memory", "MemoryError"),
        (failed(1, "RuntimeError: can't start new thread"), "too many processes", "ulimit -u"),
        (failed(1, "RuntimeError: Resource temporarily unavailable"), "too many processes", "ulimit -u"),
        (failed(1, "DataError: sample 17 is bad:\nKeyError: 7\nIn 0: Traceback (most recent call last):\n  x", ours=True),
         "data", "sample 17 is bad: KeyError: 7. The text names the sample."),
        (failed(1, "DistNetworkError: The server socket has failed to listen. EADDRINUSE"), "port in use", "MASTER_PORT"),
        (failed(1, "ModuleNotFoundError: No module named 'x'"), "import", "No module"),
        (failed(1, "exit: exit code 7", kind="exit", exit_code=7), "exit", "ended with exit code 7"),
        (failed(1, "ConnectionResetError: [Errno 104] Connection reset by peer"), "exception", "ConnectionResetError"),
    ],
)  # fmt: skip
def test_the_kinds_of_a_rank_s_own_end(left: Left, failure: dict[str, Any], cause: str, says: str) -> None:
    left.end(1, failed(0, f"RuntimeError: {CLOSED}", -9.0), failure, world_size=2)
    verdict = left.verdict
    assert (verdict.guilty, verdict.cause) == ((1,), cause) and says in verdict.paragraph, verdict


@pytest.mark.parametrize(
    ("message", "guilty"),
    [
        ("the loss was not finite in 10 updates in a row, the first of them at step 5 (rank 1: nan). Look", (1,)),
        (
            "the loss was not finite in 10 updates in a row, the first of them at step 5 (finite on each rank, not their sum)",
            (0, 1, 2),
        ),
        ("ranks disagree about the world: rank 0: 4, rank 1: 4, rank 2: 5. Start", (2,)),
        (
            "ranks must run the same program, got\n  torch: rank 2 (h): 2.12; the others: 2.13\n  --lr: rank 1: 1; the others: 2",
            (1, 2),
        ),
        ("the world size must be the same on all ranks, got rank 2: 4; ranks 0-1: 3. Start", (2,)),
        (
            "ranks disagree about the end of the train epoch: rank 0: has batch 9, rank 1: has batch 9, rank 2: ended after 8",
            (2,),
        ),
        (
            "ranks 1-2 of 3 did not come within 30 s. Look at their output for how they ended; start as many ranks as "
            "WORLD_SIZE=3 says; and see that their hosts reach MASTER_ADDR=h0 MASTER_PORT=29500.",
            (1, 2),
        ),
    ],
)
def test_an_error_that_all_ranks_raise_accuses_those_that_it_names(left: Left, message: str, guilty: tuple[int, ...]) -> None:
    left.end(1, *(failed(r, f"NonFiniteError: {message}", ours=True) for r in range(3)), world_size=3)
    assert left.verdict.guilty == guilty


def test_ranks_that_fail_alike_are_guilty_together_and_later_ones_are_not(left: Left) -> None:
    left.end(1, failed(0), failed(1), failed(2, "KeyError: 'x'", 5.0, user_frames=[]), world_size=3)
    verdict = left.verdict
    assert verdict.guilty == (0, 1) and verdict.headline.startswith("ranks 0, 1 raised ValueError")
    assert "rank 2 failed with KeyError" in verdict.paragraph


@pytest.mark.parametrize(("raised", "guilty"), [((1, 2, 3), (0,)), ((2,), (2,)), ((1, 3), (0, 1, 2, 3))])
def test_of_ranks_with_modules_unlike_that_of_rank_0_the_fewer_are_to_blame(
    left: Left, raised: tuple[int, ...], guilty: tuple[int, ...]
) -> None:
    said = "RuntimeError: [{}]: params[0] in this process with sizes [8, 8] appears not to match sizes of the same param "
    said += "in process 0."
    left.end(1, *(failed(rank, said.format(rank)) for rank in raised), world_size=4)
    for rank in {0, 1, 2, 3} - set(raised):
        left.flight(rank, entry(1), entry(2, "broadcast", retired=False))
    assert (left.verdict.guilty, left.verdict.cause) == (guilty, "ranks differ"), left.verdict


def test_a_rank_that_has_ended_had_the_module_of_rank_0(left: Left) -> None:
    """Of three ranks the one with another module was said to differ from rank 0, and nothing to tell which is wrong."""
    said = "RuntimeError: [1]: params[0] in this process appears not to match sizes of the same param in process 0."
    left.end(1, failed(1, said), world_size=3)
    left.rank(2, 0)
    left.flight(0, entry(1), entry(2, "broadcast", retired=False))
    assert left.verdict.guilty == (1,) and "nothing tells" not in left.verdict.paragraph


def test_what_is_raised_from_a_lost_connection_is_a_victim_s(left: Left) -> None:
    chained = f"RuntimeError: {CLOSED}\n\nThe above exception was the direct cause of the following exception:\n\nKeyError: 'x'\n"
    left.end(1, failed(0, "KeyError: 'x'", -5.0, traceback=chained), killed(1), world_size=2)
    assert left.verdict.guilty == (1,)


@pytest.mark.parametrize(
    "said", ["ConnectionResetError: [Errno 104] Connection reset by peer", "EOFError", "FileNotFoundError: x"]
)
@pytest.mark.parametrize(
    ("through", "cause"), [("torch/utils/data/dataloader.py", "data worker"), ("h5py/files.py", "exception")]
)
def test_what_reading_from_a_dead_worker_raises_is_about_the_worker(left: Left, said: str, through: str, cause: str) -> None:
    frames = ["/w/train.py", f"/p/site-packages/{through}", "/p/lib/python3.11/multiprocessing/connection.py"]
    traceback = "Traceback (most recent call last):\n" + "".join(f'  File "{file}", line 3, in f\n' for file in frames)
    left.end(1, failed(0, f"RuntimeError: {CLOSED}", -9.0), failed(1, said, traceback=f"{traceback}{said}\n"), world_size=2)
    assert (left.verdict.guilty, left.verdict.cause) == ((1,), cause)


def test_a_refused_collective_is_the_fault_of_the_rank_whose_call_is_not_as_before(left: Left) -> None:
    """Gloo kills the process that receives too much, and that one leaves no record."""
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 32 vs 16."
    left.end(134, killed(0, "SIGABRT", message=said), world_size=2)
    left.flight(1, *map(entry, range(1, 6)), entry(6, kind="Double", retired=False))
    assert left.verdict.guilty == (1,) and "all_reduce (f64[4])" in left.verdict.headline
    assert "failed: op.preamble.length" in left.verdict.paragraph


def test_of_two_the_one_that_handles_the_loss_of_its_peer_is_not_at_another_line(left: Left) -> None:
    """It has written its error, and was ended before its record."""
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    left.end(134, killed(0, "SIGABRT", message=said), world_size=2, seen={"1": seen(answers=True)})
    left.flight(1, *map(entry, range(1, 6)), entry(6, kind="Double", retired=False))
    left.stack(0, (TORCH, 9, "all_reduce"), ("/home/me/train.py", 41, "step"))
    left.stack(1, ("/home/me/train.py", 90, "<module>"))
    call = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 41, in step\n'
    (left.here / "rank1.log").write_text(f"{call}RuntimeError: {CLOSED}\n")
    assert (left.verdict.guilty, left.verdict.cause) == ((1,), "mismatched shape"), left.verdict


def test_a_process_that_falls_while_it_writes_how_it_aborts_has_aborted(left: Left) -> None:
    said = "[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    words = f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {said}\n"
    (left.here / "rank0.log").write_text(f"{words}Fatal Python error: Aborted\n\nFatal Python error: Segmentation fault\n")
    left.end(139, killed(0, "SIGSEGV"), failed(1, f"RuntimeError: {CLOSED}"), world_size=2)
    left.flight(1, *map(entry, range(1, 6)), entry(6, kind="Double", retired=False))
    assert (left.verdict.guilty, left.verdict.cause) == ((1,), "mismatched shape")


def test_a_process_that_falls_while_it_writes_how_it_aborts_is_said_to_abort_where_it_did(left: Left) -> None:
    stack = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 4 in step\n'
    dump = f"Fatal Python error: Aborted\n\n{stack}"
    left.end(139, killed(1, "SIGSEGV"), world_size=2)
    for more in ("", "Fatal Python error: Segmentation fault\n\n"):
        (left.here / "rank1.log").write_text(f"{dump}{more}")
        assert left.verdict.paragraph.startswith("Rank 1 crashed: SIGABRT at train.py:4 in step")
    (left.here / "rank1.log").write_text(f"{dump}{dump.replace('Aborted', 'Segmentation fault')}")
    assert "SIGSEGV" in left.verdict.paragraph


def test_of_more_than_two_the_one_that_refuses_what_all_others_call_alike_is_the_odd_one(left: Left) -> None:
    """At the end of an epoch, where no call is as those of a step."""
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    left.end(134, killed(0, "SIGABRT", message=said), *(failed(r, f"RuntimeError: {CLOSED}") for r in (1, 2)), world_size=3)
    for rank in (1, 2):
        left.flight(rank, *map(entry, range(1, 6)), entry(6, kind="Double", size=(9,), retired=False))
    assert left.verdict.guilty == (0,) and "the others all called all_reduce (f64[9])" in left.verdict.paragraph


def test_gradients_of_other_sizes_come_of_a_layer_that_some_ranks_use(left: Left) -> None:
    for rank, size in enumerate((280, 212)):
        steps = [entry(n, "_reduce_scatter_base", size=(280,)) for n in range(1, 6)]
        left.flight(rank, *steps, entry(6, "_reduce_scatter_base", size=(size,), retired=False))
    left.end(124, hang={"after_s": 60.0}, world_size=2, seen={str(r): seen(answers=True) for r in range(2)})
    assert left.verdict.cause == "mismatched shape"
    assert "a layer that only some ranks use in a step causes this" in left.verdict.paragraph


@pytest.mark.parametrize("how", ["refused", "waited"])
@pytest.mark.parametrize("steps", [(5, 5), (7, 8)])
def test_of_two_at_different_lines_nobody_knows_who_has_left_the_loop_or_stayed(
    left: Left, how: str, steps: tuple[int, int]
) -> None:
    """A rank past its loop calls something of its own; so does one that makes a call too many within it.

    Epochs of as many equal calls, of which the first had one fewer since DDP sends its buckets anew, say nothing of the next.
    """
    calls, first = [], steps[0]
    for size in [*[9] * first, 2, *[9] * steps[1]]:
        calls.append(entry(len(calls) + 1, size=(size,)))
    left.flight(0, *calls[:-1], {**calls[-1], "retired": False})
    left.stack(0, (TORCH, 9, "all_reduce"), ("/home/me/train.py", 41, "load"))
    left.stack(1, (TORCH, 9, "all_reduce"), ("/home/me/train.py", 70, "main"))
    if how == "refused":
        said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 36 vs 4."
        left.end(134, killed(1, "SIGABRT", message=said), failed(0, f"RuntimeError: {CLOSED}"), world_size=2)
    else:
        left.flight(1, *calls[:-1], entry(len(calls), size=(2,), retired=False))
        left.end(124, hang={"after_s": 60.0}, world_size=2, seen={str(r): seen(answers=True) for r in range(2)})
    verdict = left.verdict
    assert verdict.guilty == (0, 1) and verdict.cause == "mismatched shape", verdict
    assert "nothing tells which" in verdict.paragraph and "all_reduce (f32[9])" in verdict.headline
    assert "train.py:41 in load" in verdict.paragraph and "train.py:70 in main" in verdict.paragraph


def test_a_rank_whose_thread_s_call_was_refused_has_come(left: Left) -> None:
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 84 vs 8."
    left.end(134, killed(0, "SIGABRT", message=said), failed(1, f"RuntimeError: {CLOSED}"), world_size=2)
    left.stack(0, ("/x/lib/python3.11/threading.py", 9, "join"), ("/home/me/train.py", 30, "step"))
    left.flight(1, entry(1), entry(2, size=(9,), retired=False)).stack(1, (TORCH, 9, "all_reduce"), ("/home/me/train.py", 7, "f"))
    assert left.verdict.cause == "mismatched shape" and "did not come" not in left.verdict.paragraph, left.verdict


def test_what_a_loop_of_ours_calls_at_the_end_of_an_epoch_is_no_rank_s_fault(left: Left) -> None:
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    left.end(134, killed(0, "SIGABRT", message=said), world_size=2)
    left.flight(1, *map(entry, range(1, 6)), entry(6, kind="Double", retired=False))
    ours = "/x/site-packages/echelon/loop/engine.py"
    left.stack(1, (TORCH, 9, "all_reduce"), (ours, 192, "_close_epoch"), ("/home/me/train.py", 83, "<module>"))
    assert left.verdict.guilty == () and "rank 0 ended with SIGABRT in a collective" in left.verdict.headline
    assert "8 vs 4" in left.verdict.paragraph


def test_a_call_that_refuses_a_rank_s_own_tensors_is_that_rank_s_fault(left: Left) -> None:
    left.end(1, failed(2, "RuntimeError: [enforce fail at /x/gloo/alltoall.cc:9] in->size == out->size. "), world_size=4)
    assert left.verdict.guilty == (2,) and "rejected this rank's input" in left.verdict.paragraph


def test_two_that_make_the_same_two_calls_in_another_order_are_both_named(left: Left) -> None:
    """And not the one of which the first is not as its calls before."""
    before = [*map(entry, range(1, 10))]
    for rank, sizes in enumerate(((3, 4), (4, 3))):
        left.flight(rank, *before, *(entry(10 + n, size=(size,), retired=False) for n, size in enumerate(sizes)))
    left.end(124, hang={"after_s": 60.0}, world_size=2, seen={str(r): seen(answers=True) for r in range(2)})
    assert left.verdict.guilty == (0, 1) and left.verdict.cause == "mismatched order"
    assert "the same calls in another order" in left.verdict.paragraph and "was due" not in left.verdict.paragraph


def test_what_torch_s_check_says_is_enough_without_any_flight_record(left: Left) -> None:
    """A full disk: nothing was gathered."""
    call = "Detected mismatch between collectives on ranks. "
    call += "Rank {} is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType={})"
    left.end(
        1, *(failed(r, f"RuntimeError: {call.format(r, op)}") for r, op in enumerate(("ALLREDUCE", "BARRIER"))), world_size=2
    )
    assert left.verdict.guilty == (0, 1) and "rank 1 called barrier" in left.verdict.headline, left.verdict


def test_where_a_rank_is_that_has_gone_on_is_not_given_as_the_line_of_its_call(left: Left) -> None:
    """As one that gave fewer elements than the others, and got what it wanted."""
    left.end(124, world_size=3, hang={"after_s": 5.0}, seen={str(rank): seen() for rank in range(3)})
    for rank in range(3):
        last = [entry(2, size=[3]), entry(3, retired=False)] if rank == 1 else [entry(2, retired=False)]
        left.flight(rank, entry(1), *last).stack(rank, (TORCH, 3, "all_reduce"), ("/home/me/train.py", 7 + rank, "step"))
    assert "(rank 0 at train.py:7 in step, rank 1 later at train.py:8 in step)" in left.verdict.paragraph


def test_the_launcher_names_the_rank_that_called_otherwise_not_the_one_whose_process_gloo_ended_for_it(left: Left) -> None:
    for rank in (0, 2):
        left.flight(rank, entry(1), entry(2, kind="Double" if rank == 2 else "Float", retired=False))
    left.flight(3, entry(1), entry(2, retired=False))
    said = "killed by SIGABRT\n[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    named = record_end(RunDir(left.path, 0), 134, [Failure(1, 134, 0, "SIGABRT", said)], world_size=4)
    assert named is not None and (named.rank, named.exit_code) == (2, 134) and "called all_reduce (f64[4])" in named.headline


def test_without_records_nobody_is_accused_of_a_refused_collective(left: Left) -> None:
    left.end(
        1, failed(0, "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 32 vs 16.")
    )
    assert left.verdict.guilty == () and "--check-collectives" in left.verdict.paragraph


# ---- nothing wrong, or nothing known ------------------------------------------------------------------------------------------


def test_a_run_that_ended_well_was_asked_to_stop_or_was_interrupted(tmp_path: Path) -> None:
    for code, cause in ((0, "fine"), (75, "asked to stop"), (130, "interrupted"), (143, "interrupted")):
        verdict = Left(tmp_path / str(code)).end(code).verdict
        assert verdict.guilty == () and verdict.cause == cause and verdict.is_known


@pytest.mark.parametrize(("heard", "guilty"), [({1}, (1,)), ({0, 1, 2}, ()), (set(), ())])
def test_a_signal_that_one_rank_was_sent_and_the_launcher_was_not_is_told(
    left: Left, heard: set[int], guilty: tuple[int]
) -> None:
    left.end(75, world_size=3, seen={str(rank): seen(4, Phase.ENDED) for rank in range(3)})
    for rank in range(3):
        left.rank(rank, 75, **({"heard": "SIGTERM"} if rank in heard else {}))
    verdict = left.verdict
    assert verdict.cause == "asked to stop" and verdict.guilty == guilty
    assert verdict.paragraph.startswith("Rank 1 was sent SIGTERM, and no other rank was: all stopped for it.") == bool(guilty)
    assert not verdict.seen


def test_what_the_launcher_said_is_passed_on(left: Left) -> None:
    left.end(1, stopped="the launcher on node7 ended without a word: was the node lost, or out of memory?")
    assert left.verdict.cause == "launcher" and "node7" in left.verdict.paragraph and left.verdict.guilty == ()


def test_a_launcher_that_was_killed_and_an_attempt_without_a_trace(left: Left) -> None:
    assert left.verdict.cause == "unknown"
    (left.path / "run.json").write_text('{"ranks": 2}')
    assert left.verdict.cause == "launcher killed" and left.verdict.guilty == ()
    left.flight(0, entry(1))
    assert left.verdict.cause == "launcher killed" and left.verdict.guilty == ()


def test_who_had_not_come_when_the_launcher_was_killed_is_not_accused(left: Left) -> None:
    """Asked to stop, it looked at the ranks; then it was killed."""
    left.flight(0, entry(1), entry(2, retired=False)).flight(1, entry(1))
    left.stack(0, (TORCH, 9, "all_reduce")).stack(1, ("/home/me/train.py", 24, "load"))
    (left.path / "run.json").write_text('{"ranks": 2}')
    assert left.verdict.cause == "launcher killed" and left.verdict.guilty == ()
    assert "rank 1 did not come to all_reduce #2: that may have been on its way" in left.verdict.paragraph


def test_ranks_that_stand_alike_are_not_accused(left: Left) -> None:
    for rank in range(4):
        left.flight(rank, entry(1), entry(2, retired=False))
    left.end(1, hang={"after_s": 60.0}, seen={str(r): seen(5, Phase.STEP) for r in range(4)}, world_size=4)
    verdict = left.verdict
    assert verdict.guilty == () and verdict.cause == "unknown" and "60 s" in verdict.paragraph


def test_a_group_of_which_the_members_are_not_known_accuses_nobody(left: Left) -> None:
    left.flight(0, entry(1), entry(1, process_group=["7", ""], retired=False)).flight(1, entry(1)).flight(2, entry(1))
    left.end(1, hang={"after_s": 60.0}, world_size=3)
    assert left.verdict.guilty == ()


def test_a_scatter_whose_root_alone_gives_tensors_is_no_mismatch() -> None:
    root, other = entry(1, "scatter"), entry(1, "scatter", input_sizes=[], input_dtypes=[])
    gather, of_other = entry(2, "gather"), entry(2, "gather", output_sizes=[], output_dtypes=[])
    flights = {
        0: parse(record(root, gather, entry(3, "all_to_all", [7]))),
        1: parse(record(other, of_other, entry(3, "all_to_all"))),
    }
    assert first_mismatch(flights) == []


def test_a_group_made_anew_counts_from_one() -> None:
    flight = parse(record(entry(1, "broadcast"), entry(2), entry(1), entry(2, retired=False)))
    assert [call.op for call in flight["0"].calls.values()] == ["all_reduce"] * 2
    assert flight["0"].open == Call(2, "all_reduce", ("f32[4]",), False, 2, (("f32", 4),))


def test_a_number_and_a_word_for_many_ranks() -> None:
    assert who([2]) == "rank 2" and who([0, 1, 3]) == "ranks 0, 1, 3" and who(range(16384)) == "ranks 0-16383"
    assert who([5, *range(8)]) == "ranks 0-7" and len(who(range(0, 1000, 2))) < 120


def test_stacks_tell_who_waits_and_where() -> None:
    user = ("/home/me/train.py", 7, "step")
    text = "\n".join(
        f'  File "{f}", line {n} in {name}' for f, n, name in ((TORCH, 3, "all_reduce"), (TORCH, 1, "wrapper"), user)
    )
    assert waits_in(main_thread(text)) == "all_reduce" and str(user_frame(main_thread(text))) == "train.py:7 in step"
    assert user_frame(main_thread('  File "/home/me/.venv/bin/echelon", line 8 in <module>')) is None  # a rank that is starting
    assert waits_in(of_traceback('Traceback (most recent call last):\n  File "/home/me/a.py", line 1, in f')) == ""
    others = "".join(f'Thread {n:#x} (most recent call first):\n  File "/home/me/{n}.py", line 1 in idle\n\n' for n in range(100))
    assert main_thread(others + "...\n") == ()  # faulthandler stops there, and the main thread was to come last
    assert main_thread(others + "...\n\nThread main (most recent call first):\n" + text) == main_thread(text)
    assert len(main_thread(f"{text}\n  ...")) == 3  # a deep stack
    disk, made = "/x/site-packages/torch/distributed/checkpoint/filesystem.py", "/x/site-packages/torch/_ops.py"
    save = (disk.replace("filesystem", "state_dict_saver"), 9, "save")
    for frames, name in (
        (((disk, 3, "_write_item"), save, user), ""),  # to a disk
        (((TORCH, 3, "all_gather"), save, user), "save"),
        (((made, 3, "__call__"), (TORCH.replace("distributed_c10d", "tensor/_dispatch"), 3, "dispatch"), user), ""),
        (
            ((made, 3, "__call__"), (TORCH.replace("distributed_c10d", "_functional_collectives"), 3, "wait_tensor"), user),
            "wait_tensor",
        ),
        ((("/x/site-packages/torch/nn/modules/linear.py", 3, "forward"), (TORCH, 3, "forward"), user), ""),
    ):
        assert waits_in(Frame(*each) for each in frames) == name
    crash = "x\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    assert [f.line for f in crash_stack(crash + '  File "/a.py", line 4 in f\n\nThread 0x2 (most recent call first):\n')] == [4]


REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
SOCKET, URLLIB = "/p/lib/python3.11/socket.py", "/p/lib/python3.11/urllib/request.py"
STORE = "/p/site-packages/torch/distributed/rendezvous.py"


def raised(*exceptions: tuple[str, str]) -> str:
    """A traceback of chained exceptions, each with the file that raised it."""
    parts = [
        f'Traceback (most recent call last):\n  File "/w/torch/a.py", line 3\n  File "{f}", line 9, in f\n{t}'
        for f, t in exceptions
    ]
    return "\n\nDuring handling of the above exception, another exception occurred:\n\n".join(parts) + "\n"


@pytest.mark.parametrize(
    ("exceptions", "is_victim"),
    [
        ([(SOCKET, REFUSED)], False),
        ([(SOCKET, REFUSED), (URLLIB, "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>")], False),
        ([(SOCKET, REFUSED), ("/w/torch/train.py", "RuntimeError: no weights")], False),
        ([("/p/multiprocessing/connection.py", "ConnectionResetError: [Errno 104] Connection reset by peer")], False),
        ([("/w/a.py", "RuntimeError: [gloo/transport/tcp/device.cc:81] Unable to find address for: nosuch")], False),
        ([("/w/a.py", "RuntimeError: backend nccl is not here: abort")], False),
        ([("/w/a.py", f"RuntimeError: {CLOSED}")], True),
        ([("/w/a.py", f"RuntimeError: {CLOSED}"), ("/w/a.py", "KeyError: 'x'")], True),
        ([(STORE, "RuntimeError: Broken pipe")], True),
        ([("/w/a.py", "torch.distributed.DistNetworkError: failed to recv, got 0 bytes: Connection reset by peer")], True),
        ([("/w/a.py", "torch.distributed.DistBackendError: NCCL error in: x.cpp:3, remote process exited or")], True),
    ],
)
def test_only_a_lost_rank_makes_a_victim_and_no_lost_server(exceptions: list[tuple[str, str]], is_victim: bool) -> None:
    text = raised(*exceptions)
    assert Failure.from_json(failed(0, "X: y", traceback=text)).is_victim == is_victim
    assert not Failure.from_json(failed(0, "X: y", traceback="NCCL " * 100_000)).is_victim  # in a moment


@pytest.mark.parametrize("kind", [FileNotFoundError, ValueError, ConnectionRefusedError, EOFError])
def test_what_a_dataset_raises_is_no_dead_worker(left: Left, kind: type[Exception]) -> None:
    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise kind("bad label 7")

    with pytest.raises(kind) as error:
        next(iter(torch.utils.data.DataLoader(Data())))
    here = describe(error.value)
    # As torch raises it again, of a worker.
    message = f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal {here['traceback']}"
    again = raised(("/p/torch/utils/data/dataloader.py", f"{kind.__name__}: {message}"))
    for said in (here, {**here, "message": message, "traceback": again}):
        left.end(1, failed(0, f"RuntimeError: {CLOSED}", -9.0), {**failed(1), **said}, world_size=2)
        assert (left.verdict.guilty, left.verdict.cause) == ((1,), "exception") and "bad label 7" in left.verdict.paragraph


@pytest.mark.parametrize(
    ("rank", "text", "guilty"),
    [
        (2, "UsageError: save_pretrained must be called on all ranks, and rank 0 writes; got one call.", (2,)),
        (3, "UsageError: rank 3 of 4: nodeb knows no address of a. Set MASTER_ADDR to rank 0's host.", (3,)),
        (3, "LauncherEnvironmentError: MASTER_ADDR is not set. Set it to the host of rank 0.", (3,)),
        (0, "RanksDisagreeError: ranks disagree: rank 0: 4, rank 1: 4, rank 2: 5. Rank 0 writes.", (2,)),
        (0, "RanksDisagreeError: Rank 1 failed: ValueError: x, as rank 0 saw.", (1,)),
    ],
)
def test_a_rank_of_which_only_the_remedy_speaks_is_not_accused(left: Left, rank: int, text: str, guilty: tuple[int, ...]) -> None:
    left.end(1, failed(rank, text, ours=True), world_size=4)
    assert left.verdict.guilty == guilty


def test_ranks_without_number_are_no_work(left: Left) -> None:
    text = "rank " + ", ".join("0-1048575" for _ in range(2000)) + ": 4, rank 1: 5"
    left.end(1, failed(0, f"UsageError: {text}", ours=True), world_size=1 << 20)
    assert left.verdict.guilty == (0,)


def test_a_stage_that_stood_is_named_though_it_was_woken_and_left_when_the_run_was_ended(left: Left) -> None:
    """As out of `sleep` in C, which a signal ends: its own last words are of a later step."""
    schedules = "/x/site-packages/torch/distributed/pipelining/schedules.py"
    hung = [{**failed(rank, "hang: x"), "exit_code": 124} for rank in (0, 1)]
    at = {str(rank): seen(3, Phase.STEP, silent_s=6.0, answers=rank == 0) for rank in (0, 1)}
    left.end(124, *hung, hang={"after_s": 6.0}, seen=at, world_size=2)
    left.stack(0, (schedules, 683, "_wait_batch_p2p"), (schedules, 785, "step"), ("/home/me/train.py", 72, "main"))
    left.stack(1, ("/home/me/train.py", 17, "native"), (schedules, 785, "step"), ("/home/me/train.py", 72, "main"))
    for rank in (0, 1):
        text = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 72, in main\n    x()\nSystemExit: 75\n'
        left.rank(rank, 75, time_ns=10**12, kind="SystemExit", message="exit code 75", traceback=text)
    verdict = left.verdict
    assert verdict.guilty == (1,) and verdict.paragraph.startswith(
        "Rank 1 did not come, and stood at train.py:17 in native while rank 0 waited for another stage."
    )


@pytest.mark.parametrize("both", [True, False])
def test_a_rank_that_ends_well_because_it_is_asked_to_after_a_hang_did_not_leave_early(left: Left, *, both: bool) -> None:
    """As with a handler of SIGTERM of its own, which the launcher sends when it has seen where all are."""
    hung = [{**failed(rank, "hang: x"), "exit_code": 124} for rank in (0, 1)]
    at = {str(rank): seen(silent_s=600.0, answers=True, where="train.py:7 in locked") for rank in (0, 1)}
    left.end(124, *hung, hang={"after_s": 600.0}, seen=at, world_size=2)
    left.flight(0, entry(1), entry(2, retired=False)).flight(1, entry(1))
    left.stack(0, (TORCH, 3, "all_reduce"), ("/home/me/train.py", 9, "main")).stack(1, ("/home/me/train.py", 7, "locked"))
    for rank in (0, 1) if both else (1,):
        left.rank(rank, 0, time_ns=10**12, collectives={"0": f"all_reduce #{2 - rank}"})
    verdict = left.verdict
    assert verdict.guilty == (1,) and verdict.cause == "did not come", verdict
    at["1"] |= {"answers": None}  # it was not there any more
    assert left.end(124, *hung, hang={"after_s": 600.0}, seen=at, world_size=2).verdict.cause == "left early"


@pytest.mark.full
def test_what_records_hold_beyond_what_is_used_is_not_kept_and_all_that_is_read_has_a_limit(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of some MB under many names took a hundred times as much."""
    left.end(1, failed(0)).rank(0, 0, x=[{}] * 25_000)
    for rank in range(1, 24):
        os.link(left.here / "exit.rank0.json", left.here / f"exit.rank{rank}.json")
    tracemalloc.start()
    try:
        found = left.evidence
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.ranks) == 24 and most < 32 << 20, most
    size = (left.here / "exit.rank0.json").stat().st_size
    monkeypatch.setattr(evidence, "_ALL_BYTES", 3 * size)
    found = left.evidence
    assert sorted(found.ranks) == [0, 1] and "exit.rank2.json was not read: there is too much" in found.notes


@pytest.mark.parametrize("name", ["/a\0b.py", "/a\ud800b.py", "a\udc80.py"])
def test_a_file_whose_name_no_file_can_have_is_no_library_s(left: Left, name: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "{name}", line 3, in load\nValueError: bad label'
    left.end(1, {**failed(1), "traceback": trace, "user_frames": []}, world_size=2)
    (left.dumps / "stack.rank0.txt").write_text(f'  File "{name}", line 3 in wait\n', errors="surrogatepass")
    verdict = left.verdict
    assert verdict.guilty == (1,) and "in load" in verdict.paragraph
    show.text([(left.evidence, verdict)]).encode()
    assert not in_library(name) and not named_in_library(name)


def test_files_that_a_record_names_are_not_looked_up(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may name whatever waits, or tells somebody that it was asked for: a mount that is gone, say."""
    looked, lstat = list[str](), os.lstat

    def lookup(path: Any, **more: Any) -> os.stat_result:
        looked.append(str(path))
        return lstat(path, **more)

    monkeypatch.setattr(os, "lstat", lookup)
    names = ["/net/gone/a.py", "/net/gone/lib64/b.py", "/x/site-packages/c.py"]
    frames = "".join(f'  File "{name}", line 3, in load\n' for name in names)
    left.end(1, {**failed(1), "traceback": f"Traceback (most recent call last):\n{frames}ValueError: bad label"}, world_size=2)
    assert left.verdict.guilty == (1,) and looked and not [path for path in looked if path.startswith(("/net", "/x"))]
    assert named_in_library(json.__file__) and named_in_library(explain.__code__.co_filename)
    assert not named_in_library(os.path.dirname(os.__file__) + "/../mine.py")
    assert in_library("/usr/lib/python3/dist-packages/torch/nn/__init__.py")  # below a venv with --system-site-packages
    assert named_in_library("/home/them/echelon/src/echelon/loop/engine.py")  # a checkout on the machine where the run was
    assert not named_in_library("/home/them/echelon/train.py") and not named_in_library("/home/them/echelon/__init__.py")


def test_an_end_that_cannot_be_read_is_told_from_the_ranks_own_records(left: Left) -> None:
    left.end(1, failed(1), padding="x" * (17 << 20)).rank(1, 1, **{k: failed(1)[k] for k in ("kind", "message", "traceback")})
    found = left.evidence
    assert found.exit_code is None and "exit.json is no record of an end" in found.notes
    assert left.verdict.guilty == (1,) and left.verdict.cause == "exception"


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "keys"), [(32, 5000), (16384, 40)])
def test_the_end_of_many_ranks_that_fail_with_long_texts_can_be_read(left: Left, ranks: int, keys: int) -> None:
    """As all do that lack the same keys of a state dict. The first is kept whole; of the others it is known who is a victim."""
    missing = "RuntimeError: Missing keys: " + ", ".join(f"layers.{n}.mlp.\u00e9xperts.down_proj.weight" for n in range(keys))
    frames = [f'File "/home/me/train{n}.py", line {n}, in load' for n in range(50)]
    long = Failure.from_json(failed(0, missing))
    failures = [replace(long, rank=r, time_ns=r, user_frames=frames) for r in range(ranks)]
    lost = replace(long, kind="RuntimeError", message=CLOSED, traceback=f"{long.traceback}\n\nRuntimeError: {CLOSED}\n")
    failures[ranks - 1] = replace(lost, rank=ranks - 1)
    seen_ = {rank: seen(where="train.py:7 in train_step", silent_s=600.0, waits_in="all_reduce #118") for rank in range(ranks)}
    write_exit(left.here / "exit.json", 1, failures, failures[0], seen=seen_, world_size=ranks)
    assert (left.here / "exit.json").stat().st_size < 13 << 20
    found = left.evidence
    assert found.exit_code == 1 and len(found.failures) == ranks and found.notes == ()
    assert found.failures[0].traceback == long.traceback and found.failures[0].message == long.message
    assert [rank for rank, failure in enumerate(found.failures) if failure.is_victim] == [ranks - 1]


# ---- properties ---------------------------------------------------------------------------------------------------------------

OPS = st.sampled_from([("all_reduce", 4), ("all_reduce", 8), ("broadcast", 4), ("all_gather", 2), ("barrier", 0)])
PROGRAM = st.lists(OPS, min_size=1, max_size=6)


def _flights(program: Sequence[tuple[str, int]], ranks: int, upto: Mapping[int, int]) -> dict[int, Any]:
    """Of ranks that repeat a program: each has called so many, and waits in the last, but who has called fewest."""
    least = min(upto.values())
    found = {}
    for rank in range(ranks):
        calls = [program[n % len(program)] for n in range(upto[rank])]
        entries = [
            entry(n + 1, op, [size], retired=not (n + 1 == upto[rank] and upto[rank] > least))
            for n, (op, size) in enumerate(calls)
        ]
        found[rank] = parse(record(*entries))
    return found


def _hung(flights: Mapping[int, Any], **more: Any) -> Evidence:
    return Evidence(len(flights), 0, {r: RankEvidence(r, flight=f, **more) for r, f in flights.items()}, 1, hang_after_s=9.0)


@given(PROGRAM, st.integers(2, 6), st.integers(1, 30), st.data())
def test_whoever_lacks_in_a_collective_is_named_and_only_they(program: Any, ranks: int, calls: int, data: Any) -> None:
    absent = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1))
    verdict = explain(_hung(_flights(program, ranks, {r: calls - (r in absent) for r in range(ranks)})))
    assert set(verdict.guilty) == absent and verdict.cause == "did not come"


@given(PROGRAM, st.integers(3, 6), st.integers(0, 30), st.data())
def test_whoever_calls_something_else_than_most_is_named(program: Any, ranks: int, calls: int, data: Any) -> None:
    odd = data.draw(st.integers(0, ranks - 1))
    due = program[calls % len(program)]
    other = data.draw(OPS.filter(lambda op: op != due))
    flights = {}
    for rank in range(ranks):
        made = [program[n % len(program)] for n in range(calls)] + [other if rank == odd else due]
        flights[rank] = parse(record(*(entry(n + 1, op, [size], retired=n < calls) for n, (op, size) in enumerate(made))))
    verdict = explain(_hung(flights))
    assert verdict.guilty == (odd,) and verdict.cause.startswith("mismatched")


@given(PROGRAM, st.integers(1, 6), st.integers(0, 30), st.sampled_from(list(Phase)))
def test_equal_ranks_are_never_accused(program: Any, ranks: int, calls: int, phase: Phase) -> None:
    flights = _flights(program, ranks, dict.fromkeys(range(ranks), calls))
    assert explain(_hung(flights, standing=RankProgress(3, phase))).guilty == ()


@given(st.lists(OPS, min_size=2, max_size=8), st.integers(2, 5))
def test_what_is_due_is_what_the_program_does_next(program: Any, times: int) -> None:
    calls = program * times
    trace = parse(record(*(entry(n + 1, op, [size]) for n, (op, size) in enumerate(calls)))).get("0")
    due = expected(trace, len(calls) + 1)
    assert due is None or due[0][0] == program[0][0] or calls.count(program[0]) > times  # a program that repeats itself within


# ---- what an enemy wrote ------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)


def _changed(value: Any, data: Any) -> Any:
    """A record with something in it replaced by anything."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: _changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(value[at], data), *value[at + 1 :]]
    return data.draw(JSON)


@pytest.mark.full
@settings(max_examples=150)
@given(data=st.data())
def test_no_record_makes_it_fail_or_show_more_than_text(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    left = Left(tmp_path_factory.mktemp("hostile") / "run")
    left.flight(0, entry(1), entry(2, retired=False)).flight(1, entry(1)).stack(1, ("a.py", 1, "f")).rank(1, 0)
    left.end(1, failed(0, f"RuntimeError: {TIMED_OUT}"), seen={"0": seen(), "1": seen()}, hang={"after_s": 1.0}, world_size=2)
    (left.path / "run.json").write_text('{"ranks": 2}')
    for path in sorted(left.path.rglob("*.json")):
        if data.draw(st.booleans()):
            path.write_text(json.dumps(_changed(json.loads(path.read_text()), data)))
    (left.dumps / "stack.rank1.txt").write_text(data.draw(st.text()), encoding="utf-8", errors="surrogatepass")
    evidence = left.evidence
    verdict = explain(evidence)
    assert all(0 <= rank < max(evidence.world_size, 1) for rank in verdict.guilty)
    shown = show.text([(evidence, verdict)])
    assert all(character.isprintable() or character == "\n" for character in shown.replace("\xad", "")) or shown.isascii()
    json.dumps(show.as_json([(evidence, verdict)]), allow_nan=False)


def test_hostile_files_are_left_out_and_nothing_is_read_through_a_link(left: Left, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(record(entry(1, "secret_operation", retired=False))))
    left.flight(0, entry(1), entry(2, "\x1b[2Jall_reduce\x07", retired=False, process_group=["0", "\x1b]0;x"])).end(
        1, failed(1, "Value\x1bError: \x1b[31mred\x00 \u202e"), world_size=9
    )
    (left.dumps / "flight.rank1.json").symlink_to(secret)
    os.mkfifo(left.dumps / "flight.rank2.json")
    with (left.dumps / "flight.rank3.json").open("wb") as file:
        file.truncate(1 << 30)
    (left.dumps / "flight.rank4.json").write_text('{"entries": ' + "[" * 500_000 + "]" * 500_000 + "}")
    (left.dumps / "flight.rank5.json").write_text(json.dumps(record(entry(-1), entry(1 << 70), entry(1, size=[-4, 1 << 80]))))
    (left.dumps / "flight.rank-6.json").write_text("{}")
    (left.dumps / "flight.rank99999999.json").write_text("{}")
    (left.dumps / "flight.rank7.json").mkdir()
    (left.dumps / "stack.rank8.txt").write_bytes(b'  File "' + b"\xff\x1b" * 4000 + b'", line 99999999999 in f\n' * 3)
    (left.here / "exit.rank1.json").symlink_to("/dev/zero")
    evidence = left.evidence
    text = show.text([(evidence, explain(evidence))])
    assert evidence.world_size == 9 and set(evidence.flights) == {0, 5} and "secret" not in text
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert sum("flight.rank" in note for note in evidence.notes) >= 4


def test_who_left_a_record_that_cannot_be_read_is_not_accused_of_having_called_nothing(left: Left) -> None:
    left.flight(0, entry(1), entry(2, retired=False)).end(1, hang={"after_s": 9.0}, world_size=2, seen={"1": seen(answers=True)})
    assert left.verdict.guilty == (1,)
    (left.dumps / "flight.rank1.json").write_text("{")
    assert left.verdict.guilty == ()


def test_folders_that_are_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = Left(tmp_path / "elsewhere").end(1, failed(0)).flight(0, entry(1))
    run = tmp_path / "run"
    (run / "attempts").mkdir(parents=True)
    (run / "attempts/000").symlink_to(elsewhere.here)
    (run / "dumps").symlink_to(elsewhere.dumps.parent)
    assert Evidence.of(run, 0).ranks == {}


def test_a_record_that_claims_a_billion_ranks_costs_nothing(left: Left) -> None:
    left.end(1, failed(1 << 40), world_size=1 << 30)
    assert left.evidence.world_size <= 1 << 20 and left.verdict is not None


def test_many_ranks_are_explained_in_few_lines(left: Left) -> None:
    ranks = {}
    for rank in range(4096):
        flight = parse(record(entry(1), *([] if rank == 77 else [entry(2, retired=False)])))
        ranks[rank] = RankEvidence(rank, flight=flight, stack=main_thread(f'  File "/me/{rank % 3}.py", line 1 in f'))
    verdict = explain(Evidence(4096, 0, ranks, 1, hang_after_s=5.0))
    assert verdict.guilty == (77,) and len(verdict.paragraph) < 1000 and len(verdict.seen) < 10
    assert len(waits({r: e.flight for r, e in ranks.items() if e.flight is not None}, range(4096))) == 1


# ---- the command --------------------------------------------------------------------------------------------------------------


def test_the_command_tells_each_attempt_the_last_in_full(tmp_path: Path, echelon_command: Command) -> None:
    path = tmp_path / "runs/x"
    Left(path, 0).end(137, killed(1), world_size=2)
    Left(path, 1).end(1, failed(0), world_size=2)
    done = echelon_command("explain", "runs/x")
    assert done.returncode == 0 and done.stdout.splitlines() == [
        "attempt 0: rank 1 was killed by SIGKILL.",
        "attempt 1: Rank 0 raised ValueError at train.py:41 in load: bad label.",
        "  rank 0 failed with ValueError",
    ], done
    told = json.loads(echelon_command("explain", "runs/x", "--json").stdout)["attempts"]
    assert [(each["attempt"], each["guilty"], each["cause"]) for each in told] == [(0, [1], "killed"), (1, [0], "exception")]
    assert echelon_command("explain", "runs/x", "--attempt", "0").stdout.startswith("Rank 1 was killed by SIGKILL.")


def test_the_command_ends_with_1_if_nothing_tells_and_with_2_if_there_is_no_run(tmp_path: Path, echelon_command: Command) -> None:
    Left(tmp_path / "runs/x").end(1, failed(0, f"RuntimeError: {CLOSED}"), world_size=2)
    done = echelon_command("explain", "runs/x")
    assert done.returncode == 1 and "No rank ended before it that would explain this" in done.stdout
    for words, says in (
        (["runs"], "has no attempts"),
        (["none"], "was not found"),
        (["runs/x", "--attempt", "5"], "0 to 0"),
    ):
        refused = echelon_command("explain", *words)
        assert refused.returncode == 2 and says in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(("ranks", "phase"), [(2, Phase.STEP), (2, Phase.DATA), (1, Phase.STEP)])
def test_ranks_that_all_stand_in_code_of_their_own_are_told_with_their_line(left: Left, ranks: int, phase: Phase) -> None:
    """None of them waits for another, so that nothing is said of who was waited for."""
    left.end(124, hang={"after_s": 60.0}, world_size=ranks, seen={str(r): seen(3, phase, answers=True) for r in range(ranks)})
    inner = [("/x/site-packages/torch/utils/data/dataloader.py", 9, "_try_get_data")] if phase is Phase.DATA else []
    for rank in range(ranks):
        left.stack(rank, *inner, ("/home/me/train.py", 41, "load"))
    verdict = left.verdict
    assert verdict.guilty == tuple(range(ranks)) and verdict.cause == ("stood still" if phase is Phase.STEP else "slow data")
    assert "at train.py:41 in load." in verdict.paragraph
    assert ("None of them waited for another." in verdict.paragraph) is (ranks > 1)
    assert ("num_workers=0" in verdict.paragraph) is (phase is Phase.DATA)


def test_where_a_rank_may_wait_in_c_nobody_is_said_to_stand_by_itself(left: Left) -> None:
    left.end(124, hang={"after_s": 60.0}, world_size=2, seen={str(r): seen(3, Phase.STEP, answers=True) for r in range(2)})
    for rank in range(2):
        left.stack(rank, ("/x/site-packages/torch/autograd/graph.py", 9, "backward"), ("/home/me/train.py", 41, "main"))
    assert left.verdict.guilty == ()


@pytest.mark.parametrize("first", [(10, Phase.BETWEEN), (9, Phase.STEP)])
def test_of_two_whose_call_was_refused_the_one_behind_is_not_named(left: Left, first: tuple[int, Phase]) -> None:
    """The other evaluates by itself, or has left out a step: positions do not tell which of the two is wrong."""
    said = "killed by SIGABRT\n[enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 4."
    places = {"0": seen(*first), "1": {**seen(10, Phase.BETWEEN), "at": [10, int(Phase.BETWEEN), 10, 22]}}
    left.end(
        134, killed(1, "SIGABRT", exit_code=134, message=said), failed(0, f"RuntimeError: {CLOSED}"), seen=places, world_size=2
    )
    assert left.verdict.guilty != (0,) and left.verdict.cause == "mismatched shape"


def test_what_this_user_may_not_read_is_not_called_damaged_or_absent(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run = RunDir.create(folder, "a")
        write_json(run.exit_json, {"exit_code": 0})
        os.chmod(folder, 0o755)
        run.exit_json.chmod(0)
        with _as_a_user():
            main(["explain", str(run.path)])
            assert "exit.json may not be read by this user" in capsys.readouterr().out
            assert main(["report", str(run.path)]) == 1 and "Permission denied" in capsys.readouterr().err
        os.chmod(folder, 0)
        with _as_a_user():
            assert main(["explain", str(run.path)]) == 2 and "cannot be read by this user" in capsys.readouterr().err
        os.chmod(folder, 0o755)


@contextlib.contextmanager
def _as_a_user() -> Iterator[None]:
    """root may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
