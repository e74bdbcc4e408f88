"""The network of the nodes: one bridge in a namespace of its own, a cable to each node and one to this machine."""

import contextlib
import os
from pathlib import Path

from .processes import LabError, run, wait_for

HEAD = "slurmhead"


def make_switch(lab):
    """A namespace that holds the bridge; everything in it goes when it dies.
    Returns the subnet's first three octets."""
    lab.spawn("switch", ["unshare", "--net", "sleep", "infinity"])
    me = os.readlink("/proc/self/ns/net")
    pid = lab.pid("switch")

    def is_apart():
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net") != me

    wait_for("a network namespace, which may need more rights than this machine gives", 10, is_apart)
    sw = ["nsenter", "-t", pid, "-n"]
    run(*sw, "ip", "link", "add", "br0", "type", "bridge")
    run(*sw, "ip", "link", "set", "br0", "up")
    # Creating the interface is what claims the subnet, should several labs start at once.
    for base in [f"10.213.{i}" for i in range(250)]:
        iface = "slab" + "-".join(base.split(".")[1:])
        if f"{base}." in run("ip", "-4", "route", "show", "table", "all").stdout:
            continue
        p = run("ip", "link", "add", iface, "type", "veth", "peer", "name", "head", "netns", pid, check=False)
        if p.returncode == 0:
            break
        if "exists" not in p.stderr:
            raise LabError(f"cannot create {iface}: {p.stderr.strip()}")
    else:
        raise LabError("no free subnet")
    lab.state["iface"] = iface
    lab.save()
    run(*sw, "ip", "link", "set", "head", "master", "br0", "up")
    run("ip", "addr", "add", f"{base}.254/24", "dev", iface)
    run("ip", "link", "set", iface, "up")
    return base


def set_link(lab, name, updown):
    run("nsenter", "-t", lab.pid("switch"), "-n", "ip", "link", "set", name, updown)


def on_head(lab, cmd):
    """Head daemons stay in this machine's network but get the head's hostname."""
    hosts = lab.dir / "etc" / "hosts-head"
    names = [*lab.state["nodes"].items(), (HEAD, lab.state["head_addr"])]
    hosts.write_text(Path("/etc/hosts").read_text() + "\n" + "".join(f"{addr} {name}\n" for name, addr in names))
    script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", hosts, HEAD, *cmd]
