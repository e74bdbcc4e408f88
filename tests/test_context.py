"""Context parallelism: the numbers of one process, in every kind of batch and model; what it cannot split is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import echelon as ech
from tests.conftest import Ranks
from tests.context_models import Language, lm, plain, tokens
from tests.models import largest_difference, whole

pytestmark = pytest.mark.standing_ranks

UPDATES = 20

# (make the model, options of a batch, options of the unit)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sgd": (lm, {}, {}),
    "adamw": (lm, {}, {"optimizer": "AdamW"}),
    "clipped": (lm, {}, {"clip_grad_norm": 0.3}),
    "not causal": (lambda: lm(causal=False), {}, {}),
    "packed documents": (lm, {"packed": True}, {}),
    "token weights": (lm, {"ignored": 0.6}, {"by_tokens": True}),
    "rows, with ignored targets": (lm, {"ignored": 0.6}, {}),
    "checkpointed": (lm, {"packed": True}, {"activation_checkpoint_params": "blocks"}),
}


def _windows(cp: int, dp: int, options: dict[str, Any], accumulation: int = 2) -> list[list[list[dict[str, torch.Tensor]]]]:
    """By update, micro-batch, and share of the data: other rows and lengths each time. The last window is short."""
    made, seed = [], 0
    for update in range(UPDATES):
        count = 1 if update == UPDATES - 1 else accumulation
        window = []
        for _ in range(count):
            seed += 1
            rows = [2 + (seed + share) % 2 for share in range(dp)]
            length = 4 * cp * (1 + seed % 2)
            window.append([tokens(r, length, 100 * seed + share, **options) for share, r in enumerate(rows)])
        made.append(window)
    return made


def _train(case: str, cp: int, dp: int) -> tuple[float, float, float]:
    """How far parameters, norms and losses are from plain PyTorch."""
    make, batch, options = CASES[case]
    windows = _windows(cp, dp, batch)
    unit = Language(
        module=make(),
        strategy=ech.Parallel(dp_shard=dp, cp=cp),
        gradient_accumulation_steps=2,
        **{"clip_grad_norm": float("inf"), **options},
    )
    mine = [micro[unit.prepared.dp_rank] for window in windows for micro in window]
    ech.train(unit, mine, max_epochs=1)
    ours = ("activation_checkpoint_params", "clip_grad_norm")
    same = {k: v for k, v in options.items() if k not in ours}
    want, norms, losses = plain(
        make(), [[b for micro in w for b in micro] for w in windows], clip=options.get("clip_grad_norm", float("inf")), **same
    )
    far = [max(abs(a / b - 1) for a, b in zip(x, y, strict=True)) for x, y in ((unit.norms, norms), (unit.losses, losses))]
    return largest_difference(whole(unit.module), want), *far


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_one_sequence_train_like_one_process(ranks: Ranks, case: str) -> None:
    """Accumulation, and a short last window, included."""
    for far in ranks(2, _train, case, 2, 1):
        assert max(far) < 1e-11, (case, far)
