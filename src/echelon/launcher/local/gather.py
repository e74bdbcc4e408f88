"""Evidence gathered from ranks before they are ended: where they are; and in the run's folder, their stacks and flight records.

A rank that waits in a collective, sleeps or computes in Python answers within milliseconds. One that holds the GIL in C code
gives its stack, but no flight record. A stopped rank gives its stack when it is continued to be ended.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from echelon.common import terminal
from echelon.common.errors import RankTimeoutError
from echelon.common.files import private_folder, write_whole
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.rank_state import Pulses, RankState, is_stopped
from echelon.launcher.local.responder import FLIGHT, HOW_FAR, Responders
from echelon.launcher.local.worker import STACK_SIGNAL

__all__ = ["RankProbe"]

_ANSWER_WAIT_S, _STACK_WAIT_S, _LOOK_S = 1.0, 0.3, 0.01


class RankProbe:
    """The launcher's view of the ranks of the present attempt.

    Args:
        send: sends a rank a signal.
    """

    def __init__(self, send: Callable[[int, int], None]) -> None:
        self._send = send
        self.pulses, self.responders = Pulses(), Responders()

    def ask_stack(self, rank: int) -> None:
        self._send(rank, STACK_SIGNAL)

    def ask_stacks(self, ranks: Sequence[int]) -> None:
        """Ask ranks, which may be well, for their stacks, which arrive soon after.

        Each rank sends its own; only a rank whose GIL is held by C code is asked by a signal.
        """
        answers = self.responders.ask(ranks, HOW_FAR, _ANSWER_WAIT_S)
        for rank in ranks:
            if (answer := answers.get(rank)) is not None:
                self.pulses.note_stacks(rank, answer.main)
            else:
                self.pulses.ask(rank, self.ask_stack)

    def look(self, attempt: Attempt, silent_s: Mapping[int, float]) -> dict[int, RankState]:
        """The state of all ranks, without asking any."""
        ended = attempt.exit_codes()
        return {
            rank: RankState(
                self.pulses.read(rank), rank not in ended and is_stopped(pid), silent_s=silent_s.get(rank), ended=ended.get(rank)
            )
            for rank, pid in attempt.pids.items()
        }

    def gather(
        self, attempt: Attempt, silent_s: Mapping[int, float], others: Callable[[], None] = lambda: None
    ) -> dict[int, RankState]:
        """The state of all ranks. Running ranks are asked, and write their stacks and flight records into the run's folder.

        Takes milliseconds, or a second if a rank does not answer. The ranks are to be ended afterwards: stopped ones have been
        continued.

        Args:
            others: waits until the other nodes have asked their ranks.
        """
        seen = self.look(attempt, silent_s)
        asked = [rank for rank in attempt.running if not seen[rank].stopped]
        stopped = [rank for rank, s in seen.items() if s.stopped]
        answers = self.responders.ask(asked, FLIGHT, _ANSWER_WAIT_S)
        for rank, answer in answers.items():
            self.pulses.note_stacks(rank, answer.stacks)
        silent = [rank for rank in asked if rank not in answers]
        for rank in silent:  # C code holds its GIL, so no frame changes while the stack is read
            self.pulses.ask(rank, self.ask_stack)
        self._stacks_come(silent, time.monotonic() + _STACK_WAIT_S)
        others()
        for rank in stopped:  # last, since it may let others go on; it writes its stack first of all
            self.pulses.ask(rank, self.ask_stack)
            self._send(rank, signal.SIGCONT)
        self._stacks_come(stopped, time.monotonic() + _STACK_WAIT_S)
        self._write_stacks(attempt, [*asked, *stopped])
        for rank in (*asked, *stopped):
            s, reply = seen[rank], answers.get(rank)
            raised = reply.raised if reply is not None else None
            answers_now = None if s.stopped else reply is not None
            seen[rank] = replace(s, where=self.pulses.where(rank), answers=answers_now, raised=raised)
        return seen

    def _stacks_come(self, ranks: Sequence[int], until: float) -> None:
        """Wait until all have written their stacks, and nothing more is added."""
        before: dict[int, str] = {}
        while ranks and time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = {rank: self.pulses.stack(rank) for rank in ranks}
            if all(now.values()) and now == before:
                return
            before = now

    def _write_stacks(self, attempt: Attempt, ranks: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # a full disk: exit.json holds the states, if it can be written
            private_folder(attempt.dumps.parent)
            private_folder(attempt.dumps)
            for rank in ranks:
                if text := self.pulses.stack(rank):
                    write_whole(attempt.dumps / f"stack.rank{rank}.txt", text + "\n")

    def timeout_error(self, attempt: Attempt, timeout_s: float) -> RankTimeoutError:
        """An error with the stacks of all ranks side by side."""
        running = attempt.running
        self.gather(attempt, {})
        stacks = []
        for rank in attempt.pids:
            text = self.pulses.stack(rank)
            state = "ended" if rank not in running else "still running"
            stacks.append(f"--- rank {rank} ({state}) ---\n{terminal.printable(text) or '(no Python stack)'}")
        return RankTimeoutError(
            f"{len(running)} of {len(attempt.pids)} ranks had not finished after {timeout_s:g} s: "
            f"rank {', '.join(map(str, running))}.\n" + "\n".join(stacks),
            rank=running[0],
            exit_code=124,
            logs=str(attempt.folder),
        )

    def close(self) -> None:
        self.pulses.close()
        self.responders.close()
