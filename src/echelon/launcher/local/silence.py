"""Names a node of which nothing is heard any more, as behind a link that has gone dead without a word to anybody.

Every node beats in the job's store, through a connection of its own. The first, which serves that, counts the others' beats; the
others see whether it answers. A call to a node behind a dead link does not return for many minutes, so a second thread looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from echelon.launcher.local.nodes import Meeting

__all__ = ["SILENT_S", "Silence"]

SILENT_S = 25.0
_BEAT_S, _LOOK_S, _CONNECT_S = 5.0, 1.0, 300.0
_ENDED = 1 << 40  # more beats than there will be: that node has come to its end


class Silence:
    """Of the nodes of a job, from `start` to `close`.

    Args:
        meeting: of several nodes.
        say: shows a line, from a thread.
    """

    def __init__(self, meeting: Meeting, say: Callable[[str], None]) -> None:
        self._meeting, self._say = meeting, say
        self._heard: dict[int, float] = {}  # when, of each node that was heard of
        self._beats: dict[int, int] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"echelon{work.__name__}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _key(self, node: int) -> str:
        return f"{self._meeting.token}/beat/{node}"

    def _beat(self) -> None:
        import torch.distributed as dist  # here: which the launcher has loaded by then

        at = self._meeting
        others = range(1, at.nodes) if at.node == 0 else (0,)
        try:
            store = dist.TCPStore(
                at.host, at.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
            )
            while True:
                ends = self._closed.is_set()
                store.add(self._key(at.node), _ENDED if ends else 1)
                for node in others:
                    self._note(node, store.add(self._key(node), 0))
                if ends:
                    return
                self._closed.wait(_BEAT_S)
        except dist.DistError:  # the first node has ended, which the ranks will hear by themselves
            self._heard = {}

    def _note(self, node: int, beats: int) -> None:
        if beats >= _ENDED:
            self._heard.pop(node, None)
        elif beats and (self._meeting.node or beats != self._beats.get(node)):
            self._heard[node], self._beats[node] = time.monotonic(), beats

    def _watch(self) -> None:
        before, said = time.monotonic(), set[int]()
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            if now - before > SILENT_S / 2:  # this process stood itself, as when all are suspended
                self._heard = dict.fromkeys(self._heard, now)
            before = now
            silent = {node: now - heard for node, heard in dict(self._heard).items() if now - heard > SILENT_S}
            for node in silent.keys() - said:
                self._say(
                    f"nothing was heard of node {node} for {silent[node]:.0f} s: its launcher, its machine or the network "
                    f"between it and node {self._meeting.node} stands"
                )
            for node in said - silent.keys() & self._heard.keys():
                self._say(f"node {node} is heard of again")
            said = set(silent)
