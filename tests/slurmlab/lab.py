"""The laboratory: up, down, reset, and what happens to its nodes."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time

from . import network
from .accounting import start_accounting
from .config import write_config
from .machine import edit_hosts, free_ports, namespaces_usable, need_tools
from .nodes import Nodes
from .processes import LabError, kill_all, run, say
from .strays import strays, sweep

DEFAULTS = dict(  # noqa: C408
    nodes=4,
    cpus=4,
    mem=4096,
    gpus=2,
    net="auto",
    subnet="auto",
    accounting=False,
    slurmd_timeout=10,
    kill_wait=5,
    grace_time=0,
    cred_expire=5,
    debug="verbose",
    set=(),
)


class Lab(Nodes):
    """A Slurm cluster in a folder."""

    def up(self, fresh=False, wait=60, **options):
        opt = {**DEFAULTS, **{k: v for k, v in options.items() if v is not None}}
        opt["set"] = list(opt["set"])
        t0 = time.monotonic()
        need_tools(opt["accounting"])
        with self.lock():
            if not fresh and self.state.get("ready") and self.state["requested"] == opt:
                try:
                    self._heal(wait)
                    say(f"already up: {len(self.node_names)} nodes, mode {self.opt['net']}, SLURM_CONF={self.conf}")
                    return self
                except (LabError, subprocess.TimeoutExpired) as e:
                    say(f"unhealthy, rebuilding ({e})")
            self._down()
            try:
                self._up(opt, wait)
            except BaseException as e:
                tail = self.log_tail(
                    "munged.out",
                    "mariadbd.out",
                    "slurmdbd.log",
                    "slurmctld.out",
                    "slurmctld.log",
                    "slurmd-node1.log",
                    "node1.out",
                )
                self._down(keep=True)
                if isinstance(e, LabError):
                    raise LabError(f"{e}\n{tail}") from None
                raise
        say(f"ready: {opt['nodes']} idle nodes, mode {self.opt['net']}, {time.monotonic() - t0:.1f} s, SLURM_CONF={self.conf}")
        return self

    def _heal(self, wait):
        """A lab that was up: repair the nodes.  LabError if that is not enough."""
        dead = [key for key in self.state["procs"] if key not in self.node_names and not self.alive(key)]
        if dead:
            raise LabError(f"not running: {', '.join(dead)}")
        for name in self.node_names:
            if not self.alive(name):
                self._start_node(name)
            elif self.opt["net"] == "netns":
                network.set_link(self, name, "up")
                if not self._slurmd_pid(name):
                    self._start_slurmd(name)
        self._wait_listening(self.node_names)
        self._resume(self.node_names)
        self.wait_nodes(wait, ("idle", "mixed", "allocated", "completing"))

    def _up(self, opt, wait):
        if self.dir.exists() and any(self.dir.iterdir()):
            if not (self.dir / ".slurmlab").exists():
                raise LabError(f"{self.dir} exists, is not empty and was not made by slurmlab")
            shutil.rmtree(self.dir)
        for sub in ("etc", "munge", "ctld", "spool", "pid", "log", "dev", "local"):
            (self.dir / sub).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)
        (self.dir / ".slurmlab").touch()

        requested = dict(opt)
        opt = dict(opt)
        if opt["net"] == "auto":
            why = namespaces_usable()
            opt["net"] = "loopback" if why else "netns"
            if why:
                say(f"namespaces not usable ({why}); falling back to loopback mode")
        self.state = {"requested": requested, "options": opt, "procs": {}, "nodes": {}, "ready": False}
        self.save()
        netns = opt["net"] == "netns"

        if netns:
            base = network.make_switch(self, opt["subnet"])
            self.state.update(head="slurmhead", head_addr=f"{base}.254", ctld_port=6817, slurmd_port=6818, dbd_port=6819)
            for i in range(1, opt["nodes"] + 1):
                self.state["nodes"][f"node{i}"] = {"addr": f"{base}.{i}", "port": 6818}
        else:
            ports = free_ports(opt["nodes"] + 2)
            self.state.update(
                head=socket.gethostname().split(".")[0],
                head_addr="127.0.0.1",
                ctld_port=ports[0],
                dbd_port=ports[1],
                slurmd_port=ports[2],
            )
            for i in range(1, opt["nodes"] + 1):
                self.state["nodes"][f"node{i}"] = {"addr": "127.0.0.1", "port": ports[1 + i]}
        for name in self.node_names:
            (self.dir / "spool" / name).mkdir()
        self.save()
        write_config(self)
        if not netns:
            edit_hosts(self.dir, "127.0.0.1 " + " ".join(self.node_names))

        sock = self.dir / "munge" / "s"
        self.spawn(
            "munged",
            [
                "munged",
                "--foreground",
                "--num-threads=4",
                f"--socket={sock}",
                f"--key-file={self.dir}/munge/key",
                f"--seed-file={self.dir}/munge/seed",
                f"--pid-file={self.dir}/pid/munged.pid",
                f"--log-file={self.dir}/log/munged.log",
            ],
        )
        self.wait_for_daemon("munged", 10, lambda: run("munge", "-n", "-S", sock, check=False).returncode == 0)
        if opt["accounting"]:
            start_accounting(self)
        self.spawn("slurmctld", network.on_head(self, ["slurmctld", "-D", "-c", "-f", self.conf]))
        for name in self.node_names:
            self._start_node(name)
        self.wait_for_daemon("slurmctld", 60, lambda: " is UP" in self.client("scontrol", "ping", check=False, timeout=20).stdout)
        self.wait_nodes(wait, ("idle",))
        self.state["ready"] = True
        self.save()

    def down(self, keep=False):
        with self.lock():
            t0 = time.monotonic()
            self._down(keep)
            say(f"stopped in {time.monotonic() - t0:.1f} s")

    def _down(self, keep=False):
        st = self.state
        loopback = st.get("options", {}).get("net") == "loopback"
        others = strays(self) if loopback else []
        for name in reversed(self.node_names):
            self.stop(name, signal.SIGKILL)  # netns: takes the node's jobs along
        kill_all(others)
        for key in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            # nothing here outlives the lab, so no need for a slow clean exit
            self.stop(key, *([signal.SIGTERM] if keep else []), signal.SIGKILL)
        if st.get("iface") and self.alive("switch"):
            # would go with the switch namespace, but the kernel takes its time over that
            run("ip", "link", "del", st["iface"], check=False)
        self.stop("switch", signal.SIGKILL)
        sweep(self)
        edit_hosts(self.dir, None)
        self.state = {}
        with contextlib.suppress(OSError):
            self.state_file.unlink()
        if not keep and (self.dir / ".slurmlab").exists():
            shutil.rmtree(self.dir, ignore_errors=True)

    def status(self):
        if not self.state:
            print("down")
            return 3
        print(f"mode {self.opt['net']}, SLURM_CONF={self.conf}")
        keys = list(dict.fromkeys([*self.state["procs"], *self.node_names]))
        for key in keys:
            print(f"  {key:10} {'pid ' + str(self.pid(key)) if self.alive(key) else 'DEAD'}")
        print(self.client("sinfo", check=False).stdout, end="")
        return 0 if all(self.alive(k) for k in keys) else 1

    def node(self, name, action, *args):
        if name not in self.state.get("nodes", {}):
            raise LabError(f"no node {name}; there are {self.node_names}")
        netns = self.opt["net"] == "netns"
        if not netns and action in ("poweroff", "cut", "heal", "exec"):
            raise LabError(f"{action}: only in netns mode")
        if action == "exec":
            init = self.init_pid(name)
            if not init:
                raise LabError(f"{name} is not running")
            return subprocess.call(["nsenter", "-t", str(init), "-n", "-u", "-i", "-m", "-p", *args])
        with self.lock():
            if action in ("kill", "poweroff"):
                if action == "poweroff" and self.alive(name):
                    network.set_link(self, name, "down")
                victims = [] if netns else strays(self, only_node=name)
                self.stop(name, signal.SIGKILL)
                kill_all(victims)
            elif action == "boot":
                if not self.alive(name):
                    self._start_node(name)
                self._wait_listening([name])
                self._resume([name])
            elif action == "cut":
                network.set_link(self, name, "down")
            elif action == "heal":
                network.set_link(self, name, "up")
            elif action == "stop-slurmd":
                if netns:
                    pid = self._slurmd_pid(name)
                    if pid:
                        os.kill(pid, signal.SIGKILL)
                else:
                    self.stop(name, signal.SIGKILL)
            elif action == "start-slurmd":
                if netns:
                    if not self._slurmd_pid(name):
                        self._start_slurmd(name)
                elif not self.alive(name):
                    self._start_node(name)
                self._wait_listening([name])
            else:
                raise LabError(f"unknown action {action}")
        return 0

    def jobs(self):
        """Ids of the jobs in the queue, arrays unfolded."""
        return self.client("squeue", "-h", "-r", "-a", "-o", "%A", check=False).stdout.split()

    def reset(self, seconds=60):
        """Between tests: no jobs, every node booted, connected and idle."""
        with self.lock():
            end = time.monotonic() + seconds
            if not self.state.get("ready"):
                raise LabError("not up")
            self._heal(seconds)
            while True:
                ids = self.jobs()
                if not ids:
                    break
                if time.monotonic() > end:
                    raise LabError(f"jobs still in the queue after {seconds} s: {ids}")
                # KILL first, else jobs that ignore TERM cost KillWait seconds
                self.client("scancel", "--full", "--signal=KILL", *ids, check=False)
                self.client("scancel", *ids, check=False)
                time.sleep(0.2)
            self._resume(self.node_names)
            self.wait_nodes(max(1, end - time.monotonic()), ("idle",))
