"""The shape of the sources: what a module of the library may import, and what only one room may ask."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

import echelon
from echelon.parallel.prepared import Prepared

SOURCES = Path(echelon.__file__).parent
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 80  # of the core; its signature and docstring count
Graph = Mapping[str, set[str]]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a reader has to follow them, too."""
    graph = imports()
    assert [cycle for module in graph if (cycle := way(graph, module, module)) and module == min(cycle)] == []


# Not `data` and `checkpoint`, which begin names of torch's, too.
_NAMED = re.compile(r"`((?:cli|common|contracts|doctor|launcher|loop|observe|parallel|plan|prover|world)(?:\.\w+)+)`")


def test_a_module_that_a_text_names_is_there() -> None:
    named = {
        (str(path.relative_to(SOURCES)), name)
        for path, _ in trees().values()
        if not path.is_relative_to(SOURCES / "compat")
        for name in _NAMED.findall(path.read_text())
    }
    assert len(named) > 10
    assert sorted(each for each in named if not _is_there(each[1])) == []


def _is_there(name: str) -> bool:
    """Whether the parts of a name lead to a module, or to something that one mentions."""
    parts, at = name.split("."), SOURCES
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    if parts and (at / f"{parts[0]}.py").is_file():
        at = at / f"{parts.pop(0)}.py"
    file = at if at.is_file() else at / "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", file.read_text()) is not None


def test_no_file_and_no_function_is_longer_than_a_reader_holds_in_mind() -> None:
    long = {name for path, tree in trees().values() for name in too_long(str(path.relative_to(SOURCES)), path.read_text(), tree)}
    assert long == set()


def test_docs_architecture_lists_all_process_wide_state() -> None:
    text = (SOURCES.parents[1] / "docs/architecture.md").read_text()
    rows = [line for line in text.partition("## Process-wide state")[2].splitlines() if line.startswith("|")]
    listed = {f"echelon.{each}" for row in rows for each in re.findall(r"`([\w.]+)`", row)}
    there = {f"{name}.{each}" for name, (_, tree) in trees().items() for each in process_wide(tree)}
    assert listed == there, f"to be listed with a reason: {sorted(there - listed)}; gone: {sorted(listed - there)}"


def test_docs_architecture_lists_all_that_the_loop_may_ask_a_layout() -> None:
    text = (SOURCES.parents[1] / "docs/architecture.md").read_text().partition("## The seam")[2].partition("### Adding")[0]
    made = Prepared(torch.nn.Linear(1, 1))
    public = {name for name in {*dir(made), *vars(made)} if not name.startswith("_")}
    assert public - set(re.findall(r"\w+", text)) == set(), "the seam has these, too: say what for"
    assert len(public) <= 31, "the seam is wide enough"


def test_the_identity_of_an_object_is_not_kept_beyond_a_call() -> None:
    """An object that is freed leaves its id() to another one. Weak keys, or an attribute of our own, do not mistake them."""
    assert {name: lines for name, (_, tree) in trees().items() if (lines := kept_ids(tree))} == {}


def test_only_patching_replaces_a_forward_a_class_or_a_method() -> None:
    found = {name: lines for name, (_, tree) in trees().items() if name != PATCHES and (lines := replaces(tree))}
    assert found == {}, "parallel/patching.py does it, and knows the order"


PATCHES = "echelon.parallel.patching"
# What a module, an optimizer or a scheduler is called by.
METHODS = {"forward", "__class__", "zero_grad", "add_param_group"}


def replaces(tree: ast.Module) -> list[int]:
    """The lines in which an object's forward, class or method is set or taken away."""

    def named(node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in METHODS or (node.attr == "step" and ast.unparse(node.value).endswith(("optimizer", "scheduler")))
        return isinstance(node, ast.Subscript) and holds(node.value) and constant(node.slice)

    def holds(node: ast.expr) -> bool:
        return ast.unparse(node).startswith("vars(") or (isinstance(node, ast.Attribute) and node.attr == "__dict__")

    def constant(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and node.value in METHODS

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and any(constant(each) for each in node.args[:2]):
            base, _, name = ast.unparse(node.func).rpartition(".")
            if name in ("setattr", "__setattr__", "delattr") or (name == "pop" and base.startswith("vars(")):
                found.append(node.lineno)
        if any(named(each) for each in targets):
            found.append(node.lineno)
    return sorted(set(found))


# What wraps or splits a module, or is made for such a one: only `parallel/` knows these by class.
WRAPPERS = {
    "DDP",
    "DDPPrepared",
    "DPPrepared",
    "DTensor",
    "DTensorPrepared",
    "DataParallel",
    "DistributedDataParallel",
    "FSDP",
    "FSDP1Prepared",
    "FSDPModule",
    "FSDPPrepared",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "ShardedDDPPrepared",
    "ShardedDataParallel",
    "TorchFSDP",
    "ZeROPrepared",
}
# Attributes by which a DTensor is told from a tensor.
OF_DTENSORS = {"device_mesh", "full_tensor", "to_local"}
# Who asks nevertheless, and why.
MAY_ASK = {
    # Siblings of `parallel`, which they may not import: a tensor that a checkpoint was given is gathered as it is.
    "echelon.checkpoint",
    # Programs of other libraries are about these classes.
    "echelon.compat",
}


def test_only_parallel_knows_a_wrapper_by_its_class() -> None:
    found = {name: asked for name, (_, tree) in trees().items() if not may_ask(name) and (asked := asked_in(tree))}
    assert found == {}, "ask Prepared, or parallel/shards"


def may_ask(name: str) -> bool:
    return name.startswith("echelon.parallel.") or any(name.startswith(f"{room}.") for room in MAY_ASK)


def asked_in(tree: ast.Module) -> list[str]:
    """Tests for a wrapper's class, or for a DTensor's attributes, and classes' names in strings."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("isinstance", "issubclass"):
                found += WRAPPERS & names_in(node.args[1])
            elif node.func.id in ("hasattr", "getattr") and isinstance(node.args[1], ast.Constant):
                found += OF_DTENSORS & {node.args[1].value}
        elif isinstance(node, ast.Compare):
            found += WRAPPERS & set().union(*map(names_in, (node.left, *node.comparators)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += WRAPPERS & {node.value}
    return found


def names_in(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


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


def too_long(path: str, source: str, tree: ast.Module) -> set[str]:
    """The path, if the file has too many lines, and "path: name" of functions that have."""
    found = {path} if len(source.splitlines()) > MOST_LINES else set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            last = node.end_lineno or node.lineno
            found |= {f"{path}: {node.name}"} if last - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION else set()
    return found


def test_the_loop_leaves_the_private_attributes_of_others_alone() -> None:
    found = {
        name: reached
        for name, (_, tree) in trees().items()
        if name.startswith("echelon.loop.") and (reached := private_attributes_of_others(tree))
    }
    assert found == {}


def private_attributes_of_others(tree: ast.Module) -> list[str]:
    """Attributes with a leading underscore of anything but `self`, `cls` and `super()`."""
    own, named_tuples = {"self", "cls", "super()"}, {"_asdict", "_fields", "_replace"}
    private = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.endswith("__"))
    return sorted(ast.unparse(n) for n in private if n.attr not in named_tuples and ast.unparse(n.value) not in own)


CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
MUTABLE = {"Condition", "ContextVar", "Event", "Lock", "RLock", "local", "count", "cast"} | {
    *("Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set"),
    *("WeakIdKeyDictionary", "WeakKeyDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakValueDictionary"),
}


def process_wide(tree: ast.Module) -> set[str]:
    """Names of a module, and of its classes, that hold what can change. Constants in capitals count only if they are changed."""
    nodes = list(ast.walk(tree))
    found = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    changed = {
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if node.func.attr in CHANGING
    } | {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name)
    }
    for name, value in bound(tree.body):
        last = name.rpartition(".")[2]
        if is_mutable(value) and not last.startswith("__") and (not last.isupper() or last in changed):
            found.add(name)
    return found


def bound(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Names and values of the assignments in a module or class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from bound(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, node.value
        elif isinstance(node, ast.If | ast.Try):
            yield from bound(node.body, prefix)


def is_mutable(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return (made.attr if isinstance(made, ast.Attribute) else made.id if isinstance(made, ast.Name) else "") in MUTABLE


def kept_ids(tree: ast.Module) -> list[int]:
    """Lines on which `id(...)` goes to a name, an attribute, or a container that is not the function's own."""
    wide = {name for name, _ in bound(tree.body)}
    lines = set()

    def own(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in wide

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            kept = is_id(node.value)
        elif isinstance(node, ast.Subscript):
            kept = is_id(node.slice) and not own(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kept = any(map(is_id, node.args)) and not own(node.func.value)
        else:
            continue
        lines |= {node.lineno} if kept else set()
    return sorted(lines)


def is_id(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"


def test_compat_overrides_no_private_method_of_the_core() -> None:
    """What another library does otherwise has a public name in the core: `Update.forward`, `DistributedCheckpointSaver.place`."""
    found = []
    for name in (name for name in trees() if name.startswith("echelon.compat.")):
        for kind in (each for each in vars(importlib.import_module(name)).values() if inspect.isclass(each)):
            core = [base for base in kind.__mro__[1:] if re.match(r"echelon\.(?!compat)", base.__module__)]
            private = {each for each in vars(kind) if re.match("_(?!_|abc_)", each)} if kind.__module__ == name else set()
            found += [f"{name}: {kind.__name__}.{each}" for each in private if any(each in vars(base) for base in core)]
    assert found == []
