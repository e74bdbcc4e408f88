"""Settings that a launch command imposes on a script: layout, precision, how a global batch is split.

`echelon run --bitwise` and `echelon prove` run a script as it stands, in ways that it does not name. They say so here, in
one environment variable; `AutoUnit`, `prepare_module` and `Loader` look here before they use what the script gave them.
A module that the script made parallel by hand is never changed.
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
    """None leaves the script's own choice.

    Args:
        layout: a word or axes; inside a process also a function of the script's own.
        precision: "fp32", "bf16", "fp16" or "float8".
        accumulation: micro-batches per update on each rank, for unit and loader alike.
        compile: False leaves `compile` unused.
        parts: with bit-equal numbers, into how many micro-batches every global batch is split over all ranks.
        planned_ranks: for how many ranks the memory of micro-batches was meant; with fewer, an update has more of them.
        observes: True to let mistakes happen and be seen, as `echelon prove` does, instead of refusing them; and to train from
            the script's beginning, whatever checkpoint is there, as `echelon plan` does, too.
    """

    layout: Any = None
    precision: str | None = None
    accumulation: int | None = None
    compile: bool | None = None
    parts: int | None = None
    planned_ranks: int | None = None
    observes: bool | None = None

    def to_env(self) -> dict[str, str]:
        """As one environment variable, with only the settings that were given."""
        return {VARIABLE: json.dumps({f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None})}

    @classmethod
    def from_env(cls) -> Overrides:
        """
        Raises:
            UsageError: the variable does not hold what `to_env` writes.
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
    """Decide for this process, whatever the environment says; None takes it back."""
    global _imposed
    _imposed = given


def overrides() -> Overrides:
    """What holds in this process. Asked when a unit or a loader is built, not per step."""
    return _imposed if _imposed is not None else Overrides.from_env()
