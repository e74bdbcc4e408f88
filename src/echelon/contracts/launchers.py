"""The environments of five launchers: torchrun (and echelon), Dragon, Open MPI, PMI (MPICH, Intel MPI), Slurm's srun.

Each is read into the values of a RankInfo, or None if the launcher did not start this process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.hostlist import expand_hostlist, tasks_on_node
from echelon.common.terminal import shortly

__all__ = ["LAUNCHERS", "LOOPBACK", "SAY_RANK", "values_of"]

LOOPBACK = "127.0.0.1"

# Step numbers from here on are no steps: Slurm uses them for the batch script, an interactive salloc shell, the external step.
_PSEUDO_STEPS = 0xFFFFFFF0


# Slurm's numbers are this long. `int` alone would also accept "1_0", and digits of other scripts.
_NUMBER = re.compile(r"-?[0-9]{1,10}")
# Variables that hold numbers, by launcher.
_NUMBERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    (
        "_DRAGON_CG_RANK",
        "_DRAGON_CG_WORLD_SIZE",
        "_DRAGON_CG_LOCAL_RANK",
        "_DRAGON_CG_LOCAL_WORLD_SIZE",
        "_DRAGON_CG_MASTER_PORT",
    ),
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_LOCALID"),
)


def values_of(rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    values = {
        "rank": rank,
        "local_rank": 0 if world_size == 1 else rank,
        "node_rank": 0,
        "world_size": world_size,
        "local_world_size": world_size,
        "master_addr": LOOPBACK,
        "master_port": 29500,
        "restart_count": 0,
        "run_id": "none",
    }
    values.update({k: v for k, v in more.items() if v is not None})
    return values


class _Reader:
    """Reads integers from one launcher's variables, and names the variable when it is missing or wrong."""

    def __init__(self, env: Mapping[str, str], launcher: str) -> None:
        self.env, self.launcher = env, launcher

    def text(self, name: str) -> str | None:
        value = self.env.get(name, "").strip()
        return value or None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            raise LauncherEnvironmentError(self._malformed(name))
        return int(text)

    def _malformed(self, name: str) -> str:
        """An error about this variable, and about all others of its launcher that are no numbers, so all can be fixed at once."""
        others = next((names for names in _NUMBERS if name in names), ())
        wrong = [each for each in dict.fromkeys((name, *others)) if (text := self.text(each)) and not _NUMBER.fullmatch(text)]
        values = ", ".join(f"{each} must be a whole number, got {shortly(self.env[each].strip())}" for each in wrong)
        return f"{values} ({self.launcher})."

    def pair(self, rank: str, size: str) -> tuple[int, int] | None:
        """Read both or neither: one alone is typical of a half-copied launch script."""
        r, s = self.number(rank), self.number(size)
        if r is None and s is None:
            return None
        if r is None or s is None:
            there, missing = (size, rank) if r is None else (rank, size)
            raise LauncherEnvironmentError(
                f"{there}={self.env[there]} is set but {missing} is not ({self.launcher}). "
                f"Set both, or unset {there} to run one process alone."
            )
        if s < 1 or not 0 <= r < s:
            raise LauncherEnvironmentError(
                f"{rank}={r} and {size}={s} contradict each other ({self.launcher}): the rank must be between 0 and {size} - 1."
            )
        return r, s

    def master(self, addr: str, port: str, size: str) -> tuple[str | None, int | None]:
        a, p = self.text(addr), self.number(port)
        missing = [n for n, v in ((addr, a), (port, p)) if v is None]
        if int(self.env[size]) > 1 and missing:
            raise LauncherEnvironmentError(
                f"{size}={self.env[size]}, but {' and '.join(missing)} not set: the ranks cannot find each other. "
                f"Set {addr} to the host of rank 0 and {port} to a free port there."
            )
        return a, p


def _torchrun(env: Mapping[str, str]) -> dict[str, Any] | None:
    read = _Reader(env, "torchrun's variables")
    pair = read.pair("RANK", "WORLD_SIZE")
    if pair is None:
        return None
    rank, world = pair
    addr, port = read.master("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    local_world = read.number("LOCAL_WORLD_SIZE")
    local = read.number("LOCAL_RANK")
    node = read.number("GROUP_RANK")
    if step := _same_in_slurm(env, rank, world):  # `export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`: Slurm knows the rest
        local = step["local_rank"] if local is None else local
        local_world = step["local_world_size"] if local_world is None else local_world
        node = step["node_rank"] if node is None else node
    if local is None and local_world is not None:
        local = rank % local_world
    if local is not None and local_world is None:
        # The oldest form of torch.distributed.launch sets LOCAL_RANK only; on one node it equals RANK.
        local_world = world if local == rank else None
    if local is not None and local_world is None:
        local_world = max(local + 1, 1)
    if local is not None and local_world is not None and not 0 <= local < local_world:
        raise LauncherEnvironmentError(f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={local_world} contradict each other.")
    if local_world is not None and local_world > world:
        raise LauncherEnvironmentError(f"LOCAL_WORLD_SIZE={local_world} and WORLD_SIZE={world} contradict each other.")
    return values_of(
        rank,
        world,
        local_rank=local,
        local_world_size=local_world,
        node_rank=node,
        master_addr=addr,
        master_port=port,
        restart_count=read.number("TORCHELASTIC_RESTART_COUNT"),
        run_id=read.text("TORCHELASTIC_RUN_ID"),
    )


def _dragon(env: Mapping[str, str]) -> dict[str, Any] | None:
    read = _Reader(env, "Dragon's variables")
    pair = read.pair("_DRAGON_CG_RANK", "_DRAGON_CG_WORLD_SIZE")
    if pair is None:
        return None
    addr, port = read.master("_DRAGON_CG_MASTER_ADDR", "_DRAGON_CG_MASTER_PORT", "_DRAGON_CG_WORLD_SIZE")
    return values_of(
        *pair,
        local_rank=read.number("_DRAGON_CG_LOCAL_RANK"),
        local_world_size=read.number("_DRAGON_CG_LOCAL_WORLD_SIZE"),
        node_rank=read.number("_DRAGON_CG_GROUP_RANK"),
        master_addr=addr,
        master_port=port,
        run_id="dragon",
    )


def _mpi(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Open MPI, then PMI. On one node the address is loopback; the port is derived from the job, so that jobs differ."""
    for launcher, rank_name, size_name, local_name, local_size_name, job_name in (
        (
            "Open MPI's variables",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMIX_NAMESPACE",
        ),
        ("PMI's variables", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    ):
        read = _Reader(env, launcher)
        pair = read.pair(rank_name, size_name)
        if pair is None or (rank_name == "PMI_RANK" and _same_in_slurm(env, *pair)):
            continue  # `srun --mpi=pmi2` sets PMI's variables, too, but Slurm's are more complete
        rank, world = pair
        local, local_world = read.number(local_name), read.number(local_size_name)
        addr, port = read.text("MASTER_ADDR"), read.number("MASTER_PORT")
        if addr is None and world > 1 and local_world != world:
            raise LauncherEnvironmentError(
                f"{size_name}={world} ranks on several nodes, since {local_size_name} is {local_world or 'not set'}, but "
                "MASTER_ADDR is not set, and MPI does not tell where rank 0 runs. Set MASTER_ADDR to the first host, for example "
                "with `mpirun -x MASTER_ADDR=...`."
            )
        job = read.text(job_name) or "mpi"
        return values_of(
            rank,
            world,
            local_rank=local,
            local_world_size=local_world,
            # MPI's default mapping places ranks by node, so a node's index is its rank divided by the node's size.
            node_rank=rank // local_world if local_world else None,
            master_addr=addr,
            master_port=port or _port_of(job),
            run_id=job,
        )
    return None


def _slurm(env: Mapping[str, str]) -> dict[str, Any] | None:
    read = _Reader(env, "Slurm's variables")
    if read.text("SLURM_JOB_ID") is None and read.text("SLURM_PROCID") is None:
        return None
    step = read.number("SLURM_STEP_ID")
    if step is None or step >= _PSEUDO_STEPS:
        _refuse_if_srun_forgotten(read)
        return values_of(0, 1, run_id=read.text("SLURM_JOB_ID"), restart_count=read.number("SLURM_RESTART_COUNT"))
    size_name = "SLURM_STEP_NUM_TASKS" if read.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pair = read.pair("SLURM_PROCID", size_name)
    if pair is None:
        return None
    rank, world = pair
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((expand_hostlist(nodes, name) for name in names if (nodes := read.text(name))), [])
    if world > 1 and not hosts and read.text("MASTER_ADDR") is None:
        raise LauncherEnvironmentError(
            f"{size_name}={world}, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: the ranks cannot find each other."
        )
    node_rank = read.number("SLURM_NODEID") or 0
    per_node = read.text("SLURM_STEP_TASKS_PER_NODE") or read.text("SLURM_TASKS_PER_NODE")
    local_world = tasks_on_node(per_node, node_rank) if per_node else None
    job = read.text("SLURM_JOB_ID") or "slurm"
    return values_of(
        rank,
        world,
        local_rank=read.number("SLURM_LOCALID"),
        local_world_size=local_world,
        node_rank=node_rank,
        master_addr=read.text("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else LOOPBACK),
        master_port=read.number("MASTER_PORT") or _port_of(f"{job}.{step}"),
        restart_count=read.number("SLURM_RESTART_COUNT"),
        run_id=job,
    )


def _refuse_if_srun_forgotten(read: _Reader) -> None:
    """Refuse the batch script and an salloc shell of a larger allocation: each is a single process, so it would train alone."""
    name = "SLURM_NTASKS" if read.text("SLURM_NTASKS") else "SLURM_JOB_NUM_NODES"
    count = read.number(name) or 1
    if count > 1:
        raise LauncherEnvironmentError(
            f"{name}={count}, but this process was not started by srun: it would train alone. "
            "Start it with `srun python ...`, or set RANK=0 WORLD_SIZE=1 to run one process on purpose."
        )


def _same_in_slurm(env: Mapping[str, str], rank: int, world_size: int) -> dict[str, Any] | None:
    """Slurm's values, if its step has this rank and world size; otherwise None, as they describe another level."""
    if env.get("SLURM_PROCID") != str(rank) or env.get("SLURM_STEP_NUM_TASKS") != str(world_size):
        return None
    return _slurm(env)


# In the order in which they are tried; the pattern selects the variables to show when they contradict one another.
LAUNCHERS = {
    "torchrun": (_torchrun, "((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_.*|TORCHELASTIC_RESTART_COUNT)"),
    "Dragon": (_dragon, "_DRAGON_CG_.*"),
    "MPI": (_mpi, "(OMPI_COMM_WORLD|PMI|MPI)_.*|MASTER_.*"),
    "Slurm": (_slurm, "SLURM_(PROCID|LOCALID|NODEID|NTASKS|RESTART_COUNT|STEP_NUM_TASKS|(STEP_)?TASKS_PER_NODE)|MASTER_.*"),
}


# Variables of rank and world size, torchrun's last.
SAY_RANK = (
    ("_DRAGON_CG_RANK", "_DRAGON_CG_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
)


def _port_of(job: str) -> int:
    """A port that all ranks of a job compute alike and two jobs rarely share. Below the kernel's ephemeral range (32768)."""
    return 15000 + zlib.crc32(job.encode("utf-8", "surrogateescape")) % 15000
