"""RankInfo: who this process is among the ranks of its job, as its launcher wrote it into the environment.

Launchers write it (`to_env`), ranks read it (`from_env`). Five launchers are understood, the first found wins: torchrun
(and echelon itself), Dragon, Open MPI, PMI (MPICH, Intel MPI), Slurm's srun; without any, a world of one.
torchrun's names come first because they are the most specific: torchrun often runs inside an srun task.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from echelon.contracts.errors import LauncherEnvironmentError
from echelon.contracts.hostlist import expand_hostlist, tasks_on_node

__all__ = ["STORE_PREFIX_VARIABLE", "RankInfo"]

logger = logging.getLogger(__name__)

# Set by our launchers beside MASTER_ADDR: what begins the ranks' keys in its store, new for every start. A job that
# reaches the port by mistake, and a rank of an older attempt, meet nobody. It keeps out no enemy, who can have the keys listed.
STORE_PREFIX_VARIABLE = "ECHELON_STORE_PREFIX"

_LOOPBACK = "127.0.0.1"

# Slurm numbers what is no step from the top: the batch script, the shell of an interactive salloc, the external step.
_PSEUDO_STEPS = 0xFFFFFFF0


@dataclass(frozen=True, init=False)
class RankInfo:
    """The place of one process in its job. `RankInfo()` reads the environment; with arguments it is a plain value.

    Args:
        rank: 0 <= rank < world_size, unique in the job.
        local_rank: 0 <= local_rank < local_world_size, unique on the node.
        node_rank: index of the node; `(node_rank, local_rank)` is the pair that people speak of.
        world_size: number of ranks in the job.
        local_world_size: number of ranks on this node.
        master_addr, master_port: where the process group's store is served.
        restart_count: 0 for the first attempt; grows when the launcher restarts the job.
        run_id: the launcher's name for the job.
    Raises:
        LauncherEnvironmentError: the environment is half-set or contradicts itself; names the variables.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    restart_count: int
    run_id: str

    def __init__(
        self,
        rank: int | None = None,
        local_rank: int | None = None,
        node_rank: int = 0,
        world_size: int | None = None,
        local_world_size: int | None = None,
        master_addr: str = _LOOPBACK,
        master_port: int = 29500,
        restart_count: int = 0,
        run_id: str = "none",
    ) -> None:
        if rank is None and world_size is None and local_rank is None:
            values = _read(os.environ)
        else:
            if rank is None or world_size is None:
                raise LauncherEnvironmentError(
                    f"RankInfo needs both rank and world_size, or neither to read the environment, got rank={rank}, "
                    f"world_size={world_size}."
                )
            values = {
                "rank": rank,
                "local_rank": rank if local_rank is None else local_rank,
                "node_rank": node_rank,
                "world_size": world_size,
                "local_world_size": world_size if local_world_size is None else local_world_size,
                "master_addr": master_addr,
                "master_port": master_port,
                "restart_count": restart_count,
                "run_id": run_id,
            }
        _check(values)
        for field in fields(self):
            object.__setattr__(self, field.name, values[field.name])

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RankInfo:
        """Read the launcher's environment; `env` defaults to `os.environ`."""
        values = _read(os.environ if env is None else env)
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The same facts under torchrun's variable names, which every PyTorch program understands."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_RUN_ID": self.run_id,
        }

    # Dragon's spellings of the same facts.
    @property
    def my_rank(self) -> int:
        return self.rank

    @property
    def my_local_rank(self) -> int:
        return self.local_rank

    @property
    def my_node_rank(self) -> int:
        return self.node_rank

    @property
    def my_local_world_size(self) -> int:
        return self.local_world_size


def _check(v: Mapping[str, Any]) -> None:
    rank, world, local, local_world = v["rank"], v["world_size"], v["local_rank"], v["local_world_size"]
    if world < 1:
        raise LauncherEnvironmentError(f"the world size must be at least 1, got {world}.")
    if not 0 <= rank < world:
        raise LauncherEnvironmentError(
            f"the rank must be between 0 and {world - 1}, since the world size is {world}, got {rank}."
        )
    if not 1 <= local_world <= world:
        raise LauncherEnvironmentError(
            f"the number of ranks on this node must be between 1 and the world size, {world}, got {local_world}."
        )
    if not 0 <= local < local_world:
        raise LauncherEnvironmentError(
            f"the local rank must be between 0 and {local_world - 1}, since {local_world} ranks run on this node, got {local}."
        )
    if not 0 < v["master_port"] < 65536:
        raise LauncherEnvironmentError(f"the master port must be between 1 and 65535, got {v['master_port']}.")


def _read(env: Mapping[str, str]) -> dict[str, Any]:
    for name, (reader, variables) in _LAUNCHERS.items():
        values = reader(env)
        if values is not None:
            try:
                _check(values)
            except LauncherEnvironmentError as error:
                found = ", ".join(f"{k}={env[k]}" for k in sorted(env) if re.fullmatch(variables, k))
                raise LauncherEnvironmentError(f"{error} {name}'s variables say {found}.") from None
            logger.debug("rank %s of %s, from %s's environment", values["rank"], values["world_size"], name)
            return values
    lonely = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") if env.get(name, "").strip()]
    if lonely:
        raise LauncherEnvironmentError(
            f"{' and '.join(f'{name}={env[name]}' for name in lonely)} set, but RANK and WORLD_SIZE are not. "
            f"Set both, or unset {' and '.join(lonely)} to run one process alone."
        )
    logger.debug("no launcher's environment found: a world of one")
    return _values(0, 1)


def _values(rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    values = {
        "rank": rank,
        "local_rank": 0 if world_size == 1 else rank,
        "node_rank": 0,
        "world_size": world_size,
        "local_world_size": world_size,
        "master_addr": _LOOPBACK,
        "master_port": 29500,
        "restart_count": 0,
        "run_id": "none",
    }
    values.update({k: v for k, v in more.items() if v is not None})
    return values


class _Reader:
    """Reads integers out of one launcher's variables and names the variable when one is missing or wrong."""

    def __init__(self, env: Mapping[str, str], launcher: str) -> None:
        self.env, self.launcher = env, launcher

    def text(self, name: str) -> str | None:
        value = self.env.get(name, "").strip()
        return value or None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            raise LauncherEnvironmentError(f"{name} must be a whole number, got {text!r} ({self.launcher}).") from None

    def pair(self, rank: str, size: str) -> tuple[int, int] | None:
        """Both or neither: one alone is what a half-copied launch script looks like."""
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
        # torch.distributed.launch's oldest form sets LOCAL_RANK only; on one node it equals RANK.
        local_world = world if local == rank else None
    if local is not None and local_world is None:
        local_world = max(local + 1, 1)
    if local is not None and local_world is not None and not 0 <= local < local_world:
        raise LauncherEnvironmentError(f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={local_world} contradict each other.")
    if local_world is not None and local_world > world:
        raise LauncherEnvironmentError(f"LOCAL_WORLD_SIZE={local_world} and WORLD_SIZE={world} contradict each other.")
    return _values(
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
    return _values(
        *pair,
        local_rank=read.number("_DRAGON_CG_LOCAL_RANK"),
        local_world_size=read.number("_DRAGON_CG_LOCAL_WORLD_SIZE"),
        node_rank=read.number("_DRAGON_CG_GROUP_RANK"),
        master_addr=addr,
        master_port=port,
        run_id="dragon",
    )


def _mpi(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Open MPI, then PMI. On one node the address is loopback; the port follows from the job, so that jobs differ."""
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
            continue  # `srun --mpi=pmi2` sets PMI's variables too, but Slurm's say more
        rank, world = pair
        local, local_world = read.number(local_name), read.number(local_size_name)
        addr, port = read.text("MASTER_ADDR"), read.number("MASTER_PORT")
        if addr is None and world > 1 and local_world != world:
            raise LauncherEnvironmentError(
                f"{size_name}={world} ranks on several nodes, but MASTER_ADDR is not set, and MPI does not tell "
                "where rank 0 runs. Set MASTER_ADDR to the first host, for example with `mpirun -x MASTER_ADDR=...`."
            )
        job = read.text(job_name) or "mpi"
        return _values(
            rank,
            world,
            local_rank=local,
            local_world_size=local_world,
            # Ranks are placed by node in MPI's default mapping; a node's index is then its rank divided by the node's size.
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
        return _values(0, 1, run_id=read.text("SLURM_JOB_ID"), restart_count=read.number("SLURM_RESTART_COUNT"))
    size_name = "SLURM_STEP_NUM_TASKS" if read.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pair = read.pair("SLURM_PROCID", size_name)
    if pair is None:
        return None
    rank, world = pair
    nodes = read.text("SLURM_STEP_NODELIST") or read.text("SLURM_JOB_NODELIST") or read.text("SLURM_NODELIST")
    hosts = expand_hostlist(nodes) if nodes else []
    if world > 1 and not hosts and read.text("MASTER_ADDR") is None:
        raise LauncherEnvironmentError(
            f"{size_name}={world}, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: the ranks cannot find each other."
        )
    node_rank = read.number("SLURM_NODEID") or 0
    per_node = read.text("SLURM_STEP_TASKS_PER_NODE") or read.text("SLURM_TASKS_PER_NODE")
    local_world = tasks_on_node(per_node, node_rank) if per_node else None
    job = read.text("SLURM_JOB_ID") or "slurm"
    return _values(
        rank,
        world,
        local_rank=read.number("SLURM_LOCALID"),
        local_world_size=local_world,
        node_rank=node_rank,
        master_addr=read.text("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else _LOOPBACK),
        master_port=read.number("MASTER_PORT") or _port_of(f"{job}.{step}"),
        restart_count=read.number("SLURM_RESTART_COUNT"),
        run_id=job,
    )


def _refuse_if_srun_forgotten(read: _Reader) -> None:
    """The batch script and an salloc shell are one process each, whatever the allocation; a training script there is alone."""
    name = "SLURM_NTASKS" if read.text("SLURM_NTASKS") else "SLURM_JOB_NUM_NODES"
    count = read.number(name) or 1
    if count > 1:
        raise LauncherEnvironmentError(
            f"{name}={count}, but this process was not started by srun: it would train alone. "
            "Start it with `srun python ...`, or set RANK=0 WORLD_SIZE=1 to run one process on purpose."
        )


def _same_in_slurm(env: Mapping[str, str], rank: int, world_size: int) -> dict[str, Any] | None:
    """Slurm's facts, if its step holds this very rank of this very world; else None: then they are of another level."""
    if env.get("SLURM_PROCID") != str(rank) or env.get("SLURM_STEP_NUM_TASKS") != str(world_size):
        return None
    return _slurm(env)


# In the order in which they are asked; the variables are shown when they contradict one another.
_LAUNCHERS = {
    "torchrun": (_torchrun, "((LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_.*)"),
    "Dragon": (_dragon, "_DRAGON_CG_.*"),
    "MPI": (_mpi, "(OMPI_COMM_WORLD|PMI|MPI)_.*|MASTER_.*"),
    "Slurm": (_slurm, "SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_NUM_TASKS|(STEP_)?TASKS_PER_NODE)|MASTER_.*"),
}


def _port_of(job: str) -> int:
    """A port that all ranks of a job compute alike and two jobs seldom share. Below the kernel's ephemeral range (32768)."""
    return 15000 + zlib.crc32(job.encode()) % 15000
