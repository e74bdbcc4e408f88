"""Completion in real shells: what a person gets who presses TAB."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cli.completion import every_parser
from echelon.cli.main import VERBS
from echelon.cli.parser import Parser

Command = Callable[..., subprocess.CompletedProcess[str]]

# Calls the function that `complete` was given, as bash does it, for a line each, and prints what it offers.
ASK_BASH = """
source completion
function_of=$(complete -p echelon | sed -E 's/.* -F ([^ ]+) .*/\\1/')
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    [[ $line == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    "$function_of" echelon "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[@]}"
done
"""
ASK_FISH = """
source completion
while read --local line
    echo (complete --do-complete "$line" | string split --fields 1 \\t)
end
true
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture
def shell(scripts: Path, tmp_path: Path, echelon_command: Command) -> Callable[..., list[set[str]]]:
    """What a shell offers for each line, in a folder with `train.py`, `text.txt` and `runs/`."""

    def offered(program: str, asks: str, *lines: str) -> list[set[str]]:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install {program}")
        if not (scripts / program).exists():
            done = echelon_command("completion", program)
            assert done.returncode == 0, done.stderr
            (scripts / program).write_text(done.stdout)
        (tmp_path / "completion").write_text((scripts / program).read_text())
        (tmp_path / "train.py").touch()
        (tmp_path / "text.txt").touch()
        (tmp_path / "runs").mkdir()
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "TERM": "dumb"}
        options = ["--norc", "--noprofile"] if program == "bash" else ["--no-config"]
        asked = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(
            [program, *options, "-c", asks], cwd=tmp_path, env=env, input=asked, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return [set(line.split()) for line in done.stdout.splitlines()]

    return offered


def test_bash_completes_commands_options_values_and_files(shell: Callable[..., list[set[str]]]) -> None:
    everything, some, options, values, script, arguments, folders, inner, version = shell(
        "bash",
        ASK_BASH,
        *("echelon ", "echelon r", "echelon run --", "echelon run --bind ", "echelon run --ranks 2 tr"),
        *("echelon run train.py te", "echelon run --runs r", "echelon ckpt ", "echelon --v"),
    )
    assert everything == set(VERBS) and some == {"run", "report"}
    assert {"--ranks", "--max-restarts", "--bind"} <= options and "--nodes" not in options
    assert values == {"cores", "devices", "both", "none"}
    assert script == {"train.py"} and arguments == {"text.txt"} and folders == {"runs"}
    assert inner == {"ls", "verify", "diff", "export", "import"}
    assert version == {"--version", "--verbose"}


def test_fish_completes_commands_options_values_and_files(shell: Callable[..., list[set[str]]]) -> None:
    everything, options, values, script = shell(
        "fish", ASK_FISH, "echelon ", "echelon run --ma", "echelon run --bind ", "echelon run tr"
    )
    assert set(VERBS) <= everything and options == {"--max-restarts"}
    assert values == {"cores", "devices", "both", "none"} and script == {"train.py"}


@pytest.mark.full
def test_zsh_reads_the_script(scripts: Path, tmp_path: Path, echelon_command: Command) -> None:
    """Its completion draws on a terminal: that it knows the command after the script was read is what can be asked."""
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh: apt-get install zsh")
    (tmp_path / "completion").write_text(echelon_command("completion", "zsh").stdout)
    ask = (
        'autoload -Uz compinit && compinit -u -D && eval "$(<completion)" && print -r -- $_comps[echelon] '
        "&& whence -w $_comps[echelon]"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", ask],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    name, kind = done.stdout.splitlines()
    assert kind == f"{name}: function"


def test_every_command_and_every_option_is_in_each_script(echelon_command: Command) -> None:
    """From the parsers: what is written for one verb and forgotten for the shells cannot be."""
    known = {
        word for parser in parsers() for word in re.findall(r"--[a-z][\w-]+", parser.format_help().partition("commands:")[0])
    }
    for name in ("bash", "zsh", "fish"):
        text = echelon_command("completion", name).stdout
        missing = [w for w in known if w not in text and f"-l {w[2:]}" not in text]
        assert len(known) > 50 and missing == [], name
        assert [verb for verb in VERBS if not re.search(rf"\b{verb}\b", text)] == []


def parsers() -> list[Parser]:
    made: list[Parser] = []

    class Kept(Parser):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            made.append(self)

    every_parser(Kept)
    return made


def test_another_shell_is_refused_by_name(echelon_command: Command) -> None:
    done = echelon_command("completion", "tcsh")
    assert done.returncode == 2 and "bash" in done.stderr and done.stdout == ""


def test_without_shtab_the_remedy_is_said(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "shtab.py").write_text("raise ImportError('not here')")
    done = echelon_command("completion", "bash", env={"PYTHONPATH": str(tmp_path)}, fresh=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "echelon: `echelon completion` needs shtab. Install it: pip install 'echelon[completion]'\n"
