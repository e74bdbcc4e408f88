"""Why a run stopped: which rank caused it and how, or that the records do not show it. All is read from the run's folder.

`Evidence` holds what is known, `explain` draws the conclusion, `blamed` chooses the failure to show first. None needs torch or a
running job, so the launcher's closing lines and `echelon explain` give the same answer.
"""

from echelon.diagnosis.blame import blamed
from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.rules import explain
from echelon.diagnosis.verdict import Verdict

__all__ = ["Evidence", "RankEvidence", "Verdict", "blamed", "explain"]
