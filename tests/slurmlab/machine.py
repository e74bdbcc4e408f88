"""What this machine has: programs, namespaces, ports, names of hosts."""

import contextlib
import os
import re
import shutil
import socket
from pathlib import Path

from .processes import LabError, run


def need_tools(accounting):
    need = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
    if accounting:
        need.update(
            {
                "slurmdbd": "slurmdbd slurm-wlm-mysql-plugin",
                "mariadbd": "mariadb-server-core",
                "mariadb-install-db": "mariadb-server-core",
                "my_print_defaults": "mariadb-client-core",
            }
        )
    missing = sorted({pkg for tool, pkg in need.items() if not shutil.which(tool)})
    if missing:
        raise LabError(
            "missing programs; as root: apt-get update && apt-get install -y --no-install-recommends " + " ".join(missing)
        )
    if os.geteuid():
        raise LabError("must run as root")


def namespaces_usable():
    """None if netns mode can work here, else the reason why not."""
    for tool in ("ip", "unshare", "nsenter"):
        if not shutil.which(tool):
            return f"no {tool}"
    script = (
        "mount -t tmpfs t /dev/shm && hostname x && ip link add br0 type bridge && "
        "ip link add v0 type veth peer name v1 && ip link set v0 master br0"
    )
    p = run(
        "unshare",
        "--net",
        "--uts",
        "--ipc",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        script,
        check=False,
    )
    return None if p.returncode == 0 else (p.stderr.strip() or f"rc {p.returncode}")


def ns_of(pid, kind):
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def slurm_version():
    """(22, 5) for 22.05.8"""
    return tuple(int(n) for n in re.findall(r"\d+", run("slurmctld", "-V").stdout)[:2])


def greets(path):
    """Does a server on this Unix socket speak first, as MySQL does once it is ready?"""
    with socket.socket(socket.AF_UNIX) as s, contextlib.suppress(OSError):
        s.settimeout(5)
        s.connect(str(path))
        return bool(s.recv(1))
    return False


def free_ports(n):
    """n unused TCP ports in a row, below the range the kernel hands out to clients."""
    for first in range(17000, 30000, 50):
        socks = []
        try:
            for port in range(first, first + n):
                s = socket.socket()
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                socks.append(s)
                s.bind(("", port))
            return list(range(first, first + n))
        except OSError:
            continue
        finally:
            for s in socks:
                s.close()
    raise LabError("no free ports")


def edit_hosts(directory, line):
    """Put (or with None: take out) our marked line in /etc/hosts.  Rewritten in
    place, not replaced: in a container /etc/hosts is a mount point."""
    mark = f"# slurmlab {directory}"
    path = Path("/etc/hosts")
    old = path.read_text()
    new = "".join(text for text in old.splitlines(keepends=True) if not text.rstrip("\n").endswith(mark))
    if line:
        new += ("" if new.endswith("\n") or not new else "\n") + f"{line} {mark}\n"
    if new != old:
        path.write_text(new)
