"""torchtnt.utils.stateful: what can be saved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from echelon.compat.torchtnt.absent import absent
from echelon.loop.unit import Stateful

__all__ = ["MultiStateful", "Stateful"]


class MultiStateful:
    """Several Statefuls as one, by name.

    Args:
        stateful_objs: name -> what is saved under it.
        strict: for those whose `load_state_dict` takes it, as a module's does.
    """

    def __init__(self, stateful_objs: Mapping[str, Any], strict: bool = True) -> None:
        self.stateful_objs, self.strict = stateful_objs, strict

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.stateful_objs.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of those whose state is in there; the others stay as they are.

        Raises:
            KeyError: it has a state of none of them.
        """
        for name, state in state_dict.items():
            each = self.stateful_objs[name]
            takes_strict = "strict" in inspect.signature(each.load_state_dict).parameters
            each.load_state_dict(state, **({"strict": self.strict} if takes_strict else {}))


__getattr__ = absent("utils.stateful")
