"""Use of the device by a run: FLOPs of the model from its shapes, the device's peak, and memory. On rank 0, for its records.

Model FLOPs utilization (MFU) is the model's own arithmetic as a share of the device's peak; recomputation by activation
checkpointing does not count. For a language model, a token costs

    6 N + 12 L H Q T        N parameters, L layers, H heads of size Q, T tokens in a row

FLOPs forward and backward (Chowdhery et al. 2022, "PaLM", appendix B). An embedding lookup is not a multiplication, so N excludes
tables used only for lookups. A frozen parameter costs 4 instead of 6, because its gradient is not computed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.world.agree import is_joined

__all__ = ["LanguageModel", "Utilization", "allows_tf32", "peak_flops", "tokens_of"]

# Names in models' configurations, the most usual first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Utilization:
    """Counts the FLOPs of updates; computes MFU and memory use. Nothing here waits for a device.

    Args:
        unit: an AutoUnit; if the peak is known, its `flops` is called for each micro-batch.
    Attributes:
        counts: FLOPs are counted, because the peak is known.
    """

    def __init__(self, unit: Any) -> None:
        world = dist.get_world_size() if is_joined() else 1
        self.device, self.devices = unit.device, world
        # Ranks that compute parts of the same samples share the work.
        self._peak = (peak_of(unit) or 0.0) * max(1, world // max(1, unit.prepared.data.size))
        self.counts = self._peak > 0
        self._unit, self._flops = unit, 0.0
        (_, self._parts), (_, stages) = unit.prepared.place.part, unit.prepared.place.stage
        # In a pipeline this rank has the parameters of its own stages only, so the model's size is unknown.
        self._model = LanguageModel(unit.prepared.unwrapped) if self._peak and stages == 1 else None

    def count(self, micro_batch: Any) -> None:
        """Count a micro-batch of this rank. If it is a part of longer sequences, count the parts of all ranks that share them."""
        flops = self._unit.flops(micro_batch)
        if flops is not None:
            self._flops += flops * self._parts
        elif self._model is not None:
            self._flops += self._model.flops(micro_batch, self._parts) or 0.0

    def take(self) -> float:
        """The FLOPs since the last call."""
        flops, self._flops = self._flops, 0.0
        return flops

    def mfu(self, flops: float, seconds: float) -> float | None:
        """The MFU; None if the peak is unknown, or if the result is above 1, which shows that the peak is wrong."""
        if not flops or not self._peak or seconds <= 0:
            return None
        share = flops / seconds / self._peak
        return share if share <= 1 else None

    def memory(self) -> dict[str, int]:
        """Memory of this rank's GPU, from counters of torch's allocator on the host; on a CPU, of this process."""
        if self.device.type != "cuda":
            return _of_process()
        counted = torch.cuda.memory_stats(self.device)
        names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
        shown = ("memory_peak_bytes", "memory_reserved_bytes", "alloc_retries")
        return {name: int(counted.get(key, 0)) for name, key in zip(shown, names, strict=True)}


def _of_process() -> dict[str, int]:
    try:
        with open("/proc/self/statm") as file:
            return {"host_memory_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except (OSError, ValueError, IndexError):  # not Linux
        return {}


def peak_of(unit: Any) -> float | None:
    """Peak FLOP/s of the unit's device in its compute dtype; None if unknown."""
    given: float | None = unit.peak_flops
    if given is not None:
        return given
    if unit.device.type != "cuda":
        return None
    dtype = unit.computes.dtype
    if dtype is None:
        dtype = next((p.dtype for p in unit.module.parameters() if p.is_floating_point()), torch.float32)
    return peak_flops(torch.cuda.get_device_name(unit.device), dtype)


class LanguageModel:
    """FLOPs per token of a module, computed once.

    Attention is counted if the module has a `config` with the usual names. The FLOPs of a mixture of experts are unknown: it uses
    a part of its parameters for each token, and no usual name says which.

    Args:
        module: as its author wrote it; its parameters may be split over ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        config = getattr(module, "config", None)
        experts = any((_first(config, (name,)) or 0) > 1 for name in _EXPERTS)
        self._by_parameters = None if experts else _by_parameters(module)
        layers, heads, width = (_first(config, names) for names in (_LAYERS, _HEADS, _WIDTH))
        size = _first(config, ("head_dim",)) or (width // heads if width and heads else None)
        self._by_pairs = 12 * layers * heads * size if layers and heads and size else 0

    def flops(self, data: Any, parts: int = 1) -> float | None:
        """FLOPs of a micro-batch, forward and backward; None if shapes do not tell them.

        Args:
            data: a batch; its first tensor (rows, T) of whole numbers is taken for the tokens.
            parts: number of parts of each sequence; `data` has one of them, and all are counted.
        """
        tokens = None if self._by_parameters is None else tokens_of(data)
        if tokens is None or self._by_parameters is None:
            return None
        return float(tokens.numel() * parts * (self._by_parameters + self._by_pairs * tokens.shape[-1] * parts))


def _by_parameters(module: nn.Module) -> int | None:
    """FLOPs per token in multiplications with parameters; None if the module has no embedding, or only parts of layers."""
    tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    if not tables:
        return None  # not a language model
    used = set()
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight.numel() != part.in_features * part.out_features:
            return None  # FSDP1 has only a part of the weight here
        if not isinstance(part, nn.Embedding):
            used |= set(part.parameters(recurse=False))
    return sum(p.numel() * (6 if p.requires_grad else 4) for p in used)


def _first(config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def tokens_of(data: Any) -> torch.Tensor | None:
    """The first tensor (rows, T) of whole numbers in a batch."""
    if isinstance(data, torch.Tensor):
        return data if data.dim() == 2 and not data.is_floating_point() and data.dtype is not torch.bool else None
    if isinstance(data, Mapping):
        data = list(data.values())
    elif not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
        data = list(vars(data).values()) if hasattr(data, "__dict__") else []
    return next((tokens for value in data if (tokens := tokens_of(value)) is not None), None)


# --- peak rates of known devices, by torch's names for them; a device that is not listed has no MFU


_COLUMNS = {torch.float16: 0, torch.bfloat16: 0, "tf32": 1, torch.float32: 2}

# Dense matrix products in TFLOP/s: (16 bits, TF32, float32 without TF32), from the makers' data sheets, most of which print twice
# as much, "with sparsity". The first matching pattern counts. 0: the card does not have it, or the sheet does not say.
_TFLOPS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"B200", (2250, 1100, 0)),  # NVIDIA HGX B200
    (r"H200 NVL", (835.5, 417.5, 60)),  # NVIDIA H200 NVL
    (r"H200|GH200", (989.4, 494.7, 66.9)),  # NVIDIA H200, GH200
    (r"H100 NVL", (835.5, 417.5, 60)),  # NVIDIA H100 NVL
    (r"H100 PCIe", (756, 378, 51.2)),  # NVIDIA H100 PCIe
    (r"H100( 80GB HBM3| SXM.*)?$", (989.4, 494.7, 66.9)),  # NVIDIA H100 SXM
    (r"H20$", (148, 74, 44)),  # NVIDIA H20
    (r"A100", (312, 156, 19.5)),  # NVIDIA A100, both forms
    (r"A30$", (165, 82, 10.3)),  # NVIDIA A30
    (r"A40$", (149.7, 74.8, 37.4)),  # NVIDIA A40
    (r"L40S", (362.05, 183, 91.6)),  # NVIDIA L40S
    (r"L40$", (181.05, 90.5, 90.5)),  # NVIDIA L40
    (r"L4$", (121, 60, 30.3)),  # NVIDIA L4
    (r"RTX 6000 Ada", (364.2, 182.1, 91.1)),  # NVIDIA RTX 6000 Ada
    (r"RTX A6000", (154.8, 77.4, 38.7)),  # NVIDIA RTX A6000
    (r"RTX 4090$", (165.2, 82.6, 82.6)),  # NVIDIA Ada whitepaper, table 2: with float32 accumulation
    (r"RTX 3090$", (71, 35.6, 35.6)),  # NVIDIA GA102 whitepaper, table 2: the same
    (r"V100-SXM", (125, 0, 15.7)),  # NVIDIA V100; no bfloat16
    (r"V100-PCIE", (112, 0, 14)),
    (r"T4$", (65, 0, 8.1)),  # NVIDIA T4; no bfloat16
    (r"MI300X", (1307.4, 653.7, 163.4)),  # AMD Instinct MI300X
)
_PART_OF_A_CARD = re.compile(r"\bMIG\b|\bGRID\b|-\d+[A-Z]$")
_WITHOUT_BF16 = re.compile(r"V100|T4$")


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of dense matrix products in a dtype; for float32, of TF32 if `torch.set_float32_matmul_precision` allows it.

    None for a device or dtype that is not listed, and for a part of a card (MIG, or a virtual one such as "GRID A100D-1-20C").
    """
    if _PART_OF_A_CARD.search(device_name) or (dtype is torch.bfloat16 and _WITHOUT_BF16.search(device_name)):
        return None
    kind: torch.dtype | str = dtype
    if dtype is torch.float32 and allows_tf32():
        kind = "tf32"
    column = _COLUMNS.get(kind)
    if column is None:
        return None
    for pattern, tflops in _TFLOPS:
        if re.search(rf"(?<![A-Z0-9]){pattern}", device_name):
            return tflops[column] * 1e12 or (tflops[2] * 1e12 if kind == "tf32" else 0) or None
    return None


def allows_tf32() -> bool:
    """Whether torch may use TF32. torch has two settings; each raises when read once the other was set."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"
