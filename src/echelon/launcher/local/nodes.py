"""How the launchers of several nodes meet: through a file in the run's folder, which all of them see.

The first node binds the port on which it will serve the job's store, on the address by which the others reach it. It writes both
to the file, with a token that is new for every start. No port is agreed on beforehand, so none can be taken. The token is in a
file that only its owner can read: not in an argument, and not in the environment that Slurm records.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.common.errors import EchelonError, LauncherEnvironmentError
from echelon.common.machine import interface_of
from echelon.contracts.records import meeting_record
from echelon.contracts.run_dir import RunDir, write_json

__all__ = ["Meeting", "free_port", "local_address_towards", "meet"]

# Nodes of a job start within seconds of one another; a shared file system may show a new file a minute late.
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of several nodes find one another.

    Args:
        node, nodes: this node's index, and how many there are.
        attempt: the number of the attempt in the run's folder.
        host, port: address of the store, which the first node serves; unused on a single node.
        token: prefix of all keys of the launchers in the store.
        interface: the network interface through which this node reaches the others; empty if it has no name.
        listener: on the first of several nodes: the store's socket, bound and listening.
        hosts: the nodes' names.
        command_port: where the ranks of a launch command meet; 0 for other jobs, and on one node.
        reserved: on the first node: holds that port until the command takes it.
    """

    node: int
    nodes: int
    attempt: int
    host: str
    port: int
    token: str
    interface: str
    listener: socket.socket | None = None
    hosts: Sequence[str] = ()
    command_port: int = 0
    reserved: socket.socket | None = None

    def named(self, node: int) -> str:
        """Such as "node 1 (gpu07)"."""
        return f"node {node} ({self.hosts[node]})" if node < len(self.hosts) else f"node {node}"

    def exit_path(self, attempt_dir: RunDir) -> Path:
        """Where this node records the end of the attempt: for the whole job, or for itself if there are several nodes."""
        return attempt_dir.node_exit(self.node) if self.nodes > 1 else attempt_dir.exit_json


def meet(
    run: RunDir, start: str, node: int, hosts: list[str], timeout_s: float = _PATIENCE_S, *, command: bool = False
) -> Meeting:
    """Learn the store's address: the first node publishes it, the others wait for it.

    Args:
        run: the run; the first node takes its next attempt.
        start: name of this start of the job, such as job id and restart count; files of other starts are not read.
        node: this node's index in `hosts`.
        hosts: the names of all nodes, in order.
        command: the ranks are those of a launch command, and meet at a port of their own.
    Raises:
        EchelonError: the first node has written no file after `timeout_s`.
        LauncherEnvironmentError: the name of a node has no address.
    """
    path = meeting_path(run, start)
    if node == 0:
        return _open(run, path, hosts, command)
    until = time.monotonic() + timeout_s
    while (record := meeting_record(path)) is None:
        if time.monotonic() > until:
            raise EchelonError(
                f"the first node, {hosts[0]}, wrote no {path} within {timeout_s:g} s. Does every node see this folder?"
            )
        time.sleep(0.05)
        os.listdir(path.parent)  # makes an NFS client look again
    host, port = record["host"], record["port"]
    interface = interface_of(local_address_towards(host))
    own = record["command_port"]
    return Meeting(node, len(hosts), record["attempt"], host, port, record["token"], interface, None, tuple(hosts), own)


def meeting_path(run: RunDir, start: str) -> Path:
    folder = run.path / "job"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"meeting-{start}.json"


def _open(run: RunDir, path: Path, hosts: list[str], command: bool) -> Meeting:
    host, listener, reserved = "127.0.0.1", None, None  # on one node the ranks get a new store at every attempt
    if len(hosts) > 1:
        host = local_address_towards(hosts[1])
        listener, reserved = _bound(host), _bound(host) if command else None
        listener.listen(1024)
    port, own = (int(each.getsockname()[1]) if each is not None else 0 for each in (listener, reserved))
    token = secrets.token_hex(16)
    attempt = run.next_attempt().attempt
    record = {"host": host, "port": port, "command_port": own, "token": token, "attempt": attempt, "nodes": hosts}
    write_json(path, record)
    return Meeting(0, len(hosts), attempt, host, port, token, interface_of(host), listener, tuple(hosts), own, reserved)


def _bound(host: str) -> socket.socket:
    """A socket bound to a free port."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.bind((host, 0))
    return bound


def local_address_towards(host: str) -> str:
    """This machine's own address on the route to `host`. Nothing is sent: the kernel only looks up the route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LauncherEnvironmentError(f"{socket.gethostname()} cannot resolve node {host}: {error.strerror}.") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A port of this node that is free now. Another process may take it before use; it is not returned twice in a row."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
