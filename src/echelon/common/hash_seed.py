"""Sets of strings have one order in all processes of a run: on every node, and after a restart."""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLE", "fix_hash_seed"]

VARIABLE = "PYTHONHASHSEED"


def fix_hash_seed() -> None:
    """Start this program again with one hash seed, unless the user has chosen one. Ranks that are forked from it share it.

    Python draws a seed for each process (docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED). A vocabulary made by
    `enumerate(set(words))` would then differ between nodes, and between a run and the one that resumes it.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
