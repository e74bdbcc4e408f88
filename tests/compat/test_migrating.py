"""What differs from other libraries (docs/moving), row by row: each is tried as a program.

A row has the test named here or one of migrating_rows, and is found by its first words. A new row fails until it has a test,
and so does a name that is no test any more. The rows of Lightning and of Hugging Face have tests in their own files.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import migrating_rows
from tests.compat.migrating_rows import ALONE, TOGETHER
from tests.conftest import Ranks

TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"
PAGES = [DOCS / name for name in ("moving/fairscale.md", "moving/torchtnt.md", "moving/nntool.md", "dragon.md")]
SECTIONS = ("In echelon's own names", "What differs", "What is not here")

IMPORTS, NOT_THERE = "compat/test_migrating.py::test_import_lines", "compat/test_migrating.py::test_what_is_not_there"
DDP, OSS = "compat/test_fairscale_ddp.py", "compat/test_fairscale_oss.py"
FSDP, LOCAL = "compat/test_fairscale_fsdp.py", "compat/test_fairscale_local.py"
BY_HAND = "compat/test_torchtnt_by_hand.py"
LOOP, CONTROL, WATCH = "loop/test_loop.py", "loop/test_callbacks_control.py", "loop/test_callbacks_watch.py"
PROCESS, LOGGERS, SAVED = "loop/test_callbacks_process.py", "observe/test_loggers.py", "compat/test_torchtnt_checkpoints.py"
RANKS, PREPARE = "compat/test_torchtnt_distributed.py", "compat/test_torchtnt_prepare.py"
TIMERS, TOOLS, SHAPES = "compat/test_torchtnt_timers.py", "compat/test_torchtnt_tools.py", "compat/test_torchtnt_shapes.py"
CALLS, NNTOOL, ON_SLURM = "launcher/test_slurm_fn.py", "compat/test_nntool.py", "slurm/test_slurm_fn.py"
GROUP = "launcher/test_group.py"

TESTED: dict[str, str] = {
    # FairScale
    "`from fairscale.": IMPORTS,
    "`optimizer.zero_grad()` and ShardedDataParallel's defaults": f"{DDP}::test_ten_updates_give_what_one_process_gives",
    "after a backward pass other ranks keep a stale view": f"{DDP}::test_gradients_are_freed_on_ranks_that_do_not_own_them",
    "two backward passes before a step": f"{DDP}::test_accumulation_in_every_way",
    "a step, or `clip_grad_norm`, after `no_sync` alone": f"{DDP}::test_accumulation_in_every_way",
    "a parameter that one rank does not use": f"{DDP}::test_parameters_used_on_one_rank_only_or_never",
    "`OSS.state_dict()` after further steps": f"{OSS}::test_state_is_the_plain_optimizers_and_goes_to_any_number_of_ranks",
    "`OSS.load_state_dict(state)` empties": f"{OSS}::test_state_is_the_plain_optimizers_and_goes_to_any_number_of_ranks",
    "the ranks of FullyShardedDataParallel start": f"{FSDP}::test_fsdp_trains_what_one_process_trains",
    "weights shared by modules in wrappers": f"{LOCAL}::test_weights_that_wrappers_would_share_are_refused",
    "`local_state_dict` has equal parts": f"{LOCAL}::test_local_state_dicts_come_back_and_make_the_whole",
    "two forward passes of FullyShardedDataParallel": f"{LOCAL}::test_a_second_backward_after_two_forwards_is_torchs_error",
    "ShardedGradScaler is switched off on CPUs": "compat/test_fairscale.py::test_the_scaler_works_without_a_group",
    "`optim.layerwise_gradient_scaler`": NOT_THERE,
    "`optim.AdaScale`": NOT_THERE,
    "`nn.FlattenParamsWrapper`": NOT_THERE,
    "`nn.checkpoint.is_checkpointing`": NOT_THERE,
    "`nn.data_parallel.TrainingState`": NOT_THERE,
    "FSDP's `append_shared_param`": f"{LOCAL}::test_what_is_left_out_says_what_to_take",
    "`nn.Pipe`": NOT_THERE,
    "`nn.model_parallel`": NOT_THERE,
    "`nn.MOELayer`": NOT_THERE,
    "`experimental.nn.data_parallel": NOT_THERE,
    "`optim.Adam`": NOT_THERE,
    "`experimental.nn.OffloadModel`": NOT_THERE,
    "OSS's `partition_parameters`": f"{OSS}::test_norms_names_options_and_errors",
    "FSDP's `gather_full_optim_state_dict` over several": f"{FSDP}::test_fsdps_options_and_what_has_a_successor",
    # TorchTNT
    "`from torchtnt.": IMPORTS,
    "`TorchSnapshotSaver(...)`": "compat/test_torchtnt_callbacks.py::test_savers_save_and_restore",
    "an AutoUnit without a strategy trains": (
        "loop/test_auto.py::test_several_ranks_without_a_layout_and_with_one_for_a_wrapped_module_are_refused"
    ),
    "the last, shorter window of an accumulation": "loop/test_window.py::test_ranks_equal_one_process_and_plain_pytorch",
    "a mean over ranks of means": "loop/test_window.py::test_ranks_equal_one_process_and_plain_pytorch",
    "`stop()` and `max_steps` in mid-epoch": f"{LOOP}::test_max_steps_counts_the_epochs_that_are_whole",
    "`fit` evaluates after `stop()`": f"{LOOP}::test_a_stop_ends_after_the_step_and_runs_no_evaluation",
    "without `max_epochs` and `max_steps`": f"{LOOP}::test_training_without_an_end_must_be_asked_for",
    "`max_steps` closes the epoch": f"{LOOP}::test_fit_that_max_steps_ends_is_evaluated_at_its_end",
    "`SWAParams` counts micro-batches": "loop/test_averaged.py::test_updates_are_counted_and_not_micro_batches",
    "a loss that is nan trains on": "loop/test_finite.py::test_ten_in_a_row_end_the_run_and_name_the_first",
    "a batch read ahead can be lost": "compat/test_torchtnt_defects.py::test_no_batch_is_lost_or_leaks",
    "a second `predict` of a unit": f"{LOOP}::test_predict_runs_as_often_as_it_is_called_and_test_is_a_phase_of_its_own",
    "the same dropout on all data-parallel ranks": (
        "parallel/test_activation.py::test_dropout_differs_between_data_parallel_ranks"
    ),
    "a Ctrl-C calls no `on_exception`": f"{LOOP}::test_whatever_ends_a_run_is_told_and_leaves_modules_in_their_mode",
    "`EarlyStopping`: a missing attribute": f"{CONTROL}::test_rank_0_decides_and_all_ranks_remember_the_same",
    "`GarbageCollector`, `PyTorchProfiler`": f"{PROCESS}::test_garbage_collection_is_on_again",
    "`GarbageCollector` refuses": f"{PROCESS}::test_an_interval_of_no_steps_is_refused",
    "`ModuleSummary` sees": f"{WATCH}::test_a_summary_is_of_the_whole_module_and_changes_nothing_under_any_strategy",
    "A callback that may call `state.stop()`": f"{CONTROL}::test_only_what_may_stop_costs_a_message_between_ranks_at_each_step",
    "`CSVLogger` appends": f"{LOGGERS}::test_what_a_process_leaves_is_whole",
    "With `log_all_ranks` each rank": f"{LOGGERS}::test_rank_0_writes_or_each_rank_its_own_file",
    "Numbers on a GPU are read": f"{LOGGERS}::test_a_number_on_a_gpu_is_read_when_rows_are_written",
    "What TorchTNT's own `DistributedCheckpointSaver` wrote": f"{SAVED}::test_what_torchtnt_wrote_is_refused_with_what_reads_it",
    "Parameters and optimizer state are by name": (
        "checkpoint/test_checkpoint_matrix.py::test_every_strategy_and_size_reads_what_every_other_wrote"
    ),
    "In the middle of an accumulation window a save": f"{SAVED}::test_a_save_waits_for_the_end_of_a_window",
    "A metric of 0.0 is a metric": f"{SAVED}::test_odd_metrics_are_one_part_of_a_name",
    "With `best_checkpoint_config` a run that a signal stops": (
        "launcher/test_preempt.py::test_the_number_of_the_last_checkpoint_is_known_once_its_evaluation_was_made"
    ),
    "A script that is started again in the same folder": f"{SAVED}::test_a_run_from_the_beginning_does_not_mix_with_another",
    "In `evaluate` and `predict` nothing": f"{SAVED}::test_evaluations_and_predictions_save_nothing",
    "`KnobOptions` and the storage options": "compat/test_torchtnt_callbacks.py::test_what_has_no_effect_is_said",
    "An asynchronous save deletes": f"{SAVED}::test_asynchronous_saves_remove_the_old_when_the_new_is_whole",
    '`init_from_env(dist_init_method_type="tcp")`': f"{RANKS}::test_several_ranks_meet_by_every_method",
    "`get_file_init_method()`": f"{RANKS}::test_several_ranks_meet_by_every_method",
    "a half-set environment is a warning": "world/test_init.py::test_a_half_set_environment_is_refused_before_anything_starts",
    "`all_gather_tensors` wants": f"{RANKS}::test_what_ranks_tell_each_other",
    "`spawn_multi_process` sets no RANK": f"{RANKS}::test_spawn_multi_process_gives_each_ranks_value_and_sets_its_rank",
    "`copy_data_to_device(data, device, stream)`": f"{RANKS}::test_a_stream_is_told_of_data_however_deep",
    "`prepare_fsdp` gives the older": f"{PREPARE}::test_modules_prepared_by_hand_train_what_one_process_trains",
    '`"fsdp2"` is always an error': (
        "parallel/test_strategies.py::test_shards_stay_on_a_machine_and_there_are_two_copies_at_least"
    ),
    "a module on the meta device": (
        "parallel/test_materialize.py::test_every_strategy_gives_the_values_of_a_plain_build_and_trains"
    ),
    "`DDPStrategy(process_group=": (
        "compat/test_torchtnt_defects.py::test_a_strategy_takes_groups_and_states_that_cannot_be_copied"
    ),
    "`AveragedModel(use_lit=True)`": f"{PREPARE}::test_averages_go_on_after_a_resume",
    "`get_checkpoint_dirpaths` gives": f"{PREPARE}::test_checkpoints_of_a_run_are_found",
    "`CudaDataPrefetcher` makes": f"{TOOLS}::test_the_prefetcher_gives_every_batch_on_the_gpu",
    "`train(..., timer=...)` records": f"{SHAPES}::test_a_timer_has_the_stages_of_an_auto_units_step",
    "`Timer()` does not wait": f"{TIMERS}::test_waiting_for_a_gpu_needs_one",
    "`FlopTensorDispatchMode` and": f"{TOOLS}::test_operations_are_counted_by_submodule",
    "A module summary counts a shared": f"{WATCH}::test_looking_changes_nothing",
    "A unit is what inherits from one": f"{SHAPES}::test_a_unit_by_shape_needs_no_base_class",
    "The log has, of TorchTNT's lines": f"{SHAPES}::test_the_log_has_the_timers_table_and_how_far_a_run_came",
    "`SWAParams(use_in_evaluation=True)`": "loop/test_averaged.py::test_evaluations_use_the_averages_if_asked_to",
    "A hook that a program calls itself": f"{BY_HAND}::test_callbacks_by_hand",
    '`MixedPrecision(reduce_dtype="fp32")` reduces': f"{PREPARE}::test_names_become_strategies_and_types",
    # nntool
    "`from nntool.": IMPORTS,
    '`main[config](x)` in mode "run"': f"{NNTOOL}::test_the_mode_run_gives_the_functions_value",
    '... in mode "local"': f"{NNTOOL}::test_the_mode_local_has_ended_when_the_call_returns",
    '`config.mode = "local"`': f"{NNTOOL}::test_a_config_can_be_changed_and_is_checked_when_it_is_used",
    "`job.job_id`": f"{NNTOOL}::test_the_mode_local_has_ended_when_the_call_returns",
    "with several nodes the launch command": f"{ON_SLURM}::test_the_page_of_nntool_trains_what_one_process_trains",
    "`job.result()` of a launch command": f"{ON_SLURM}::test_the_page_of_nntool_trains_what_one_process_trains",
    "a second such call in one script": f"{ON_SLURM}::test_the_page_of_nntool_trains_what_one_process_trains",
    "the command is a line of shell": f"{CALLS}::test_a_launch_command_is_words_in_which_five_names_mean_something",
    "an unknown mode runs": f"{NNTOOL}::test_a_config_can_be_changed_and_is_checked_when_it_is_used",
    "jobs run the code as it is": f"{CALLS}::test_the_copy_of_the_code_has_no_runs_in_it",
    "`setup` has no effect": f"{CALLS}::test_the_script_is_what_the_config_says_and_a_name_is_a_name",
    "a multi-task job's `result()`": f"{ON_SLURM}::test_every_rank_of_two_nodes_gives_its_value",
    "a failure is submitit's": f"{ON_SLURM}::test_the_first_failing_ranks_own_exception_arrives",
    "`output_folder` gets": f"{NNTOOL}::test_the_mode_local_has_ended_when_the_call_returns",
    # Dragon
    "`from dragon.": IMPORTS,
    '`if __name__ == "main":`': "compat/test_programs.py::test_dragons_page_without_dragon",
    '"Loading training data: coming soon"': "compat/test_programs.py::test_dragons_page_without_dragon",
    "`policies=None` and `[]`": f"{GROUP}::test_without_policies_there_is_a_rank_per_core",
    "`env://` and `init_from_env`": f"{GROUP}::test_a_group_meets_as_dragons_page_does_it",
    "a failure is `exit codes: [1]`": f"{GROUP}::test_a_failing_ranks_own_traceback_arrives_and_close_closes",
    "no values come back": f"{GROUP}::test_a_group_meets_as_dragons_page_does_it",
}


Row = tuple[str, list[str]]


def rows_of(page: Path) -> list[Row]:
    """(first words, cells) of every row of a table and every item of a list, in the sections of what differs."""
    found: list[Row] = []
    section, lines = "", page.read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif not section.startswith(SECTIONS):
            continue
        elif line.startswith("- "):
            found.append((line.removeprefix("- "), []))
        elif line.startswith("| ") and not following.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append((cells[0], cells))
    return found


def rows() -> list[Row]:
    return [row for page in PAGES for row in rows_of(page)]


def test_every_row_has_one_test() -> None:
    known = [*TESTED, *{*ALONE, *TOGETHER}]
    wrong = {first: keys for first, _ in rows() if len(keys := [key for key in known if first.startswith(key)]) != 1}
    assert wrong == {}
    assert [key for key in known if not any(first.startswith(key) for first, _ in rows())] == []
    assert len(rows()) > 140


@functools.cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.full
def test_every_named_test_is_there() -> None:
    for named in TESTED.values():
        file, _, test = named.partition("::")
        assert test in functions_of(file), named


@pytest.mark.full
def test_rows_as_programs_in_one_process() -> None:
    assert migrating_rows.failures(ALONE) == []


@pytest.mark.full
@pytest.mark.standing_ranks
def test_rows_as_programs_on_two_ranks(ranks: Ranks) -> None:
    assert ranks(2, migrating_rows.failures, TOGETHER) == [[], []]


def test_import_lines() -> None:
    """Every import in a table, the old ones with the name changed; and what "..." stands for is left out."""
    tried = 0
    for _, cells in rows():
        for line in (line for cell in cells for line in re.findall(r"`(from [a-z][\w.]* import [^`]+)`", cell)):
            _, module, _, names = line.split(" ", 3)
            root = module.partition(".")[0]
            if root not in ("echelon", "torch"):
                module = f"echelon.compat.{module}"
            for name in names.split(", "):
                if name != "...":
                    found: Any = importlib.import_module(module)
                    assert hasattr(found, name), f"{module} has no {name}"
                    tried += 1
    assert tried > 50


def test_what_is_not_there() -> None:
    table = PAGES[0].read_text().partition("## What is not here")[2]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert migrating_rows.not_there([(names.strip(), instead.strip()) for names, instead in lines]) == []
