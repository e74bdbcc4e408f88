"""Compiled, within a memory budget and in bfloat16 if asked for, with dropout."""

from __future__ import annotations

import sys

from common import Auto, ech, loader, nn, torch


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))


torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 16), block(), block(), nn.Linear(16, 1))
budget = ech.layouts.ActivationCheckpointParams(memory_budget=0.5) if "budget" in sys.argv else None
backend = "inductor" if "inductor" in sys.argv else "aot_eager"
unit = Auto(
    module=net,
    layout="fsdp",
    compile=ech.layouts.TorchCompileParams(backend=backend),
    activation_checkpoint_params=budget,
    precision="bf16" if "bf16" in sys.argv else None,
)
ech.train(unit, loader(), max_epochs=1)
