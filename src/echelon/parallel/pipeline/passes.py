"""One forward pass of one stage: the tensors it receives, the outputs of its units, and the writes in place into both.

A later stage runs the author's code between the units again, so it repeats the in-place writes of that code into a unit's output.
So a copy of the output is sent, made as the unit returns it. Writes of a unit into its arguments count as outputs of the unit: a
later stage skips the unit, and copies the written values into its own arguments. The versions of tensors show writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from echelon.common.errors import EchelonError, PipelineError
from echelon.parallel.pipeline.values import Absent, Form, Needed, Sources, absent_in, in_place_of_absent

__all__ = ["Left", "Run", "write_again"]

# Keys for what a unit sends besides its value: the tensors that it has written into, and its additions to lists and dicts.
_WRITTEN, _PUT = "written into its arguments", "put into its arguments"


class Left(BaseException):
    """Ends a stage's part of the forward pass. A BaseException, so that an author's `except Exception` does not catch it."""


@dataclass
class Run:
    """One forward pass of one stage.

    Args:
        received: by call ("blocks.3:1" is the first call of blocks.3), the outputs of earlier stages.
        forms: by call of a unit of an earlier stage, the form of its outputs.
        sends: the calls whose outputs leave the stage; None for all.
        written: the calls of earlier stages whose outputs are known to be written into.
        knows_all: the pass must be like the trial passes, and fails if it differs. False for trial passes, which learn what
            the stage needs.
        fail: called with an error of the pass, which then goes on with zeros; None raises the error.
    Attributes:
        gave: by call, the outputs of this stage's units; copies of those that leave it.
        has_left: whether a unit of a later stage was called.
        needed: the missing sources that ended the pass.
        learns: whether gradients are enabled.
        is_whole: whether the module itself was called.
        leaving: called when the part of this stage has ended.
        within: more than 0 while a unit is computed.
    """

    stage: int
    received: Mapping[str, Any] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    sends: Collection[str] | None = None
    written: Collection[str] = ()
    knows_all: bool = False
    fail: Callable[[EchelonError], None] | None = None
    gave: dict[str, Any] = field(default_factory=dict)
    has_left: bool = False
    needed: Sources | None = None
    learns: bool = field(default_factory=torch.is_grad_enabled)
    is_whole: bool = False
    leaving: Callable[[], None] = lambda: None
    outgoing: Callable[[Run], Any] = lambda run: None
    sent: Any = None
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latest: str = "it began"
    within: int = 0
    kind: str = ""
    # In a trial pass by call, the tensors that the author's code got, each with its version.
    _seen: dict[str, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)

    def call_of(self, name: str) -> str:
        self.calls[name] = number = self.calls[name] + 1
        return f"{name}:{number}"

    # --- missing inputs

    def needs(self, sources: Sources) -> None:
        """Handle a request for values that this pass did not receive.

        Raises:
            Needed: in a trial pass, which can begin again.
        """
        if not self.knows_all:
            raise Needed(sources)
        names = sorted({call.rpartition(":")[0] for call in sources.calls})
        self.fails(
            EchelonError(
                f"stage {self.stage} of {self.kind} uses outputs of {', '.join(names[:4])}, but did not in the first passes "
                "with a batch like this, so they were not sent. A pipeline sends the same tensors in every pass: let forward and "
                "compute_loss take the same path in each, whatever they draw, count or read from values; or make the path depend "
                "on a bool attribute of the module, which a pipeline watches; or train without pp."
            )
        )

    def fails(self, error: EchelonError) -> None:
        if self.fail is None:
            raise error
        self.fail(error)

    # --- the passage of tensors

    def enters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Request the values of absent arguments before a unit of this stage is called, and return the arguments."""
        if not self.knows_all or any(isinstance(each, Absent) for each in (*args, *kwargs.values())):
            absent = absent_in((args, kwargs))
            if absent:
                self._needs_all(absent)
                args, kwargs = in_place_of_absent((args, kwargs))
        return args, kwargs

    def computes(self, call: str, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit of this stage, and record its outputs and its writes into its arguments."""
        versions = {at: _version(t) for at, t in self._tensors(args, kwargs)}
        containers = _containers(args, kwargs)
        self.within += 1
        try:
            value = unit(*args, **kwargs)
        finally:
            self.within -= 1
        written = {at: t for at, t in self._tensors(args, kwargs) if at in versions and _version(t) != versions[at]}
        given, put = value, _put_into(containers)
        if written or put:
            # Copies: a unit may return an argument it has written into, as ReLU(inplace=True) does, and later code write into it.
            again = {str(at): torch.clone(t) for at, t in written.items()}
            given = {"value": value, _WRITTEN: again, _PUT: put}
        self.gave[call] = _copied(given) if self.sends is None or call in self.sends else given
        self._see(call, given)
        return value

    def _tensors(self, args: Any, kwargs: Any) -> list[tuple[int, torch.Tensor]]:
        """The tensors among a unit's arguments, by their number. Nestings are searched only if there are any."""
        if self.knows_all and not any(isinstance(each, (list, tuple, dict)) for each in (*args, *kwargs.values())):
            flat: Any = (*args, *kwargs.values())
        else:
            flat = pytree.tree_leaves((args, kwargs))
        return [(at, t) for at, t in enumerate(flat) if isinstance(t, torch.Tensor)]

    def hand_out(self, call: str) -> Any:
        """The received outputs of a call. A copy if they are sent on or written into: autograd forbids writes into a leaf."""
        value = self.received[call]
        if not self.knows_all or call in self.written or (self.sends is not None and call in self.sends):
            value = _copied(value)
        self._see(call, value)
        return value

    def ends(self, value: Any) -> Any:
        """Return the value of the last stage, after a request for the values of absent tensors in it."""
        if absent := absent_in(value):
            self._needs_all(absent)
            return in_place_of_absent(value)
        return value

    def to_send(self, call: str) -> Any:
        """The outputs of a call as they leave the stage; None if there was no such call."""
        return self.ends(self.gave[call] if call in self.gave else _copied(self.received.get(call)))

    def wrote(self) -> set[str]:
        """The calls whose outputs this trial pass has written into."""
        return {call for call, tensors in self._seen.items() if any(_version(t) != version for t, version in tensors)}

    def aliases(self) -> list[list[str]]:
        """Calls whose outputs share memory."""
        sharing: dict[int, list[str]] = defaultdict(list)
        for call, tensors in self._seen.items():
            for storage in {id(t.untyped_storage()) for t, _ in tensors if t.numel()}:  # torch keeps one object per storage
                sharing[storage].append(call)
        return [calls for calls in sharing.values() if len(calls) > 1]

    def _needs_all(self, absent: list[Absent]) -> None:
        absent[0].place.needs(Sources().add([each.sources for each in absent]))

    def _see(self, call: str, value: Any) -> None:
        if not self.knows_all:
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and not isinstance(t, Absent)]
            self._seen[call] = [(t, _version(t)) for t in tensors]


def write_again(value: Any, args: Any, kwargs: Any) -> Any:
    """Repeat the writes of a skipped unit into its arguments, and return its value."""
    if not isinstance(value, dict) or _WRITTEN not in value:
        return value
    flat = pytree.tree_leaves((args, kwargs))
    for at, tensor in value[_WRITTEN].items():
        flat[int(at)].copy_(tensor)
    containers = [each for each, _ in _containers(args, kwargs)]
    for at, entries in value[_PUT].items():
        target: Any = containers[int(at)]
        if isinstance(target, dict):
            target.update(entries)
        else:
            target.extend(entries)
    return value["value"]


def _containers(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The lists and dicts among a unit's arguments, each with a copy."""
    return [(each, type(each)(each)) for each in (*args, *kwargs.values()) if type(each) in (list, dict)]


def _put_into(containers: list[tuple[Any, Any]]) -> dict[str, Any]:
    """By number of the container, the entries that a unit has added.

    Raises:
        UsageError: the unit has removed an entry.
    """
    additions: dict[str, Any] = {}
    for at, (now, before) in enumerate(containers):
        if isinstance(now, dict):
            new: Any = {key: value for key, value in now.items() if key not in before or before[key] is not value}
            is_kept = before.keys() <= now.keys()
        else:
            new = now[len(before) :]
            is_kept = len(now) >= len(before) and all(a is b for a, b in zip(now, before, strict=False))
        if not is_kept:
            raise PipelineError(
                "a module that lies in one stage of a pipeline must keep the entries of a list or dict among its arguments; it "
                "may only add entries. Later stages skip the module and cannot repeat other changes. Return the changed values."
            )
        if new:
            additions[str(at)] = new
    return additions


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, torch.clone, value)
