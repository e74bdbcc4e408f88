"""A run's numbers for Prometheus: a small server of the text format 0.0.4, which reads the run's folder when it is asked.

It answers GET and HEAD of /metrics and of /, to one request a connection, and to nothing else. Numbers are read at most once a
second, however often they are asked for; a client that sends nothing, or without end, is left after a few seconds.
"""

from __future__ import annotations

import http.server
import ipaddress
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from echelon.common.errors import CommandError
from echelon.contracts.run_dir import RunDir
from echelon.contracts.times import PARTS
from echelon.contracts.version import __version__
from echelon.observe.top import Snapshot, Watch

__all__ = ["PATIENCE_S", "Endpoint", "Server", "listen", "text_of"]

_FRESH_S = 1.0
PATIENCE_S = 5.0
_AT_ONCE = 16  # connections that are answered at the same time; more are closed
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


def text_of(snapshot: Snapshot) -> str:
    """The exposition: each series with its help and type. Names and labels are ours, but for the run's name."""
    run = f'run="{_label(snapshot.name)}"'
    parts: list[str] = []

    def series(name: str, kind: str, told: str, values: list[tuple[str, float]]) -> None:
        if values:
            parts.append(f"# HELP echelon_{name} {told}\n# TYPE echelon_{name} {kind}")
            parts.extend(f"echelon_{name}{{{labels}}} {_number(value)}" for labels, value in values)

    attempt = snapshot.attempt
    running = attempt is not None and attempt.exit is None
    series("info", "gauge", "Always 1.", [(f'{run},version="{__version__}",ranks="{_label(snapshot.ranks)}"', 1.0)])
    series("running", "gauge", "1 while an attempt has not ended.", [(run, float(running))])
    if attempt is not None:
        series("attempt", "gauge", "The number of the latest attempt, from 0.", [(run, float(attempt.number))])
        code = attempt.exit.get("exit_code") if attempt.exit is not None else None
        series(
            "exit_code", "gauge", "Of the latest attempt.", [(run, float(code))] if type(code) is int and abs(code) < 1e6 else []
        )
        failed = sum(each.status().kind == "failed" for each in [*snapshot.ended, attempt])
        series("failed_attempts", "gauge", "Attempts that have failed.", [(run, float(failed))])
    if snapshot.since_s is not None:
        series("silent_seconds", "gauge", "Since the run has written anything.", [(run, snapshot.since_s)])
    series("step", "gauge", "Training steps completed.", [(run, float(snapshot.step))])
    if snapshot.total_steps is not None:
        series("steps", "gauge", "Training steps of the whole run.", [(run, float(snapshot.total_steps))])
    for key, (name, told) in _LATEST.items():
        series(name, "gauge", told, [(run, snapshot.latest[key])] if key in snapshot.latest else [])
    ranks = list(snapshot.times.items())[:_MOST_RANKS]
    owns = [(f'{run},rank="{rank}"', times.own_s) for rank, times in ranks if times.own_s]
    series("rank_own_step_seconds", "gauge", "A usual step of a rank, without waiting for others.", owns)
    series("rank_step", "gauge", "Steps that a rank has completed.", [(f'{run},rank="{r}"', float(t.steps[1])) for r, t in ranks])
    shares = [
        (f'{run},rank="{rank}",part="{part.removesuffix("_s")}"', getattr(times, part) / times.wall_s)
        for rank, times in ranks
        if times.wall_s
        for part in PARTS
    ]
    series("rank_time_ratio", "gauge", "Where the latest seconds of a rank went.", shares)
    return "\n".join([*parts, ""])


def _label(text: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in text[:100])
    return plain.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class Endpoint:
    """A process of its own that serves until it is closed, or its parent ends: a launcher forks, which threads make unsafe.

    Args:
        run: at whatever attempt it is when asked.
        listening: as `listen` gives it; closed here.
    Attributes:
        address: where it answers.
    """

    def __init__(self, run: RunDir, listening: socket.socket) -> None:
        with listening:
            host, port = listening.getsockname()[:2]
            self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
            words = [str(listening.fileno()), str(os.getpid()), str(run.path.absolute())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "echelon.observe.endpoint", *words],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def listen(port: int, bind: str = "127.0.0.1") -> socket.socket:
    """A socket that listens.

    Args:
        port: 0 takes a free one.
        bind: the address; others than this machine's own are for networks that one trusts: anybody may read.
    Raises:
        UsageError: the address cannot be listened at.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(bind).version == 6 else socket.AF_INET
    except ValueError:
        raise CommandError(f"--metrics-bind must be an address, such as 127.0.0.1 or 0.0.0.0, got {bind!r}.") from None
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((bind, port))
        made.listen(64)
    except (OSError, OverflowError) as error:
        made.close()
        raise CommandError(
            f"--metrics-port {port} cannot be listened at on {bind}: {str(error).rstrip('.')}. "
            "Give another port, or 0 for a free one."
        ) from error
    return made


class Server(http.server.ThreadingHTTPServer):
    """Answers at a socket that listens.

    Args:
        parent: the process whose end is this one's; None is none.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, run: RunDir, parent: int | None = None) -> None:
        self._watch, self._lock, self._text, self._at = Watch(run), threading.Lock(), b"", -math.inf
        self._places, self._parent = threading.BoundedSemaphore(_AT_ONCE), parent
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def text(self) -> bytes:
        """The numbers, at most a second old."""
        with self._lock:
            if time.monotonic() - self._at >= _FRESH_S:
                self._text, self._at = text_of(self._watch.look()).encode("utf-8", "replace"), time.monotonic()
            return self._text

    def service_actions(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or talks nonsense, is none of the run's business."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    server_version = sys_version = ""
    protocol_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(PATIENCE_S)  # for one reading
        # A byte every few seconds would else be read for hours.
        self._end = threading.Timer(PATIENCE_S, self._hang_up)
        self._end.daemon = True
        self._end.start()

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def _hang_up(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "Not here: /metrics is")
            return
        text = self.server.text()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if with_body:
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the run's."""


def _main(fd: str, parent: str, run: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to hear
    Server(socket.socket(fileno=int(fd)), RunDir(run), int(parent)).serve_forever(poll_interval=0.5)


if __name__ == "__main__":
    _main(*sys.argv[1:])
