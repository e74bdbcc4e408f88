"""Make compiled kernels the same in every run. By default torch's compiler chooses the kernels that it measures as fastest.

The compiler's configuration is `torch._inductor.config`, a private name. Its environment variable is read when the module is
imported, at the first compilation. So this module sets the variable, and also the module's value if it is already loaded.
Used with torch 2.13; tests/loop/test_bitwise.py notices a change.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["compile_alike"]


def compile_alike() -> None:
    """Make torch.compile choose kernels without measuring from now on. This costs speed; compiled code stays as it is."""
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and hasattr(config, "deterministic"):
        config.deterministic = True
