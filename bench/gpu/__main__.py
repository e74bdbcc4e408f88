"""Run the day's parts one after another within a budget of time, and write down what they measured.

make gpu                                 the first GPU of this machine, with the interpreter of .venv
make gpu PYTHON=/opt/torch/bin/python    with an interpreter that has torch; nothing is installed
make gpu ARGS="--only model"             the parts whose names begin with "model"
make gpu ARGS="--device cpu"             the reduced form, which needs no GPU
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # PYTHON=... may name any interpreter
    raise SystemExit(f"make gpu needs Python 3.11 or newer, got {sys.version.split()[0]}. Name another: make gpu PYTHON=...")

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.rows import Row, as_json, read_json, write_whole
from bench.gpu.runner import Part, Setting, folder_of, run_part
from bench.gpu.table import as_lines, as_markdown, into_file

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "BENCHMARKS.md"
BUDGET_S = 465.0  # less than eight minutes: ending the last part and writing files take a moment
# Variables of launchers, since this may run inside their jobs.
LAUNCHERS = ("ECHELON_", "GROUP_", "LOCAL_", "MASTER_", "OMPI_", "PMI", "RANK", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE")
MOST_OF_A_LOG = 20_000  # characters, from its end
NEEDED = {"torch": "torch>=2.11", "numpy": "numpy", "cloudpickle": "cloudpickle", "psutil": "psutil", "rich": "rich"}
SLOW_TO_IMPORT = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "echelon.loop.auto.auto",
)


def main() -> int:
    began = time.monotonic()
    options = _options()
    if options.table:
        try:
            into_file(BENCHMARKS, as_markdown(*read_json(options.out)))
        except (OSError, ValueError, KeyError) as error:
            print(f"the table of {options.out} was not written: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return 0
    options.out = _writable(options.out)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]  # parts start ranks themselves
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # even if there is a GPU
    # For parts and the programs that they start. PYTORCH_NVML_BASED_CUDA_CHECK lets torch look for devices without starting CUDA.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.path.insert(0, str(ROOT / "src"))
    if _lacks_what_all_need():
        return 2
    if not options.fresh:
        _import_what_is_slow()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="echelon-gpu-", ignore_cleanup_errors=True) as folder:
        day = Day(options, Path(folder), began)
        try:
            day.run()
        except KeyboardInterrupt:
            day.interrupted()
        return day.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description="What only a GPU can show, in eight minutes. See docs/gpu.md.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs a reduced form of every part")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose name begins so")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help=f"for all parts (default {BUDGET_S:.0f})")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results.json", metavar="FILE", help="default gpu-results.json")
    parser.add_argument("--write", action="store_true", help="put the table into BENCHMARKS.md also when the device is a CPU")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for each part: slower, should a fork not work")
    parser.add_argument("--table", action="store_true", help="measure nothing: put the table of FILE into BENCHMARKS.md")
    return parser.parse_args()


def _writable(out: Path) -> Path:
    """The file for the results; if it cannot be written, a file in a temporary folder, so that no results are lost."""
    try:
        if out.exists() and not out.is_file():  # writing would replace it
            raise OSError(0, "it is no file")
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
        return out
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="gpu-results-")) / "gpu-results.json"
        print(f"{out} cannot be written ({error.strerror}): the results go to {other}", file=sys.stderr)
        return other


def _lacks_what_all_need() -> bool:
    """Name missing packages; returns true if no part can run without them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return False
    wanted = " ".join(shlex.quote(NEEDED[name]) for name in missing)
    print(
        f"{sys.executable} lacks {', '.join(missing)}. Install: {sys.executable} -m pip install {wanted}\n"
        "Without internet: `pip download` them elsewhere, here `pip install --no-index --find-links FOLDER --target HERE` "
        "and set PYTHONPATH=HERE.",
        file=sys.stderr,
    )
    if "torch" in missing or "numpy" in missing:
        return True
    print("Parts that need them are left out.", file=sys.stderr)
    return False


def _import_what_is_slow() -> None:
    """Import once for all parts, which are forks of this process. None of these modules touches the device."""
    for name in SLOW_TO_IMPORT:
        with contextlib.suppress(ModuleNotFoundError):  # each part reports missing modules
            importlib.import_module(name)


def say(text: str) -> None:
    """Print; if nobody reads any more, as after `| head`, the run goes on."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class Day:
    """A run of the parts in order, with the rows so far."""

    def __init__(self, options: argparse.Namespace, folder: Path, began: float) -> None:
        self.options, self.folder, self.began = options, folder, began
        self.rows: list[Row] = []
        self.log = options.out.with_suffix(".log")
        self.whole = not options.only
        self.stopped = False
        self.facts: dict[str, Any] = {
            "command": f'make gpu ARGS="{shlex.join(sys.argv[1:])}"' if sys.argv[1:] else "make gpu",
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "commit": _commit(),
            "python": sys.version.split()[0],
            "device": "",  # set by the first part
            "budget_s": options.budget_s,
            "took_s": 0.0,
        }

    def run(self) -> None:
        from bench.gpu.parts import PARTS

        setting = Setting(self.options.device, self.options.device == "cpu", self.folder, fresh=self.options.fresh)
        names = [part.name for part in PARTS]
        unknown = [asked for asked in self.options.only or () if not any(name.startswith(asked) for name in names)]
        if unknown:
            raise SystemExit(f"--only must be parts, got {', '.join(unknown)}. They are: {', '.join(names)}.")
        for part in PARTS:
            is_first = part is PARTS[0]  # it finds the device for the others
            if is_first or not self.options.only or any(part.name.startswith(asked) for asked in self.options.only):
                self._run(part, setting)
            if is_first and not self.facts["device"]:
                if setting.fresh or not _sees_a_device():
                    return
                print("A fork of this process cannot use the device: each part gets a new interpreter.", file=sys.stderr)
                setting = replace(setting, fresh=True, folder=self.folder / "fresh")
                self.rows.clear()
                self._run(part, setting)
                if not self.facts["device"]:
                    return

    def _run(self, part: Part, setting: Setting) -> None:
        patience = 4 if setting.small else 1  # the reduced form must end on a busy machine, too
        left = self.began + self.options.budget_s * patience - time.monotonic()
        if left < part.needs_s:
            remark = f"{max(0.0, left):.0f} s of the budget were left, it needs {part.needs_s:.0f}"
            self._take(part.name, [Row(part.name, part.name, status="left out", remark=remark)])
            return
        say(f"{time.monotonic() - self.began:4.0f} s  {part.name}")
        try:
            rows = run_part(part, setting, min(part.limit_s * patience, left))
        except KeyboardInterrupt as stopped:
            self._take(part.name, stopped.args[0] if stopped.args else [])
            raise KeyboardInterrupt from None
        self._take(part.name, rows)

    def _take(self, part: str, rows: list[Row]) -> None:
        """Write the rows to disk after each part: if this process ends, only the current part is lost."""
        self.rows += rows
        for row in rows:
            if row.name == "device" and row.status == "ok":
                self.facts["device"] = row.value
                self.log.unlink(missing_ok=True)
        if any(row.status == "failed" for row in rows):
            self._keep_log(part)
        if self.facts["device"]:  # otherwise nothing was measured, and the results of an earlier run stay
            self._write()
        say("\n".join(as_lines(rows)))

    def _write(self) -> None:
        self.facts["took_s"] = round(time.monotonic() - self.began, 1)
        try:
            write_whole(self.options.out, as_json(self.facts, self.rows))
        except OSError as error:  # such as a full disk or a removed folder
            self.options.out = Path(tempfile.mkdtemp(prefix="gpu-results-")) / self.options.out.name
            print(f"results cannot be written ({error}): they go to {self.options.out}", file=sys.stderr)
            write_whole(self.options.out, as_json(self.facts, self.rows))

    def _keep_log(self, part: str) -> None:
        """Keep the log of a failed part."""
        for log in sorted(self.folder.rglob(f"{folder_of(part)}/log")):
            with contextlib.suppress(OSError), open(self.log, "a") as kept:
                kept.write(f"===== {part}\n{log.read_text(errors='replace')[-MOST_OF_A_LOG:]}\n")

    def interrupted(self) -> None:
        self.stopped = True
        print("\ninterrupted: what was measured is kept", file=sys.stderr)

    def close(self) -> int:
        """The exit code: 0, 1 if a row failed, 2 if there is no device, 130 if stopped."""
        if not self.facts["device"]:
            return 130 if self.stopped else 2
        self._write()
        failed = [row for row in self.rows if row.status == "failed"]
        say(f"\n{len(self.rows)} rows, {len(failed)} failed, in {self.facts['took_s']:.0f} s: {self.options.out}")
        for row in failed:
            say(f"  {row.part}: {row.name}: {row.remark}")
        if failed:
            say(f"What these parts said: {self.log}")
        if (self.options.write or self.options.device == "cuda") and not self.stopped:
            if self.whole:
                self._table()
            else:
                say('Not all parts were run: BENCHMARKS.md is as it was (make gpu ARGS="--table" writes these rows).')
        return 130 if self.stopped else int(bool(failed))

    def _table(self) -> None:
        try:
            into_file(BENCHMARKS, as_markdown(self.facts, self.rows))
            say("The table is in BENCHMARKS.md.")
        except OSError as error:
            say(f'BENCHMARKS.md cannot be written ({error.strerror}). Elsewhere: make gpu ARGS="--table --out FILE"')


def _sees_a_device() -> bool:
    """Whether a new interpreter finds a device; a fork of this process did not."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return False
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    try:
        return subprocess.run(asked, capture_output=True, timeout=90).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _commit() -> str:
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() or "unknown (no git checkout)"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (no git)"


if __name__ == "__main__":
    sys.exit(main())
