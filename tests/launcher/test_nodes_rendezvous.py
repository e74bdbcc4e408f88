"""How the agents of several nodes wait for one another: each asks for one number, whatever the number of nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from echelon.common.errors import EchelonError
from echelon.launcher.local.nodes import Meeting
from echelon.launcher.local.rendezvous import NodesRendezvous


class Asked:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.count += 1
            return getattr(self._store, name)(*args)

        return call


def agents(nodes: int) -> list[NodesRendezvous]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made = []
    for node in range(nodes):
        at = Meeting(node, nodes, 0, "127.0.0.1", port, "t" * 32, "lo", listener if node == 0 else None)
        made.append(NodesRendezvous("run", at, comes_again=True))
    for agent in made:
        agent.next_rendezvous()
    return made


def in_threads(acts: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(acts)

    def run(at: int) -> None:
        try:
            found[at] = acts[at]()
        except EchelonError as error:
            found[at] = str(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def look(agent: NodesRendezvous) -> bool:
    time.sleep(0.11)  # it looks ten times a second at most
    return agent.all_done()


@pytest.mark.full
@pytest.mark.parametrize("nodes", [2, 12])
def test_a_look_at_the_others_is_a_few_requests_on_any_number_of_nodes(nodes: int) -> None:
    made = agents(nodes)
    made[0]._store = Asked(made[0]._store)  # type: ignore[assignment]
    assert not look(made[0]) and not look(made[0])
    before = made[0]._store.count  # type: ignore[union-attr]
    assert not look(made[0])
    assert made[0]._store.count - before == 2  # type: ignore[union-attr]
    assert [look(agent) for agent in made[1:]] == [False] * (nodes - 2) + [True]
    assert look(made[0])


def test_all_come_to_the_next_meeting_or_hear_who_has_ended() -> None:
    made = agents(3)
    infos = in_threads([agent.next_rendezvous for agent in made])
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    made[2].set_closed()
    assert in_threads([made[0].next_rendezvous, made[1].next_rendezvous]) == ["no restart: the ranks of node 2 have ended"] * 2


def test_a_node_that_ended_well_is_no_failure_and_one_that_failed_is() -> None:
    made = agents(3)
    made[1].set_closed()
    with pytest.raises(EchelonError, match="those of node 1 have failed"):
        look(made[0])
    made = agents(2)
    assert not look(made[0]) and look(made[1])
    made[1].set_closed()
    assert look(made[0])
