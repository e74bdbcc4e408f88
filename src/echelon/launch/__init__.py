"""Start processes and learn how they ended. Imports without torch; the elastic agent and the ranks load it.

The package can be called: `echelon.launch(fn, ranks=2)` is `echelon.launch.function.launch`. A package's name and a function's
cannot both be attributes of `echelon`, and importing anything from this package sets the package's.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from echelon.launch.function import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
