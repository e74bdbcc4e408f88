"""The files of a Slurm: slurm.conf and what it names."""

import os
import re
import socket
from pathlib import Path

from .machine import slurm_version

HERE = Path(__file__).resolve().parent


def write_config(lab):
    st, opt, d = lab.state, lab.opt, lab.dir
    netns = opt["net"] == "netns"
    lines = []
    for name, n in st["nodes"].items():
        lines.append(
            f"NodeName={name} NodeAddr={n['addr']}"
            + ("" if netns else f" NodeHostname={st['head']} Port={n['port']}")
            + f" CPUs={opt['cpus']} Boards=1 SocketsPerBoard=1 CoresPerSocket={opt['cpus']} ThreadsPerCore=1"
            f" RealMemory={opt['mem']}" + (f" Gres=gpu:{opt['gpus']}" if opt["gpus"] else "") + " State=UNKNOWN"
        )
    values = {
        "HEAD": st["head"],
        "HEAD_ADDR": st["head_addr"],
        "RUN": d,
        "CTLD_PORT": st["ctld_port"],
        "SLURMD_PORT": st["slurmd_port"],
        "DEBUG": opt["debug"],
        "SLURMD_TIMEOUT": opt["slurmd_timeout"],
        "KILL_WAIT": opt["kill_wait"],
        "GRACE_TIME": opt["grace_time"],
        "CRED_EXPIRE": opt["cred_expire"],
        # not NoInAddrAny: it makes srun listen on what the submitting host's own name
        # resolves to (often 127.0.0.1), where the nodes cannot reach it
        "COMM_PARAMS": "CommunicationParameters=NoCtldInAddrAny",
        "NODE_LINES": "\n".join(lines),
        "ACCOUNTING": (
            f"AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={st['head_addr']}\nAccountingStoragePort={st['dbd_port']}\n"
            f"AccountingStorageTRES=gres/gpu\n"
            f"AccountingStoragePass={d}/munge/s"  # the munge socket, not a password
            if opt["accounting"]
            else "AccountingStorageType=accounting_storage/none"
        ),
    }
    text = (HERE / "slurm.conf.in").read_text()
    # comments first: they may mention @NAME@
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
    text = re.sub(r"@([A-Z_]+)@", lambda m: str(values[m.group(1)]), text)
    for line in opt["set"]:  # any slurm.conf line, replaced or added
        key = line.partition("=")[0]
        lines = [ln for ln in text.splitlines() if not ln.lower().startswith(key.lower() + "=")]
        cut = next(i for i, ln in enumerate(lines) if ln.startswith("NodeName="))
        text = "\n".join(lines[:cut] + [line] + lines[cut:]) + "\n"
    lab.conf.write_text(text)

    # Pretend GPUs: any character device will do; Slurm hands out their numbers
    # (CUDA_VISIBLE_DEVICES, --gpus-per-node, ...).
    gres = ""
    if opt["gpus"]:
        for i in range(opt["gpus"]):
            (d / "dev" / f"gpu{i}").symlink_to("/dev/null")
        gres = f"NodeName={','.join(lab.node_names)} Name=gpu File={d}/dev/gpu[0-{opt['gpus'] - 1}]\n"
        if opt["gpus"] == 1:
            gres = gres.replace("gpu[0-0]", "gpu0")
    (d / "etc" / "gres.conf").write_text(gres)
    # Newer versions look at cgroups even where no cgroup plugin is configured.
    off = slurm_version() >= (24, 5) and "ProctrackType=proctrack/cgroup" not in opt["set"]
    (d / "etc" / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if off else "")

    key = d / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (d / "munge").chmod(0o755)

    if netns:
        mine = socket.gethostname()
        (d / "etc" / "hosts").write_text(
            "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
            + "".join(f"{n['addr']} {name}\n" for name, n in st["nodes"].items())
            + f"{st['head_addr']} {st['head']}"
            + (f" {mine}" if mine not in ("localhost", st["head"]) else "")
            + "\n"
            # torch asks for the name of an address in this form, which a name server would know: without, it warns
            + "".join(f"::ffff:{n['addr']} {name}.lab\n" for name, n in st["nodes"].items())
            + "::ffff:127.0.0.1 localhost4.lab\n"
        )
        # no name server: unknown names fail at once instead of after a timeout
        (d / "etc" / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    epilog = d / "etc" / "epilog.sh"
    epilog.write_text((HERE / "epilog.sh").read_text().replace("@RUN@", str(d)))
    epilog.chmod(0o755)
    (d / "log" / "leftovers.log").touch()
    (d / "log" / "leftovers.log").chmod(0o666)  # TaskEpilog runs as the job's user
    init = d / "etc" / "node-init.sh"
    init.write_text((HERE / "node-init.sh").read_text().replace("@RUN@", str(d)))
    init.chmod(0o755)
