"""What launcher/workarounds.py does, and ddp/ddp.py for a group, is still needed and works. A failure says what can go."""

from __future__ import annotations

import ast
import importlib.util
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import echelon
from tests.kit.started import Started

SOURCES = Path(echelon.__file__).parent

FREED_IN_A_SCRIPT = """
import sys, time, torch, torch.distributed as dist

def main(whole):
    group = dist.new_group([0, 1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
    del model.process_group  # which would let go of the interpreter for a moment
    dist.destroy_process_group(None if whole else group)
    sys.setswitchinterval(1000)
    time.sleep(0.005)  # the group's threads get the interpreter once more
    work = group.allgather([[torch.ones(1)] * 2], [torch.ones(1)])
    while not work.is_completed():
        pass
    del work, group
    until = time.monotonic() + 0.05
    while time.monotonic() < until:  # the collective ends meanwhile
        pass

dist.init_process_group("gloo")
for each in range(10):
    main(each == 9)
    sys.setswitchinterval(0.005)
print("returned", flush=True)
"""


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_script_s_main_returns_after_it_destroyed_all_groups(started: Started) -> None:
    launcher = started.run("--ranks", "2", started.script(FREED_IN_A_SCRIPT))
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and out == b"returned\n", err.decode()


LAST_REFERENCE = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from echelon.parallel.prepared import Prepared
from echelon.world.init import World

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)

def train():
    group = dist.new_group([0])
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    if sys.argv[1] == "prepared":
        Prepared.of(model, World.current(torch.device("cpu")))
    if sys.argv[1] == "inside":
        Prepared.of(torch.nn.ModuleList([model]), World.current(torch.device("cpu")))
    dist.destroy_process_group(group)
    time.sleep(0.005)  # the group's threads get the interpreter once more
    work = group.allgather([[torch.ones(1)]], [torch.ones(1)])
    while not work.is_completed():
        pass
    del work, group

for _ in range(200):
    print(".", flush=True)
    train()
print("returned")
"""


def returns(model: str, patience_s: float) -> bool:
    """Whether functions return, which free a wrapped model as the last collective ends on another thread.

    One takes ten milliseconds; it hangs if nothing more is heard for `patience_s`.
    """
    program = [sys.executable, "-c", LAST_REFERENCE, model]
    said = b""
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while select.select([process.stdout], [], [], patience_s if said else 120)[0]:
            more = os.read(process.stdout.fileno(), 4096)
            if not more:
                assert b"returned\n" in said, said.decode()
                return True
            said += more
        process.kill()
        return False


@pytest.mark.full
@pytest.mark.parametrize("model", ["prepared", "inside"])
def test_a_function_that_trained_with_ddp_returns_after_it_destroyed_its_groups(model: str) -> None:
    assert returns(model, 60)


def ends(program: str, *args: Path) -> str:
    """What a process writes that runs these lines."""
    before = "import atexit, os, sys, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
    before += "from echelon.launcher.workarounds import *\n"
    command = [sys.executable, "-c", before + program, *map(str, args)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout


def test_a_fork_that_ends_at_once_still_skips_its_exit_functions() -> None:
    """If it does not, `os._exit` in `worker.end` suffices."""
    program = (
        "atexit.register(print, 'atexit', flush=True)\n"
        "if os.fork() == 0:\n    {}\n    os._exit(0)\n"
        "os.wait()\natexit.unregister(print)\n"
    )
    assert ends(program.format("pass")) == ""
    assert ends(program.format("run_exit_functions(join_threads=True)")) == "atexit\n"


def test_a_fork_still_finalizes_what_is_its_parents() -> None:
    """If it does not: take `keep_finalizers` away."""
    program = (
        "import weakref\nclass Thing: pass\nthing, own = Thing(), Thing()\n"
        "weakref.finalize(thing, print, 'parent', flush=True)\n{}\n"
        "if os.fork() == 0:\n"
        "    weakref.finalize(own, print, 'child', flush=True)\n    run_exit_functions(join_threads=True)\n    os._exit(0)\n"
        "os.wait()\ndel thing\n"
    )
    assert ends(program.format("")) == "child\nparent\nparent\n"
    assert ends(program.format("keep_finalizers()")) == "child\nparent\n"


def test_only_python_itself_can_end_idle_executors() -> None:
    """If joining their threads by public names is enough, `run_exit_functions` needs no private one for it."""
    program = (
        "pool = ThreadPoolExecutor(1)\n"
        "thread = pool.submit(__import__('threading').current_thread).result()\n"
        "thread.join(0.3)\nprint(thread.is_alive())\n"
        "run_exit_functions(join_threads=True)\nprint(thread.is_alive())\n"
    )
    assert ends(program) == "True\nFalse\n"


def test_a_failed_rank_does_not_wait_for_its_threads() -> None:
    program = (
        "import threading\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "run_exit_functions(join_threads=False)\nprint('ended', flush=True)\nos._exit(0)\n"
    )
    assert ends(program) == "ended\n"


def test_a_fork_that_ends_at_once_still_loses_what_is_not_flushed(tmp_path: Path) -> None:
    """If it does not: take `write_open_files` away."""
    program = "file = open(sys.argv[1], 'w')\nfile.write('all of it')\n{}\nos._exit(0)\n"
    ends(program.format(""), tmp_path / "lost")
    ends(program.format("write_open_files()"), tmp_path / "kept")
    assert [(tmp_path / name).read_text() for name in ("lost", "kept")] == ["", "all of it"]


def test_a_script_is_imported_as_multiprocessing_does(tmp_path: Path) -> None:
    """`spawn.prepare` alone does not tell the script that it is being imported."""
    script = tmp_path / "script.py"
    script.write_text("from echelon.launcher.workarounds import in_bootstrap\nprint(__name__, in_bootstrap())\n")
    program = "from multiprocessing import spawn\n{}({{'init_main_from_path': sys.argv[1]}})\nprint(in_bootstrap())\n"
    assert ends(program.format("spawn.prepare"), script) == "__mp_main__ False\nFalse\n"
    assert ends(program.format("prepare_main"), script) == "__mp_main__ True\nFalse\n"


@pytest.mark.skipif(importlib.util.find_spec("dragon") is None, reason="dragonhpc is not installed")
def test_what_is_worked_around_in_dragon_is_still_there() -> None:
    spec = importlib.util.find_spec("dragon")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "native/process_group.py").read_text())
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    # It raises a rank's failure in place of closing. If not: take `close_failed` away.
    assert "_close_no_decorator" in methods
    assert [ast.unparse(each) for each in methods["close"].decorator_list] == ["_check_exception"]
    # It looks for failures in a loop. If not: take `look_for_failures_with_pauses` away. What the loop costs: test_group.py.
    [loop] = [node for node in methods["_exq_monitor"].body if isinstance(node, ast.While)]
    assert "if self._exq.poll(timeout=" in ast.unparse(loop)
    # Its address is in a variable. If not: take `serve_dragon_on_loopback` away.
    assert 'os.getenv("_DRAGON_CG_MASTER_ADDR")' in (Path(spec.origin).parent / "ai/collective_group.py").read_text()


@pytest.mark.full
def test_nothing_else_of_the_launcher_reaches_into_other_libraries() -> None:
    """Private names of Python, torch and Dragon are used in workarounds.py alone (`os._exit` is documented)."""
    libraries = {
        *("atexit", "dist", "gc", "logging", "multiprocessing", "process"),
        *("signal", "socket", "spawn", "threading", "torch", "weakref"),
    }
    found = set()
    for path in sorted((SOURCES / "launcher").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root: ast.expr = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in libraries:
                    found.add(path.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "gc.get_objects":
                found.add(path.name)
    assert found == {"workarounds.py"}
