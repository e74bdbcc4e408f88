"""The bit-equal mode: the same bits in every parameter on 1, 2 and 4 ranks, under ddp and fsdp."""

from __future__ import annotations

import importlib
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import echelon as ech
from echelon.common.errors import UsageError
from echelon.world.device import same_kernels
from tests.conftest import Ranks
from tests.kit.models import net, plain_training, whole
from tests.kit.units import Regression

SAMPLES = 46  # with a global batch of 16 the last one of an epoch has 14, which four parts cannot share evenly


def _rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(SAMPLES)]


class Weighted(Regression):
    def weight(self, data: Any) -> float:
        return float(2 * len(data[0]))


def _bits(
    layout: str, optimizer: str, saved: str | None = None, stop: int | None = None, mode: Any = "bitwise"
) -> dict[str, int]:
    """Checksums of all parameters after three epochs; with `saved`, stopped or resumed there."""
    random.seed()  # nothing may depend on it
    torch.manual_seed(11)
    unit = Weighted(
        module=net(dtype=torch.float32, dropout=0.25 if mode else 0.0),
        layout=layout,
        optimizer=optimizer,
        lr=0.01,
        clip_grad_norm=0.4,
        deterministic=mode,
    )
    loader, callbacks = ech.Loader(_rows(), 16), []
    if saved is not None and stop is not None:
        callbacks = [ech.DistributedCheckpointSaver(saved, save_every_n_updates=stop)]
    elif saved is not None:
        ech.DistributedCheckpointSaver.restore_from_latest(saved, unit, train_dataloader=loader)
    ech.train(unit, loader, max_epochs=2 if stop is not None else 3, callbacks=callbacks)
    return {n: zlib.crc32(p.contiguous().numpy().tobytes()) for n, p in whole(unit.module).items()}


def _bits_under(layouts: list[str], optimizer: str) -> dict[str, dict[str, int]]:
    return {layout: _bits(layout, optimizer) for layout in layouts}


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "several"),
    [
        ("AdamW", {2: ["fsdp"], 4: ["ddp"]}),
        ("SGD", {2: ["ddp", "zero1", "zero2"], 4: ["fsdp"]}),
    ],
)
def test_every_bit_is_the_same_on_any_number_of_ranks(ranks: Ranks, optimizer: str, several: dict[int, list[str]]) -> None:
    (one,) = ranks(1, _bits_under, ["none", "ddp", "fsdp"], optimizer)
    for size, layouts in several.items():
        for found in ranks(size, _bits_under, layouts, optimizer):
            assert {f"{layout} on {size}": bits == one["none"] for layout, bits in found.items()} == {
                f"{layout} on {size}": True for layout in layouts
            }
    assert one["ddp"] == one["fsdp"] == one["none"]
    # Without the mode they differ; otherwise this would show nothing.
    (alone,), four = ranks(1, _bits, "ddp", optimizer, mode=None), ranks(4, _bits, "ddp", optimizer, mode=None)
    assert alone != four[0]


@pytest.mark.full
def test_a_run_resumed_at_another_world_size_ends_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    (straight,) = ranks(1, _bits, "none", "AdamW")
    folder = str(tmp_path / "checkpoints")
    ranks(2, _bits, "fsdp", "AdamW", folder, 4)  # update 4 lies inside the second epoch
    assert ranks(4, _bits, "ddp", "AdamW", folder)[0] == straight


def _mean(parts: int) -> dict[str, torch.Tensor]:
    unit = Regression(layout="none", deterministic="bitwise")
    x, y = (torch.stack(v).double() for v in zip(*_rows()[:16], strict=True))
    cut = 16 // parts
    ech.train(unit, [(x[i : i + cut], y[i : i + cut]) for i in range(0, 16, cut)], max_epochs=1)
    return whole(unit.module)


@pytest.mark.parametrize("parts", [4, 2])
def test_the_mean_is_right(ranks: Ranks, parts: int) -> None:
    """Two parts: a window shorter than the mode's four, as at the end of a loader of the user's own."""
    x, y = (torch.stack(v).double() for v in zip(*_rows()[:16], strict=True))
    want, _, _ = plain_training([[(x, y)]])
    (got,) = ranks(1, _mean, parts)
    assert max(float((got[n] - want[n]).abs().max()) for n in want) < 1e-12


def _refused_with(layout: Any, said: str) -> None:
    module: nn.Module = (
        nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1)).double() if layout == "sync" else net()
    )
    layout = {"hook": ech.DDPStrategy(comm_hook=allreduce_hook), "gather": "ddp", "sync": "ddp"}.get(layout, layout)
    with pytest.raises(UsageError, match=said):
        unit = Regression(
            module=module, deterministic="bitwise", layout=layout, loss=lambda m, data: ech.gather(m(data[0].double())).std()
        )
        ech.train(unit, ech.Loader(_rows(), global_batch=16), max_epochs=1)


@pytest.mark.parametrize(
    ("size", "layout", "said"),
    [
        (3, "ddp", r"divisible by the number of ranks \(3\), got 4"),
        (4, "hsdp", "a layout with one axis"),
        (2, "hook", "comm_hook must be None in bit-equal training"),
        (1, "sync", "bit-equal training must have no SyncBatchNorm"),
        (2, "gather", "gather must not be called for a loss in bit-equal training"),
    ],
)
def test_what_has_no_fixed_order_is_refused(ranks: Ranks, size: int, layout: str, said: str) -> None:
    ranks(size, _refused_with, layout, said)


def test_the_command_line_sets_the_mode(echelon_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import echelon as ech, torch\nfrom tests.kit.units import Regression\nech.init_from_env()\n"
        "unit = Regression(layout='none')\nprint('micro-batches', unit.gradient_accumulation_steps)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = echelon_command("run", "--ranks", "1", "--bitwise", "--parts", "8", "train.py", env={"PYTHONPATH": root})
    assert done.returncode == 0 and "micro-batches 8" in done.stdout, done.stderr
    assert echelon_command("run", "--bitwise", "--parts", "3", "train.py").returncode == 2


def _alike() -> list[bool]:
    """What the bit-equal mode asks of torch, before and after its compiler is loaded."""
    torch.backends.cudnn.benchmark = True
    same_kernels(1)
    found = [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    config = importlib.import_module("torch._inductor.config")
    found.append(config.deterministic)  # by the variable, unless it was loaded before
    config.deterministic = False
    same_kernels(1)
    return [*found, config.deterministic]


def test_the_bit_equal_mode_asks_the_compiler_too(ranks: Ranks) -> None:
    assert ranks(1, _alike) == [[False, True, True, True]]
