"""Where agents and ranks meet: each attempt in a store of its own on loopback; several nodes in one, in which each asks for one
number, whatever the number of nodes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import EchelonError
from echelon.launcher.functions.launch import launch
from echelon.launcher.local import rendezvous
from echelon.launcher.local.nodes import Meeting
from echelon.launcher.local.rendezvous import NodesRendezvous, OneNodeRendezvous
from tests.kit.started import wait_until


def _listening(port: int) -> list[str]:
    """The addresses on which this machine listens at a port, as the kernel writes them."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            for line in Path(table).read_text().splitlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                    found.append(address.rpartition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's table of sockets")
def test_the_ranks_store_listens_on_loopback_only() -> None:
    meetings = OneNodeRendezvous()
    _, port = meetings.meet()
    try:
        assert _listening(port) == ["0100007F"], "TCPStore(master_listen_fd=...) does not serve on the socket that it is given"
    finally:
        meetings.close()


def test_each_attempt_has_a_store_of_its_own() -> None:
    meetings = OneNodeRendezvous()
    dist.TCPStore(*meetings.meet(), is_master=False, timeout=timedelta(seconds=60)).set("key", "old")
    store = dist.TCPStore(*meetings.meet(), is_master=False, timeout=timedelta(seconds=60))
    assert not store.check(["key"]), "a key of an earlier attempt is still there: restarted ranks would read dead addresses"
    meetings.close()


def test_a_finished_job_leaves_nothing_listening() -> None:
    meetings = OneNodeRendezvous()
    _, port = meetings.meet()
    meetings.close()
    mine = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert port not in [each.laddr.port for each in mine]  # another process may have it by now


def _who_listens() -> tuple[bool, set[tuple[str, int]], int, float]:
    """Join by env://; then the addresses on which this very process listens."""
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    mine = {tuple(each.laddr) for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    dist.destroy_process_group()
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", mine, int(os.environ["MASTER_PORT"]), value.item()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's table of sockets")
def test_ranks_use_the_agents_store_serve_none_themselves_and_listen_on_loopback_only() -> None:
    for agent, mine, port, value in launch(_who_listens, ranks=2, timeout_s=120):
        assert agent and port not in {at for _, at in mine} and value == 2, (
            "env:// no longer honours TORCHELASTIC_USE_AGENT_STORE; see NodeAgent._fork"
        )
        assert {address for address, _ in mine} <= {"127.0.0.1"}, (
            f"a rank listens on {mine}; see GLOO_SOCKET_IFNAME in launcher/local/run.py"
        )


class Asked:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.count += 1
            return getattr(self._store, name)(*args)

        return call


# --- several nodes


def agents(nodes: int) -> list[NodesRendezvous]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made = []
    for node in range(nodes):
        at = Meeting(node, nodes, 0, "127.0.0.1", port, "t" * 32, "lo", listener if node == 0 else None)
        made.append(NodesRendezvous(at, comes_again=True))
    assert in_threads([agent.meet for agent in made]) == [("127.0.0.1", port)] * nodes
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
    assert not made[1].others_start_again()
    waiting = threading.Thread(target=made[0].meet)
    waiting.start()
    wait_until(made[1].others_start_again, "the first one waits")
    in_threads([agent.meet for agent in made[1:]])
    waiting.join(60)
    made[2].close()
    assert in_threads([made[0].meet, made[1].meet]) == ["no restart: the ranks of node 2 have ended"] * 2


def test_nodes_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NODES_WAIT_S", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    alone = NodesRendezvous(Meeting(0, 3, 0, "127.0.0.1", listener.getsockname()[1], "t" * 32, "lo", listener), comes_again=True)
    with pytest.raises(EchelonError, match="no start: node 1, 2 did not come"):
        alone.meet()


def test_the_first_node_serves_until_the_others_know_the_end() -> None:
    made = agents(2)
    assert not look(made[0]) and look(made[1]) and look(made[0])
    leaves = threading.Thread(target=made[0].wait_for_others)
    leaves.start()
    leaves.join(0.3)
    assert leaves.is_alive()
    made[1].wait_for_others()
    leaves.join(60)
    assert not leaves.is_alive()


def test_a_node_that_ended_well_is_no_failure_and_one_that_failed_is() -> None:
    made = agents(3)
    made[1].close()
    with pytest.raises(EchelonError, match="those of node 1 have failed"):
        look(made[0])
    made = agents(2)
    assert not look(made[0]) and look(made[1])
    made[1].close()
    assert look(made[0])
