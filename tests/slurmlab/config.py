"""The files of a Slurm: slurm.conf and what it names."""

import os
import re
import socket
from pathlib import Path

from .network import HEAD
from .processes import run

HERE = Path(__file__).resolve().parent


def write_config(lab):
    d, opt, nodes = lab.dir, lab.state["options"], lab.state["nodes"]
    values = {
        "HEAD": HEAD,
        "HEAD_ADDR": lab.state["head_addr"],
        "RUN": d,
        "KILL_WAIT": opt["kill_wait"],
        "NODE_LINES": "\n".join(
            f"NodeName={name} NodeAddr={addr} CPUs={opt['cpus']} Boards=1 SocketsPerBoard=1 CoresPerSocket={opt['cpus']} "
            "ThreadsPerCore=1 RealMemory=4096 State=UNKNOWN"
            for name, addr in nodes.items()
        ),
    }
    text = (HERE / "slurm.conf.in").read_text()
    # comments first: they may mention @NAME@
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
    lab.conf.write_text(re.sub(r"@([A-Z_]+)@", lambda m: str(values[m.group(1)]), text))
    # Newer versions look at cgroups even where no cgroup plugin is configured.
    version = tuple(int(n) for n in re.findall(r"\d+", run("slurmctld", "-V").stdout)[:2])  # (22, 5) for 22.05.8
    (d / "etc" / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if version >= (24, 5) else "")
    key = d / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (d / "munge").chmod(0o755)
    mine = socket.gethostname()
    (d / "etc" / "hosts").write_text(
        "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
        + "".join(f"{addr} {name}\n" for name, addr in nodes.items())
        + f"{lab.state['head_addr']} {HEAD}"
        + (f" {mine}" if mine not in ("localhost", HEAD) else "")
        + "\n"
        # torch asks for the name of an address in this form, which a name server would know: without, it warns
        + "".join(f"::ffff:{addr} {name}.lab\n" for name, addr in nodes.items())
        + "::ffff:127.0.0.1 localhost4.lab\n"
    )
    # no name server: unknown names fail at once instead of after a timeout
    (d / "etc" / "resolv.conf").write_text("options timeout:1 attempts:1\n")
    for name in ("epilog.sh", "node-init.sh"):
        script = d / "etc" / name
        script.write_text((HERE / name).read_text().replace("@RUN@", str(d)))
        script.chmod(0o755)
    (d / "log" / "leftovers.log").touch()
    (d / "log" / "leftovers.log").chmod(0o666)  # TaskEpilog runs as the job's user
