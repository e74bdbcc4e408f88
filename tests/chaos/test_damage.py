"""What is not what was written is found and named, whatever it is; what cannot be read is not taken for absent."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.checkpoint import commit, manifest
from echelon.common.errors import CheckpointCorruptError
from tests.chaos.damage import NEWER, OLDER
from tests.chaos.forks import Forks
from tests.kit.refusals import refused


@pytest.fixture(scope="module")
def made(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    (folder,) = forks("tests.chaos.damage:make", [(tmp_path_factory.mktemp("damage"),)])
    return str(folder)


@pytest.mark.parametrize("number", [12, pytest.param(104, marks=pytest.mark.full)])
def test_damages_are_found_and_named_and_the_older_one_taken(forks: Forks, made: str, number: int) -> None:
    seeds = [random.randrange(10**6) for _ in range(4)]
    print(f"seeds {seeds}")
    found = Counter[str]()
    for each in forks("tests.chaos.damage:trials", [(made, seed, number // 4) for seed in seeds]):
        found += Counter(each)
    assert found.total() == number, found
    if number > 100:
        assert found["flip"] > 20 and len(found) == 6, found


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_it(made: str, tmp_path: Path) -> None:
    """Swapped as a whole, both are whole."""
    for older, newer in ((OLDER, NEWER), (NEWER, OLDER)):
        shutil.copytree(Path(made, older), tmp_path / newer)
    for name in (OLDER, NEWER):
        with refused(CheckpointCorruptError):
            commit.verify(tmp_path / name)
    assert manifest.committed(tmp_path) == []


def test_a_flipped_bit_that_looks_like_a_newer_format_is_damage(made: str, tmp_path: Path) -> None:
    """Each bit of the manifest's first lines, the format's number among them."""
    shutil.copytree(Path(made, NEWER), tmp_path / NEWER)
    path = tmp_path / NEWER / "manifest.json"
    text = path.read_bytes()
    assert text.startswith(b'{\n "format": 2,\n "step": 4,')
    for bit in range(8 * 28):
        path.write_bytes(bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(text)))
        with refused(CheckpointCorruptError):
            commit.verify(tmp_path / NEWER)


def test_what_cannot_be_read_is_an_error_and_never_a_fresh_start(forks: Forks, made: str) -> None:
    (answers,) = forks("tests.chaos.damage:unreadable", [(made,)])
    assert len(answers) == 5
    for what, restored, trained in answers:
        if what == OLDER:
            assert restored == "returned 4", "an older one that cannot be read does not matter"
        else:
            assert restored.startswith("CheckpointUnreadableError") and what in restored and "Permission denied" in restored
        # A run at step 0 finds something ahead of it: unreadable, or whole.
        assert trained.startswith(("CheckpointUnreadableError", "CheckpointError", "CheckpointWriteError")), (what, trained)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "chaos", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here, which needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_one_save(forks: Forks, small_disk: Path, asynchronous: bool) -> None:
    _one_save_lost(forks, small_disk / "c", "full", asynchronous, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_may_not_be_written_costs_one_save(forks: Forks, tmp_path: Path, asynchronous: bool) -> None:
    _one_save_lost(forks, tmp_path / "c", "permission", asynchronous, "Permission denied")


def _one_save_lost(forks: Forks, folder: Path, how: str, asynchronous: bool, reason: str) -> None:
    (ended,) = forks("tests.chaos.damage:refused", [(folder, how, asynchronous)])
    assert "value" in ended, ended
    value = ended["value"]
    assert value["whole"] == [OLDER], "the older one was valid while the storage refused"
    (line,) = [line for line in value["told"] if "could not be saved, training goes on" in line]
    assert line.startswith("update 4 ") and reason in line and str(folder) in line and "GB free" in line
    assert value["end"] == [OLDER, manifest.named(6)]
