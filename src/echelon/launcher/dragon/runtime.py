"""Start a script on Dragon's runtime, and leave nothing behind.

`dragon` hangs forever as a session leader, ignores SIGINT, and on SIGTERM leaves the script, its ranks and 6 GB of shared memory
behind (dragonhpc 0.15). So it runs in a process group of its own in this session, which this process ends; if this process is
killed, `launcher.dragon.guard` does.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from echelon.common.errors import ClusterError
from echelon.contracts.stopping import handling
from echelon.launcher.dragon.guard import Guard, end_runtime

__all__ = ["FOLDER_VARIABLE", "run_on_dragon"]

# Tells the processes of the runtime the folder in which groups leave values and failures.
FOLDER_VARIABLE = "ECHELON_DRAGON_FOLDER"


_LOOK_S = 0.05


def run_on_dragon(script: str, args: Sequence[str] = (), *, nodes: bool = False, grace_s: float = 5.0) -> int:
    """Run `script` as Dragon's head process and wait for it.

    Args:
        nodes: use all nodes of this process's allocation, instead of this node alone.
        grace_s: seconds for the script and its ranks to end after SIGINT, SIGTERM or SIGHUP.
    Returns:
        The script's exit code; 128 + n after signal n.
    Raises:
        UsageError: dragonhpc is not installed.
    """
    if importlib.util.find_spec("dragon") is None:
        raise ClusterError("Dragon is not installed. Run: pip install 'echelon[dragon]' (Linux on x86_64, Python 3.11 or later).")
    # Dragon looks for its helpers on the PATH, which lacks a virtual environment that is not activated.
    env = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])}
    program = shutil.which("dragon", path=env["PATH"])
    if program is None:
        raise ClusterError("Dragon is installed, but its command `dragon` is not on PATH. Add its folder to PATH.")
    # Several nodes meet in the working folder, as Dragon's own files do.
    folder = Path(tempfile.mkdtemp(prefix="echelon-dragon-", dir=os.getcwd() if nodes else None))
    env[FOLDER_VARIABLE] = str(folder)
    guard, heard = Guard(folder, grace_s), list[int]()
    # Nothing is raised, since a signal may come at any moment.
    hear = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: heard.append(number))
    try:
        with handling(hear):
            process = subprocess.Popen([program, "-m" if nodes else "-s", script, *args], env=env, process_group=0)
            guard.watch(process.pid)
            # Waited for only after its group has ended: until then no other process can get its number.
            while not heard and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                time.sleep(_LOOK_S)
            end_runtime(process.pid, grace_s, folder)
            code = process.wait()
    finally:
        guard.dismiss()
    if heard:
        return 128 + heard[0]
    return code if code >= 0 else 128 - code
