"""`echelon plan`: predict memory and time of a training before it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.cli.parser import Parser
from echelon.cli.script import check_script
from echelon.common.errors import PlanError, require
from echelon.common.files import parse_object, write_whole
from echelon.common.terminal import printable
from echelon.contracts.rank import RankInfo
from echelon.contracts.run_dir import read_json

__all__ = ["add_arguments", "execute", "found_batch", "refuse_unfit"]


def add_arguments(parser: Parser) -> None:
    parser.needs_one_of = frozenset({"--gpus", "--ranks", "--cluster", "--layers", "--find-batch"})
    parser.add_argument("--gpus", "--ranks", dest="ranks", type=int, metavar="N", help="number of devices, one rank on each")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="number of machines with these devices (default: 8 devices on each)"
    )
    parser.add_argument("--device", metavar="NAME", help="a known device: a100-80, h100-sxm, h200, ...; or FILE.toml")
    parser.add_argument("--cluster", metavar="NODESxDEVICESxNAME", help="all three in a word: 16x8xH100")
    parser.add_argument("--budget", metavar="SIZE", help="memory of a device, such as 80GiB; overrides the memory of --device")
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        action="append",
        help="also plan this layout: a word such as fsdp, or axes such as dp_shard=2,tp=4; may be "
        "repeated (default: the script's own and those that these devices allow)",
    )
    parser.add_argument("--strategy", dest="layout", action="append", help=argparse.SUPPRESS)  # the older word
    parser.add_argument("--only", metavar="LAYOUT", help="plan this layout alone; 'yours' is the script's own")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16", "float8"], help="instead of the script's own")
    parser.add_argument(
        "--shape",
        metavar="FILE:LINE=N",
        action="append",
        help="number of elements that a line of the script selects by value, as in x[mask]; may be repeated",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="plan all layouts of these devices, each with the fewest micro-batches that fit; fastest first, with its command",
    )
    parser.add_argument(
        "--find-batch",
        action="store_true",
        help="find the largest micro-batch that fits by running it on --gpus ranks of this machine (default: all GPUs, else 1)",
    )
    parser.add_argument(
        "--goal", metavar="AMOUNT", help="length of the whole training, such as '300B tokens'; adds days and device-hours"
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of a device for an hour; adds the cost of --goal")
    parser.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="mean time between failures of a device; adds the number of failures"
    )
    parser.add_argument(
        "--save-time", type=float, default=60.0, metavar="S", help="seconds that training waits for a checkpoint (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--page", metavar="FILE.html", help="also write a page with charts: memory, and an update over time")
    parser.add_argument("--into", metavar="FILE.json", help=argparse.SUPPRESS)  # for `run --plan`: the JSON of --json
    parser.add_argument("--planned-ranks", type=int, metavar="N", help=argparse.SUPPRESS)  # MAX of its --ranks MIN:MAX
    parser.add_argument("--layers", action="store_true", help="show what the layout does with each layer, not memory")
    parser.add_argument(
        "--calibrate",
        metavar="FILE.toml",
        help="measure this machine with --gpus ranks (default: 1), for --device FILE.toml; no script is needed",
    )
    parser.add_argument(
        "script",
        nargs="?",
        help="a script that trains a module with echelon; two of its updates are traced, without allocating tensors",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")


def execute(arguments: argparse.Namespace) -> int:
    for name in ("ranks", "nodes"):
        given = getattr(arguments, name)
        require(given is None or given >= 1, f"--{name}", "at least 1", given, kind=PlanError)
    for name in ("price", "mtbf", "save_time"):
        given = getattr(arguments, name)
        require(given is None or 0 < given < math.inf, f"--{name.replace('_', '-')}", "above 0", given, kind=PlanError)
    if arguments.calibrate:
        return _calibrate(arguments)
    others = arguments.layout or arguments.search or arguments.layers
    if arguments.find_batch:
        elsewhere = others or arguments.cluster or arguments.device or arguments.budget or arguments.nodes
        require(not elsewhere, "--find-batch", "given with --gpus and --only alone: it tries this machine", True, kind=PlanError)
    require(
        not (arguments.only and others), "--only", "given without --layout, --search, --layers", arguments.only, kind=PlanError
    )
    if arguments.script is None:
        raise PlanError("plan needs a script, got none. Only --calibrate FILE.toml works without one.")
    check_script(arguments.script)
    if arguments.find_batch:
        return _find_batch(arguments)
    return _layers(arguments) if arguments.layers else _memory(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    file = Path(arguments.calibrate)
    require(file.suffix == ".toml", "--calibrate", "a file whose name ends with .toml", arguments.calibrate, kind=PlanError)
    _check_folder("--calibrate", arguments.calibrate)
    from echelon.planner.calibrate import calibrate
    from echelon.planner.devices import written

    ranks = arguments.ranks or 1
    device = calibrate(ranks, file.stem)
    write_whole(file, written(device), 0o644)
    print(f"{arguments.calibrate}: rates of each of {ranks} ranks, all computing at once")
    for dtype, rate in device.peak.items():
        print(f"  products in {dtype}: {rate / 1e9:,.1f} GFLOP/s")
    print(f"  memory: {device.bandwidth / 1e9:,.1f} GB/s")
    for each in device.collectives:
        print(f"  {each.kind} of {each.ranks}: {each.latency * 1e6:,.0f} us + {each.bandwidth / 1e9:,.2f} GB/s")
    return 0


def _check_folder(option: str, file: str) -> None:
    """Check the folder before the work whose result goes there."""
    require(Path(file).parent.is_dir(), option, "a file in a folder that exists", file, kind=PlanError)


def _memory(arguments: argparse.Namespace) -> int:
    from echelon.loop.target import Target
    from echelon.planner.plan import Spending, plan_of, setting_of
    from echelon.planner.search import command_of, options_of

    if arguments.page:
        require(arguments.page.endswith(".html"), "--page", "a file whose name ends with .html", arguments.page, kind=PlanError)
        _check_folder("--page", arguments.page)
    setting = setting_of(
        arguments.ranks,
        arguments.nodes,
        arguments.device,
        arguments.cluster,
        arguments.budget,
        arguments.precision,
        _shapes(arguments.shape or ()),
    )
    setting = replace(setting, planned_ranks=arguments.planned_ranks)
    target = Target(script=arguments.script, args=tuple(arguments.args), device="cpu")
    spending = None
    if arguments.goal:
        spending = Spending(arguments.goal, arguments.price, arguments.mtbf, arguments.save_time)
    layouts, only = arguments.layout or (), arguments.only
    plan = plan_of(target, setting, layouts=layouts, only=only, searches=arguments.search, spending=spending)
    if arguments.into:
        write_whole(Path(arguments.into), json.dumps(plan.to_json()))
    fastest = plan.layouts[0] if arguments.search and plan.layouts else None
    command = command_of(fastest, setting.ranks, arguments.script, arguments.args) if fastest else None
    if arguments.json:
        print(json.dumps(plan.to_json() | {"command": command}))
    else:
        print(printable(str(plan)))
        if fastest and command:
            given = options_of(fastest, arguments.precision)
            print(printable(f"\nThe fastest that fits: {shlex.join(command)}" + (f"  (with {given})" if given else "")))
    if arguments.page:  # after the numbers: a full disk must not lose them
        sys.stdout.flush()
        write_whole(Path(arguments.page), plan.to_html(f"echelon plan {Path(arguments.script).name}"), 0o644)
    traced = [each.verdict for each in (*plan.layouts, *plan.left_out) if each.peak]
    return 2 if not traced else 1 if set(traced) == {"does not fit"} else 0


def _shapes(given: Sequence[str]) -> dict[str, int]:
    matches = [re.fullmatch(r"(.+:[0-9]+)=([0-9]{1,18})", each) for each in given]
    for each, parts in zip(given, matches, strict=True):
        require(parts is not None, "--shape", "FILE:LINE=N, such as train.py:8=64", each, kind=PlanError)
    return {parts[1]: int(parts[2]) for parts in matches if parts is not None}


def _find_batch(arguments: argparse.Namespace) -> int:
    from echelon.common.machine import visible_devices
    from echelon.loop.target import Target
    from echelon.planner.largest_batch import largest_batch, trial_lines

    ranks = arguments.ranks or len(visible_devices()) or 1
    layout = None if arguments.only in (None, "yours") else arguments.only
    target = Target(script=arguments.script, args=tuple(arguments.args))
    trials = largest_batch(target, ranks, layout=layout)
    best = min((each for each in trials if each.fits), key=lambda trial: trial.micro_batches)
    if arguments.json:
        print(json.dumps({"ranks": ranks, "trials": [each.to_json() for each in trials], "accumulate": best.micro_batches}))
        return 0
    layouts = ["--layout", layout] if layout else []
    command = ["echelon", "run", "--ranks", str(ranks), *layouts, "--find-batch", arguments.script, *arguments.args]
    last = (
        f"The largest micro-batch that fits has {best.samples} samples on each of {ranks} ranks: "
        f"accumulate={best.micro_batches}. To find it again and train with it: {shlex.join(command)}"
    )
    print(printable("\n".join([*trial_lines(trials), "", last])))
    return 0


def found_batch(layout: str | None, ranks: int, script: str, args: Sequence[str]) -> int:
    """For `run --find-batch`, which must not load torch: number of micro-batches per update, found by a separate process.

    Raises:
        PlanError: none fits, or the script fails. The process has printed why.
    """
    words = [sys.executable, "-m", "echelon", "plan", "--find-batch", "--json", "--gpus", str(ranks)]
    words += ["--only", layout or "yours", script, *args]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    answer = parse_object(done.stdout) if done.returncode == 0 else None
    if answer is None:
        raise PlanError("the script must train with some micro-batch, got the error above. Fix that, or leave out --find-batch.")
    return int(answer["accumulate"])


def refuse_unfit(
    device: str, layout: str | None, ranks: int, nodes: int, script: str, args: Sequence[str], *, planned_ranks: int | None = None
) -> dict[str, object]:
    """For `--plan DEVICE` of commands that start ranks and must not load torch: show the plan, made by a separate process.

    Args:
        device: a name, a file or a size.
        layout: None for the script's own.
        ranks: on all nodes.
        planned_ranks: the number of ranks for which the micro-batches are meant, if `ranks` are fewer.
    Returns:
        The entries for run.json: layout, bytes per rank, and seconds, tokens and samples per update.
    Raises:
        PlanError: the layout does not fit, or nothing could be traced.
    """
    given = ["--budget" if device[:1].isdigit() else "--device", device, "--only", layout or "yours"]
    given += [] if planned_ranks is None else ["--planned-ranks", str(planned_ranks)]
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as folder:
        into = Path(folder, "plan.json")
        words = [sys.executable, "-m", "echelon", "plan", "--gpus", str(ranks), "--nodes", str(nodes), *given]
        words += ["--into", str(into), script, *args]
        code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
        plan = read_json(into)
    if code == 1:
        raise PlanError(
            f"the layout must fit on {device} with {ranks} ranks, got the plan above. Choose another, or leave out --plan."
        )
    if code or plan is None:
        raise PlanError("the run must be one that can be planned, got the error above. Fix that, or leave out --plan.")
    answer = plan["layouts"][0]
    return {"device": device} | {name: answer[name] for name in ("layout", "peak", "seconds", "tokens", "samples")}


def _layers(arguments: argparse.Namespace) -> int:
    from echelon.launcher.local.nodes import free_port
    from echelon.loop.target import Target
    from echelon.planner.layers import lines, plan_layers

    layouts = arguments.layout or [None]
    require(len(layouts) == 1, "--layout", "given once with --layers", layouts, kind=PlanError)
    # Pretend to be a launched rank: a script that starts ranks itself then continues in this process.
    os.environ.update({**RankInfo(rank=0, world_size=1, run_id="plan").to_env(), "MASTER_PORT": str(free_port())})
    target = Target(script=arguments.script, args=tuple(arguments.args), device="cpu")
    with contextlib.redirect_stdout(sys.stderr):  # keep the script's output out of the plan
        layers = plan_layers(target, layouts[0], arguments.ranks)
    print(printable("\n\n".join("\n".join(lines(each)) for each in layers)))
    return 0
