"""LightningModules on echelon's loop: what they train is what plain PyTorch trains, on one rank and on two, ddp and fsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.compat.lightning.pytorch import Trainer
from echelon.parallel.shards import whole
from tests.compat.lightning_modules import GAN, Autoencoder, Classifier, Transformer, data_of, loader_of, made, plainly
from tests.models import largest_difference

pytestmark = [pytest.mark.standing_ranks, pytest.mark.usefixtures("forked_programs")]

KINDS: list[Any] = [Classifier, Autoencoder, Transformer, GAN]
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}


def train(folder: str, strategy: str, kinds: list[Any]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        module = made(kind)
        trainer = Trainer(max_epochs=2, strategy=strategy, **QUIET)
        trainer.fit(module, loader_of(kind, trainer.world_size))
        weights = {name: whole(t).detach() for name, t in trainer.unit.prepared_modules()["module"].state().state_dict().items()}
        found[kind.__name__] = weights, {n: float(v) for n, v in trainer.callback_metrics.items()}, trainer.global_step
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_as_plain_pytorch_does(kind: Any, tmp_path: Path) -> None:
    weights, _, updates = train(str(tmp_path), "auto", [kind])[kind.__name__]
    assert largest_difference(weights, plainly(kind, 2)) < 1e-14
    assert updates == (16 if kind is GAN else 8)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_two_ranks_train_as_one_process_does(strategy: str, ranks: Any, tmp_path: Path) -> None:
    alone = train(str(tmp_path), "auto", KINDS)
    for told in ranks(2, train, str(tmp_path), strategy, KINDS):
        for kind in KINDS:
            weights, numbers, updates = told[kind.__name__]
            assert largest_difference(weights, plainly(kind, 2)) < 1e-12, kind
            assert numbers.keys() == alone[kind.__name__][1].keys()
            for name in (n for n in numbers if n.endswith(("_epoch", "_acc"))):  # means over all ranks
                assert numbers[name] == pytest.approx(alone[kind.__name__][1][name], rel=1e-6), (kind, name)
            assert updates == (16 if kind is GAN else 8)
