"""A small model behind compat's Trainer, and the same training in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.data.loader import Loader
from echelon.data.options import LoaderOptions

program: Any = pytest.importorskip("tests.compat.programs.transformers_trainer", reason="pip install transformers")
pytest.importorskip("accelerate", reason="pip install 'echelon[accelerate]'")

EPOCHS, GLOBAL_BATCH, RATE, DECAY, WARMUP, CLIP = 2, 8, 1e-2, 0.1, 2, 0.5


def training_arguments(folder: Any, *, ranks: int = 1, **more: Any) -> Any:
    from echelon.compat.transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH // ranks // 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": EPOCHS,
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "adam_epsilon": 1e-3,  # so that Adam does not blow a rounding up to a step
        "max_grad_norm": CLIP,
        "warmup_steps": WARMUP,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**given, **more})


def global_batches(epoch: int, data: Any = None, *, seed: int = 42, size: int = GLOBAL_BATCH) -> list[Any]:
    """The global batches of an epoch, whole."""
    data = data if data is not None else program.Rows(program.ROWS, 1)
    loader = Loader(data, size, seed=seed, options=LoaderOptions(dp=(0, 1)))
    loader.set_epoch(epoch)
    return [{k: v for k, v in batch.items() if k != "number"} for batch in loader]


def trained_plainly() -> tuple[dict[str, torch.Tensor], list[float], float]:
    """(parameters, losses of the updates, loss on the other rows) of a loop that imports nothing of echelon's but its order."""
    module: Any = program.build_model()
    decays = [p for n, p in module.named_parameters() if "norm" not in n]
    others = [p for n, p in module.named_parameters() if "norm" in n]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=1e-3)
    losses = []
    for epoch in range(EPOCHS):
        for batch in global_batches(epoch):
            done = len(losses)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (done / WARMUP if done < WARMUP else (6 - done) / (6 - WARMUP))
            optimizer.zero_grad()
            loss = module(**batch).loss  # the mean over all labels of the global batch
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            losses.append(float(loss.detach()))
    held_out = [program.Rows(7, 2)[at] for at in range(7)]
    whole = {name: torch.stack([row[name] for row in held_out]) for name in ("input_ids", "attention_mask", "labels")}
    module.eval()
    with torch.no_grad():
        loss = float(module(**whole).loss)
    return {n: p.detach().clone() for n, p in module.named_parameters()}, losses, loss


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in model.named_parameters()}


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trainer_of(folder: Any, *, kind: Any = None, model: Any = None, args: dict[str, Any] | None = None, **more: Any) -> Any:
    from echelon.compat.transformers import Trainer

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    given: dict[str, Any] = {"train_dataset": program.Rows(program.ROWS, 1), "eval_dataset": program.Rows(7, 2), **more}
    model = model if model is not None else program.build_model()
    return (kind or Trainer)(model, training_arguments(folder, ranks=ranks, **(args or {})), **given)
