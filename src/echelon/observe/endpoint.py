"""A run's numbers for Prometheus: prometheus_client serves them in a process of its own, from the run's folder."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.common.errors import CommandError
from echelon.common.terminal import one_line
from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import PARTS
from echelon.contracts.version import __version__
from echelon.observe.top import Snapshot, Watch

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

__all__ = ["Endpoint", "Numbers"]

_MOST_RANKS = 1024  # with series of their own
_LATEST = {
    "loss": ("loss", "Loss of the latest update, over all ranks."),
    "eval_loss": ("eval_loss", "Loss of the latest evaluation."),
    "lr": ("learning_rate", "Learning rate of the latest update."),
    "grad_norm": ("gradient_norm", "L2 norm of the latest gradient, before clipping."),
    "tokens_per_s": ("tokens_per_second", "Throughput of all ranks."),
    "samples_per_s": ("samples_per_second", "Throughput of all ranks."),
    "mfu": ("mfu_ratio", "Model FLOPs utilization."),
    "memory_peak_bytes": ("memory_peak_bytes", "Most memory of rank 0's GPU that tensors have had."),
    "host_memory_bytes": ("host_memory_bytes", "Memory of rank 0's process."),
}


@dataclass
class _Series:
    """One number of the run, with its labels besides the run's name."""

    name: str
    told: str
    values: Sequence[tuple[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()


def _series(snapshot: Snapshot) -> Iterator[_Series]:
    def one(name: str, help_text: str, value: float | None) -> _Series:
        return _Series(name, help_text, [] if value is None else [((), float(value))])

    attempt = snapshot.attempt
    yield _Series("info", "Always 1.", [((__version__, one_line(snapshot.ranks[:100])), 1.0)], ("version", "ranks"))
    yield one("running", "1 while an attempt has not ended.", attempt is not None and attempt.exit is None)
    if attempt is not None:
        code = attempt.exit.get("exit_code") if attempt.exit is not None else None
        failed = sum(each.status().kind == "failed" for each in [*snapshot.ended, attempt])
        yield one("attempt", "The number of the latest attempt, from 0.", attempt.number)
        yield one("exit_code", "Of the latest attempt.", code if type(code) is int and abs(code) < 1e6 else None)
        yield one("failed_attempts", "Attempts that have failed.", failed)
    yield one("silent_seconds", "Since the run has written anything.", snapshot.since_s)
    yield one("step", "Training steps completed.", snapshot.step)
    yield one("steps", "Training steps of the whole run.", snapshot.total_steps)
    for key, (name, help_text) in _LATEST.items():
        yield one(name, help_text, snapshot.latest.get(key))
    ranks = [(str(rank), times) for rank, times in list(snapshot.times.items())[:_MOST_RANKS]]
    owns = [((rank,), times.own_s) for rank, times in ranks if times.own_s]
    yield _Series("rank_own_step_seconds", "A usual step of a rank, without waiting for others.", owns, ("rank",))
    steps = [((rank,), float(times.steps[1])) for rank, times in ranks]
    yield _Series("rank_step", "Steps that a rank has completed.", steps, ("rank",))
    shares = [
        ((rank, part.removesuffix("_s")), getattr(times, part) / times.wall_s)
        for rank, times in ranks
        if times.wall_s
        for part in PARTS
    ]
    yield _Series("rank_time_ratio", "Where the latest seconds of a rank went.", shares, ("rank", "part"))


class Numbers:
    """A collector for prometheus_client, which calls it in a thread per client: reads the run's folder at that moment."""

    def __init__(self, run: RunDir) -> None:
        self._watch, self._lock = Watch(run), threading.Lock()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            snapshot = self._watch.look()
        name = one_line(snapshot.name[:100])
        for each in _series(snapshot):
            if each.values:
                family = GaugeMetricFamily(f"echelon_{each.name}", each.told, labels=("run", *each.labels))
                for labels, value in each.values:
                    family.add_metric((name, *labels), value)
                yield family


class Endpoint:
    """A process that serves until it is closed or its parent ends. Not a thread, since a launcher forks.

    It listens as soon as it is created, before there is a run folder, so that a port in use leaves no folder behind.

    Args:
        port: 0 takes a free port.
        bind: the address; use addresses other than this machine's loopback only in trusted networks, since anybody can read.
    Attributes:
        address: URL of the metrics.
    Raises:
        UsageError: the address cannot be used, or prometheus_client is not installed.
    """

    def __init__(self, port: int, bind: str = "127.0.0.1") -> None:
        try:
            host = f"[{bind}]" if ipaddress.ip_address(bind).version == 6 else bind
        except ValueError:
            raise CommandError(f"--metrics-bind must be an address, such as 127.0.0.1 or 0.0.0.0, got {bind!r}.") from None
        words = [sys.executable, "-m", "echelon.observe.endpoint", str(port), bind]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        taken, _, problem = self._process.stdout.readline().strip().partition(" ")
        if not taken.isdecimal():
            self.close()
            raise CommandError(problem or f"--metrics-port {port}: the process that serves it ended without a word.")
        self.address = f"http://{host}:{taken}/metrics"

    def serve(self, run: RunDir) -> None:
        """Serve this run from now on, at its present attempt."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # the run does not depend on this process
            self._process.stdin.write(json.dumps(str(run.path.absolute())) + "\n")
            self._process.stdin.flush()
        self._process.stdout.readline()  # confirms that it has the run

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def _main(port: str, bind: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        print("- --metrics-port needs prometheus_client: pip install 'echelon[prometheus]'.", flush=True)
        return
    registry = CollectorRegistry(auto_describe=False)
    try:
        server, _ = start_http_server(int(port), bind, registry)
    except (OSError, OverflowError) as error:
        message = f"--metrics-port {port} cannot be listened at on {bind}: {str(error).rstrip('.')}."
        print(f"- {message} Give another port, or 0 for a free one.", flush=True)
        return
    print(server.server_port, flush=True)
    if run := sys.stdin.readline():
        registry.register(Numbers(RunDir(json.loads(run))))
        print("serves", flush=True)
        sys.stdin.read()  # returns when the launcher has ended, in whatever way


if __name__ == "__main__":
    _main(*sys.argv[1:])
