"""Every place of parallel/ and loop/ at which ranks meet, and what sends ranks of other local states into it.

A rank that comes to such a place alone waits for ever, or is paired with ranks that are elsewhere. So each place has a test in
which ranks stand differently, or the reason why what brings a rank there is alike on all. Whoever adds one adds its line here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon

ROOMS = [Path(echelon.__file__).parent / room for room in ("parallel", "loop", "compat/trainer")]
AGREE = {
    "AnyRanksLater", "any_rank", "any_ranks", "any_ranks_and_number", "fail_together", "first_told", "from_one", "from_rank0",
    "gather", "is_same", "kinds", "raise_on_all", "same_on_all", "unless_same",
}  # fmt: skip
DIST = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
    "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "split_group",
}  # fmt: skip
OTHERS = {
    "all_gather_single", "distribute_tensor", "full_tensor", "init_device_mesh", "redistribute", "reduce_scatter_single",
}  # fmt: skip

# Why a rank cannot stand differently there.
FORM = "by the module's form and settings alone, which all ranks compare as they are made: test_all_ranks_are_told_the_same"
LOCAL = "no message: each rank takes its part of what it has whole"
STATE = "by the form of the state, as it is saved or read on all ranks; what is missing on one is told before"
ASKED = "in answer to a message that all ranks have just had"
CALLED = "the user's own call: ranks that do not all make it are ended, and the launcher names their lines"
PASSES = "in a pass of the user's model: ranks that leave it out are ended, and the launcher names their lines"
STEPS = "in all ranks' steps alike, since their limits, lengths and ends are agreed: test_all_ranks_are_told_the_same"

TOLD = "test_all_ranks_are_told_the_same"
ALIKE = "test_all_ranks_go_on_alike"
LEFT_OUT = "test_a_batch_that_one_rank_leaves_out_ends_all"
SAVES = "test_a_full_disk_on_one_rank_is_told_to_all_and_training_goes_on"
STAGES = "test_a_fault_in_a_stage_is_told_of_its_own_rank"
PLACES = {
    # loop
    "BitEqual.begin": STEPS,
    "CutShort.__init__": ALIKE,
    "DistributedCheckpointSaver.save": "test_a_unit_that_differs_on_one_rank_is_an_error_on_all",
    "FiniteWatch._whose": "test_a_nan_on_one_rank_is_named_on_all_and_reaches_no_parameter",
    "Frozen.leave_out": STATE,
    "Logged.end_phase": TOLD,
    "LoopEvaluation.end": "test_an_evaluation_may_have_fewer_samples_than_there_are_ranks",
    "Mean.compute": CALLED,
    "RollBack._go_back": STEPS,
    "RollBack.on_train_step_end": STEPS,
    "Run._agree_on_agreeing": STEPS,
    "Run._agree_to_stop": ALIKE,
    "Run._end_training": ALIKE,
    "Run._evaluation_epoch": ALIKE,
    "Run._leaves": STEPS,
    "Run._settle_doubts": TOLD,
    "RunFolder.take": STEPS,
    "Several._meet": "test_steps_that_do_not_make_an_update_are_refused_on_all_ranks",
    "Timetable.affords_one": STEPS,
    "Timetable.is_due": STEPS,
    "_Weights.__init__": CALLED,
    "_Weights._on_rank0": ASKED,
    "_Weights._refuse": CALLED,
    "_Weights.gather": CALLED,
    "Window._compare_batches": "test_other_numbers_of_batches_are_told_to_all",
    "Update.estimate": STEPS,
    "_MeanLoss.__call__": "test_a_line_search_decides_by_the_loss_of_all_ranks",
    "_Reduction.__init__": LEFT_OUT,
    "_Reduction.wait": TOLD,
    "_differing": STATE,
    "_facts": STATE,
    "_gathered": "test_a_number_of_some_ranks_only_or_of_none_is_refused_on_all",
    "_load_own": STATE,
    "_needed": CALLED,
    "_over": ASKED,
    "_unit": "test_what_cannot_be_prepared_is_refused_on_all_ranks",
    "_warn_of_drift": "test_ranks_that_have_changed_their_copies_each_in_its_own_way_are_told_once",
    "check": "test_a_checkpoint_that_one_rank_sees_otherwise_is_told_to_all",
    "check_loss": "test_a_nan_on_one_rank_is_named_on_all_and_reaches_no_parameter",
    "check_tracked": STEPS,
    "differs_by_rank": STATE,
    "kept_global_batch": "test_a_checkpoint_that_one_rank_does_not_see_is_told_to_all",
    "look_at_first_update.look": STEPS,
    "number": STEPS,
    "on_calls": TOLD,
    "on_end": TOLD,
    "on_lengths": TOLD,
    "on_limits": TOLD,
    "warn_of_same_samples": STEPS,
    # parallel: before training
    "ParallelPrepared._compare": "test_ranks_of_the_same_samples_are_told_of_other_rows",
    "Buffers._agree": FORM,
    "Buffers._send": FORM,
    "ParallelPrepared.optimizer": "test_a_stage_without_anything_for_its_optimizer_is_refused_on_all_ranks",
    "Prepared.find_replicas": FORM,
    "Partition._take": TOLD,
    "ParallelPrepared.forward_backward_window": "test_what_a_pipeline_cannot_do_is_refused_on_all_ranks",
    "Shared.equalize": FORM,
    "_agree_on_streams": "test_a_layer_that_each_rank_drew_for_itself_is_refused",
    "_broadcast": FORM,
    "_fill_divided": FORM,
    "_grid": FORM,
    "_put": STATE,
    "_refuse_other_models": TOLD,
    "_whole_copy": PASSES,
    "check_equal": FORM,
    "cut_into_stages": FORM,
    "distribute_experts": LOCAL,
    "equalize": FORM,
    "fill_in": LOCAL,
    "install": LOCAL,
    "part_like": LOCAL,
    "prepare_networks": FORM,
    # of parts of sequences
    "ContextParallel._check_weight": STEPS,
    "ContextParallel.check_parts": STEPS,
    "_can_compare": STEPS,
    "_check_alike": "test_a_value_that_the_ranks_of_a_sequence_have_otherwise_is_told_to_all",
    "check_separate": STEPS,
    "_Whole.backward": PASSES,
    "_Whole.forward": PASSES,
    "probe": PASSES,
    # in an update
    "Dispatch.__call__": PASSES,
    "Partition._after": STEPS,
    "Partition.refresh": TOLD,
    "Routers._balance": "test_an_auxiliary_loss_that_one_rank_forgets_is_told_on_all",
    "SameCalls._compare": "test_ranks_that_call_other_blocks_are_told_before_the_update",
    "SameCalls.evaluated": "test_evaluations_that_mix_blocks_are_refused",
    "SameCalls.settle": "test_of_the_last_update_they_are_told_at_the_end",
    "SameDraws.check_now": "test_a_rank_that_draws_for_itself_is_found_where_dropout_would_differ",
    "SameGradients.__init__": STEPS,
    "SameGradients.settle": ASKED,
    "SameTrained.begin_epoch": TOLD,
    "SameTrained.compare": TOLD,
    "TreeReduceScatter.__call__": PASSES,
    "Watches._differs": ASKED,
    "Watches.compare": "test_what_one_rank_alone_does_is_told_on_all",
    "WorkerPrepared.after_step": STEPS,
    "_Chunks.gradients": PASSES,
    "_EquallyMany.__call__": "test_ranks_with_gradients_of_other_parameters_are_told_after_the_update",
    "_all": PASSES,
    "_averaged": PASSES,
    "_averages": STEPS,
    "_exchange": "test_a_rank_whose_experts_have_no_tokens_computes_nothing_and_waits_for_nobody",
    "_mean": "test_a_rank_may_leave_a_scalar_out",
    "_over_ranks": CALLED,
    "_own_of_sum": PASSES,
    "_softmax": PASSES,
    "_sum": PASSES,
    "_whole": PASSES,
    "_words_of": PASSES,
    "_SameOnAll.backward": PASSES,
    "check_same_loss": STEPS,
    "check_whole_layers": "test_a_gradient_on_one_of_the_ranks_that_share_layers_is_told_on_all",
    "reduce_bucket": PASSES,
    "whole": CALLED,
    # of scripts
    "_Gathered.forward": "test_uneven_rows_come_in_the_order_of_ranks",
    "_Sum.forward": CALLED,
    "_rows": "test_other_shapes_are_refused_on_all_ranks",
    "gathered_rows": "test_uneven_rows_come_in_the_order_of_ranks",
    # in stages
    "Pipeline._agreed": TOLD,
    "Pipeline._compare": ASKED,
    "Pipeline._of_other_shapes": ASKED,
    "Pipeline._outputs": STEPS,
    "Pipeline._studied": ASKED,
    "Pipeline._told": STEPS,
    "Pipeline.evaluate": STEPS,
    "Pipeline.window": STAGES,
    "Shared.sum_gradients": "test_copies_of_a_tied_weight_stay_equal_where_one_is_frozen",
    "Walk._move": ASKED,
    "Walk._on_all": STAGES,
    "Walk._shared": ASKED,
    # states
    "FSDP1OptimizerState._complete": STATE,
    "OptimizerState._of_all_stages": STATE,
    "OptimizerState.state_dict": STATE,
    "_of_all_stages": STATE,
    "further_state": "test_what_cannot_be_kept_is_refused_at_the_first_save",
}  # fmt: skip


def _places(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        here = inside
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            here = (*inside, child.name)
        if isinstance(child, ast.Call):
            base, _, name = ast.unparse(child.func).rpartition(".")
            if name in OTHERS or (base == "agree" and name in AGREE) or (base == "dist" and name in DIST):
                yield ".".join(inside)
        yield from _places(child, here)


@pytest.mark.full
def test_every_place_at_which_ranks_meet_has_its_test_or_reason() -> None:
    files = [file for room in ROOMS for file in sorted(room.rglob("*.py")) if file.name != "older_torch.py"]
    found = {place: str(file) for file in files for place in _places(ast.parse(file.read_text()))}
    assert {place: file for place, file in found.items() if place not in PLACES} == {}, "ranks meet there: which test sees to it?"
    assert PLACES.keys() - found.keys() == set(), "nobody meets there any more"


def test_the_tests_that_are_named_are_there() -> None:
    sources = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    named = {why.rpartition(": ")[2] for why in PLACES.values() if why.rpartition(": ")[2].startswith("test_")}
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []
