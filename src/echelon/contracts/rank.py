"""RankInfo: the place of this process among the ranks of its job, as its launcher wrote it into the environment.

Launchers write it (`to_env`), ranks read it (`from_env`). It understands five launchers and takes the first found: torchrun (and
echelon itself), Dragon, Open MPI, PMI (MPICH, Intel MPI), Slurm's srun; without any, a world of one. torchrun's variables come
first because they are the most specific: torchrun often runs inside an srun task.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.terminal import one_line
from echelon.contracts.launchers import LAUNCHERS, LOOPBACK, SAY_RANK, values_of

__all__ = ["STORE_PREFIX_VARIABLE", "RankInfo", "said_by"]

logger = logging.getLogger(__name__)

# Set by echelon's launchers beside MASTER_ADDR: prefix of the ranks' keys in the store, new for every start. A job that reaches
# the port by mistake, or a rank of an older attempt, meets no other rank. It does not keep out an attacker, who can list the
# keys.
STORE_PREFIX_VARIABLE = "ECHELON_STORE_PREFIX"


@dataclass(frozen=True, init=False)
class RankInfo:
    """The place of one process in its job. `RankInfo()` reads the environment; with arguments it is a plain value.

    Args:
        rank: 0 <= rank < world_size, unique in the job.
        local_rank: 0 <= local_rank < local_world_size, unique on the node.
        node_rank: index of the node; `(node_rank, local_rank)` identifies a rank for people.
        world_size: number of ranks in the job.
        local_world_size: number of ranks on this node.
        master_addr, master_port: address of the process group's store.
        restart_count: 0 for the first attempt; grows with every restart.
        run_id: the launcher's name for the job.
    Raises:
        LauncherEnvironmentError: the environment is incomplete or contradicts itself; names the variables.
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
        master_addr: str = LOOPBACK,
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
        """The same values under torchrun's variable names, which every PyTorch program understands."""
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

    # Dragon's names of the same values.
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
    if v["node_rank"] < 0:
        raise LauncherEnvironmentError(f"the node's rank must be at least 0, got {v['node_rank']}.")
    if v["restart_count"] < 0:
        raise LauncherEnvironmentError(f"the number of restarts must be at least 0, got {v['restart_count']}.")
    if not 0 < v["master_port"] < 65536:
        raise LauncherEnvironmentError(f"the master port must be between 1 and 65535, got {v['master_port']}.")


def _read(env: Mapping[str, str]) -> dict[str, Any]:
    for name, (reader, variables) in LAUNCHERS.items():
        values = reader(env)
        if values is not None:
            try:
                _check(values)
            except LauncherEnvironmentError as error:
                variables_set = ", ".join(f"{k}={one_line(env[k])[:80]}" for k in sorted(env) if re.fullmatch(variables, k))
                raise LauncherEnvironmentError(f"{error} {name}'s variables say {variables_set}.") from None
            logger.debug("rank %s of %s, from %s's environment", values["rank"], values["world_size"], name)
            return values
    lonely = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") if env.get(name, "").strip()]
    if lonely:
        raise LauncherEnvironmentError(
            f"{' and '.join(f'{name}={one_line(env[name])[:80]}' for name in lonely)} set, but RANK and WORLD_SIZE are not. "
            f"Set both, or unset {' and '.join(lonely)} to run one process alone."
        )
    logger.debug("no launcher's environment found: a world of one")
    return values_of(0, 1)


def said_by(info: RankInfo, env: Mapping[str, str] | None = None) -> str:
    """The variables that define this rank and world size, for a process that waits for others in vain.

    A shell may still hold variables that a launcher set for another program. Empty if echelon's launcher, or torchrun, started
    this process. A launcher's own variables come before torchrun's, which echelon sets as well.
    """
    env = os.environ if env is None else env
    if env.get(STORE_PREFIX_VARIABLE) or "TORCHELASTIC_MAX_RESTARTS" in env:
        return ""
    wanted = str(info.rank), str(info.world_size)
    pairs = (pair for pair in SAY_RANK if tuple(env.get(name, "").strip() for name in pair) == wanted)
    return next((f"{rank}={wanted[0]} and {size}={wanted[1]}" for rank, size in pairs), "")
