"""Tokens a second, model FLOP/s and memory of a Llama-style model that fills the card, one row of options after another.

Every variant trains the same model on the same tokens with clipping and a fused AdamW; the others are compared with "plain
torch", the bare loop. The rows of a batch are halved until they fit. An option that this library does not have yet is left out.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench.gpu.llama import SIZES, Llama, Size, flops_per_token
from bench.gpu.rows import LeftOut, Notes
from bench.gpu.runner import Setting
from bench.gpu.work import Batches, Fit, adamw, settle

import echelon as ech
from echelon.common.errors import UsageError
from echelon.loop.records.utilization import peak_flops

WARM, TIMED, ROWS, CLIP = 4, 8, 4, 1.0
LR = 1e-5  # small, so that rounding has little effect on the compared losses
BYTES_PER_PARAMETER = 18  # float32 weights, gradients and two moments, and the low-precision copy for matrix products


@dataclass(frozen=True)
class Variant:
    """A way to train the model.

    Args:
        by_hand: the bare loop, without this library.
        recompute: activation checkpointing: "blocks", "selective" or "memory budget".
        chunked: the loss never has all logits.
        largest: use the largest size that fits, not the usual one.
    """

    by_hand: bool = False
    layout: str = "none"
    precision: str = "low"
    compiled: bool = False
    recompute: str | None = None
    chunked: bool = False
    largest: bool = False


VARIANTS = {
    "plain torch": Variant(by_hand=True),
    "eager": Variant(),
    "compiled": Variant(compiled=True),
    "chunked loss": Variant(chunked=True),
    "compiled, chunked loss": Variant(compiled=True, chunked=True),
    "selective AC": Variant(compiled=True, chunked=True, recompute="selective"),
    "full AC": Variant(compiled=True, chunked=True, recompute="blocks"),
    "memory budget": Variant(compiled=True, chunked=True, recompute="memory budget"),
    "fsdp": Variant(layout="fsdp", compiled=True, chunked=True),
    "float8": Variant(precision="float8", compiled=True, chunked=True),
    "largest that fits": Variant(compiled=True, chunked=True, recompute="blocks", largest=True),
}


def run(setting: Setting, notes: Notes, variant: str) -> None:
    chosen = VARIANTS[variant]
    # Before any allocation, as in a user's script: it configures the allocator.
    device = torch.device(setting.device) if chosen.by_hand else ech.init_from_env(setting.device)
    if chosen.chunked and not hasattr(ech.nn, "linear_cross_entropy"):
        if variant == "chunked loss" or chosen.precision == "float8":
            raise LeftOut("not there: ech.nn.linear_cross_entropy")
        notes("without", "the chunked loss", remark="not there: ech.nn.linear_cross_entropy")
        chosen = replace(chosen, chunked=False)
    for name in ["tiny"] if setting.small else _sizes(chosen.largest, device):
        rows = 1 if setting.small else ROWS
        while rows:
            measured = _unless_it_is_too_large(lambda rows=rows, name=name: _measure(chosen, SIZES[name], rows, device))
            if measured is not None:
                _note(notes, measured, name, rows, chosen, device)
                return
            rows //= 2
    raise LeftOut(f"out of memory even with one row of {SIZES[name].context} tokens of {name}")


def _sizes(largest: bool, device: torch.device) -> list[str]:
    """Sizes to try, the largest that may fit first; the usual one is 1B, if it fits."""
    free = torch.cuda.mem_get_info(device)[0]
    fitting = [name for name, size in SIZES.items() if size.parameters * BYTES_PER_PARAMETER < 0.95 * free]
    usual = [name for name in fitting if name not in ("3B", "8B")]
    return list(reversed((fitting if largest else usual) or ["tiny"]))


def _unless_it_is_too_large(measure: Callable[[], dict[str, float]]) -> dict[str, float] | None:
    """The measurement; None after freeing the memory if there was not enough."""
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0])
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _measure(variant: Variant, size: Size, rows: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    chunked = ech.nn.linear_cross_entropy if variant.chunked else None
    with device:
        module = Llama(size, chunked)
    began: list[float] = []

    def before(batch: int) -> None:
        if batch in (WARM, WARM + TIMED):
            settle(device)
            began.append(time.perf_counter())
            if device.type == "cuda" and batch == WARM:
                torch.cuda.reset_peak_memory_stats()

    batches = Batches(size, rows, WARM + TIMED + 1, pinned=device.type == "cuda", before=before)
    loss = (_by_hand if variant.by_hand else _by_unit)(module, variant, batches, device)
    seconds = (began[1] - began[0]) / TIMED
    found = {"seconds": seconds, "tokens": rows * size.context, "loss": loss}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        found |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "retries": stats.get("num_alloc_retries", 0),
        }
    return found


def _low(device: torch.device) -> str:
    return "bf16" if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _by_hand(module: Any, variant: Variant, batches: Batches, device: torch.device) -> float:
    """The loop as torch's documentation shows it. Returns the last loss."""
    optimizer = adamw(module, LR)
    low = _low(device)
    dtype = torch.bfloat16 if low == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=low == "fp16")
    loss = torch.zeros(())
    for tokens, targets in batches:
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype):
            loss = module(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss.item()


class Last(ech.Callback):
    """The loss of the latest step."""

    loss: Any = None

    def on_train_step_end(self, state: ech.State, unit: Any) -> None:
        self.loss = unit.latest_update[0]


def _by_unit(module: Any, variant: Variant, batches: Batches, device: torch.device) -> float:
    precision = _low(device) if variant.precision == "low" else variant.precision
    options = {"layout": variant.layout, "precision": precision, "clip_grad_norm": CLIP, **_recipe(variant, device)}
    try:
        unit = Fit(module=module, device=device, lr=LR, **options)
    except UsageError as error:
        if variant.precision == "float8" or variant.recompute == "memory budget":
            raise LeftOut(f"not there: {str(error).splitlines()[0]}") from error
        raise
    last = Last()
    ech.train(unit, batches, max_epochs=1, callbacks=[last])
    return float(last.loss)


def _recipe(variant: Variant, device: torch.device) -> dict[str, Any]:
    """Compilation and activation checkpointing by the library's presets, or their equivalents in a version without presets."""
    made: dict[str, Any] = {}
    known = inspect.signature(ech.AutoUnit.__init__).parameters
    if variant.compiled and device.type == "cpu":
        # The reduced form compiles only once, since each compilation takes seconds.
        other: dict[str, Any] = {"backend": "aot_eager", "disable": variant != VARIANTS["compiled"]}
        made["compile"] = ech.layouts.TorchCompileParams(recursive_module_types=["Block"], **other)
    elif variant.compiled and "compile" in known:
        made["compile"] = "blocks"
    elif variant.compiled:
        made["compile"] = ech.layouts.TorchCompileParams(recursive_module_types=["Block"])
    if variant.recompute is None:
        return made
    params = ech.layouts.ActivationCheckpointParams
    if variant.recompute == "memory budget":
        if "memory_budget" not in inspect.signature(params.__init__).parameters:
            raise LeftOut("not there: ActivationCheckpointParams(memory_budget=)")
        made["recompute"] = params(memory_budget=0.5)
    elif "compile" in known:  # this version has presets
        made["recompute"] = variant.recompute
    elif variant.recompute == "selective":
        attention = (torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_efficient_attention)
        dear = [torch.ops.aten.mm.default, *(kernel.default for kernel in attention)]
        made["recompute"] = params(save_ops=dear)
    else:
        made["recompute"] = params()
    return made


def _note(notes: Notes, found: dict[str, float], name: str, rows: int, variant: Variant, device: torch.device) -> None:
    size = SIZES[name]
    per_s = found["tokens"] / found["seconds"]
    what = f"{name}: {size.parameters / 1e9:.2f} B parameters, {rows} x {size.context} tokens"
    remark = f"{what}, {found['seconds'] * 1e3:.1f} ms a step, loss {found['loss']:.3f} after {WARM + TIMED + 1} steps"
    notes("tokens/s", per_s, remark=remark)
    rate = per_s * flops_per_token(size)
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if device.type == "cuda" else None
    mfu = f"MFU {100 * rate / peak:.1f}% of {peak / 1e12:.0f}" if peak else "no MFU: the peak is not known"
    notes("model FLOP/s", rate / 1e12, "TFLOP/s", mfu + (", the peak of bf16" if variant.precision == "float8" else ""))
    if device.type == "cuda":
        remark = f"allocated; {found['reserved'] / 2**30:.1f} reserved, {found['retries']:.0f} allocation retries"
        notes("memory at its peak", found["allocated"] / 2**30, "GiB", remark)
