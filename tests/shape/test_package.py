"""The package that users install: what is in it, that it builds to the same bytes, and that it works without the repository."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import echelon

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/packages.md"]


def test_the_licence_is_the_apache_licences_own_text() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


# ---- what the files beside the code say


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert importlib.metadata.version("echelon") == echelon.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", echelon.__version__)


def test_the_change_log_begins_with_this_version_or_with_what_is_not_released() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert echelon.__version__ in headings[:2] and headings[0] in ("Unreleased", echelon.__version__)


def test_the_citation_is_whole() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited.keys() >= {"cff-version", "message", "title", "authors"}  # what its format demands
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["version"] == echelon.__version__ and cited["license"] == PROJECT["license"]
    assert all(author.keys() <= {"name", "family-names", "given-names"} and author for author in cited["authors"])


def test_the_classifiers_begin_with_the_oldest_python() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert PROJECT["requires-python"] == f">={named[0]}" and named == sorted(named, key=lambda v: int(v.partition(".")[2]))
    assert not any("License ::" in c for c in PROJECT["classifiers"]), "refused beside a licence expression"


def test_every_extra_is_explained() -> None:
    explained = set(re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs/packages.md").read_text(), re.MULTILINE))
    assert explained == set(PROJECT["optional-dependencies"])


def test_no_address_is_made_up() -> None:
    assert not [url for url in PROJECT.get("urls", {}).values() if re.search(r"example\.(com|org)|your|TODO", url)]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / page).read_text())
    assert links and not [link for link in links if not ((ROOT / page).parent / link).exists()]


# ---- what is built


def dist(out: Path, **options: Any) -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("builds a commit: run it in a clone made with git")
    subprocess.run([sys.executable, str(ROOT / ".ci" / "dist.py"), "--out", str(out)], check=True, timeout=120, **options)
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = dist(tmp_path_factory.mktemp("dist"))
    return wheel, sdist


@pytest.mark.full
def test_two_builds_have_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The second in another folder, time zone and language, with another umask and other hashes of strings."""
    env = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C", "SOURCE_DATE_EPOCH": "1"}
    again = dist(tmp_path / "dist", cwd=tmp_path, env=env, umask=0o077)
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


@pytest.mark.full
def test_the_sdist_has_all_that_git_has(built: tuple[Path, Path]) -> None:
    """So that what can be done in a clone can be done there: build, test, read."""
    with tarfile.open(built[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        owners = {(m.uid, m.gid, m.uname, m.gname, m.mode & 0o777) for m in archive.getmembers()}
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert names >= set(listed.stdout.splitlines())
    extra = {name for name in names - set(listed.stdout.splitlines()) if not name.startswith("src/echelon.egg-info/")}
    assert extra == {"PKG-INFO", "setup.cfg"}
    assert {owner[:4] for owner in owners} == {(0, 0, "", "")} and {owner[4] for owner in owners} == {0o644, 0o755}


@pytest.mark.full
def test_the_wheel_has_the_library_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"echelon-{echelon.__version__}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"echelon", f"echelon-{echelon.__version__}.dist-info"}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/echelon").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("echelon/")} == {name for name in sources if not name.endswith(".pyc")}
    licences = f"echelon-{echelon.__version__}.dist-info/licenses"
    assert {f"{licences}/LICENSE", f"{licences}/src/echelon/observe/report/uplot/LICENSE"} <= set(names)
    assert "License-Expression: Apache-2.0\n" in metadata and metadata.count("Requires-Dist: torch>=2.11\n") == 1


# ---- where it is installed


class Environment:
    """A virtual environment that has the wheel and what the wheel says that it needs; nothing else can be imported there."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=180)
        (self.packages,) = folder.glob("lib/python*/site-packages")
        # Links to what is installed beside this test: the gigabyte of torch need not be unpacked again.
        for name in needed_by([Requirement(text) for text in PROJECT["dependencies"]]):
            for top in tops_of(name):
                (self.packages / top.name).symlink_to(top)
        install = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-index", "--quiet"]
        subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True, timeout=120)

    def run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        return subprocess.run(list(words), cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def needed_by(wanted: list[Requirement]) -> list[str]:
    """The packages that are needed, and what these need, by their own metadata."""
    found: list[str] = []
    for requirement in wanted:  # grows meanwhile
        if requirement.name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            inner = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            raise AssertionError(f"{requirement.name} is not installed beside this test") from None
        found.append(requirement.name)
        wanted += [Requirement(text) for text in inner]
    return found


def tops_of(name: str) -> Iterator[Path]:
    """The files and folders of site-packages that a package put there."""
    files = importlib.metadata.files(name)
    assert files is not None
    firsts = {file.parts[0]: file for file in files if file.parts[0] not in ("..", "__pycache__")}
    for first, file in sorted(firsts.items()):
        yield Path(str(file.locate())).parents[len(file.parts) - 1] / first


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), built[0])


@pytest.mark.full
def test_every_public_name_is_there_without_the_repository(environment: Environment, tmp_path: Path) -> None:
    """Also without what only tests or extras bring: a package that the metadata forgot would be missing here."""
    ask = (
        "import echelon, json; print(json.dumps([[n for n in echelon.__all__ if getattr(echelon, n) is None], echelon.__file__]))"
    )
    done = environment.run(tmp_path, "python", "-c", ask)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], str(environment.packages / "echelon/__init__.py")]


@pytest.mark.full
def test_the_readmes_script_trains_on_two_ranks_in_an_empty_folder(environment: Environment, tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    report = """
import sys
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("echelon", "tests")]
files = sorted(str(getattr(module, "__file__", None) or "") for module in ours)
open(f"rank{ech.launching.World.current().rank}", "w").write(f"{unit.window.updates}\\n" + "\\n".join(filter(None, files)))
"""
    (tmp_path / "train.py").write_text(script + report)
    done = environment.run(tmp_path, "echelon", "run", "--ranks", "2", "train.py")
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(2)]
    assert [updates for updates, *_ in told] == ["128", "128"]
    foreign = [file for _, *files in told for file in files if not file.startswith(str(environment.packages))]
    assert foreign == [], "imported from somewhere else than the wheel"
    assert list((tmp_path / "runs").glob("*/report.html"))


@pytest.mark.full
def test_the_command_says_its_version_and_what_is_missing(environment: Environment, tmp_path: Path) -> None:
    assert environment.run(tmp_path, "echelon", "--version").stdout == f"echelon {echelon.__version__}\n"
    told = environment.run(tmp_path, "echelon", "--version", "--verbose").stdout
    assert re.search(rf"^echelon in +{re.escape(str(environment.packages / 'echelon'))}$", told, re.MULTILINE)
    assert re.search(r"^extras not installed +.*completion.*tensorboard", told, re.MULTILINE)
    asked = environment.run(tmp_path, "echelon", "completion", "bash")
    assert (asked.returncode, asked.stdout) == (1, "") and "pip install 'echelon[completion]'" in asked.stderr
