"""What test_group runs on Dragon, as a user's script: `cases EXAMPLE PAGE` is all that one start shows, `stand FOLDER` waits."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import echelon as ech


def fall() -> None:
    if ech.RankInfo().my_rank == 1:
        raise ValueError("a fault in the training function")
    time.sleep(60)


def vanish(folder: str = ".") -> None:
    if ech.RankInfo().my_rank == 1:
        while not list(Path(folder).glob("[0-9]*")):  # until the other one runs
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a long call into C: it does not say how it ended
    stand(folder)


def unheard() -> None:
    vanish("unheard")


def unsendable() -> Any:
    return threading.Lock()


def place(*, more: int) -> tuple[Any, ...]:
    info = ech.RankInfo()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return (
        (info.my_rank, info.my_local_rank, info.my_node_rank, info.my_local_world_size, info.world_size),
        sorted(os.sched_getaffinity(0)),
        [os.environ.get(name) for name in names],
        more,
    )


def stand(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}").touch()
    time.sleep(60)


def group(fn: Any, *args: Any, **kwargs: Any) -> ech.launching.CollectiveGroup:
    from dragon.infrastructure.policy import Policy

    started = ech.launching.CollectiveGroup(
        fn, args, kwargs, [Policy(), ech.launching.Policy(gpu_affinity=[3])], hide_stderr=fn is fall
    )
    started.start()
    return started


def cases(example: str, page: str) -> None:
    from dragon.native.process_group import ProcessGroup

    Path("unheard").mkdir()
    patience_s = ProcessGroup._EXCEPTION_Q_PATIENCE
    for fn in (fall, vanish, unheard, unsendable):
        # Of what is `unheard` Dragon's thread hears only when `join` has ended, as it may by chance.
        ProcessGroup._EXCEPTION_Q_PATIENCE = 3.0 if fn is unheard else patience_s
        failing = group(fn)
        try:
            failing.join()
        except ech.EchelonError as error:
            print(
                f"{fn.__name__}: {type(error).__name__} of rank {error.rank}: {error}\n{fn.__name__} by {error.__cause__!r}",
                flush=True,
            )
        failing.close()
        failing.close()
    group(fall).close()
    try:
        ech.launching.CollectiveGroup(fall, policies=[ech.launching.Policy(host_name="elsewhere")]).init()
    except ech.EchelonError as error:
        print(f"elsewhere: {type(error).__name__}: {error}", flush=True)
    late = group(stand, ".")
    try:
        late.join(timeout=0.1)
    except ech.EchelonError as error:
        print(f"late: {type(error).__name__}: {error}", flush=True)
    late.close()
    placed = group(place, more=4)
    placed.join()
    placed.close()
    print(f"places: {placed.values}", flush=True)
    resting = group(time.sleep, 3.0)
    before = time.process_time()
    resting.join()
    print(f"waited in {time.process_time() - before:.1f} s of computing", flush=True)
    resting.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for program, *arguments in ([example], [page, port]):
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")
    group(stand, ".")
    raise SystemExit(3)  # without closing


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        cases(*sys.argv[2:])
    group(stand, sys.argv[2]).join()
