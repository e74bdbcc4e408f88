"""Why a run stopped: from what it left in its folder, which rank is to blame and for what, or that nothing tells.

`Evidence` is what is known, `explain` what follows from it, `blamed` which failure is told first. None needs torch, or a run that
still goes on: the launcher's closing lines and `echelon explain` are the same answer.
"""

from echelon.diagnosis.blame import blamed
from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.rules import explain
from echelon.diagnosis.verdict import Verdict

__all__ = ["Evidence", "RankEvidence", "Verdict", "blamed", "explain"]
