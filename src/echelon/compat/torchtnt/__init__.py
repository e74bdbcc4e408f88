"""TorchTNT, under its modules' names. See docs/moving/torchtnt.md."""

from echelon.compat.names import complete, register
from echelon.compat.torchtnt import absent, framework, utils
from echelon.compat.torchtnt.absent import ALIASES, MODULES
from echelon.compat.torchtnt.framework import callbacks, loops, savers  # noqa: F401
from echelon.compat.torchtnt.utils import data, env, helpers, loggers, module_summary, oom, timer  # noqa: F401

__all__ = ["framework", "utils"]

register("torchtnt", __name__, {name: remedy for name, (_, remedy) in MODULES.items()}, ALIASES)
complete(__name__, absent.absent)
