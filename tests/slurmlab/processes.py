"""Processes: run them, find them, wait for them, end them. A pid counts only together with its start time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class LabError(RuntimeError):
    pass


def say(msg):
    print(f"slurmlab: {msg}", file=sys.stderr, flush=True)


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
