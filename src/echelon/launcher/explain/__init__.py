"""Why a run stopped: from what it left in its folder, which rank is to blame and for what, or that nothing tells.

`Evidence` is what is known, `explain` what follows from it. Both are pure, and need no torch.
"""

from echelon.launcher.explain.evidence import Evidence, RankEvidence
from echelon.launcher.explain.rules import explain
from echelon.launcher.explain.verdict import Verdict

__all__ = ["Evidence", "RankEvidence", "Verdict", "explain"]
