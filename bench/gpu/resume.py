"""A run that is killed and goes on ends with the same bits, with deterministic kernels; and how long it takes to go on.

`echelon run --max-restarts 1` trains the tiny Llama with dropout-free attention in bf16; in the first attempt the rank kills
itself some steps after a checkpoint. The same run without the kill is the reference: at the end, the parameters, AdamW's moments
and the device's random numbers must have the same checksums. For information, the same is done without deterministic kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bench.gpu.rows import Notes
from bench.gpu.runner import Setting

ROOT = Path(__file__).resolve().parents[2]
SAVED_AT, KILLED_AT, STEPS = 10, 14, 20


def run(setting: Setting, notes: Notes) -> None:
    for deterministic in (True,) if setting.small else (True, False):
        name = "deterministic kernels" if deterministic else "kernels as torch chooses them"
        whole = _without_a_break(setting, f"whole-{deterministic}", deterministic)
        resumed = _killed(setting, f"killed-{deterministic}", deterministic)
        if deterministic:
            seconds = resumed["resumed"] - resumed["killed"]
            notes("kill -9 until the first step after it", seconds, "s", "reads a checkpoint; one rank, --max-restarts 1")
        others = sorted(n for n, value in whole["checksums"].items() if resumed["checksums"].get(n) != value)
        remark = f"{len(others)} tensors differ, as {others[0]}" if others else f"{len(whole['checksums'])} tensors"
        must = deterministic and others
        notes(f"ends bit-equal, {name}", "no" if others else "yes", remark=remark, status="failed" if must else "ok")


def _arguments(folder: Path, device: str, deterministic: bool) -> list[str]:
    folder.mkdir()
    return [str(folder), "--device", device, *(["--deterministic"] if deterministic else [])]


def _without_a_break(setting: Setting, name: str, deterministic: bool) -> dict[str, Any]:
    """The run without a kill, in a fork of this process, without a launcher."""
    arguments = _arguments(setting.folder / name, setting.device, deterministic)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(arguments)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            (setting.folder / name / "error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        said = setting.folder / name / "error"
        raise RuntimeError(f"{name}: {said.read_text() if said.exists() else f'ended with {code}'}")
    return _written(setting.folder / name)


def _killed(setting: Setting, name: str, deterministic: bool) -> dict[str, Any]:
    folder = setting.folder / name
    program = [__file__, *_arguments(folder, setting.device, deterministic), "--kill"]
    command = [sys.executable, "-m", "echelon", "run", "--ranks", "1", "--max-restarts", "1", "--runs", str(folder / "runs")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if setting.small:
        environment["OMP_NUM_THREADS"] = "1"  # a CPU's numbers depend on it
    with open(folder / "output", "w") as output:
        code = subprocess.run([*command, *program], env=environment, stdout=output, stderr=output).returncode
    said = (folder / "output").read_text(errors="replace")
    print(said)
    if code:
        lines = [line for line in said.splitlines() if "Error" in line] or said.splitlines()[-1:] or [""]
        raise RuntimeError(f"{name}: exit code {code}: {lines[-1].strip(' │')}")
    return _written(folder)


def _written(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


# --- the rank's program


def train(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args(arguments)
    folder: Path = options.folder

    import torch
    from bench.gpu.llama import SIZES
    from bench.gpu.work import Fit, tiny

    import echelon as ech

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with workspaces of fixed sizes
    torch.use_deterministic_algorithms(options.deterministic)

    class Kills(ech.Callback):
        def on_train_step_end(self, state: ech.State, unit: Any) -> None:
            step = unit.train_progress.num_steps_completed
            if went_on and not (folder / "resumed.json").exists():
                if options.device == "cuda":
                    torch.cuda.synchronize()
                (folder / "resumed.json").write_text(repr(time.monotonic()))
            elif options.kill and not went_on and step == KILLED_AT:
                time.sleep(1.0)  # the launcher's server loads what a restart needs
                (folder / "killed.json").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    device = ech.init_from_env(options.device)
    size = SIZES["tiny"]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, size.vocabulary, (STEPS * 4, size.context + 1), generator=generator)
    loader = ech.Loader([(row[:-1], row[1:]) for row in rows], 4)
    torch.manual_seed(3)
    unit = Fit(module=tiny(), device=device, layout="fsdp", precision="bf16", clip_grad_norm=1.0)
    saver = ech.DistributedCheckpointSaver(folder / "c", save_every_n_updates=SAVED_AT, async_checkpoint=True)
    went_on = saver.restore_from_latest(folder / "c", unit, train_dataloader=loader)
    ech.train(unit, loader, max_epochs=1, callbacks=[saver, Kills()])
    found = {f"{name}, {part}": tensor for name, tensors in _tensors(unit).items() for part, tensor in tensors.items()}
    found["random numbers of the device"] = torch.rand(4, device=device)
    (folder / "checksums.json").write_text(json.dumps({name: _checksum(tensor) for name, tensor in found.items()}))


def _tensors(unit: Any) -> dict[str, dict[str, Any]]:
    """Each parameter and its optimizer state."""
    found = {}
    for name, p in unit.module.named_parameters():
        state = {key: value for key, value in unit.optimizer.state[p].items() if hasattr(value, "dtype")}
        found[name] = {"parameter": p, **state}
    return found


def _checksum(tensor: Any) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(whole.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    train()
