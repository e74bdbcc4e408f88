"""Processes that state.json does not know."""

import contextlib
import os
import signal
import time
from pathlib import Path

from .daemons import MARK
from .processes import reap, say, start_time


def sweep(lab):
    """Daemons of this directory that state.json does not know (it was lost, or `up`
    was killed between starting and recording one).  The mark in their environment,
    which job processes do not have, says that we started them."""
    mark = f"{MARK}={lab.dir}".encode()
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


def strays(lab, only_node=None):
    """[(pid, start time)] of slurmstepds and job processes of this lab (of one node).
    For loopback mode, where no pid namespace takes them along."""
    conf, mark = f"SLURM_CONF={lab.conf}".encode(), f"{MARK}={lab.dir}".encode()
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
