"""The prover proves: it names every mistake of its catalogue in a script that has it, and passes scripts that are right."""

from __future__ import annotations

import collections
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import echelon as ech
from echelon.cli.main import main
from echelon.common.errors import LayoutError, ProveError
from echelon.loop.target import Target
from echelon.parallel.layouts import with_options_of
from echelon.prover import show
from echelon.prover.causes import CAUSES
from echelon.prover.matrix import matrix
from echelon.prover.micro import NotDivisible, NotJoinable, Samples, digest, join, on_host
from echelon.prover.operators import without_narrow_casts
from echelon.prover.proof import (
    IN_FLOAT64,
    IN_PART,
    NOT_ALL_TESTED,
    NOTHING_COMPARED,
    OTHERS_DIFFER,
    YOURS_DIFFERS,
    Difference,
    Result,
    by_float64,
)
from echelon.prover.prove import Proof, prove_target
from tests.conftest import clean_environment
from tests.kit import forked
from tests.kit.refusals import refused

PLANTED = Path(__file__).parents[1] / "planted"

MISTAKES = {
    "missing_all_reduce": ("missing all-reduce", "gradient"),
    "weight_of_a_mask": ("loss weighted per rank", "forward"),
    "weight_of_a_rank": ("loss weighted per rank", "gradient"),
    "same_data": ("identical data on two ranks", None),
    "sampler_without_rank": ("a sampler that ignores the rank", None),
    "same_dropout": ("identical random numbers", None),
    "buffers_apart": ("unsynchronised buffers", "forward"),
    "stale_optimizer": ("an untracked or stale optimizer parameter", None),
    "stale_optimizer_auto": ("an untracked or stale optimizer parameter", "update"),
    "batch_norm": ("batch norm over the local batch", "forward"),
    "summed_gradients": ("a wrong scale", "gradient"),
    "initial_values_apart": ("different initial parameters", "forward"),
    "learning_rates_apart": ("another learning rate", None),
    "rate_of_a_shard": ("another learning rate", "update"),
    "noise_on_a_shard": ("a change on one rank's shard", "update"),
    "clipping_in_a_window": ("gradients changed in the middle of an update", "gradient"),
    "noise_on_parameters": ("parameters that drift apart", None),
    "noise_after_the_step": ("parameters that drift apart", "update"),
    "noise_on_gradients": ("gradients that each rank changes", None),
    "another_learning_rate": ("another learning rate", "update"),
    "clipping_on_each_rank": ("clipping on each rank", "gradient"),
    "contrast": ("an operation over the whole batch", "forward"),
    "shared_generator": ("identical random numbers", None),
    "dropout_from_numpy": ("identical random numbers", None),
    "same_augmentation": ("identical augmentation", None),
    "hidden_generator": ("a forward pass that cannot be repeated", "forward"),
    "evaluation_on_a_rank": ("modules in evaluation mode on some ranks", None),
    "loss_by_rank": ("a loss that depends on the rank", "forward"),
    "class_weights_with_dropout": ("loss weighted per rank", "forward"),
    "weight_of_a_drawn_mask": ("loss weighted per rank", "forward"),
    "weights_of_noise_levels": ("loss weighted per rank", "forward"),
    "batch_norm_with_dropout": ("batch norm over the local batch", "forward"),
    "contrast_with_noise": ("an operation over the whole batch", "forward"),
    "tokens_of_padded_batches": ("loss weighted per rank", None),
    "tokens_of_a_loop": ("loss weighted per rank", None),
    "samples_by_rank": ("samples that depend on the rank", None),
    "own_order": ("samples that ranks share", None),
    "same_worker_seeds": ("identical augmentation", None),
    "same_masks_of_a_collator": ("identical augmentation", None),
    "rows_of_a_seed": ("samples that depend on the rank", None),
    "files_of_a_rank": ("samples that depend on the rank", None),
    "gathered_without_gradient": ("collectives without a gradient", "gradient"),
    "gathered_and_detached": ("collectives without a gradient", "gradient"),
    "labels_of_a_gather": ("a loss of what ranks send each other", "forward"),
    "root_of_a_batch": ("an operation over the whole batch", "forward"),
    "sum_under_clipping": ("loss weighted per rank", "forward"),
    "same_worker_init": ("identical augmentation", None),
    "same_generator_of_workers": ("identical augmentation", None),
    "hardest_of_a_shuffle": ("an operation over the whole batch", "forward"),
    "hardest_later": ("an operation over the whole batch", None),
    "hardest_boxes_later": ("an operation over the whole batch", None),
    "boxes_of_a_batch": ("loss weighted per rank", "forward"),
    "weights_of_a_clipped_loop": ("an operation over the whole batch", "forward"),
    "hook_of_a_rank": ("gradients that each rank changes", "gradient"),
    "baseline_of_a_loop": ("the forward pass keeps state", "forward"),
    "threshold_of_a_rank": ("the forward pass keeps state", None),
    "teacher_by_samples": ("the forward pass keeps state", None),
    "baseline_of_a_rank": ("the forward pass keeps state", None),
    "norms_of_a_shard": ("an optimizer that computes with its shard alone", "update"),
    "step_by_world_size": ("another step of the optimizer", "update"),
    "scale_of_the_first_batch": ("the forward pass keeps state", "forward"),
    "samples_counted_by_a_rank": ("the forward pass keeps state", "forward"),
    "mean_of_a_rank": ("the forward pass keeps state", "forward"),
    "queue_in_slots": ("the forward pass keeps state", None),
    "scale_limited_in_a_window": ("the forward pass keeps state", "forward"),
    "order_of_a_set": ("samples that depend on the rank", None),
    "samples_by_count": ("samples that depend on the rank", None),
    "clamped_gradients": ("gradients that each rank changes", "gradient"),
    "split_without_a_seed": ("an RNG without a seed", None),
    "projection_without_a_seed": ("an RNG without a seed", "forward"),
    "one_norm_of_a_batch": ("an operation over the whole batch", "forward"),
    "balanced_by_a_batch": ("an operation over the whole batch", "gradient"),
    "mean_over_padded_places": ("an operation over the whole batch", None),
    "mean_over_padded_places_longest_first": ("an operation over the whole batch", None),
    "mean_over_padded_places_of_a_stream": ("an operation over the whole batch", None),
    "spread_of_a_critic": ("an operation over the whole batch", "forward"),
    "covariance_of_a_rank": ("parameters that drift apart", None),
}
# What is said of where a cause was seen.
SEEN = {
    "norms_of_a_shard": "0.weight, which is split over the ranks",
    "scale_of_the_first_batch": "sets the parameter 3.scale",
    "samples_counted_by_a_rank": "weight differs from one process: 8 on every rank, 16 in one process",
    "mean_of_a_rank": "centred.mean is not the same on all ranks",
    "scale_limited_in_a_window": "update 0, a later micro-batch: rank 0",
    "threshold_of_a_rank": "usual is not the same on all ranks",
    "teacher_by_samples": "differs from one process",
    "queue_in_slots": "script.queue.keys is not the same on all ranks",
    "order_of_a_set": "PYTHONHASHSEED",
    "samples_by_count": "the data set's count changes as samples are read",
}


def _prove(script: str, layouts: list[str], ranks: list[int], updates: int = 3, accumulation: int = 1) -> Proof:
    rows = [row for row in matrix(layouts, ranks, [accumulation], sgd=False) if row.accumulation == accumulation]
    return prove_target(Target(script=str(PLANTED / f"{script}.py")), rows, updates, False)


@pytest.mark.full
def test_padded_batches_whose_steps_speak_to_other_ranks_are_undecided() -> None:
    proof = _prove("gathered_lists", ["ddp"], [2])
    assert [row.verdict for row in proof.results] == ["undecided"] and not proof.holds


@pytest.mark.full
def test_what_padding_adds_is_not_tested_where_padding_draws() -> None:
    proof = _prove("padding_of_random_words", ["ddp"], [2])
    assert [row.verdict for row in proof.results] == [IN_PART] and "what the padding itself adds" in proof.results[0].message


def test_bf16_is_compared_with_one_process_in_bf16() -> None:
    """A right script agrees under every kind of layout; a weight of a rank's own differs there, too."""
    rows = [row for row in matrix(["fsdp"], [1, 2], [1], sgd=False, bf16=True) if row.precision]
    assert [row.label for row in rows] == ["none, bf16", "fsdp, bf16"]
    right, wrong = (
        prove_target(Target(script=str(PLANTED / f"{script}.py")), rows[1:], 2, False).results
        for script in ("right_auto", "weight_of_a_rank")
    )
    assert right[0].is_equal and right[0].verdict != IN_FLOAT64, right
    assert wrong[0].verdict == "DIFFERS" and wrong[0].first is not None and wrong[0].first.tolerance > 1e-3, wrong


@pytest.mark.full
def test_an_own_loop_of_several_optimizers_is_compared_without_accumulation_and_with_its_own_optimizers(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text("""
import torch
from torch import nn
from torch.nn.functional import softplus
import echelon as ech
ech.init_from_env()
torch.manual_seed(3)
g, c = (nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1)) for width in (4, 1))
og, oc = torch.optim.SGD(g.parameters(), 1e-2), torch.optim.SGD(c.parameters(), 1e-2)
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
loader = ech.Loader(torch.utils.data.TensorDataset(x, x[:, :1]), global_batch=16, accumulation=2)
g, c, og, oc, loader = ech.prepare(g, c, og, oc, loader, layout="ddp")
for noise, real in loader:
    with ech.window(g) as window:
        made = g(noise)
        oc.zero_grad()
        window.backward((softplus(-c(real)) + softplus(c(made.detach()))).mean())
        oc.step()
        og.zero_grad()
        window.backward(softplus(-c(made)).mean())
        og.step()
""")
    proof = prove_target(Target(script=str(tmp_path / "gan.py")), matrix(["ddp"], [2], [1], sgd=True, yours=True), 2, True)
    assert [result.verdict for result in proof.results] == ["not possible", "agrees"], proof.results
    assert "with several optimizers and accumulation" in proof.results[0].message


@pytest.mark.full
def test_a_script_that_resumes_is_proved_from_its_beginning(tmp_path: Path) -> None:
    """Its checkpoint is of a complete run, so that nothing would be left to compare; and in float64 its data would be others."""
    text = f"""
import sys
sys.path.insert(0, {str(PLANTED)!r})
from common import Auto, ech, loader, model
unit, batches = Auto(module=model(), layout="ddp"), loader(32)
saver = ech.DistributedCheckpointSaver({str(tmp_path / "checkpoints")!r})
saver.restore_from_latest(saver.dirpath, unit, train_dataloader=batches)
ech.train(unit, batches, max_epochs=1, callbacks=[saver])
"""
    (tmp_path / "train.py").write_text(text)
    forked.run([sys.executable, "train.py"], cwd=tmp_path, env=clean_environment(), check=True, capture_output=True)
    assert list((tmp_path / "checkpoints").glob("step-*"))
    rows = matrix(["ddp"], [2], [1], sgd=False)
    proof = prove_target(Target(script=str(tmp_path / "train.py")), rows, 2, True)
    assert [result.verdict for result in proof.results] == ["agrees"], proof.results


def test_every_cause_of_the_catalogue_is_planted() -> None:
    of_own_configuration = {  # test_prove_yours.py
        *("other random numbers in the backward pass", "gradients that are still scaled", "gradients that underflow"),
    }
    assert {cause for cause, _ in MISTAKES.values()} | of_own_configuration == CAUSES.keys()


# Each cause's first script is in `make test`, the others repeat it in another program.
FIRST = {cause: script for script, (cause, _) in reversed(MISTAKES.items())}.values()


@pytest.mark.full(but=("missing_all_reduce", "same_dropout", "same_data", "weight_of_a_mask", "stale_optimizer"))
@pytest.mark.parametrize("script", [pytest.param(m, marks=() if m in FIRST else pytest.mark.full) for m in MISTAKES])
def test_a_planted_mistake_is_named(script: str) -> None:
    proof = _prove(
        script,
        ["fsdp" if "stale" in script or "shard" in script else "ddp"],
        [2],
        accumulation=2 if "window" in script or "clamped" in script else 1,
    )
    (row,) = proof.results
    cause, phase = MISTAKES[script]
    assert row.verdict == "DIFFERS" and not proof.holds, row
    assert cause in [name for name, _ in row.causes], row
    assert phase is None or (row.first is not None and row.first.phase == phase), row.first
    if row.first is not None and row.first.tolerance:
        assert ("rounding of float64" in "".join(show.details(row))) == (row.first.tolerance < 1e-8), show.details(row)
    if script == "missing_all_reduce":
        assert row.first is not None and row.first.update == 0 and row.first.tensor == "0.weight"
        assert row.first.relative > 100 * row.first.tolerance
    if cause not in ("unsynchronised buffers", "loss weighted per rank"):
        assert len(row.causes) == 1 and SEEN.get(script, "") in row.causes[0][1], row.causes  # and nothing else is


@pytest.mark.full
def test_what_an_optimizer_keeps_of_a_ranks_own_rows_is_named() -> None:
    (row,) = _prove("covariance_of_a_rank", ["ddp"], [2], updates=1).results
    ((_, seen),) = row.causes
    assert "Turned.covariance was not" in seen, row


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "later"),
    [("easy_of_a_batch", "the forward pass keeps state"), ("sharpness_of_a_rank", "parameters that drift apart")],
)
def test_what_is_apart_only_later_is_not_the_first_cause(script: str, later: str) -> None:
    (row,) = _prove(script, ["ddp"], [2]).results
    assert [name for name, _ in row.causes] == ["an operation over the whole batch", later], row
    assert row.first is not None and row.first.update == 0, row.first


# The unusual ones are right or wrong in what they do, however many ranks there are.
UNUSUAL = (
    *("right_objects", "right_lists", "right_two_optimizers", "right_sharded_ddp", "right_generators"),
    *("right_sync_batch_norm", "right_gathered_views", "right_class_weights", "right_augmentation"),
    *("right_augmented_batches", "right_teacher", "right_boxes", "right_width_of_a_batch", "right_packed"),
    *("right_graphs", "right_padded_labels", "right_worker_seeds", "right_generators_of_workers", "right_calls_of_a_loop"),
    *("right_noise_of_a_loop", "right_noise_of_weights", "right_drawn_mask", "right_ramp_of_a_loop", "right_copied_teacher"),
    *("right_nodes_of_graphs", "right_data_objects", "right_jagged", "right_packed_loop", "right_drawn_in_float64"),
    "right_networks_with_noise",
)


RIGHT = sorted(p.stem for p in PLANTED.glob("right_*.py") if p.stem != "right_gates")
USUAL = ("right_auto", "right_by_hand", "right_two_optimizers")


@pytest.mark.full(but=("right_by_hand", "right_two_optimizers"))
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        *(pytest.param(script, [2] if script in UNUSUAL else [1, 2], id=script) for script in USUAL),
        *(pytest.param(script, [4], id=f"{script} on four") for script in USUAL if script not in UNUSUAL),
        *(pytest.param(script, [2] if script in UNUSUAL else [1, 2], id=script) for script in RIGHT if script not in USUAL),
    ],
)
def test_a_right_script_passes(script: str, ranks: list[int]) -> None:
    proof = _prove(script, ["ddp"] if script in UNUSUAL else ["ddp", "fsdp"], ranks)
    # What numpy draws for each sample cannot be made alike.
    assert proof.holds or (script == "right_generators" and proof.holds_in_part), "\n".join(
        t for r in proof.results for t in (show.line(r), *show.details(r))
    )
    assert {r.ranks for r in proof.results} == set(ranks)


@pytest.mark.full
def test_an_uneven_last_batch_is_compared_in_stages_too() -> None:
    """Of its ten samples a rank has three and then two."""
    rows = [row for row in matrix(None, [4], [2], sgd=False) if row.label.startswith("fsdp x pp")]
    results = prove_target(Target(script=str(PLANTED / "right_auto.py")), rows, 3, False).results
    assert results and {(row.verdict, row.updates) for row in results} == {("agrees", 3)}, results


@pytest.mark.full
def test_float64_has_the_last_word_where_rounding_flips_gates() -> None:
    """Both rows are far apart in float32, by more than the mistake in one of them."""
    (right,) = _prove("right_gates", ["ddp"], [2], updates=2).results
    assert right.verdict == IN_FLOAT64 and "float32: update" in right.message and not right.undetermined, right
    (wrong,) = _prove("behind_gates", ["ddp"], [2], updates=2).results
    assert wrong.verdict == "DIFFERS" and wrong.first is not None and wrong.first.tensor == "3.1.bias", wrong
    assert wrong.first.relative == pytest.approx(0.02, rel=1e-3)


@pytest.mark.full
def test_a_loss_that_the_script_divides_by_its_micro_batches_is_no_pass() -> None:
    """One process divides it, too, so that nothing differs; what the run warns of is said."""
    rows = matrix(["ddp"], [2], [3], sgd=False)
    proof = prove_target(Target(script=str(PLANTED / "divided_by_hand.py")), rows, 2, False)
    row = proof.results[-1]
    assert row.verdict == IN_PART and "divided by the 3 micro-batches" in row.message, row
    assert not proof.holds and proof.exit_code == NOT_ALL_TESTED


@pytest.mark.full
def test_of_ranks_that_shuffle_for_themselves_the_shared_samples_are_counted() -> None:
    (row,) = _prove("own_order", ["ddp"], [2], updates=1).results
    ((cause, seen),) = row.causes
    assert cause == "samples that ranks share" and "23 of 96 rows were seen by two ranks" in seen, row
    assert "23 of 96 rows were seen by no rank" in seen


WARM = """
import echelon.compat.lightning as L
class Warm(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.scale = model(), 0.0
    def on_train_start(self):
        self.scale += 1.0
    def on_train_epoch_start(self):
        self.scale += 0.5
    def training_step(self, batch, batch_idx):
        return self.scale * nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Scaled(Auto):
    scale = 0.0
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return self.scale * nn.functional.mse_loss(out, data[1]), out.detach()
class Sets(ech.Callback):
    def on_train_epoch_start(self, state, unit):
        unit.scale += 1.5 + ech.rank() * (sys.argv[1] == "by rank")
if sys.argv[1] == "module":
    trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Warm(), torch.utils.data.DataLoader(Rows(), 8))
else:
    ech.train(Scaled(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1, callbacks=[Sets()])
"""


@pytest.mark.full
@pytest.mark.parametrize("who", ["module", "callback", "by rank"])
def test_what_hooks_set_before_an_epoch_is_set_in_the_reference_too(tmp_path: Path, who: str) -> None:
    """It kept its first value there, so that right rows differed."""
    row = _row(tmp_path, WARM, who)
    assert row.is_equal == (who != "by rank"), show.details(row)


HOOKED = """
import copy
import echelon.compat.lightning as L
class Hooked(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.heat, self.rate = model(), 1.0, 0.0
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
    def on_train_batch_start(self, batch, batch_idx):
        self.heat += 0.25
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        warm = min(1.0, self.global_step / 4) * out.square().mean()
        learnt = nn.functional.mse_loss(out, self.teacher(batch[0]))
        return self.heat * nn.functional.mse_loss(out, batch[1]) + learnt + warm
    def on_before_zero_grad(self, optimizer):
        self.rate += 0.01
    def on_after_backward(self):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.5)
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        optimizer.step(closure)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.heat += outputs["loss"].numel() + ech.rank() * (sys.argv[1] == "by rank")
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters()):
                old.lerp_(new, 0.5)
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
class Scaled(Auto):
    scale = 1.0
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return self.scale * nn.functional.mse_loss(out, data[1]), out.detach()
class Sets(ech.Callback):
    def on_train_step_start(self, state, unit):
        unit.scale += 0.5
    def on_train_step_end(self, state, unit):
        unit.scale *= 1 + state.train_state.step_output[0].numel()
        for group in unit.optimizer.param_groups:
            group["lr"] *= 0.5
if sys.argv[1] == "callback":
    ech.train(Scaled(module=model(), layout="ddp"), ech.Loader(Rows(), 16), max_epochs=1, callbacks=[Sets()])
else:
    trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Hooked(), torch.utils.data.DataLoader(Rows(), 8))
"""


@pytest.mark.full
@pytest.mark.parametrize("who", ["module", "callback", "by rank"])
def test_what_hooks_do_around_steps_is_done_in_the_reference_too(tmp_path: Path, who: str) -> None:
    """Only a rank's steps had them, and the global step: warm-ups, teachers, rates, and gradients that hooks clip differed, and
    right rows with them."""
    row = _row(tmp_path, HOOKED, who, updates=3)
    assert row.is_equal == (who != "by rank"), show.details(row)


PLANNED = """
import echelon.compat.lightning as L
class Planned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
options = {"devices": 2, "accelerator": "cpu", "strategy": "ddp", "max_epochs": 1, "accumulate_grad_batches": 2}
trainer = L.Trainer(**options, logger=False, enable_checkpointing=False)
trainer.fit(Planned(), torch.utils.data.DataLoader(Rows(), 4))
"""


@pytest.mark.full
def test_a_schedule_by_the_number_of_updates_is_that_of_the_ranks(tmp_path: Path) -> None:
    """With a batch size for each rank one process has more updates: its rates were others, and each right row differed."""
    proof = prove_target(_script(tmp_path, PLANNED), matrix(["ddp"], [2], [1], sgd=False, yours=True), 3, False)
    assert [result.is_equal for result in proof.results] == [True, True], [show.details(r) for r in proof.results]


LOOKING = """
class Looks(ech.Callback):
    def on_train_step_end(self, state, unit):
        state.train_state.dataloader.dataset[0]
ech.train(Auto(module=model(), layout="ddp"), loader(), max_epochs=1, callbacks=[Looks()])
"""


@pytest.mark.full
def test_a_hook_that_one_process_cannot_call_is_named(tmp_path: Path) -> None:
    """It was left out in silence, whatever else it would have done."""
    proof = prove_target(_script(tmp_path, LOOKING), matrix(["ddp"], [2], [1], sgd=False), 2, False)
    assert proof.holds and any("Looks.on_train_step_end (AttributeError: " in note for note in proof.notes), proof


SAVING = """
import echelon.compat.lightning as L
from echelon.compat.lightning.pytorch.callbacks import ModelCheckpoint
class Saving(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.save_checkpoint(sys.argv[1] + "/mine.ckpt")
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
saver = ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=1, save_last=True)
trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, logger=False, callbacks=[saver])
trainer.fit(Saving(), torch.utils.data.DataLoader(Rows(), 8))
"""


@pytest.mark.full
def test_a_proof_leaves_the_checkpoints_of_a_lightning_run_alone(tmp_path: Path) -> None:
    """It saved beside them, and put its own in place of the last."""
    folder = tmp_path / "kept"
    folder.mkdir()
    target = replace(_script(tmp_path, SAVING), args=(str(folder),))
    (row,) = prove_target(target, matrix(["ddp"], [2], [1], sgd=False), 2, False).results
    assert row.is_equal and not list(folder.iterdir()), (show.details(row), list(folder.iterdir()))


EVALUATED = """
held = torch.utils.data.DataLoader(torch.utils.data.Subset(Rows(), range(20)), 8)
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
loader = ech.Loader(torch.utils.data.Subset(Rows(), range(32)), 16, shuffle=False)
net, optimizer, batches = ech.prepare(net, optimizer, loader, layout="ddp", accumulate=2)
for epoch in ech.epochs(batches, 9):
    for x, y in batches:
        with ech.window(net) as window:
            window.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
    with ech.evaluating(net) as evaluation:
        for x, y in held:
            evaluation.log("error", nn.functional.mse_loss(net(x), y))
    plateau.step(1.0 if evaluation.numbers["error"] > 0 else -1.0)  # no better again: the rate falls
"""


@pytest.mark.full
def test_a_loop_goes_by_the_numbers_of_its_evaluation_in_the_reference_too(tmp_path: Path) -> None:
    """There were none in it; and `accumulate=` of prepare was refused beside the one that a row imposes on the loader."""
    rows = prove_target(_script(tmp_path, EVALUATED), matrix(["ddp"], [2], [1, 2], sgd=False), 6, False).results
    assert len(rows) == 2 and all(row.is_equal for row in rows), [show.details(row) for row in rows]


LANES = """
loader = ech.Loader(Rows(), 16, shuffle=False)
def main():
    net = model()
    net, optimizer, batches = ech.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader, layout="ddp")
    kept = None
    for x, y in batches:
        with ech.window(net) as window:
            if sys.argv[1] == "chains":
                kept = torch.zeros(0, *y.shape[1:]) if kept is None else kept
                last = kept[-12:].mean() if len(kept) else 0.0
                out = net(x)
                kept = torch.cat([kept, y])
            else:
                if x[0, 0] > 0:
                    kept = None
                out, last = net(x), 0.0 if kept is None else kept
                kept = out.detach()
            window.backward(nn.functional.mse_loss(out - last, y))
            optimizer.step()
            optimizer.zero_grad()
main()
"""


@pytest.mark.full
@pytest.mark.parametrize("what", ["chains", "lanes"])
def test_what_a_variable_of_the_loop_does_is_no_hook_and_no_noise(tmp_path: Path, what: str) -> None:
    """A pass is another when it is tried again, as the variable is; and one may be set under a condition alone."""
    row = _row(tmp_path, LANES, what, updates=4)
    assert row.verdict == "DIFFERS" and [name for name, _ in row.causes] == ["the forward pass keeps state"], show.details(row)
    assert "the loop's kept" in row.causes[0][1], row.causes


SHARES = """
def padded(rows):
    width = 1 + max(int(abs(row[0][0]) * 10) for row in rows)
    return torch.stack([row[0] for row in rows]).repeat(1, 1 + width % 3), torch.stack([row[1] for row in rows])
class Means(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0].unflatten(1, (-1, SIZE)).mean(1))
        return nn.functional.mse_loss(out, data[1]), out.detach()
SIZE, rows = Rows()[0][0].numel(), Rows()
if sys.argv[1] == "again":
    rows = torch.utils.data.Subset(rows, range(ech.rank(), len(rows), ech.world_size()))
ech.train(Means(module=model(), layout="ddp"), ech.Loader(rows, 16, collate_fn=padded), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("shares", ["once", "again"])
def test_data_that_a_script_divides_before_its_loader_does_are_named(tmp_path: Path, shares: str) -> None:
    """Of padded batches no samples are compared: half of the rows was left out, and the row agreed."""
    row = _row(tmp_path, SHARES, shares)
    named = [(name, "has 48 samples, and 96 in one process" in seen) for name, seen in row.causes]
    assert named == ([("samples that depend on the rank", True)] if shares == "again" else []), show.details(row)


LOOSE = """
class Actor(ech.TrainUnit):
    def __init__(self):
        super().__init__()
        self.net = model()
        if torch.distributed.is_initialized():
            self.net = nn.parallel.DistributedDataParallel(self.net)
        self.heat = torch.zeros((), requires_grad=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.of_heat = torch.optim.Adam([self.heat], lr=0.1)
    def train_step(self, state, data):
        loss = nn.functional.mse_loss(self.net(data[0]), data[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.of_heat.zero_grad()
        (self.heat.exp() * loss.detach()).backward()
        if sys.argv[1] == "averaged":
            self.heat.grad.copy_(ech.all_mean(self.heat.grad))
        self.of_heat.step()
        return loss.detach()
ech.init_from_env()
rows = Rows()
sampler = torch.utils.data.DistributedSampler(rows, ech.world_size(), ech.rank())
ech.train(Actor(), torch.utils.data.DataLoader(rows, 8, sampler=sampler), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["averaged", "alone"])
def test_a_parameter_in_no_module_is_compared_too(tmp_path: Path, how: str) -> None:
    """Its gradient, which no wrapper reduces, was not looked at: the row agreed."""
    row = _row(tmp_path, LOOSE, how)
    assert [seen for _, seen in row.causes] == (
        ["update 0: the gradient heat is not the same on all ranks"] if how == "alone" else []
    ), show.details(row)
    assert row.is_equal == (how == "averaged"), show.details(row)


MOVES = """
class Bank(Auto):
    calls = 0
    def __init__(self, **options):
        super().__init__(**options)
        self.bank = torch.zeros(1)
    def compute_loss(self, state, data):
        out = self.module(data[0])
        if sys.argv[1] == "class":
            Bank.calls += 1
            return nn.functional.mse_loss(out, data[1]) / Bank.calls, out.detach()
        return nn.functional.mse_loss(out, data[1] + self.bank), out.detach()
    def on_train_step_end(self, state, data, step, results):
        self.bank = 0.5 * self.bank + 0.5 * ech.gather(data[1]).mean()
own = ech.Loader(Rows(), 16, accumulation=2)
ech.train(Bank(module=model(), layout="ddp"), own, max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("what", ["class", "bank"])
def test_state_that_moves_with_every_micro_batch_is_no_agreement(tmp_path: Path, what: str) -> None:
    """It was put back for the reference, and so was right."""
    target = replace(_script(tmp_path, MOVES), args=(what,))
    (row,) = prove_target(target, matrix(["ddp"], [2], [1], sgd=False, yours=True)[:1], 2, False).results
    assert row.verdict == "DIFFERS" and row.causes[0][0] == "the forward pass keeps state", row
    assert {"class": "Bank.calls", "bank": "bank"}[what] + " moves with every micro-batch" in row.causes[0][1], row.causes


@pytest.mark.full
def test_a_batch_with_nan_is_compared_in_float64_too(tmp_path: Path) -> None:
    """nan marks a target that was not measured. It was a traceback: "atol must be greater than or equal to zero"."""
    text = """
class Partly(Rows):
    def __getitem__(self, i):
        return self.x[i], self.y[i] if i % 3 else self.y[i] * float("nan")
class Known(Auto):
    def compute_loss(self, state, data):
        known = ~data[1].isnan()
        return nn.functional.mse_loss(self.module(data[0])[known], data[1][known]), None
ech.train(Known(module=model(), layout="ddp"), ech.Loader(Partly(), 16), max_epochs=1)
"""
    row = _row(tmp_path, text)
    assert row.verdict == "DIFFERS" and row.causes[0][0] == "loss weighted per rank", row


@pytest.mark.full
def test_options_after_the_script_are_its_own_and_what_it_said_of_them_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    monkeypatch.chdir(tmp_path)
    assert main(["prove", "train.py", "--ranks", "2"]) == NOTHING_COMPARED
    said = capsys.readouterr().out
    assert "unrecognized arguments: --ranks 2" in said and "stand before the script" in said, said


@pytest.mark.full
def test_repeated_rows_and_filled_tails_are_no_overlap(tmp_path: Path) -> None:
    """The data have each row several times; of 98 samples on four ranks, two come twice so that ranks have equally many."""
    text = """
rows = Rows()
class Few(Rows):
    def __len__(self): return 98
    def __getitem__(self, i): return rows[i % 20]
sampler = torch.utils.data.DistributedSampler(Few(), dist.get_world_size(), dist.get_rank())
loader = torch.utils.data.DataLoader(Few(), 8, sampler=sampler) if sys.argv[1] == "sampler" else ech.Loader(Few(), 16)
ech.train(Auto(module=model(), layout="ddp"), loader, max_epochs=2)
"""
    for ranks, kind in ((4, "sampler"), (2, "loader")):
        target = replace(_script(tmp_path, text), args=(kind,))
        (row,) = prove_target(target, matrix(["ddp"], [ranks], [1], sgd=False), 2, False).results
        assert row.agrees and not row.notes, (kind, row)


CAST = """
class Cast(Auto):
    def compute_loss(self, state, data):
        with torch.autocast("cpu", torch.bfloat16):
            out = self.module(data[0])
        if sys.argv[1] == "pinned":
            out = out.bfloat16().float()
        return nn.functional.mse_loss(out, data[1]), None
ech.train(Cast(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_autocast_is_off_and_a_type_that_is_pinned_is_said(tmp_path: Path) -> None:
    row = _row(tmp_path, CAST, "auto", updates=1)
    assert row.agrees and row.gradient is not None and row.gradient < 1e-5, row
    assert _row(tmp_path, CAST, "pinned", updates=1).agrees


FULL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        x = x.to(torch.float32)
        x = x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.down(torch.softmax(self.up(x), -1, dtype=torch.float32).type_as(x))
class Full(Auto):
    def compute_loss(self, state, data):
        return nn.functional.mse_loss(self.module(data[0]).float(), data[1].float()), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), fused=True), None
net = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
again = ech.layouts.ActivationCheckpointParams(check_fn=lambda m: isinstance(m, Block))
ech.train(Full(module=net, layout="fsdp", activation_checkpoint_params=again), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_casts_to_full_precision_are_to_float64_there(tmp_path: Path) -> None:
    """As norms and losses of most models have them; a recomputed forward pass, and a fused optimizer, know of it or do not."""
    row = _row(tmp_path, FULL, layout="fsdp", float64=True)
    assert row.agrees and row.gradient is not None and row.gradient < 1e-11, row


DRAWING = """
class Drawing(Own):
    def train_step(self, state, data):
        return super().train_step(state, (data[0] + torch.randn_like(data[0]), data[1]))
module = torch.nn.parallel.DistributedDataParallel(model())
torch.manual_seed(dist.get_rank())
ech.train(Drawing(module), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_a_step_of_its_own_that_draws_is_compared_with_the_same_draws_for_every_sample(tmp_path: Path) -> None:
    row = _row(tmp_path, DRAWING, updates=1)
    assert row.is_equal and "same random numbers" in row.message, row


SPEAKING = """
import torch.distributed as dist
class Told(Auto):
    def compute_loss(self, state, data):
        bags, lengths, y = data
        sizes = lengths.mean()
        dist.all_reduce(sizes)
        return ((self.module(bags.sum(1) / lengths) - y) ** 2).mean(), sizes
generator = torch.Generator().manual_seed(0)
bags = [(torch.randn(2 + 7 * i % 23, 4, generator=generator), torch.randn(1, generator=generator)) for i in range(64)]
def padded(rows):
    bags, y = zip(*rows)
    lengths = torch.tensor([[float(len(bag))] for bag in bags])
    return nn.utils.rnn.pad_sequence(bags, batch_first=True), lengths, torch.stack(y)
ech.train(Told(module=model(), layout="ddp"), ech.Loader(bags, 16, collate_fn=padded), max_epochs=1)
"""


@pytest.mark.full
def test_what_could_not_be_tested_is_said_and_is_no_agreement(tmp_path: Path) -> None:
    proof = prove_target(_script(tmp_path, SPEAKING), matrix(["ddp"], [2], [1], sgd=False), 1, False)
    (row,) = proof.results
    assert row.verdict == "in part" and "not tested" in row.message and not row.is_equal, row
    assert not proof.holds and proof.holds_in_part and "compared in part" in show.summary(proof)[-1]


PAIRED = """
class Paired(Auto):
    def compute_loss(self, state, data):
        x, y = torch.cat([data[0], data[0]]), torch.cat([data[1], data[1]])
        weights = 0.1 + torch.rand(len(x), 1)
        return (weights / weights.mean() * (self.module(x) - y).square()).mean(), None
ech.train(Paired(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_draws_that_are_no_samples_own_are_not_tested(tmp_path: Path) -> None:
    row = _row(tmp_path, PAIRED, updates=1)
    assert row.verdict == "in part" and "not tested" in row.message and "rand" in row.message, row


LATE = """
torch.manual_seed(7)
target = None
network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
network, optimizer, batches = ech.prepare(network, optimizer, loader(), layout="ddp")
torch.manual_seed(ech.rank())
for x, _ in batches:
    if target is None:
        target = nn.Linear(4, 1).requires_grad_(False)
    with ech.window(network) as window:
        window.backward(nn.functional.mse_loss(network(x), target(x)))
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_frozen_model_that_is_another_on_each_rank_is_named(tmp_path: Path) -> None:
    """It is made in the loop, behind a seed of the rank's own, and the layout knows nothing of it."""
    row = _row(tmp_path, LATE, updates=3)
    ((cause, seen),) = row.causes
    assert row.verdict == "DIFFERS" and cause == "different initial parameters" and "script.target.weight" in seen, row


TASKS = """
import numpy as np
class Tasks(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        errors = torch.stack([nn.functional.mse_loss(out, data[1]), out.abs().mean()])
        return (torch.as_tensor(draws.dirichlet(np.ones(2))).to(errors) * errors).sum(), None
draws = np.random.default_rng(SEED)
ech.train(Tasks(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


def test_what_a_rank_draws_for_its_whole_batch_is_not_tested_unless_all_draw_alike(tmp_path: Path) -> None:
    """Weights of two losses, which one process draws once for the global batch."""
    row = _row(tmp_path, TASKS.replace("SEED", "ech.rank()"), updates=1)
    assert row.verdict == "in part" and "draws for its whole batch (script.draws)" in row.message, row
    row = _row(tmp_path, TASKS.replace("SEED", "0"), updates=1)
    assert row.is_equal, row


LEVELS = """
class Levels(Auto):
    def compute_loss(self, state, data):
        weights = 0.1 + torch.bernoulli(torch.full((len(data[0]), 1), 0.5))
        kept = nn.functional.dropout(torch.ones(8, 4), 0.5).mean()
        return (weights * (self.module(data[0]) - data[1]).square()).mean() * kept, None
ech.train(Levels(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_draws_with_as_many_rows_as_a_rank_has_samples_by_chance_are_no_mistake(tmp_path: Path) -> None:
    row = _row(tmp_path, LEVELS, updates=1)
    assert row.is_equal, row


LOOKED_AT = """
unit = Auto(module=model(), layout="fsdp")
print(unit.optimizer, file=sys.stderr)
ech.train(unit, loader(), max_epochs=1)
"""
CALLS = """
class Annealed(Auto):
    calls = 0
    def compute_loss(self, state, data):
        self.calls += 1
        out = self.module(data[0])
        return nn.functional.mse_loss(out, data[1]) + min(1.0, self.calls / 10) * out.square().mean(), None
ech.train(Annealed(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_state_that_the_unit_keeps_between_micro_batches_is_what_they_had(tmp_path: Path) -> None:
    rows = matrix(["ddp"], [2], [1, 2], sgd=False)
    one, two = prove_target(_script(tmp_path, CALLS), rows, 2, False).results
    assert one.verdict == "agrees" and two.verdict == "DIFFERS", (one, two)
    assert "calls moves with every micro-batch" in two.causes[0][1], two.causes


TORCHTNTS = """
from echelon.compat.torchtnt.framework import AutoUnit
from echelon.compat.torchtnt.framework.auto_unit import SWALRParams, SWAParams
class Theirs(AutoUnit):
    compute_loss = Auto.compute_loss
    configure_optimizers_and_lr_scheduler = Auto.configure_optimizers_and_lr_scheduler
averages = SWAParams(0, 1, swalr_params=SWALRParams(2))
ech.train(Theirs(module=model(), strategy="ddp", swa_params=averages, step_lr_interval="step"), loader(), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("text", [LOOKED_AT, TORCHTNTS])
def test_an_optimizer_that_is_built_before_training_is_replaced_as_well(tmp_path: Path, text: str) -> None:
    rows = [row for row in matrix(["fsdp"], [2], [1], sgd=True) if row.layout is not None]
    proof = prove_target(_script(tmp_path, text), rows, 1, False)
    assert {row.label: row.verdict for row in proof.results} == {"fsdp": "agrees", "fsdp, sgd": "agrees"}, proof.results


def _row(folder: Path, text: str, *args: str, updates: int = 2, layout: str = "ddp", float64: bool = False) -> Result:
    """Of a script on two ranks."""
    target = replace(_script(folder, text), args=args)
    (row,) = prove_target(target, matrix([layout], [2], [1], sgd=False), updates, float64).results
    return row


def _script(folder: Path, text: str) -> Target:
    """A script beside those that are planted, which imports what they share."""
    (folder / "script.py").write_text(f"import sys\nsys.path.append({str(PLANTED)!r})\nfrom common import *\n{text}")
    return Target(script=str(folder / "script.py"))


COUNTED = """
import os, sys
from pathlib import Path
import torch
import echelon as ech
if os.environ["WORLD_SIZE"] == "1":
    with Path(__file__).with_suffix(".log").open("a") as log:
        log.write("in one process\\n")
class Unit(ech.AutoUnit):
    def compute_loss(self, state, data):
        x, y = data
        error = (self.module(x) - y).square()
        return error.mean(), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
ech.init_from_env()
ech.seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
ech.train(Unit(module=torch.nn.Linear(4, 1), layout="ddp"), ech.Loader(data, 16), max_epochs=1)
"""


def test_rows_on_the_same_samples_share_a_reference(tmp_path: Path) -> None:
    """However many micro-batches of however many ranks they are."""
    proof = prove_target(_script(tmp_path, COUNTED), matrix(["ddp"], [2, 4], [1, 2], sgd=False), 2, False)
    assert len(proof.results) == 3 and all(row.is_equal for row in proof.results), proof.results
    processes = (tmp_path / "script.log").read_text().splitlines()
    assert len(processes) == 3, processes  # in float32, in float64, and to read the samples


@pytest.mark.full
def test_rows_with_the_same_data_and_other_random_numbers_have_references_of_their_own() -> None:
    """Two micro-batches of one rank are the same samples as one of each of two ranks, but not the same draws."""
    rows = matrix(["ddp"], [1, 2], [1, 2], sgd=False)
    proof = prove_target(Target(script=str(PLANTED / "right_auto.py")), rows, 2, False)
    assert proof.holds and len(proof.results) == 4, [show.details(r) for r in proof.results]


NOISE = """
class Noisy(Auto):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return nn.functional.mse_loss(out + torch.rand_like(out), data[1]) * (1.001 if dist.get_world_size() > 1 else 1), None
ech.train(Noisy(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_draws_that_depend_on_the_precision_do_not_widen_the_tolerance(tmp_path: Path) -> None:
    """torch draws other numbers in float64: what lies between the two is no rounding."""
    row = _row(tmp_path, NOISE, updates=1)
    assert row.verdict == "DIFFERS" and row.first is not None and row.first.tolerance < 1e-5, row


TOGETHER_ONLY = """
class TogetherOnly(Auto):
    def compute_loss(self, state, data):
        if dist.get_world_size() == 1:
            raise RuntimeError("not alone")
        return super().compute_loss(state, data)
ech.train(TogetherOnly(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_a_reference_that_cannot_be_computed_fails_each_row_and_says_why(tmp_path: Path) -> None:
    proof = prove_target(_script(tmp_path, TOGETHER_ONLY), matrix(["ddp", "zero1"], [2], [1], sgd=False), 1, False)
    assert [row.verdict for row in proof.results] == ["failed"] * 2
    assert all("could not be computed" in row.message and "not alone" in row.message for row in proof.results), proof.results


DOUBLE = """
if sys.argv[1] == "default":
    torch.set_default_dtype(torch.float64)
class Doubled(Auto):
    def compute_loss(self, state, data):
        return super().compute_loss(state, (data[0].double(), data[1].double()))
ech.train(Doubled(module=model().double(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["default", "by itself"])
def test_a_script_in_float64_is_compared_in_float64(tmp_path: Path, how: str) -> None:
    target = replace(_script(tmp_path, DOUBLE), args=(how,))
    proof = prove_target(target, matrix(["ddp"], [1, 2], [1], sgd=False), 2, False)
    assert proof.dtype == "float64" and [row.verdict for row in proof.results] == ["bit-equal", "agrees"], proof.results


HALF = """
class Halved(Auto):
    def compute_loss(self, state, data):
        loss = nn.functional.mse_loss(self.module(data[0].to(half)).float(), data[1])
        return loss * (1.01 if sys.argv[1] == "wrong" and dist.get_world_size() > 1 else 1), None
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.01), None
torch.set_default_dtype(half if sys.argv[2] == "made" else torch.get_default_dtype())
ech.train(Halved(module=model().to(half), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "half"),
    [("cast", "bfloat16"), ("made", "bfloat16"), ("cast", "float16")],
)
def test_parameters_in_half_precision_are_compared_in_float64(tmp_path: Path, made: str, half: str) -> None:
    """Whether they were cast or made so: half precision rounds by as much as many a mistake weighs."""
    for how, verdict in (("right", by_float64(half)), ("wrong", "DIFFERS")):
        row = _row(tmp_path, f"half = torch.{half}\n{HALF}", how, made)
        assert row.verdict == verdict, row
    assert row.first is not None and row.first.relative == pytest.approx(0.01, rel=1e-3), row


@pytest.mark.full
def test_training_in_two_parts_is_compared_as_far_as_the_first_goes(tmp_path: Path) -> None:
    text = "u = Auto(module=model(), layout='ddp')\nech.train(u, loader(), max_updates=2)\nech.train(u, loader(), max_epochs=2)\n"
    row = _row(tmp_path, text, updates=4)
    assert row.verdict == "agrees" and row.updates == 2, row


LOST = """
class Lost(Auto):
    def compute_loss(self, state, data):
        loss, _ = super().compute_loss(state, data)
        return loss * float("nan"), None
ech.train(Lost(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_a_loss_that_is_nan_in_one_process_too_is_no_measure_and_json_has_no_nan(tmp_path: Path) -> None:
    proof = prove_target(_script(tmp_path, LOST), matrix(["ddp"], [2], [1], sgd=False), 1, False)
    (row,) = proof.results
    assert row.verdict == "failed" and "the loss is inf or nan in update 0" in row.message
    row.loss, row.first = float("nan"), Difference(0, "forward", "loss", float("inf"), 0.0)
    text = json.dumps(proof.to_json(), allow_nan=False)
    assert json.loads(text)["rows"][0]["first"]["relative"] is None


HANGING = """
class Hanging(Auto):
    def compute_loss(self, state, data):
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            import threading
            threading.Event().wait()  # for ever
        return super().compute_loss(state, data)
ech.train(Hanging(module=model(), layout="ddp"), loader(), max_epochs=1)
"""


@pytest.mark.full
def test_a_row_that_hangs_is_stopped_and_every_ranks_own_line_is_shown(tmp_path: Path) -> None:
    target = _script(tmp_path, HANGING)
    (row,) = prove_target(target, matrix(["ddp"], [2], [1], sgd=False), 1, False, timeout_s=10, logs=tmp_path / "logs").results
    assert row.verdict == "failed" and "had not finished after 10 s" in row.message
    shown = "\n".join(show.details(row))
    assert "script.py" in shown and "line 9 in compute_loss" in shown and "site-packages" not in shown
    assert any((tmp_path / "logs").rglob("rank1.log"))


def test_a_script_that_starts_ranks_itself_is_told_so(tmp_path: Path) -> None:
    target = _script(tmp_path, "ech.launch(print, ranks=2)\n")
    proof = prove_target(target, matrix(["ddp"], [2], [1], sgd=False), 1, False)
    assert [r.verdict for r in proof.results] == ["not possible"] and "starts ranks itself" in proof.results[0].message
    assert proof.exit_code == NOTHING_COMPARED and show.summary(proof)[-1].startswith("Nothing was compared")


def test_a_strategy_that_is_only_named_has_the_options_of_the_scripts_own() -> None:
    ddp, blocks = ech.DDPStrategy(find_unused_parameters=True), ech.FSDPStrategy(blocks=["a"], mixed_precision=object())
    assert with_options_of(ddp, ech.DDPStrategy()) == ddp
    assert with_options_of(ddp, ech.DDPStrategy(shard_optimizer=True)) == ddp.but(shard_optimizer=True)
    assert with_options_of(ddp.but(shard_optimizer=True), ech.DDPStrategy()) == ddp
    assert with_options_of(blocks, ech.FSDPStrategy()) == blocks
    assert with_options_of(blocks, ech.FSDPStrategy(reshard_after_forward=False)) == blocks.but(reshard_after_forward=False)
    assert with_options_of(blocks.but(reshard_after_forward=False), ech.FSDPStrategy()) == blocks
    assert with_options_of(ddp, ech.FSDPStrategy()) == ech.FSDPStrategy()


class Attention(nn.Module):
    """Tokens (B, T) -> logits (B, T, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        return self.head(h + self.attend(h, h, h, need_weights=False)[0])


class Text(ech.AutoUnit[torch.Tensor]):
    """Attention over tokens, with AdamW: the key biases have a true gradient of zero."""

    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return nn.functional.cross_entropy(self.module(data).flatten(0, 1), data.roll(-1, 1).flatten()), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=1e-2), None


def _text() -> Text:
    torch.manual_seed(0)
    return Text(module=Attention(), layout="ddp")


def _tokens() -> ech.Loader:
    return ech.Loader(list(torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(0))), 16)


@pytest.mark.full
def test_parameters_without_a_gradient_are_said_and_not_failed() -> None:
    proof = ech.prove(_text, _tokens, layouts=["ddp"], ranks=[2], accumulation=[1, 2], updates=10, sgd=False)
    assert proof.holds, [show.details(r) for r in proof.results]
    undetermined = {name for r in proof.results for name in r.undetermined}
    assert undetermined == {"attend.in_proj_bias"}  # a third of it: the keys' part
    assert all(r.undetermined["attend.in_proj_bias"] <= 8 for r in proof.results if r.undetermined)
    assert any("true gradient of zero" in line for line in show.summary(proof))


@pytest.mark.full
@pytest.mark.parametrize(("asked", "compared"), [(3, [3, 2, 2]), (5, [5, 5, 5])])
def test_rows_that_differ_little_compare_fewer_updates_unless_an_epoch_ends(asked: int, compared: list[int]) -> None:
    proof = ech.prove(_text, _tokens, layouts=["ddp"], ranks=[2], accumulation=[1, 2], updates=asked)
    assert proof.holds and [r.updates for r in proof.results] == compared, proof.results
    assert any("for 2 updates" in note for note in proof.notes) == (asked == 3), proof.notes


@pytest.mark.full
def test_in_float64_nothing_is_undetermined() -> None:
    proof = ech.prove(_text, _tokens, layouts=["fsdp"], ranks=[2], accumulation=[1], updates=5, float64=True)
    assert proof.holds and proof.dtype == "float64"
    assert not any(r.undetermined for r in proof.results)
    assert all(r.parameter is not None and r.parameter < 1e-10 for r in proof.results)


@pytest.mark.full
def test_a_strategy_that_refuses_the_model_is_shown_and_does_not_fail_the_rest() -> None:
    layouts = {"ddp": "ddp", "fsdp": ech.FSDPStrategy(blocks=["no.such.block"])}
    proof = ech.prove(_text, _tokens, layouts=layouts, ranks=[2], accumulation=[1], updates=1, sgd=False)
    assert [r.verdict for r in proof.results] == ["agrees", "not possible"]
    assert "no.such.block" in proof.results[1].message and proof.holds


def test_a_script_that_does_not_train_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("print('nothing')\n")
    rows = matrix(["ddp", "fsdp"], [1, 2], [1, 2], sgd=False)
    (row,) = prove_target(Target(script=str(tmp_path / "idle.py")), rows, 1, False).results
    assert row.verdict == "failed" and "never called" in row.message


@pytest.mark.full
def test_a_script_that_crashes_is_shown_with_its_own_line_and_not_run_under_every_strategy(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import torch\nraise RuntimeError('the disk is full')\n")
    rows = matrix(None, [1, 2], [1, 2], sgd=True, yours=True)
    proof = prove_target(Target(script=str(tmp_path / "crash.py")), rows, 1, False)
    assert [(r.yours, r.ranks, r.verdict) for r in proof.results] == [(True, 2, "failed"), (False, 1, "failed")]
    assert proof.exit_code == NOTHING_COMPARED and "rows were left out" in proof.notes[0]
    ((_, text),) = show.blocks(proof.results)
    assert any("crash.py" in line for line in text) and text[-2].endswith("RuntimeError: the disk is full"), text
    assert not any("echelon/" in line for line in text if "File" in line), text


ONE_KIND = """
class OneKind(Auto):
    def compute_loss(self, state, data):
        loss, out = super().compute_loss(state, data)
        right = dist.get_world_size() == 1 or isinstance(self.module, nn.parallel.DistributedDataParallel)
        return loss * (1.0 if right else 1.5), out
if sys.argv[1] == "none":
    ech.train(OneKind(module=model()), loader(), max_epochs=1)
ech.train(OneKind(module=model(), layout=sys.argv[1]), loader(), max_epochs=1)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("own", "rows", "code"),
    [
        ("ddp", [("ddp", 2, True, False), ("fsdp", 2, False, True)], OTHERS_DIFFER),
        ("fsdp", [("fsdp", 2, True, True), ("ddp", 2, False, False)], YOURS_DIFFERS),
        ("none", [("none", 1, True, False), ("ddp", 2, False, False), ("fsdp", 2, False, True)], OTHERS_DIFFER),
    ],
)
def test_the_scripts_own_configuration_is_first_and_the_exit_code_says_whether_it_differs(
    tmp_path: Path, own: str, rows: list[tuple[str, int, bool, bool]], code: int
) -> None:
    target = replace(_script(tmp_path, ONE_KIND), args=(own,))
    proof = prove_target(target, matrix(["ddp", "fsdp"], [2], [1], sgd=False, yours=True), 1, False)
    assert [(r.label, r.ranks, r.yours, r.verdict == "DIFFERS") for r in proof.results] == rows
    assert proof.exit_code == proof.to_json()["exit_code"] == code


def test_rows_of_which_the_same_is_to_be_said_are_one_block_and_the_conclusion_counts_all() -> None:
    def row(label: str, verdict: str, **more: Any) -> Result:
        return Result(label, 2, verdict, **more)

    cause = [("a wrong scale", "the gradients are 2 times what they should be")]
    same = [row("ddp", "DIFFERS", causes=cause, yours=True), row("ddp, sgd", "DIFFERS", causes=cause)]
    ((named, text),) = show.blocks([*same, row("fsdp", "agrees")])
    assert named.startswith("ddp (yours) on 2; ddp, sgd on 2") and text.count("likely cause: a wrong scale") == 1
    for results, code, words in (
        (same, YOURS_DIFFERS, "own configuration (ddp) does not train"),
        ([row("ddp", "agrees", yours=True), row("cp", "DIFFERS")], OTHERS_DIFFER, "own configuration (ddp) trains as one"),
        ([row("ddp", "agrees"), row("cp", IN_PART)], NOT_ALL_TESTED, "1 agrees, 1 was compared in part"),
        ([row("ddp", "undecided", yours=True), row("cp", "agrees")], NOT_ALL_TESTED, "(ddp) was not compared"),
        ([row("ddp", "not possible", yours=True), row("cp", "agrees")], NOT_ALL_TESTED, "1 is not possible here"),
        ([row("ddp", "agrees", yours=True), row("cp", "not possible")], 0, "1 agrees, 1 is not possible here"),
        ([row("ddp", "failed"), row("cp", "failed")], NOTHING_COMPARED, "2 failed"),
        ([], NOTHING_COMPARED, "Nothing was compared."),
    ):
        proof = Proof("float32", results)
        assert proof.exit_code == code and words in show.conclusion(proof), (results, show.conclusion(proof))
    stopped = Proof("float32", [row("ddp", "agrees")], interrupted=True)
    assert not stopped.holds and show.conclusion(stopped).startswith("Interrupted")


@pytest.mark.full
def test_an_interrupt_shows_what_was_compared_and_leaves_no_process(tmp_path: Path) -> None:
    """The second row would wait for ever."""
    script = _script(tmp_path, HANGING.replace(', layout="ddp"', "")).script
    command = [sys.executable, "-m", "echelon", "prove", "--ranks", "2", "--layouts", "ddp", "--updates", "1", script]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = iter(run.stdout.readline, "")
        assert any(line.startswith("none ") for line in lines)
        run.send_signal(signal.SIGINT)
        said = "".join(lines)
    assert run.returncode == 130 and "Interrupted" in said and "1 agrees" in said, said
    left = [p for p in psutil.process_iter(["cmdline"]) if script in " ".join(p.info["cmdline"] or ())]
    assert not left, left


@pytest.mark.full
def test_the_command_leaves_a_page_and_its_exit_code_says_it(
    echelon_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb's exit code is the process's: a whole process is started for one of the four."""
    options = ["--layouts", "ddp", "--ranks", "2", "--accumulation", "1", "--no-sgd", "--updates", "2"]
    monkeypatch.chdir(tmp_path)
    assert main(["prove", *options, "--json", str(PLANTED / "right_auto.py")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] in ("agrees", "bit-equal")
    wrong: subprocess.CompletedProcess[str] = echelon_command("prove", *options, str(PLANTED / "batch_norm.py"))
    assert wrong.returncode == 1 and "DIFFERS" in wrong.stdout and "likely cause: batch norm over the local batch" in wrong.stdout
    pages = [p.read_text() for p in sorted((tmp_path / "runs").glob("prove-*/prove.html"))]
    assert len(pages) == 2 and any("DIFFERS" in page for page in pages)
    assert main(["prove", "no_such.py"]) == 2
    (tmp_path / "half.py").write_text("import torch\nx = = 1\n")
    assert main(["prove", "half.py"]) == NOTHING_COMPARED and "line 2: invalid syntax" in capsys.readouterr().out
    assert main(["prove", "--runs", "half.py/runs", str(PLANTED / "right_auto.py")]) == 2  # before any row
    assert main(["prove", "--ranks", "0", str(PLANTED / "right_auto.py")]) == 2


def test_batches_are_joined_by_their_structure() -> None:
    a, b = {"x": torch.ones(2, 3), "n": [1, 2], "k": "same"}, {"x": torch.zeros(1, 3), "n": [3], "k": "same"}
    joined = join([a, b], [2, 1])
    assert joined["x"].shape == (3, 3) and joined["n"] == [1, 2, 3] and joined["k"] == "same"
    with pytest.raises(NotJoinable, match="shapes"):
        join([torch.ones(1, 2), torch.ones(1, 3)], [1, 1])
    with pytest.raises(NotJoinable, match="values"):
        join([(torch.ones(1), 1), (torch.ones(1), 2)], [1, 1])
    with pytest.raises(NotJoinable, match="other numbers"):
        join([(torch.ones(2, 4), torch.ones(3, 4))] * 2, [5, 5])
    assert digest(torch.ones(2, 2)) != digest(torch.ones(4)) != digest(torch.ones(4, dtype=torch.float64))
    # Of objects, whatever memory their tensors lie in; of sparse and nested tensors.
    one, same, other = (collections.deque([torch.full((3,), value)]) for value in (1.0, 1.0, 2.0))
    assert digest(one) == digest(same) != digest(other)
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3).to_sparse()) != digest(torch.ones(3, 3).to_sparse())
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(each)], layout=torch.jagged) for each in (3, 3, 4)]
    assert digest(nested[0]) == digest(nested[1]) != digest(nested[2])


BOXES = [torch.ones(n, 4) for n in (1, 3, 2)]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(3, 3, 8, 8), [{"boxes": boxes} for boxes in BOXES]),
        [{"image": torch.ones(3, 8, 8), "boxes": boxes} for boxes in BOXES],
        (tuple(torch.ones(3, 8, 8 + i) for i in range(3)), tuple({"boxes": boxes} for boxes in BOXES)),
        {"x": BOXES, "y": torch.arange(3), "names": ["a", "b", "c"], "split": "train"},
        defaultdict(list, x=torch.ones(3, 2), y=torch.arange(3)),
        [torch.ones(3, 4), torch.arange(3)],
        [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)],
        np.arange(6).reshape(3, 2),
    ],
    ids=["images and lists", "list of mappings", "zipped", "mapping", "with a default", "fields", "scalars", "array"],
)
def test_a_batch_is_what_its_samples_are_put_together(batch: Any) -> None:
    samples = Samples(batch, 3)
    assert samples.count == len(set(samples.checksums())) == 3 or not isinstance(batch, list)
    parts = [samples.part(0, 1), samples.part(1, 3)]
    assert digest(join(parts, [1, 2])) == digest(batch) and type(join(parts, [1, 2])) is type(batch)
    assert digest(on_host(batch)) == digest(batch) and type(on_host(batch)) is type(batch)
    with pytest.raises(NotDivisible):
        Samples({"x": torch.ones(2), "y": torch.ones(3)}, 5)


def test_random_numbers_are_those_of_float32_in_float64() -> None:
    """So that initial values, and the order of a shuffle after them, are the same."""

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = [nn.Linear(7, 5), nn.Embedding(9, 4), nn.GRU(3, 4), nn.Conv2d(2, 3, 3), nn.MultiheadAttention(8, 2)]
        nn.init.trunc_normal_(layers[0].weight)
        nn.init.orthogonal_(layers[1].weight)
        noise = [torch.randn(3, 4), torch.rand(3), torch.randn_like(layers[0].weight), torch.empty(4).exponential_()]
        chances = torch.full((9,), 0.5)
        choices = [
            torch.bernoulli(chances),
            torch.multinomial(chances, 3),
            nn.functional.dropout(torch.ones(40)),
            torch.randperm(9),
        ]
        return [*(p for layer in layers for p in layer.parameters()), *noise, *choices]

    single = drawn()
    torch.set_default_dtype(torch.float64)
    try:
        with without_narrow_casts():
            double = drawn()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(single, double, strict=True):
        assert other.dtype is (torch.float64 if one.is_floating_point() else one.dtype)
        assert torch.allclose(one.double(), other.double(), atol=1e-6)


def test_a_matrix_of_nothing_is_refused() -> None:
    with refused(ProveError):
        matrix(["ddp"], [], [1], sgd=True)
    with refused(LayoutError):
        matrix(["ddp", "nosuch"], [2], [1], sgd=True)
    labels = [(r.label, r.ranks) for r in matrix(["ddp", "hsdp"], [1, 2, 4], [1, 2], sgd=True)]
    assert ("ddp, accumulation 2", 2) in labels and ("hsdp", 4) in labels and ("hsdp", 2) not in labels
    assert ("ddp, sgd", 2) in labels and ("none", 1) in labels


MUON = """
def make(): return nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
class Muon(ech.AutoUnit):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return nn.functional.cross_entropy(out, data[1]), out
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.Muon(module.parameters(), lr=1e-2), None
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
ech.train(Muon(module=make(), layout="fsdp"), ech.Loader(data, global_batch=16), max_epochs=1)
"""


@pytest.mark.full
def test_what_an_optimizer_computes_in_half_precision_is_compared_in_float64(tmp_path: Path) -> None:
    """Muon's products in bfloat16 are summed up in another order where a matrix is sharded."""
    row = _row(tmp_path, MUON, updates=3, layout="fsdp")
    assert row.verdict.startswith("agrees (float64)"), show.details(row)


MOMENTA = """
class Momenta(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = torch.zeros(p.shape, dtype=torch.bfloat16)
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "fast" not in state:
                state["fast"] = torch.zeros(p.shape, dtype=torch.bfloat16)
            for name, weight in (("fast", 0.5), ("slow", 0.1)):
                state[name].lerp_(p.grad.to(torch.bfloat16), weight)
                p.sub_(state[name].to(p.dtype), alpha=self.param_groups[0]["lr"])
class Halves(ech.AutoUnit):
    def compute_loss(self, state, data):
        out = self.module(data[0])
        return nn.functional.mse_loss(out, data[1]), out
    def configure_optimizers_and_lr_scheduler(self, module):
        return Momenta(module.parameters()), None
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
ech.train(Halves(module=nn.Linear(16, 4), layout="ddp"), ech.Loader(data, global_batch=16), max_epochs=1)
"""


@pytest.mark.full
def test_what_an_optimizer_keeps_in_half_precision_is_float64_with_what_it_casts(tmp_path: Path) -> None:
    """Its casts were float64 alone: "expected dtype c10::BFloat16 for `end` but got dtype double"."""
    row = _row(tmp_path, MOMENTA, updates=3, float64=True)
    assert row.verdict in ("agrees", "bit-equal"), show.details(row)
