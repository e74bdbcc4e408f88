"""The network of the nodes: one bridge in a namespace of its own, a cable to each node and one to this machine."""

import os
from pathlib import Path

from .machine import ns_of
from .processes import LabError, run, wait_for


def make_switch(lab, subnet):
    """A namespace that holds the bridge; everything in it goes when it dies.
    Returns the subnet's first three octets."""
    lab.spawn("switch", ["unshare", "--net", "sleep", "infinity"])
    me = os.readlink("/proc/self/ns/net")
    pid = lab.pid("switch")
    wait_for("switch namespace", 10, lambda: ns_of(pid, "net") not in (None, me))
    sw = ["nsenter", "-t", pid, "-n"]
    run(*sw, "ip", "link", "add", "br0", "type", "bridge")
    run(*sw, "ip", "link", "set", "br0", "up")
    # Creating the interface is what claims the subnet, should several labs start at once.
    for base in [f"10.213.{i}" for i in range(250)] if subnet == "auto" else [subnet]:
        iface = "slab" + "-".join(base.split(".")[1:])
        routes = run("ip", "-4", "route", "show", "table", "all").stdout
        if subnet == "auto" and f"{base}." in routes:
            continue
        p = run("ip", "link", "add", iface, "type", "veth", "peer", "name", "head", "netns", pid, check=False)
        if p.returncode == 0:
            break
        if "exists" not in p.stderr or subnet != "auto":
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
    if lab.opt["net"] != "netns":
        return cmd
    hosts = lab.dir / "etc" / "hosts-head"
    hosts.write_text(
        Path("/etc/hosts").read_text()
        + "\n"
        + "".join(f"{n['addr']} {k}\n" for k, n in lab.state["nodes"].items())
        + f"{lab.state['head_addr']} {lab.state['head']}\n"
    )
    return [
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"',
        "sh",
        hosts,
        lab.state["head"],
        *cmd,
    ]
