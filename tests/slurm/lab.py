#!/usr/bin/env python3
"""A real multi-node Slurm cluster on one machine, for automated tests.

    lab.py up     [--nodes 4] [--cpus 4] [--net auto|netns|loopback] [--accounting] ...
    lab.py down   [--keep]
    lab.py status
    lab.py reset                    cancel all jobs, repair all nodes, wait until idle
    lab.py env                      prints "export SLURM_CONF=..." for eval
    lab.py node NAME kill           every process of the node dies at once (its peers see
                                         their connections closed or reset)
    lab.py node NAME poweroff       the same, in silence: nothing is sent         (netns only)
    lab.py node NAME boot           start the node again
    lab.py node NAME cut|heal       unplug / replug its network cable        (netns only)
    lab.py node NAME stop-slurmd    kill slurmd only; running jobs go on
    lab.py node NAME start-slurmd
    lab.py node NAME exec CMD...    run CMD on the node, outside any job     (netns only)

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
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "slurm.conf.in"
DEFAULT_DIR = os.environ.get("SLURMLAB_DIR") or os.path.join(tempfile.gettempdir(), "slurmlab", "run")
MARK = "SLURMLAB_DAEMON"  # environment variable that marks our daemons
# cron, CI and `env -i` often lack the sbin directories
os.environ["PATH"] = os.pathsep.join(
    dict.fromkeys(
        os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(os.pathsep) + ["/usr/local/sbin", "/usr/sbin", "/sbin"]
    )
)
CLIENT_ENV_DROP = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SLURMD_")

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


class LabError(RuntimeError):
    pass


def say(msg):
    print(f"slurmlab: {msg}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------
# processes
# --------------------------------------------------------------------------


def start_time(pid):
    """Kernel start time of a live process, None if there is none (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def children(pid):
    """Direct children of pid."""
    out = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                out.append(int(entry))
    return out


def wait_for(what, seconds, probe, every=0.03):
    """Poll probe() until it returns something true; LabError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            raise LabError(f"timed out after {seconds} s waiting for {what}")
        time.sleep(every)


def run(*cmd, check=True, **kw):
    kw.setdefault("stdin", subprocess.DEVNULL)
    p = subprocess.run([str(c) for c in cmd], capture_output=True, text=True, **kw)
    if check and p.returncode:
        raise LabError(f"{' '.join(map(str, cmd))}: rc {p.returncode}: {(p.stderr or p.stdout).strip()[-600:]}")
    return p


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


class Lab:
    def __init__(self, directory=DEFAULT_DIR):
        self.dir = Path(directory).absolute()
        # Unix socket paths (munge, slurmstepd) must stay under 108 characters.
        if len(str(self.dir)) > 60:
            raise LabError(f"--dir is too long for Unix sockets (over 60 characters): {self.dir}")
        self.conf = self.dir / "etc" / "slurm.conf"
        self.state_file = self.dir / "state.json"
        self.state = {}
        self.load()

    # -- state ---------------------------------------------------------------

    def load(self):
        try:
            self.state = json.loads(self.state_file.read_text())
        except (OSError, ValueError):
            self.state = {}

    def save(self):
        if not self.dir.exists():
            return
        tmp = self.state_file.with_suffix(".tmp")
        tmp.write_text(json.dumps(self.state, indent=1))
        os.replace(tmp, self.state_file)

    @contextlib.contextmanager
    def lock(self):
        """One up/down at a time per directory (pytest-xdist, parallel CI steps)."""
        self.dir.parent.mkdir(parents=True, exist_ok=True)
        with open(str(self.dir) + ".lock", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.load()
            yield

    @property
    def opt(self):
        return self.state["options"]

    @property
    def node_names(self):
        return list(self.state.get("nodes", {}))

    def client_env(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith(CLIENT_ENV_DROP)}
        env["SLURM_CONF"] = str(self.conf)
        return env

    def client(self, *cmd, check=True, timeout=60):
        return run(*cmd, check=check, env=self.client_env(), timeout=timeout)

    # -- starting and stopping one daemon --------------------------------------

    def spawn(self, key, cmd, env=None):
        """Start a daemon in its own session, all output to a log; record it at once."""
        log = open(self.dir / "log" / f"{key}.out", "ab")
        # Only what a daemon needs: the caller's SLURM_*, PYTHON* etc. must not leak in.
        clean = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.path.expanduser("~"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.conf),
            MARK: str(self.dir),
            **(env or {}),
        }
        p = subprocess.Popen(
            [str(c) for c in cmd], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", env=clean
        )
        log.close()
        self.state.setdefault("procs", {})[key] = [p.pid, start_time(p.pid)]
        self.save()
        return p

    def alive(self, key):
        rec = self.state.get("procs", {}).get(key)
        return bool(rec and rec[1] is not None and start_time(rec[0]) == rec[1])

    def pid(self, key):
        return self.state["procs"][key][0] if self.alive(key) else None

    def stop(self, key, *signals, grace=5.0):
        """Send one recorded process the signals, each after `grace` if still there; forget it."""
        pid = self.pid(key) if key in self.state.get("procs", {}) else None
        if pid:
            # a node is gone when its first process (the child) is
            group = [(p, start_time(p)) for p in [pid, *(children(pid) if key in self.node_names else [])]]

            def gone():
                reap(pid)
                return not any(born is not None and start_time(p) == born for p, born in group)

            for sig in signals:
                kill_all(group[:1], sig)
                with contextlib.suppress(LabError):
                    wait_for(key, grace, gone, every=0.02)
                    break
        self.state.get("procs", {}).pop(key, None)
        self.save()

    def log_tail(self, *names, lines=15):
        out = []
        for name in names:
            f = self.dir / "log" / name
            if f.exists():
                out.append(f"--- {f}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-lines:]))
        return "\n".join(out)

    # -- up ------------------------------------------------------------------------

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
                self._link(name, "up")
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
            base = self._make_switch(opt["subnet"])
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
        self._write_config()
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
        self._wait_proc("munged", 10, lambda: run("munge", "-n", "-S", sock, check=False).returncode == 0)
        if opt["accounting"]:
            self._start_accounting()
        self.spawn("slurmctld", self._on_head(["slurmctld", "-D", "-c", "-f", self.conf]))
        for name in self.node_names:
            self._start_node(name)
        self._wait_proc("slurmctld", 20, lambda: " is UP" in self.client("scontrol", "ping", check=False, timeout=20).stdout)
        self.wait_nodes(wait, ("idle",))
        self.state["ready"] = True
        self.save()

    def _wait_proc(self, key, seconds, probe):
        def check():
            if not self.alive(key):
                raise LabError(f"{key} died during start-up")
            return probe()

        wait_for(key, seconds, check)

    def _write_config(self):
        st, opt, d = self.state, self.opt, self.dir
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
        text = TEMPLATE.read_text()
        # comments first: they may mention @NAME@
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n"
        text = re.sub(r"@([A-Z_]+)@", lambda m: str(values[m.group(1)]), text)
        for line in opt["set"]:  # any slurm.conf line, replaced or added
            key = line.partition("=")[0]
            lines = [ln for ln in text.splitlines() if not ln.lower().startswith(key.lower() + "=")]
            cut = next(i for i, ln in enumerate(lines) if ln.startswith("NodeName="))
            text = "\n".join(lines[:cut] + [line] + lines[cut:]) + "\n"
        self.conf.write_text(text)

        # Pretend GPUs: any character device will do; Slurm hands out their numbers
        # (CUDA_VISIBLE_DEVICES, --gpus-per-node, ...).
        gres = ""
        if opt["gpus"]:
            for i in range(opt["gpus"]):
                (d / "dev" / f"gpu{i}").symlink_to("/dev/null")
            gres = f"NodeName={','.join(self.node_names)} Name=gpu File={d}/dev/gpu[0-{opt['gpus'] - 1}]\n"
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
        epilog.write_text(EPILOG.replace("@RUN@", str(d)))
        epilog.chmod(0o755)
        (d / "log" / "leftovers.log").touch()
        (d / "log" / "leftovers.log").chmod(0o666)  # TaskEpilog runs as the job's user
        init = d / "etc" / "node-init.sh"
        init.write_text(NODE_INIT.replace("@RUN@", str(d)))
        init.chmod(0o755)

    # -- network (netns mode) -------------------------------------------------------

    def _make_switch(self, subnet):
        """A namespace that holds the bridge; everything in it goes when it dies.
        Returns the subnet's first three octets."""
        self.spawn("switch", ["unshare", "--net", "sleep", "infinity"])
        me = os.readlink("/proc/self/ns/net")
        pid = self.pid("switch")
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
        self.state["iface"] = iface
        self.save()
        run(*sw, "ip", "link", "set", "head", "master", "br0", "up")
        run("ip", "addr", "add", f"{base}.254/24", "dev", iface)
        run("ip", "link", "set", iface, "up")
        return base

    def _link(self, name, updown):
        run("nsenter", "-t", self.pid("switch"), "-n", "ip", "link", "set", name, updown)

    def _on_head(self, cmd):
        """Head daemons stay in this machine's network but get the head's hostname."""
        if self.opt["net"] != "netns":
            return cmd
        hosts = self.dir / "etc" / "hosts-head"
        hosts.write_text(
            Path("/etc/hosts").read_text()
            + "\n"
            + "".join(f"{n['addr']} {k}\n" for k, n in self.state["nodes"].items())
            + f"{self.state['head_addr']} {self.state['head']}\n"
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
            self.state["head"],
            *cmd,
        ]

    # -- nodes -------------------------------------------------------------------------

    def init_pid(self, name):
        """The node's first process (pid 1 inside), as seen from here."""
        pid = self.pid(name)
        kids = children(pid) if pid else []
        return kids[0] if kids else None

    def _start_node(self, name):
        n = self.state["nodes"][name]
        if self.opt["net"] == "netns":
            self.spawn(
                name,
                [
                    "unshare",
                    "--net",
                    "--uts",
                    "--ipc",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    self.dir / "etc" / "node-init.sh",
                    name,
                    f"{n['addr']}/24",
                ],
            )
            init = wait_for(f"{name} to start", 10, lambda: self.init_pid(name))
            sw = ["nsenter", "-t", self.pid("switch"), "-n", "ip", "link"]
            # the kernel may take its time to clear away a dead node's
            run(*sw, "del", name, check=False)
            run(*sw, "add", name, "type", "veth", "peer", "name", "eth0", "netns", init)
            run(*sw, "set", name, "master", "br0", "up")
        else:
            self.spawn(name, ["slurmd", "-D", "-N", name, "-f", self.conf])

    def _resume(self, names, seconds=20):
        """Wait until slurmctld hears from the nodes and let it use them again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            states = {n: s for n, s in self.node_states().items() if n in names}
            if all(s in ("idle", "mixed", "allocated", "completing") for s in states.values()):
                return
            # refused ("Invalid node state") unless it is DOWN or drained: fine
            bad = [n for n, s in states.items() if s.rstrip("*$~#") in ("down", "drained", "draining", "fail")]
            if bad:
                self.client("scontrol", "update", "nodename=" + ",".join(bad), "state=resume", check=False)
            time.sleep(0.2)

    def _slurmd_pid(self, name):
        """slurmd's pid as seen from here, or None."""
        if self.opt["net"] != "netns":
            return self.pid(name)
        init = self.init_pid(name)
        for pid in children(init) if init else []:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("slurmd"):
                    return pid
        return None

    def _start_slurmd(self, name):
        init = self.init_pid(name)
        if not init:
            raise LabError(f"{name} is not running; boot it first")
        os.kill(init, signal.SIGUSR1)  # node-init.sh starts a new slurmd
        wait_for(f"slurmd on {name}", 10, lambda: self._slurmd_pid(name))

    def _wait_listening(self, names, seconds=20):
        """Until the slurmds accept connections (slurmctld may not have missed them,
        so what it says of the nodes does not tell)."""
        for name in names:
            n = self.state["nodes"][name]

            def probe():
                with contextlib.suppress(OSError), socket.create_connection((n["addr"], n["port"]), timeout=1):  # noqa: B023
                    return True

            wait_for(f"slurmd on {name} to listen", seconds, probe)

    def node_states(self):
        p = self.client("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in p.stdout.splitlines() if line.strip())

    def wait_nodes(self, seconds, wanted=("idle",), names=None):
        """Until each node is in one of the wanted states (and none not responding, '*')."""
        names = set(names or self.node_names)
        last = {}

        def probe():
            last.clear()
            last.update(self.node_states())
            return all(last.get(n) in wanted for n in names)

        try:
            wait_for(f"nodes to be {'/'.join(wanted)}", seconds, probe, every=0.1)
        except LabError as e:
            raise LabError(f"{e}; now {last}") from None

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
                    self._link(name, "down")
                victims = [] if netns else self._strays(only_node=name)
                self.stop(name, signal.SIGKILL)
                kill_all(victims)
            elif action == "boot":
                if not self.alive(name):
                    self._start_node(name)
                self._wait_listening([name])
                self._resume([name])
            elif action == "cut":
                self._link(name, "down")
            elif action == "heal":
                self._link(name, "up")
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

    # -- accounting ----------------------------------------------------------------------

    def _start_accounting(self):
        """slurmdbd on a private MariaDB that listens on a Unix socket only."""
        d, st = self.dir, self.state
        data, sock = d / "mysql", d / "my.sock"
        run(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={data}",
            "--user=root",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
            "--skip-name-resolve",
            timeout=120,
        )
        self.spawn(
            "mariadbd",
            [
                "mariadbd",
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                f"--socket={sock}",
                "--skip-networking",
                f"--pid-file={d}/pid/mariadbd.pid",
                "--innodb-buffer-pool-size=64M",
                "--innodb-log-file-size=16M",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-lock-wait-timeout=900",
                "--skip-log-bin",
                "--performance-schema=OFF",
            ],
        )
        self._wait_proc("mariadbd", 60, lambda: greets(sock))
        conf = d / "etc" / "slurmdbd.conf"
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={d}/munge/s\nDbdHost={st['head']}\nDbdAddr={st['head_addr']}\n"
            f"DbdPort={st['dbd_port']}\nSlurmUser=root\nDebugLevel={self.opt['debug']}\n"
            f"LogFile={d}/log/slurmdbd.log\nPidFile={d}/pid/slurmdbd.pid\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=localhost\nStorageUser=root\nStorageLoc=slurmlab\n"
        )
        conf.chmod(0o600)
        # libmariadb takes the socket from MYSQL_UNIX_PORT; slurmdbd finds its file next to SLURM_CONF
        self.spawn("slurmdbd", self._on_head(["slurmdbd", "-D"]), env={"MYSQL_UNIX_PORT": str(sock)})
        self._wait_proc(
            "slurmdbd", 60, lambda: self.client("sacctmgr", "-n", "list", "cluster", check=False, timeout=60).returncode == 0
        )
        self.client("sacctmgr", "-i", "add", "cluster", "slurmlab", check=False)

    # -- down -----------------------------------------------------------------------------

    def down(self, keep=False):
        with self.lock():
            t0 = time.monotonic()
            self._down(keep)
            say(f"stopped in {time.monotonic() - t0:.1f} s")

    def _down(self, keep=False):
        st = self.state
        loopback = st.get("options", {}).get("net") == "loopback"
        strays = self._strays() if loopback else []
        for name in reversed(self.node_names):
            self.stop(name, signal.SIGKILL)  # netns: takes the node's jobs along
        kill_all(strays)
        for key in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            # nothing here outlives the lab, so no need for a slow clean exit
            self.stop(key, *([signal.SIGTERM] if keep else []), signal.SIGKILL)
        if st.get("iface") and self.alive("switch"):
            # would go with the switch namespace, but the kernel takes its time over that
            run("ip", "link", "del", st["iface"], check=False)
        self.stop("switch", signal.SIGKILL)
        self._sweep()
        edit_hosts(self.dir, None)
        self.state = {}
        with contextlib.suppress(OSError):
            self.state_file.unlink()
        if not keep and (self.dir / ".slurmlab").exists():
            shutil.rmtree(self.dir, ignore_errors=True)

    def _sweep(self):
        """Daemons of this directory that state.json does not know (it was lost, or `up`
        was killed between starting and recording one).  The mark in their environment,
        which job processes do not have, says that we started them."""
        mark = f"{MARK}={self.dir}".encode()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            found = []
            for entry in os.listdir("/proc"):
                if entry.isdigit() and int(entry) != os.getpid():
                    with contextlib.suppress(OSError):
                        if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                            found.append(int(entry))
            found = [pid for pid in found if start_time(pid) is not None]
            if not found:
                return
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                reap(pid)
            time.sleep(0.05)
        say(f"processes do not die: {found}")

    def _strays(self, only_node=None):
        """[(pid, start time)] of slurmstepds and job processes of this lab (of one node).
        For loopback mode, where no pid namespace takes them along."""
        conf, mark = f"SLURM_CONF={self.conf}".encode(), f"{MARK}={self.dir}".encode()
        procs = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    procs[int(entry)] = (
                        int(stat[1]),
                        Path(f"/proc/{entry}/comm").read_text(),
                        Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"),
                    )
        hit = set()
        for pid, (parent, comm, env) in procs.items():
            node = next((e[len(b"SLURMD_NODENAME=") :].decode() for e in env if e.startswith(b"SLURMD_NODENAME=")), None)
            if node and conf in env and only_node in (None, node):
                hit.add(pid)
                if procs.get(parent, (0, ""))[1].startswith("slurmstepd"):
                    hit.add(parent)
            elif not only_node and mark in env and comm.startswith("slurmstepd"):
                hit.add(pid)
        while True:
            more = {pid for pid, (parent, *_) in procs.items() if parent in hit} - hit
            if not more:
                return [(pid, start_time(pid)) for pid in hit]
            hit |= more

    # -- status -----------------------------------------------------------------------------

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


# --------------------------------------------------------------------------
# helpers
# --------------------------------------------------------------------------


def kill_all(processes, sig=signal.SIGKILL):
    """processes: pairs of pid and start time"""
    for pid, born in processes:
        if born is not None and start_time(pid) == born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


def reap(pid):
    """Collect our own dead child (when used as a library)."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


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


# First process of a node (pid 1 of its pid namespace).  bash reaps orphans.
# USR1: start slurmd again.
NODE_INIT = r"""#!/bin/bash
name=$1 cidr=$2 run=@RUN@
hostname "$name"
mount --bind $run/etc/hosts /etc/hosts
mount --bind $run/etc/resolv.conf /etc/resolv.conf
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 local $run/local          # node-local disk
# a /sys that shows this node's network interfaces, with the old cgroup mounts
mkdir -p /dev/shm/cg && mount --rbind /sys/fs/cgroup /dev/shm/cg 2>/dev/null &&
    mount -t sysfs sysfs /sys 2>/dev/null && mount --rbind /dev/shm/cg /sys/fs/cgroup 2>/dev/null
umount -R -l /dev/shm/cg 2>/dev/null; rmdir /dev/shm/cg 2>/dev/null
ip link set lo up
for i in $(seq 500); do                                # the cable arrives from outside
    [ -e /sys/class/net/eth0 ] || ip link show eth0 >/dev/null 2>&1 && break
    sleep 0.02
done
ip addr add "$cidr" dev eth0 && ip link set eth0 up || exit 1
start() { slurmd -D -N "$name" -f $run/etc/slurm.conf & }
trap start USR1
start
sleep infinity & hold=$!
while :; do wait $hold; done
"""

# proctrack/linuxproc tracks processes by their parent, so it loses those whose
# parent died (say, the workers of a torchrun that was killed), where
# proctrack/cgroup would still end them.  This script makes up for that.  It runs
#   as TaskEpilog, when one task of a step ended: that task's left-overs;
#   as Epilog, when a job ended on a node: whatever is left of the job there.
# What belongs to a task or job is told by the environment of the processes.
EPILOG = r"""#!/bin/bash
me=$$
if [ "$SLURM_SCRIPT_CONTEXT" = epilog_task ]; then
    # not for the batch script: when that ends the job ends, and Epilog comes
    case ${SLURM_STEP_ID:-} in ''|*[!0-9]*) exit 0 ;; esac
    [ "${#SLURM_STEP_ID}" -lt 9 ] || exit 0
fi
shopt -s nullglob
for dir in /proc/[0-9]*; do
    pid=${dir#/proc/}
    [ "$pid" = "$me" ] || [ "$pid" = "$PPID" ] && continue
    job= node= conf= step= rank= label=
    while IFS= read -r -d '' kv; do            # builtins only: this forks nothing
        case $kv in
            SLURM_JOB_ID=*) job=${kv#*=} ;;
            SLURMD_NODENAME=*) node=${kv#*=} ;;
            SLURM_CONF=*) conf=${kv#*=} ;;
            SLURM_STEP_ID=*) step=${kv#*=} ;;
            SLURM_PROCID=*) rank=${kv#*=} ;;
            SLURM_SCRIPT_CONTEXT=*) label=script ;;
        esac
    done 2>/dev/null < "$dir/environ"
    [ "$job" = "$SLURM_JOB_ID" ] && [ "$node" = "$SLURMD_NODENAME" ] && [ -z "$label" ] || continue
    [ "$conf" = @RUN@/etc/slurm.conf ] || [ -z "$conf" ] || continue
    if [ "$SLURM_SCRIPT_CONTEXT" = epilog_task ]; then
        [ "$step" = "$SLURM_STEP_ID" ] && [ "$rank" = "$SLURM_PROCID" ] || continue
    fi
    comm=
    read -r comm 2>/dev/null < "$dir/comm"
    case $comm in slurm*) continue ;; esac
    kill -KILL "$pid" 2>/dev/null &&
        printf '%(%FT%T)T job %s step %s node %s: killed left-over pid %s (%s)\n' -1 \
            "$job" "${step:-batch}" "$node" "$pid" "$comm" 2>/dev/null >> @RUN@/log/leftovers.log
done
exit 0
"""


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
