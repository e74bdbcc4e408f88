"""Ranks that stand ready: a module's tests send them functions, one after another, instead of starting processes for each.

A fresh rank costs a tenth of a second, and what torch learns anew in it (how each operator is sharded, above all) a third of
one. Standing ranks have learnt it. They are for functions that train, compute and return: each finds the environment, the
working directory, the random generators and the signals' handlers as in a fresh rank, and one that leaves a torch default or a
function of a module changed fails.
The process group stays, since torch's caches hold meshes over it. Whatever ends, signals or launches ranks needs fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import operator
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from echelon.common.errors import EchelonError, RankFailedError, RankTimeoutError
from echelon.contracts.rank import RankInfo
from echelon.contracts.stopping import SIGNALS
from echelon.launcher.local.server import ForkServer
from echelon.launcher.local.start import Start

JOIN_S = 180.0
GRACE_S = 2.0  # that the others have once a rank has failed: they wait for it


class StandingRanks:
    """`world_size` ranks of a gloo group, forked from `server`; `folder` holds their logs and what they meet through."""

    def __init__(self, server: ForkServer, world_size: int, folder: Path) -> None:
        folder.mkdir()
        self._server, self._folder = server, folder
        self._connections: list[Connection] = []
        address = str(folder / "calls")
        with Listener(address, "AF_UNIX") as listener:
            self.pids = [server.fork(self._start(rank, world_size, address)) for rank in range(world_size)]
            by_rank = {}
            for _ in self.pids:
                connection = listener.accept()
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(world_size)]

    def _start(self, rank: int, world_size: int, address: str) -> Start:
        env = {**os.environ, **RankInfo(rank, world_size=world_size).to_env(), "OMP_NUM_THREADS": "1"}
        log = str(self._folder / f"rank{rank}.log")
        return Start("script", __file__, [address, str(self._folder / "store")], env, os.getcwd(), sys.path, log=log)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; its values, by rank. After an error the ranks are gone.

        Raises:
            RankFailedError: with the traceback of the first rank that failed, and its exception as the cause.
            RankTimeoutError: with the stacks of all.
        """
        message = cloudpickle.dumps((fn, args, kwargs, dict(os.environ), os.getcwd(), list(sys.path)))
        for connection in self._connections:
            connection.send_bytes(message)
        values: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        while len(values) < len(self.pids):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in values]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise self._timed_out(timeout_s)
            for connection in ready:
                rank = self._connections.index(connection)
                value, text, error = self._answer(connection)
                if text:
                    logs = str(self._folder)
                    raise RankFailedError(f"rank {rank} failed first\n\n{text}", rank=rank, exit_code=1, logs=logs) from error
                values[rank] = value
        return [values[rank] for rank in range(len(self.pids))]

    def _answer(self, connection: Connection) -> tuple[Any, str, Exception | None]:
        try:
            return cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None, f"it ended by itself; its log:\n{self._logs()}", None

    def _timed_out(self, timeout_s: float) -> RankTimeoutError:
        for pid in self.pids:
            self._server.signal(pid, signal.SIGUSR2, group=False)
        time.sleep(GRACE_S)
        return RankTimeoutError(f"after {timeout_s:g} s the ranks are at\n{self._logs()}", rank=0, exit_code=1)

    def _logs(self) -> str:
        return "\n".join(
            f"{log.name}:\n{log.read_text(errors='replace')[-20_000:]}" for log in sorted(self._folder.glob("*.log"))
        )

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        left = set(self.pids)
        try:
            for pid in left:
                self._server.signal(pid, signal.SIGKILL)
            while left := left - self._server.poll(0.1).keys():
                pass
            for pid in self.pids:
                self._server.forget(pid)
        except (EchelonError, OSError):  # the server has gone, and they with it
            pass


class StandingRanksBySize:
    """As the fixture `ranks`, with the processes of earlier calls: `ranks(2, fn, *args)`."""

    def __init__(self, server: Callable[[], ForkServer], folder: Path) -> None:
        self._server, self._folder, self._started = server, folder, 0
        self._standing: dict[int, StandingRanks] = {}

    @property
    def pids(self) -> set[int]:
        return {pid for ranks in self._standing.values() for pid in ranks.pids}

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = JOIN_S, **kwargs: Any
    ) -> list[Any]:
        if world_size not in self._standing:
            self._started += 1
            folder = self._folder / str(self._started)
            self._standing[world_size] = StandingRanks(self._server(), world_size, folder)
        try:
            return self._standing[world_size].call(fn, args, kwargs, timeout_s)
        except BaseException:
            self._standing.pop(world_size).close()
            raise

    def close(self) -> None:
        while self._standing:
            self._standing.popitem()[1].close()


def serve(address: str, store: str) -> None:
    """A rank: calls what comes, until nobody is there to send it."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    own = RankInfo().to_env()
    fresh, watched = _defaults(), Definitions()
    generators = random.getstate(), torch.get_rng_state(), _numpy_state()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}  # joining the ranks replaces them
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])
        sys.modules["numpy"].random.set_state(generators[2])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        connection.send_bytes(_called(message, own, fresh, watched))


def _called(message: bytes, own: dict[str, str], fresh: dict[str, Any], watched: Definitions) -> bytes:
    try:
        try:
            fn, args, kwargs, env, directory, path = cloudpickle.loads(message)
            os.environ.clear()
            os.environ.update({**env, **own, "OMP_NUM_THREADS": "1"})
            os.chdir(directory)
            sys.path[:] = path
            watched.begin()
            value = fn(*args, **kwargs)
            del fn, args, kwargs
            left = {name: now for name, now in _defaults().items() if now != fresh[name]}
            left |= dict.fromkeys(watched.replaced(), "replaced")
            assert not left, f"the function left behind {left}: use fresh ranks for it"
            return cloudpickle.dumps((value, "", None))
        finally:
            gc.collect()
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return cloudpickle.dumps((None, text, error))
        except Exception:
            return cloudpickle.dumps((None, text, None))


def _is_torchs(function: Any) -> bool:
    """Whether it is an optimizer class's `step` as torch wraps it when the class is first used."""
    return bool(getattr(function, "hooked", False))


def _defaults() -> dict[str, Any]:
    return {
        "another default dtype": torch.get_default_dtype(),
        "gradients switched": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "a number of threads": torch.get_num_threads(),
        "a process group": dist.is_initialized(),
    }


class Definitions:
    """The functions and classes of the library and of torch.distributed, and what the classes define: 20,000 names.

    Most calls replace none, which is seen without looking at the names one by one.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[list[str], list[Any]]] = {}

    def begin(self) -> None:
        self._before = {name: (list(space), list(space.values())) for name, space in _namespaces()}

    def replaced(self) -> list[str]:
        """What another thing has the name of since `begin`."""
        found = []
        for place, space in _namespaces():
            names, values = self._before.get(place, ([], []))
            if len(space) == len(values) and all(map(operator.is_, space.values(), values)):
                continue
            before = dict(zip(names, values, strict=True))
            for name, now in list(space.items()):
                if callable(now) and callable(before.get(name)) and before[name] is not now and not _is_torchs(now):
                    found.append(f"{place}.{name}")
        return found


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if name.startswith("echelon") or name in ("torch.distributed", "os", "time"):
            space = vars(module)
            yield name, space
            for key, value in list(space.items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{key}", vars(value)


def _numpy_state() -> Any:
    import numpy

    return numpy.random.get_state()


if __name__ == "__main__":
    from tests.kit import standing  # the module, not a second copy of it

    standing.serve(*sys.argv[1:])
