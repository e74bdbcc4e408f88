"""`echelon prove`: run a script under every layout and compare each step with one process in plain PyTorch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from echelon.cli.parser import runs_folder
from echelon.cli.script import check_script
from echelon.common.errors import ProveError, UsageError
from echelon.common.files import write_whole
from echelon.contracts.run_dir import RunDir, write_json

__all__ = ["add_arguments", "execute"]

_NOTHING_COMPARED = 4  # as Proof.exit_code, which imports torch
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "exit code: 0 all rows agree; 1 the script's own configuration differs or fails; 2 usage; 3 nothing differs, but some "
        "rows could not be compared, or only in part; 4 nothing was compared; 5 only other rows than the script's own differ or "
        "fail"
    )
    parser.add_argument(
        "--layouts", metavar="LAYOUTS", help="comma-separated, axes joined by +: cp=2,dp_shard=2+tp=2; default: all that fit"
    )
    for older in ("--strategies", "--strategy"):
        parser.add_argument(older, dest="layouts", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default="1,2,4", metavar="N,N", help="numbers of processes (default: 1,2,4)")
    parser.add_argument(
        "--accumulate", "--accumulation", default="1,2", metavar="N,N", help="micro-batches per update on a rank (default: 1,2)"
    )
    parser.add_argument("--updates", type=int, default=5, metavar="N", help="optimizer updates that are compared (default: 5)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device of every rank (default: one GPU each if there are enough for the largest of --ranks, else the CPU)",
    )
    parser.add_argument("--float64", action="store_true", help="compare in float64, to 1e-11")
    parser.add_argument("--no-sgd", action="store_true", help="leave out the rows with SGD instead of the script's optimizer")
    parser.add_argument("--bitwise", action="store_true", help="also prove the bit-equal mode")
    parser.add_argument("--parts", type=int, default=4, metavar="N", help="with --bitwise: micro-batches per update (default: 4)")
    parser.add_argument("--bf16", action="store_true", help="also compare in bf16, with one process under autocast")
    parser.add_argument("--eager", action="store_true", help="never compile, even if the script does: faster, but proves less")
    parser.add_argument("--seed", type=int, default=0, help="seed of every process when the script begins (default: 0)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds after which a row is stopped and failed (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--runs", type=runs_folder, default="runs", metavar="FOLDER", help="folder for the page (default: runs)")
    parser.add_argument("script", help="a script that calls echelon's train or fit")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")


def execute(arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    try:
        check_script(arguments.script)
    except UsageError as error:
        if not isinstance(error.__cause__, SyntaxError):
            raise
        return _not_python(arguments, str(error))
    ranks, accumulation = _numbers("--ranks", arguments.ranks), _numbers("--accumulate", arguments.accumulate)

    from echelon.launcher.functions.launch import preload

    preload("torch", "torch._dynamo", "torch.distributed.fsdp", "echelon.prover.prove")  # while this process imports the same

    from echelon.loop.target import Target
    from echelon.prover import show
    from echelon.prover.matrix import matrix
    from echelon.prover.prove import Result, prove_target

    layouts = arguments.layouts.split(",") if arguments.layouts else None
    parts = arguments.parts if arguments.bitwise else None
    rows = matrix(
        layouts,
        ranks,
        accumulation,
        sgd=not arguments.no_sgd,
        parts=parts,
        bf16=arguments.bf16,
        yours=True,
        eager=arguments.eager,
    )

    def shown(result: Result) -> None:
        print(show.line(result), flush=True)

    run = RunDir.create(arguments.runs, None, stem=f"prove-{script.stem}")
    if not arguments.json:
        print(show.HEADER, flush=True)
    proof = prove_target(
        Target(script=arguments.script, args=tuple(arguments.args), device=arguments.device),
        rows,
        arguments.updates,
        arguments.float64,
        arguments.seed,
        None if arguments.json else shown,
        arguments.timeout,
        run.path / "logs",
    )
    facts = {**proof.to_json(), "conclusion": show.conclusion(proof)}
    facts["findings"] = [{"rows": named, "text": text} for named, text in show.blocks(proof.results)]
    if arguments.json:
        print(json.dumps(facts, indent=2), flush=True)
    else:
        for named, text in show.blocks(proof.results):
            print("\n    ".join([f"\n{named}", *text]))
        print("\n".join(["", *show.summary(proof)]), flush=True)
    write_json(run.path / "prove.json", facts)  # after the verdict: a full disk must not lose it
    write_whole(run.path / "prove.html", show.page(proof, f"echelon prove {script.name}"))
    if not arguments.json:
        print(f"page {run.path / 'prove.html'}", file=sys.stderr)
    return _INTERRUPTED if proof.interrupted else proof.exit_code


def _not_python(arguments: argparse.Namespace, why: str) -> int:
    message = f"Nothing was compared: {why}"
    if arguments.json:
        facts = {"holds": False, "exit_code": _NOTHING_COMPARED, "rows": [], "notes": [], "findings": []}
        print(json.dumps({**facts, "conclusion": message}, indent=2))
    else:
        print(message)
    return _NOTHING_COMPARED


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ProveError(f"{option} must be whole numbers of at least 1, separated by commas, such as 1,2,4, got {text}.")
    return numbers
