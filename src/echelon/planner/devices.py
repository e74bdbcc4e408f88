"""The devices of a plan, by name or from a file: their memory, their speed, and the links between them."""

from __future__ import annotations

import math
import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from echelon.common.errors import PlanError

__all__ = ["DEVICES", "Cluster", "Device", "Measured", "bytes_of", "device_named", "written"]


@dataclass(frozen=True)
class Measured:
    """A collective that was measured on a machine: it takes `latency + bytes / bandwidth`.

    Args:
        kind: all-reduce, all-gather or reduce-scatter.
        latency: seconds.
        bandwidth: bytes of the whole tensor a second.
    """

    kind: str
    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """
    Args:
        memory: bytes that its driver offers to programs; 0 if unknown.
        peak: FLOP/s of dense matrix products by dtype: bfloat16, float16, tf32, float32, float8; from the data sheet.
        bandwidth: bytes/s of its memory, from the data sheet.
        reached: share of the peak that large products reach.
        copied: share of the bandwidth that a copy reaches.
        attention: share of the peak that attention reaches, forward and backward; used without `attentions`.
        processors: number of processors that share the tiles of a product; 0 if unknown.
        least: seconds that any operator takes at least.
        node: bytes/s that a device sends within its node in collectives.
        network: bytes/s that a device sends to other nodes while all devices of its node send.
        domain: number of devices that `node` joins; 0 for those of a node.
        host: bytes/s between a device and its host's memory, each way; 0 if nothing is offloaded, as on a CPU.
        overlaps: collectives run beside operators. On a CPU they take turns.
        capability: CUDA capability that a script is told.
        contention: factor by which an operator is slower beside a collective, which uses some of the processors and of the
            memory's bandwidth. 1.189 is the mean over training of GPT and LLaMA on A100, H100, MI210 and MI250
            (arXiv 2507.03114).
        products: measured rates that replace `reached`: (dtype, FLOP of a product, FLOP/s).
        convolutions: likewise; without them, those of products.
        attentions: measured rates that replace `attention`: (kernel, by the namespace of its operator, aten for torch's own;
            head dim; keys that a query sees on average; FLOP/s).
        collectives: measured; replace `node` and `network`.
    """

    name: str
    memory: int = 0
    peak: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    reached: float = 0.80
    copied: float = 0.89
    attention: tuple[float, float] = (0.35, 0.35)
    processors: int = 0
    least: float = 4e-6
    node: float = 0.0
    network: float = 0.0
    domain: int = 0
    host: float = 54.5e9
    overlaps: bool = True
    capability: tuple[int, int] = (9, 0)
    contention: float = 1.189
    products: tuple[tuple[str, float, float], ...] = ()
    convolutions: tuple[tuple[str, float, float], ...] = ()
    attentions: tuple[tuple[str, float, float, float], ...] = ()
    collectives: tuple[Measured, ...] = ()

    @property
    def is_timed(self) -> bool:
        """Whether enough is known of the device to estimate the time of an update."""
        return bool(self.peak and self.bandwidth)

    def peak_of(self, dtype: str) -> float:
        """Peak FLOP/s in a dtype; for a dtype that is not listed, that of float32, or else the lowest peak listed."""
        known = self.peak
        return known.get(dtype) or known.get("float32") or min(known.values())

    def product_rate(self, dtype: str, flops: float, shape: tuple[int, ...]) -> float:
        """FLOP/s of a product of shape (batch, m, n, k); () if the shape has no meaning, as for a convolution.

        If rates were measured: linear in the logarithm between the two nearest sizes. Otherwise the share of the peak that large
        products reach, minus the loss when tiles of 128 x 256, 256 x 128 or 128 x 128 do not fill the last round over all
        processors. Source: NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization.
        """
        for rates in (self.products,) if shape else (self.convolutions, self.products):
            if measured := [(size, rate) for kind, size, rate in rates if kind == dtype]:
                return _between(measured, flops)
        return self.peak_of(dtype) * self.reached * (_filled(shape, self.processors) if self.processors and shape else 1.0)

    def attention_rate(self, name: str, dtype: str, shape: tuple[int, ...], *, backward: bool) -> float:
        """FLOP/s of attention (batch, queries, keys, head dim). Keys are those that a query sees on average: half if causal.
        Measured rates are those of its kernel, or of torch's, with the nearest head dim, between the two nearest numbers of keys.
        A short sequence leaves processors idle, and more of a causal mask's tiles lie on its diagonal, where half is discarded.
        """
        rows = self.attentions if shape and dtype in ("bfloat16", "float16") else ()
        kernel = name.partition("::")[0]
        rows = tuple(row for row in rows if row[0] == kernel) or tuple(row for row in rows if row[0] == "aten")
        if not rows:
            return self.peak_of(dtype) * self.attention[backward]
        _, _, keys, head = shape
        nearest = min({row[1] for row in rows}, key=lambda each: abs(math.log(each / head)))
        return _between([(many, rate) for _, each, many, rate in rows if each == nearest], keys)


def _between(measured: list[tuple[float, float]], size: float) -> float:
    sizes = [each for each, _ in measured]
    at = bisect_left(sizes, size)
    if at == 0 or at == len(sizes):
        return measured[min(at, len(sizes) - 1)][1]
    (low, slow), (high, fast) = measured[at - 1], measured[at]
    return slow + (fast - slow) * math.log(size / low) / math.log(high / low)


def _filled(shape: tuple[int, ...], processors: int) -> float:
    batch, m, n, _ = shape
    best = 0.0
    for rows, columns in ((128, 256), (256, 128), (128, 128)):
        tiles = batch * -(-m // rows) * -(-n // columns)
        rounds = -(-tiles // processors)
        best = max(best, batch * m * n / (rounds * processors * rows * columns))
    return best


def _device(name: str, mib: int, tflops: tuple[float, ...], tb_s: float, **more: Any) -> Device:
    sixteen, tf32, single, *eight = (each * 1e12 for each in tflops)
    peak = {"bfloat16": sixteen, "float16": sixteen, "tf32": tf32, "float32": single}
    if eight:  # an A100 and older devices have none
        peak["float8"] = eight[0]
    return Device(name, mib << 20, peak, tb_s * 1e12, **more)


# Memory: the total that nvidia-smi shows, less than the nominal size. Peaks (16 bits, TF32, float32, 8 bits) and bandwidths:
# NVIDIA's data sheets, without sparsity; for the RTX 4090 its Ada whitepaper, with float32 accumulation; the H100 of 96 GB has
# HBM2e of 2.41 TB/s (arXiv 2604.11391).
#
# reached: by torch with values as in training, which take more power than zeros or whole numbers: bfloat16 on an A100 SXM
# 257 of 312 (He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data", 2024), on an H100 SXM 794.5
# of 989 TFLOP/s, on a B200 1745 of 2250, on a GB200 1822 of 2500 (Bekman, "Machine Learning Engineering"); ours on an H100 798.5
# (BENCHMARKS.md). The best of torch's products of 1,024 to 10,240 in bfloat16 on an H100 PCIe is 495.9 of 756, on an L40S 269.2
# of 362, on an RTX 4090 163 to 173 of 165 TFLOP/s, whose clock goes above its data sheet's (zzc0721/torch-performance-test-data,
# database.md). The H100 of 96 GB may take 500 W: interpolated between 495.9 at 350 W and 794.5 at 700 W. In 8 bits Hopper
# reaches 1,280 of 1,979 TFLOP/s in products of the sizes of models (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1:
# Training", 2024); with 500 W it is reduced by the same factor as in 16 bits.
# copied: 2,971 of 3,350 GB/s on an H100 (BENCHMARKS.md), assumed for all devices.
# attention: FlashAttention-2, which is torch's kernel, on an A100 73% forward and 63% backward (arXiv 2307.08691); on an H100
# 35% (FlashAttention-3, arXiv 2407.08608), assumed for newer devices, too. `_ATTENTION` has more exact measurements.
# least: 3.8 us for a short kernel that is launched behind another (Gray, "Getting Started with CUDA Graphs", NVIDIA 2019).
# node: NCCL's own numbers for an NVLink, 20 GB/s for each of an A100's 12, 20.6 for a Hopper's 18, 40.1 for a Blackwell's 18
# (src/graph/topo.h); else PCIe 4 or 5 of 16 lanes. network: an adapter of 200, 400 or 100 Gbit/s for each device, of which
# 94 to 97% is data (SimAI's table of busbw: 23.5 and 48.5 GB/s).

# host: 54.5 GB/s to and from pinned memory over PCIe 5 of 16 lanes, measured on an H100 (BENCHMARKS.md), 85% of the link's 64;
# the same share of PCIe 4's 32, and of the 450 of a GB200's NVLink-C2C (NVIDIA's data sheets).

# TFLOP/s of attention with a causal mask, forward and backward together, by kernel and head dim: for 512, 1024, ..., 16384
# tokens. Source: Dao-AILab/flash-attention, assets/flash2_a100_fwd_bwd_benchmark.png and flash2_h100_fwd_bwd_benchmark.png.
# aten is FlashAttention-2, torch's kernel since 2.2; flash_attn_triton is its predecessor in Triton. On an H100 the predecessor
# was not measured, so the first FlashAttention stands for it.
_ATTENTION = {
    "a100": {
        ("aten", 64): (88, 119, 140, 156, 165, 171),
        ("aten", 128): (99, 133, 155, 173, 182, 189),
        ("flash_attn_triton", 64): (59, 75, 79, 76, 79, 80),
        ("flash_attn_triton", 128): (50, 61, 68, 74, 78, 80),
    },
    "h100": {
        ("aten", 64): (141, 192, 232, 257, 273, 284),
        ("aten", 128): (163, 221, 265, 294, 308, 328),
        ("flash_attn_triton", 64): (104, 123, 136, 138, 149, 156),
        ("flash_attn_triton", 128): (98, 109, 108, 126, 135, 137),
    },
}


def _attentions(device: str) -> tuple[tuple[str, float, float, float], ...]:
    return tuple(
        (kernel, head, 256.0 * 2**at, rate * 1e12)
        for (kernel, head), rates in _ATTENTION[device].items()
        for at, rate in enumerate(rates)
    )


_AMPERE: dict[str, Any] = {
    "capability": (8, 0),
    "reached": 0.824,
    "attention": (0.73, 0.63),
    "processors": 108,
    "node": 240e9,
    "network": 23.5e9,
    "host": 27e9,
}
_HOPPER: dict[str, Any] = {"reached": 0.803, "processors": 132, "node": 370.8e9, "network": 48.5e9}
_EIGHT_BITS: dict[str, Any] = {"products": (("float8", 1e12, 1280e12),)}
_OF_500_W: dict[str, Any] = {"reached": 0.631, "products": (("float8", 1e12, 1006e12),)}
_BLACKWELL: dict[str, Any] = {"capability": (10, 0), "reached": 0.776, "processors": 148, "node": 721.8e9, "network": 48.5e9}
_ADA: dict[str, Any] = {"capability": (8, 9), "attention": (0.73, 0.63), "node": 24e9, "network": 11.8e9, "host": 27e9}
DEVICES = {
    each.name: each
    for each in (
        _device("a100-40", 40_960, (312, 156, 19.5), 1.555, **_AMPERE, attentions=_attentions("a100")),
        _device("a100-80", 81_920, (312, 156, 19.5), 2.039, **_AMPERE, attentions=_attentions("a100")),
        _device(
            "h100-sxm", 81_559, (989.4, 494.7, 66.9, 1978.9), 3.35, **(_HOPPER | _EIGHT_BITS), attentions=_attentions("h100")
        ),
        _device(
            "h100-pcie", 81_559, (756, 378, 51.2, 1513), 2.0, **(_HOPPER | {"reached": 0.656, "processors": 114, "node": 48e9})
        ),
        _device("h100-96", 97_871, (989.4, 494.7, 66.9, 1978.9), 2.41, **(_HOPPER | _OF_500_W), attentions=_attentions("h100")),
        _device("h200", 143_771, (989.4, 494.7, 66.9, 1978.9), 4.8, **(_HOPPER | _EIGHT_BITS), attentions=_attentions("h100")),
        _device("b200", 183_359, (2250, 1125, 75, 4500), 7.7, **_BLACKWELL),
        _device("gb200", 189_471, (2500, 1250, 80, 5000), 8.0, **(_BLACKWELL | {"reached": 0.729, "domain": 72, "host": 383e9})),
        _device("l40s", 46_068, (362.05, 183, 91.6, 733), 0.864, reached=0.743, processors=142, **_ADA),
        _device("rtx4090", 24_564, (165.2, 82.6, 82.6, 330.3), 1.008, reached=1.0, processors=128, **_ADA),
    )
}
_SHORT = {"a100": "a100-80", "h100": "h100-sxm", "rtx-4090": "rtx4090", "4090": "rtx4090"}


def device_named(name: str) -> Device:
    """A device of the table, or that of a file whose name ends with .toml.

    Raises:
        PlanError: the device is unknown; the file cannot be read, or does not describe a device.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    word = name.strip().lower()
    if (device := DEVICES.get(_SHORT.get(word, word))) is None:
        raise PlanError(
            f"device must be one of {', '.join(DEVICES)}, or a file such as mine.toml, got {name!r}. For another one give its "
            "memory: --budget 64GiB."
        )
    return device


# --- files


_NUMBERS = ("bandwidth", "reached", "copied", "least", "contention", "node", "network", "host")
_TABLES = {
    "products": ("dtype", "flop", "rate"),
    "convolutions": ("dtype", "flop", "rate"),
    "attentions": ("kernel", "head", "keys", "rate"),
    "collectives": tuple(each.name for each in fields(Measured)),
}


def _from_file(path: Path) -> Device:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--device must be a TOML file that can be read, got {str(path)!r}: {error}.") from error
    known = [each.name for each in fields(Device)]
    for name, value in values.items():
        if name not in known:
            raise PlanError(f"{path}: a key must be one of {', '.join(known)}, got {name!r}.")
        _check(path, name, value)
    if "memory" in values:
        values["memory"] = bytes_of(str(values["memory"]), "memory")
    values |= {name: tuple(values[name]) for name in ("attention", "capability") if name in values}
    measured = {
        name: tuple(sorted(tuple(row[each] for each in _TABLES[name]) for row in values.pop(name, ())))
        for name in ("products", "convolutions", "attentions")
    }
    collectives = tuple(Measured(**row) for row in values.pop("collectives", ()))
    return Device(**({"name": path.stem} | values | measured), collectives=collectives)


def _check(path: Path, name: str, value: Any) -> None:
    def needs(holds: bool, what: str, got: Any) -> None:
        if not holds:
            raise PlanError(f"{path}: {name} must be {what}, got {got!r}.")

    if name == "contention":
        needs(_is_amount(value) and value >= 1, "a number from 1", value)
    elif name == "name":
        needs(isinstance(value, str) and bool(value), "a name", value)
    elif name in _NUMBERS:
        needs(_is_amount(value), "a number above 0", value)
    elif name in ("processors", "domain"):
        needs(type(value) is int and value >= 0, "a whole number", value)
    elif name == "overlaps":
        needs(type(value) is bool, "true or false", value)
    elif name == "capability":
        whole = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each >= 0 for each in value)
        needs(whole, "two whole numbers, [9, 0]", value)
    elif name == "attention":
        needs(isinstance(value, list) and len(value) == 2 and all(map(_is_amount, value)), "two shares, [0.7, 0.6]", value)
    elif name == "peak":
        needs(isinstance(value, dict) and bool(value) and all(map(_is_amount, value.values())), "FLOP/s by type", value)
    elif name in _TABLES:
        words, numbers = ("dtype", "kernel", "kind"), _TABLES[name]
        needs(isinstance(value, list), f"rows of {', '.join(numbers)}", value)
        for row in value:
            fits = isinstance(row, dict) and set(row) == set(numbers)
            fits = fits and all(isinstance(row[key], str) if key in words else _is_amount(row[key]) for key in numbers)
            needs(fits, f"rows of {', '.join(numbers)}", row)


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def written(device: Device) -> str:
    """The text of a device's file."""
    rows = [f'name = "{device.name}"']
    rows += [f"memory = {device.memory}"] if device.memory else []
    rows += [f"{name} = {getattr(device, name):.6g}" for name in _NUMBERS if getattr(device, name)]
    rows += [f"{name} = {value}" for name in ("processors", "domain") if (value := getattr(device, name))]
    rows += [f"overlaps = {str(device.overlaps).lower()}", "attention = [{:.4g}, {:.4g}]".format(*device.attention)]
    rows.append("capability = [{}, {}]".format(*device.capability))
    rows += ["", "[peak]", *(f"{dtype} = {rate:.6g}" for dtype, rate in device.peak.items())]
    for table in ("products", "convolutions"):
        for dtype, flop, rate in getattr(device, table):
            rows += ["", f"[[{table}]]", f'dtype = "{dtype}"', f"flop = {flop:.6g}", f"rate = {rate:.6g}"]
    for kernel, head, keys, rate in device.attentions:
        rows += ["", "[[attentions]]", f'kernel = "{kernel}"', f"head = {head:.6g}", f"keys = {keys:.6g}", f"rate = {rate:.6g}"]
    for each in device.collectives:
        rows += ["", "[[collectives]]", f'kind = "{each.kind}"', f"ranks = {each.ranks}"]
        rows += [f"latency = {each.latency:.6g}", f"bandwidth = {each.bandwidth:.6g}"]
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Cluster:
    """
    Args:
        per_node: number of devices of each node.
    """

    nodes: int
    per_node: int
    device: Device

    @classmethod
    def of(cls, text: str) -> Cluster:
        """Parse "16x8xH100": nodes, devices per node, the device's name.

        Raises:
            PlanError: the text has another form, or the device is unknown.
        """
        match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})x(\S+)", text.strip(), re.IGNORECASE | re.ASCII)
        if match is None:
            raise PlanError(f"--cluster must be NODESxDEVICESxNAME, such as 16x8xH100, got {text!r}.")
        return cls(int(match[1]), int(match[2]), device_named(match[3]))


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def bytes_of(text: str, name: str) -> int:
    """Parse "80GiB", "80 GB" or a number of bytes.

    Raises:
        PlanError: the text is none of these, or 0.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]i?b)?", text.strip().lower(), re.ASCII)
    if match is None or (size := int(float(match[1]) * _UNITS[match[2] or ""])) <= 0:
        raise PlanError(f"{name} must be a size such as 80GiB, got {text!r}.")
    return size
