"""Completion in a real shell: what a person gets who presses TAB."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

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


def test_bash_completes_commands_options_values_and_files(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "completion").write_text(echelon_command("completion", "bash").stdout)
    for file in ("train.py", "text.txt"):
        (tmp_path / file).touch()
    (tmp_path / "runs").mkdir()
    lines = (
        *("echelon ", "echelon r", "echelon run --", "echelon run --bind ", "echelon run --ranks 2 tr"),
        *("echelon run train.py te", "echelon run --runs r", "echelon ckpt ", "echelon --v"),
    )
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", ASK_BASH],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "TERM": "dumb"},
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    everything, some, options, values, script, arguments, folders, inner, version = (
        set(line.split()) for line in done.stdout.splitlines()
    )
    assert everything == set(VERBS) and some == {"run", "report"}
    assert {"--ranks", "--max-restarts", "--bind"} <= options and "--nodes" not in options
    assert values == {"cores", "devices", "both", "none"}
    assert script == {"train.py"} and arguments == {"text.txt"} and folders == {"runs"}
    assert inner == {"ls", "verify", "diff", "export", "import"}
    assert version == {"--version", "--verbose"}


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


def test_without_shtab_the_remedy_is_said(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "shtab.py").write_text("raise ImportError('not here')")
    done = echelon_command("completion", "bash", env={"PYTHONPATH": str(tmp_path)}, fresh=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "echelon: `echelon completion` needs shtab. Install it: pip install 'echelon[completion]'\n"
