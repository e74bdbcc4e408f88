"""`echelon plan`: what training will do, before it does it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from echelon.cli.script import check_script
from echelon.common.errors import PlanError, require
from echelon.common.terminal import printable
from echelon.contracts.rank import RankInfo

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", action="store_true", required=True, help="show what the layout does with each layer of the script's module"
    )
    parser.add_argument(
        "--layout", metavar="LAYOUT", help="in place of the script's own: a word such as fsdp, or axes such as dp_shard=2,tp=4"
    )
    parser.add_argument("--strategy", dest="layout", help=argparse.SUPPRESS)  # the older word
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="on how many ranks (default: as many as the layout's sizes say, else 2)"
    )
    parser.add_argument("script", help="a script that gives echelon a module to train; it is run up to there, in this process")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")


def execute(arguments: argparse.Namespace) -> int:
    check_script(arguments.script)
    require(arguments.ranks is None or arguments.ranks >= 1, "--ranks", "at least 1", arguments.ranks, kind=PlanError)

    from echelon.launcher.local.nodes import free_port
    from echelon.loop.target import Target
    from echelon.plan.layers import lines, plan_layers

    # As a rank of a launcher: a script that would start ranks itself where there are none goes on in this process.
    os.environ.update({**RankInfo(rank=0, world_size=1, run_id="plan").to_env(), "MASTER_PORT": str(free_port())})
    target = Target(script=arguments.script, args=tuple(arguments.args), device="cpu")
    with contextlib.redirect_stdout(sys.stderr):  # what the script prints is not the plan
        found = plan_layers(target, arguments.layout, arguments.ranks)
    print(printable("\n\n".join("\n".join(lines(each)) for each in found)))
    return 0
