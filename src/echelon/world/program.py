"""The program of this rank, to be compared with other ranks: versions, code, command line, settings. No secrets.

These must be equal on all ranks: the versions of torch and echelon, Python's major and minor version, the world size, the job,
the script, the user's modules that both ranks have imported, the arguments, and the few variables that change how ranks compute
or communicate. These may differ: hosts, paths, and arguments whose name says where a rank is (`--local-rank`, `--port`).
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

# How names of settings and modules begin; ECHELON_HANDSHAKE can exclude them from the comparison.
MODULE = "module "
SETTINGS = ("argument ", "variable ", "script", MODULE)
# Ranks with different values of these reduce in different orders, or make collectives that the others do not make.
_VARIABLES = (OVERRIDES_VARIABLE, "TORCH_DISTRIBUTED_DEBUG", "NCCL_ALGO", "NCCL_PROTO")
# Words in an argument's name that say where a rank is, or which one it is.
_PLACES = {
    *("rank", "ranks", "procid", "local", "worker", "machine", "node", "nodes", "id", "ids", "gpu", "gpus", "device", "devices"),
    *("host", "hosts", "hostname", "addr", "address", "ip", "port", "interface", "ifname", "master"),
}
_MOST_MODULES, _LARGEST = 1000, 4 << 20
_OPTION = re.compile(r"--?[A-Za-z]")
_NAMED = re.compile(r"[+~]*[A-Za-z_][\w.\-/@]*=")


def program(info: RankInfo, *, nccl: bool = False) -> dict[str, str]:
    """The facts of this rank that must be equal: name -> value, all short texts.

    Args:
        nccl: its group uses NCCL, so NCCL's version is compared as well.
    """
    return {
        "torch": str(torch.__version__).partition("+")[0],
        "Python": ".".join(map(str, sys.version_info[:2])),
        "echelon": __version__,
        "world size": str(info.world_size),
        **({"job": info.run_id} if "SLURM_HET_SIZE" not in os.environ else {}),  # components of such a job have different ids
        **({"NCCL": nccl_version()} if nccl else {}),
        **dict(_code()),
        **{f"argument {name}": value for name, value in arguments(sys.argv[1:]).items()},
        **{f"variable {name}": os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }


def build(device: torch.device) -> dict[str, str]:
    """The facts whose difference is only a warning: the build of torch, the kind of GPU."""
    facts = {"torch's build": str(torch.__version__)}
    gpu = getattr(torch.cuda.get_device_properties(device), "name", "") if device.type == "cuda" else ""
    return facts | ({"GPU": gpu} if gpu else {})


def nccl_version() -> str:
    """NCCL's version; empty if NCCL cannot be used."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def arguments(words: Sequence[str]) -> dict[str, str]:
    """The value of each option of a command line, without places and secrets.

    `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are options; words that belong to no option are collected under "words".
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
    """The values as text, without paths and names that contain this host's: these may differ between hosts."""
    kept = [v for v in values if "/" not in v and "\\" not in v and not (len(host) > 2 and host in v)]
    return " ".join(kept) if len(kept) == len(values) else " ".join([*kept, "(a place)"])


def _code() -> Iterator[tuple[str, str]]:
    """The script and the user's loaded modules, with checksums of their files."""
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
    """The source file of a module. Not by getattr, which would make lazy modules load now."""
    path = getattr(module, "__dict__", {}).get("__file__")
    return path if isinstance(path, str) and path.endswith(".py") else None


def _is_own(path: str, foreign: Sequence[str]) -> bool:
    return not path.startswith(tuple(foreign)) and "/site-packages/" not in path and "/dist-packages/" not in path


def _foreign_folders() -> list[str]:
    """The folders of installed code: Python's own, packages, torch and echelon, wherever they were installed from."""
    paths: Mapping[str, str] = sysconfig.get_paths()
    packages = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    folders = [paths.get("stdlib", ""), paths.get("platstdlib", ""), site.getusersitepackages(), *map(str, packages)]
    return [folder.rstrip("/") + "/" for folder in folders if folder]


def _checksum(path: str) -> str:
    """Twelve hex digits; empty for a file that cannot be read, or is too large for a source."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:12] if len(content) <= _LARGEST else ""
