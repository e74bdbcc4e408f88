"""How long an update of a pipeline takes: each rank's own timeline, in which nothing arrives late, and then all of them together.

A rank goes on until it needs what another one sends; if that comes later, all that follows on the rank is later by as much.
Messages from one rank to another follow one after the other. Collectives of a stage's own ranks shift with its operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from echelon.common.errors import PlanError
from echelon.planner.links import Links
from echelon.planner.timeline import Timeline

__all__ = ["run_together"]


def run_together(timelines: Mapping[int, Timeline], links: Links) -> float:
    """Seconds of the update.

    Args:
        timelines: by rank of the world.
    Raises:
        PlanError: a rank waits for what nobody sends.
    """
    late = dict.fromkeys(timelines, 0.0)
    at = dict.fromkeys(timelines, 0)
    arrived: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by sender and receiver
    moves = True
    while moves:
        moves = False
        for rank, timeline in timelines.items():
            while at[rank] < len(timeline.messages):
                each = timeline.messages[at[rank]]
                if each.sends:
                    way = arrived[rank, each.peer]
                    starts = max(each.at + late[rank], way[-1] if way else 0.0)
                    way.append(starts + links.seconds("send", each.size, (rank, each.peer)))
                elif each.number < len(arrived[each.peer, rank]):
                    late[rank] = max(late[rank], arrived[each.peer, rank][each.number] - each.at)
                else:
                    break
                at[rank] += 1
                moves = True
    if stuck := [rank for rank, timeline in timelines.items() if at[rank] < len(timeline.messages)]:
        raise PlanError(
            f"rank {stuck[0]} waits for a message that no stage sends: the stages of the pipeline do not fit together."
        )
    return max(timeline.seconds + late[rank] for rank, timeline in timelines.items())
