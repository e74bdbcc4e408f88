"""`python -m echelon` is the command `echelon`."""

import sys

from echelon.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
