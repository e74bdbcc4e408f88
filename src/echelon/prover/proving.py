"""Run the rows of one proof, compare them with their references, and look closer where float32 cannot tell.

A row that differs in float32, or cannot be compared in it, runs again in float64, which has the last word: a flipped gate differs
by a whole activation in float32 and does not flip in float64; a mistake is as large as before. If float64 is not possible, more
references take its place (`judge.py`), and the message says so.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import EchelonError, RankFailedError
from echelon.loop.target import Target
from echelon.prover import causes
from echelon.prover.explanation import Explanation
from echelon.prover.judge import compare
from echelon.prover.matrix import Fitting, Row
from echelon.prover.micro import digest
from echelon.prover.on_ranks import (
    CONSTANT,
    SHAKES,
    Computed,
    Judged,
    OnRanks,
    ReferenceStore,
    RowRun,
    are_alike,
    data_of,
    of_same_samples,
)
from echelon.prover.parts import split
from echelon.prover.pass_state import VARIABLE
from echelon.prover.probe import backward_draws
from echelon.prover.proof import IN_PART, SMALL_SHARE, Proof, Result, Verdict, by_float64
from echelon.prover.rank import run_reference
from echelon.prover.records import by_index, load_values, widths
from echelon.prover.samples import SampleChecks
from echelon.prover.values import UnitKind

__all__ = ["Proving"]

_RESCALED = 0.25
_NEVER_ROUNDING = 1e3  # times its tolerance: no further sample of rounding would explain that
_MOST_EXCUSED = 0.5  # of all elements, in float64, where an excused element has no gradient at all

_IN_TURN = (
    "in a loop of its own with several optimizers and accumulation, a loss follows other steps than in one process. Rows without "
    "accumulation are compared. All rows are for a unit, whose compute_losses fixes the order."
)
_BESIDE = (
    "the loop reads another loader beside the training loader, one batch with each micro-batch, and {why}: one process would "
    "pair other batches. A data set whose samples hold one of each loader's can be compared."
)


class Proving:
    """Runs and judges the rows of a proof; keeps what was learned from earlier rows, and the references."""

    def __init__(
        self,
        target: Target,
        folder: Path,
        updates: int,
        dtype: torch.dtype,
        seed: int,
        timeout_s: float | None,
        logs: Path | None,
    ) -> None:
        self.folder, self.updates, self.dtype = folder, updates, dtype
        self._on_ranks = OnRanks(target, folder, updates, seed, timeout_s, logs)
        self.proof = Proof(str(dtype).removeprefix("torch."))
        self._fitting = Fitting(self.row, self._say)
        self._references = ReferenceStore(self._on_ranks, folder)
        self._samples = SampleChecks(self._on_ranks, folder)
        self._explanation = Explanation(self._on_ranks, self._references, folder)
        self._batches: dict[Any, Any] = {}
        self._bitwise: dict[str, dict[str, torch.Tensor]] = {}
        self._splits: dict[bool, dict[str, Any]] = {}  # by whether draws are constant
        self._count = 0
        self._tested_compiled = False
        self._within_epoch: bool | None = None  # whether all updates compared so far are
        self._draws = True  # the latest row drew random numbers, or no row ran yet

    def results(self, rows: list[Row]) -> Iterator[Result]:
        """The results of the rows that this script allows."""
        return self._fitting.results(rows)

    def row(self, row: Row) -> Result:
        """Run one row, find or compute its reference, and compare."""
        self._count += 1
        row = replace(row, brief=row.brief and self._within_epoch is True, draws=self._draws)
        row_folder = self.folder / f"row-{self._count}"
        result = Result(row.label, row.ranks, yours=row.yours)
        try:
            ran = self._on_ranks.row(row, row_folder, self.dtype)
            if ran.records[0].is_double:
                self.dtype, self.proof.dtype = torch.float64, "float64"
                self._say("The script itself computes in float64: all rows do, and are compared in it.")
                shutil.rmtree(row_folder)
                ran = self._on_ranks.row(row, row_folder, self.dtype)
        except RankFailedError as error:
            result.verdict, result.message = self._on_ranks.failure(error, f"row-{self._count}")
            if result.message.startswith("global_batch") and not row.yours:
                result.message = f"each batch of the script would be divided: {result.message}"
            own = error.__cause__
            if row.cuts_sequences and row.fits_some and isinstance(own, Exception) and not isinstance(own, EchelonError):
                what = f"{type(own).__name__}: {own}".partition("\n")[0]
                result.verdict, result.message = "not possible", f"its own code does not run on a part of a sequence ({what})"
            if result.verdict == "failed":
                result.began = (row_folder / "initial.pt").exists()
                self._fitting.failed(str(error), row.ranks, began=result.began)
            return result
        try:
            self._compare(row, result, ran)
        except RankFailedError as error:
            result.verdict, why = self._on_ranks.failure(error, f"row-{self._count}")
            result.message = f"the reference in plain PyTorch could not be computed: {why}"
        for folder in row_folder.parent.glob(f"{row_folder.name}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return result

    # --- notes

    def _reference(self, ran: RowRun) -> Computed:
        """The reference of a row; adds its notes to the proof."""
        reference = self._references.of(ran)
        if ran.dtype is self.dtype and not ran.folder.name.endswith(CONSTANT):  # such rows have fewer updates
            self._note(ran, reference.facts)
            self._check_order(ran, data_of(ran))
        return reference

    def _note(self, ran: RowRun, facts: dict[str, Any]) -> None:
        if facts["drew"]:
            self._say(
                "Random numbers are drawn in the forward pass: "
                "the reference repeats each rank's draws, micro-batch by micro-batch."
            )
        elif not facts["joined"]:
            self._say("Micro-batches cannot be joined into one batch: the reference adds them up by their weights.")
        if ran.records[0].dropouts and ran.records[0].draws_by_itself:
            self._say(
                "Dropout was switched off in all rows and in one process, which cannot repeat the draws of the script's own step."
            )
        updates = ran.records[0].updates
        within = len(updates) == self.updates and all(m.epoch == 0 for u in updates for m in u)  # and training goes on
        if not ran.row.brief:
            self._within_epoch = within and self._within_epoch is not False
        if within:
            self._say(
                f"The {len(updates)} updates end within the first epoch: its last batch, and what changes from "
                "one epoch to the next, were not compared. With more --updates they are."
            )
        if self._on_ranks.updates_of(ran.row) < self.updates:
            self._say(
                "All updates were compared in the script's own row and in the first that divides batches between ranks; the "
                f"others on several ranks were compared for {len(updates)} updates."
            )
        if len(updates) < self._on_ranks.updates_of(ran.row):
            self._say(f"The script ended after {len(updates)} of {self.updates} updates: no more were compared.")
        for hook in facts["failed_hooks"]:
            self._say(f"One process does not call this hook again, since it failed there: {hook}.")
        untrained = sorted(ran.records[0].trainable - facts["held"])
        if untrained and not ran.records[0].flattened:
            more = f" ({len(untrained) - 3} more)" if len(untrained) > 3 else ""
            self._say(f"Trainable, but in no optimizer, also in one process: {', '.join(untrained[:3])}{more}.")

    def _say_how(self, ran: RowRun) -> None:
        """Note how rows ran, if the script compiles or computes in half precision."""
        row = ran.row
        compiled = row.compiles and row.is_compiled
        if row.yours and (compiled or row.half):
            how = " and ".join(filter(None, ("compiled" if compiled else "", f"in {row.half}" if row.half else "")))
            self._say(f"The script's own configuration ran {how}, as the script does; other rows uncompiled and in float32.")
        self._tested_compiled |= compiled
        if row.compiles and not self._tested_compiled:
            why = "--eager" if row.eager else "every row ran uncompiled"
            self._say(f"Compiled code was not tested: {why}.")

    def _say(self, note: str) -> None:
        if note not in self.proof.notes:
            self.proof.notes.append(note)

    def _check_order(self, ran: RowRun, key: Any) -> None:
        """Note global batches that depend on the ranks or the split. Those of an echelon.Loader never do (rule of truth 1)."""
        known = self._batches.setdefault(ran.row.optimizer, key)
        if not are_alike(key, known) and ran.records[0].global_batch is None:
            remedy = " With echelon.Loader, which is given the global batch, they would be the same."
            self._say(
                "The global batch depends on the number of ranks or on the split: every row was compared with one process on "
                f"its own batches.{remedy if ran.records[0].plan is not None else ''}"
            )

    # --- judging

    def _compare(self, row: Row, result: Result, ran: RowRun) -> None:
        records, result.precision = ran.records, ran.precision
        self._fitting.name(row, result, ran.row, records[0])
        if not records[0].updates:
            what = (
                "no optimizer took a step before it ended"
                if records[0].kind
                else "it never called echelon's train, fit or prepare"
            )
            result.verdict, result.message = "failed", f"there is nothing to compare: {what}."
            return
        if records[0].kind is UnitKind.LOOP_OF_SEVERAL and (row.accumulation or records[0].accumulation) > 1:
            result.verdict, result.message = "not possible", _IN_TURN
            return
        if records[0].reads_beside and (otherwise := _pairs_otherwise(ran)) is not None:
            result.verdict, result.message = otherwise[0], _BESIDE.format(why=otherwise[1])
            return
        self._say_how(ran)
        self._draws = ran.drew or ran.row.constant_draws
        seen = self._judge(result, ran)
        if result.verdict == "failed":
            return
        if row.parts and result.is_equal:
            result.verdict = "bit-equal" if self._same_bits(ran, seen.verdict) else "DIFFERS"
            result.message = result.message if result.verdict == "bit-equal" else "other bits than the first bitwise row"
        self._over_samples(result, seen)
        if result.is_equal and seen.ran.row.restores:  # state that moves within an update is a mistake that restoring it hides
            cause = causes.state_moves(seen.ran.records, self._references.state(seen.ran, seen.reference))
            result.verdict, result.causes = ("DIFFERS", [cause]) if cause is not None else (result.verdict, result.causes)
        if result.is_equal and (warned := records[0].warned):
            result.verdict = IN_PART  # one process makes the same mistake: the script itself scales its loss
            result.message = "; ".join(filter(None, (result.message, f"the run warns: {warned}")))

    def _judge(self, result: Result, ran: RowRun) -> Judged:
        """Judge a row against its reference, and find causes."""
        try:
            reference = self._reference(ran)
        except RankFailedError:
            if ran.row.apart or ran.records[0].kind is UnitKind.STEP:
                raise
            # A loop that failed on a joined batch cannot go on. Batches that are sorted, for example, are not so when joined.
            ran = replace(ran, row=replace(ran.row, apart=True))
            reference = self._reference(ran)
        seen = self._against(ran, reference)
        if seen.verdict.meaningless is not None:
            result.fill(seen.verdict)
            result.verdict, result.message = "failed", seen.verdict.meaningless
            return seen
        if not seen.verdict.clear:
            seen = self._with_state(seen)
        ran, reference = seen.ran, seen.reference
        result.causes = causes.from_records(ran.records, lambda: self._references.probed(ran, reference)["per_sample"])
        if not result.causes and not ran.folder.name.endswith(CONSTANT):
            result.causes = self._samples.causes(result, ran, joined=seen.reference.facts["joined"])
        if not result.causes and ran.row.yours and not ran.row.constant_draws:
            result.causes = self._of_backward(ran)
        if not result.causes:
            result.causes = self._of_scaler(ran, reference) or self._of_underflow(ran, reference)
        seen.is_recorded = bool(result.causes)
        self._decide(result, seen)
        if result.verdict == "DIFFERS" and not result.causes and (cause := causes.models_apart(ran.records)) is not None:
            result.causes = [cause]
        # One pass over a whole batch does not put back state that differed between ranks: that shows as a difference.
        in_one_pass = reference.facts["joined"] and (ran.row.constant_draws or not reference.facts["drew"])
        if result.is_equal and ran.row.restores:
            if in_one_pass:
                probed = self._references.probed(ran, reference)
                moves = causes.state_moves(ran.records, probed["state"]) is not None  # reported at the end
                cause = None if moves else causes.state_of_ranks(ran.records, probed)
            else:
                cause = causes.state_apart(ran.records, self._references.state(ran, reference))
            result.causes = [cause] if cause is not None else []
            result.verdict = "DIFFERS" if result.causes else result.verdict
        return seen

    def _with_state(self, seen: Judged) -> Judged:
        """Judge again, against a reference whose passes begin with the ranks' kept state, if that state matters."""
        state = self._references.state(seen.ran, seen.reference) if seen.ran.is_auto and not seen.ran.row.restores else {}
        if not state:
            return seen
        records = [u for r in seen.ran.records for u in r.updates]
        ran = replace(seen.ran, row=replace(seen.ran.row, restores=frozenset(p for u in records for m in u for p in m.state)))
        try:
            reference = self._reference(ran)
        except RankFailedError:
            return seen
        self._say(f"The forward pass keeps state ({', '.join(state)}): passes of the reference began with what the ranks had.")
        return self._against(ran, reference)

    def _against(self, ran: RowRun, reference: Computed) -> Judged:
        verdict = compare(ran.folder, reference.folder, ran.records, ran.dtype, half=ran.narrow is not None)
        return Judged(ran, reference, verdict)

    def _of_backward(self, ran: RowRun) -> list[tuple[str, str]]:
        """Other random numbers in the backward pass. A reference does not show these: it draws so, too, or is not compiled."""
        if not ran.drew or ran.dtype is not self.dtype:
            return []
        replay = replace(self._on_ranks.replay(ran, self.folder), compiled=ran.row.is_compiled)
        with contextlib.suppress(RankFailedError):
            depends = self._on_ranks.launch(run_reference, 1, replay, backward_draws)["depends"]
            if depends is not None:
                seen = f"the gradient of {depends[0]} changes by {depends[1]:.1e} with the RNG state between the two passes"
                return [("other random numbers in the backward pass", seen)]
        return []

    def _of_scaler(self, ran: RowRun, reference: Computed) -> list[tuple[str, str]]:
        """Causes if the factor of the script's own gradient scaler changes the gradients at the optimizer's step."""
        if not ran.records[0].scaler or ran.records[0].scales:
            return []
        if reference.scaling is None:
            reference.scaling, folder, first = [], self.folder / "rescaled", "update-000.pt"
            replay = replace(self._on_ranks.replay(ran, folder), rescaled=_RESCALED)
            with contextlib.suppress(RankFailedError):
                self._on_ranks.launch(run_reference, 1, replay)
                usual, rescaled = (load_values(each / first)["gradients"] for each in (reference.folder, folder))
                reference.scaling = causes.of_scaler(usual, rescaled, _RESCALED)
                shutil.rmtree(folder)
        return reference.scaling

    def _of_underflow(self, ran: RowRun, reference: Computed) -> list[tuple[str, str]]:
        first = "update-000.pt"
        wide = next((p / first for p in reference.folder.glob("again-wide-*") if (p / first).exists()), None)
        if ran.row.narrow is None or wide is None or ran.records[0].flattened:
            return []
        gradients, right = (load_values(each)["gradients"] for each in (ran.folder / first, wide))
        return causes.of_underflow(gradients, right, ran.row.narrow)

    # --- over samples

    def _over_samples(self, result: Result, seen: Judged) -> None:
        """Check weights, and operations over samples, if the reference trained on each micro-batch alone.

        Such a reference adds up micro-batches by the unit's own weights, and so repeats a mistake in them. Passes that drew
        random numbers run again with constant draws, so that they can be joined; batches that cannot be joined are taken apart
        in one process.
        """
        ran, records = seen.ran, seen.ran.records
        drew = not ran.row.constant_draws and ran.has_streams
        if (not drew and seen.reference.facts["joined"]) or ran.row.workers:
            return
        speaks = any(r.communicates for r in records)
        unsure = result.verdict == "not possible"
        if drew and result.verdict == "DIFFERS":
            # One process does not repeat collectives and a loop's variables; and in a loop of several optimizers, it computes
            # losses that follow the first optimizer's step before that step, in all micro-batches but the last.
            in_turn = records[0].kind is UnitKind.LOOP_OF_SEVERAL
            state = () if speaks or in_turn else self._references.state(ran, seen.reference)
            unsure = speaks or in_turn or any(name.startswith(VARIABLE) for name in state)
        why = "batches cannot be joined into one"
        if not drew and speaks and result.verdict == "DIFFERS" and not seen.is_recorded:
            result.verdict, result.first, result.causes = "undecided", None, []
            result.message = f"{why}, and its steps communicate with other ranks: one process has nothing to compare with"
            return
        if seen.is_recorded or not (result.is_equal or unsure):
            return
        if drew:
            other, why = self._with_constant_draws(seen)
            if other is not None:
                if not other.is_equal or unsure:
                    self._take_over(result, other)
                if other.verdict == "DIFFERS" or not why:
                    return
            elif unsure:
                result.verdict, result.message, result.first = "undecided", f"it draws random numbers, and {why}", None
                return
            else:
                self._leave_untested(result, why)
                return
        self._split(result, seen, drew, speaks, why)

    def _with_constant_draws(self, seen: Judged, alike: frozenset[tuple[str, int]] = frozenset()) -> tuple[Result | None, str]:
        """Run and judge the row with constant draws. Returns its result, and why that does not show everything, or ""."""
        row = replace(seen.ran.row, constant_draws=True, drawn_alike=alike, restores=frozenset())
        result = Result(row.label, row.ranks)
        try:
            ran = self._on_ranks.row(row, Path(f"{seen.ran.folder}{CONSTANT}"), self.dtype)
            if not ran.records[0].updates:
                return None, "it did not train again"
            judged = self._judge(result, ran)
        except RankFailedError as error:
            text = str(error.__cause__ or error).strip().splitlines()
            return None, f"it fails with draws that are fixed for each sample ({text[0] if text else type(error).__name__})"
        facts, kinds = judged.reference.facts, set[Any]().union(*(r.kinds for r in ran.records))
        by_chance = frozenset((name, dims) for name, dims, _ in kinds ^ facts["kinds"]) - row.drawn_alike
        if not result.is_equal and by_chance:  # by chance, a first dimension is as long as the batch
            for each in ran.folder.parent.glob(f"{ran.folder.name}*"):
                shutil.rmtree(each)
            return self._with_constant_draws(seen, row.drawn_alike | by_chance)
        unknown = next((r.unknown_draw for r in ran.records if r.unknown_draw), None)
        if not result.is_equal and unknown is not None:
            return None, f"{unknown} draws other numbers for every sample"
        if not result.is_equal and ran.has_streams:
            drawn = self._references.probed(ran, judged.reference)["per_sample"]
            if drawn is None or drawn:
                return None, f"every sample draws its own numbers from {', '.join(sorted(drawn or ())) or 'a generator'}"
        if result.is_equal and (names := self._drawn_by_batch(seen, ran, judged)):
            return None, f"every rank draws for its whole batch ({', '.join(names)}), where one process draws once for all"
        if not facts["joined"]:
            return result, "batches cannot be joined into one"
        shapes = set[Any]().union(*(r.shapes for r in ran.records)) ^ facts["shapes"]
        if result.is_equal and shapes:  # they depend on the number of samples, and all samples share the draws
            return None, "it draws {} of shape {}, which has no row for each sample".format(*min(shapes))
        return result, ""

    def _drawn_by_batch(self, seen: Judged, ran: RowRun, judged: Judged) -> list[str]:
        """Streams, not torch's, from which more samples draw no more (such as weights of a loss), but each rank draws its own
        numbers. In the row with constant draws, `ran`, all ranks drew the same.
        """
        drawn = set[str]().union(*(m.streams for r in ran.records for m in r.micros)) - {"torch", "cuda"}
        first = [m for m in by_index(seen.ran.records, 0)[0] if m.weight > 0]
        apart = {name for name in drawn if len({digest(m.streams.get(name)) for m in first}) > 1}
        per_sample = self._references.probed(ran, judged.reference)["per_sample"] if apart else None
        return sorted(apart - per_sample) if per_sample is not None else []

    def _take_over(self, result: Result, other: Result) -> None:
        result.verdict, result.first, result.causes, result.updates = other.verdict, other.first, other.causes, other.updates
        result.loss, result.gradient, result.parameter = other.loss, other.gradient, other.parameter
        result.precision = other.precision or result.precision
        result.message = "; ".join(
            filter(None, ("compared with the same random numbers for a sample in any batch", other.message))
        )

    def _split(self, result: Result, seen: Judged, drew: bool, speaks: bool, why: str) -> None:
        """Take a batch apart in one process, unless ranks communicate: one process shows nothing of what they exchange."""
        if speaks:
            parts: dict[str, Any] = {"why_not": "its steps communicate with other ranks"}
        else:
            constant = drew or seen.ran.row.constant_draws
            if constant not in self._splits:
                self._splits[constant] = self._splitting(seen, constant)
            parts = self._splits[constant]
        if parts["why_not"] is not None:
            self._leave_untested(result, f"{why}, and {parts['why_not']}")
        elif parts["error"] > parts["allowed"]:
            result.verdict = "DIFFERS"
            norms = seen.ran.records[0].batch_norms
            result.causes = [causes.of_split(parts["best"], parts["error"], norms, padded=parts["padded"])]
        elif not parts["padded"] and len(widths(seen.ran.records)) > 1:
            why = "batches are padded to different widths, and were taken apart at their own width"
            self._leave_untested(result, why, "what the padding itself adds to a loss")

    def _leave_untested(self, result: Result, why: str, what: str = "weights, and operations over samples") -> None:
        result.verdict = IN_PART
        untested = f"not tested: {what}. {why[0].upper()}{why[1:]}"
        result.message = "; ".join(filter(None, (result.message, untested)))

    def _splitting(self, seen: Judged, constant_draws: bool) -> dict[str, Any]:
        row = replace(seen.ran.row, constant_draws=constant_draws)
        replay = self._on_ranks.replay(replace(seen.ran, row=row), seen.reference.folder)  # which has the initial values
        for how in ("wide", "right"):
            with contextlib.suppress(RankFailedError):
                return self._on_ranks.launch(run_reference, 1, replay, split, how)
        return {"why_not": "one process cannot train on a part of a batch"}

    def _decide(self, result: Result, seen: Judged) -> None:
        """The verdict, with causes if it is a bad one."""
        final, unconfirmed = seen, ""
        # A cause in the records is not rounding. And float64, in which nothing is cast, cannot show what casts do wrong.
        if not seen.verdict.clear and not result.causes and not (seen.ran.narrow and seen.verdict.first):
            final, unconfirmed = self._closer(seen)
        verdict = final.verdict
        limit = _MOST_EXCUSED if final.ran.dtype is torch.float64 else SMALL_SHARE
        result.fill(verdict)
        differs = verdict.first is not None and (verdict.first.update < verdict.resolved or not verdict.resolved)
        if result.causes or differs:
            result.verdict, result.message = "DIFFERS", unconfirmed
            result.precision = "float64" if final.ran.dtype is torch.float64 else result.precision
            self._explanation.explain(result, final)
            return
        notes = [seen.in_words] if final.ran.dtype is not self.dtype else []
        if not verdict.exact and (verdict.blind or verdict.excused > limit):
            notes += [final.verdict.blindness, unconfirmed]
        result.message, result.first = "; ".join(filter(None, notes)), None
        if not verdict.resolved or (verdict.excused > limit and not verdict.exact):
            result.verdict = "undecided"
            self._explanation.explain(result, final)
            return
        result.updates = verdict.resolved
        if final.ran.dtype is not self.dtype:
            result.verdict = by_float64(seen.ran.precision)
        else:
            result.verdict = "bit-equal" if verdict.bit_equal and verdict.resolved == verdict.updates else "agrees"

    def _closer(self, seen: Judged) -> tuple[Judged, str]:
        """Judge the row in float64, or if that is not possible, with more references. Returns also why it was not float64."""
        why = ""
        if seen.ran.dtype is not torch.float64:
            try:
                wide = self._on_ranks.row(seen.ran.row, Path(f"{seen.ran.folder}-float64"), torch.float64)
                if not of_same_samples(seen.ran, wide):
                    why = "the script has its samples in another order"
                else:
                    reference = self._reference(wide)
                    final = Judged(wide, reference, compare(wide.folder, reference.folder, wide.records, wide.dtype))
                    why = self._settled(final) or ""
                if not why:
                    return final, ""
            except RankFailedError as error:
                text = str(error.__cause__ or error).strip().splitlines()
                why = f"it fails ({text[0] if text else type(error).__name__})"
        else:
            why = self._settled(seen) or ""
            if not why:
                return seen, ""
        narrowest = self._references.probed(seen.ran, seen.reference)["narrowest"]
        self._references.shake(seen.ran, seen.reference, SHAKES, narrowest)
        half = seen.ran.narrow is not None
        verdict = compare(seen.ran.folder, seen.reference.folder, seen.ran.records, seen.ran.dtype, narrowest, half=half)
        return Judged(
            seen.ran, seen.reference, verdict
        ), f"compared with the rounding of {SHAKES} references of its own precision: in float64 {why}"

    def _settled(self, final: Judged) -> str | None:
        """Measure rounding in float64, if the fixed tolerance did not suffice. Returns why float64 cannot tell, or None."""
        ran, reference = final.ran, final.reference
        for samples in (0, 1, SHAKES):
            if samples:
                self._references.shake(ran, reference, samples, None)
                final.verdict = compare(ran.folder, reference.folder, ran.records, ran.dtype)
            if final.verdict.clear:
                return None
            narrowest = self._references.probed(ran, reference)["narrowest"] if samples else None
            if narrowest is not None and torch.finfo(narrowest).eps > torch.finfo(ran.dtype).eps:
                return f"the forward pass computes in {str(narrowest).removeprefix('torch.')}"
            if samples and final.verdict.first is not None and final.verdict.used > _NEVER_ROUNDING:
                return None
        return None

    def _same_bits(self, ran: RowRun, verdict: Verdict) -> bool:
        """Whether this row's last parameters have the very bits of the first row of the bit-equal mode."""
        last = load_values(ran.folder / f"update-{verdict.updates - 1:03d}.pt")["parameters"]
        known = self._bitwise.setdefault(ran.row.optimizer, last)
        return known is last or all(torch.equal(last[n], known[n]) for n in known)


def _pairs_otherwise(ran: RowRun) -> tuple[str, str] | None:
    """The verdict, and why one process would meet other batches of a loader beside the training loader; None if it would not."""
    updates = [update for record in ran.records if not record.is_replica for update in record.updates]
    if any(len(update) > 1 for update in updates):
        return "not possible", "there are several in an update"
    # With draws, one process goes by the ranks' micro-batches, of which each would take a whole batch of the other loader.
    is_apart = len(updates) > len(ran.records[0].updates)
    return ("undecided", "it draws random numbers") if is_apart and (ran.has_streams or ran.row.constant_draws) else None
