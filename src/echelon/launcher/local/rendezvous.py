"""Where the agents of a job meet, and the store in which their ranks meet. Nothing read there is ever unpickled.

On one node every attempt has its own store: a new socket on loopback, a new server, no key of an earlier attempt. With torchrun's
shared store, restarted ranks read the addresses of dead ones and wait for half an hour. On several nodes there is one store on
one address, and every attempt has its own key prefix.

The only module of the launcher that imports torch at its top level.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from echelon.common.errors import EchelonError
from echelon.launcher.local.nodes import Meeting

__all__ = ["NodesRendezvous", "OneNodeRendezvous"]

_LOOPBACK, _CONNECT_S = "127.0.0.1", 10.0
# Time between the first and the last node that reaches a meeting, or ends.
_NODES_WAIT_S = 300.0
# The nodes look once a second, and wait as long for ranks that do not answer.
_GATHER_WAIT_S = 3.0
_ENDED = -1  # in the place of a meeting's number


def _listening() -> socket.socket:
    """A socket on a free port of the loopback interface that accepts connections.

    Raises:
        EchelonError: this machine cannot connect to it; torch's store would try for a minute.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((_LOOPBACK, 0))
        listener.listen(1024)
        with socket.create_connection(listener.getsockname(), _CONNECT_S):
            listener.accept()[0].close()
    except OSError as error:
        listener.close()
        raise EchelonError(
            f"this machine must be able to connect to {_LOOPBACK}, where ranks meet, got: {error.strerror or error}. Bring its "
            f"loopback "
            "interface up, as `ip link set lo up` does, with that address."
        ) from error
    return listener


class OneNodeRendezvous:
    """The meeting of a single agent: no port for agents, and a new store for the ranks at every attempt."""

    def __init__(self) -> None:
        self._closed = False
        self._store: dist.TCPStore | None = None

    def meet(self) -> tuple[str, int]:
        """Called before each attempt: the address of the store in which its ranks meet.

        Raises:
            EchelonError: the ranks cannot meet, or other nodes do not come.
        """
        # Bound here and handed over: no other process can take the port first, and nothing listens beyond loopback.
        listener = _listening()
        port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=60),
        )
        return _LOOPBACK, port

    def others_start_again(self) -> bool:
        """Whether other nodes wait for this one at the next attempt, since ranks of theirs failed."""
        return False

    def all_done(self) -> bool:
        """Called when all ranks of this node have ended well: whether those of all nodes have."""
        return True

    def all_late(self, late: bool) -> bool:
        """Whether the ranks of all nodes make no progress; `late` is whether those of this node make none."""
        return late

    def all_gathered(self) -> None:
        """Called when this node has gathered its ranks' evidence: returns when all nodes have, or after a time limit."""

    def wait_for_others(self) -> None:
        """Called when the ranks of all nodes have ended well."""

    def close(self) -> None:
        """End the meetings: the ranks of this node have ended, well or for good."""
        self._closed, self._store = True, None


class NodesRendezvous(OneNodeRendezvous):
    """The meeting of the agents of several nodes, and of their ranks, through one store that the first node serves.

    A node whose ranks failed comes to the next meeting; the others see that and come, too. All meetings are between the same
    nodes: for other nodes the batch system starts the job again. Every key begins with the token of the start, and every value is
    plain text.

    Args:
        comes_again: there may be a next meeting.
    """

    def __init__(self, meeting: Meeting, *, comes_again: bool) -> None:
        super().__init__()
        self._meeting, self._comes_again, self._number = meeting, comes_again, -1
        self._look_at = self._done_look_at = 0.0
        self._done_in = -1  # number of the meeting after which this node's ranks ended well
        self._late = False

    def meet(self) -> tuple[str, int]:
        at = self._meeting
        if self._store is None:
            self._store = dist.TCPStore(
                at.host,
                at.port,
                is_master=at.listener is not None,
                wait_for_workers=False,
                timeout=timedelta(seconds=_NODES_WAIT_S),
                master_listen_fd=at.listener.detach() if at.listener is not None else None,
            )
        self._number, self._late = self._number + 1, False
        self._come(self._store, "no restart" if self._number else "no start")
        return at.host, at.port

    def _key(self, node: int | str, number: int) -> str:
        return f"{self._meeting.token}/came/{number}/{node}"

    def _come(self, store: dist.TCPStore, otherwise: str) -> None:
        """Come to the meeting, and wait for all nodes.

        Raises:
            EchelonError: another node no longer comes; the message begins with `otherwise`.
        """
        until = time.monotonic() + _NODES_WAIT_S
        try:
            for who in (self._meeting.node, "any"):
                store.set(self._key(who, self._number), "1")
            came = self._key("count", self._number)
            store.add(came, 1)
            # All nodes poll: they read one number, and names only if a node is missing for good.
            while store.add(came, 0) < self._meeting.nodes:
                late = time.monotonic() > until
                if late or store.check([self._key("any", _ENDED)]):
                    missing, ended = self._absent(store, lambda node: self._key(node, self._number))
                    if ended:
                        raise EchelonError(f"{otherwise}: the ranks of {self._named(ended)} have ended")
                    if late and missing:
                        raise EchelonError(f"{otherwise}: {self._named(missing)} did not come within {_NODES_WAIT_S:g} s")
                time.sleep(0.05)
        except dist.DistError as error:  # the first node ended, and the store with it
            raise EchelonError(f"{otherwise}: the first node has ended") from error

    @staticmethod
    def _named(nodes: Sequence[int]) -> str:
        return f"node {', '.join(map(str, nodes))}"

    def _absent(self, store: dist.TCPStore, key: Callable[[int], str]) -> tuple[list[int], list[int]]:
        """The nodes that have not set their key, and those among them whose ranks have ended."""
        missing = [node for node in range(self._meeting.nodes) if not store.check([key(node)])]
        return missing, [node for node in missing if store.check([self._key(node, _ENDED)])]

    def others_start_again(self) -> bool:
        if not self._comes_again or time.monotonic() < self._look_at or self._store is None:
            return False
        self._look_at = time.monotonic() + 0.5
        try:
            return self._store.check([self._key("any", self._number + 1)])
        except dist.DistError:  # the first node has ended; the ranks will notice it themselves
            return False

    def all_done(self) -> bool:
        """As long as other nodes run, this one may have to join another attempt.

        Raises:
            EchelonError: ranks of another node have failed for good.
        """
        if time.monotonic() < self._done_look_at or self._store is None:
            return False
        self._done_look_at = time.monotonic() + 0.1
        at, done = self._meeting, f"{self._meeting.token}/done/{self._number}"
        try:
            if self._done_in < self._number:
                self._store.set(f"{done}/{at.node}", "1")
                self._store.add(f"{done}/count", 1)
                self._done_in = self._number
            all_done = self._store.add(f"{done}/count", 0) >= at.nodes
            someone_ended = not all_done and self._store.check([self._key("any", _ENDED)])
            ended = self._absent(self._store, lambda node: f"{done}/{node}")[1] if someone_ended else []
        except dist.DistError as error:
            raise EchelonError("the ranks of this node ended well, but the first node has failed") from error
        if ended:
            raise EchelonError(f"the ranks of this node ended well, but those of {self._named(ended)} have failed")
        return all_done

    def all_late(self, late: bool) -> bool:
        if self._store is None or (not late and not self._late):
            return False
        late_nodes = f"{self._meeting.token}/late/{self._number}"
        try:
            count = self._store.add(late_nodes, int(late) - int(self._late))
        except dist.DistError:  # the first node has ended; the ranks will notice it themselves
            return False
        self._late = late
        return late and count >= self._meeting.nodes

    def all_gathered(self) -> None:
        if self._store is None:
            return
        gathered, until = f"{self._meeting.token}/gathered/{self._number}", time.monotonic() + _GATHER_WAIT_S
        with contextlib.suppress(dist.DistError):
            count = self._store.add(gathered, 1)
            while count < self._meeting.nodes and time.monotonic() < until:
                time.sleep(0.02)
                count = self._store.add(gathered, 0)

    def wait_for_others(self) -> None:
        """The first node serves the store until all nodes have read that all are done."""
        if self._store is None:
            return
        left, until = f"{self._meeting.token}/left", time.monotonic() + _NODES_WAIT_S
        with contextlib.suppress(dist.DistError):
            count = self._store.add(left, 1)
            while self._meeting.node == 0 and count < self._meeting.nodes and time.monotonic() < until:
                time.sleep(0.02)
                count = self._store.add(left, 0)

    def close(self) -> None:
        if not self._closed and self._store is not None:
            with contextlib.suppress(dist.DistError):
                for who in (self._meeting.node, "any"):
                    self._store.set(self._key(who, _ENDED), "1")
        super().close()
