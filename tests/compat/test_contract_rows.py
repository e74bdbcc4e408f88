"""The programs that must run, and the test that runs each: as a program, on real ranks, against one process of plain PyTorch.

A row whose test is renamed or deleted fails here, and so does a program that no test runs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = "slurm.test_slurm_fn.test_the_page_of_nntool_trains_what_one_process_trains"
PROGRAMS, TORCHTNT, FAIRSCALE = "compat.test_programs", "compat.test_torchtnt_callbacks", "compat.test_fairscale_programs"
ON_DRAGON = "launcher.test_group.test_on_dragon_failures_arrive_groups_close_and_the_example_trains"

# (from, program, on) -> the tests, with the cases of a parametrized one behind a colon
ROWS: dict[tuple[str, str, str], list[str]] = {
    ("TorchTNT", "own TrainUnit, init_from_env, DDP or FSDP by hand, prepare_ddp, prepare_fsdp", "2 ranks"): [
        f"{PROGRAMS}.test_a_unit_of_ones_own_wrapped_by_hand_or_by_prepare"
    ],
    ("TorchTNT", "AutoUnit with ddp, DDPStrategy, fsdp, FSDPStrategy; saved and restored", "2 to 1, 2 to 4 ranks"): [
        f"{PROGRAMS}.test_an_auto_unit_is_restored_at_another_world_size"
    ],
    ("TorchTNT", "0.2's digits in an AutoUnit; a GAN with two optimizers in a TrainUnit; all callbacks", "2 ranks"): [
        f"{PROGRAMS}.test_digits_of_torchtnt_02_by_import_change_alone",
        f"{TORCHTNT}.test_two_optimizers_in_a_unit_of_ones_own",
        f"{TORCHTNT}.test_a_program_of_torchtnts_runs_when_its_imports_are_changed",
    ],
    ("nntool", "slurm_fn: one process, DDP, FSDP2 by accelerate launch", "a real Slurm, one node and two"): [
        f"{PAGE}:single",
        f"{PAGE}:ddp",
        f"{PAGE}:ddp-nodes",
        f"{PAGE}:fsdp2",
        f"{PAGE}:fsdp2-nodes",
    ],
    ("Dragon", "CollectiveGroup over System's policies: all_reduce, and training with its data", "Dragon's runtime"): [ON_DRAGON],
    ("Dragon", "the same", "ranks of this machine"): [f"{PROGRAMS}.test_dragons_page_without_dragon"],
    ("FairScale", "OSS and ShardedDataParallel under mp.spawn", "2 ranks"): [f"{FAIRSCALE}.test_oss_and_sharded_ddp_under_spawn"],
    ("FairScale", "a block in checkpoint_wrapper; ShardedGradScaler with autocast", "2 ranks"): [
        f"{FAIRSCALE}.test_checkpoint_wrapper_and_sharded_grad_scaler"
    ],
    ("PyTorch", "nn.DataParallel; DDP with init_method env://", "2 ranks of echelon run, and of torchrun"): [
        f"{PROGRAMS}.test_data_parallel_and_ddp_of_plain_pytorch_under_two_launchers"
    ],
    ("Hugging Face", "Accelerator; Trainer, unchanged and by its import line", "2 ranks"): [
        "compat.test_transformers.test_a_script_of_accelerate_runs_unchanged",
        "compat.test_transformers.test_a_script_of_transformers_runs_unchanged_and_with_its_import_line_changed",
    ],
    ("Lightning", "Trainer with dp, ddp, fsdp", "2 ranks"): [f"{PROGRAMS}.test_lightnings_trainer_with_dp_ddp_and_fsdp"],
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_every_program_has_its_test(row: tuple[str, str, str]) -> None:
    for test in ROWS[row]:
        name, _, case = test.partition(":")
        module, _, function = name.rpartition(".")
        text = (HERE.parent / f"{module.replace('.', '/')}.py").read_text()
        [found] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert not case or repr(case) in "".join(map(ast.unparse, found.decorator_list)), f"{name} has no case {case}"


def test_every_program_is_run() -> None:
    programs = [path for path in [*HERE.glob("programs/[a-z]*.py"), *HERE.glob("torchtnt_*.py")] if path.stem != "__init__"]
    tests = "".join(path.read_text() for path in HERE.parent.rglob("test_*.py"))
    assert len(programs) >= 10
    assert [path.stem for path in programs if f'{path.name}"' not in tests and f'"{path.stem}"' not in tests] == []
