"""A rank's responder: a thread that answers the launcher, even while the program waits in a collective.

It blocks on a socket, so a step costs nothing more. It answers as long as the interpreter runs. It does not answer in a stopped
process, or while C code holds the GIL; then that silence is what is known of the rank.

The launcher sends one byte per question and reads one line of JSON: `Answer`. Answers are trusted no more than files.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.common.files import parse_object
from echelon.contracts.records import raised_record
from echelon.launcher.local.flight_recorder import called, write_flight
from echelon.launcher.local.raised import describe, user_frames

__all__ = ["FLIGHT", "HOW_FAR", "Answer", "Responders", "begin", "handled"]

HOW_FAR, FLIGHT = b"h", b"f"
_LONGEST = 1 << 20
_MOST_HANDLED = 10
# Of the main thread; below, of all threads of a rank.
_MOST_FRAMES, _MOST_TEXT = 30, 4000
_MOST_OF_EACH, _MOST_STACKS = 100, 200_000
_MOST_SAID = 3000  # of an exception's text, and of its traceback


@dataclass(frozen=True)
class Answer:
    """A rank's answer.

    Args:
        called: number of collectives begun plus ended.
        pending: one has begun and not ended.
        main: the stack of its main thread, in faulthandler's format. faulthandler itself reads frames while threads change them,
            and has ended healthy programs with SIGSEGV: it is used only for ranks that do not answer.
        stacks: of all its threads, the main one last; empty if not asked for.
        raised: the exception that its main thread is handling, since a rank that waits in `finally` has not printed it. None if
            there is none, or it was not asked for.
    """

    called: int = 0
    pending: bool = False
    main: str = ""
    stacks: str = ""
    raised: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, line: bytes) -> Answer | None:
        fields = {"main": "", "stacks": "", **parsed} if (parsed := parse_object(line)) is not None else None
        kinds = {"called": int, "pending": bool, "main": str, "stacks": str}
        if fields is None or any(type(fields.get(name)) is not kind for name, kind in kinds.items()):
            return None
        main, stacks = fields["main"][:_MOST_TEXT], fields["stacks"][-_MOST_STACKS:]
        return cls(fields["called"], fields["pending"], main, stacks, raised_record(fields.get("raised")))


def begin(descriptor: int, flight: str | None) -> None:
    """Answer questions on this socket from now on, in a thread that ends with the process.

    Args:
        flight: where to write the flight record on request.
    """
    threading.Thread(target=_answer, args=(descriptor, flight), name="echelon-responder", daemon=True).start()


def _answer(descriptor: int, flight: str | None) -> None:
    # Signals belong to the program: one delivered here would not wake its main thread. Signals of this thread's own faults stay.
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
    owner = os.getpid()
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as questions:
        while os.getpid() == owner and (asked := questions.recv(1)):
            stacks, raised = "", None
            if asked == FLIGHT:
                if flight:
                    write_flight(Path(flight))
                stacks, raised = _all_stacks(), handled()
            answer = Answer(*called(), _main_stack(), stacks, raised)
            questions.sendall(json.dumps(asdict(answer)).encode() + b"\n")


def handled() -> dict[str, Any] | None:
    """The exception that the main thread is handling in `except`, `finally` or `__exit__`, also in an outer call."""
    raised: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = raised[1] if isinstance(raised, tuple) else raised  # before Python 3.12 in the format of `sys.exc_info`
    if not isinstance(error, BaseException):
        return None
    record = describe(next((each for each in _and_further_out(error) if user_frames(each.__traceback__)), error))
    trace, raised, _ = record["traceback"].rpartition(record["message"] or "\n")
    if not raised:  # the traceback was cut
        frames = [f"  {frame}" for frame in record["user_frames"]]
        trace = "\n".join(["Traceback (most recent call last):", *frames, f"{record['kind']}: "])
    message = record["message"][:_MOST_SAID]
    return {**record, "message": message, "traceback": trace[-_MOST_SAID:] + message}


def _and_further_out(error: BaseException) -> Iterator[BaseException]:
    """The error and its contexts, outwards. A library may handle one inside a call, as `mkdir(exist_ok=True)` does."""
    for _ in range(_MOST_HANDLED):
        yield error
        if error.__context__ is None:
            return
        error = error.__context__


def _main_stack() -> str:
    """The innermost frames of the main thread, which cannot run meanwhile: this thread has the GIL."""
    return _frames(sys._current_frames().get(threading.main_thread().ident or 0), _MOST_FRAMES)[:_MOST_TEXT]


def _all_stacks() -> str:
    """The stacks of all threads but this one, the main one last."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = frames.pop(threading.main_thread().ident or 0, None)
    parts, left = [], _MOST_STACKS // 2
    for ident, frame in frames.items():
        part = f"Thread {ident:#018x} (most recent call first):\n{_frames(frame, _MOST_OF_EACH)}\n"
        left -= len(part)
        if left < 0:
            break
        parts.append(part)
    last = f"Thread main (most recent call first):\n{_frames(main, _MOST_OF_EACH)}"
    return "\n".join([*parts, last[: _MOST_STACKS // 2]])


def _frames(frame: FrameType | None, most: int) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < most:
        code = frame.f_code
        file, name = (text[:200].encode("unicode_escape").decode() for text in (code.co_filename[-200:], code.co_name))
        lines.append(f'  File "{file}", line {frame.f_lineno} in {name}')
        frame = frame.f_back
    return "\n".join(lines)


class Responders:
    """The launcher's ends of one attempt's responders. A rank that did not answer once is not waited for again."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._owed: dict[int, int] = {}
        self._heard: dict[int, bytes] = {}
        self._lock = threading.RLock()  # the thread that looks for silent nodes asks as well

    def make(self, rank: int) -> socket.socket:
        """Make a socket pair and return the rank's end, which the caller closes once the rank has it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._sockets[rank], self._owed[rank], self._heard[rank] = ours, 0, b""
        return theirs

    def ask(self, ranks: Iterable[int], question: bytes, wait_s: float) -> dict[int, Answer]:
        """Ask all ranks at once; returns the answers that came within `wait_s`."""
        with self._lock:
            return self._ask(ranks, question, wait_s)

    def _ask(self, ranks: Iterable[int], question: bytes, wait_s: float) -> dict[int, Answer]:
        asked = [rank for rank in ranks if rank in self._sockets and self._send(rank, question)]
        answers: dict[int, Answer] = {}
        until = time.monotonic() + wait_s
        while waited_for := [rank for rank in asked if rank in self._sockets and self._owed[rank]]:
            left_s = until - time.monotonic()
            poll = select.poll()  # a launcher of many ranks has more descriptors than select() takes
            for rank in waited_for:
                poll.register(self._sockets[rank], select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, left_s) * 1000)}
            for rank in waited_for:
                if self._sockets[rank].fileno() in ready and (answer := self._hear(rank)) is not None:
                    answers[rank] = answer
            if not ready or left_s <= 0:
                break
        return {rank: answer for rank, answer in answers.items() if not self._owed.get(rank)}

    def _send(self, rank: int, question: bytes) -> bool:
        if question == HOW_FAR and self._owed[rank]:  # the answer to the last question will do
            return True
        try:
            self._sockets[rank].send(question)
        except BlockingIOError:  # too many unanswered questions
            return True
        except OSError:
            self._drop(rank)
            return False
        self._owed[rank] += 1
        return True

    def _hear(self, rank: int) -> Answer | None:
        """The newest complete answer."""
        try:
            chunk = self._sockets[rank].recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        lines = (self._heard[rank] + chunk).split(b"\n")
        if not chunk or len(lines[-1]) > _LONGEST:
            self._drop(rank)
            return None
        self._heard[rank] = lines.pop()
        self._owed[rank] = max(0, self._owed[rank] - len(lines))
        return Answer.of(lines[-1]) if lines else None

    def _drop(self, rank: int) -> None:
        self._sockets.pop(rank).close()

    def close(self) -> None:
        with self._lock:
            while self._sockets:
                self._sockets.popitem()[1].close()
