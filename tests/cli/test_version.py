"""`echelon --version`, and with `--verbose` what a report of a fault needs: also where torch is missing, broken or hostile."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

import echelon
from echelon.cli.version import launcher_variables

Command = Callable[..., subprocess.CompletedProcess[str]]
Facts = Callable[..., dict[str, str]]


@pytest.fixture
def facts(tmp_path: Path, echelon_command: Command) -> Facts:
    """What the command says, by name; with further programs on the PATH, and modules that are found first."""

    def told(*, programs: dict[str, str] | None = None, modules: dict[str, str] | None = None, **env: str) -> dict[str, str]:
        for folder, files in (("bin", programs or {}), ("modules", modules or {})):
            (tmp_path / folder).mkdir()
            for name, text in files.items():
                (tmp_path / folder / name).write_text(text)
                (tmp_path / folder / name).chmod(0o755)
        env |= {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "modules")}
        done = echelon_command("--version", "--verbose", env=env, fresh=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        first, *lines = done.stdout.splitlines()
        assert first == f"echelon {echelon.__version__}"
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.stdout)
        return {name: value for name, _, value in (re.split(r"( {2,})", line, maxsplit=1) for line in lines)}

    return told


def test_the_version_is_one_line_and_needs_nothing(echelon_command: Command) -> None:
    done = echelon_command("--version", fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"echelon {echelon.__version__}\n", "")


@pytest.mark.parametrize("words", [["--verbos"], ["--verbose", "run"], ["x"]])
def test_what_does_not_belong_to_it_is_refused(echelon_command: Command, words: list[str]) -> None:
    done = echelon_command("--version", *words)
    assert done.returncode == 2 and f"can be followed by --verbose, got {' '.join(words)}" in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["completion", "bash"]])
def test_neither_torch_nor_numpy_is_imported(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "echelon", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and not re.search(r"\| +(torch|numpy)$", done.stderr, re.MULTILINE)


@pytest.mark.full
def test_a_report_has_the_versions_the_machine_and_the_tools(facts: Facts) -> None:
    smi = "#!/bin/sh\nprintf 'NVIDIA H100 \\033[31m80GB, 81559 MiB, 570.86\\nNVIDIA H100, 81559 MiB, 570.86\\n'\n"
    told = facts(
        programs={"nvidia-smi": smi, "sbatch": "#!/bin/sh\necho slurm 22.05.8\n"}, SLURM_JOB_ID="17", NCCL_DEBUG="s3cret"
    )
    assert told["torch"].startswith(f"{torch.__version__} (commit ") and told["numpy"] == numpy.__version__
    assert told["echelon in"].endswith("src/echelon") and told["python"].startswith("CPython 3.")
    assert {"rich", "psutil", "cloudpickle", "cores", "memory", "system"} <= told.keys()
    assert re.fullmatch(r"\d+ usable of \d+", told["cores"]) and re.match(r"\d+\.\d GiB", told["memory"])
    assert told["extra completion"].startswith("shtab ") and "extra dev" not in told
    assert told["GPU 0"] == "NVIDIA H100 ?[31m80GB, 81559 MiB" and told["NVIDIA driver"] == "570.86" and "GPU 1" in told
    assert told["Slurm"] == "slurm 22.05.8"
    names = told["launchers' variables"].split(", ")
    assert {"NCCL_DEBUG", "SLURM_JOB_ID"} <= set(names) and "17" not in names and "s3cret" not in str(told)


@pytest.mark.parametrize(
    ("torch_is", "said"),
    [
        ("raise ImportError('libcudart.so.13: \\x1b[2Jno such file')", "ImportError: libcudart.so.13: ?[2Jno such file"),
        ("import os; os.kill(os.getpid(), 11)", "its import ended by SIGSEGV"),
        ("import os; os._exit(3)", "its import ended with exit code 3"),
        ("import os; print('not what was asked'); os._exit(0)", "it said something else than was asked"),
    ],
)
def test_a_broken_torch_is_a_fact_like_others(facts: Facts, torch_is: str, said: str) -> None:
    told = facts(modules={"torch.py": torch_is})
    assert told["torch"].endswith(f"; cannot be imported: {said}")
    assert "cores" in told and "numpy" in told


def test_a_file_named_torch_beside_which_one_stands_is_not_run(tmp_path: Path, facts: Facts) -> None:
    (tmp_path / "torch.py").write_text("open('it-ran', 'w')")
    assert facts(modules={"torch.py": "raise ImportError('that of the path')"})["torch"].endswith("ImportError: that of the path")
    assert not (tmp_path / "it-ran").exists()


def test_tools_that_fail_are_none(facts: Facts) -> None:
    failing = "#!/bin/sh\necho nonsense; exit 9\n"
    told = facts(programs={"nvidia-smi": failing, "sbatch": failing}, modules={"torch.py": "raise ImportError('not asked here')"})
    assert (told["GPUs"], told["Slurm"]) == ("none", "none")


def test_variables_are_those_of_launchers_by_name() -> None:
    environment = dict.fromkeys(
        ["RANK", "SLURM_JOBID", "PMIX_RANK", "TORCH_HOME", "HOME", "RANKING", "AWS_SECRET", "MY_NCCL_X"], "s"
    )
    assert launcher_variables(environment) == ["PMIX_RANK", "RANK", "SLURM_JOBID", "TORCH_HOME"]
