"""One order of string sets in all processes of a run: on every node, and after a restart."""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLE", "fix_hash_seed"]

VARIABLE = "PYTHONHASHSEED"


def fix_hash_seed() -> None:
    """Start this program again with a fixed hash seed, unless the user has set one. Ranks forked from it share the seed.

    Python draws a seed for each process (docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED). A vocabulary built with
    `enumerate(set(words))` would then differ between nodes, and between a run and its resumption.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
