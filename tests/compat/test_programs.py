"""Programs written for other systems, run as programs on real ranks: what they train is what plain PyTorch trains in one process.

nntool's page is in tests/slurm, Dragon's on its runtime in test_group.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compat.programs import (
    fairscale_checkpoint_scaler,
    lightning_trainer,
    pytorch_raw,
    torchtnt_auto_unit,
    torchtnt_by_hand,
)
from tests.compat.reference import check_dragon_training, in_order, plain
from tests.compat.reference import run_programs as run
from tests.kit.models import largest_difference

pytestmark = pytest.mark.usefixtures("forked_programs")

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
ECHELON = ("-m", "echelon", "run", "--ranks")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


# --- TorchTNT


@pytest.mark.full
def test_a_unit_of_ones_own_wrapped_by_hand_or_by_prepare(tmp_path: Path) -> None:
    program = torchtnt_by_hand
    run(tmp_path, (*ECHELON, "2", str(PROGRAMS / "torchtnt_by_hand.py"), "out.pt"))
    want = plain(program.build_module(), in_order(program.dataset(), program.GLOBAL_BATCH), epochs=program.EPOCHS)
    trained = torch.load(tmp_path / "out.pt")
    kinds = {way: kind for way, (kind, _) in trained.items()}
    assert kinds == {
        "DDP by hand": "DistributedDataParallel",
        "FSDP by hand": "FullyShardedDataParallel",
        "prepare_ddp": "DistributedDataParallel",
        "prepare_fsdp": "FSDPSequential",
    }
    for way, (_, parameters) in trained.items():
        assert largest_difference(parameters, want) < 1e-12, way


@pytest.mark.full
def test_an_auto_unit_is_restored_at_another_world_size(tmp_path: Path) -> None:
    program = torchtnt_auto_unit
    batches = in_order(program.dataset(), program.GLOBAL_BATCH)
    for ranks, before, epochs in (("2", 0, 2), ("1", 2, 4)):
        run(tmp_path, (*ECHELON, ranks, str(PROGRAMS / "torchtnt_auto_unit.py"), "saved", str(epochs)))
        trained = torch.load(tmp_path / "saved" / "trained.pt")
        want = plain(program.build_module(), batches, epochs=epochs, gamma=0.8)
        assert trained.keys() == program.STRATEGIES.keys()
        for name, (began, steps, parameters) in trained.items():
            assert (began, steps) == (5 * before, 5 * epochs) and largest_difference(parameters, want) < 1e-12, (ranks, name)


# --- raw PyTorch, Lightning, Dragon


@pytest.mark.full
def test_data_parallel_and_ddp_of_plain_pytorch_under_two_launchers(tmp_path: Path) -> None:
    for name in ("echelon", "torchrun"):
        (tmp_path / name).mkdir()
    program = str(PROGRAMS / "pytorch_raw.py")
    run(tmp_path, (*ECHELON, "2", program, "echelon"), (*TORCHRUN, "2", program, "torchrun"))
    want = plain(pytorch_raw.build_model(), pytorch_raw.batches(), epochs=pytorch_raw.EPOCHS)
    for name in ("echelon", "torchrun"):
        for rank in range(2):
            for parameters in torch.load(tmp_path / name / f"rank{rank}.pt"):
                assert largest_difference(parameters, want) < 1e-12, (name, rank)


@pytest.mark.full
def test_lightnings_trainer_with_dp_ddp_and_fsdp(tmp_path: Path) -> None:
    """Each Trainer starts ranks of its own."""
    program = lightning_trainer
    [said] = run(tmp_path, (str(PROGRAMS / "lightning_trainer.py"), "out.pt"))
    want = plain(program.build_module(), in_order(program.dataset(), 8), epochs=program.EPOCHS)
    trained = torch.load(tmp_path / "out.pt")
    cpu = not torch.cuda.is_available()
    for name, (prepared, elsewhere, steps, parameters) in trained.items():
        kind = "DP" if name == "dp" else "FSDP" if "fsdp" in name else "DDP"
        assert prepared == ("Prepared" if name == "dp" and cpu else f"{kind}Prepared") and elsewhere == (name != "dp")
        assert steps == 10 and largest_difference(parameters, want) < 1e-12, name
    assert trained.keys() == {**program.OLDER, **program.NEWER}.keys() and "write strategy='fsdp'" in said


def test_dragons_page_without_dragon(tmp_path: Path) -> None:
    [said] = run(tmp_path, (str(PROGRAMS / "dragon_training.py"),))
    check_dragon_training(said, shown=[0])


# --- FairScale


@pytest.mark.full
def test_fairscales_pair_with_a_checkpoint_wrapper_and_a_scaler_under_spawn(tmp_path: Path) -> None:
    with_scaler = fairscale_checkpoint_scaler
    run(tmp_path, (str(PROGRAMS / "fairscale_checkpoint_scaler.py"), "2", str(tmp_path)))
    everyones = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    model = with_scaler.CheckpointModel(wrapped=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale, scales, since = 2.0**10, [], 0
    for step, both in enumerate(zip(with_scaler.batches(0), with_scaler.batches(1), strict=True)):
        optimizer.zero_grad()
        for rank, (data, target) in enumerate(both):  # the same dropout and the same scaling as on the ranks
            torch.manual_seed(100 * step + rank)
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(data)
            (nn.functional.mse_loss(output.float(), target) / 2 * scale).backward()
        if step == 1:
            scale, since = scale / 2, 0
        else:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            optimizer.step()
            since += 1
            scale, since = (scale * 2, 0) if since == 4 else (scale, since)
        scales.append(scale)
    for values, seen in everyones:
        assert largest_difference(values, model.state_dict()) <= 1e-6
        assert seen == scales
