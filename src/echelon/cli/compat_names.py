"""Which names of another library `echelon.compat` has, and what it suggests for the rest, read from its files.

Importing compat would import torch. So the files are parsed; only the tables of absent names, which need no torch, are executed
by themselves. `tests/cli/test_move.py` compares both with the result of an import.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["LIBRARIES", "Answer", "find", "library_of", "moved"]

_COMPAT = Path(__file__).parents[1] / "compat"
# A library's import name -> its module below `echelon.compat`.
LIBRARIES = {
    "dragon": "dragon",
    "fairscale": "fairscale",
    "lightning": "lightning",
    "lightning_fabric": "lightning.fabric",
    "nntool": "nntool",
    "pytorch_lightning": "lightning.pytorch",
    "torchtnt": "torchtnt",
    "transformers": "transformers",
}
# Files with a function `instead(module, name)`, which suggests a replacement for a name that compat lacks.
_TABLES = {
    "fairscale": "fairscale/absent.py",
    "lightning": "lightning/pytorch/absent.py",
    "torchtnt": "torchtnt/absent.py",
}
# Compat has only some names of these libraries; the others stay the library's own, even on the same import line.
_SOME = ("dragon", "nntool", "transformers")
# Where transformers defines its Trainers and their arguments; compat has them at its top.
_TRAINERS = ("", "trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq")


@dataclass(frozen=True)
class Answer:
    """What happens to an imported name.

    Args:
        module: the module of echelon that has the name, or that refuses it; "" if the line stays as it is.
        instead: compat's suggestion for a name that it lacks; None if it has the name, or leaves it to the library.
        is_known: False for a name that compat does not know at all.
    """

    module: str
    instead: str | None = None
    is_known: bool = True


def library_of(module: str) -> str | None:
    """The library of a module, if compat has names of it."""
    root = module.partition(".")[0]
    return root if root in LIBRARIES else None


def moved(module: str) -> str:
    """The name of a module below `echelon.compat`."""
    root, point, rest = module.partition(".")
    return f"echelon.compat.{LIBRARIES[root]}{point}{rest}"


def find(module: str, name: str = "") -> Answer:
    """What happens to `from module import name`, or to `import module`.

    Args:
        module: a module of a library in `LIBRARIES`.
    """
    root, _, rest = moved(module).removeprefix("echelon.compat.").partition(".")
    if root == "transformers":
        is_here = name in _names(root, "") and rest in _TRAINERS
        return Answer("echelon.compat.transformers" if is_here else "")
    file = _file(root, rest)
    instead = _told(root, rest)
    if root == "fairscale" and instead is not None and instead == _told(root, "nn.model_parallel"):
        return Answer("", instead)
    if file is None and instead is None and not _is_alias(root, rest):
        return Answer("", is_known=root in _SOME)
    is_flag = root == "lightning" and name.startswith("_") and name.endswith("_AVAILABLE")
    if not name or name == "*" or is_flag or name in _names(root, rest):
        return Answer(moved(module), instead if not name else None)
    below = f"{rest}.{name}".strip(".")
    if _file(root, below) is not None or _is_alias(root, below) or _told(root, below) is not None:
        whole = find(f"{module}.{name}")
        return Answer(moved(module) if whole.module else "", whole.instead)
    instead = _told(root, rest, name) or instead
    if instead is None and root in _SOME:
        return Answer("")
    return Answer(moved(module) if instead is not None else "", instead, is_known=instead is not None)


def _file(library: str, module: str) -> Path | None:
    """The file of a module below `echelon.compat.library`."""
    path = _COMPAT.joinpath(library, *module.split(".")) if module else _COMPAT / library
    return next((each for each in (path / "__init__.py", path.with_name(f"{path.name}.py")) if each.is_file()), None)


@functools.cache
def _table(library: str) -> Any:
    if library not in _TABLES:
        return None
    path = _COMPAT / _TABLES[library]
    name = ".".join(("echelon", "compat", *Path(_TABLES[library]).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    table: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def _told(library: str, module: str, name: str = "") -> str | None:
    table = _table(library)
    instead = table.instead(module, name) if table is not None else None
    return str(instead) if instead is not None else None


def _aliases(library: str) -> dict[str, str]:
    """Modules of compat that are aliases of another, under the library's names."""
    below = "pytorch." if library == "lightning" else ""
    aliases = getattr(_table(library), "ALIASES", {})
    return {f"{below}{name}": f"{below}{same}".rstrip(".") for name, same in aliases.items()}


def _is_alias(library: str, module: str) -> bool:
    return module in _aliases(library)


@functools.cache
def _names(library: str, module: str) -> frozenset[str]:
    """The names in a module."""
    file = _file(library, _aliases(library).get(module, module))
    names = set(_bound(file)) if file is not None else set()
    table = _table(library)
    if library == "lightning" and (file is not None or module.removeprefix("pytorch.") in table.MODULES):
        # Each module of compat.lightning also has the names of the others.
        homes = [_file(library, f"pytorch{home}") for home in table.HOMES]
        names |= {name for home in homes if home is not None for name in _exported(home)} | {*table.DISPLAYS}
        if module.startswith("pytorch.plugins"):
            names |= {"DDPPlugin", *table.ENVIRONMENTS}
    return frozenset(names)


def _bound(file: Path) -> Iterator[str]:
    """Names that a file binds at its top level, and the keys of its `_HOMES`, which are loaded on first use."""
    for statement in _statements(ast.parse(file.read_text())):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (each.asname or each.name.partition(".")[0] for each in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            yield from names
            if names == ["_HOMES"] and isinstance(statement.value, (ast.Dict, ast.DictComp)):
                yield from _homes(statement.value)


def _homes(table: ast.Dict | ast.DictComp) -> Iterator[str]:
    """Keys of `{"Trainer": "trainer", ...}`, or of a comprehension over `{"trainer": "Trainer ...", ...}`."""
    if isinstance(table, ast.Dict):
        yield from (str(key.value) for key in table.keys if isinstance(key, ast.Constant))
        return
    made_of = [each for each in ast.walk(table.generators[0].iter) if isinstance(each, ast.Dict)]
    for each in made_of:
        yield from (name for names in each.values if isinstance(names, ast.Constant) for name in str(names.value).split())


def _exported(file: Path) -> Iterator[str]:
    """Names in a file's `__all__`, except those that it adds by a star."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            yield from (str(each.value) for each in ast.walk(statement.value) if isinstance(each, ast.Constant))


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "handlers", "orelse", "finalbody"):
        for each in getattr(tree, field, ()):
            if isinstance(each, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                yield from _statements(each)
            elif isinstance(each, ast.stmt):
                yield each
