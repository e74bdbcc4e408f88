"""The laboratory's folder, its state in a file, and daemons that are started, found again and stopped."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from .processes import LabError, children, kill_all, reap, run, say, start_time, wait_for

MARK = "SLURMLAB_DAEMON"  # environment variable that marks our daemons
# cron, CI and `env -i` often lack the sbin directories
os.environ["PATH"] = os.pathsep.join(
    dict.fromkeys(
        os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(os.pathsep) + ["/usr/local/sbin", "/usr/sbin", "/sbin"]
    )
)
CLIENT_ENV_DROP = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SLURMD_")


class Daemons:
    """State: state.json in the folder holds pid and kernel start time of each process that was started."""

    def __init__(self, directory):
        self.dir = Path(directory).absolute()
        # Unix socket paths (munge, slurmstepd) must stay under 108 characters.
        if len(str(self.dir)) > 60:
            raise LabError(f"--dir is too long for Unix sockets (over 60 characters): {self.dir}")
        self.conf = self.dir / "etc" / "slurm.conf"
        self.state_file = self.dir / "state.json"
        self.state = {}
        self.load()

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
    def node_names(self):
        return list(self.state.get("nodes", {}))

    def client_env(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith(CLIENT_ENV_DROP)}
        env["SLURM_CONF"] = str(self.conf)
        return env

    def client(self, *cmd, check=True, timeout=60):
        return run(*cmd, check=check, env=self.client_env(), timeout=timeout)

    def spawn(self, key, cmd):
        """Start a daemon in its own session, all output to a log; record it at once."""
        log = open(self.dir / "log" / f"{key}.out", "ab")
        # Only what a daemon needs: the caller's SLURM_*, PYTHON* etc. must not leak in.
        clean = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.path.expanduser("~"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.conf),
            MARK: str(self.dir),
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

    def wait_for_daemon(self, key, seconds, probe):
        def check():
            if not self.alive(key):
                raise LabError(f"{key} died during start-up")
            return probe()

        wait_for(key, seconds, check)

    def sweep(self):
        """Daemons of this directory that state.json does not know (it was lost, or `up`
        was killed between starting and recording one).  The mark in their environment,
        which job processes do not have, says that we started them."""
        mark = f"{MARK}={self.dir}".encode()
        end = time.monotonic() + 60
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
