"""The files by which others build and check echelon. None of them can run on a developer's machine: they are read strictly."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI = (ROOT / ".ci/run").read_text()


def workflow(name: str) -> dict[Any, Any]:
    read = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    assert isinstance(read, dict)
    return read


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", [])]


# ---- GitHub Actions


def test_the_workflow_runs_what_decides() -> None:
    """Not a copy of its steps: `.ci/run` itself, as root on Debian, as it says that it needs."""
    job = workflow("ci")["jobs"]["everything"]
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert job["container"] == {"image": "python:3.11-bookworm", "options": "--privileged"}
    assert "continue-on-error" not in str(workflow("ci"))


def test_ci_runs_every_check_there_is() -> None:
    wanted = {"make check", "make train", "make test-all"}
    assert wanted <= {line.removeprefix("newcomer ") for line in CI.splitlines()}


def test_the_oldest_and_the_newest_are_those_of_the_package() -> None:
    matrix = workflow("ci")["jobs"]["versions"]["strategy"]["matrix"]["include"]
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert matrix == [{"versions": "oldest", "python": classifiers[0]}, {"versions": "newest", "python": classifiers[-1]}]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_more_rights_than_it_needs(path: Path) -> None:
    read = workflow(path.stem)
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        more = {"id-token": "write", "attestations": "write"} if name == "publish" else {"contents": "read"}
        assert job.get("permissions", {"contents": "read"}) == more, name
        assert "uses" in job or job["timeout-minutes"] <= 120, name
    for step in steps(path.stem):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_an_exact_version(path: Path) -> None:
    for step in steps(path.stem):
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]), step["uses"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_command_has_what_others_may_write_in_it(path: Path) -> None:
    """A branch's name in `${{ ... }}` would become a part of the command."""
    assert not [step["run"] for step in steps(path.stem) if "${{" in step.get("run", "")]


def test_only_a_tag_that_was_tested_is_published_and_without_a_token() -> None:
    read = workflow("release")
    assert read[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the word `on` as true
    publish = read["jobs"]["publish"]
    assert set(publish["needs"]) == {"test", "build"} and publish["environment"] == "release"
    assert read["jobs"]["test"]["uses"] == "./.github/workflows/ci.yml" and "workflow_call" in workflow("ci")[True]
    assert "secrets" not in str(read) and "password" not in str(read)
    commands = "\n".join(step.get("run", "") for step in read["jobs"]["build"]["steps"])
    assert ".ci/releasable.py" in commands and commands.count(".ci/dist.py") == 2 and "twine check --strict" in commands


@pytest.mark.parametrize("name", ["dist.py", "releasable.py", "versions", "oldest.txt"])
def test_what_workflows_and_the_makefile_call_is_there(name: str) -> None:
    assert (ROOT / ".ci" / name).exists()


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    asked = [sys.executable, str(ROOT / ".ci/releasable.py"), "v99.0.0"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "the tag must be v" in done.stdout and "got v99.0.0" in done.stdout


def test_the_versions_script_refuses_what_it_does_not_know() -> None:
    done = subprocess.run([str(ROOT / ".ci/versions"), "middle"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 2 and "oldest|newest" in done.stderr


def test_the_oldest_versions_are_the_bounds_of_the_package() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / ".ci/oldest.txt").read_text(), re.MULTILINE))
    bounds = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert bounds and pins.keys() == bounds.keys()
    assert not [name for name, bound in bounds.items() if not f"{pins[name]}.".startswith(f"{bound}.")]


INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "FROM", "RUN", "USER", "WORKDIR"}


# ---- the image


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in lines]


def test_the_image_is_made_of_known_instructions_and_an_exact_base() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM" and words.count("FROM") == 1 and set(words) <= INSTRUCTIONS
    assert re.fullmatch(r"python:3\.1[1-4]-slim-\w+", dict(instructions())["FROM"])  # not "latest"


def test_the_images_program_is_echelon_and_its_user_is_not_root() -> None:
    found = instructions()
    users = [(at, rest) for at, (word, rest) in enumerate(found) if word == "USER"]
    assert users and users[-1][1] not in ("root", "0")
    assert not [rest for word, rest in found[users[-1][0] :] if word in ("RUN", "COPY")], "done as another user"
    assert f"useradd --create-home --uid {users[-1][1]} " in str(found)
    assert dict(found)["ENTRYPOINT"] == '["echelon"]'


def test_all_that_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = [source for word, rest in instructions() if word == "COPY" for source in shlex.split(rest)[:-1]]
    assert copied and ignored[0] == "*" and {f"!{source}" for source in copied} <= set(ignored)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    # All that the build of a wheel reads is among them.
    read = ["pyproject.toml", "README.md", "LICENSE", "src/echelon/__init__.py"]
    assert [name for name in read if not any(fnmatch.fnmatch(name, f"{c}*") for c in copied)] == []


def test_the_images_torch_is_the_one_that_is_tested() -> None:
    pinned = re.search(r"^(torch==\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and f'TORCH="{pinned[1]}"' in dict(instructions())["ARG"]
