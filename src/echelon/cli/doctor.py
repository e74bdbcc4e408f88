"""`echelon doctor`: check this machine, or the nodes of a Slurm allocation, before a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from echelon.cli.script import check_script
from echelon.common.numbers import digits
from echelon.common.terminal import printable, say
from echelon.launcher.job import parse_duration, parse_ranks

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        default="auto",
        metavar="N|auto",
        help="processes to start, in a Slurm allocation on each node; auto: one per GPU, else two here or one per node",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the ranks (default: one GPU each, if there are any)")
    parser.add_argument("--quick", action="store_true", help="small messages and matrices: check results, not speed")
    parser.add_argument("--time-limit", default="3m", metavar="TIME", help="limit of the whole check (default: 3m)")
    parser.add_argument("--here", action="store_true", help="check this machine alone, even in a Slurm allocation")
    parser.add_argument(
        "--script", metavar="FILE", help="also check that this script, and the sources beside it, are the same on all hosts"
    )
    parser.add_argument("--json", action="store_true", help="print what every rank found as JSON")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.doctor.judge import judged
    from echelon.doctor.reports import Checkup
    from echelon.doctor.row import as_json, table
    from echelon.launcher.cluster.checkup import allocation, here, on_nodes

    limit_s = parse_duration(arguments.time_limit, "--time-limit")
    nodes = [] if arguments.here else allocation(os.environ)
    each = _ranks(arguments.ranks, nodes)
    env = {"ECHELON_DEVICE": arguments.device} if arguments.device else {}
    words = ["--wait", f"{max(1.0, min(30.0, limit_s / 4)):g}", *(["--quick"] if arguments.quick else [])]
    if arguments.script:
        check_script(arguments.script)
        words += ["--script", str(Path(arguments.script).absolute())]
    checkup = Checkup(each * max(1, len(nodes)), nodes, quick=arguments.quick)
    if nodes:
        say(f"looking at {len(nodes)} nodes, {each} rank{'s' if each > 1 else ''} on each")
        lines, checkup.silent, checkup.ended = on_nodes(nodes, each, words, env, limit_s, say)
    else:
        lines, checkup.ended = here(each, words, env, limit_s)
    checkup.read(lines)
    rows = judged(checkup)
    text = json.dumps(as_json(rows, checkup), indent=2) if arguments.json else "\n".join(table(rows))
    print(text if arguments.json else printable(text))
    sys.stdout.flush()
    return int(any(row.state == "fail" for row in rows))


def _ranks(text: str, nodes: list[str]) -> int:
    """Number of ranks on this machine, or on each node.

    Raises:
        UsageError: not a number of ranks.
    """
    if text != "auto":
        return parse_ranks(text)
    if nodes:
        return digits(os.environ.get("SLURM_GPUS_ON_NODE", "")) or 1
    from echelon.common.machine import visible_devices

    return len(visible_devices()) or 2
