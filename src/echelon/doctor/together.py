"""Rows about what ranks did together: joining, sums, bandwidth, matrix products. Outliers are named with their hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from echelon.doctor.reports import Checkup, is_number
from echelon.doctor.row import Row, State

__all__ = ["together"]

# A matrix product below this share of the median: a shared or throttled GPU. Busy machines differ by a third.
SLOW_PRODUCT = 0.6
# A pair below this share of the median of its kind, within a host or between hosts: a bad cable, or a route over another network.
SLOW_PAIR = 0.33


def together(checkup: Checkup) -> Iterator[Row]:
    for judge in (_joined, _sums, _pairs, _products):
        yield from judge(checkup)


def _outlier(checkup: Checkup) -> State:
    """State of an outlier. Among hosts it is a fault; ranks of one host share its cores with each other and other programs."""
    return "fail" if checkup.several_hosts else "warn"


def _joined(checkup: Checkup) -> Iterator[Row]:
    times = {report.rank: s for report in checkup.in_order if (s := report.number("joined", "s")) is not None}
    if not times or len(checkup.ranks) < 2:
        return
    connects = [ms for report in checkup.in_order if (ms := report.number("joined", "connect_ms")) is not None]
    text = f"all joined within {max(times.values()):.1f} s"
    if connects:
        text += f"; the store answers a connection in {max(connects):.1f} ms"
    if len(times) < checkup.size:
        return
    yield Row("store", "ok", text)


def _sums(checkup: Checkup) -> Iterator[Row]:
    sums: dict[str, list[tuple[float, float, int, object]]] = {}
    for report in checkup.in_order:
        value = report.values.get("sums")
        for each in value if isinstance(value, list) else ():
            if isinstance(each, dict) and isinstance(each.get("device"), str) and type(each.get("wrong")) is int:
                speed = float(each["mib_s"]) if is_number(each.get("mib_s")) else 0.0
                sums.setdefault(each["device"], []).append((speed, each["wrong"], report.rank, each.get("first")))
    for device, each in sums.items():
        wrong = [(rank, first) for _, count, rank, first in each if count]
        way = "gloo" if device == "cpu" else "NCCL"
        if wrong:
            text = f"{way}: wrong sums on {checkup.who([rank for rank, _ in wrong])}, such as {wrong[0][1]}"
            yield Row(
                "all-reduce", "fail", text, "Do not train there: look for a broken GPU, cable or memory (dcgmi diag, ibdiagnet)."
            )
        else:
            yield Row("all-reduce", "ok", f"{way}: exact on {len(each)} ranks, {min(s for s, *_ in each):,.0f} MiB/s")


def _pairs(checkup: Checkup) -> Iterator[Row]:
    speeds: dict[tuple[int, int], float] = {}
    wrong = []
    for report in checkup.in_order:
        value = report.values.get("pairs")
        for each in value if isinstance(value, list) else ():
            if isinstance(each, list) and len(each) == 3 and all(map(is_number, each)) and each[0] in checkup.ranks:
                pair = (min(report.rank, int(each[0])), max(report.rank, int(each[0])))
                speeds[pair] = min(speeds.get(pair, float("inf")), each[1])
                wrong += [pair] if each[2] else []
    if not speeds:
        return
    if wrong:
        text = f"bytes arrive changed between ranks {wrong[0][0]} and {wrong[0][1]}"
        yield Row("bandwidth", "fail", text, "Do not train there: look for a broken network card, cable or memory.")
    for kind, between in (("within hosts", False), ("between hosts", True)):
        of = {p: s for p, s in speeds.items() if (checkup.ranks[p[0]].host != checkup.ranks[p[1]].host) == between}
        if not of:
            continue
        middle = median(of.values())
        slow = {pair: speed for pair, speed in of.items() if speed < SLOW_PAIR * middle and not checkup.quick}
        pairs = f"{len(of)} pairs" if len(of) > 1 else "one pair"
        text = f"{kind}: {middle:,.0f} MiB/s median of {pairs}, {min(of.values()):,.0f} at least"
        if not slow:
            yield Row("bandwidth", "ok", text)
            continue
        worst = sorted(slow, key=lambda pair: slow[pair])[:4]
        shown = "; ".join(f"{_end(checkup, a)} and {_end(checkup, b)}: {slow[a, b]:,.0f}" for a, b in worst)
        remedy = "Look at the cable, the link's speed (ethtool) and other jobs there; or exclude the node." if between else (
            "Check how ranks are bound to cores (--bind cores), and what else runs there."
        )  # fmt: skip
        yield Row("bandwidth", _outlier(checkup) if between else "warn", f"{text}. Slow: {shown}", remedy)


def _end(checkup: Checkup, rank: int) -> str:
    return f"rank {rank}{f' ({checkup.ranks[rank].host})' if checkup.several_hosts else ''}"


def _products(checkup: Checkup) -> Iterator[Row]:
    by_device: dict[str, dict[int, float]] = {}
    wrong = []
    for report in checkup.in_order:
        speed, bad = report.number("products", "gflop_s"), report.number("products", "wrong")
        if speed is not None:
            by_device.setdefault(report.texts("products").get("device", "cpu"), {})[report.rank] = speed
            wrong += [report.rank] if bad else []
    if wrong:
        text = f"wrong matrix products on {checkup.who(wrong)}"
        yield Row("matmul", "fail", text, "Do not train there: the GPU, CPU or memory is broken (dcgmi diag, memtest).")
    for device, speeds in by_device.items():
        middle = median(speeds.values())
        slow: Mapping[int, float] = {
            rank: speed for rank, speed in speeds.items() if speed < SLOW_PRODUCT * middle and not checkup.quick
        }
        text = f"{device}: {middle:,.1f} GFLOP/s median of {len(speeds)} ranks"
        if slow:
            shown = "; ".join(
                f"{_end(checkup, rank)}: {speed:,.1f}" for rank, speed in sorted(slow.items(), key=lambda i: i[1])[:6]
            )
            remedy = "Look for other processes, a power limit or heat there (nvidia-smi -q -d PERFORMANCE, top), or exclude it."
            yield Row("matmul", _outlier(checkup), f"{text}. Slow: {shown}", remedy)
        else:
            yield Row("matmul", "ok", text)
