"""`echelon --version --verbose`: the facts that a bug report needs, as plain lines.

Nothing that may be broken is imported here: a separate process asks torch, and may crash. Variables are listed by name only,
since values may be secret; the user's home is written as `~`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.common.machine import package_version, usable_cores
from echelon.common.terminal import one_line
from echelon.contracts.stopping import signal_name
from echelon.contracts.version import __version__

__all__ = ["launcher_variables", "lines"]

TORCH_TIMEOUT_S, TOOL_TIMEOUT_S = 120.0, 20.0  # a cold network file system takes long to read torch

_LAUNCHERS = re.compile(
    r"(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|MASTER_ADDR|MASTER_PORT)\Z"
    r"|(?:CUDA|DRAGON|ECHELON|FI|GLOO|HYDRA|KMP|KUBERNETES|MPI|MV2|NCCL|NVIDIA|OMP|OMPI|PALS|PMI|PMIX|PYTORCH|SLURM|TORCH|TORCHELASTIC|UCX)_"
)

# Public names of torch only; None for what a build lacks.
_ASK_TORCH = """
import json, torch
cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else None
print(json.dumps({
    "version": str(torch.__version__), "git": torch.version.git_version, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "cudnn": cudnn, "nccl": nccl, "sees": torch.cuda.device_count(), "threads": torch.get_num_threads(),
}))
"""


def lines() -> list[str]:
    """The name and value of each fact, aligned."""
    facts = [*_of_python(), *_of_torch(), *_of_packages(), *_of_machine(), *_of_gpus(), *_of_launchers()]
    width = max(len(name) for name, _ in facts)
    return [f"{one_line(name).ljust(width)}  {one_line(_without_home(value))}".rstrip() for name, value in facts]


def _without_home(text: str) -> str:
    """`text` with the home folder, which contains the user's name, replaced by `~`."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if home.count("/") > 1 else text


def _of_python() -> Iterator[tuple[str, str]]:
    yield "echelon in", str(Path(__file__).parents[1])
    installed = package_version("echelon")
    if installed != __version__:
        yield "echelon installed as", installed
    yield "python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"


def _of_torch() -> Iterator[tuple[str, str]]:
    answer, why = _told_by_torch()
    if answer is None:
        installed = package_version("torch")
        is_absent = installed == "not installed" and why == "ModuleNotFoundError: No module named 'torch'"
        yield "torch", installed if is_absent else f"{installed}; cannot be imported: {why}"
        return
    yield "torch", f"{answer['version']} (commit {answer['git']})"
    built = f"CUDA {answer['cuda']}" if answer["cuda"] else f"ROCm {answer['hip']}" if answer["hip"] else "CPU only"
    yield "torch is built for", built
    yield "GPUs that torch sees", str(answer["sees"])
    if answer["cudnn"] is not None:
        yield "cuDNN", str(answer["cudnn"])
    if answer["nccl"] is not None:
        yield "NCCL", ".".join(map(str, answer["nccl"]))
    yield "torch's threads", str(answer["threads"])


def _told_by_torch() -> tuple[dict[str, Any] | None, str]:
    """The answer of a process that imports torch, or the reason why there is none."""
    # -P: a file torch.py in the current folder is not torch.
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"its import did not end within {TORCH_TIMEOUT_S:g} s"
    except OSError as error:
        return None, str(error)
    if done.returncode < 0:
        return None, f"its import ended by {signal_name(-done.returncode)}"
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        return None, errors[-1] if errors else f"its import ended with exit code {done.returncode}"
    try:
        answer = json.loads(done.stdout.decode().splitlines()[-1])
        return {name: answer[name] for name in ("version", "git", "cuda", "hip", "cudnn", "nccl", "sees", "threads")}, ""
    except (ValueError, LookupError, TypeError):
        return None, "it said something else than was asked"


def _of_packages() -> Iterator[tuple[str, str]]:
    required, extras = _requirements()
    for name in required:
        if name != "torch":
            yield name, package_version(name)
    for extra, names in sorted(extras.items()):
        versions = {name: package_version(name) for name in names}
        missing = [name for name, version in versions.items() if version == "not installed"]
        if len(missing) < len(versions):
            there = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in missing)
            yield f"extra {extra}", there + (f"; without {', '.join(missing)}" if missing else "")
    if absent := sorted(e for e, names in extras.items() if all(package_version(n) == "not installed" for n in names)):
        yield "extras not installed", ", ".join(absent)


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Names of echelon's requirements, and of those of each extra; both empty if echelon is not installed as a package."""
    try:
        texts = importlib.metadata.requires("echelon") or []
    except importlib.metadata.PackageNotFoundError:
        return [], {}
    required, extras = list[str](), dict[str, list[str]]()
    for text in texts:
        name = re.match(r"[\w.-]+", text)
        extra = re.search(r"""extra *== *['"]([\w.-]+)['"]""", text)
        if name is None or name[0] == "echelon":  # an extra made of other extras, which are listed themselves
            continue
        if extra is None:
            required.append(name[0])
        elif extra[1] not in ("dev", "test", "bench"):  # for work on echelon itself
            extras.setdefault(extra[1], []).append(name[0])
    return required, extras


def _of_machine() -> Iterator[tuple[str, str]]:
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "system", f"{_distribution()}, {kernel}, {' '.join(platform.libc_ver())}"
    yield "cores", f"{usable_cores()} usable of {os.cpu_count()}"
    try:
        import psutil

        memory = psutil.virtual_memory()
        yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"
    except ImportError:
        yield "memory", "unknown without psutil"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def _of_gpus() -> Iterator[tuple[str, str]]:
    """GPUs by nvidia-smi, which needs no torch."""
    listed = _said_by("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    for number, line in enumerate(listed or ()):
        name, _, rest = line.partition(",")
        memory, _, driver = rest.partition(",")
        if number == 0:
            yield "NVIDIA driver", driver.strip()
        yield f"GPU {number}", f"{name.strip()}, {memory.strip()}"
    if not listed:
        yield "GPUs", "none" if listed is None else "nvidia-smi lists none"


def _of_launchers() -> Iterator[tuple[str, str]]:
    slurm = _said_by("sbatch", "--version")
    yield "Slurm", slurm[0] if slurm else "none"
    yield "launchers' variables", ", ".join(launcher_variables(os.environ)) or "none"


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """Names, never values, of variables that configure launchers, torch and its libraries."""
    return sorted(name for name in environment if _LAUNCHERS.match(name))


def _said_by(tool: str, *arguments: str) -> Sequence[str] | None:
    """The lines that a program prints; None if it is missing or fails."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, timeout=TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else None
