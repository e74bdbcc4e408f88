"""`python -m echelon` is the command `echelon`."""

import sys

from echelon.cli.main import command

if __name__ == "__main__":
    sys.exit(command())
