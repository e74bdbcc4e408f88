"""The shape of the tests: what they share has a plain name, and they use the library as its users do."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.kit.refusals import golden

TESTS = Path(__file__).parents[1]

# Private names of the library that a test uses still: (file, name). Take a line out when its test does without; add none.
STILL_PRIVATE = {
    ("test_callbacks.py", "_patience_count"),
    ("test_checkpoint_foreign.py", "_done"),
    ("test_checkpoint_hostile.py", "_fill"),
    ("test_finite.py", "_update"),
}

# Of torch and accelerate, on objects that the library made.
OF_OTHERS = {
    "_compiled_call_impl",
    "_dump_fr_trace",
    "_flatten",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_get_backend",
    "_local_tensor",
    "_module_classes_to_ignore",
    "_precomputed_scale",
    "_schema",
    "_shared_state",
    "_timeout",
}


# Of TorchTNT, FairScale and torch's older FSDP: programs read and set these, so compat has them.
OF_OLD_NAMES = {
    "_active_phase",
    "_handle",
    "_init_scale",
    "_num_steps_completed",
    "_should_stop",
    "_step_output",
    "_train_state",
}


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
    found = {
        (Path(path).name, name)
        for path, tree in trees_of_tests().items()
        for name in private_names(tree)
        if not (name in OF_OLD_NAMES and path.startswith("compat/"))
    }
    assert found - STILL_PRIVATE == set(), "use the public way, or make one"
    assert STILL_PRIVATE - found == set(), "take these lines out of STILL_PRIVATE: nobody uses them any more"


def test_words_are_held_for_functions_that_there_are() -> None:
    there = {
        f"tests/{path}::{prefix}{node.name}"
        for path, tree in trees_of_tests().items()
        for prefix, body in [("", tree.body), *((f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef))]
        for node in body
        if isinstance(node, ast.FunctionDef)
    }
    assert {asks for asks in golden() if not asks.startswith("#")} - there == set(), "take them out of tests/golden/messages.txt"


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
