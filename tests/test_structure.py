"""The shape of the sources: what a module of the library may import, and what only one room may ask."""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import echelon

SOURCES = Path(echelon.__file__).parent

# Imports that close a cycle still: (importer, imported). Take a line out when its cycle is gone; add none.
STILL_CYCLIC = {
    ("echelon.loop.auto_checks", "echelon.loop.auto"),
    ("echelon.loop.optimizer_checks", "echelon.loop.auto"),
    ("echelon.loop.rebuild", "echelon.loop.auto"),
    ("echelon.loop.checkpointing.forgotten", "echelon.loop.checkpointing.restoring"),
    ("echelon.loop.trainer_rank", "echelon.loop.trainer"),
    ("echelon.launcher.dragon.ranks", "echelon.launcher.dragon.group"),
    ("echelon.prover.rank", "echelon"),
    ("echelon.compat.fairscale.nn.wrap.auto_wrap", "echelon.compat.fairscale.nn.data_parallel"),
}

Graph = Mapping[str, set[str]]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a reader has to follow them, too."""
    graph = without(imports(), STILL_CYCLIC)
    assert [cycle for module in graph if (cycle := way(graph, module, module)) and module == min(cycle)] == []


def test_every_excepted_import_still_closes_a_cycle() -> None:
    whole = imports()
    graph = without(whole, STILL_CYCLIC)
    needed = {(a, b) for a, b in STILL_CYCLIC if b in whole.get(a, ()) and way(graph, b, a)}
    assert needed == STILL_CYCLIC, "take these lines out of STILL_CYCLIC: they close no cycle any more"


def test_a_planted_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert way(graph, "a", "a") == ["a", "b", "c"]
    assert way(graph, "d", "d") is None
    assert way(without(graph, {("c", "a")}), "a", "a") is None


def test_imports_in_functions_and_for_type_checkers_are_read() -> None:
    source = (
        "if TYPE_CHECKING:\n    from echelon.loop import auto\ndef f():\n    import echelon.cli.main\n    from . import run\n"
    )
    modules = {"echelon.loop", "echelon.loop.auto", "echelon.loop.run", "echelon.cli.main", "echelon.loop.x"}
    found = imported_by("echelon.loop.x", ast.parse(source), modules, is_package=False)
    assert found == {"echelon.loop.auto", "echelon.loop.run", "echelon.cli.main"}


@functools.cache
def trees() -> dict[str, tuple[Path, ast.Module]]:
    """By module name."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = ("echelon", *path.relative_to(SOURCES).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path, ast.parse(path.read_text())
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of the library that each of them imports, wherever in the file."""
    all_trees = trees()
    return {
        name: imported_by(name, tree, all_trees.keys(), is_package=path.name == "__init__.py")
        for name, (path, tree) in all_trees.items()
    }


def imported_by(name: str, tree: ast.Module, modules: object, *, is_package: bool) -> set[str]:
    assert hasattr(modules, "__contains__")
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: None if is_package else -1]
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found |= {each for each in (inner if inner in modules else base,) if each in modules}
    return found - {name}


def without(graph: Graph, edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    return {a: {b for b in found if (a, b) not in edges} for a, found in graph.items()}


def way(graph: Graph, start: str, end: str) -> list[str] | None:
    """The modules of the shortest chain of imports from `start` to `end`, without the last; None if there is none."""
    chains, seen = [[start]], set[str]()
    for chain in chains:  # grows meanwhile
        for name in sorted(graph.get(chain[-1], ())):
            if name == end:
                return chain
            if name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return None


# --- the tests themselves

TESTS = Path(__file__).parent

# Private names of the library that a test uses still: (file, name). Take a line out when its test does without; add none.
STILL_PRIVATE = {
    ("compat/test_torchtnt_callbacks.py", "_told"),
    ("test_callbacks_control.py", "_patience_count"),
    ("test_callbacks_watch.py", "_bars"),
    ("test_callbacks_watch.py", "_tqdm"),
    ("test_checkpoint_async.py", "_buffers"),
    ("test_checkpoint_commit.py", "_start_of"),
    ("test_checkpoint_foreign.py", "_done"),
    ("test_checkpoint_hostile.py", "_fill"),
    ("test_cli.py", "_HOMES"),
    ("test_finite.py", "_finite"),
    ("test_finite.py", "_is_elsewhere"),
    ("test_gradients.py", "_root"),
    ("test_output.py", "_model"),
    ("test_output.py", "_partial"),
    ("test_progress.py", "_count"),
    ("test_progress.py", "_duration"),
    ("test_trainer.py", "_changes"),
    ("test_trainer.py", "_local_ranks"),
    ("test_watch.py", "_numbers"),
}

# Of torch and accelerate, on objects that the library made.
OF_OTHERS = {"_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_module_classes_to_ignore", "_shared_state"}


def test_no_test_imports_another_test() -> None:
    """What several share is a module of its own, with a plain name."""
    shared = set()
    for path, tree in trees_of_tests().items():
        own = ".".join(("tests", *Path(path).with_suffix("").parts))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module != own:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                shared |= {(path, name) for name in names if name.startswith("tests.") and ".test_" in name}
    assert shared == set()


def test_no_test_uses_a_private_name_of_the_library() -> None:
    found = {(path, name) for path, tree in trees_of_tests().items() for name in private_names(tree)}
    assert found - STILL_PRIVATE == set(), "use the public way, or make one"
    assert STILL_PRIVATE - found == set(), "take these lines out of STILL_PRIVATE: nobody uses them any more"


def test_a_planted_private_name_is_found() -> None:
    source = (
        "import torch\nfrom echelon.loop import auto\nfrom echelon.checkpoint.lease import _start_of\n"
        "auto._table\nsaver = Saver()\nsaver._buffers\nself._own\ntorch._foreach_copy_\nauto.__file__\n"
    )
    assert private_names(ast.parse(source)) == {"_start_of", "_table", "_buffers"}


@functools.cache
def trees_of_tests() -> dict[str, ast.Module]:
    """By path below tests/."""
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def private_names(tree: ast.Module) -> set[str]:
    """Imported from the library, or asked of any object that is neither the code's own nor of another library."""
    foreign = {"self", "cls", "super"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(a.asname or a.name).split(".")[0] for a in node.names if not a.name.startswith("echelon")}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("echelon"):
            foreign |= {a.asname or a.name for a in node.names}
    # What a file defines on its own objects is its own.
    own = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and base_of(n) == "self"
    }
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echelon"):
            found |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own and base_of(node) not in foreign:
            found.add(node.attr)
    return found


def base_of(node: ast.expr) -> str | None:
    """`a` of `a.b.c` and of `a(...).b`."""
    while True:
        if isinstance(node, ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_OTHERS
