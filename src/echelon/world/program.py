"""What this rank runs, by name, for a comparison with the others: versions, code, command line, settings. Nothing secret.

Equal on all ranks must be: torch's and echelon's version, Python's major and minor one, the world size, the job, the script, of
its own modules those that both ranks have imported, the arguments, and the few variables by which ranks would compute or talk
in different ways. What may differ: hosts, paths, and arguments that by their name say where a rank is (`--local-rank`, `--port`).
"""

from __future__ import annotations

import hashlib
import os
import re
import site
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from echelon.common.redact import redacted_words
from echelon.contracts.overrides import VARIABLE as OVERRIDES_VARIABLE
from echelon.contracts.rank import RankInfo
from echelon.contracts.version import __version__

__all__ = ["MODULE", "SETTINGS", "arguments", "build", "nccl_version", "program"]

# How names of settings and modules begin, which a rank may be told not to compare.
MODULE = "module "
SETTINGS = ("argument ", "variable ", "script", MODULE)
# Ranks that disagree about these reduce in different orders, or take part in collectives that the others do not make.
_VARIABLES = (OVERRIDES_VARIABLE, "TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO")
# Of an argument's name: it says where a rank is, or which one it is.
_PLACES = {
    *("rank", "ranks", "procid", "local", "worker", "machine", "node", "nodes", "id", "ids", "gpu", "gpus", "device", "devices"),
    *("host", "hosts", "hostname", "addr", "address", "ip", "port", "interface", "ifname", "master"),
}
_MOST_MODULES, _LARGEST = 1000, 4 << 20
_OPTION = re.compile(r"--?[A-Za-z]")
_NAMED = re.compile(r"[+~]*[A-Za-z_][\w.\-/@]*=")


def program(info: RankInfo, *, nccl: bool = False) -> dict[str, str]:
    """Of this rank: name -> value, all short texts.

    Args:
        nccl: its group uses NCCL, whose version then counts.
    """
    return {
        "torch": str(torch.__version__).partition("+")[0],
        "Python": ".".join(map(str, sys.version_info[:2])),
        "echelon": __version__,
        "world size": str(info.world_size),
        **({"job": info.run_id} if "SLURM_HET_SIZE" not in os.environ else {}),  # whose parts have numbers of their own
        **({"NCCL": nccl_version()} if nccl else {}),
        **dict(_code()),
        **{f"argument {name}": value for name, value in arguments(sys.argv[1:]).items()},
        **{f"variable {name}": os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }


def build(device: torch.device) -> dict[str, str]:
    """What may differ, and is told: the build of torch, the kind of GPU."""
    facts = {"torch's build": str(torch.__version__)}
    gpu = getattr(torch.cuda.get_device_properties(device), "name", "") if device.type == "cuda" else ""
    return facts | ({"GPU": gpu} if gpu else {})


def nccl_version() -> str:
    """Empty where NCCL cannot be used."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def arguments(words: Sequence[str]) -> dict[str, str]:
    """Of a command line: the value of each option, without places and secrets.

    `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are one by name; what belongs to no option is together under "words".
    """
    by_option: dict[str, list[str]] = {}
    name = "words"
    for word in redacted_words(words):
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            by_option.setdefault(name, []).extend([value] if equals else [])
            name = "words" if equals else name
        elif _NAMED.match(word):
            key, _, value = word.partition("=")
            by_option.setdefault(key, []).append(value)
        else:
            by_option.setdefault(name, []).append(word)
    host = socket.gethostname().partition(".")[0]
    return {
        name: _shown(values, host) for name, values in by_option.items() if not _PLACES & set(re.split(r"[^a-z]+", name.lower()))
    }


def _shown(values: Sequence[str], host: str) -> str:
    """Paths, and names that contain this host's, may be others elsewhere."""
    kept = [v for v in values if "/" not in v and "\\" not in v and not (len(host) > 2 and host in v)]
    return " ".join(kept) if len(kept) == len(values) else " ".join([*kept, "(a place)"])


def _code() -> Iterator[tuple[str, str]]:
    """The script, and the modules of the user's that are loaded, with checksums of their files."""
    foreign = _foreign_folders()
    main = _file(sys.modules.get("__main__"))
    if main is not None and _is_own(main, foreign) and (sum_ := _checksum(main)):
        yield "script", f"{Path(main).name} ({sum_})"
    own = []
    for name, module in list(sys.modules.items()):
        path = _file(module)
        if path is not None and path != main and name not in ("__main__", "__mp_main__") and _is_own(path, foreign):
            own.append((name, path))
    for name, path in sorted(own)[:_MOST_MODULES]:
        if sum_ := _checksum(path):
            yield MODULE + name, sum_


def _file(module: object) -> str | None:
    """Not by getattr, which would have modules that load themselves late do it now."""
    path = getattr(module, "__dict__", {}).get("__file__")
    return path if isinstance(path, str) and path.endswith(".py") else None


def _is_own(path: str, foreign: Sequence[str]) -> bool:
    return not path.startswith(tuple(foreign)) and "/site-packages/" not in path and "/dist-packages/" not in path


def _foreign_folders() -> list[str]:
    """Where installed code is: Python's own, packages, torch and echelon, wherever they were installed from."""
    paths: Mapping[str, str] = sysconfig.get_paths()
    packages = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    folders = [paths.get("stdlib", ""), paths.get("platstdlib", ""), site.getusersitepackages(), *map(str, packages)]
    return [folder.rstrip("/") + "/" for folder in folders if folder]


def _checksum(path: str) -> str:
    """Twelve digits; empty for a file that cannot be read, or is no source."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:12] if len(content) <= _LARGEST else ""
