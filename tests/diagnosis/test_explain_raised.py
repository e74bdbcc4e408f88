"""A rank that has raised, and then waits where nobody comes: in `finally`, `except`, `__exit__` or an exit function."""

from __future__ import annotations

import atexit
import datetime
import os
import queue
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.diagnosis import Evidence, Verdict, explain
from echelon.diagnosis.failure import Failure, render
from echelon.diagnosis.stacks import last_traceback, logged_error
from echelon.launcher.functions.launch import launch
from echelon.launcher.local import responder
from echelon.launcher.local.raised import describe
from tests.kit.left_records import CLOSED, TIMED_OUT, Left, entry, failed, killed, seen


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path / "run")


TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"


def handles(text: str = "KeyError: 'label'", line: int = 12) -> dict[str, Any]:
    """An exception that a rank was handling as it was asked."""
    said = failed(0, text)
    frame = f'File "/home/me/train.py", line {line}, in load'
    trace = f"Traceback (most recent call last):\n  {frame}\n    x()\n{text}\n"
    return {"kind": said["kind"], "message": said["message"], "user_frames": [frame], "traceback": trace}


def differ(left: Left, raised: dict[int, Any], world: int = 2) -> Left:
    """All wait; the first rank in a barrier, the others in the all-reduce that was due."""
    ranks = {str(rank): seen(answers=True, raised=raised.get(rank)) for rank in range(world)}
    left.end(124, seen=ranks, hang={"after_s": 600.0}, world_size=world)
    for rank in range(world):
        last = entry(5, "barrier", retired=False) if rank in (raised or {0}) else entry(5, retired=False)
        left.flight(rank, *map(entry, range(1, 5)), last)
        left.stack(rank, (TORCH, 3, "barrier" if rank in (raised or {0}) else "all_reduce"), ("/home/me/train.py", 41, "main"))
    return left


def test_one_that_waits_in_a_call_of_its_own_while_it_handles_an_exception_has_raised_it(left: Left) -> None:
    verdict = differ(left, {1: handles()}).verdict
    assert verdict.guilty == (1,) and verdict.cause == "exception"
    assert verdict.paragraph == (
        "Rank 1 raised KeyError at train.py:12 in load and then waited in barrier #5 while rank 0 waited in all_reduce #5: "
        "'label'. It made that call while handling its error, in `except`, `finally` or `__exit__`: let the error end the "
        "rank, and the others end with it."
    )


def test_without_an_exception_of_two_nobody_knows(left: Left) -> None:
    assert differ(left, {}).verdict.guilty == (0, 1)


def test_several_that_have_raised_the_same_are_guilty_together_also_if_they_are_most(left: Left) -> None:
    verdict = differ(left, {rank: handles() for rank in (1, 2, 3)}, 4).verdict
    assert verdict.guilty == (1, 2, 3) and verdict.headline.startswith("ranks 1, 2, 3 raised KeyError at train.py:12")


def test_what_all_ranks_are_handling_tells_nothing(left: Left) -> None:
    """As where a program trains in an `except ImportError`."""
    ranks = {str(rank): seen(answers=True, raised=handles("ImportError: no apex", 3)) for rank in range(4)}
    left.end(124, seen=ranks, hang={"after_s": 600.0}, world_size=4)
    for rank in range(4):
        left.flight(rank, *map(entry, range(1, 5)), *([entry(5, "barrier" if rank == 2 else "all_reduce", retired=False)]))
    verdict = left.verdict
    assert verdict.guilty == (2,) and verdict.cause == "mismatched order"


def test_who_handles_an_exception_while_another_rank_is_stopped_or_does_not_come_is_not_accused(left: Left) -> None:
    ranks = {"0": seen(answers=True, raised=handles()), "1": seen(stopped=True), "2": seen(answers=True)}
    left.end(124, seen=ranks, hang={"after_s": 600.0}, world_size=3)
    for rank in (0, 2):
        left.flight(rank, *map(entry, range(1, 5)), entry(5, retired=False))
    assert (left.verdict.guilty, left.verdict.cause) == ((1,), "stopped")
    ranks["1"] = seen(answers=True)
    left.end(124, seen=ranks, hang={"after_s": 600.0}, world_size=3).flight(1, *map(entry, range(1, 5)))
    assert (left.verdict.guilty, left.verdict.cause) == ((1,), "did not come")
    assert "rank 0 was handling KeyError at train.py:12 in load" in left.verdict.seen


def test_a_rank_that_does_not_come_because_it_handles_an_exception_has_raised_it(left: Left) -> None:
    left.end(124, seen={"0": seen(answers=True), "1": seen(answers=True, raised=handles())}, hang={"after_s": 9.0}, world_size=2)
    left.flight(0, *map(entry, range(1, 5)), entry(5, retired=False)).flight(1, *map(entry, range(1, 5)))
    left.stack(1, ("/x/lib/python3.11/threading.py", 3, "join"), ("/home/me/train.py", 41, "main"))
    assert left.verdict.guilty == (1,) and left.verdict.cause == "exception"
    assert left.verdict.headline == "rank 1 raised KeyError at train.py:12 in load and then stood at train.py:41 in main"


CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(("end", "text"), [(CLOSED, TIMED_OUT), (TIMED_OUT, CLOSED)])
def test_the_error_before_the_one_that_lost_the_others_is_the_cause(left: Left, end: str, text: str) -> None:
    mine = failed(1, f"RuntimeError: {end}", 1.0)
    mine["traceback"] = handles("data.labels.BadLabel: no 7")["traceback"] + CONTEXT + mine["traceback"]
    other = failed(0, f"RuntimeError: {text}")
    other["traceback"] = other["traceback"].replace("    x()\n", f'    x()\n  File "{TORCH}", line 3, in all_reduce\n    x()\n')
    left.end(1, other, mine, world_size=2)
    assert left.verdict.guilty == (1,) and left.verdict.headline.startswith("rank 1 raised BadLabel at train.py:12 in load and")


def test_an_error_that_was_raised_because_another_rank_was_lost_is_no_cause(left: Left) -> None:
    lost = failed(1, f"RuntimeError: {CLOSED}")["traceback"]
    for rank in (0, 1):
        both = failed(rank, f"RuntimeError: {CLOSED}")
        both["traceback"] = lost + CONTEXT + handles("KeyError: 'best'")["traceback"] + CONTEXT + lost
        left.end(1, *([both] if rank else [failed(0, f"RuntimeError: {CLOSED}"), both]), world_size=2)
    assert left.verdict.guilty == () and left.verdict.cause == "unknown"


def test_words_that_hold_a_traceback_lend_no_line_to_the_users_own_error(left: Left) -> None:
    inner = 'Traceback (most recent call last):\n  File "/home/me/convert.py", line 3, in <module>\n    x\nOSError: no such'
    said = failed(1, f"RuntimeError: the converter failed:\n{inner}")
    left.end(1, said, world_size=2)
    assert left.verdict.headline == "rank 1 raised RuntimeError at train.py:41 in load"
    passed_on = {
        **said,
        "traceback": said["traceback"].replace("/home/me/train.py", "/x/site-packages/torch/multiprocessing/spawn.py"),
    }
    left.end(1, passed_on, world_size=2)
    assert left.verdict.headline == "rank 1 raised RuntimeError at convert.py:3"


@pytest.mark.parametrize("error", [CLOSED, TIMED_OUT])
def test_a_lost_peer_that_a_rank_is_handling_accuses_it_of_nothing(left: Left, error: str) -> None:
    """As where it is asked while it writes down how it failed."""
    lost = {**handles(f"RuntimeError: {error}"), "message": error}
    assert differ(left, {1: lost}).verdict.guilty == (0, 1)
    lost["traceback"] = handles()["traceback"] + CONTEXT + lost["traceback"]
    assert differ(left, {1: lost}).verdict.headline.startswith("rank 1 raised KeyError at train.py:12 in load")


UNSENT = """Traceback (most recent call last):
  File "/x/lib/python3.11/multiprocessing/queues.py", line 244, in _feed
    obj = _ForkingPickler.dumps(obj)
  File "/x/lib/python3.11/multiprocessing/reduction.py", line 51, in dumps
    cls(buf, protocol).dump(obj)
AttributeError: Can't pickle local object 'D.__getitem__.<locals>.<lambda>'
"""


def test_a_batch_that_a_data_worker_could_not_send_is_told_of_the_rank_that_waits_for_it(left: Left) -> None:
    left.end(124, seen={"0": seen(answers=True), "1": seen(answers=True)}, hang={"after_s": 9.0}, world_size=2)
    left.flight(0, *map(entry, range(1, 5)), entry(5, retired=False)).flight(1, *map(entry, range(1, 5)))
    left.stack(1, ("/x/site-packages/torch/utils/data/dataloader.py", 3, "_try_get_data"), ("/home/me/train.py", 41, "main"))
    assert left.verdict.cause == "slow data"
    (left.here / "rank1.log").write_text("hello\n" + UNSENT)
    assert left.verdict.guilty == (1,) and left.verdict.cause == "data worker"
    assert "A data worker of rank 1 could not send a batch: AttributeError: Can't pickle" in left.verdict.paragraph
    (left.here / "rank1.log").write_text(UNSENT + UNSENT.replace("multiprocessing/queues.py", "me/train.py"))
    assert left.verdict.cause == "slow data"


def test_one_rank_in_a_barrier_that_is_in_no_record_has_left_the_order_of_calls(left: Left) -> None:
    failure = failed(0, "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms")
    failure["traceback"] = failure["traceback"].replace(
        "    x()\n", f'    x()\n  File "{TORCH}", line 3, in monitored_barrier\n    x()\n'
    )
    left.end(1, failure, seen={"1": seen(answers=True)}, world_size=2)
    left.flight(0, *map(entry, range(1, 5))).flight(1, *map(entry, range(1, 5)), entry(5, retired=False))
    left.stack(1, (TORCH, 3, "all_reduce"), ("/home/me/train.py", 42, "main"))
    assert left.verdict.guilty == (0,) and left.verdict.cause == "mismatched order"
    assert (
        "Rank 0 was in monitored_barrier at train.py:41 in load. All ranks must make that call, or none."
        in left.verdict.paragraph
    )


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("python: gather.cpp:12: gather: Assertion `index < size' failed.", "Assertion `index < size' failed"),
        ("double free or corruption (out)", "had damaged the memory"),
        ("*** stack smashing detected ***: terminated", "had damaged the memory"),
    ],
)
def test_what_the_c_library_says_as_it_aborts_is_told(left: Left, log: str, says: str) -> None:
    (left.here / "rank1.log").write_text(f"step 7\n{log}\nFatal Python error: Aborted\n\n")
    left.end(134, killed(1, "SIGABRT"), world_size=2)
    assert left.verdict.guilty == (1,) and left.verdict.cause == "crash" and says in left.verdict.paragraph


def test_what_a_message_announces_in_its_first_line_is_told_too(left: Left) -> None:
    left.end(1, failed(1, "RuntimeError: the converter failed:\n  reading a.png\nOSError: no such file"), world_size=2)
    assert left.verdict.paragraph.endswith("the converter failed: OSError: no such file.")


def test_a_broadcast_from_two_roots_is_the_fault_and_not_what_its_receivers_did_next(left: Left) -> None:
    """As `broadcast_object_list` does with another `src` on one rank: some are given a wrong size, and go on with that."""
    left.end(124, seen={str(rank): seen(answers=True) for rank in range(4)}, hang={"after_s": 9.0}, world_size=4)
    for rank in range(4):
        after = [entry(5, "broadcast", (22 if rank == 2 else 4,), "Byte", retired=False)] if rank > 1 else []
        left.flight(rank, *map(entry, range(1, 4)), entry(4, "broadcast", (1,), "Long", retired=rank > 1), *after)
        left.stack(rank, (TORCH, 3, "broadcast_object_list"), ("/home/me/train.py", 41, "main"))
    assert left.verdict.guilty == (0, 1) and left.verdict.cause == "mismatched arguments"
    assert "broadcast #4" in left.verdict.headline and "`src` or `dst`" in left.verdict.paragraph


def test_where_the_other_threads_of_a_rank_stand_is_told_if_it_stands_too(left: Left) -> None:
    left.end(124, seen={"0": seen(answers=True), "1": seen(answers=True)}, hang={"after_s": 9.0}, world_size=2)
    left.flight(0, *map(entry, range(1, 5)), entry(5, retired=False)).flight(1, *map(entry, range(1, 5)))
    queue, own = '  File "/x/lib/python3.11/queue.py", line 1 in put', '  File "/home/me/io.py", line 7 in write'
    other = f"Thread 0x1 (most recent call first):\n{queue}\n{own}\n\n"
    main = 'Thread main (most recent call first):\n  File "/home/me/train.py", line 41 in main\n'
    (left.dumps / "stack.rank1.txt").write_text(other + other + main)
    assert "Rank 1 was at train.py:41 in main. Other threads of rank 1 stood at io.py:7 in write." in left.verdict.paragraph


@pytest.mark.parametrize(
    ("failure", "cause", "says"),
    [
        (failed(1, "KeyboardInterrupt"), "interrupted", "It was sent SIGINT"),
        (failed(1, "BdbQuit"), "debugger", "a rank has no terminal"),
        (failed(1, "EOFError: EOF when reading a line"), "debugger", "or input(), but a rank has no terminal"),
        (failed(1, "RuntimeError: aten.lerp_.Scalar got mixed torch.Tensor and DTensor"), "whole and split tensors", "ema=0.999"),
        (failed(1, "exit: exit code 3", exit_code=3, traceback="", user_frames=[]), "exit", "It called os._exit"),
    ],
)
def test_how_a_rank_may_have_ended_without_an_error_of_its_own_is_said(
    left: Left, failure: dict[str, Any], cause: str, says: str
) -> None:
    left.end(failure["exit_code"], failure, world_size=2)
    assert left.verdict.guilty == (1,) and left.verdict.cause == cause and says in left.verdict.paragraph


def test_a_group_that_one_rank_makes_alone_is_no_slowness(left: Left) -> None:
    left.end(124, seen={"0": seen(answers=True), "1": seen(answers=True)}, hang={"after_s": 9.0}, world_size=2)
    left.flight(0, *map(entry, range(1, 5))).flight(1, *map(entry, range(1, 5)), entry(5, retired=False))
    left.stack(0, (TORCH, 3, "barrier"), (TORCH, 4, "new_group"), ("/home/me/train.py", 41, "main"))
    assert left.verdict.guilty == (0,) and left.verdict.cause == "mismatched order"
    assert "Rank 0 was in new_group at train.py:41 in main. All ranks must make that call" in left.verdict.paragraph


@pytest.mark.parametrize(("others", "cause"), [("recv", "mismatched order"), ("send", "unknown")])
def test_ranks_that_all_wait_to_receive(left: Left, others: str, cause: str) -> None:
    left.end(124, seen={str(rank): seen(answers=True) for rank in range(3)}, hang={"after_s": 9.0}, world_size=3)
    for rank in range(3):
        left.stack(rank, (TORCH, 3, "recv" if rank else others), ("/home/me/train.py", 41, "main"))
    assert left.verdict.cause == cause and (left.verdict.guilty == (0, 1, 2)) == (cause != "unknown")


def test_a_stack_that_was_used_up_is_told_from_other_crashes(left: Left) -> None:
    for frames, says in ((99, "call one another without an end"), (30, "memory that is not its own")):
        log = "".join('  File "/home/me/train.py", line 4 in __repr__\n' for _ in range(frames))
        crash = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent):\n{log}"
        (left.here / "rank1.log").write_text(crash)
        left.end(139, killed(1, "SIGSEGV"), world_size=2)
        assert left.verdict.cause == "crash" and says in left.verdict.paragraph


def test_of_a_group_of_exceptions_the_first_is_told_with_the_way_to_it(left: Left) -> None:
    try:
        try:
            _bad_label()
        except LookupError as error:
            raise ExceptionGroup("in a TaskGroup", [ExceptionGroup("inner", [error])]) from None
    except ExceptionGroup as group:
        said = describe(group)
    assert (said["kind"], said["message"]) == ("LookupError", "no label 7") and "in a TaskGroup" in said["traceback"]
    assert "in test_of_a_group" in said["user_frames"][0] and "in _bad_label" in said["user_frames"][-1]
    left.end(1, failed(1, **{**said, "time": 1e9}), world_size=2)
    assert left.verdict.headline.startswith("rank 1 raised LookupError at ") and "in _bad_label" in left.verdict.headline


def test_a_line_of_code_that_speaks_of_a_traceback_begins_none(left: Left) -> None:
    said = failed(1)
    said["traceback"] = said["traceback"].replace("    x()", '    raise ValueError("Traceback (most recent call last):")')
    left.end(1, said, world_size=2)
    assert left.verdict.headline == "rank 1 raised ValueError at train.py:41 in load"


def test_what_the_log_of_a_named_rank_tells_of_is_told_besides(left: Left) -> None:
    """As of a program that catches an error, logs it and takes the next batch."""
    differ(left, {})
    (left.here / "rank1.log").write_text("step 3\n" + handles("ValueError: bad image", 9)["traceback"] + "skipping it\nstep 4\n")
    assert left.verdict.guilty == (0, 1) and left.verdict.cause == "mismatched order"
    assert "the log of rank 1 tells of ValueError: bad image at train.py:9 in load" in left.verdict.seen


def test_the_last_traceback_of_a_log_comes_with_those_before_it_in_its_chain() -> None:
    first, second = handles("KeyError: 1", 3)["traceback"], handles("ValueError: 2", 4)["traceback"]
    assert last_traceback(f"a\n{second}b\n{first}{CONTEXT}{second}") == f"{first}{CONTEXT}{second}"
    assert last_traceback(f"{first}b\n{second}") == second and last_traceback("nothing\n") == logged_error("") == ""
    assert logged_error(f"{first}{CONTEXT}{second}and so on\n") == "ValueError: 2 at train.py:4 in load"


# ---- with real ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def _all_together() -> Iterator[None]:
    try:
        yield
    finally:
        dist.barrier()


def _bad_label() -> None:
    raise LookupError("no label 7")


def _raises(how: str) -> None:
    ech.init_from_env(timeout=datetime.timedelta(seconds=2 if how == "gives up" else 60))
    for _ in range(8):
        dist.all_reduce(torch.ones(4))
    here = dist.get_rank() == 1
    if here and how == "files":
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
        assert most[1] > 90
        kept = [open("/dev/null") for _ in range(90)]
        assert kept
    if how == "prints":
        try:
            if here:
                _bad_label()
            dist.all_reduce(torch.ones(4))
        except Exception:
            traceback.print_exc()
            os._exit(3)
    if here and how == "atexit":
        atexit.register(dist.barrier)
        _bad_label()
    if how == "with":
        with _all_together():
            if here:
                _bad_label()
            dist.all_reduce(torch.ones(4))
    try:
        if here:
            _bad_label()
        dist.all_reduce(torch.ones(4))
    finally:
        dist.barrier()


def told(tmp_path: Path) -> Verdict:
    (run,) = tmp_path.iterdir()
    return explain(Evidence.of(run, 0))


@pytest.mark.full
@pytest.mark.parametrize("how", ["with", "finally", "atexit", "gives up"])
def test_a_rank_that_raised_and_hangs_is_named_with_its_error_and_line(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_HANG_TIMEOUT", "2" if how != "gives up" else "30")
    with pytest.raises(RankFailedError) as caught:
        launch(_raises, ranks=2, args=(how,), run_dir=tmp_path, timeout_s=120)
    verdict = told(tmp_path)
    assert verdict.guilty == (1,) and verdict.cause == "exception", verdict
    assert verdict.headline.startswith("rank 1 raised LookupError at ") and "in _bad_label" in verdict.headline
    assert ": no label 7" in verdict.paragraph and "no label 7" in str(caught.value)


def test_of_ranks_that_print_their_errors_and_leave_by_themselves_the_first_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError):
        launch(_raises, ranks=2, args=("prints",), run_dir=tmp_path, timeout_s=120)
    verdict = told(tmp_path)
    assert (
        verdict.guilty == (1,) and verdict.cause == "exit" and "its log tells of LookupError: no label 7 at" in verdict.paragraph
    )


@pytest.mark.full
def test_a_rank_that_may_open_no_more_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="Too many open files"):
        launch(_raises, ranks=2, args=("files",), run_dir=tmp_path, timeout_s=120)
    assert told(tmp_path).cause == "too many open files"


def test_the_error_in_whose_except_or_finally_it_was_raised_is_told_with_its_line(left: Left) -> None:
    try:
        try:
            _bad_label()
        except LookupError as error:
            raise RuntimeError("could not load") from error
    except RuntimeError as error:
        said = describe(error)
    left.end(1, failed(1, **{**said, "time": 1e9}), world_size=2)
    verdict = left.verdict
    assert verdict.guilty == (1,) and verdict.headline.startswith("rank 1 raised RuntimeError at ")
    assert ": could not load. It followed LookupError: no label 7 at " in verdict.paragraph
    assert verdict.paragraph.endswith(" in _bad_label.")
    left.end(1, failed(1), world_size=2)
    assert "It followed" not in left.verdict.paragraph


def test_of_a_group_of_several_exceptions_it_is_told_that_there_are_more(left: Left) -> None:
    try:
        raise ExceptionGroup("shards", [ValueError("shard 3"), KeyError("shard 4")])
    except ExceptionGroup as group:
        said = describe(group)
    assert (said["kind"], said["message"]) == ("ValueError", "shard 3 (the first of 2 errors in ExceptionGroup: shards)")
    left.end(1, failed(1, **{**said, "time": 1e9}), world_size=2)
    assert left.verdict.paragraph.endswith("shard 3 (the first of 2 errors in ExceptionGroup: shards).")


def test_what_a_library_handles_inside_a_call_is_not_what_a_rank_has_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir(exist_ok=True)`, with which a failed rank leaves its record, handles a FileExistsError: it was told as the cause."""
    seen: list[Any] = []
    monkeypatch.setattr(Path, "is_dir", lambda self: seen.append(responder.handled()) or True)
    try:
        raise ValueError("mine")
    except ValueError:
        tmp_path.mkdir(exist_ok=True)
    assert [each["message"] for each in seen] == ["mine"]


def test_an_error_without_a_message_that_a_rank_handles_is_told_by_its_kind() -> None:
    """As queue.Empty is: the launcher's question ended the thread that answers it."""
    try:
        raise queue.Empty
    except queue.Empty:
        said = responder.handled()
    assert said is not None and said["traceback"].endswith("_queue.Empty")


def test_the_last_words_of_a_rank_that_ended_itself_are_told(left: Left) -> None:
    (left.here / "rank1.log").write_text("step 5\nno licence for cuSomething")
    left.end(3, failed(1, "exit: exit code 3", exit_code=3, traceback="", user_frames=[]), world_size=2)
    assert (
        "and without an exception: its log ends with 'no licence for cuSomething'. It called os._exit" in left.verdict.paragraph
    )


def test_a_recursion_does_not_fill_the_terminal() -> None:
    frames = [f'File "train.py", line {number}, in f' for number in range(100)]
    shown = render(Failure(0, 1, 0, "RecursionError", "maximum recursion depth exceeded", frames), 1).splitlines()
    assert len(shown) == 23 and shown[11] == "  ... 80 more frames of the script, in the log" and "line 99," in shown[21]


def test_frames_of_an_errors_cause_are_not_those_of_libraries() -> None:
    trace = "Traceback (most recent call last):"
    cause = [trace, '  File "train.py", line 3, in f', "KeyError: 'a'", "", "The above exception was the direct cause of ...", ""]
    whole = "\n".join([*cause, trace, '  File "train.py", line 5, in <module>', "RuntimeError: outer"])
    shown = render(Failure(0, 1, 0, "RuntimeError", "outer", ['File "train.py", line 5, in <module>'], traceback=whole), 1)
    assert "in libraries" not in shown


@pytest.mark.parametrize("said", ["train.py: error: the following arguments are required: --lr", "Error: No such option: --lr"])
def test_what_a_parser_of_arguments_said_is_told(left: Left, said: str) -> None:
    (left.here / "rank0.log").write_text(f"usage: train.py [-h] --lr LR\n{said}\n")
    left.end(2, failed(0, "SystemExit: exit code 2", exit_code=2), world_size=1)
    verdict = left.verdict
    assert verdict.guilty == (0,) and verdict.cause == "exit"
    assert verdict.paragraph == f"Rank 0 ended itself with exit code 2 at train.py:41 in load: its log ends with {said!r}."
