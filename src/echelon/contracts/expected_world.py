"""The number of ranks that a launch command should start, for the ranks to compare with their own world.

The launcher of a node passes it in one variable. A command may start fewer ranks, or a separate world on every node. Without this
check, each world would silently train its own model, with plausible results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from echelon.common.errors import LauncherEnvironmentError, UsageError
from echelon.common.files import parse_object
from echelon.common.numbers import whole
from echelon.common.terminal import shortly
from echelon.contracts.rank import RankInfo

__all__ = ["ExpectedWorld"]

_VARIABLE = "ECHELON_ASKED"


@dataclass(frozen=True)
class ExpectedWorld:
    """The world that a job requested from its launch command.

    Args:
        ranks, nodes: of the whole job; every node has the same number of ranks.
        command: its words as given, with placeholders.
    """

    ranks: int
    nodes: int
    command: str

    def to_env(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> ExpectedWorld | None:
        """Read the variable; None if no launch command started this process.

        Raises:
            LauncherEnvironmentError: the variable cannot be read.
        """
        text = os.environ.get(_VARIABLE)
        if not text:
            return None
        try:
            fields = parse_object(text) or {}
            ranks, nodes = (whole(name, fields.get(name), at_least=1) for name in ("ranks", "nodes"))
            return cls(ranks, nodes, str(fields["command"]))
        except (UsageError, KeyError) as error:
            raise LauncherEnvironmentError(
                f"{_VARIABLE}={shortly(text)} cannot be read: {error} The launcher sets it; unset it."
            ) from error

    @staticmethod
    def forget() -> None:
        """Remove the variable, so that it does not apply to processes that this one starts."""
        os.environ.pop(_VARIABLE, None)

    def check(self, info: RankInfo, env: Mapping[str, str] | None = None) -> None:
        """Check that this rank is in the expected world.

        Raises:
            LauncherEnvironmentError: it is in another one.
        """
        env = os.environ if env is None else env
        if info.world_size != self.ranks:
            raise self.error(f"rank {info.rank} is in a world of {info.world_size}")
        # Only torchrun sets this variable; otherwise the number is derived.
        if env.get("LOCAL_WORLD_SIZE") and info.local_world_size != self.ranks // self.nodes:
            raise self.error(f"rank {info.rank} is one of {info.local_world_size} on its node")

    def error(self, actual: str) -> LauncherEnvironmentError:
        """An error that `actual` is not what the job requested, with the command and the remedy."""
        per_node = self.ranks // self.nodes
        shape = f"{self.nodes} nodes x {per_node}" if self.nodes > 1 else "one node"
        remedy = (
            "Without all of them in one world, each would train a model of its own. Have the command start them, as with "
            "`torchrun --nnodes {num_machines} --nproc-per-node "
            f"{per_node} --node-rank {{machine_rank}} --master-addr {{main_process_ip}} --master-port {{main_process_port}} "
            "SCRIPT`, or ask for what it starts (num_of_node, tasks_per_node, processes_per_task)."
        )
        if "accelerate" in self.command:
            remedy += (
                " `accelerate launch` starts several processes with --multi_gpu or --use_fsdp only, on CPUs too, whatever "
                "--num_processes says."
            )
        return LauncherEnvironmentError(
            f"{actual}, but {self.ranks} ranks were asked for ({shape}). The launch command was: {self.command}\n{remedy}"
        )
