"""Settings that a launch command imposes on a script: layout, precision, how a global batch is split.

`echelon run --bitwise` and `echelon prove` run an unchanged script with other settings. They pass these in one environment
variable; `AutoUnit`, `prepare_module` and `Loader` read it before they use the script's own values. A module that the script made
parallel by hand is never changed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import Any

from echelon.common.errors import LauncherEnvironmentError
from echelon.common.files import parse_object
from echelon.common.terminal import shortly

__all__ = ["VARIABLE", "Overrides", "impose", "overrides"]

VARIABLE = "ECHELON_OVERRIDES"
_TYPES = {
    **dict.fromkeys(("layout", "precision"), (str, type(None))),
    **dict.fromkeys(("accumulation", "parts", "planned_ranks"), (int, type(None))),
    **dict.fromkeys(("compile", "observes"), (bool, type(None))),
}


@dataclass(frozen=True)
class Overrides:
    """Settings to impose. None keeps the script's own choice.

    Args:
        layout: a word or axes; within a process also a function of the script's own.
        precision: "fp32", "bf16", "fp16" or "float8".
        accumulation: micro-batches per update on each rank, for both unit and loader.
        compile: False disables `compile`.
        parts: in bit-equal mode, the number of micro-batches into which every global batch is split, over all ranks.
        planned_ranks: number of ranks for which the micro-batches were planned; with fewer ranks, an update has more of them.
        observes: True to let mistakes happen and be observed, as `echelon prove` does, instead of refusing them; and to train
            from the script's beginning, ignoring checkpoints, as `echelon plan` does, too.
    """

    layout: Any = None
    precision: str | None = None
    accumulation: int | None = None
    compile: bool | None = None
    parts: int | None = None
    planned_ranks: int | None = None
    observes: bool | None = None

    def to_env(self) -> dict[str, str]:
        """One environment variable with the given settings only."""
        return {VARIABLE: json.dumps({f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None})}

    @classmethod
    def from_env(cls) -> Overrides:
        """Read the variable.

        Raises:
            UsageError: it does not hold what `to_env` writes.
        """
        text = os.environ.get(VARIABLE)
        if not text:
            return cls()
        fields = parse_object(text)
        if fields is None or any(type(value) not in _TYPES.get(name, ()) for name, value in fields.items()):
            raise LauncherEnvironmentError(f"{VARIABLE}={shortly(text)} is not what echelon's launcher writes there. Unset it.")
        return cls(**fields)


_imposed: Overrides | None = None


def impose(given: Overrides | None) -> None:
    """Impose settings on this process, in place of the environment's; None undoes it."""
    global _imposed
    _imposed = given


def overrides() -> Overrides:
    """The settings of this process. Read when a unit or a loader is built, not per step."""
    return _imposed if _imposed is not None else Overrides.from_env()
