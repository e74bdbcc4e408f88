"""The shape of the sources: what a module of the library may import, and what only one room may ask."""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import echelon

SOURCES = Path(echelon.__file__).parent

# Imports that close a cycle still: (importer, imported). Take a line out when its cycle is gone; add none.
STILL_CYCLIC = {
    ("echelon.loop.trainer_rank", "echelon.loop.trainer"),
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


# Until the Trainer's ranks are given a value of their own.
STILL_REACHING_IN = {"echelon.loop.trainer_rank"}


def test_the_loop_leaves_the_private_attributes_of_others_alone() -> None:
    found = {
        name: reached
        for name, (_, tree) in trees().items()
        if name.startswith("echelon.loop.") and (reached := private_attributes_of_others(tree))
    }
    assert found.keys() <= STILL_REACHING_IN, found


def test_a_planted_reach_into_another_is_found() -> None:
    source = "class A:\n    def f(self, b):\n        self._x = super()._x\n        return b._y + self.c._z\n"
    assert private_attributes_of_others(ast.parse(source)) == ["b._y", "self.c._z"]


def private_attributes_of_others(tree: ast.Module) -> list[str]:
    """Attributes with a leading underscore of anything but `self`, `cls` and `super()`."""
    own = {"self", "cls", "super()"}
    private = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.endswith("__"))
    return sorted(ast.unparse(n) for n in private if ast.unparse(n.value) not in own)
