"""SlurmConfig: the options of a job, under nntool's names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from echelon.common.arguments import flags_of, mapping
from echelon.common.errors import ClusterError, require
from echelon.launcher.cluster.slurm.render import SlurmOptions
from echelon.launcher.functions.launch import check_environment
from echelon.launcher.functions.launch_command import parse

__all__ = ["SlurmConfig"]

_MODES = ("run", "debug", "local", "slurm")
_WARN_S = 120.0


@dataclass(frozen=True)
class SlurmConfig:
    """How and where a function of `slurm_fn` runs.

    Args:
        mode: "run" calls the function in this process; "debug" does, too, and enters the debugger at an exception; "local" starts
            the ranks on this machine, in the background; "slurm" submits the job.
        job_name: a name for people; the run's folder is named by its plain characters and the time.
        partition: of the cluster; empty for the cluster's default.
        output_parent_path, output_folder: run folders are created in output_parent_path/output_folder.
        node_list, node_list_exclude: nodes to use, and nodes to avoid, as Slurm writes them; empty leaves the choice to Slurm.
        num_of_node: number of machines.
        tasks_per_node, processes_per_task: their product is the number of ranks of each machine.
        gpus_per_task, gpus_per_node: number of devices; gpus_per_node, if given, counts for the node. 0 and None ask for none.
        cpus_per_task: cores of each task, shared by its processes.
        mem: memory of each node, such as "64G"; empty for the cluster's default.
        timeout_min: limit of each start in minutes; None for the partition's. Ranks are asked to save two minutes before it.
        requeue: start again after the limit, a preemption or the loss of a node. The function is called again with the same
            arguments, and resumes from its checkpoints.
        setup: shell lines to run before the ranks start. They are part of the batch script, so they must not hold a secret.
        pack_code: run a copy of the present code, so that an edit does not change a waiting job.
        use_packed_code: False runs the code where it is; the copy is kept for the record.
        code_root: the folder that is copied; by default the repository of the main script, else the script's folder.
        code_file_suffixes: copy only files with these suffixes; by default all that git does not ignore.
        exclude_code_folders: names of folders that are not copied.
        use_distributed_env: run the launch command; True without a command is refused.
        distributed_launch_command: a command that starts the ranks of a node, run once on every node, such as `accelerate launch`
            or `torchrun`. A list of words, not run by a shell; `launcher.functions.launch_command.PLACEHOLDERS` are replaced. A
            word that names a copied file becomes the copy's path, and the script's own arguments are appended.
        extra_params_kwargs: further options of sbatch, by name; True is an option without a value.
        array_parallelism: for `map_array`, number of jobs that run at a time; None leaves it to Slurm.
        extra_task_kwargs: environment variables for the ranks. Their values are kept in job.json, which only you can read.
    Raises:
        UsageError: an invalid value.
    """

    mode: str = "run"
    job_name: str = "Job"
    partition: str = ""
    output_parent_path: str = "./"
    output_folder: str = "slurm"
    node_list: str = ""
    node_list_exclude: str = ""
    num_of_node: int = 1
    tasks_per_node: int = 1
    gpus_per_task: int = 0
    cpus_per_task: int = 1
    gpus_per_node: int | None = None
    mem: str = ""
    timeout_min: int | None = None
    requeue: bool = True
    setup: Sequence[str] = ()
    pack_code: bool = True
    use_packed_code: bool = True
    code_root: str | None = None
    code_file_suffixes: Sequence[str] | None = None
    exclude_code_folders: Sequence[str] = ()
    use_distributed_env: bool = False
    processes_per_task: int = 1
    distributed_launch_command: str = ""
    extra_params_kwargs: Mapping[str, Any] = field(default_factory=dict)
    array_parallelism: int | None = None
    extra_task_kwargs: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a secret

    def __post_init__(self) -> None:
        require(self.mode in _MODES, "mode", f"one of {', '.join(_MODES)}", self.mode, kind=ClusterError)
        flags_of(self, kind=ClusterError)
        for name in ("partition", "node_list", "node_list_exclude", "mem", "distributed_launch_command"):
            require(isinstance(getattr(self, name), str), name, "a string", getattr(self, name), kind=ClusterError)
        for name in ("output_parent_path", "output_folder", "code_root"):
            path = getattr(self, name)
            is_folder = isinstance(path, str | os.PathLike) or (path is None and name == "code_root")
            require(is_folder, name, "the path of a folder", path, kind=ClusterError)
        mapping("extra_params_kwargs", self.extra_params_kwargs, kind=ClusterError)
        for name in ("num_of_node", "tasks_per_node", "processes_per_task", "cpus_per_task"):
            _check_count(name, getattr(self, name), 1)
        _check_count("gpus_per_task", self.gpus_per_task, 0)
        for name, least in (("gpus_per_node", 0), ("timeout_min", 1), ("array_parallelism", 1)):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least)
        if not isinstance(self.job_name, str) or not self.job_name.strip() or not self.job_name.isprintable():
            raise ClusterError(f"job_name must be one line without control characters, got {self.job_name!r}.")
        for name in ("setup", "exclude_code_folders", "code_file_suffixes"):
            lines = getattr(self, name)
            if isinstance(lines, str) or not all(isinstance(line, str) for line in lines or ()):
                raise ClusterError(f"{name} must be a list of strings, got {lines!r}.")
        if self.use_distributed_env and not self.distributed_launch_command:
            raise ClusterError(
                "use_distributed_env=True needs a distributed_launch_command, such as 'torchrun --nnodes {num_machines} "
                "--nproc-per-node 4 --node-rank {machine_rank} --master-addr {main_process_ip} --master-port {main_process_port} "
                "main.py'. Without either, the function itself is called on each rank."
            )
        if self.distributed_launch_command:
            parse(self.distributed_launch_command)
        check_environment(self.extra_task_kwargs, "extra_task_kwargs")
        self.options().check()

    @classmethod
    def of(cls, given: SlurmConfig | Mapping[str, Any]) -> SlurmConfig:
        """A config, from one or from a dict of its fields.

        Raises:
            UsageError: an unknown field.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ClusterError(f"config must be a SlurmConfig or a dict of its fields, got {type(given).__name__}.")
        cls._check_names(given)
        return cls(**given)

    def changed(self, **changes: Any) -> SlurmConfig:
        """A copy with some fields replaced.

        Raises:
            UsageError: an unknown field.
        """
        self._check_names(changes)
        return replace(self, **changes)

    @classmethod
    def _check_names(cls, given: Iterable[str]) -> None:
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                raise ClusterError(f"SlurmConfig has no field {name!r}." + (f" Is it {near[0]}?" if near else ""))

    @property
    def output_path(self) -> Path:
        return Path(self.output_parent_path) / self.output_folder

    def set_output_path(self, path: str | Path) -> SlurmConfig:
        """A copy with another folder of runs."""
        return replace(self, output_parent_path=str(Path(path).parent), output_folder=Path(path).name)

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node * self.processes_per_task

    def options(self, *, dependency: str | None = None, export: Sequence[str] = ()) -> SlurmOptions:
        """The options for Slurm.

        Raises:
            UsageError: an unknown option.
        """
        time_s = self.timeout_min * 60.0 if self.timeout_min is not None else None
        gpus = self.gpus_per_node if self.gpus_per_node is not None else self.gpus_per_task * self.tasks_per_node
        more = {name.replace("_", "-"): value for name, value in self.extra_params_kwargs.items() if value is not None}
        return SlurmOptions(
            partition=self.partition or None,
            nodelist=self.node_list or None,
            exclude=self.node_list_exclude or None,
            time_s=time_s,
            warn_s=min(_WARN_S, time_s / 2) if time_s is not None else _WARN_S,
            gpus_per_node=gpus or None,
            mem=self.mem or None,
            requeue=self.requeue,
            export=export,
            name=self.job_name,
            cpus_per_node=self.cpus_per_task * self.tasks_per_node,
            dependency=dependency,
            parallel=self.array_parallelism,
            setup=tuple(self.setup),
            more=more,
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ClusterError(f"{name} must be a whole number of at least {least}, got {value!r}.")
