"""The same promises on a GPU. Deselected where there is none; two ranks need two devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import echelon as ech
from echelon.data.prefetch import Feed
from tests.models import batch, largest_difference, net, plain_training, whole
from tests.units import Regression

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def _cpu(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: p.cpu() for n, p in parameters.items()}


@pytest.mark.parametrize("strategy", ["noop", "fsdp"])
def test_windows_equal_plain_pytorch(strategy: str) -> None:
    rows = [4, 3, 7]
    unit = Regression(device=CUDA, strategy=strategy, gradient_accumulation_steps=2, clip_grad_norm=float("inf"))
    ech.train(unit, [batch(n, i) for i, n in enumerate(rows)], max_epochs=1)
    want, _, norms = plain_training([[batch(4, 0), batch(3, 1)], [batch(7, 2)]])
    assert unit.norms == pytest.approx(norms, rel=1e-9)
    assert largest_difference(_cpu(whole(unit.module)), want) < 1e-9
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_batches_read_ahead_arrive_whole_and_in_order() -> None:
    data = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(8)]
    feed = Feed(data, move=lambda b, fast: b.to(CUDA, non_blocking=fast), stream=torch.cuda.Stream())
    for i, (on_device, *_) in enumerate(feed):
        assert on_device.is_cuda and float(on_device.min()) == float(on_device.max()) == i
    assert feed.used == 8


class Quiet(Regression):
    def on_train_step_end(self, state: ech.State, data: Any, step: int, results: Any) -> None:
        if step == 3:  # the first steps allocate and estimate
            torch.cuda.set_sync_debug_mode("error")


def test_training_and_watching_never_wait_for_the_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attempts" / "000").mkdir(parents=True)
    monkeypatch.setenv("ECHELON_RUN_DIR", str(tmp_path))
    options = {"clip_grad_norm": 1.0, "precision": "bf16", "gradient_accumulation_steps": 2}
    unit = Quiet(module=net(dtype=torch.float32), device=CUDA, **options)
    try:
        ech.train(unit, [batch(4, i, torch.float32) for i in range(11)], max_epochs=1)
    except RuntimeError as error:
        pytest.fail(f"a step waited for the device: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
