"""What TorchTNT and FairScale publish is there: every name, every parameter in its place, every member of a class.

`names.json` says which release each list is of.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import tomllib
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from echelon.common.errors import NotHereError
from tests.conftest import clean_environment

HERE = Path(__file__).parent
PUBLISHED: dict[str, Any] = json.loads((HERE / "names.json").read_text())

# What is not there, with the reason.
EXPERTS = "the ranks over which experts are split are no part of echelon"
EVALUATION = "the loop keeps whether an evaluation is due, as evaluation_due"
LEFT_OUT = {
    "torchtnt.framework.callbacks.dcp_saver.DistributedCheckpointSaver.default_writer_options is missing": "not torch's writer",
    "torchtnt.utils.progress.Progress.eval_pending is missing": EVALUATION,
    "torchtnt.utils.progress.Progress.mark_eval_pending is missing": EVALUATION,
    "torchtnt.utils.progress.Progress.mark_eval_completed is missing": EVALUATION,
    "torchtnt.utils.device_mesh.GlobalMeshCoordinator: no parameter ep": EXPERTS,
    "torchtnt.utils.device_mesh.GlobalMeshCoordinator.dense_fsdp_mesh is missing": EXPERTS,
    "torchtnt.utils.device_mesh.GlobalMeshCoordinator.ep_mesh is missing": EXPERTS,
    "torchtnt.utils.device_mesh.GlobalMeshCoordinator.expert_fsdp_mesh is missing": EXPERTS,
    "torchtnt.utils.device_mesh.create_device_mesh: no parameter ep": EXPERTS,
}


def _ours(module: str) -> Any:
    return importlib.import_module(f"echelon.compat.{module}")


def _is_replaced(library: str, module: str, name: str) -> bool:
    """Whether a name is on the list of those that something else replaces; importing it is no error, using it says what."""
    if f"{module}.{name}".removeprefix(f"{library}.") not in PUBLISHED[library]["replaced"]:
        return False
    with pytest.raises(NotHereError, match=f"{name} is not part of echelon.compat. Instead: ."):
        getattr(_ours(module), name)()
    return True


PACKAGES = [(package, library) for library in PUBLISHED for package in PUBLISHED[library]["public"]["names"]]


@pytest.mark.parametrize(("package", "library"), PACKAGES)
def test_public_names_are_there_or_say_what_replaces_them(package: str, library: str) -> None:
    module = _ours(package)
    names = PUBLISHED[library]["public"]["names"][package].split()
    present = [name for name in names if not _is_replaced(library, package, name)]
    assert [name for name in present if not hasattr(module, name)] == []
    assert library == "fairscale" or set(present) <= set(module.__all__), "and `import *` gives them"


MODULES = [
    (module, library, part)
    for library, parts in (("torchtnt", ("modules", "newer")), ("fairscale", ("modules",)))
    for part in parts
    for module in PUBLISHED[library][part]["names"]
]


@pytest.mark.parametrize(("module", "library", "part"), MODULES)
def test_modules_have_their_names_with_all_parameters_and_members(module: str, library: str, part: str) -> None:
    ours, wrong = _ours(module), []
    for name, (parameters, members) in PUBLISHED[library][part]["names"][module].items():
        if _is_replaced(library, module, name):
            continue
        found = getattr(ours, name, None)
        if found is None:
            wrong.append(f"{name} is missing")
            continue
        if parameters is not None:
            wrong += [f"{name}: {each}" for each in _refused(found, parameters.split())]
        wrong += [f"{name}.{each} is missing" for each in members.split() if not _has(found, each)]
    assert [each for each in wrong if f"{module}.{each}" not in LEFT_OUT] == []


def _refused(found: Any, parameters: list[str]) -> list[str]:
    """Which of the parameters would not be taken as they are given there."""
    positional, keywords, rest = _accepted(found)
    if found.__name__ == "Lambda":  # takes any hook, and refuses other names
        found(**{name: None for name in parameters if name != "*"})
        return []
    wrong, by_position = [], True
    for at, name in enumerate(parameters):
        if name.startswith("*"):
            by_position = False
        elif name not in positional and name not in keywords and "**" not in rest:
            wrong.append(f"no parameter {name}")
        elif by_position and "*" not in rest and positional[at : at + 1] != [name]:
            wrong.append(f"{name} is not parameter {at}")
    return wrong


def _accepted(found: Any) -> tuple[list[str], set[str], set[str]]:
    """Names by position, names by keyword alone, and "*" or "**" if anything at all is taken.

    What a constructor's `**options` takes is what the constructors of its bases do.
    """
    is_class = inspect.isclass(found)
    callables = [vars(base)["__init__"] for base in found.__mro__ if "__init__" in vars(base)] if is_class else [found]
    positional: list[str] = []
    keywords: set[str] = set()
    rest: set[str] = set()
    for i, function in enumerate(callables):
        if function is object.__init__:
            rest -= {"*", "**"}
            break
        own = list(inspect.signature(function).parameters.values())[1 if is_class else 0 :]
        names = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if i == 0 or "*" in rest:
            positional += [name for name in names if name not in positional]
        else:
            keywords |= set(names)
        keywords |= {p.name for p in own if p.kind is p.KEYWORD_ONLY}
        rest = {
            str(p).split(":")[0].rstrip("abcdefghijklmnopqrstuvwxyz_") for p in own if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        if "**" not in rest:
            break
    return positional, keywords, rest


def _has(found: Any, member: str) -> bool:
    """Of the class, or set on its objects by a constructor."""
    if hasattr(found, member) or (isinstance(found, type) and issubclass(found, Enum) and member in found.__members__):
        return True
    for base in found.__mro__:
        if member in getattr(base, "__annotations__", {}):
            return True
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        if any(
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == member for node in ast.walk(tree)
        ):
            return True
    return False


def test_refused_parameters_are_found() -> None:
    """This file's own tool."""

    class Base:
        def __init__(self, a: int, *, deep: int = 0) -> None: ...

    class Takes(Base):
        def __init__(self, a: int, b: int = 0, **options: Any) -> None: ...

    assert _refused(Takes, ["a", "b", "*", "deep"]) == []
    assert _refused(Takes, ["b", "a"]) == ["b is not parameter 0", "a is not parameter 1"]
    assert _refused(Takes, ["a", "deep", "*", "gone"]) == ["deep is not parameter 1", "no parameter gone"]
    assert _refused(Base.__init__, ["self", "a", "b"]) == ["no parameter b"]


def test_the_core_knows_nothing_of_compat_whose_absent_modules_say_what_to_use() -> None:
    """import-linter holds the floors, of which compat is the highest. Of the names at the root only Trainer loads it.

    Absent modules also without their packages imported before; which are loaded then, since `import a.b.c as d` looks for c in b.
    """
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = [contract for contract in project["contracts"] if contract["name"].startswith("Floors")]
    assert "echelon.compat" in floors["layers"][0].split(" | ") and "ignore_imports" not in floors
    code = (
        "import sys, echelon, echelon.loop.callbacks, echelon.observe.loggers, echelon.cli.main\n"
        "for name in {*echelon.__all__} - {'Trainer'}: getattr(echelon, name)\n"
        "print([name for name in sys.modules if name.startswith('echelon.compat')])\n"
        "import echelon.compat.torchtnt.framework.callbacks.torch_compile as there\n"
        "from echelon.compat.torchtnt.utils.misc import days_to_secs\n"
        "from echelon.compat.torchtnt.utils.nan import check_for_nan_or_inf\n"
        "for use in (there.TorchCompile, days_to_secs, check_for_nan_or_inf):\n"
        "    try:\n"
        "        use(1)\n"
        "    except Exception as error:\n"
        "        print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=clean_environment())
    loaded, *said = done.stdout.splitlines()
    assert loaded == "[]" and said == [
        f"E-NOT-HERE torchtnt.{name} is not part of echelon.compat. Instead: {instead}"
        for name, instead in (
            (
                "framework.callbacks.torch_compile.TorchCompile",
                "a Callback of your own, of a few lines; or keep TorchTNT's file.",
            ),
            ("utils.misc.days_to_secs", "load_state_dict, and datetime.timedelta."),
            ("utils.nan.check_for_nan_or_inf", "torch.autograd.detect_anomaly, or AutoUnit(detect_anomaly=True)."),
        )
    ], done.stderr
