"""`echelon dragon`: run a script as the head process of Dragon's runtime."""

from __future__ import annotations

import argparse

from echelon.cli.script import check_script

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", action="store_true", help="use all nodes of the allocation (default: this node alone)")
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds that ranks have to end after Ctrl-C or SIGTERM (default: 5)",
    )
    parser.add_argument("script", help="a script that starts its ranks with CollectiveGroup")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")


def execute(arguments: argparse.Namespace) -> int:
    from echelon.launcher.dragon.runtime import run_on_dragon

    check_script(arguments.script)
    return run_on_dragon(arguments.script, arguments.args, nodes=arguments.nodes, grace_s=arguments.grace)
