"""A real multi-node Slurm cluster on one machine, for automated tests.

    slurmlab up     [--nodes 4] [--cpus 4] [--net auto|netns|loopback] [--accounting] ...
    slurmlab down   [--keep]
    slurmlab status
    slurmlab reset                    cancel all jobs, repair all nodes, wait until idle
    slurmlab env                      prints "export SLURM_CONF=..." for eval
    slurmlab node NAME kill           every process of the node dies at once (its peers see
                                         their connections closed or reset)
    slurmlab node NAME poweroff       the same, in silence: nothing is sent         (netns only)
    slurmlab node NAME boot           start the node again
    slurmlab node NAME cut|heal       unplug / replug its network cable        (netns only)
    slurmlab node NAME stop-slurmd    kill slurmd only; running jobs go on
    slurmlab node NAME start-slurmd
    slurmlab node NAME exec CMD...    run CMD on the node, outside any job     (netns only)

All take --dir DIR (default $SLURMLAB_DIR, else slurmlab/run in the temporary folder).  Only the
standard library is used; needs root and the Debian packages
    slurmctld slurmd slurm-client munge iproute2     (util-linux is there already)
    slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core   (--accounting)
No systemd, no cgroups, nothing in /etc or /var is written.

How the nodes are separated
  netns     Each node is a set of private namespaces: network (own eth0, own IP),
            UTS (own hostname), PID, mount (own /etc/hosts, /dev/shm and DIR/local)
            and IPC.  The file system is otherwise shared, like a cluster's NFS.
            Nodes and this machine hang on one bridge, which lives in a network
            namespace of its own; the only trace outside is one veth interface.
            Killing a node's first process kills the whole node.
  loopback  Several slurmd on 127.0.0.1 with a port each ("multiple slurmd").
            Fall-back for containers without CAP_NET_ADMIN/CAP_SYS_ADMIN.  Node
            names are made resolvable by a marked block in /etc/hosts.

State: DIR/state.json holds pid + kernel start time of each process we started;
a pid is only ever signalled while both still match.
"""

import argparse
import sys

from .daemons import DEFAULT_DIR
from .lab import Lab
from .processes import LabError, say


def main(argv=None):
    ap = argparse.ArgumentParser(prog="slurmlab", description="a real multi-node Slurm cluster on one machine")
    ap.add_argument("--dir", default=DEFAULT_DIR)
    sub = ap.add_subparsers(dest="cmd", required=True)
    up = sub.add_parser("up")
    up.add_argument("--nodes", type=int)
    up.add_argument("--cpus", type=int, help="CPUs to declare per node (may exceed the machine's)")
    up.add_argument("--mem", type=int, help="MiB of memory to declare per node")
    up.add_argument("--gpus", type=int, help="pretend GPUs per node (0: none)")
    up.add_argument("--net", choices=["auto", "netns", "loopback"])
    up.add_argument("--subnet", help="first three octets, e.g. 10.213.0 (default: a free one)")
    up.add_argument("--accounting", action="store_true", default=None, help="slurmdbd + MariaDB, so sacct works")
    up.add_argument("--slurmd-timeout", type=int, help="seconds until a silent node is DOWN")
    up.add_argument("--kill-wait", type=int, help="seconds between SIGTERM and SIGKILL")
    up.add_argument("--grace-time", type=int, help="seconds a preempted job gets")
    up.add_argument("--cred-expire", type=int, help="seconds until a requeued job may start again")
    up.add_argument("--debug", help="SlurmctldDebug/SlurmdDebug level")
    up.add_argument("--set", action="append", metavar="KEY=VALUE", help="any slurm.conf line; may be repeated")
    up.add_argument("--fresh", action="store_true", help="rebuild even if already up")
    up.add_argument("--wait", type=int, default=60)
    down = sub.add_parser("down")
    down.add_argument("--keep", action="store_true", help="keep the directory (logs)")
    sub.add_parser("status")
    sub.add_parser("env")
    sub.add_parser("reset")
    node = sub.add_parser("node")
    node.add_argument("name")
    node.add_argument("action", choices=["kill", "poweroff", "boot", "cut", "heal", "stop-slurmd", "start-slurmd", "exec"])
    node.add_argument("args", nargs=argparse.REMAINDER)
    for p in (up, down, node, *[sub.choices[c] for c in ("status", "env", "reset")]):
        p.add_argument("--dir", default=argparse.SUPPRESS)
    a = vars(ap.parse_args(argv))
    try:
        lab = Lab(a.pop("dir"))
        cmd = a.pop("cmd")
        if cmd == "up":
            lab.up(**a)
            print(f"export SLURM_CONF={lab.conf}")
        elif cmd == "down":
            lab.down(a["keep"])
        elif cmd == "status":
            return lab.status()
        elif cmd == "reset":
            lab.reset()
        elif cmd == "env":
            if not lab.state:
                raise LabError("not up")
            print(f"export SLURM_CONF={lab.conf}")
        else:
            return lab.node(a["name"], a["action"], *a["args"])
    except LabError as e:
        say(f"error: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
