"""What importing echelon and asking the command line for help cost. Every measurement is a fresh interpreter.

import    milliseconds of `import torch` alone, and of `import echelon` after it in the same process; then of the names
          that a training script uses (`echelon.AutoUnit`, `echelon.train`), which are loaded on first use.
          Measured by `time.perf_counter` around the import, so the interpreter's own start does not count.
help      wall time of the command `echelon --help`, measured from outside, next to `python -c pass`; another start under
          `-X importtime` tells whether it imported torch or numpy. The commands of other libraries are timed, too.

    python bench/imports.py [--rounds N] [--json]

Targets: `import echelon` adds at most 50 ms to `import torch`; `echelon --help` takes at most 150 ms, without torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _timing import emit, installed, machine, median, options, spread, versions

IMPORTS = """
import json, sys, time
marks, modules = [time.perf_counter()], [len(sys.modules)]
def mark():
    marks.append(time.perf_counter()); modules.append(len(sys.modules))
import torch; mark()
import echelon; mark()
echelon.AutoUnit, echelon.train, echelon.Loader; mark()
print(json.dumps([[1e3 * (b - a) for a, b in zip(marks, marks[1:])], [b - a for a, b in zip(modules, modules[1:])]]))
"""
HELP = {
    "python -c pass": ["-c", "pass"],
    "echelon --help": ["-m", "echelon", "--help"],
    "torchrun --help": ["-m", "torch.distributed.run", "--help"],
    "accelerate --help": ["-m", "accelerate.commands.accelerate_cli", "--help"],
}
NEEDS = {"accelerate --help": "accelerate"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)


def imported_by_help() -> list[str]:
    """Every module that `echelon --help` imports."""
    lines = python("-X", "importtime", "-m", "echelon", "--help").stderr.splitlines()
    return [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")][1:]


def command(name: str) -> list[str]:
    """The installed command, as a user calls it; if it is not installed, its module."""
    script = Path(sys.executable).parent / name.partition(" ")[0]
    return [str(script), "--help"] if name.endswith("--help") and script.exists() else [sys.executable, *HELP[name]]


def milliseconds(command: list[str]) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=environment)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    arguments = options(__doc__, rounds=7).parse_args()
    before = machine()
    commands = {name: command(name) for name in HELP if installed(NEEDS.get(name, "torch"))}
    python("-c", IMPORTS)  # the first start reads files from the disk and compiles them
    stages: list[list[float]] = []
    counts: list[int] = []
    waits: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.rounds):
        times, counts = json.loads(python("-c", IMPORTS).stdout)
        stages.append(times)
        for name, args in commands.items():
            waits[name].append(milliseconds(args))
    torch_ms, echelon_ms, names_ms = (list(column) for column in zip(*stages, strict=True))
    loaded = imported_by_help()
    heavy = sorted({m.partition(".")[0] for m in loaded} & {"torch", "numpy", "rich"})

    def row(name: str, values: list[float], modules: str = "", target: str = "") -> list[str]:
        return [name, f"{median(values):.1f}", spread(values, 1), modules, target]

    rows = [
        row("import torch", torch_ms, str(counts[0])),
        row("import echelon, after torch", echelon_ms, str(counts[1]), "<= 50"),
        row("its training names, after that", names_ms, str(counts[2])),
    ]
    for name in HELP:
        if name not in waits:
            rows.append([name, "not installed", "", "", ""])
        elif name == "echelon --help":
            rows.append(row(name, waits[name], str(len(loaded)), "<= 150"))
        else:
            rows.append(row(name, waits[name]))
    notes = [f"`echelon --help` imports {', '.join(heavy) if heavy else 'neither torch nor numpy nor rich'}."]
    facts = {
        "machine": before,
        "versions": versions("torch", "echelon", "accelerate"),
        "import_ms": {"torch": torch_ms, "echelon": echelon_ms, "names": names_ms},
        "modules": counts,
        "help_ms": waits,
        "help_imports": loaded,
    }
    header = ["", "ms", "rounds", "modules", "target"]
    emit(arguments, f"Imports and help: milliseconds, median of {arguments.rounds}", header, rows, notes=notes, facts=facts)


if __name__ == "__main__":
    main()
