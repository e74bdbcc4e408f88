"""`echelon completion`: print a script with which a shell completes commands, options, their values, and files.

shtab, an optional package (`pip install 'echelon[completion]'`), makes the script from the parsers. A shell that runs this
command at each start has the options of the installed version.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from echelon.cli.main import VERBS, root_parser
from echelon.cli.parser import Parser
from echelon.common.errors import EchelonError

__all__ = ["add_arguments", "every_parser", "execute"]

_HOW = """\
bash: source <(echelon completion bash)          in ~/.bashrc
zsh:  eval "$(echelon completion zsh)"            in ~/.zshrc, after compinit
fish: echelon completion fish | source           in ~/.config/fish/config.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.epilog, parser.formatter_class = f"where it goes:\n{_HOW}", argparse.RawDescriptionHelpFormatter


def execute(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise EchelonError("`echelon completion` needs shtab. Install it: pip install 'echelon[completion]'") from None

    class Completed(Parser):
        """Marks each argument for completion: a folder by its metavar, every other positional argument as a file."""

        def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
            action = super().add_argument(*names, **options)
            if action.metavar == "FOLDER":
                vars(action)["complete"] = shtab.DIRECTORY
            elif not action.option_strings and action.choices is None:
                vars(action)["complete"] = shtab.FILE
            return action

    print(shtab.complete(every_parser(Completed), arguments.shell))
    return 0


def every_parser(kind: type[Parser]) -> argparse.ArgumentParser:
    """The whole command line as one parser. Its subparsers, of class `kind`, are those of the commands."""
    root = root_parser()
    verbs = root.add_subparsers(parser_class=kind, metavar="COMMAND")
    for verb, text in VERBS.items():
        importlib.import_module(f"echelon.cli.{verb}").add_arguments(verbs.add_parser(verb, help=text))
    return root
