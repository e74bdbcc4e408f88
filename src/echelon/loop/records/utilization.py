"""How much of its device a run uses: FLOPs of the model by its shapes, the device's peak, and memory. On rank 0, for its records.

Model FLOPs utilization (MFU) is the share of the device's peak that the model's own arithmetic takes. What is computed again for
activation checkpointing does not count. For a language model, a token costs

    6 N + 12 L H Q T        N parameters, L layers, H heads of size Q, T tokens in a row

FLOPs forward and backward (Chowdhery et al. 2022, "PaLM", appendix B). A lookup in an embedding is no multiplication, so N is
without tables that are only that; a frozen parameter costs 4, as its own gradient is left out.
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

__all__ = ["LanguageModel", "Utilization", "peak_flops", "tokens_of"]

# The names that configurations of models use, the usual ones first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Utilization:
    """Counts the FLOPs of updates, and tells what they and the memory come to. Nothing here waits for a device.

    Args:
        unit: an AutoUnit, whose `flops` is asked for each micro-batch if the peak is known.
    Attributes:
        counts: the peak is known.
    """

    def __init__(self, unit: Any) -> None:
        world = dist.get_world_size() if is_joined() else 1
        self.device, self.devices = unit.device, world
        # Ranks that compute parts of the same samples share the work.
        self._peak = (peak_of(unit) or 0.0) * max(1, world // max(1, unit.prepared.data.size))
        self.counts = self._peak > 0
        self._unit, self._flops = unit, 0.0
        (_, self._parts), (_, stages) = unit.prepared.place.part, unit.prepared.place.stage
        # A rank of a pipeline has the parameters of its own stages alone.
        self._model = LanguageModel(unit.prepared.unwrapped) if self._peak and stages == 1 else None

    def count(self, micro_batch: Any) -> None:
        """One more micro-batch of this rank; where it has parts of sequences, those of all ranks that share the peak."""
        if not self.counts:
            return
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
        """None without a known peak. More than 1 says that the peak is another than was looked up: None, too."""
        if not flops or not self._peak or seconds <= 0:
            return None
        share = flops / seconds / self._peak
        return share if share <= 1 else None

    def memory(self) -> dict[str, int]:
        """Of this rank's GPU, as torch's allocator counts on the host; on a CPU, of this process."""
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
    """The peak of the unit's device in the type in which it computes; None if it is not known."""
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
    """What a token costs, read off a module once.

    Attention's share is counted if the module has a `config` with the usual names. A mixture of experts uses a part of its
    parameters, and no name says which: nothing is known of it then.

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
        """Of a micro-batch, forward and backward; None where they cannot be told from shapes.

        Args:
            data: a batch with a tensor (rows, T) of whole numbers, of which the first are the tokens.
            parts: into how many each sequence is cut; `data` has one of them, and all are counted.
        """
        tokens = None if self._by_parameters is None else tokens_of(data)
        if tokens is None or self._by_parameters is None:
            return None
        return float(tokens.numel() * parts * (self._by_parameters + self._by_pairs * tokens.shape[-1] * parts))


def _by_parameters(module: nn.Module) -> int | None:
    """FLOPs of a token in multiplications with parameters; None without an embedding, or with parts of layers only."""
    tables = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    if not tables:
        return None  # no language model
    used = set()
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight.numel() != part.in_features * part.out_features:
            return None  # the older FSDP has a part of it only
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


# Peak rates of known devices, by torch's name for them. What is not listed is not guessed: then there is no MFU.


_COLUMNS = {torch.float16: 0, torch.bfloat16: 0, "tf32": 1, torch.float32: 2}

# Dense matrix products in TFLOP/s: (16 bits, TF32, float32 without it), from the makers' data sheets, which mostly print twice as
# much, "with sparsity". The first pattern that fits counts. 0 is what a card does not have, or a sheet does not say.
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
    """FLOP/s of dense matrix products in a type; in float32 those of TF32 where `torch.set_float32_matmul_precision` allows it.

    None for a device or type that is not listed, and for a part of a card (MIG, or a virtual one such as "GRID A100D-1-20C").
    """
    if _PART_OF_A_CARD.search(device_name) or (dtype is torch.bfloat16 and _WITHOUT_BF16.search(device_name)):
        return None
    kind: torch.dtype | str = dtype
    if dtype is torch.float32 and _allows_tf32():
        kind = "tf32"
    column = _COLUMNS.get(kind)
    if column is None:
        return None
    for pattern, tflops in _TFLOPS:
        if re.search(rf"(?<![A-Z0-9]){pattern}", device_name):
            return tflops[column] * 1e12 or (tflops[2] * 1e12 if kind == "tf32" else 0) or None
    return None


def _allows_tf32() -> bool:
    """By either of torch's settings, which refuse to be read once the other was used."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"
