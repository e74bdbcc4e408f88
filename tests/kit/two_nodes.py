"""The launchers of a job's nodes, as Slurm starts them: here each is a process of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.contracts.run_dir import RunDir
from echelon.launcher.job import JobSpec
from echelon.launcher.protocol import write_spec
from tests.conftest import clean_environment

# Nodes that give up on silent ones in ten seconds, where a busy machine may still need two for an answer.
IMPATIENT = """
import runpy
from echelon.launcher.local import silence
silence.SILENT_S, silence._LATE_S, silence._BEAT_S, silence._MAIN_S = 10.0, 5.0, 2.0, 6.0
runpy.run_module("echelon.launcher.cluster.node", run_name="__main__")
"""


def start_nodes(
    run: RunDir,
    spec: JobSpec,
    said: Sequence[Path],
    *,
    hosts: str = "localhost,localhost",
    before: Sequence[Sequence[str]] = ((), ()),
    impatient: bool = False,
    **env: str,
) -> list[subprocess.Popen[Any]]:
    """A launcher for each of the files in `said`, into which it writes; `before` are words before each command."""
    folder = said[0].parent
    write_spec(run, spec, launcher="slurm", cwd=str(folder), id="7")
    env = {**clean_environment(), "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": hosts, **env}
    program = ["-c", IMPATIENT] if impatient else ["-m", "echelon.launcher.cluster.node"]
    started = []
    for node, path in enumerate(said):
        command = [*before[node], sys.executable, *program, str(run.path)]
        with open(path, "a") as file:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": folder}
            started.append(subprocess.Popen(command, env={**env, "SLURM_NODEID": str(node)}, **options))
    return started
