"""Nodes: started, killed, plugged in, and what the controller thinks of them."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from .daemons import Daemons
from .processes import LabError, children, run, wait_for


class Nodes(Daemons):
    """The nodes of the laboratory."""

    def init_pid(self, name):
        """The node's first process (pid 1 inside), as seen from here."""
        pid = self.pid(name)
        kids = children(pid) if pid else []
        return kids[0] if kids else None

    def _start_node(self, name):
        apart = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.spawn(name, ["unshare", *apart, self.dir / "etc" / "node-init.sh", name, f"{self.state['nodes'][name]}/24"])
        init = wait_for(f"{name} to start", 60, lambda: self.init_pid(name))
        sw = ["nsenter", "-t", self.pid("switch"), "-n", "ip", "link"]
        # the kernel may take its time to clear away a dead node's
        run(*sw, "del", name, check=False)
        run(*sw, "add", name, "type", "veth", "peer", "name", "eth0", "netns", init)
        run(*sw, "set", name, "master", "br0", "up")

    def _resume(self, seconds=60):
        """Wait until slurmctld hears from the nodes and let it use them again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            states = self.node_states()
            if all(s in ("idle", "mixed", "allocated", "completing") for s in states.values()):
                return
            # refused ("Invalid node state") unless it is DOWN or drained: fine
            bad = [n for n, s in states.items() if s.rstrip("*$~#") in ("down", "drained", "draining", "fail")]
            if bad:
                self.client("scontrol", "update", "nodename=" + ",".join(bad), "state=resume", check=False)
            time.sleep(0.2)

    def _slurmd_pid(self, name):
        """slurmd's pid as seen from here, or None."""
        init = self.init_pid(name)
        for pid in children(init) if init else []:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("slurmd"):
                    return pid
        return None

    def _start_slurmd(self, name):
        init = self.init_pid(name)
        if not init:
            raise LabError(f"{name} is not running")
        os.kill(init, signal.SIGUSR1)  # node-init.sh starts a new slurmd
        wait_for(f"slurmd on {name}", 60, lambda: self._slurmd_pid(name))

    def _wait_listening(self):
        """Until the slurmds accept connections (slurmctld may not have missed them,
        so what it says of the nodes does not tell)."""
        for name, addr in self.state["nodes"].items():

            def probe():
                with contextlib.suppress(OSError), socket.create_connection((addr, 6818), timeout=1):  # noqa: B023
                    return True

            wait_for(f"slurmd on {name} to listen", 60, probe)

    def node_states(self):
        p = self.client("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in p.stdout.splitlines() if line.strip())

    def wait_nodes(self, seconds, wanted=("idle",)):
        """Until each node is in one of the wanted states (and none not responding, '*')."""
        last = {}

        def probe():
            last.clear()
            last.update(self.node_states())
            return all(last.get(n) in wanted for n in self.node_names)

        try:
            wait_for(f"nodes to be {'/'.join(wanted)}", seconds, probe, every=0.1)
        except LabError as e:
            raise LabError(f"{e}; now {last}") from None
