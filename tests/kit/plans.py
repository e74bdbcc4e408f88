"""A script to be planned, and what a plan says of it."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

Command = Callable[..., subprocess.CompletedProcess[str]]

WIDTH, DEPTH = 96, 4
PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH)

UNIT = f"""
import sys
import torch
import echelon as ech

class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        return torch.nn.functional.mse_loss(self.module(data[0]), data[1]), None

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), fused=True), None

ech.init_from_env()
print("what a script prints is not the plan")
layers = [torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({DEPTH})]
data = torch.utils.data.TensorDataset(torch.randn(64, {WIDTH}), torch.randn(64, {WIDTH}))
loader = ech.Loader(data, global_batch=8)
"""
TRAINS = "ech.train(Fit(module=torch.nn.Sequential(*layers), layout='ddp'), loader, max_updates=8)\n"


def planned(command: Command, folder: Path, script: str, *options: str) -> dict[str, dict[str, Any]]:
    """By layout."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    return told(command("plan", *options, "--json", "train.py"))


def told(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {each["layout"]: each for each in json.loads(done.stdout)["layouts"]}
