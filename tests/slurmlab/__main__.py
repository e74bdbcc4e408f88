"""A real multi-node Slurm cluster on one machine, for automated tests.

    slurmlab up [--nodes 4] [--cpus 4] [--kill-wait 5]
    slurmlab reset                 cancel all jobs, repair all nodes, wait until idle
    slurmlab node NAME kill        every process of the node dies at once (its peers see their connections closed or reset)
    slurmlab node NAME cut         unplug its network cable
    slurmlab down

Each node is a set of private namespaces: network (own eth0, own IP), UTS (own hostname), PID, mount (own /etc/hosts, /dev/shm and
DIR/local) and IPC. The file system is otherwise shared, like a cluster's NFS. Nodes and this machine hang on one bridge, which
lives in a network namespace of its own; the only trace outside is one veth interface. Killing a node's first process kills the
whole node.

State: DIR/state.json holds pid + kernel start time of each process we started; a pid is only ever signalled while both still
match. Only the standard library is used; needs root and what `install` installs. No systemd, no cgroups, nothing in /etc or /var
is written.
"""

import argparse
import sys

from .lab import Lab
from .processes import LabError, say


def main():
    parser = argparse.ArgumentParser(prog="slurmlab", description="a real multi-node Slurm cluster on one machine")
    parser.add_argument("--dir", required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--cpus", type=int, default=4, help="CPUs to declare per node (may exceed the machine's)")
    up.add_argument("--kill-wait", type=int, default=5, help="seconds between SIGTERM and SIGKILL")
    commands.add_parser("reset")
    commands.add_parser("down")
    node = commands.add_parser("node")
    node.add_argument("name")
    node.add_argument("accident", choices=["kill", "cut"])
    given = vars(parser.parse_args())
    try:
        lab = Lab(given.pop("dir"))
        getattr(lab, given.pop("command"))(**given)
    except LabError as e:
        say(f"error: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
