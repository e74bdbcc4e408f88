"""`make gpu` with other parts, each of which ends badly in its own way; the last one is well."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu import __main__, parts
from bench.gpu.rows import LeftOut, Notes
from bench.gpu.runner import Part, Setting


def says_where(setting: Setting, notes: Notes) -> None:
    notes("device", "a device")


def hangs(setting: Setting, notes: Notes) -> None:
    notes("before it hung", 1.5, "s")
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    while True:
        time.sleep(1)


def says_nothing(setting: Setting, notes: Notes) -> None:
    print("not a result")


def crashes(setting: Setting, notes: Notes) -> None:
    notes("before it crashed", 2)
    with open(notes.path, "ab") as file:
        file.write(b'{"part": "half a')
    ctypes.string_at(0)


def is_killed(setting: Setting, notes: Notes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_processes(setting: Setting, notes: Notes) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    Path(os.environ["LEFT"]).write_text(str(left.pid))
    notes("left", 1)


def raises(setting: Setting, notes: Notes) -> None:
    raise RuntimeError("CUDA out of memory.\nTried to allocate 20.00 GiB")


def exits(setting: Setting, notes: Notes) -> None:
    sys.exit(0)


def lacks_a_package(setting: Setting, notes: Notes) -> None:
    import no_such_package  # noqa: F401


def lacks_a_feature(setting: Setting, notes: Notes) -> None:
    raise LeftOut("not there: float8")


def waits(setting: Setting, notes: Notes) -> None:
    notes("before the wait", 3)
    Path(os.environ["LEFT"]).write_text("waiting")
    time.sleep(60)


def is_well(setting: Setting, notes: Notes) -> None:
    notes("a | b", float("nan"), "x", "two\nlines")


BAD = (hangs, says_nothing, crashes, is_killed, leaves_processes, raises, exits, lacks_a_package, lacks_a_feature)

if __name__ == "__main__":
    chosen = {"bad": (*BAD, is_well), "waits": (waits, is_well)}[os.environ["PARTS"]]
    parts.PARTS = (
        Part("environment", says_where, 30, 1),
        *(Part(run.__name__, run, 1.0 if run is hangs else 30.0, 1) for run in chosen),
        Part("too long", is_well, 30, 10_000),
    )
    __main__.BENCHMARKS = Path(os.environ["TABLE"])
    sys.exit(__main__.main())
