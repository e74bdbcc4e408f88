"""The shim that meets calls of the file system, and a server of processes that have it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.forks import Forks


def build(folder: Path) -> Path:
    library = folder / "crashfs.so"
    source = Path(__file__).with_name("crashfs.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=180)
    return library


@pytest.fixture(scope="session")
def crashfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler `cc`: apt-get install gcc libc6-dev")
    return build(tmp_path_factory.mktemp("crashfs"))


@pytest.fixture(scope="session")
def forks(crashfs: Path) -> Iterator[Forks]:
    with Forks(crashfs) as server:
        yield server
