"""`fairscale.nn.wrap`: which submodules are wrapped one by one."""

from __future__ import annotations

from echelon.compat.fairscale.nn.wrap.auto_wrap import (
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)

__all__ = ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"]
