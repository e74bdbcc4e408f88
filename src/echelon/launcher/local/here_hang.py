"""The hang timeout of a single rank in the launcher's own process: a thread looks after it, as far as one can from inside.

Only with a limit that a person gave: a single rank waits for nobody, and may be in a debugger. The thread needs the interpreter's
lock now and then, so it cannot end code in C that keeps it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable

from echelon.contracts import pulse
from echelon.contracts.run_dir import RunDir
from echelon.launcher.job import Failure
from echelon.launcher.local import companion
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.gather import Sight
from echelon.launcher.local.hang import HangLimit
from echelon.launcher.local.judge import HANGS, HUNG, record_end
from echelon.launcher.local.processes import kill_children
from echelon.launcher.local.progress import Progress
from echelon.launcher.local.watch import positions
from echelon.launcher.local.worker import STACK_SIGNAL

__all__ = ["HangHere"]


class HangHere(threading.Thread):
    """Ends this process, with its evidence in the run's folder, when it makes no progress for too long.

    Args:
        after_s: the limit.
        show: shows how it failed.
    """

    def __init__(self, run: RunDir, after_s: float, show: Callable[[Failure], None]) -> None:
        super().__init__(name="echelon-hang-timeout", daemon=True)
        self._run, self._show = RunDir(run.path.absolute(), run.attempt), show  # the program may change into another folder
        self._lifted, self._lock = threading.Event(), threading.Lock()
        self._sight = Sight(lambda rank, number: os.kill(os.getpid(), number))
        shared = self._sight.pulses.make(0)
        pulse.join(shared)
        faulthandler.register(STACK_SIGNAL, file=shared, all_threads=True)
        companion.begin(self._sight.companions.make(0).detach(), str(self._run.flight(0)))
        self._attempt = Attempt(run.attempt, self._run.attempt_path)
        self._attempt.pids = {0: os.getpid()}
        self._progress = Progress()
        self._limit = HangLimit(after_s, True, self._progress, self._sight, after_s)
        self.start()

    def run(self) -> None:
        while not self._lifted.wait(self._limit.look_s):
            self._progress.look(self._attempt.pids, [0], self._sight.pulses)
            idle_s = self._limit.look(self._attempt)
            if idle_s is not None:
                with self._lock:
                    if not self._lifted.is_set():
                        self._end_process(idle_s)  # the lock stays held: nobody gets past `lift`

    def _end_process(self, idle_s: float) -> None:
        with contextlib.suppress(OSError):
            seen = self._sight.gather(self._attempt, self._limit.silent_s())
            headline, log = f"rank 0 made no progress for {idle_s:.0f} s", self._run.log(0)
            failure = Failure(0, HUNG, 0, HANGS, positions(seen, [0]), log=log, headline=headline)
            named = record_end(self._run, HUNG, [failure], seen=seen, hang_s=idle_s, world_size=1)
            self._show(named or failure)
        kill_children()
        os._exit(HUNG)

    def lift(self) -> None:
        """The program has ended: it is not ended any more."""
        with self._lock:
            self._lifted.set()
        self.join()
        faulthandler.unregister(STACK_SIGNAL)
        self._sight.close()
