"""Names a node that has been silent for too long, as behind a dead link, and ends the run if the silence lasts.

Every node beats in the launchers' store, over a connection of its own. The first node serves the store and counts the others'
beats; the others see whether it answers. A call to a node behind a dead link may block for many minutes, so a second thread
watches. If the main thread is blocked in such a call, that thread also ends the launcher.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from echelon.common.errors import EchelonError
from echelon.launcher.local.nodes import Meeting

__all__ = ["SILENT_S", "Agent", "NodeSilentError", "Silence"]

SILENT_S = 25.0
_LATE_S = 12.0  # from here on, check whether the ranks make progress
_BEAT_S, _LOOK_S, _CONNECT_S = 5.0, 1.0, 300.0
_ASK_S = 15.0  # between checks of the ranks' progress while a node is silent
_CLOSE_S = 2.0
_MAIN_S, _WRITE_S = (
    15.0,
    10.0,
)  # limits for the main thread to end the ranks, and for writing the record, perhaps over the same link
_ENDED = 1 << 40  # more beats than any node makes: that node has ended
_EXIT_CODE = 124  # nonzero, so that srun ends the other nodes; the code of `timeout`


class NodeSilentError(EchelonError):
    """The ranks were ended because another node was silent for too long."""


class Agent(Protocol):
    """The part of this node that runs its ranks."""

    silent: str

    @property
    def attempt(self) -> object: ...

    @property
    def hang_limit_s(self) -> float: ...

    def moves(self) -> dict[tuple[str, int], object]: ...

    def end_at_once(self) -> None: ...


class Silence:
    """Watches the other nodes of a job, from `start` to `close`.

    Args:
        meeting: of at least two nodes.
        say: shows a line; called from a thread.
        agent: its hang limit ends a silence in which no rank here makes progress.
        record: writes that the attempt was ended, and why.
        serves: the first node serves the store in this object, since the agents need none.
    """

    def __init__(
        self,
        meeting: Meeting,
        say: Callable[[str], None],
        agent: Agent,
        record: Callable[[str], object],
        *,
        serves: bool = False,
    ) -> None:
        self._meeting, self._say, self._agent, self._record = meeting, say, agent, record
        self._listener = meeting.listener if serves else None
        others = range(1, meeting.nodes) if meeting.node == 0 else (0,)
        self._heard: dict[int, float] = {}  # last sign of each node, first when ranks were started
        self._unheard = set(others)
        self._beats: dict[int, int] = {}
        self._known: dict[tuple[str, int], object] = {}  # progress of the ranks here
        self._moved_at = self._asked_at = 0.0
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="echelon-beat", daemon=True)

    def start(self) -> None:
        self._beating.start()
        threading.Thread(target=self._watch, name="echelon-silence", daemon=True).start()

    def close(self) -> None:
        """Tell the other nodes that this one ends; nodes behind a dead link are not waited for."""
        self._closed.set()
        self._beating.join(_CLOSE_S)

    def words(self) -> str:
        """The nodes that are silent now, and since when; empty if there are none."""
        return "; ".join(self._words(node, silent_s) for node, silent_s in self._late(SILENT_S).items())

    def _words(self, node: int, silent_s: float) -> str:
        at, since = self._meeting, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - silent_s))
        return (
            f"nothing was heard of {at.named(node)} for {silent_s:.0f} s, since {since}: its launcher, its machine or the "
            f"network between it and {at.named(at.node)} stands"
        )

    def _late(self, after_s: float) -> dict[int, float]:
        now = time.monotonic()
        return {node: now - heard for node, heard in dict(self._heard).items() if now - heard > after_s}

    def _key(self, node: int) -> str:
        return f"{self._meeting.token}/beat/{node}"

    def _beat(self) -> None:
        import torch.distributed as dist  # here: the launcher of a command has not loaded torch

        at = self._meeting
        others = sorted(self._unheard)
        try:
            store = dist.TCPStore(
                at.host,
                at.port,
                is_master=self._listener is not None,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_S),
                master_listen_fd=self._listener.detach() if self._listener is not None else None,
            )
            while True:
                ends = self._closed.is_set()
                store.add(self._key(at.node), _ENDED if ends else 1)
                for node in others:
                    self._note(node, store.add(self._key(node), 0))
                if ends:
                    return
                self._closed.wait(_BEAT_S)
        except dist.DistError:
            if not self._late(SILENT_S):  # the first node has ended; the ranks will notice it themselves
                self._unheard.clear()
                self._heard = {}

    def _note(self, node: int, beats: int) -> None:
        if beats >= _ENDED:
            self._unheard.discard(node)
            self._heard.pop(node, None)
        elif self._meeting.node or beats != self._beats.get(node, 0):  # any answer is a sign of the first node
            self._heard[node], self._beats[node] = time.monotonic(), beats

    def _watch(self) -> None:
        before, reported = time.monotonic(), set[int]()
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            if now - before > SILENT_S / 2:  # this process itself was suspended
                self._heard = dict.fromkeys(self._heard, now)
            before = now
            if self._unheard and self._agent.attempt is not None:  # there is an attempt, so all launchers have met
                self._heard = {**dict.fromkeys(self._unheard, now), **self._heard}
                self._unheard.clear()
            late = self._late(_LATE_S)
            silent = {node: late_s for node, late_s in late.items() if late_s > SILENT_S}
            for node in silent.keys() - reported:
                self._say(self._words(node, silent[node]))
            for node in reported - silent.keys() & self._heard.keys():
                self._say(f"{self._meeting.named(node)} is heard of again")
            reported = set(silent)
            if late and self._is_over(max(late.values()), now) and silent:
                self._end(self.words())
                return

    def _is_over(self, silent_s: float, now: float) -> bool:
        """Whether for the limit's time no sign came from the node, and no rank here made progress, as over another network."""
        limit_s = self._agent.hang_limit_s
        self._moved_at = max(self._moved_at, now - silent_s)
        if now - self._asked_at >= min(_ASK_S, limit_s / 8):
            self._asked_at, is_first = now, self._asked_at < now - silent_s
            moves = self._agent.moves()
            if not is_first and any(self._known.get(key, value) != value for key, value in moves.items()):
                self._moved_at = now
            self._known |= moves
        return 0 < limit_s < now - self._moved_at

    def _end(self, why: str) -> None:
        why = f"{why}. The ranks of {self._meeting.named(self._meeting.node)} were ended: none had made progress meanwhile"
        self._agent.silent = why
        if self._closed.wait(_MAIN_S):
            return
        writing = threading.Thread(target=self._record, args=(why,), daemon=True)
        with contextlib.suppress(Exception):
            writing.start()
            writing.join(_WRITE_S)
        self._say(why)
        self._agent.end_at_once()
        os._exit(_EXIT_CODE)
