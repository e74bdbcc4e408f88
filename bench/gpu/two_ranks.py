"""Two ranks that share one GPU, over gloo: their numbers must be those of plain PyTorch in one process on the CPU.

NCCL refuses two ranks on one device; gloo sends CUDA tensors through host memory. That shows that the library's part of each
layout is right on CUDA, but not its cost.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from bench.gpu.llama import SIZES
from bench.gpu.rows import Notes
from bench.gpu.runner import Setting
from bench.gpu.work import Fit, adamw, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import echelon as ech

LAYOUTS = ("ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp", "tp")
SHARDED = ("fsdp", "zero2", "zero3", "tp")  # hsdp has shards of one rank
GLOBAL_BATCH, UPDATES, CLIP, LR = 8, 3, 0.5, 1e-2
LIMIT = 1e-8  # float64; Adam's division makes small differences larger
LAUNCH_LIMIT_S = 20.0


def run(setting: Setting, notes: Notes) -> None:
    want = _by_hand()
    gathers = _torch_gathers(setting)
    for layout in ("ddp", "fsdp") if setting.small else LAYOUTS:
        if layout in SHARDED and not gathers:
            remark = "torch's own DTensor.full_tensor() ends a rank here, over gloo on this device"
            notes(layout, remark=remark, status="left out")
            continue
        try:
            found = _launched(_train, setting, layout, layout)
        except Exception as error:
            traceback.print_exc()
            notes(layout, remark=_last(error), status="failed")
            continue
        difference = max(float((ours[name] - want[name]).abs().max()) for ours in found for name in want)
        status = "ok" if difference < LIMIT else "failed"
        notes(layout, difference, remark=f"largest difference of parameters in float64, at most {LIMIT:g}", status=status)


def _launched(function: Callable[..., Any], setting: Setting, name: str, *args: Any) -> list[Any]:
    return ech.launch(
        function,
        ranks=2,
        args=(setting.device, *args),
        # Each rank sees only one device, so both use it.
        env={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]},
        timeout_s=LAUNCH_LIMIT_S if not setting.small else setting.limit_s / 2,
        run_dir=setting.folder / name,
        quiet=True,
    )


def _torch_gathers(setting: Setting) -> bool:
    """Whether plain torch can gather a sharded tensor over gloo on this device: torch 2.11 on CUDA ends by SIGSEGV."""
    try:
        return all(_launched(_gathered, setting, "plain torch"))
    except Exception:
        traceback.print_exc()
        return False


def _gathered(device_type: str) -> bool:
    device = ech.init_from_env(device_type, pg_backend="gloo")
    mesh = init_device_mesh(device.type, (2,))
    tensor = torch.ones(4, device=device)
    return bool((distribute_tensor(tensor, mesh, [Shard(0)]).full_tensor() == tensor).all())


def _last(error: BaseException) -> str:
    """The last line of a rank's traceback, which has the error."""
    lines = [line.strip(" │|") for line in str(error).splitlines() if line.strip(" │|")]
    raised = [line for line in lines if "Error" in line.split(":")[0]]
    return f"{type(error).__name__}: {(raised or lines or [''])[-1]}"


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = SIZES["tiny"]
    rows = torch.randint(
        0, size.vocabulary, (GLOBAL_BATCH * UPDATES, size.context + 1), generator=torch.Generator().manual_seed(1)
    )
    return [(row[:-1], row[1:]) for row in rows]


def _by_hand() -> dict[str, torch.Tensor]:
    module = tiny(dtype=torch.float64)
    optimizer = adamw(module, LR)
    rows = _data()
    for i in range(0, len(rows), GLOBAL_BATCH):
        tokens, targets = (torch.stack(parts) for parts in zip(*rows[i : i + GLOBAL_BATCH], strict=True))
        module(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def _train(device_type: str, layout: str) -> dict[str, torch.Tensor]:
    device = ech.init_from_env(device_type, pg_backend="gloo")
    unit = Fit(module=tiny(dtype=torch.float64), device=device, layout=_strategy(layout), clip_grad_norm=CLIP, lr=LR)
    ech.train(unit, ech.Loader(_data(), GLOBAL_BATCH, shuffle=False), max_epochs=1)
    return {name.removeprefix("module."): _whole(p).cpu() for name, p in unit.module.named_parameters()}


def _strategy(name: str) -> Any:
    return ech.Layout(dp_replicate=2, dp_shard=1) if name == "hsdp" else name


def _whole(p: Any) -> torch.Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
