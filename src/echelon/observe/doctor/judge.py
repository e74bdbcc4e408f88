"""Rows of `echelon doctor`: what was found, whether that is well, and what to do if it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from echelon.observe.doctor.row import Row, State
from echelon.observe.doctor.said import Checkup, RankSaid, named
from echelon.observe.doctor.together import together

__all__ = ["judged"]

# Clocks: torch's rendezvous drops nodes at tens of seconds, files in a shared folder look old at one.
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
DISK_WARN_MIB, DISK_FAIL_MIB = 10_240, 1024
# Docker gives 64 MiB, which the first DataLoader workers fill.
SHM_WARN_MIB, SHM_FAIL_MIB = 1024, 128
MEMORY_WARN_MIB = 1024
# A rank has a descriptor for each peer, each tensor that a worker sends, each file of a checkpoint.
FILES_WARN, FILES_FAIL = 4096, 512


def judged(checkup: Checkup) -> list[Row]:
    """All rows, in the order in which one looks for a fault: who answers, what they run, their hosts, what they do together."""
    rows = [_answers(checkup), *_broken(checkup), *_versions(checkup)]
    for judge in (_clocks, _resolution, _interfaces, _disks, _shared_memory, _limits, _memory, _devices, _settings):
        if checkup.ranks:
            rows += judge(checkup)
    return [*rows, *together(checkup)]


def _answers(checkup: Checkup) -> Row:
    hosts = len({said.host for said in checkup.ranks.values()})
    there = f"{len(checkup.ranks)} of {checkup.size} ranks answer, on {hosts} host{'s' if hosts != 1 else ''}"
    remedy = "Look at it with `scontrol show node NAME`, and leave it out (--exclude=NAME) or have it mended."
    if checkup.silent:
        why = "; ".join(f"{node}: {text}" for node, text in list(checkup.silent.items())[:8])
        return Row("ranks", "fail", f"{there}. Without an answer: {why}", remedy)
    missing = [rank for rank in range(checkup.size) if rank not in checkup.ranks]
    ended = f". {checkup.ended}" if checkup.ended else ""
    if missing:
        who = f"; {named(missing)} did not"
        return Row(
            "ranks", "fail", f"{there}{who}{ended}", "Run `python -c 'import torch, echelon'` there, and see what it says."
        )
    if ended:
        return Row("ranks", "fail", f"{there}{ended}", "Look at the line 'unfinished', or give more time: --time-limit 10m.")
    return Row("ranks", "ok", there)


_OF_PART = {
    "torch": "torch cannot be imported there: install it again, in an environment of its own.",
    "joined": "The ranks cannot reach one another: look at the rows ranks, names and interface, and at firewalls.",
    "resolution": "Give the host an entry in /etc/hosts or the name server.",
}


def _broken(checkup: Checkup) -> Iterator[Row]:
    """Parts that raised, each error once; and ranks that hang in one."""
    found: dict[tuple[str, str], list[int]] = {}
    for said in checkup.in_order:
        for part, error in said.errors.items():
            found.setdefault((part, error), []).append(said.rank)
    for (part, error), ranks in list(found.items())[:12]:
        yield Row(part, "fail", f"{checkup.who(ranks)}: {error}", _OF_PART.get(part, "Mend what the error names there."))
    hang: dict[str, list[int]] = {}
    for said in checkup.in_order:
        if "end" not in said.told and said.told:
            doing = said.told.get("doing")
            hang.setdefault(doing if isinstance(doing, str) else "the beginning", []).append(said.rank)
    for part, ranks in hang.items():
        text = f"{checkup.who(ranks)} did not come beyond {part!r}"
        yield Row("unfinished", "fail", text, "Look there with `py-spy dump`, or at `dmesg` if the process is gone.")


# --- what they run


def _same(
    checkup: Checkup, name: str, value_of: Callable[[RankSaid], object], remedy: str, state: State = "fail"
) -> Iterator[Row]:
    """A row about a value that must be one. None if nobody has it."""
    having: dict[str, list[int]] = {}
    for said in checkup.in_order:
        value = value_of(said)
        if value not in (None, ""):
            having.setdefault(str(value), []).append(said.rank)
    if not having:
        return
    most = max(having, key=lambda value: len(having[value]))
    if len(having) == 1:
        yield Row(name, "ok", most)
        return
    other = "; ".join(f"{checkup.who(ranks)}: {value}" for value, ranks in list(having.items())[:8] if value != most)
    yield Row(name, state, f"{most}, but {other}", remedy)


def _versions(checkup: Checkup) -> Iterator[Row]:
    install = "Install the same version everywhere, or start all ranks from one environment in a shared folder."
    for name, part in (("python", "versions"), ("torch", "torch"), ("echelon", "versions"), ("echelon's code", "versions")):
        yield from _same(checkup, name, lambda said, name=name, part=part: said.texts(part).get(name), install)  # type: ignore[misc]
    for name, part in (("NCCL", "torch"), ("CUDA of torch", "torch")):
        yield from _same(checkup, name, lambda said, name=name, part=part: said.texts(part).get(name), install)  # type: ignore[misc]
    driver = "NCCL of one version runs over several drivers, at the speed of the oldest: bring the hosts to one driver."
    yield from _same(checkup, "driver", lambda said: said.texts("versions").get("driver"), driver, "warn")


# --- hosts


def _worst(checkup: Checkup, value_of: Callable[[RankSaid], float | None]) -> tuple[float, RankSaid] | None:
    found = [(value, said) for said in checkup.in_order if (value := value_of(said)) is not None]
    return min(found, key=lambda pair: pair[0]) if found else None


def _at(checkup: Checkup, said: RankSaid) -> str:
    return f" on {said.host}" if checkup.several_hosts else ""


def _clocks(checkup: Checkup) -> Iterator[Row]:
    """How far each host's clock is from rank 0's: the least of several comparisons, since ranks leave a barrier in turn."""
    first = checkup.ranks[0].numbers("clocks") if 0 in checkup.ranks else []
    if not first or not checkup.several_hosts:
        return
    apart: dict[str, float] = {}
    for said in checkup.in_order:
        if len(ticks := said.numbers("clocks", len(first))) == len(first):
            least = min((ours - theirs for ours, theirs in zip(ticks, first, strict=True)), key=abs)
            apart[said.host] = min(apart.get(said.host, least), least, key=abs)
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
    bad = []
    for said in checkup.in_order:
        found = said.told.get("resolution")
        addresses = [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
        if addresses and checkup.several_hosts and all(each.startswith("127.") or each == "::1" for each in addresses):
            bad.append(said.host)
    if bad:
        text = f"{', '.join(sorted(set(bad))[:8])}: its own name means 127.x, where no other host reaches it"
        yield Row(
            "names", "warn", text, "Take the line with 127.0.1.1 out of /etc/hosts there, or set MASTER_ADDR to its address."
        )
    elif any("resolution" in said.told for said in checkup.in_order):
        yield Row("names", "ok", "every host knows an address for its own name")


def _interfaces(checkup: Checkup) -> Iterator[Row]:
    """Whether interfaces that variables name are there."""
    lacking: dict[str, list[int]] = {}
    seen = set()
    for said in checkup.in_order:
        found = said.told.get("interfaces")
        there = [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            wanted = said.texts("settings").get(variable, "")
            seen |= {wanted} - {""}
            if there and wanted and not _matches(wanted, there):
                lacking.setdefault(f"{variable}={wanted}, but there is only {', '.join(there[:6])}", []).append(said.rank)
    for text, ranks in lacking.items():
        yield Row(
            "interface", "fail", f"{checkup.who(ranks)}: {text}", "Unset the variable, or name an interface of `ip link` there."
        )
    first = checkup.ranks[0].host if 0 in checkup.ranks else ""
    used = {said.texts("joined").get("interface", "") for said in checkup.in_order if said.host != first} - {""}
    shown = [f"rank 0 is reached through {', '.join(sorted(used))}"] if used else []
    shown += [f"variables name {', '.join(sorted(seen))}"] if seen else []
    if not lacking and shown:
        yield Row("interface", "ok", "; ".join(shown))


def _matches(wanted: str, there: list[str]) -> bool:
    """As NCCL reads it: a list of beginnings of names; after "=" whole names; after "^" all others."""
    if wanted.startswith("^"):
        return True
    names = wanted.lstrip("=").split(",")
    exact = wanted.startswith("=")
    return any(each == name or (not exact and each.startswith(name)) for name in names for each in there if name)


def _disks(checkup: Checkup) -> Iterator[Row]:
    for what in ("working folder", "temporary folder"):

        def free(said: RankSaid, what: str = what) -> float | None:
            value: Any = said.mapping("disks").get(what)
            good = isinstance(value, list) and len(value) == 2 and type(value[1]) is int
            return value[1] if good else None

        if (worst := _worst(checkup, free)) is None:
            continue
        mib, said = worst
        path = str(said.mapping("disks")[what][0])
        state: State = "fail" if mib < DISK_FAIL_MIB else "warn" if mib < DISK_WARN_MIB else "ok"
        remedy = f"Free space there, or {'set TMPDIR' if what[0] == 't' else 'start from another folder (--runs)'}."
        yield Row(what, state, f"{mib / 1024:.1f} GiB free in {path}{_at(checkup, said)}", "" if state == "ok" else remedy)


def _shared_memory(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda said: next(iter(said.numbers("shared memory", 2)), None))
    if worst is None:
        return
    mib, said = worst
    state: State = "fail" if mib < SHM_FAIL_MIB else "warn" if mib < SHM_WARN_MIB else "ok"
    remedy = "Give the container more: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium Memory."
    yield Row("shared memory", state, f"{mib:.0f} MiB free in /dev/shm{_at(checkup, said)}", "" if state == "ok" else remedy)


def _limits(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda said: said.number("limits", "open files"))
    if worst is not None:
        count, said = worst
        state: State = "fail" if count < FILES_FAIL else "warn" if count < FILES_WARN else "ok"
        remedy = "Raise it: `ulimit -n 65536` before the start, or LimitNOFILE / limits.conf for all."
        yield Row("open files", state, f"at most {count:.0f}{_at(checkup, said)}", "" if state == "ok" else remedy)
    elif any("limits" in said.told for said in checkup.in_order):
        yield Row("open files", "ok", "no limit")
    pinned = [
        said for said in checkup.in_order
        if said.mapping("machine").get("InfiniBand") is True and said.number("limits", "locked memory") is not None
    ]  # fmt: skip
    if pinned:
        mib = min(said.number("limits", "locked memory") or 0.0 for said in pinned)
        text = f"at most {mib:.0f} MiB of locked memory on {pinned[0].host}, which has InfiniBand"
        yield Row(
            "locked memory", "fail", text, "InfiniBand needs `ulimit -l unlimited`: limits.conf, or PropagateResourceLimits."
        )


def _memory(checkup: Checkup) -> Iterator[Row]:
    worst = _worst(checkup, lambda said: next(iter(said.numbers("memory", 2)), None))
    if worst is None:
        return
    mib, said = worst
    ranks = sum(each.host == said.host for each in checkup.in_order)
    low = mib / max(1, ranks) < MEMORY_WARN_MIB
    text = f"{mib / 1024:.1f} GiB available{_at(checkup, said)}, for {ranks} rank{'s' if ranks != 1 else ''}"
    yield Row(
        "memory", "warn" if low else "ok", text, "See who uses it (`ps aux --sort=-rss`), or start fewer ranks." if low else ""
    )


def _devices(checkup: Checkup) -> Iterator[Row]:
    used = {said.rank: device for said in checkup.in_order if (device := said.texts("joined").get("device"))}
    if not used:
        return
    idle = [said.rank for said in checkup.in_order if used.get(said.rank) == "cpu" and (said.number("machine", "GPUs") or 0) > 0]
    if len(set(used.values())) > 1 or idle:
        text = f"{checkup.who(idle)}: on the CPU of a host that has GPUs" if idle else "some ranks use GPUs, others their CPU"
        yield Row("devices", "warn", text, "Install a torch that is built for CUDA there, or say --device cpu if that is meant.")
    else:
        kinds = sorted({said.texts("torch").get("GPU", "") for said in checkup.in_order} - {""})
        yield Row("devices", "warn" if len(kinds) > 1 else "ok", ", ".join(kinds) or "CPU",
                  "The slowest sets the pace: choose nodes of one kind (--constraint)." if len(kinds) > 1 else "")  # fmt: skip


# Which are for looking for faults, and cost speed where they are left set.
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "TRACE",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_DEBUG_INFO")


def _settings(checkup: Checkup) -> Iterator[Row]:
    names = {name for said in checkup.in_order for name in said.texts("settings") if not name.startswith(_OWN)}
    differ = []
    for name in sorted(names):
        values = {said.texts("settings").get(name, "unset") for said in checkup.in_order if "settings" in said.told}
        if len(values) > 1:
            differ.append(f"{name}: {', '.join(sorted(values))}")
    if differ:
        yield Row(
            "settings", "fail", f"not the same on all ranks: {'; '.join(differ[:6])}", "Set them for all ranks, or for none."
        )
    slow = sorted(
        {f"{n}={v}" for said in checkup.in_order for n, v in said.texts("settings").items() if _SLOW_SETTINGS.get(n) == v}
    )
    if slow:
        yield Row("settings", "warn", f"{', '.join(slow)} costs speed", "Unset it, unless you look for a fault.")
    if not differ and not slow:
        yield Row("settings", "ok", ", ".join(sorted(names)[:6]) or "no variables of NCCL, gloo or torch.distributed")
