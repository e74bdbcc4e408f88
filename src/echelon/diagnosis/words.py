"""Ranks and what they do, in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from echelon.common.terminal import one_line, rank_ranges
from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import DEFAULT_GROUP, Call, Wait
from echelon.diagnosis.rank import is_check
from echelon.diagnosis.stacks import WAITED_FOR, Frame, of_traceback, user_frame, waits_in

__all__ = [
    "USED_ON_SOME",
    "doing",
    "frames_of",
    "grouped",
    "in_call",
    "lost_data_worker",
    "place",
    "sentence",
    "short",
    "stack_of",
    "they_did",
    "together",
    "while_others",
    "who",
]

# Added to mismatched sizes of gradients.
USED_ON_SOME = (
    "If parameters are sharded, as under fsdp, a layer that only some ranks use in a step causes this: call it on "
    "all ranks, with its output times 0 where it does not count."
)
_HEAD = "Traceback (most recent call last)"
# Further errors of reading from a dead process: torch's loader passes tensors through sockets and files.
_ENDS_OF_PIPES = frozenset(
    ("BrokenPipeError", "ConnectionRefusedError", "ConnectionResetError", "EOFError", "FileNotFoundError", "UnpicklingError")
)
_BUILT_AT = re.compile(r"\[enforce fail at [^\]\n]{1,300}\] ")


def who(ranks: Iterable[int]) -> str:
    """As "rank 2", "ranks 0, 1, 3" or "ranks 0-7, 12"."""
    return rank_ranges(ranks, shortest=4)


def short(text: str, most: int = 300) -> str:
    """The first line of a text, cleaned, and without the path where torch was built."""
    lines = _BUILT_AT.sub("", text.strip()).splitlines()
    line = one_line(lines[0].strip()) if lines else ""
    return line if len(line) <= most else f"{line[:most]}..."


def in_call(call: Call, group: str) -> str:
    """As "all_reduce #118", with the group if it is not the default one."""
    return f"{call}{'' if group == DEFAULT_GROUP else f' of group {group!r}'}"


def lost_data_worker(failure: Failure) -> bool:
    """Whether a data worker died, whatever the error's words are; False for an error that its dataset raised."""
    if failure.message.startswith("Caught "):
        return False
    files = [frame.file.replace("\\", "/") for frame in of_traceback(failure.traceback)]
    if not any("/torch/utils/data/" in file for file in files) or any(file.endswith("/data/_utils/fetch.py") for file in files):
        return False
    between = any("/multiprocessing/" in file for file in files)
    return "DataLoader worker" in failure.message or (failure.kind in _ENDS_OF_PIPES and between)


def stack_of(rank: RankEvidence) -> tuple[Frame, ...]:
    """Where the rank's failure was raised, else where the rank stood; innermost first."""
    failure = rank.failure or rank.later
    return (frames_of(failure) if failure is not None else ()) or rank.stack


def frames_of(failure: Failure) -> tuple[Frame, ...]:
    """Where the error was raised, innermost first.

    A library passes on another process's traceback in its message, and then that one counts. In an error that the user's own
    code raised, the message is only text.
    """
    head, message, _ = failure.traceback.rpartition(failure.message) if _HEAD in failure.message else ("", "", "")
    own = of_traceback(head) if message else ()
    return own if own and not own[0].of_library else of_traceback(failure.traceback)


def place(rank: RankEvidence) -> str:
    """The rank's innermost line in the user's code, as " at train.py:41 in load"; empty if unknown."""
    frame = user_frame(stack_of(rank))
    where = str(frame) if frame is not None else one_line(rank.where)
    return f" at {where}" if where else ""


def doing(rank: RankEvidence, waits: Mapping[int, tuple[Wait, str]]) -> str:
    """What a rank did when the others failed or were ended, as "waited in all_reduce #118"; empty if unknown.

    Args:
        waits: for each rank in a call that has not ended: the call, and its name.
    """
    if rank.stopped:
        return "was stopped"
    if rank.failure is not None and not rank.failure.is_victim and not is_check(rank.failure):
        return f"failed with {short(rank.failure.kind, 60)}"
    if rank.rank in waits:
        wait, call = waits[rank.rank]
        own = rank.flight.get(wait.group) if rank.flight is not None else None
        own_call = own.calls.get(wait.call.seq) if own is not None else None
        return f"waited in {call if own_call is None or own_call.op == wait.call.op else in_call(own_call, wait.group)}"
    name = waits_in(stack_of(rank))
    if name:
        return f"waited {'for' if name in WAITED_FOR else 'in'} {name}"
    if rank.ended == 0:
        return "had ended"
    where = place(rank)
    if rank.standing is not None and rank.is_known:
        return f"was {rank.standing}"
    return f"stood{where}" if where and rank.ended is None else ""


def grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Ranks with the same text, together; the largest group first."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        if text:
            alike.setdefault(text, []).append(rank)
    return sorted(((ranks, text) for text, ranks in alike.items()), key=lambda pair: (-len(pair[0]), pair[0]))


def they_did(ranks: Collection[int], text: str) -> str:
    """For one rank or several: "rank 0 was in update 9", "ranks 0, 1 were in update 9"."""
    return f"{who(ranks)} {text if len(set(ranks)) == 1 else re.sub('^was ', 'were ', text)}"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def together(parts: list[str]) -> str:
    """As "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def while_others(evidence: Evidence, guilty: Collection[int], waits: Mapping[int, tuple[Wait, str]]) -> str:
    """As " while ranks 0, 1, 3 waited in all_reduce #118"; empty if nothing is known of the others."""
    texts = {number: doing(rank, waits) for number, rank in evidence.ranks.items() if number not in guilty}
    parts = [they_did(ranks, text) for ranks, text in grouped(texts)[:3]]
    return f" while {together(parts)}" if parts else ""
