"""Why a row differs: the causes that its numbers and its records show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.common.errors import RankFailedError
from echelon.prover import causes
from echelon.prover.judge import mean_loss
from echelon.prover.on_ranks import OnRanks
from echelon.prover.proof import Result
from echelon.prover.ran import Judged, values_of_first
from echelon.prover.rank import run_mistakes
from echelon.prover.reference import micros_in_order
from echelon.prover.reference_store import ReferenceStore
from echelon.prover.values import load_values

__all__ = ["Explanation"]


class Explanation:
    """Tries likely mistakes in another process where the records alone do not show one."""

    def __init__(self, on_ranks: OnRanks, references: ReferenceStore, folder: Path) -> None:
        self._on_ranks, self._references, self.folder = on_ranks, references, folder

    def explain(self, result: Result, final: Judged) -> None:
        """Add the causes that numbers and records show."""
        ran, reference, verdict = final.ran, final.reference, final.verdict
        known = {name for name, _ in result.causes}

        def add(found: list[tuple[str, str]]) -> None:
            result.causes += [cause for cause in found if cause[0] not in known]

        if known & causes.CHANGE_EVERYTHING:
            return
        if not result.causes:
            add(causes.state_apart(ran.records, self._references.state(ran, reference)))
            if not result.causes and not self._references.probed(ran, reference)["repeatable"]:
                add(causes.not_repeatable(self._references.state(ran, reference)))
            if result.causes:
                return
        if not ran.is_auto and not result.causes and any(m.streams for r in ran.records for u in r["updates"] for m in u):
            result.verdict, result.first = "not possible", None
            result.message = (
                "its own train_step draws random numbers, on each rank for its own samples; one process draws for all at once: "
                "there is nothing to compare with. The draws of an AutoUnit can be repeated micro-batch by micro-batch."
            )
            return
        k = causes.gradients_apart(ran.records)
        if k is not None and known == {"missing all-reduce"} and (verdict.first is None or verdict.first.update >= k):
            tried = self._tried_mistakes(final, k)
            if tried is not None and not causes.is_of_one_rank(*tried, ran.records, k):
                result.causes = [("gradients that each rank changes", result.causes[0][1])]
            return
        if verdict.first is not None:
            add(found := causes.from_verdict(verdict, ran.records, reference.facts))
            if not result.causes and verdict.first.phase in ("gradient", "update"):
                add(causes.of_shards(verdict, *values_of_first(final), ran.records[0]["owners"]))
            if verdict.first.phase in ("forward", "gradient") and not found:
                add(self._mistakes(final))

    def _mistakes(self, final: Judged) -> list[tuple[str, str]]:
        assert final.verdict.first is not None
        tried = self._tried_mistakes(final, final.verdict.first.update)
        return causes.from_mistakes(final.verdict, *tried, final.ran.records[0]) if tried is not None else []

    def _tried_mistakes(self, final: Judged, k: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
        """The row's and the right values of update k, and what likely mistakes would give."""
        ran = final.ran
        try:
            mistakes = self._on_ranks.launch(run_mistakes, 1, self._on_ranks.replay(ran, self.folder), k)
        except RankFailedError:  # the row differs whether or not it can be said why
            return None
        folders = ran.folder, final.reference.folder
        mine, right = (load_values(folder / f"update-{k:03d}.pt") for folder in folders)
        mine["loss"], mine["norm"] = mean_loss(micros_in_order(ran.records)[k]), ran.records[0]["norms"][k]
        return mine, right, mistakes
