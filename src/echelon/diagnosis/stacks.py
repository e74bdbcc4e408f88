"""Python stacks as faulthandler and tracebacks print them: where a rank is, and whether it only waits there."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.common.terminal import one_line
from echelon.common.traces import from_here, named_in_library
from echelon.diagnosis.aborted import dump_of_end

__all__ = [
    "WAITED_FOR",
    "Frame",
    "called_by_loop",
    "crash_stack",
    "is_endless",
    "last_line",
    "last_traceback",
    "logged_error",
    "lost_thread",
    "main_thread",
    "of_traceback",
    "other_threads",
    "unsent_batch",
    "user_frame",
    "waits_in",
]

WAITED_FOR = frozenset(("a DataLoader", "another stage"))  # results of `waits_in` that are not functions
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FRAME = re.compile(r'  File "(.{1,4096})", line (\d{1,9}),? in (.{1,200})')
_MOST_FRAMES, _MOST_LINES, _MOST_SAID, _MOST_THREADS = 200, 1000, 200, 100
_DEEP = 90  # faulthandler shows a hundred
# Installed packages, Python itself, and the command from which ranks are forked, on any machine.
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib(64)?[/\\]python\d[\d.]*[/\\]|[/\\]bin[/\\]echelon$|^<")
# A rank with a frame in these files waits for others, unless the innermost frame is in _BUSY, where it writes to a disk or
# computes. Calls into C++ pass through _PASSES_ON. _AROUND are functions around the call that the user made.
_OF_GROUPS = re.compile(r"[/\\]torch[/\\](distributed[/\\]|_C[/\\]_distributed)")
_BUSY = re.compile(r"[/\\]torch[/\\]distributed[/\\](checkpoint|tensor)[/\\]")
_OF_STAGES = re.compile(r"[/\\]torch[/\\]distributed[/\\]pipelining[/\\]")
_PASSES_ON = re.compile(r"[/\\]torch[/\\](_ops\.py|_library[/\\]|futures[/\\]|cuda[/\\])")
_AROUND = frozenset({"wrapper", "inner", "__call__", "_fn", "decorate_context", "wait", "wait_tensor", "<lambda>"})
_OF_TORCH = re.compile(r"[/\\]torch[/\\]")
_OF_LOOPS = re.compile(r"[/\\]echelon[/\\](loop|world)[/\\]")
_HEADS = re.compile(r"^(?:\S.{0,200})?Traceback \(most recent call last\):", re.MULTILINE)  # an indented line is code
_CHAINED = ("direct cause of the following exception:", "another exception occurred:")
_MOST_OF_IT = 20_000
_FEEDS = re.compile(r"[/\\]multiprocessing[/\\]queues\.py\", line \d{1,9}, in _feed$")
_OF_LOADERS = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As "train.py:41 in load"."""
        where = f"{_short(self.file)}:{self.line}"
        return one_line(where if self.function == "<module>" else f"{where} in {self.function}")

    @property
    def of_library(self) -> bool:
        return _of_library(self.file)


@functools.lru_cache(maxsize=4096)
def _of_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None or named_in_library(file)


def _short(path: str) -> str:
    shown = from_here(path)
    return shown if shown != path else os.path.basename(path)


def _frames(lines: Iterable[str]) -> tuple[Frame, ...]:
    frames = []
    for line in lines:
        frame = _FRAME.fullmatch(line.rstrip())
        if frame is not None:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        if len(frames) == _MOST_FRAMES:
            break
    return tuple(frames)


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first. faulthandler prints it last; empty if it stopped at a hundred threads."""
    last = _THREAD.split(text)[-1].splitlines()
    return () if "..." in last else _frames(last)


def other_threads(text: str) -> tuple[Frame, ...]:
    """Where threads other than the main one are in the user's own code; each place once."""
    places = (user_frame(_frames(thread.splitlines())) for thread in _THREAD.split(text)[1:-1][:_MOST_THREADS])
    return tuple(dict.fromkeys(place for place in places if place is not None))


def crash_stack(log: str) -> tuple[Frame, ...]:
    """The frames of the thread that crashed, as faulthandler wrote them into a rank's log; empty if it wrote none."""
    dump = dump_of_end(log)
    _, current, of_current = dump.partition("\nCurrent thread ")
    if current:
        return _frames(_THREAD.split(of_current)[0].splitlines())
    return main_thread(dump) if dump else ()  # a C++ thread crashed


def lost_thread(log: str) -> str:
    """The error that ended a thread, by Python's last message about one: "KeyError: 'id' at train.py:41 in load"."""
    _, marker, rest = f"\n{log}".rpartition("\nException in thread ")
    error, frames = _first_error(rest) if marker else ("", ())
    frame = user_frame(frames)
    return error + (f" at {frame}" if error and frame is not None else "")


def unsent_batch(log: str) -> str:
    """The last error of a torch data worker that could not send its batch: multiprocessing only prints it."""
    _, _, rest = log.rpartition("Traceback (most recent call last):\n  File ")
    place, _, _ = rest.partition("\n")
    return _first_error(rest)[0] if _FEEDS.search(place) else ""


def last_traceback(log: str) -> str:
    """The last traceback of a log with those it is chained to: a program may catch an error, log it, and go on or end."""
    heads = [head.start() for head in _HEADS.finditer(log)]
    begin = len(heads) - 1
    while begin > 0 and log[: heads[begin]].rstrip().endswith(_CHAINED):
        begin -= 1
    return log[heads[begin] :][:_MOST_OF_IT] if heads else ""


def logged_error(traceback: str) -> str:
    """The last of the errors of `last_traceback`, as "KeyError: 'id' at train.py:41 in load"."""
    error, frames = _first_error(f"\n{traceback}") if traceback else ("", ())
    frame = user_frame(frames)
    return error + (f" at {frame}" if error and frame is not None else "")


def last_line(log: str) -> str:
    """The last line of a log, such as why a process ended itself; from argparse and click, the usage error."""
    return one_line(log.rstrip().rpartition("\n")[2][:_MOST_SAID])


def _first_error(text: str) -> tuple[str, tuple[Frame, ...]]:
    """The error of the traceback at the start of a text, below its first line, with chained ones; and its frames."""
    error, read = "", list[str]()
    for line in text.splitlines()[1:_MOST_LINES]:
        if line.startswith(("Traceback (", "During handling of", "The above exception was")):
            error = ""
        elif line[:1].strip():
            if error:
                break  # later output of the rank
            error = line[:_MOST_SAID]
        read.append(line)
    return one_line(error), of_traceback("\n".join(read))


def of_traceback(text: str) -> tuple[Frame, ...]:
    """The frames of the last traceback in a text, innermost first."""
    last = max((head.end() for head in _HEADS.finditer(text)), default=0)
    return tuple(reversed(_frames(text[last:].splitlines())))


def is_endless(frames: Sequence[Frame]) -> bool:
    """Whether the frames are the same few over and over, as far as they are shown."""
    return len(frames) >= _DEEP and len(set(frames)) <= len(frames) // 10


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that is not in a library."""
    return next((frame for frame in frames if not frame.of_library), None)


def called_by_loop(frames: Iterable[Frame]) -> bool:
    """Whether an echelon loop, and no user code, made the call into torch in which a rank stands."""
    called = next((frame for frame in frames if not _OF_TORCH.search(frame.file)), None)
    return called is not None and called.of_library and _OF_LOOPS.search(called.file) is not None


def waits_in(frames: Iterable[Frame]) -> str:
    """What a rank with this stack waits in, such as "all_reduce", or for: `WAITED_FOR`; empty if Python frames show no wait.

    A backward pass waits in C++, which has no Python frames.
    """
    name, innermost = "", True
    for frame in frames:
        if not frame.of_library:
            break
        if innermost and _PASSES_ON.search(frame.file):
            continue
        if _OF_GROUPS.search(frame.file):
            if not name and (not innermost or _BUSY.search(frame.file)):
                return ""
            if _OF_STAGES.search(frame.file):
                return "another stage"
            name = frame.function if frame.function not in _AROUND or not name else name
        elif _OF_LOADERS.search(frame.file) and not name:
            return "a DataLoader"
        innermost = False
    return one_line(name)
