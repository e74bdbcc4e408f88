"""How much of its device a run uses: FLOPs of the model by its shapes, the device's peak, and memory. On rank 0, for its records.

Model FLOPs utilization (MFU) is the share of the device's peak that the model's own arithmetic takes. What is computed again for
activation checkpointing does not count. For a language model, a token costs

    6 N + 12 L H Q T        N parameters, L layers, H heads of size Q, T tokens in a row

FLOPs forward and backward (Chowdhery et al. 2022, "PaLM", appendix B). A lookup in an embedding is no multiplication, so N is
without tables that are only that; a frozen parameter costs 4, as its own gradient is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.loop.records.peaks import peak_flops
from echelon.world.agree import is_joined

__all__ = ["LanguageModel", "Utilization", "tokens_of"]

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
        self._peak = (peak_of(unit) or 0.0) * max(1, world // max(1, unit.prepared.dp_size))
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
        found = flops / seconds / self._peak
        return found if found <= 1 else None

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
    return next((found for value in data if (found := tokens_of(value)) is not None), None)
