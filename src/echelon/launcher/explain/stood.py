"""Ranks that all stood in code of their own, none of them in a call that waits for others."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.contracts.pulse import Phase
from echelon.launcher.explain.evidence import Evidence, RankEvidence
from echelon.launcher.explain.flight import Wait
from echelon.launcher.explain.stacks import waits_in
from echelon.launcher.explain.verdict import Verdict
from echelon.launcher.explain.words import grouped, place, sentence, they_did, together

__all__ = ["stood"]

_DATA = (Phase.DATA, Phase.EVAL_DATA)
_OF_LOADER = (
    "A process that loads data gives nothing: num_workers=0 shows the line in which it stands, LoaderOptions(timeout_s=...) ends "
    "the run with the sample's number."
)


def stood(evidence: Evidence, waits: Mapping[int, tuple[Wait, str]]) -> Verdict | None:
    """All ranks together: each is where it would be without the others. A lone rank waits for no other, wherever it stands."""
    ranks = [evidence.rank(number) for number in evidence.all_ranks]
    if evidence.hang_after_s is None or evidence.failures or not ranks:
        return None
    if any(not place(rank) for rank in ranks) or (len(ranks) > 1 and (waits or not all(map(_by_itself, ranks)))):
        return None
    loads = any(waits_in(rank.stack) == "a DataLoader" for rank in ranks)
    data = loads or all(rank.is_known and rank.standing is not None and rank.standing.phase in _DATA for rank in ranks)
    texts = {rank.rank: f"was{f' {rank.standing},' if rank.is_known else ''}{place(rank)}" for rank in ranks}
    headline = together([they_did(alike, text) for alike, text in grouped(texts)[:3]])
    text = f"No rank made progress for {evidence.hang_after_s:.0f} s: {headline}."
    lone = "" if len(ranks) == 1 else " None of them waited for another."
    text += lone + (f" {_OF_LOADER}" if loads else "")
    return Verdict(tuple(evidence.all_ranks), "slow data" if data else "stood still", headline, sentence(text))


def _by_itself(rank: RankEvidence) -> bool:
    """Whether its stack ends in a line of the user's, or in torch's loader. A backward pass may wait in C++, out of sight."""
    return bool(rank.stack) and (not rank.stack[0].of_library or waits_in(rank.stack) == "a DataLoader")
