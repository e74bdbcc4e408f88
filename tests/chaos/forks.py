"""Processes by the hundred: a server with torch loaded forks them, each dies as it likes, and what it returned is kept.

`Forks` is the test's end. The server is one thread that never computes, so that forking it is safe; it divides a list of jobs
over lanes, which are forks of it, and a lane calls `run` to fork the processes of its job.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kit import forked

ROOT = Path(__file__).parents[2]
LANES = 2
# What a process would else import itself, in more time than all the rest takes it.
NEEDED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
    "echelon.callbacks",
    "echelon.loop.run",
    "tests.chaos.program",
)
# After one rank died, the launcher would end the others; here they may still do what they do by themselves.
PATIENCE_S = 4.0


class Forks:
    """A server of processes, with `library` preloaded. Use as a context."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def __enter__(self) -> Forks:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ECHELON_", "RANK", "WORLD_SIZE"))}
        env |= {
            "LD_PRELOAD": str(self._library),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        env["CUDA_VISIBLE_DEVICES"] = ""
        self._server = forked.popen(
            [sys.executable, "-m", "tests.chaos.forks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT
        )
        return self

    def __call__(self, fn: str, jobs: Sequence[Sequence[Any]], timeout_s: float = 600.0) -> list[Any]:
        """`fn(*job)` for each job, `fn` named like "module:function"; their values, which JSON can hold.

        Raises:
            AssertionError: a job raised; with its traceback.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"fn": fn, "jobs": [list(job) for job in jobs], "timeout_s": timeout_s}
        self._server.stdin.write(json.dumps(request, default=str).encode() + b"\n")
        self._server.stdin.flush()
        answers = json.loads(self._server.stdout.readline() or '[{"error": "the server of forks has gone"}]')
        for job, answer in zip(jobs, answers, strict=False):
            assert "error" not in answer, f"{fn}{tuple(job)}: {answer['error']}"
        return [answer["value"] for answer in answers]

    def __exit__(self, *_: Any) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(60)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()


def arm(folder: str, at: int, action: int, error: int = 0) -> None:
    """From now on this process's calls that change files below `folder` are counted, and the one numbered `at` meets `action`."""
    ctypes.CDLL(None).crashfs_arm(folder.encode(), ctypes.c_long(at), action, error)


COUNT, KILL, TEAR, FAIL, FAIL_ON = range(5)


def calls() -> str:
    """The calls counted so far, a letter each."""
    shim = ctypes.CDLL(None)
    shim.crashfs_calls.restype = ctypes.c_char_p
    text: bytes = shim.crashfs_calls()
    return text.decode()


def run(fn: Callable[..., Any], *args: Any, ranks: int = 1, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    """`fn(*args)` in new processes, which have a gloo group if they are several. How each ended, by rank.

    {"value": ...}, {"error": traceback} or {"signal": number}, with "hung" if it had to be killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    pids = {_fork(folder, rank, ranks, fn, args): rank for rank in range(ranks)}
    ended: dict[int, dict[str, Any]] = {}
    deadline, hung = time.monotonic() + timeout_s, False
    while len(ended) < ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                hung = True
                for left in [p for p, rank in pids.items() if rank not in ended]:
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.005)
            continue
        rank = pids[pid]
        code = os.waitstatus_to_exitcode(status)
        written = folder / f"value-{rank}.json"
        ended[rank] = {"signal": -code} if code < 0 or not written.exists() else json.loads(written.read_bytes())
        if hung:
            ended[rank]["hung"] = True
        elif code:
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
    shutil.rmtree(folder)
    return [ended[rank] for rank in range(ranks)]


def _fork(folder: Path, rank: int, ranks: int, fn: Callable[..., Any], args: Sequence[Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if ranks > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
        answer = {"value": fn(*args)}
        code = 0
    except BaseException:
        answer = {"error": traceback.format_exc()}
    arm("", 0, COUNT)
    half = folder / f"half-{rank}.json"
    half.write_text(json.dumps(answer))
    half.rename(folder / f"value-{rank}.json")
    os._exit(code)


# --- the server


def _lane(fn: Callable[..., Any], jobs: Sequence[Any], to: Path) -> None:
    answers: list[Any] = []
    for job in jobs:
        try:
            answers.append({"value": fn(*job)})
        except BaseException:
            answers.append({"error": traceback.format_exc()})
            break
    to.write_text(json.dumps(answers))


def _serve(request: dict[str, Any]) -> list[Any]:
    module, _, name = request["fn"].partition(":")
    fn, jobs = getattr(importlib.import_module(module), name), request["jobs"]
    lanes = min(LANES, len(jobs))
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        pids = []
        for lane in range(lanes):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                try:
                    _lane(fn, jobs[lane::lanes], Path(folder, str(lane)))
                finally:
                    os._exit(0)
            pids.append(pid)
        deadline = time.monotonic() + request["timeout_s"]
        left = set(pids)
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.005)
        for pid in left:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answers: list[Any] = [{"error": f"not done within {request['timeout_s']:g} s"} for _ in jobs]
        for lane in range(lanes):
            written = Path(folder, str(lane))
            if written.exists():
                found = json.loads(written.read_text())
                answers[lane::lanes] = found + [{"error": "not begun"}] * (len(answers[lane::lanes]) - len(found))
        return answers


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    for name in NEEDED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # so that a fork's collector does not unshare every page
    for line in sys.stdin:
        out.write(json.dumps(_serve(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
