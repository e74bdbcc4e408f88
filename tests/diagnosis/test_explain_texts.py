"""What torch, NCCL, gloo and CUDA write, from logs of runs whose fault is known: who is named, why, and what is to be done.

Shortened to what is needed. Most need GPUs: they come as the records and logs that ranks leave, through the launcher's own hands.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import echelon as ech
from echelon.common.errors import RankFailedError
from echelon.contracts.pulse import Phase, RankProgress
from echelon.contracts.run_dir import RunDir
from echelon.diagnosis import Evidence, Verdict, explain
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.functions.launch import launch
from echelon.launcher.local.attempt import Attempt
from echelon.launcher.local.end_record import record_end
from echelon.launcher.local.rank_state import RankState

LIBRARIES = "/p/lib/python3.11/site-packages/"
GROUPS = LIBRARIES + "torch/distributed/distributed_c10d.py"
LOADER = LIBRARIES + "torch/utils/data/dataloader.py"
TENSOR = LIBRARIES + "torch/_tensor.py"
MINE = "/home/me/train.py"


@dataclass(frozen=True)
class Ended:
    """How a rank ended: by an error raised in `file`, by a signal, or not at all; `log` is what it wrote besides."""

    error: str = ""
    file: str = MINE
    log: str = ""
    number: int = 0
    step: int = 7
    late_s: float = 0.0


def raised(error: str, file: str = MINE, **more: float) -> Ended:
    return Ended(error, file, late_s=more.get("late_s", 0.0))


def aborted(log: str) -> Ended:
    return Ended(log=log, number=signal.SIGABRT)


def _record(end: Ended, time_ns: int) -> dict[str, object]:
    kind, _, message = end.error.partition(": ")
    frames = [MINE] if end.file == MINE else [MINE, end.file]
    lines = "".join(f'  File "{file}", line 41, in step\n    x()\n' for file in frames)
    text = f"Traceback (most recent call last):\n{lines}{end.error}\n"
    said = {"kind": kind.rpartition(".")[2], "message": message, "user_frames": [f'File "{MINE}", line 41, in step']}
    return {"exit_code": 1, "time_ns": time_ns, **said, "traceback": text, "ours": False, "loaded": [], "collectives": {}}


def verdict_of(folder: Path, ranks: Mapping[int, Ended]) -> tuple[Verdict, Failure]:
    """What is concluded, and which failure is shown first. Who is not in `ranks` runs on, in step 7."""
    run = RunDir(folder / "run").at_attempt(0)
    run.attempt_path.mkdir(parents=True, exist_ok=True)
    attempt, world_size, now = Attempt(0, run.attempt_path), max(2, max(ranks) + 1), time.monotonic_ns()
    seen = {}
    for rank in range(world_size):
        end, time_ns = ranks.get(rank, Ended()), now + rank
        attempt.pids[rank] = 1000 + rank
        seen[rank] = RankState(RankProgress(end.step, Phase.STEP))
        attempt.log_path(rank).write_text("step 6\n" * 100 + end.log)
        if end.error:
            time_ns += int(end.late_s * 1e9)
            attempt.record_path(rank).write_text(json.dumps(_record(end, time_ns)))
        if end.error or end.number:
            attempt.ended[rank] = (end.number or 1 << 8, time_ns)
    first = record_end(run, 1, attempt.failures(), seen=seen, world_size=world_size)
    assert first is not None
    return explain(Evidence.of(run.path, 0)), first


# ---- texts of the watchdog of torch's NCCL groups, and of uncaught exceptions in C++ -------------------------------------------

CUDA_ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
    "assertions.\n\n"
)
STACK = "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):\n" + (
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f4c560b9446 in libc10.so)\n" * 3
)
REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5\nncclRemoteError: A call "
    "failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "NET/IB : Got completion from peer 172.21.17.89<38536> with error 5, opcode 48, len 32710, vendor err 249\n"
)
SEES_DUMP = (
    "[rank0]:[E1] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to a collective timeout from {} and we\n"
)


def terminated(what: str, kind: str = "c10::DistBackendError") -> str:
    return f"terminate called after throwing an instance of '{kind}'\n  what():  {what}\n{STACK}"


def watchdog(what: str, advice: str = "") -> str:
    said = f"[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: {what}"
    return f"[rank1]:[E117 11:40:54.259889664 ProcessGroupNCCL.cpp:1595] {said}\n{advice}{STACK}\n{terminated(said)}"


TIMED_OUT = (
    "[rank0]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.\n[rank0]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) "
    "Rank 0] Timeout at NCCL work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.\n"
)
ILLEGAL = "CUDA error: an illegal memory access was encountered"
ECC = "CUDA error: uncorrectable ECC error encountered"
BAD_LABEL = raised("ValueError: bad label", late_s=1.0)


def nccl(what: str, last: str) -> str:
    where = "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:275"
    return f"{where}, {what}, NCCL version 2.20.5\nLast error:\n{last}"


INTERNAL, UNHANDLED = "internal error - please report this issue to the NCCL developers", "unhandled cuda error"
SYSTEM = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
FULL = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"


@pytest.mark.parametrize(
    ("victim", "guilty", "cause", "says"),
    [
        (aborted(TIMED_OUT), raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", late_s=1),
         "device out of memory", "micro-batches"),
        (aborted(watchdog(REMOTE)), aborted(watchdog(ILLEGAL, CUDA_ADVICE)),
         "device error", "illegal memory.*CUDA_LAUNCH_BLOCKING=1"),
        (aborted(watchdog(REMOTE)), aborted(watchdog(ECC, CUDA_ADVICE)),
         "device fault", "uncorrectable ECC.*without that machine"),
        # Of an error of its own torch first says that it timed out, since it makes all ranks dump their records.
        (aborted(SEES_DUMP.format(" rank 1")),
         aborted(SEES_DUMP.format("this local rank") + watchdog("NCCL error: unhandled cuda error, NCCL version 2.27.3\n"
                 "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                 "Cuda failure 700 'an illegal memory access was encountered'")),
         "device error", "Last error: Cuda failure 700"),
        (aborted(terminated(REMOTE, "std::runtime_error")), BAD_LABEL, "exception", "bad label"),
        (aborted(terminated("[/b/gloo/gloo/transport/tcp/pair.cc:572] Connection closed by peer [10.128.15.205]:53666",
                            "gloo::IoException")), BAD_LABEL, "exception", "bad label"),
        (aborted(terminated("[/b/gloo/gloo/transport/tcp/pair.cc:378] writev [127.0.0.1]:11160: Connection reset by peer",
                            "gloo::IoException")), BAD_LABEL, "exception", "bad label"),
        (aborted("[rank0]:[F1019 01:14:03.356851194 ProcessGroupNCCL.cpp:1224] [PG 3 Rank 0] [PG 3 Rank 0] "
                 "ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring "
                 "enqueued collectives. This typically\n"),
         BAD_LABEL, "exception", "bad label"),
        (raised(nccl(INTERNAL, "Socket recv failed while polling for opId=0x55a51966cc80"), GROUPS),
         raised(nccl(UNHANDLED, "Failed to CUDA calloc 6291456 bytes"), GROUPS, late_s=1),
         "device out of memory", "micro-batches"),
        (raised(nccl(INTERNAL, "Net : Connection closed by remote peer a100-22<47861>"), GROUPS), Ended(number=signal.SIGSEGV),
         "crash", "SIGSEGV"),
        (raised(nccl(SYSTEM, "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort"), GROUPS),
         BAD_LABEL, "exception", "bad label"),
        (raised("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
                "server shutdown or crash?", GROUPS), BAD_LABEL, "exception", "bad label"),
        (raised("RuntimeError: Rank 0 successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0.\n Original exception: \n[../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                "[10.0.0.2]:35230", GROUPS),
         BAD_LABEL, "exception", "bad label"),
        (raised("RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] "
                "no error", GROUPS),
         BAD_LABEL, "exception", "bad label"),
    ],
)  # fmt: skip
def test_the_rank_that_failed_by_itself_is_named_and_not_the_one_that_lost_it(
    tmp_path: Path, victim: Ended, guilty: Ended, cause: str, says: str
) -> None:
    verdict, first = verdict_of(tmp_path, {0: victim, 1: guilty})
    assert (verdict.guilty, verdict.cause, first.rank) == ((1,), cause, 1), verdict
    assert re.search(says, verdict.paragraph), verdict.paragraph


@pytest.mark.parametrize(
    "waited",
    [
        aborted(TIMED_OUT + terminated(f"[Rank 0] {TIMED_OUT}")),
        aborted("[rank0]:[E1019 ProcessGroupNCCL.cpp:1413] [PG 3 Rank 0] Heartbeat monitor timed out!\n[rank0]:[F429 "
                "ProcessGroupNCCL.cpp:1554] [PG ID 0 Rank 0] Terminating the process after attempting to dump debug info, due to "
                "ProcessGroupNCCL watchdog hang.\n"),
        *(raised(f"torch.distributed.DistBackendError: [0] is setting up NCCL communicator and retrieving "
                 f"ncclUniqueId from [1] via c10d key-value store by key '0', but store->get('0') got error: {error}", GROUPS)
          for error in ("Socket Timeout", "wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
                        "Timeout waiting for key: default_pg/0/0 after 1800000 ms")),
        raised("RuntimeError: NCCL communicator was aborted on rank 0.  Original reason for failure was: [Rank 0] "
               "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST) ran", GROUPS),
    ],
)  # fmt: skip
def test_the_one_for_whom_a_rank_waited_in_vain_is_named(tmp_path: Path, waited: Ended) -> None:
    verdict, first = verdict_of(tmp_path, {0: waited, 1: Ended(step=6)})
    assert (verdict.guilty, verdict.cause, first.rank) == ((1,), "did not come", 1), verdict
    verdict, first = verdict_of(tmp_path / "alike", {0: waited, 1: Ended(step=7)})
    assert verdict.guilty == () and first.rank == 0  # nothing tells


@pytest.mark.parametrize(("step", "guilty"), [(6, (1,)), (7, ())])
def test_one_that_heard_of_the_timeout_and_was_ended_too_is_named_if_it_is_behind(
    tmp_path: Path, step: int, guilty: tuple[int, ...]
) -> None:
    told = Ended(log=SEES_DUMP.format(" rank 0"), number=signal.SIGABRT, step=step)
    verdict, first = verdict_of(tmp_path, {0: aborted(TIMED_OUT + STACK), 1: told, 2: aborted(TIMED_OUT + STACK)})
    assert verdict.guilty == guilty and first.rank == (guilty or (0,))[0], verdict
    shown = render(first, 3)
    assert ("collective operation timeout" in shown or first.rank == 1) and "frame #0" not in shown


def test_a_rank_that_raised_is_judged_by_that_although_it_was_aborted_while_it_ended(tmp_path: Path) -> None:
    """As happens to every rank with an error of its device: the threads of NCCL, or what frees memory there, fail as well."""
    error = "RuntimeError: CUDA error: device-side assert triggered"
    log = terminated("NCCL error in: ../NCCLUtils.hpp:181, unhandled cuda error\nProcess Group destroyed on rank 0", "c10::Error")
    verdict, first = verdict_of(tmp_path, {0: Ended(error, TENSOR, log, signal.SIGABRT)})
    assert (verdict.guilty, verdict.cause, first.kind) == ((0,), "device error", "RuntimeError")
    assert "at train.py:41 in step" in verdict.headline and first.exit_code == 134
    lost = Ended(nccl("remote process exited or there was a network error", "x"), GROUPS, log, signal.SIGABRT)
    verdict, _ = verdict_of(tmp_path / "lost", {0: lost, 1: BAD_LABEL})
    assert verdict.guilty == (1,)


def _aborts_at_exit() -> None:
    ech.init_from_env()
    if dist.get_rank() == 1:
        atexit.register(os.abort)
        raise ValueError("bad label")
    dist.all_reduce(torch.ones(4))


@pytest.mark.full
def test_a_real_rank_that_raises_and_aborts_while_it_ends_has_raised(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: bad label"):
        launch(_aborts_at_exit, ranks=2, run_dir=tmp_path)


# ---- what an error means ------------------------------------------------------------------------------------------------------

WORKERS = "DataLoader worker (pid 46794) is killed by signal: "
CAUGHT = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "/p/w.py", line 9, in f\n'
)


@pytest.mark.parametrize(
    ("error", "file", "cause", "says"),
    [
        ("torch.AcceleratorError: CUDA error: out of memory", GROUPS, "device out of memory", "micro-batches"),
        ("RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB", TENSOR, "device out of memory", "micro-batches"),
        (nccl(UNHANDLED, "Cuda failure 2 'out of memory'"), GROUPS, "device out of memory", "micro-batches"),
        ("RuntimeError: unable to write to file </torch_31911_952_6686>: No space left on device (28)", TENSOR,
         "shared memory full", "/dev/shm"),
        (f"RuntimeError: {CAUGHT}RuntimeError: unable to write to file </torch_739_4>: No space left on device (28)", LOADER,
         "shared memory full", "--shm-size"),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>: Success (0)", TENSOR,
         "shared memory full", "df"),
        (nccl(SYSTEM, FULL), GROUPS, "shared memory full", "/dev/shm is full"),
        ("OSError: [Errno 28] No space left on device: '/scratch/a.pt'", MINE, "disk full", "Make room"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", MINE, "disk full", "df -h"),
        ("RuntimeError: basic_ios::clear: iostream error", MINE, "disk full", "df -h"),
        ("OSError: [Errno 27] File too large: '/scratch/a.pt'", MINE, "file too large", "`ulimit -f`"),
        ("RuntimeError: unable to open shared memory object </torch_29919_13> in read-write mode: Too many open "
         "files (24)", TENSOR,
         "too many open files", "ulimit -n"),
        ("RuntimeError: received 0 items of ancdata", "/p/lib/python3.11/multiprocessing/reduction.py",
         "too many open files", "ulimit -n"),
        ("OSError: [Errno 24] Too many open files: '/data/shard-00017.bin'", MINE, "too many open files", "ulimit -n"),
        (f"RuntimeError: {WORKERS}Bus error. It is possible that dataloader's workers are out of shared memory. "
         "Please try to raise your shared memory limit.", LOADER, "data worker", "/dev/shm"),
        ("RuntimeError: DataLoader worker (pid(s) 1995171, 1996371) exited unexpectedly", LOADER, "data worker", "num_workers=0"),
        ("RuntimeError: Pin memory thread exited unexpectedly", LOADER, "data worker", "num_workers=0"),
        (f"RuntimeError: {ECC}\n{CUDA_ADVICE}", TENSOR, "device fault", "Xid"),
        (f"torch.AcceleratorError: {ILLEGAL}\n{CUDA_ADVICE}", TENSOR, "device error", "CUDA_LAUNCH_BLOCKING=1"),
        ("RuntimeError: CUDA error: unspecified launch failure", GROUPS, "device error", "CUDA_LAUNCH_BLOCKING=1"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", MINE,
         "device error", "memory left"),
        ("torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", MINE,
         "device setup", "another process"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", MINE,
         "device setup", "was built for"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", MINE, "device setup", "driver"),
        (nccl("invalid usage", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device f000"), GROUPS,
         "device shared", "local"),
        (nccl(INTERNAL, "Bootstrap : no socket interface found"), GROUPS, "network interface", "NCCL_SOCKET_IFNAME"),
        ("RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
         "Unable to find address for: eth99", GROUPS, "network interface", "eth99.*no such network.*GLOO_SOCKET_IFNAME"),
        (nccl(UNHANDLED, "Cuda failure 999 'unknown error'"), GROUPS, "NCCL", "Cuda failure 999.*NCCL_DEBUG=INFO"),
        ("RuntimeError: DDP expects same model across all ranks, but Rank 1 has 128 params, while rank 0 has "
         "inconsistent 0 params.",
         LIBRARIES + "torch/distributed/utils.py", "ranks differ", "same module"),
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/x",
         LIBRARIES + "huggingface_hub/utils/_http.py", "download", "HF_HUB_OFFLINE=1"),
    ],
)  # fmt: skip
def test_an_error_has_its_cause_and_a_remedy_that_helps(tmp_path: Path, error: str, file: str, cause: str, says: str) -> None:
    verdict, _ = verdict_of(tmp_path, {0: aborted(TIMED_OUT), 1: raised(error, file, late_s=1.0)})
    assert (verdict.guilty, verdict.cause) == ((1,), cause), verdict
    assert re.search(says, verdict.paragraph), verdict.paragraph


def test_ranks_that_waited_for_some_that_never_came_are_not_to_blame(tmp_path: Path) -> None:
    for n, error in enumerate(
        (
            "DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
            "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node0, 29500).",
        )
    ):
        verdict, _ = verdict_of(tmp_path / str(n), {0: raised(error, GROUPS)})
        assert (verdict.guilty, verdict.cause) == ((), "ranks missing") and "MASTER_ADDR" in verdict.paragraph


def test_what_gloo_refused_is_said(tmp_path: Path) -> None:
    log = terminated("[enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 1046204 vs 1040256")
    closed = raised("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895", GROUPS)
    verdict, _ = verdict_of(tmp_path, {0: aborted(log), 1: closed})
    assert (verdict.guilty, verdict.cause) == ((), "mismatched shape") and "1046204 vs 1040256" in verdict.paragraph


# ---- words of a user's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (raised("TimeoutError: Timed out waiting 3000ms for the lock of the cache"), "exception"),
        (raised("ValueError: the request timed out; Connection closed by peer; NCCL is not used"), "exception"),
        (raised("ValueError: worker 3 of the tokenizer pool died"), "exception"),
        (raised("ValueError: the model needs another configuration version than this code"), "exception"),
        (raised("ValueError: 'shared memory' is no column of /data/x.csv"), "exception"),
        (raised("KeyError: 'CUDA error'"), "exception"),
        (raised("ValueError: mismatched shapes (2, 3) and (3, 2)"), "exception"),
        (raised("KeyError: 'size of an igloo'"), "exception"),
        (
            aborted("INFO the job terminated with exception: NCCL error: remote process exited\nfree(): invalid pointer\n"),
            "crash",
        ),
        (aborted("watchdog: CUDA error rate 0.1, collective operation timeout 600 s\n"), "crash"),
        (aborted(terminated("Connection closed by peer", "boost::system::system_error")), "crash"),
    ],
)
def test_words_that_a_program_uses_for_something_else_excuse_and_accuse_nobody(tmp_path: Path, end: Ended, cause: str) -> None:
    lost = raised("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895", GROUPS)
    verdict, first = verdict_of(tmp_path, {0: lost, 1: end})
    assert (verdict.guilty, verdict.cause, first.rank) == ((1,), cause, 1), verdict


# ---- what the batch system said -----------------------------------------------------------------------------------------------

TIME_LIMIT = "slurmstepd: error: *** STEP 494583.0 ON node7 CANCELLED AT {} DUE TO TIME LIMIT ***\n"
OUT_OF_MEMORY = "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM Killed.\n"


def _after_job(folder: Path, said: str, end: dict[str, object] | None) -> Verdict:
    run = RunDir(folder / "run").at_attempt(0)
    (run.path / "job").mkdir(parents=True)
    run.run_json.write_text('{"ranks": 2}')
    if end is not None:
        run.exit_json.write_text(json.dumps({"stopped": None, "ranks": {}, "world_size": 2} | end))
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    (run.path / "job" / "output.log").write_text(f"step 1\n{said.format(now)}srun: error: node7: task 0: Terminated\n")
    return explain(Evidence.of(run.path, 0))


KILLED = Failure(1, 137, 1, "SIGKILL", "killed by SIGKILL", reported=False).as_json()


@pytest.mark.parametrize(
    ("said", "end", "cause", "guilty"),
    [
        (TIME_LIMIT, None, "time limit", ()),
        (TIME_LIMIT.replace("stepd", "stepd-node7"), {"exit_code": 143}, "time limit", ()),
        ("slurmstepd: *** JOB 830329 CANCELLED AT {} DUE TO TIME LIMIT on n447 ***\n", None, "time limit", ()),
        ("slurmstepd: error: *** JOB 32391783 ON cn119 CANCELLED AT {} DUE TO PREEMPTION ***\n", None, "preempted", ()),
        ("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT {} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n",
         {"exit_code": 1, "stopped": "the launcher on n2 ended without a word"}, "node lost", ()),
        (OUT_OF_MEMORY, {"exit_code": 137, "ranks": {"1": KILLED}}, "host out of memory", (1,)),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.\n", None, "host out of memory", ()),
        # Somebody cancelled it; of an earlier start; of a rank that failed by itself; what a program printed.
        ("slurmstepd: error: *** JOB 13 ON n1 CANCELLED AT {} ***\n", {"exit_code": 143}, "interrupted", ()),
        (TIME_LIMIT.format("2024-04-20T09:09:37"), None, "launcher killed", ()),
        (TIME_LIMIT, {"exit_code": 1, "ranks": {"1": Failure(1, 1, 1, "ValueError", "bad label").as_json()}}, "exception", (1,)),
        ("step 7 DUE TO TIME LIMIT, oom_kill event, PREEMPTION\n", {"exit_code": 143}, "interrupted", ()),
        (TIME_LIMIT, {"exit_code": 0}, "fine", ()),
    ],
)  # fmt: skip
def test_the_batch_systems_reason_is_told_where_a_job_was_ended_from_outside(
    tmp_path: Path, said: str, end: dict[str, object] | None, cause: str, guilty: tuple[int, ...]
) -> None:
    verdict = _after_job(tmp_path, said, end)
    assert (verdict.cause, verdict.guilty) == (cause, guilty), verdict
    assert ("as its output says" in verdict.paragraph) == (
        cause in ("time limit", "preempted", "node lost", "host out of memory")
    )
