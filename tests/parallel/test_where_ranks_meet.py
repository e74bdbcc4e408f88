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
    "AnyRanksLater", "any_rank", "any_ranks", "any_ranks_and_number", "fail_together", "first_not_none", "from_one", "from_rank0",
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
STAGES = "test_a_fault_in_a_stage_is_told_of_its_own_rank"
REASONS = {
    ALIKE: "CutShort.__init__ Run._agree_to_stop Run._end_training Run._evaluation_epoch",
    ASKED: "Pipeline._compare Pipeline._studied SameGradients.settle Walk._move to_all _Weights._on_rank0 _over",
    CALLED: "Mean.compute _Sum.forward _Weights.__init__ _Weights._refuse _Weights.gather _needed _over_ranks whole",
    FORM: (
        "Buffers._agree Buffers._send DataAxes.find_replicas Shared.equalize Update._take_parameters "
        "_fill_divided _grid check_equal cut_into_stages equalize"
    ),
    LEFT_OUT: "_Reduction.__init__",
    LOCAL: "distribute_experts fill_in install",
    PASSES: (
        "Dispatch.__call__ TreeReduceScatter.__call__ _Averaged.backward _Whole.backward "
        "_Whole.forward _all _in_chunks _own_of_sum _softmax _sum _whole _words_of gathered_copy probe reduce_bucket"
    ),
    STAGES: "Pipeline.window Walk._on_all",
    STATE: (
        "FSDP1OptimizerState._complete Frozen.leave_out OptimizerState._of_all_stages OptimizerState.state_dict "
        "_differing _facts _of_all_stages _others _put differs_by_rank"
    ),
    STEPS: (
        "BitEqual.begin ContextParallel._check_weight ContextParallel.check_parts Partition._after Pipeline._outputs "
        "Pipeline._told RollBack._go_back RollBack.on_train_step_end Run._agree_on_agreeing Run._leaves "
        "RunFolder.take SameGradients.__init__ Timetable.affords_one Timetable.is_due Update.estimate "
        "WorkerPrepared.after_step _averages _can_compare check_counted check_same_loss check_separate check_tracked "
        "look_at_first_update.look number warn_of_same_samples"
    ),
    TOLD: (
        "Logged.end_phase Partition._take Partition.refresh Pipeline._settled Run._settle_doubts SameTrained.begin_epoch "
        "Run.once SameTrained.compare _Reduction.wait Steps.__init__ _refuse_other_models on_end on_limits"
    ),
    "test_a_checkpoint_that_one_rank_sees_otherwise_is_told_to_all": "check kept_global_batch",
    "test_a_gradient_on_one_of_the_ranks_that_share_layers_is_told_on_all": "check_whole_layers",
    "test_a_layer_that_each_rank_drew_for_itself_is_refused": "_agree_on_streams",
    "test_a_line_search_decides_by_the_loss_of_all_ranks": "_MeanLoss.__call__",
    "test_a_nan_on_one_rank_is_named_on_all_and_reaches_no_parameter": "FiniteWatch._whose check_loss",
    "test_a_number_of_some_ranks_only_or_of_none_is_refused_on_all": "_gathered",
    "test_a_rank_may_leave_a_scalar_out": "_mean",
    "test_a_rank_that_draws_for_itself_is_found_where_dropout_would_differ": "SameDraws.check_now",
    "test_a_rank_whose_experts_have_no_tokens_computes_nothing_and_waits_for_nobody": "_exchange",
    "test_a_stage_without_anything_for_its_optimizer_is_refused_on_all_ranks": "ParallelPrepared.optimizer",
    "test_a_unit_that_differs_on_one_rank_is_an_error_on_all": "DistributedCheckpointSaver.save",
    "test_a_value_that_the_ranks_of_a_sequence_have_otherwise_is_told_to_all": "_check_alike",
    "test_an_auxiliary_loss_that_one_rank_forgets_is_told_on_all": "Routers._balance",
    "test_an_evaluation_may_have_fewer_samples_than_there_are_ranks": "LoopEvaluation.end",
    "test_copies_of_a_tied_weight_stay_equal_where_one_is_frozen": "Shared.sum_gradients",
    "test_evaluations_that_mix_blocks_are_refused": "SameCalls.evaluated",
    "test_of_the_last_update_they_are_told_at_the_end": "SameCalls.settle",
    "test_other_numbers_of_batches_are_told_to_all": "Window._compare_batches",
    "test_other_shapes_are_refused_on_all_ranks": "_rows",
    "test_ranks_have_the_same_buffers_when_training_has_ended": "DDPPrepared.before_evaluation",
    "test_ranks_of_the_same_samples_are_told_of_other_rows": "ParallelPrepared._compare",
    "test_ranks_that_call_other_blocks_are_told_before_the_update": "SameCalls._compare",
    "test_ranks_that_each_train_a_model_of_their_own_are_told": "_warn_of_own_models",
    "test_ranks_that_have_changed_their_copies_each_in_its_own_way_are_told_once": "_compare",
    "test_ranks_with_gradients_of_other_parameters_are_told_after_the_update": "_EquallyMany.__call__",
    "test_steps_that_do_not_make_an_update_are_refused_on_all_ranks": "Several._meet",
    "test_the_numbers_of_a_run_are_the_same_on_another_number_of_ranks": "Logged.joined _join_own",
    "test_uneven_rows_come_in_the_order_of_ranks": "_Gathered.forward gathered_rows",
    "test_what_a_pipeline_cannot_do_is_refused_on_all_ranks": "ParallelPrepared.forward_backward_window",
    "test_what_cannot_be_kept_is_refused_at_the_first_save": "further_state",
    "test_what_each_rank_keeps_for_itself_goes_on": "_kept_apart",
    "test_what_cannot_be_prepared_is_refused_on_all_ranks": "_unit",
    "test_what_one_rank_alone_does_is_told_on_all": "Watches.compare",
}
PLACES = {place: why for why, places in REASONS.items() for place in places.split()}


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
