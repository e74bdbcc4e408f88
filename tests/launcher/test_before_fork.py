"""Nothing in a process that forks ranks touches CUDA: a child of one that has cannot use it any more.

Even counting the devices is enough to break every child, so all functions of torch.cuda that reach the driver are noted, in every
process that the launchers start, by a `sitecustomize` on its path.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

NOTES = """
import importlib.abc, importlib.machinery, os, sys, traceback, types

# These start nothing: they ask torch itself, or note what is to be done once CUDA is there.
HARMLESS = {"is_initialized", "_is_compiled", "_lazy_call", "manual_seed", "manual_seed_all", "_register_triton_kernels"}

def noted(name, fn):
    def call(*args, **kwargs):
        if "RANK" not in os.environ:
            where = "".join(traceback.format_stack(limit=6)[:-1])
            with open(os.environ["NOTES"], "a") as file:
                file.write(f"{name} in {sys.argv}\\n{where}\\n")
        return fn(*args, **kwargs)
    return call

class Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner
    def create_module(self, spec):
        return self.inner.create_module(spec)
    def exec_module(self, module):
        self.inner.exec_module(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name not in HARMLESS:
                setattr(module, name, noted(f"{module.__name__}.{name}", value))
        with open(os.environ["NOTES"] + ".seen", "a") as file:
            file.write(module.__name__ + "\\n")

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in ("torch.cuda", "torch.cuda.memory", "torch.cuda.random"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader)
        return spec

sys.meta_path.insert(0, Finder())
"""

SCRIPT = """
import echelon as ech
ech.init_from_env()
"""

COMMAND = "import sys; from echelon.cli.main import main; sys.exit(main())"

PROGRAM = """
import echelon as ech
def work():
    return str(ech.init_from_env())
if __name__ == "__main__":
    print(ech.launch(work, ranks=2, quiet=True))
"""


@pytest.mark.full
def test_no_process_that_forks_ranks_calls_cuda(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTES)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "program.py").write_text(PROGRAM)
    commands = [
        [sys.executable, "-c", COMMAND, "run", "--ranks", "2", "--max-restarts", "1", "script.py"],
        [sys.executable, "program.py"],
    ]
    running = []
    for number, command in enumerate(commands):
        notes = tmp_path / f"notes-{number}"
        env = {**clean_environment(), "PYTHONPATH": str(tmp_path / "site"), "NOTES": str(notes), "ECHELON_DEVICE": "cpu"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path, "env": env}
        running.append((notes, subprocess.Popen(command, **options)))  # type: ignore[call-overload]
    for notes, process in running:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert "torch.cuda\n" in notes.with_name(notes.name + ".seen").read_text()  # else nothing was looked at
        assert not notes.exists(), notes.read_text()
