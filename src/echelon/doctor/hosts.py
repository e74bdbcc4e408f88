"""Rows about hosts: clocks, names, disks, memory, limits, settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from echelon.doctor.reports import Checkup, RankReport
from echelon.doctor.row import Row, State

__all__ = ["hosts"]

# Clocks: torch's rendezvous drops nodes at tens of seconds; files in a shared folder look old at one second.
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
DISK_WARN_MIB, DISK_FAIL_MIB = 10_240, 1024
FILES_LEFT = 10_000
# Docker gives 64 MiB, which the first data workers fill.
SHM_WARN_MIB, SHM_FAIL_MIB = 1024, 128
MEMORY_WARN_MIB = 1024
# A rank needs a descriptor per peer, per tensor from a data worker, and per file of a checkpoint.
FILES_WARN, FILES_FAIL = 4096, 512
PROCESSES_WARN = 2048


def hosts(checkup: Checkup) -> Iterator[Row]:
    for judge in (_clocks, _resolution, _interfaces, _disks, _shared_memory, _limits, _memory, _devices, _settings):
        if checkup.ranks:
            yield from judge(checkup)


def _worst(checkup: Checkup, value_of: Callable[[RankReport], float | None]) -> tuple[float, RankReport] | None:
    values = [(value, report) for report in checkup.in_order if (value := value_of(report)) is not None]
    return min(values, key=lambda pair: pair[0]) if values else None


def _at(checkup: Checkup, report: RankReport) -> str:
    return f" on {report.host}" if checkup.several_hosts else ""


def _clocks(checkup: Checkup) -> Iterator[Row]:
    """Offset of each host's clock from rank 0's: the smallest of several comparisons, since ranks leave a barrier one by one."""
    first = checkup.ranks[0].numbers("clocks") if 0 in checkup.ranks else []
    if not first or not checkup.several_hosts:
        return
    apart: dict[str, float] = {}
    for report in checkup.in_order:
        if len(ticks := report.numbers("clocks", len(first))) == len(first):
            least = min((ours - theirs for ours, theirs in zip(ticks, first, strict=True)), key=abs)
            apart[report.host] = min(apart.get(report.host, least), least, key=abs)
    if not apart:
        return
    host = max(apart, key=lambda name: abs(apart[name]))
    off = abs(apart[host])
    state: State = "fail" if off > CLOCK_FAIL_S else "warn" if off > CLOCK_WARN_S else "ok"
    if state == "ok":
        yield Row("clocks", "ok", f"at most {off * 1e3:.0f} ms apart")
    else:
        remedy = f"Have {host} ask the same time server as the others (chronyc tracking, timedatectl)."
        yield Row("clocks", state, f"{host} is {apart[host]:+.1f} s from rank 0's host", remedy)


def _resolution(checkup: Checkup) -> Iterator[Row]:
    unknown: dict[str, list[int]] = {}
    bad = []
    for report in checkup.in_order:
        value = report.mapping("resolution")
        for name in value.get("unknown") or () if isinstance(value.get("unknown"), list) else ():
            if isinstance(name, str):
                unknown.setdefault(name, []).append(report.rank)
        own = value.get("own")
        addresses = [each for each in own if isinstance(each, str)] if isinstance(own, list) else []
        if addresses and checkup.several_hosts and all(each.startswith("127.") or each == "::1" for each in addresses):
            bad.append(report.host)
    for name, ranks in list(unknown.items())[:8]:
        text = f"{checkup.who(ranks)}: no address for the name {name}"
        yield Row("names", "fail", text, "Give it an entry in /etc/hosts or the name server, on every host.")
    if bad:
        text = f"{', '.join(sorted(set(bad))[:8])}: its own name resolves to 127.x, which no other host can reach"
        yield Row(
            "names", "warn", text, "Remove the line with 127.0.1.1 from /etc/hosts there, or set MASTER_ADDR to its address."
        )
    elif not unknown and any("resolution" in report.values for report in checkup.in_order):
        yield Row("names", "ok", "every host knows an address for its own name and for others'")


def _interfaces(checkup: Checkup) -> Iterator[Row]:
    """Whether the interfaces that variables name exist."""
    lacking: dict[str, list[int]] = {}
    seen = set()
    for report in checkup.in_order:
        interfaces = report.values.get("interfaces")
        there = [each for each in interfaces if isinstance(each, str)] if isinstance(interfaces, list) else []
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            wanted = report.texts("settings").get(variable, "")
            seen |= {wanted} - {""}
            if there and wanted and not _matches(wanted, there):
                lacking.setdefault(f"{variable}={wanted}, but there is only {', '.join(there[:6])}", []).append(report.rank)
    for text, ranks in lacking.items():
        yield Row(
            "interface", "fail", f"{checkup.who(ranks)}: {text}", "Unset the variable, or name an interface of `ip link` there."
        )
    first = checkup.ranks[0].host if 0 in checkup.ranks else ""
    used = {report.texts("joined").get("interface", "") for report in checkup.in_order if report.host != first} - {""}
    shown = [f"rank 0 is reached through {', '.join(sorted(used))}"] if used else []
    shown += [f"variables name {', '.join(sorted(seen))}"] if seen else []
    if not lacking and shown:
        yield Row("interface", "ok", "; ".join(shown))


def _matches(wanted: str, there: list[str]) -> bool:
    """Match as NCCL does: a list of prefixes; after "=" whole names; after "^" all others."""
    if wanted.startswith("^"):
        return True
    names = wanted.lstrip("=").split(",")
    exact = wanted.startswith("=")
    return any(each == name or (not exact and each.startswith(name)) for name in names for each in there if name)


def _place(report: RankReport, what: str) -> dict[str, Any] | None:
    """A rank's facts about a folder, if they are well-formed."""
    value = report.mapping("disks").get(what)
    good = isinstance(value, dict) and isinstance(value.get("path"), str) and type(value.get("free_mib")) is int
    return value if good else None


def _disks(checkup: Checkup) -> Iterator[Row]:
    for what in ("working folder", "temporary folder"):
        places = {report.rank: place for report in checkup.in_order if (place := _place(report, what)) is not None}
        if not places:
            continue
        remedy = f"Free space there, or {'set TMPDIR' if what[0] == 't' else 'start from another folder'}."
        sealed = [rank for rank, place in places.items() if place.get("writable") is False]
        rank, place = min(places.items(), key=lambda item: item[1]["free_mib"])
        mib, at = place["free_mib"], _at(checkup, checkup.ranks[rank])
        files = {rank: place["free_files"] for rank, place in places.items() if type(place.get("free_files")) is int}
        few = min(files, key=lambda rank: files[rank], default=rank)
        if sealed:
            yield Row(what, "fail", f"{checkup.who(sealed)}: {places[sealed[0]]['path']} cannot be written to", remedy)
        elif files.get(few, FILES_LEFT) < FILES_LEFT:
            text = f"only {files[few]} more files in {places[few]['path']}{_at(checkup, checkup.ranks[few])}"
            yield Row(what, "fail", f"{text}, however much space there is", "Remove files there (df -i).")
        else:
            state: State = "fail" if mib < DISK_FAIL_MIB else "warn" if mib < DISK_WARN_MIB else "ok"
            yield Row(what, state, f"{mib / 1024:.1f} GiB free in {place['path']}{at}", "" if state == "ok" else remedy)
    yield from _shared_folder(checkup)


def _shared_folder(checkup: Checkup) -> Iterator[Row]:
    """Nodes share a run folder only if they share the working folder, which then has the same number on all nodes."""
    having: dict[int, list[int]] = {}
    for report in checkup.in_order:
        place = _place(report, "working folder")
        if place is not None and type(place.get("number")) is int:
            having.setdefault(place["number"], []).append(report.rank)
    if not checkup.several_hosts or not having:
        return
    if len(having) == 1:
        yield Row("shared folder", "ok", "all hosts see the same working folder")
        return
    fewest = min(having.values(), key=len)
    text = f"{checkup.who(fewest)}: the working folder differs from that of the other hosts"
    yield Row("shared folder", "fail", text, "Start from a folder on a shared file system: all nodes write into one run folder.")


def _shared_memory(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda report: next(iter(report.numbers("shared memory", 2)), None))
    if worst is None:
        return
    mib, report = worst
    state: State = "fail" if mib < SHM_FAIL_MIB else "warn" if mib < SHM_WARN_MIB else "ok"
    remedy = "Give the container more: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium Memory."
    yield Row("shared memory", state, f"{mib:.0f} MiB free in /dev/shm{_at(checkup, report)}", "" if state == "ok" else remedy)


def _limits(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda report: report.number("limits", "open files"))
    if worst is not None:
        count, report = worst
        state: State = "fail" if count < FILES_FAIL else "warn" if count < FILES_WARN else "ok"
        remedy = "Raise it: `ulimit -n 65536` before the start, or LimitNOFILE / limits.conf for all."
        yield Row("open files", state, f"at most {count:.0f}{_at(checkup, report)}", "" if state == "ok" else remedy)
    elif any("limits" in report.values for report in checkup.in_order):
        yield Row("open files", "ok", "no limit")
    few = _worst(checkup, lambda report: report.number("limits", "processes"))
    if few is not None and few[0] < PROCESSES_WARN:
        text = f"at most {few[0]:.0f} processes and threads{_at(checkup, few[1])}"
        yield Row("processes", "warn", text, "Raise it: `ulimit -u`, or pids.max of the container. Data workers are processes.")
    pinned = [
        report for report in checkup.in_order
        if report.mapping("machine").get("InfiniBand") is True and report.number("limits", "locked memory") is not None
    ]  # fmt: skip
    if pinned:
        mib = min(report.number("limits", "locked memory") or 0.0 for report in pinned)
        text = f"at most {mib:.0f} MiB of locked memory on {pinned[0].host}, which has InfiniBand"
        yield Row(
            "locked memory", "fail", text, "InfiniBand needs `ulimit -l unlimited`: limits.conf, or PropagateResourceLimits."
        )


def _memory(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda report: next(iter(report.numbers("memory", 2)), None))
    if worst is None:
        return
    mib, report = worst
    ranks = sum(each.host == report.host for each in checkup.in_order)
    low = mib / max(1, ranks) < MEMORY_WARN_MIB
    text = f"{mib / 1024:.1f} GiB available{_at(checkup, report)}, for {ranks} rank{'s' if ranks != 1 else ''}"
    yield Row(
        "memory",
        "warn" if low else "ok",
        text,
        "See which processes use it (`ps aux --sort=-rss`), or start fewer ranks." if low else "",
    )


def _devices(checkup: Checkup) -> Iterator[Row]:
    used = {report.rank: device for report in checkup.in_order if (device := report.texts("joined").get("device"))}
    if not used:
        return
    idle = [
        report.rank
        for report in checkup.in_order
        if used.get(report.rank) == "cpu" and (report.number("machine", "GPUs") or 0) > 0
    ]
    if len(set(used.values())) > 1 or idle:
        text = f"{checkup.who(idle)}: on the CPU of a host that has GPUs" if idle else "some ranks use GPUs, others their CPU"
        yield Row("devices", "warn", text, "Install a torch built for CUDA there, or give --device cpu if that is intended.")
    else:
        kinds = sorted({report.texts("torch").get("GPU", "") for report in checkup.in_order} - {""})
        yield Row("devices", "warn" if len(kinds) > 1 else "ok", ", ".join(kinds) or "CPU",
                  "The slowest sets the pace: choose nodes of one kind (--constraint)." if len(kinds) > 1 else "")  # fmt: skip


# Settings for debugging, which cost speed if they stay set.
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "TRACE",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
# Values that NCCL reads. It ignores others, most of them silently.
_DISTANCES, _SWITCH = re.compile(r"LOC|NVL|PIX|PXB|PHB|SYS|\d", re.IGNORECASE), re.compile(r"\d+")
_KNOWN_SETTINGS = {
    "NCCL_DEBUG": re.compile(r"NONE|VERSION|WARN|INFO|ABORT|TRACE", re.IGNORECASE),
    "NCCL_PROTO": re.compile(r"(?:.*:)?\^?(?:LL|LL128|Simple)(?:,(?:LL|LL128|Simple))*(?:;.*)?", re.IGNORECASE),
    "NCCL_P2P_LEVEL": _DISTANCES,
    "NCCL_NET_GDR_LEVEL": _DISTANCES,
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_IB_DISABLE": _SWITCH,
    "NCCL_SHM_DISABLE": _SWITCH,
}
_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_DEBUG_INFO")


def _settings(checkup: Checkup) -> Iterator[Row]:
    names = {name for report in checkup.in_order for name in report.texts("settings") if not name.startswith(_OWN)}
    differ = []
    for name in sorted(names):
        values = {report.texts("settings").get(name, "unset") for report in checkup.in_order if "settings" in report.values}
        if len(values) > 1:
            differ.append(f"{name}: {', '.join(sorted(values))}")
    if differ:
        yield Row(
            "settings", "fail", f"not the same on all ranks: {'; '.join(differ[:6])}", "Set them for all ranks, or for none."
        )
    slow = sorted(
        {f"{n}={v}" for report in checkup.in_order for n, v in report.texts("settings").items() if _SLOW_SETTINGS.get(n) == v}
    )
    if slow:
        yield Row("settings", "warn", f"{', '.join(slow)} costs speed", "Unset it, unless you are debugging.")
    unknown = sorted(
        {
            f"{name}={value}"
            for report in checkup.in_order
            for name, value in report.texts("settings").items()
            if name in _KNOWN_SETTINGS and not _KNOWN_SETTINGS[name].fullmatch(value.strip())
        }
    )
    if unknown:
        remedy = "See NCCL's documentation for the values, or unset it: NCCL ignores unknown values, or refuses to start."
        yield Row("settings", "warn", f"not a value that NCCL knows: {', '.join(unknown)}", remedy)
    if not (differ or slow or unknown):
        yield Row("settings", "ok", ", ".join(sorted(names)[:6]) or "no variables of NCCL, gloo or torch.distributed")
