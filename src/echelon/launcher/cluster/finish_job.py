"""Finish a start of a submitted job: merge what all nodes left into one exit.json, and name the rank that failed first.

It also decides whether the job is started again: the exit code is 75 then, and only then.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.common.errors import UsageError
from echelon.common.files import read_end
from echelon.common.terminal import one_line, printable, say
from echelon.contracts.events import read_lines
from echelon.contracts.records import exit_record, meeting_record, progress_of, refusal_record
from echelon.contracts.run_dir import RunDir, write_json
from echelon.contracts.stopping import REQUEUE
from echelon.diagnosis.failure import Failure, render
from echelon.launcher.local.end_record import record_end, write_exit
from echelon.launcher.local.nodes import meeting_path
from echelon.launcher.protocol import read_spec

__all__ = ["finish_job", "refuse"]

# Give up after this many starts in a row without progress, for example with a time limit shorter than one update.
_STARTS_IN_VAIN = 3
_NEVER_RAN = "no rank was started"
_OF_SRUN = re.compile(r"^srun: error: (.{1,300})", re.MULTILINE)
_MOST_WORDS, _LAST_BYTES = 3, 1 << 12


def refuse(run: RunDir, start: str, node: int, why: str) -> None:
    """Record why a node's launcher ended without an exit.json, for `finish_job` and `Job.result` to report."""
    write_json(_refusals(run, start) / f"refused-{start}.node{node}.json", {"host": socket.gethostname(), "why": why})


def finish_job(
    run: RunDir,
    code: int,
    start: str,
    sha256: str | None = None,
    *,
    requeues: bool = False,
) -> int:
    """Write exit.json for all nodes and name the first failure. Returns the job's exit code; 75 asks for another start.

    Args:
        code: the highest exit code of the nodes' launchers; 128 + n after signal n.
        start: name of this start of the job, from `launcher.cluster.node.start_of`.
        sha256: of the folder's job.json.
        requeues: ask for another start if no rank was started and no launcher of echelon gave a reason.
    """
    spec = read_spec(run, sha256)[0]
    meeting = meeting_record(meeting_path(run, start))
    whys = [
        f"{r['host']}: {r['why']}" for p in sorted(_refusals(run, start).glob(f"refused-{start}.*")) if (r := refusal_record(p))
    ]
    if meeting is None:
        why = "; ".join(dict.fromkeys(whys)) or f"{_NEVER_RAN} (exit code {code}): {_words_of_srun(run) or 'see the lines above'}"
        say(why)
        # If another submission holds the folder by now, its attempts must not be renumbered.
        with contextlib.suppress(UsageError), run.submitting():
            attempt_dir = run.next_attempt()
            write_exit(attempt_dir.exit_json, code or 1, stopped=why)
            if requeues and not whys:
                return _once_more(attempt_dir, code or 1, why)
        return code or 1
    began = meeting["attempt"]
    newest = max((int(p.name) for p in run.attempts()), default=began)  # the launchers may have restarted the ranks themselves
    newest, ended = max(newest, began), code
    for attempt in range(began, newest + 1):
        attempt_dir = RunDir(run.path, attempt)
        if spec.nodes > 1:
            ended = _merge(attempt_dir, spec.nodes, spec.ranks * spec.nodes, meeting["nodes"], code, whys, quiet=attempt < newest)
        else:
            ended = _of_one_node(attempt_dir, code, whys)
    attempt_dir = RunDir(run.path, newest)
    if requeues and not whys and ended not in (0, REQUEUE) and newest == began and _never_ran(attempt_dir, spec.nodes):
        return _once_more(attempt_dir, ended, (exit_record(attempt_dir.exit_json) or {}).get("stopped") or "")
    return _again(RunDir(run.path, newest), ended)


def _never_ran(attempt_dir: RunDir, nodes: int) -> bool:
    """Whether no rank began, since each creates its log first. A node that ended well did run all there was to run."""
    ends = [exit_record(path) for path in (attempt_dir.exit_json, *map(attempt_dir.node_exit, range(nodes)))]
    return not any(attempt_dir.attempt_path.glob("rank*.log")) and not any(end and end["exit_code"] == 0 for end in ends)


def _once_more(attempt_dir: RunDir, code: int, why: str) -> int:
    """The exit code of a start without ranks: 75, unless the previous start had none either."""
    before = exit_record(RunDir(attempt_dir.path, attempt_dir.attempt - 1).exit_json) if attempt_dir.attempt else None
    if before and before["exit_code"] == REQUEUE and str(before.get("stopped")).startswith(_NEVER_RAN):
        say("the previous start got no further: not started again")
        return code
    if not why.startswith(_NEVER_RAN):
        why = f"{_NEVER_RAN}: {why}"
    write_exit(attempt_dir.exit_json, REQUEUE, stopped=why)
    return _again(attempt_dir, REQUEUE)


def _words_of_srun(run: RunDir) -> str:
    """srun's last messages in the job's output; empty if there are none."""
    try:
        text = read_end(run.path / "job" / "output.log", _LAST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    since = text.rpartition(_NEVER_RAN)[2]  # skips messages of earlier starts
    return one_line("; ".join(list(dict.fromkeys(_OF_SRUN.findall(since)))[-_MOST_WORDS:]))


def _again(attempt_dir: RunDir, code: int) -> int:
    """The exit code, after deciding whether another start is wanted and useful."""
    if code != REQUEUE:
        return code
    if (attempt_dir.path / "job" / "cancelled").exists():
        say("saved, and cancelled: not started again")
        return 143
    write_json(attempt_dir.exit_json, {**(exit_record(attempt_dir.exit_json) or {}), "came_to": _came_to(attempt_dir)})
    last = [
        progress_of(RunDir(attempt_dir.path, n).exit_json)
        for n in range(attempt_dir.attempt, attempt_dir.attempt - _STARTS_IN_VAIN, -1)
    ]
    # A program without an echelon loop does not report its steps, and may have made progress.
    if last[0].get("steps") and all(end == last[0] for end in last):
        why = (
            f"{_STARTS_IN_VAIN} starts in a row began at update {last[0]['steps'][0]} and left no newer checkpoint than "
            f"{last[0].get('checkpoint') or 'none'}: not started again. Is the time limit too short for a save, or does the "
            "script not restore what it saved?"
        )
        say(why)
        write_exit(attempt_dir.exit_json, 1, stopped=why)
        return 1
    return code


def _came_to(attempt_dir: RunDir) -> dict[str, Any]:
    """Progress of an attempt: the steps at which training began, and the run's newest checkpoint."""
    begun = [event.get("step") for event in read_lines(attempt_dir.events(0)) if event.get("event") == "train_start"]
    newest = max((p.name for p in attempt_dir.checkpoints.glob("step-*")), default=None)
    return {"steps": begun, "checkpoint": newest}


def _of_one_node(attempt_dir: RunDir, code: int, whys: Sequence[str]) -> int:
    ended = exit_record(attempt_dir.exit_json)
    if ended is not None:
        return int(ended["exit_code"])
    reason = _words_of_srun(attempt_dir)
    why = (
        "; ".join(whys) or f"the launcher ended without a word (exit code {code}): {reason or 'was it killed, or out of memory?'}"
    )
    say(why)
    write_exit(attempt_dir.exit_json, code or 1, stopped=why)
    return code or 1


def _merge(attempt_dir: RunDir, nodes: int, ranks: int, hosts: list[str], code: int, whys: Sequence[str], *, quiet: bool) -> int:
    """Merge the nodes' records into one exit.json; returns the exit code of the whole job."""
    ends = {node: exit_record(attempt_dir.node_exit(node)) for node in range(nodes)}
    failures = [Failure.from_json(f) for end in ends.values() if end for f in end.get("ranks", {}).values()]
    silent = [hosts[node] if node < len(hosts) else f"node {node}" for node, end in ends.items() if end is None]
    seen = {int(rank): each for end in ends.values() if end for rank, each in end.get("seen", {}).items()}
    stopped = next((str(end["stopped"]) for end in ends.values() if end and end.get("stopped")), None)
    hangs = [hang["after_s"] for end in ends.values() if end and (hang := end.get("hang"))]
    # Records of nodes that found another node silent: other failures follow from that.
    given_up = [str(end["stopped"]) for end in ends.values() if end and end["exit_code"] == REQUEUE and end.get("stopped")]
    if given_up and all(f.is_victim for f in failures):
        failures, stopped, code = [], given_up[0], REQUEUE
    elif not failures and silent:
        reason = _words_of_srun(attempt_dir) or "was the node lost, or out of memory?"
        stopped = "; ".join(whys) or f"the launcher on {', '.join(silent)} ended without a word (exit code {code}): {reason}"
        code = code or 1
    elif not failures:
        codes = [int(end["exit_code"]) for end in ends.values() if end]
        code = REQUEUE if REQUEUE in codes and set(codes) <= {0, REQUEUE} else max(codes)
    first = record_end(attempt_dir, code, failures, stopped, seen=seen, hang_s=max(hangs, default=None), world_size=ranks)
    text = ""
    if first is not None:
        node = min(first.rank // (ranks // nodes), len(hosts) - 1)
        text = f"{render(first, ranks)}\nnode: {hosts[node]}"
        code = first.exit_code
    elif silent or given_up:
        text = f"echelon: {stopped}"
    if text and not quiet:
        print(printable(text), file=sys.stderr)
    return code


def _refusals(run: RunDir, start: str) -> Path:
    return meeting_path(run, start).parent
