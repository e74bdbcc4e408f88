"""Why a row differs: the causes that its numbers and its records show."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from echelon.common.errors import RankFailedError
from echelon.prover import causes
from echelon.prover.causes import Cause
from echelon.prover.judge import mean_loss
from echelon.prover.on_ranks import Judged, OnRanks, ReferenceStore
from echelon.prover.parts import mistakes_of
from echelon.prover.proof import Difference, Result
from echelon.prover.rank import run_reference
from echelon.prover.records import micros_in_order

__all__ = ["Explanation"]

DRIFT = "parameters that drift apart"


class Explanation:
    """Finds why a row differs; tries likely mistakes in another process where the records alone show none."""

    def __init__(self, on_ranks: OnRanks, references: ReferenceStore, folder: Path) -> None:
        self._on_ranks, self._references, self.folder = on_ranks, references, folder

    def explain(self, result: Result, final: Judged) -> None:
        """Add the cause that numbers and records show: the first of the rules that applies."""
        ran, reference, first = final.ran, final.reference, final.verdict.first
        records, known = ran.records, {name for name, _ in result.causes}
        if known & causes.CHANGE_EVERYTHING:
            return
        probed = self._references.probed(ran, reference) if not known or known == {DRIFT} else None
        if probed is not None and (state_cause := causes.of_state(records, probed)):
            # State that differs between ranks only later does not explain an earlier difference.
            until = [replace(r, updates=r.updates[: first.update + 1]) for r in records] if first and not known else records
            earlier = self._of_first(final, first, known=False) if first and not causes.of_state(until, probed) else None
            result.causes = (
                [earlier, state_cause] if earlier and earlier[0] == "an operation over the whole batch" else [state_cause]
            )
            return
        if known == {DRIFT}:
            # Parameters that drift apart after a step do not explain a difference in its loss or gradients.
            if first is not None and first.phase in ("forward", "gradient") and first.update <= causes.parameters_apart(records):
                result.causes[:0] = [cause for cause in (self._of_first(final, first, known=True),) if cause]
            return
        if not ran.is_auto and not known and any(m.streams for r in records for m in r.micros):
            result.verdict, result.first = "not possible", None
            result.message = (
                "its own train_step draws random numbers: each rank for its own samples, one process for all samples at once, so "
                "there is nothing to compare with. The draws of an AutoUnit can be repeated micro-batch by micro-batch."
            )
            return
        k = causes.gradients_apart(records)
        if k is not None and known == {"missing all-reduce"} and (first is None or first.update >= k):
            tried = self._tried_mistakes(final, k)
            if tried is not None and not causes.is_of_one_rank(*tried, records, k):
                result.causes = [("gradients that each rank changes", result.causes[0][1])]
            return
        if first is not None:
            result.causes += [
                cause for cause in (self._of_first(final, first, known=bool(known)),) if cause and cause[0] not in known
            ]

    def _of_first(self, final: Judged, first: Difference, *, known: bool) -> Cause | None:
        """The cause that the first difference shows."""
        cause, owners = (
            causes.from_verdict(final.verdict, final.ran.records, final.reference.facts),
            final.ran.records[0].owners,
        )
        if not cause and not known and first.phase in ("gradient", "update"):
            kind, (values, right) = "gradients" if first.phase == "gradient" else "parameters", final.values_at(first.update)
            cause = causes.of_shards(first, values[kind], right[kind], owners)
        if not cause and first.phase in ("forward", "gradient"):
            tried = self._tried_mistakes(final, first.update)
            records = final.ran.records
            cause = causes.from_mistakes(first, *tried, records) if tried else causes.of_variables(records, first.update)
        return cause or (causes.of_step(first, owners) if not known else None)

    def _tried_mistakes(self, final: Judged, k: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
        """The row's and the right values of update k, and what likely mistakes would give."""
        ran = final.ran
        try:
            mistakes = self._on_ranks.launch(run_reference, 1, self._on_ranks.replay(ran, self.folder), partial(mistakes_of, k=k))
        except RankFailedError:  # the row differs whether or not it can be said why
            return None
        values, right = final.values_at(k)
        values["loss"], values["norm"] = mean_loss(micros_in_order(ran.records)[k]), ran.records[0].norms[k]
        return values, right, mistakes
