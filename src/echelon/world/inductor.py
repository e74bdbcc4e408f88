"""Compiled kernels that are the same in every run: torch's compiler otherwise keeps what its measurements of today find fastest.

The compiler's configuration is `torch._inductor.config`, whose name is private; its environment variable is read when that module
is imported, which is only when something is compiled. So the variable is set, and the module's value where it is loaded already.
Used with torch 2.13; tests/loop/test_bitwise.py notices a change.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["compile_alike"]


def compile_alike() -> None:
    """From here on torch.compile chooses kernels without measuring. Costs speed; what was compiled before stays as it is."""
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and hasattr(config, "deterministic"):
        config.deterministic = True
