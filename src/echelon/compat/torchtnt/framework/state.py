"""torchtnt.framework.state."""

from typing import TypeAlias

from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State

__all__ = ["ActivePhase", "EntryPoint", "PhaseState", "State", "TPhaseState"]

TPhaseState: TypeAlias = PhaseState
