"""The laboratory: up, down, reset, and what happens to its nodes."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

from . import network
from .config import write_config
from .nodes import Nodes
from .processes import LabError, run, say

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge", "ip": "iproute2"}
WAIT_S = 60


class Lab(Nodes):
    """A Slurm cluster in a folder."""

    def up(self, **opt):
        t0 = time.monotonic()
        if missing := sorted(package for tool, package in TOOLS.items() if not shutil.which(tool)):
            raise LabError(f"missing programs of the packages {' '.join(missing)}")
        if os.geteuid():
            raise LabError("must run as root")
        with self.lock():
            if self.state.get("ready") and self.state["options"] == opt:
                try:
                    self._heal()
                    say(f"already up: {len(self.node_names)} nodes, SLURM_CONF={self.conf}")
                    return
                except (LabError, subprocess.TimeoutExpired) as e:
                    say(f"unhealthy, rebuilding ({e})")
            self._down()
            try:
                self._up(opt)
            except BaseException as e:
                tail = self.log_tail("munged.out", "slurmctld.out", "slurmctld.log", "slurmd-node1.log", "node1.out")
                self._down(keep=True)
                if isinstance(e, LabError):
                    raise LabError(f"{e}\n{tail}") from None
                raise
        say(f"ready: {opt['nodes']} idle nodes, {time.monotonic() - t0:.1f} s, SLURM_CONF={self.conf}")

    def _heal(self):
        """A lab that was up: repair the nodes.  LabError if that is not enough."""
        dead = [key for key in self.state["procs"] if key not in self.node_names and not self.alive(key)]
        if dead:
            raise LabError(f"not running: {', '.join(dead)}")
        for name in self.node_names:
            if not self.alive(name):
                self._start_node(name)
            else:
                network.set_link(self, name, "up")
                if not self._slurmd_pid(name):
                    self._start_slurmd(name)
        self._wait_listening()
        self._resume()
        self.wait_nodes(WAIT_S, ("idle", "mixed", "allocated", "completing"))

    def _up(self, opt):
        if self.dir.exists() and any(self.dir.iterdir()):
            if not (self.dir / ".slurmlab").exists():
                raise LabError(f"{self.dir} exists, is not empty and was not made by slurmlab")
            shutil.rmtree(self.dir)
        for sub in ("etc", "munge", "ctld", "spool", "pid", "log", "local"):
            (self.dir / sub).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)
        (self.dir / ".slurmlab").touch()
        self.state = {"options": opt, "procs": {}, "nodes": {}, "ready": False}
        self.save()
        base = network.make_switch(self)
        self.state["head_addr"] = f"{base}.254"
        for i in range(1, opt["nodes"] + 1):
            self.state["nodes"][f"node{i}"] = f"{base}.{i}"
            (self.dir / "spool" / f"node{i}").mkdir()
        self.save()
        write_config(self)
        sock = self.dir / "munge" / "s"
        files = {"socket": sock, "key-file": f"{self.dir}/munge/key", "seed-file": f"{self.dir}/munge/seed"}
        files |= {"pid-file": f"{self.dir}/pid/munged.pid", "log-file": f"{self.dir}/log/munged.log"}
        self.spawn("munged", ["munged", "--foreground", "--num-threads=4", *(f"--{k}={v}" for k, v in files.items())])
        self.wait_for_daemon("munged", 10, lambda: run("munge", "-n", "-S", sock, check=False).returncode == 0)
        self.spawn("slurmctld", network.on_head(self, ["slurmctld", "-D", "-c", "-f", self.conf]))
        for name in self.node_names:
            self._start_node(name)
        self.wait_for_daemon("slurmctld", 60, lambda: " is UP" in self.client("scontrol", "ping", check=False, timeout=20).stdout)
        self.wait_nodes(WAIT_S)
        self.state["ready"] = True
        self.save()

    def down(self):
        with self.lock():
            self._down()

    def _down(self, keep=False):
        for name in reversed(self.node_names):
            self.stop(name, signal.SIGKILL)  # takes the node's jobs along
        for key in ("slurmctld", "munged"):
            # nothing here outlives the lab, so no need for a slow clean exit
            self.stop(key, *([signal.SIGTERM] if keep else []), signal.SIGKILL)
        if self.state.get("iface") and self.alive("switch"):
            # would go with the switch namespace, but the kernel takes its time over that
            run("ip", "link", "del", self.state["iface"], check=False)
        self.stop("switch", signal.SIGKILL)
        self.sweep()
        self.state = {}
        with contextlib.suppress(OSError):
            self.state_file.unlink()
        if not keep and (self.dir / ".slurmlab").exists():
            shutil.rmtree(self.dir, ignore_errors=True)

    def node(self, name, accident):
        if name not in self.state.get("nodes", {}):
            raise LabError(f"no node {name}; there are {self.node_names}")
        with self.lock():
            if accident == "kill":
                self.stop(name, signal.SIGKILL)
            else:
                network.set_link(self, name, "down")

    def reset(self):
        """Between tests: no jobs, every node booted, connected and idle."""
        with self.lock():
            end = time.monotonic() + WAIT_S
            if not self.state.get("ready"):
                raise LabError("not up")
            self._heal()
            while ids := self.client("squeue", "-h", "-r", "-a", "-o", "%A", check=False).stdout.split():
                if time.monotonic() > end:
                    raise LabError(f"jobs still in the queue after {WAIT_S} s: {ids}")
                # KILL first, else jobs that ignore TERM cost KillWait seconds
                self.client("scancel", "--full", "--signal=KILL", *ids, check=False)
                self.client("scancel", *ids, check=False)
                time.sleep(0.2)
            self._resume()
            self.wait_nodes(max(1, end - time.monotonic()))
