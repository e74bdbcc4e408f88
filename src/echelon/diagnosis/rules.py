"""The rules that name a cause, in order: first what explains most, last what only follows from something else.

1. Nothing went wrong, or the run is still running. 2. A rank failed by itself: lost connections of other ranks follow from that.
3. Ranks only waited: for a stopped rank; because calls differ; for a rank that left; for one that did not come; or none waited
for another. If such a rank was handling an exception, that is the reason.
4. The launcher's own reason. 5. Unknown: show the evidence, and accuse no rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from echelon.common.terminal import one_line
from echelon.contracts.pulse import Phase
from echelon.contracts.stopping import REQUEUE, signal_name
from echelon.diagnosis import hung, mismatched
from echelon.diagnosis.batch import OUT_OF_MEMORY
from echelon.diagnosis.evidence import Evidence, RankEvidence
from echelon.diagnosis.failed import FROM_OUTSIDE, own_failure, summary
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.flight import Wait, waits
from echelon.diagnosis.handling import handling, was_handling
from echelon.diagnosis.stacks import waits_in
from echelon.diagnosis.verdict import FINE, RUNNING, UNKNOWN, Verdict
from echelon.diagnosis.words import USED_ON_SOME, grouped, in_call, place, sentence, short, they_did, together, who

__all__ = ["explain"]

_SHOWN = 40
_FROM_OUTSIDE = frozenset({"interrupted", "killed", "launcher", "launcher killed"})
_GOES_ON = "The same command goes on from the newest checkpoint."
# By the batch system's reason for a job's end: the cause, the reason in words, the remedy.
_OF_BATCH = {
    "TIME LIMIT": ("time limit", "at its time limit", f"{_GOES_ON} Ask for more time, or have it save earlier (--warn)."),
    "PREEMPTION": ("preempted", "to make room for another job", _GOES_ON),
    "NODE FAILURE": ("node lost", "because it lost a node", _GOES_ON),
    OUT_OF_MEMORY: ("host out of memory", "since its memory was used up", "Ask for more memory, or use fewer data workers."),
}
_LAUNCHER_KILLED = (
    "Its launcher ended without a word: it was killed, its machine was lost, or this folder's disk was full. The ranks end with "
    "it. The same command goes on from the newest checkpoint."
)
_RECEIVED = re.compile("preamble|[Rr]eceived|mismatch")  # a check of data received from another rank
# Rules that judge a snapshot: an absent rank may have been about to come.
_OF_A_MOMENT = frozenset({hung.left_early, hung.missing, hung.not_waiting, hung.behind})


def explain(evidence: Evidence) -> Verdict:
    """Why the attempt ended. Rules are tried in turn; the first verdict counts."""
    waiting = _waiting(evidence)
    verdict = _no_failure(evidence) or own_failure(evidence, waiting)
    if verdict is None:
        rules = (
            hung.stopped,
            mismatched.mismatch,
            mismatched.checked,
            mismatched.departs,
            hung.left_early,
            hung.all_in_call,
            hung.missing,
            hung.barrier,
            hung.deadlock,
            hung.receiving,
            hung.not_waiting,
            hung.behind,
            all_stalled,
        )
        verdicts = ((rule, verdict_of_rule) for rule in rules if (verdict_of_rule := rule(evidence, waiting)) is not None)
        rule, verdict = next(verdicts, (None, None))
        if verdict is not None and rule in _OF_A_MOMENT and _was_cut_off(evidence):
            text = f"{_LAUNCHER_KILLED} When its ranks were last checked, {verdict.headline}: that may have been on its way."
            verdict = Verdict((), "launcher killed", "its launcher ended without a word", text)
        verdict = verdict or _lone_check(evidence) or _by_launcher(evidence)
        if not (evidence.stopped or _was_cut_off(evidence)):
            verdict = verdict or _unknown(evidence)
            verdict = handling(evidence, waiting, verdict) or verdict
    verdict = verdict or _unknown(evidence)
    if verdict.cause in _FROM_OUTSIDE:
        verdict = _by_batch(evidence, verdict)
    seen = list(verdict.seen)
    if verdict.cause != FINE:
        logs = {rank: evidence.rank(rank).logged for rank in verdict.guilty}
        logged = [
            f"the log of {who([rank])} tells of {text}" for rank, text in logs.items() if text and text not in verdict.paragraph
        ]
        further = (hung.everybody(evidence, waiting), was_handling(evidence, verdict), logged)
        seen += [line for lines in further for line in lines[:_SHOWN]]
    differs = mismatched.mismatch(evidence, waiting)
    if differs is not None and not verdict.cause.startswith("mismatched") and verdict.cause not in (FINE, RUNNING):
        seen.append(f"also: {differs.headline}")
    return replace(verdict, seen=tuple(dict.fromkeys([*seen, *evidence.notes])))


def _waiting(evidence: Evidence) -> dict[int, tuple[Wait, str]]:
    """For each rank in a call that has not ended: the first such call in which a rank is missing, else the first.

    Gloo's records may leave a rank's last call open for good: if no rank is missing in it, the stack must agree.
    """
    first_waits: dict[int, tuple[Wait, str]] = {}
    for wait in waits(evidence.flights, evidence.all_ranks):
        certain = bool(wait.missing or wait.unknown)
        for rank in wait.waiting:
            if not certain and (stack := evidence.rank(rank).stack) and not waits_in(stack):
                continue
            known = first_waits.get(rank)
            if known is None or (wait.missing and not known[0].missing):
                first_waits[rank] = wait, in_call(wait.call, wait.group)
    return first_waits


def _no_failure(evidence: Evidence) -> Verdict | None:
    code = evidence.exit_code
    if code == REQUEUE and evidence.stopped:  # a silent node, or a start that never ran: the ranks' errors follow from it
        stopped = one_line(evidence.stopped)
        text = f"No rank failed by itself. The launcher said: {stopped}. {_GOES_ON}"
        return Verdict((), "launcher", short(stopped, 200), text)
    if evidence.failures or evidence.hang_after_s is not None:
        return None
    if evidence.stopped and code not in (0, REQUEUE):
        return None
    if code == 0:
        return Verdict((), FINE, "it ended well", "It ended well: every rank has completed.")
    if code == REQUEUE:
        if (verdict := _told_to_some(evidence)) is not None:
            return verdict
        text = f"It was asked to stop (by a signal or a time limit), and did. {_GOES_ON}"
        return Verdict((), "asked to stop", "it was asked to stop", text)
    if code is not None and code > 128 and not evidence.stopped:
        name = signal_name(code - 128)
        text = f"It was ended by {name}, sent to its launcher by a user, a closing terminal or the batch system."
        return Verdict((), "interrupted", f"it was ended by {name}", text)
    if evidence.running:
        return Verdict((), RUNNING, "it still runs", "It still runs, and no rank has failed.")
    return None


def _told_to_some(evidence: Evidence) -> Verdict | None:
    """A signal that only some ranks received, and for which all stopped: a launcher would send it to all."""
    left = [rank for rank in evidence.ranks.values() if rank.ended == REQUEUE]
    asked = sorted(rank.rank for rank in left if rank.heard)
    if not asked or len(asked) == len(left):
        return None
    names = together(sorted({one_line(evidence.rank(number).heard) for number in asked}))
    headline = f"{who(asked)} {'was' if len(asked) == 1 else 'were'} sent {names}"
    text = f"{headline}, and no other rank was: all stopped for it. {FROM_OUTSIDE} {_GOES_ON}"
    return Verdict(tuple(asked), "asked to stop", headline, sentence(text))


def _lone_check(evidence: Evidence) -> Verdict | None:
    """A collective rejected its input, and no record tells which rank is at fault."""
    own = [f for f in evidence.failures if not f.is_victim]
    if not own:
        return None
    first = Failure.first(own)
    crashed = first.kind.startswith("SIG")
    how = f"ended with {first.kind}" if crashed else "failed"
    headline = f"{who([first.rank])} {how} in a collective{place(evidence.rank(first.rank))}"
    text = f"{headline}: {_words(first)}"
    if not crashed and not _RECEIVED.search(first.message):
        why = "The call rejected this rank's input before anything was sent: check the sizes and types of its tensors."
        return Verdict((first.rank,), "mismatched shape", headline, sentence(f"{text} {why}"))
    why = (
        "Ranks passed it different shapes or types, or called different collectives; no flight record tells which. "
        f"`--check-collectives` names them at the call. {USED_ON_SOME}"
    )
    return Verdict((), "mismatched shape", headline, sentence(f"{text} {why}"))


def _was_cut_off(evidence: Evidence) -> bool:
    """Whether the launcher was killed before any rank was found to be at fault."""
    return not evidence.failures and evidence.exit_code is None and evidence.hang_after_s is None


def _by_batch(evidence: Evidence, verdict: Verdict) -> Verdict:
    """The batch system's reason for an end from outside, if it gives one. A rank killed for lack of memory stays named."""
    if evidence.batch not in _OF_BATCH:
        return verdict
    cause, why, remedy = _OF_BATCH[evidence.batch]
    guilty = verdict.guilty if evidence.batch == OUT_OF_MEMORY else ()
    headline = verdict.headline if guilty else f"the batch system ended the job {why}"
    text = f"{headline}: the job's memory was used up, as its output says" if guilty else f"{headline}, as its output says"
    return replace(verdict, guilty=guilty, cause=cause, headline=headline, paragraph=f"{sentence(text)}. {remedy}")


def _words(failure: Failure) -> str:
    """The rank's own message on one line; of a signal, the message that the process printed before it aborted."""
    words = failure.message.partition("\n")[2] if failure.kind.startswith("SIG") else ""
    return summary(words or failure.message)


def _by_launcher(evidence: Evidence) -> Verdict | None:
    """The launcher's reason in place of a rank's failure: a lost node, or a refused start."""
    if not evidence.stopped or evidence.failures:
        return None
    stopped = one_line(evidence.stopped)
    return Verdict((), "launcher", short(stopped, 200), f"No rank failed by itself. The launcher said: {stopped}")


def _unknown(evidence: Evidence) -> Verdict:
    failures = evidence.failures
    if not failures and evidence.exit_code is None:
        if not evidence.ranks and not evidence.world_size:
            return Verdict((), UNKNOWN, "nothing is known of it", "Nothing is known of it: the attempt left no record.")
        return Verdict((), "launcher killed", "its launcher ended without a word", _LAUNCHER_KILLED)
    if not failures:
        after = f" for {evidence.hang_after_s:.0f} s" if evidence.hang_after_s is not None else ""
        text = f"No rank made progress{after}, and nothing tells which rank the others waited for."
        return Verdict((), UNKNOWN, "no rank made progress", text)
    first = Failure.first(failures)
    if any(f.waited for f in failures):
        headline = f"{who([first.rank])} gave up waiting for the others"
        text = f"{headline}: {_words(first)} Nothing tells which rank it waited for."
    else:
        headline = f"{who([first.rank])} lost its connection to another rank"
        where = place(evidence.rank(first.rank))
        text = f"{headline}{where}: {_words(first)} No rank ended before it that would explain this. "
        text += "If it happens again, `echelon doctor` tests the network between the ranks."
    return Verdict((), UNKNOWN, headline, text[:1].upper() + text[1:])


# Ranks that all stood in code of their own, none in a call that waits for others.


_DATA = (Phase.DATA, Phase.EVAL_DATA)
_OF_LOADER = (
    "A data worker delivers nothing: num_workers=0 shows the line in which it is stuck, LoaderOptions(timeout_s=...) ends "
    "the run with the sample's number."
)


def all_stalled(evidence: Evidence, waits: Mapping[int, tuple[Wait, str]]) -> Verdict | None:
    """All ranks stand where they would without the others. A lone rank waits for no other rank, wherever it stands."""
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
    """Whether the stack ends in a line of the user's, or in torch's loader. A backward pass may wait in C++, out of sight."""
    return bool(rank.stack) and (not rank.stack[0].of_library or waits_in(rank.stack) == "a DataLoader")
