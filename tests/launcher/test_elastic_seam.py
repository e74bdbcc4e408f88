"""What launcher/local/elastic.py uses of torchelastic is still there, and still means the same.

Everything in this file is torch's. If a test fails after an upgrade of torch, launcher/local/elastic.py must be read again with
the new source of torch.distributed.elastic.agent.server.api beside it; each message says what to look at.
"""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server import SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from echelon.launcher.functions.launch import launch
from echelon.launcher.local.elastic import ForkAgent
from echelon.launcher.local.rendezvous import OneNodeRendezvous

LOOK = f"torch {torch.__version__} differs from 2.13.0, with which launcher/local/elastic.py was written: "


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


METHODS = {
    "_start_workers": ["self", "worker_group"],
    "_stop_workers": ["self", "worker_group"],
    "_monitor_workers": ["self", "worker_group"],
    "_shutdown": ["self", "death_sig", "timeout"],
}


def test_the_four_methods_to_extend_take_what_they_took_and_are_all_that_is_wanted() -> None:
    for method, expected in METHODS.items():
        theirs, ours = (parameters(getattr(kind, method)) for kind in (SimpleElasticAgent, ForkAgent))
        # Until torch 2.13 the agent gave its children no time of its own; ours has a default for it.
        older = ["self", "death_sig"] if method == "_shutdown" else expected
        assert theirs in (expected, older), f"{LOOK}{method} takes {theirs}; give ForkAgent.{method} the same."
        assert ours == expected
    for kind in (ForkAgent, OneNodeRendezvous):
        missing = getattr(kind, "__abstractmethods__", frozenset())
        assert not missing, f"{LOOK}torch now also wants {sorted(missing)}; write them in {kind.__name__}."


def test_what_we_construct_takes_what_we_give() -> None:
    for what, names in (
        (SimpleElasticAgent.__init__, {"spec", "exit_barrier_timeout"}),
        (WorkerSpec, {"role", "local_world_size", "rdzv_handler", "entrypoint", "max_restarts", "monitor_interval"}),
        (ProcessFailure, {"local_rank", "pid", "exitcode", "error_file"}),
        (RunResult, {"state", "return_values", "failures"}),
    ):
        missing = names - set(parameters(what))
        assert not missing, f"{LOOK}{what.__qualname__} no longer takes {sorted(missing)}."
    for by_position, count in ((RendezvousInfo, 4), (RendezvousStoreInfo, 2)):
        assert len(parameters(by_position)) == count, f"{LOOK}{by_position.__qualname__}; see next_rendezvous."


def test_the_agent_counts_restarts_down_before_it_starts_workers_again() -> None:
    spec = WorkerSpec(
        role="default", local_world_size=1, rdzv_handler=OneNodeRendezvous("x"), entrypoint="x", max_restarts=3,
        monitor_interval=0.01,
    )  # fmt: skip
    seen = []

    class Agent(SimpleElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            seen.append(self._remaining_restarts)
            return {0: 0}

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            pass

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            failed = len(seen) < 3
            failures = {0: ProcessFailure(0, 1, 1, "")} if failed else {}
            return RunResult(WorkerState.FAILED if failed else WorkerState.SUCCEEDED, {} if failed else {0: None}, failures)

        def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
            pass

    result = Agent(spec).run()
    assert seen == [3, 2, 1], f"{LOOK}_remaining_restarts went {seen} over three starts; ForkAgent.restarts counts by it."
    assert not result.is_failed()


# ---- the store --------------------------------------------------------------------------------------------------------------


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
    rendezvous = OneNodeRendezvous("x")
    info = rendezvous.next_rendezvous()
    try:
        assert _listening(info.bootstrap_store_info.master_port) == ["0100007F"], (
            f"{LOOK}TCPStore(master_listen_fd=...) does not serve on the socket that it is given; see next_rendezvous."
        )
    finally:
        rendezvous.shutdown()


def test_each_attempt_has_a_store_of_its_own() -> None:
    rendezvous = OneNodeRendezvous("x")
    first = rendezvous.next_rendezvous().bootstrap_store_info
    dist.TCPStore(first.master_addr, first.master_port, is_master=False, timeout=timedelta(seconds=60)).set("key", "old")
    second = rendezvous.next_rendezvous().bootstrap_store_info
    store = dist.TCPStore(second.master_addr, second.master_port, is_master=False, timeout=timedelta(seconds=60))
    assert not store.check(["key"]), "a key of an earlier attempt is still there: restarted ranks would read dead addresses"
    rendezvous.shutdown()


def test_a_finished_job_leaves_nothing_listening() -> None:
    rendezvous = OneNodeRendezvous("x")
    port = rendezvous.next_rendezvous().bootstrap_store_info.master_port
    rendezvous.shutdown()
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
            f"{LOOK}env:// no longer honours TORCHELASTIC_USE_AGENT_STORE; see ForkAgent._start_workers."
        )
        assert {address for address, _ in mine} <= {"127.0.0.1"}, (
            f"a rank listens on {mine}; see GLOO_SOCKET_IFNAME in launcher/local/run.py"
        )
