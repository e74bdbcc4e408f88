"""CollectiveGroup: a function on a group of ranks that can communicate, with Dragon's calls `init start join close`.

On Dragon's runtime it is Dragon's own group (`launcher.dragon`); elsewhere the ranks run on this machine, as with `launch`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from echelon.common.arguments import flags, mapping, several
from echelon.common.errors import ClusterError, RankTimeoutError
from echelon.common.numbers import number, whole
from echelon.launcher.dragon.system import System, on_dragon
from echelon.launcher.functions.launch import Cancel, call, check_function
from echelon.launcher.job import auto_ranks
from echelon.launcher.local.worker import set_threads

__all__ = ["BaseLoader", "CollectiveGroup"]

logger = logging.getLogger(__name__)


class _Backend(Protocol):
    def start(self) -> None: ...

    def join(self, timeout: float | None) -> list[Any]: ...

    def close(self) -> None: ...


class CollectiveGroup:
    """Runs `training_fn` on one rank per policy. Inside, `RankInfo()`, `init_from_env()` and `env://` work.

    Args:
        training_fn: a function that `launch` could send.
        training_args, training_kwargs: its arguments.
        policies: one per rank, `echelon.launching.Policy` or Dragon's; by default one rank per GPU, else one per core.
        hide_stderr: drop the ranks' standard error. The traceback of a failure is reported all the same.
        port: where rank 0 serves the group's store, on Dragon; by default a free port. Ranks of this machine always have a store
            that is bound before they start.
        nprocs: number of ranks, if there are no policies.
    Attributes:
        values: the function's return values by rank, after `join`.
    """

    def __init__(
        self,
        training_fn: Callable[..., Any],
        training_args: Sequence[Any] | None = None,
        training_kwargs: Mapping[str, Any] | None = None,
        policies: Sequence[Any] | None = None,
        hide_stderr: bool = False,
        port: int | None = None,
        *,
        nprocs: int | None = None,
    ) -> None:
        check_function("training_fn", training_fn)
        if port is not None:
            number(
                "port",
                port,
                "between 1 and 65535, or None for a free one",
                lambda n: n == int(n) and 0 < n < 65536,
                kind=ClusterError,
            )
        flags(hide_stderr=hide_stderr, kind=ClusterError)
        if policies is not None:
            policies = several(
                "policies", policies, "a list of Policy(...)", lambda each: hasattr(each, "cpu_affinity"), kind=ClusterError
            )
        if nprocs is not None:
            nprocs = whole("nprocs", nprocs, at_least=1, kind=ClusterError)
        if nprocs is not None and policies and nprocs != len(policies):
            raise ClusterError(f"nprocs must be the number of policies, {len(policies)}, got {nprocs}. Leave nprocs out.")
        if policies is not None and not policies:
            logger.warning("policies is empty, as gpu_policies() is without a GPU; starting one rank per core")
        self.policies = list(policies or _by_default(nprocs))
        self._placed = BaseLoader(training_fn, self.policies, hide_stderr)
        arguments = several(
            "training_args", training_args if training_args is not None else (), "a list or tuple of arguments", kind=ClusterError
        )
        self._call = (arguments, mapping("training_kwargs", training_kwargs, kind=ClusterError))
        self._port = port
        self._backend: _Backend | None = None
        self._state = "new"
        self.values: list[Any] | None = None

    def init(self) -> None:
        """Prepare the ranks. Nothing runs yet."""
        self._must_be("init", "new")
        if on_dragon():
            from echelon.launcher.dragon.ranks import DragonRanks

            self._backend = DragonRanks(self._placed, *self._call, self.policies, self._port)
        else:
            self._backend = _LocalRanks(self._placed, *self._call, self.policies)
        self._state = "ready"

    def start(self) -> None:
        """Start the ranks, and return."""
        if self._state == "new":
            self.init()
        self._must_be("start", "ready")
        assert self._backend is not None
        self._state = "running"
        self._backend.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for all ranks.

        Args:
            timeout: seconds; None waits forever.
        Raises:
            RankFailedError: with the traceback of the rank that failed first; the other ranks have been ended.
            RankTimeoutError: the ranks still run. They continue, and `join` may be called again.
        """
        if self.values is None:
            self._must_be("join", "running")
            assert self._backend is not None
            self.values = self._backend.join(timeout)

    def close(self) -> None:
        """End ranks that still run, and free everything. Never raises a rank's failure; safe to call twice."""
        if self._backend is not None and self._state != "closed":
            self._backend.close()
        self._state = "closed"

    def _must_be(self, what: str, state: str) -> None:
        if self._state != state:
            raise ClusterError(
                f"CollectiveGroup.{what}() was called on a group that is {self._state}. The order is init, start, join, close."
            )

    def __enter__(self) -> CollectiveGroup:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BaseLoader:
    """The function with its ranks' places: a rank takes its place before it calls the function. Picklable if the function is."""

    def __init__(self, fn: Callable[..., Any], policies: Sequence[Any], hide_stderr: bool) -> None:
        self.fn, self.hide_stderr = fn, hide_stderr
        self.cores = [list(policy.cpu_affinity) for policy in policies]
        self.devices = [(policy.gpu_env_str or "CUDA_VISIBLE_DEVICES", list(policy.gpu_affinity)) for policy in policies]
        self.__name__ = getattr(fn, "__name__", "group")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.take_place(int(os.environ["RANK"]))
        return self.fn(*args, **kwargs)

    def take_place(self, rank: int) -> None:
        """Set the cores, devices and threads of this rank, before any code uses them."""
        if self.hide_stderr:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        name, devices = self.devices[rank]
        if devices:
            os.environ[name] = ",".join(map(str, devices))
        if cores := self.cores[rank]:
            os.sched_setaffinity(0, cores)
            set_threads(len(cores))


class _LocalRanks:
    """Ranks of this machine, started by `launch`, which blocks, in a thread."""

    def __init__(self, fn: BaseLoader, args: Sequence[Any], kwargs: Mapping[str, Any], policies: Sequence[Any]) -> None:
        _check_here(policies)
        self._cancel = Cancel()
        self._values: list[Any] = []
        self._error: BaseException | None = None
        # Waited for instead of the thread: if Ctrl-C interrupts `join`, Python 3.11 takes the thread for ended.
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(fn, args, kwargs, len(policies)), name="echelon-group", daemon=True
        )

    def _run(self, fn: BaseLoader, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int) -> None:
        try:
            self._values = call(fn, ranks=ranks, args=args, kwargs=kwargs, cancel=self._cancel)
        except BaseException as error:  # raised again by `join`
            self._error = error
        finally:
            self._ended.set()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None) -> list[Any]:
        if not self._ended.wait(timeout):
            raise RankTimeoutError(f"the ranks had not finished after {timeout:g} s.", rank=0, exit_code=124)
        if self._error is not None:
            raise self._error
        return self._values

    def close(self) -> None:
        if self._thread.ident is not None and not self._ended.is_set():
            self._cancel.now()
            self._ended.wait()


def _by_default(ranks: int | None) -> list[Any]:
    system = System()
    if ranks is None and (policies := system.gpu_policies()):
        return policies
    if not on_dragon():
        ranks = ranks if ranks is not None else auto_ranks()
    return system.cpu_policies(ranks)


def _check_here(policies: Sequence[Any]) -> None:
    """Check that policies fit this machine.

    Raises:
        UsageError: a policy for another machine, or for cores that do not exist here.
    """
    local_hosts = {*System().hosts, "localhost", ""}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    for rank, policy in enumerate(policies):
        if policy.host_name not in local_hosts:
            raise ClusterError(
                f"policies[{rank}].host_name must be this machine, got {policy.host_name!r}. Other nodes are reached on Dragon's "
                "runtime, `echelon dragon`, or with `echelon submit`."
            )
        if absent := set(policy.cpu_affinity) - cores:
            raise ClusterError(f"policy {rank}: this process may not use core {', '.join(map(str, sorted(absent)))}.")
