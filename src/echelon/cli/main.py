"""`echelon`: finds the command and hands over to its module."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from echelon.cli.output import READER_GONE, flush_streams, open_streams, reader_has_gone
from echelon.common.hash_seed import fix_hash_seed
from echelon.common.traces import FULL_VARIABLE
from echelon.contracts.run_dir import FULL_DISK

__all__ = ["VERBS", "command", "main", "root_parser"]

# Errors about a user's files: the file's name helps more than a traceback.
_OF_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE)

# Their work counts, whether or not their output could be written.
_ACTS = ("run", "submit", "cancel", "dragon", "move")

# Commands whose process starts ranks.
_STARTS_RANKS = ("run", "prove", "dragon")

# A command is a module of this package with `add_arguments(parser)` and `execute(arguments) -> exit code`.
VERBS = {
    "run": "run a script on ranks of this machine",
    "submit": "run a script on a Slurm cluster, or in the background",
    "jobs": "list submitted jobs, and the results of a sweep",
    "logs": "show the output of a submitted job's rank",
    "cancel": "end a submitted job",
    "dragon": "run a script on Dragon's runtime, and leave nothing behind",
    "prove": "run a script under every layout and compare each step with one process",
    "plan": "show what a layout does with each layer of a script's module, before training",
    "explain": "say why a run stopped: which rank failed, and why",
    "report": "write a run's report.html again, or compare several runs on one page",
    "top": "show a running run live, until you leave",
    "doctor": "check this machine, or the nodes of a Slurm allocation, for faults that would stop a run",
    "ckpt": "list, verify, compare and export checkpoints",
    "move": "change the import lines of another library's script to echelon.compat's",
    "completion": "print a script with which a shell completes these commands and their options",
}


def command() -> int:
    """Run `main` as the whole process."""
    if sys.argv[1:2] and sys.argv[1] in _STARTS_RANKS:
        fix_hash_seed()
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. 2 is a usage error: an unknown command or a bad value."""
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else ""
    try:
        code = _run(verb, arguments)
    except BrokenPipeError:
        if not reader_has_gone():  # another pipe
            raise
        code = READER_GONE
    except SystemExit:  # argparse has shown its help
        flush_streams()
        raise
    unwritten = flush_streams()
    if unwritten is None or code or verb in _ACTS:
        return code
    if isinstance(unwritten, BrokenPipeError):
        return READER_GONE
    print(f"echelon: standard output cannot be written: {unwritten.strerror}", file=sys.stderr)
    return 1


def _run(verb: str, arguments: Sequence[str]) -> int:
    from echelon.cli.parser import Parser
    from echelon.common.errors import EchelonError, UsageError
    from echelon.common.terminal import printable

    if verb == "--version" and arguments[1:] in ([], ["--verbose"]):
        from echelon.contracts.version import __version__

        print(f"echelon {__version__}")
        if arguments[1:]:
            from echelon.cli.version import lines

            print("\n".join(lines()))
        return 0
    if verb not in VERBS:
        parser = root_parser()
        if verb == "--version":
            parser.error(f"--version can be followed by --verbose, got {' '.join(arguments[1:])}")
        if verb in ("-h", "--help", ""):
            parser.print_help(sys.stdout if verb else sys.stderr)
            return 0 if verb else 2
        parser.error(f"unknown command {verb!r}; known: {', '.join(VERBS)}")
    module = importlib.import_module(f"echelon.cli.{verb}")
    parser = Parser(prog=f"echelon {verb}", description=VERBS[verb].capitalize() + ".")
    module.add_arguments(parser)
    try:
        return int(module.execute(parser.parse_args(arguments[1:])))
    except EchelonError as error:
        print(printable(f"echelon: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.errno in _OF_FILES and error.filename and not os.environ.get(FULL_VARIABLE):
            print(printable(f"echelon: {os.fsdecode(error.filename)}: {error.strerror}"), file=sys.stderr)
            return 1
        if error.errno not in FULL_DISK:
            raise
        lost = flush_streams() is not None or verb not in _ACTS  # a write too large for the buffer has nothing left to flush
        what = error.filename or ("standard output" if lost else "a file")
        print(printable(f"echelon: {what} cannot be written: {error.strerror}"), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, RuntimeError) as error:  # before or after the ranks run: meanwhile the launcher handles it
        if KeyboardInterrupt not in (type(error), type(error.__cause__)):  # Python 3.11 wraps one that comes as a class is made
            raise
        print("echelon: stopped by SIGINT", file=sys.stderr)
        return 130


def root_parser() -> argparse.ArgumentParser:
    """The parser of the options before a command, with the help that lists the commands."""
    width = max(map(len, VERBS))
    commands = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="echelon",
        usage="echelon [--version [--verbose]] COMMAND ...",
        description="Train PyTorch models on many processes.",
        epilog=f"commands:\n{commands}\n\n`echelon COMMAND --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("--verbose", action="store_true", help="with --version: also the versions that a bug report needs")
    return parser
