"""`echelon ckpt`: list, verify and compare checkpoints, and export their weights to other programs."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from echelon.common.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CommandError, UsageError
from echelon.common.terminal import columns, one_line, printable
from echelon.contracts.events import read_lines
from echelon.contracts.run_dir import RunDir, find_run

__all__ = ["add_arguments", "execute"]

_TORCH = (".pt", ".pth", ".bin")  # suffixes of torch.load's files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    ls = verbs.add_parser("ls", help="the checkpoints in a folder")
    verify = verbs.add_parser("verify", help="compare every file with its checksums; exit code 1 if one is wrong")
    for each in (ls, verify):
        each.add_argument("path", help="a checkpoint, a folder of checkpoints, or a run's folder; URLs too")
    diff = verbs.add_parser("diff", help="compare the tensors of two checkpoints; exit code 1 if they differ")
    diff.add_argument(
        "a",
        help="a checkpoint, a folder of checkpoints (the newest is taken), or weights: .safetensors, .pt, a folder with "
        "model.safetensors.index.json",
    )
    diff.add_argument("b")
    diff.add_argument("--tolerance", type=float, default=0.0, help="largest relative difference that counts as equal")
    export = verbs.add_parser("export", help="write weights for other programs")
    export.add_argument("path", help="a checkpoint, or a folder of checkpoints (the newest is taken)")
    export.add_argument("out", help="a folder for safetensors, or a file NAME.pt for torch.load")
    take = verbs.add_parser("import", help="convert another program's weights to safetensors, which a unit can restore")
    take.add_argument("path", help="a file .pt, .pth, .bin, .ckpt or .safetensors")
    take.add_argument("out", help="a folder")
    take.add_argument("--trust-pickle", action="store_true", help="let the file run code: only if you trust its author")
    for each in (export, take):
        each.add_argument("--shard-size", default="5GB", help="largest size of a safetensors file, such as 500MB or 5GB")
    export.add_argument("--state", help="which attribute of the unit, if several hold weights")
    export.add_argument("--best", action="store_true", help="of a folder, take the best by Checkpoints(best=...), not the newest")


def execute(arguments: argparse.Namespace) -> int:
    run = {"ls": _ls, "verify": _verify, "diff": _diff, "export": _export, "import": _import}[arguments.what]
    return run(arguments)


def _found(where: str) -> list[Any]:
    """Folders named like checkpoints: the path itself, those in it, or those in its `checkpoints`.

    For a run, also those where it saved elsewhere.
    """
    from echelon.checkpoint import manifest
    from echelon.checkpoint.location import location

    path = location(where)
    if (path / manifest.MANIFEST).exists() or manifest.is_named(path):
        return [path]
    if not path.exists():
        try:
            path = find_run(where)
        except UsageError:
            raise CheckpointNotFoundError(
                f"{where} does not exist; give a checkpoint, a folder of checkpoints, or a run's name or folder.", path=str(where)
            ) from None
    inside = chain((path, path / "checkpoints"), _elsewhere(path))
    return next((folders for each in inside if (folders := manifest.named_folders(each) or _of_other_names(each))), [])


def _elsewhere(path: Any) -> Iterator[Any]:
    """The folder in which a run saved last, as its events say."""
    from echelon.checkpoint.location import location

    if not isinstance(path, Path):
        return
    run = RunDir(path)
    for attempt in reversed(run.attempts()):
        events = read_lines(attempt / run.events(0).name)
        saved = [str(event["path"]) for event in events if event.get("event") == "checkpoint_saved" and "path" in event]
        yield from (location(each.rpartition("/")[0]) for each in saved[-1:])


def _of_other_names(folder: Any) -> list[Any]:
    """Checkpoints under other libraries' names, such as "epoch=1-step=20.ckpt", oldest first."""
    from echelon.checkpoint import manifest

    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if not path.name.startswith(".") and (path / manifest.MANIFEST).exists()]
    return sorted(folders, key=lambda path: (_time_of(path), path.name))


def _time_of(path: Any) -> float:
    from echelon.checkpoint import manifest

    try:
        return float(manifest.read(path)["time"])
    except CheckpointError:  # whoever reads the checkpoint reports it
        return 0.0


def _newest(where: str) -> Any:
    """The checkpoint at a path, or the newest in a folder: an error if that is incomplete, never silently an older one."""
    from echelon.checkpoint import manifest
    from echelon.checkpoint.location import location

    checkpoints = _found(where)
    if not checkpoints:
        raise CheckpointNotFoundError(f"{where} holds no checkpoint.", path=str(where))
    if not manifest.is_whole(checkpoints[-1]):
        earlier = next((path for path in reversed(checkpoints[:-1]) if manifest.is_whole(path)), None)
        raise CheckpointCorruptError(
            f"{checkpoints[-1]} is incomplete: a file is missing or cut off."
            + (f" The one before is {earlier}; to use it, give its path." if earlier else "")
        )
    if str(checkpoints[-1]) != str(location(where)):
        print(f"{checkpoints[-1]}", file=sys.stderr)
    return checkpoints[-1]


def _best(checkpoints: list[Any]) -> tuple[Any, str | None]:
    """The best of checkpoints, oldest first, by the metric of the newest run there; None if none has this metric.

    Also the name of the state that was evaluated, if there were several.
    """
    from echelon.checkpoint import manifest
    from echelon.checkpoint.policy import BestCheckpointConfig

    facts = {i: manifest.read(path) for i, path in enumerate(checkpoints) if manifest.is_whole(path)}
    best = next((recorded for i in reversed(facts) if (recorded := facts[i].get("best")) is not None), None)
    if not isinstance(best, dict) or best.get("mode") not in ("min", "max") or not isinstance(best.get("name"), str):
        return None, None
    ordered = BestCheckpointConfig(best["name"], best["mode"]).best_first(
        {i: each.get("metrics", {}) for i, each in facts.items()}
    )
    if not ordered:
        return None, None
    its_own = facts[ordered[0]].get("best")  # the newest checkpoint may come from a run with other averages
    state = its_own.get("state") if isinstance(its_own, dict) else None
    return checkpoints[ordered[0]], state if isinstance(state, str) else None


def _chosen(where: str, *, best: bool, state: str | None) -> tuple[Any, str | None]:
    """The checkpoint, and the name of the state to export."""
    if not best:
        return _newest(where), state
    path, evaluated = _best(_found(where))
    if path is None:
        raise CheckpointNotFoundError(
            f"{where} has no best checkpoint. Checkpoints(..., best=NAME) names the metric that decides. Without "
            "--best, the newest is taken.",
            path=str(where),
        )
    if evaluated is not None and state is None:
        print(f"{path}  {one_line(evaluated)}, which was evaluated", file=sys.stderr)
        return path, evaluated
    print(f"{path}", file=sys.stderr)
    return path, state


def _weights_or_newest(where: str) -> Any:
    from echelon.checkpoint.foreign import is_weights
    from echelon.checkpoint.location import location

    path = location(where)
    return path if isinstance(path, Path) and is_weights(path) else _newest(where)


def _ls(arguments: argparse.Namespace) -> int:
    from echelon.checkpoint import manifest

    checkpoints = _found(arguments.path)
    if not checkpoints:
        print(f"{arguments.path} holds no checkpoint.")
        return 0
    best, _ = _best(checkpoints)
    rows = [("step", "time", "size", "ranks", "layout", "metrics", "whole")]
    for path in checkpoints:
        try:
            facts = manifest.read(path)
        except CheckpointError as error:
            rows.append((path.name, "", "", "", "", "", f"no: {error}"))
            continue
        config = facts.get("config", {})
        rows.append(
            (
                str(facts["step"]) if manifest.is_named(path) else f"{facts['step']} {path.name}",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["time"])),
                _size(sum(entry["size"] for entry in facts["files"].values())),
                str(config.get("world_size", "")),
                str(config.get("layout") or config.get("strategy") or ""),
                ", ".join(f"{name} {value:.6g}" for name, value in facts.get("metrics", {}).items())
                + (" (best)" if path == best else ""),
                "yes" if manifest.is_whole(path) else "no: a file is missing or cut off",
            )
        )
    print("\n".join(columns([[one_line(cell) for cell in row] for row in rows])))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from echelon.checkpoint import manifest, structure

    checkpoints = _found(arguments.path)
    if not checkpoints:
        raise CheckpointNotFoundError(f"{arguments.path} holds no checkpoint.", path=str(arguments.path))
    bad = 0
    for path in checkpoints:
        try:
            facts = manifest.read(path)
            wrong = list(dict.fromkeys(manifest.problems(path, facts, threads=2) + structure.problems(path, facts)))
        except CheckpointError as error:
            wrong = [str(error)]
        bad += bool(wrong)
        size = "" if wrong else f": {len(facts['files'])} files, {_size(sum(e['size'] for e in facts['files'].values()))}"
        print(f"{path}  {'CORRUPT' if wrong else 'ok'}{size}")
        for line in wrong:
            print(f"  {printable(line)}")
    return 1 if bad else 0


def _diff(arguments: argparse.Namespace) -> int:
    from echelon.checkpoint import export

    rows, only = export.differences(*(_weights_or_newest(where) for where in (arguments.a, arguments.b)))
    unequal = [row for row in rows if not row[1] <= arguments.tolerance]
    for name, relative, note in sorted(unequal, key=lambda row: -row[1] if row[1] == row[1] else float("-inf")):
        print(f"{one_line(name)}  {note or f'{relative:.3g}'}")
    for which, names in zip((arguments.a, arguments.b), only, strict=True):
        for name in names:
            print(f"{one_line(name)}  only in {which}")
    same = len(rows) - len(unequal)
    print(f"{same} of {len(rows)} common tensors equal" + (f" to {arguments.tolerance:g}" if arguments.tolerance else ""))
    return 1 if unequal or any(only) else 0


def _export(arguments: argparse.Namespace) -> int:
    from echelon.checkpoint import export

    out = _folder_or_torch(arguments.out)
    path, state = _chosen(arguments.path, best=arguments.best, state=arguments.state)
    if out.suffix in _TORCH:
        written = [export.export_torch(path, out, state=state)]
    else:
        written = export.export_safetensors(path, out, state=state, shard_bytes=_bytes(arguments.shard_size))
    print(*written, sep="\n")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from echelon.checkpoint import export

    source = Path(arguments.path)
    if not source.exists():
        raise CheckpointNotFoundError(f"{source} does not exist.", path=str(source))
    out, size = _folder_or_torch(arguments.out, torch=False), _bytes(arguments.shard_size)
    written = export.convert(source, out, shard_bytes=size, trust_pickle=arguments.trust_pickle)
    print(*written, sep="\n")
    return 0


def _folder_or_torch(text: str, *, torch: bool = True) -> Path:
    """The output path. A folder is refused under a name that other programs take for a file of weights."""
    out = Path(text)
    if out.suffix in (".safetensors", ".ckpt", *([] if torch else _TORCH)) and not out.is_dir():
        file = f", or a file NAME{', NAME'.join(_TORCH)} for torch.load" if torch else ""
        raise CommandError(f"OUT must be a folder for model.safetensors{file}, got {out}. Name the folder.")
    return out


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|TB)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise CommandError(f"--shard-size must be a size such as 500MB or 5GB, got {text}.")
    return int(float(match[1]) * 1000 ** ["b", "kb", "mb", "gb", "tb"].index((match[2] or "B").lower()))
