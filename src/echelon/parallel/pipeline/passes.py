"""One forward pass of one stage: the tensors it receives, the outputs of its units, and the writes in place into both.

A later stage runs the author's code between the units again, so it repeats the in-place writes of that code into a unit's output.
The output is therefore sent as the unit returned it. Writes of a unit into its arguments count as outputs of the unit: a later
stage skips the unit, and copies the written values into its own arguments. The versions of tensors show writes.
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

__all__ = ["Left", "Run", "write_again", "writes_anew"]

# Keys for what a unit sends besides its value: the tensors that it has written into, and its additions to lists and dicts.
_WRITTEN, _PUT = "written into its arguments", "put into its arguments"


class Left(BaseException):
    """Ends a stage's part of the forward pass. A BaseException, so that an author's `except Exception` does not catch it."""


@dataclass
class _Held:
    """An output of a unit: the value that the author's code got, its tensors with their versions, and a copy from before."""

    value: Any
    tensors: list[torch.Tensor]
    versions: list[int | None]
    before: Any


@dataclass
class Run:
    """One forward pass of one stage.

    Args:
        received: by call ("blocks.3:1" is the first call of blocks.3), the outputs of earlier stages.
        forms: by call of a unit of an earlier stage, the form of its outputs.
        watched: the calls whose outputs leave the stage; None for all.
        written: the calls whose outputs are known to be written into.
        knows_all: the pass must be like the trial passes, and fails if it differs. False for trial passes, which learn what
            the stage needs.
        fail: called with an error of the pass, which then goes on with zeros; None raises the error.
    Attributes:
        gave: by call, the outputs of this stage's units.
        wrote: the calls whose outputs this pass has written into.
        has_left: whether a unit of a later stage was called.
        needed: the missing sources that ended the pass.
        learns: whether gradients are enabled.
        is_whole: whether the module itself was called.
        within: more than 0 while a unit is computed.
    """

    stage: int
    received: Mapping[str, Any] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    watched: Collection[str] | None = None
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
    wrote: set[str] = field(default_factory=set)
    _held: dict[str, _Held] = field(default_factory=dict)

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
        self.gave[call] = given
        self._hold(call, given, None)
        return value

    def _tensors(self, args: Any, kwargs: Any) -> list[tuple[int, torch.Tensor]]:
        """The tensors among a unit's arguments, by their number. Nestings are searched only if there are any."""
        if self.knows_all and not any(isinstance(each, (list, tuple, dict)) for each in (*args, *kwargs.values())):
            flat: Any = (*args, *kwargs.values())
        else:
            flat = pytree.tree_leaves((args, kwargs))
        return [(at, t) for at, t in enumerate(flat) if isinstance(t, torch.Tensor)]

    def hand_out(self, call: str) -> Any:
        """The received outputs of a call. A copy if they will be written into: autograd forbids writes into a leaf."""
        value = handed = self.received[call]
        if not self.knows_all or call in self.written:
            handed = pytree.tree_map_only(torch.Tensor, torch.clone, value)
        self._hold(call, handed, value)
        return handed

    def leaves(self) -> None:
        """Note that the part of this stage has ended."""
        self._look()
        self.leaving()

    def ends(self, value: Any) -> Any:
        """Return the value of the last stage, after a request for the values of absent tensors in it."""
        self._look()
        if absent := absent_in(value):
            self._needs_all(absent)
            return in_place_of_absent(value)
        return value

    def to_send(self, call: str) -> Any:
        """The outputs of a call as they leave the stage; None if there was no such call."""
        held = self._held.get(call)
        if held is None:
            value = self.gave[call] if call in self.gave else self.received.get(call)
        else:
            value = held.before if held.before is not None else held.value
        if absent := absent_in(value):
            self._needs_all(absent)
            return in_place_of_absent(value)
        return value

    def aliases(self) -> list[list[str]]:
        """Calls whose outputs share memory."""
        sharing: dict[int, list[str]] = defaultdict(list)
        for call, held in self._held.items():
            for storage in {id(t.untyped_storage()) for t in held.tensors if t.numel()}:  # torch keeps one object per storage
                sharing[storage].append(call)
        return [calls for calls in sharing.values() if len(calls) > 1]

    def unseen_writes(self) -> list[str]:
        """Calls whose outputs were written into without a new version, as by `.data` and numpy."""
        return [
            call for call, held in self._held.items() if call not in self.wrote and held.before is not None and _differs(held)
        ]

    def _needs_all(self, absent: list[Absent]) -> None:
        absent[0].place.needs(Sources().add([each.sources for each in absent]))

    def _hold(self, call: str, value: Any, before: Any) -> None:
        if self.watched is not None and call not in self.watched:
            return
        flat = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Absent)]
        if before is None and (not self.knows_all or call in self.written):
            before = pytree.tree_map_only(torch.Tensor, torch.clone, value) if not absent_in(value) else value
        self._held[call] = _Held(value, tensors, [_version(t) for t in tensors], before)

    def _look(self) -> None:
        """Find the outputs that were written into."""
        for call, held in self._held.items():
            if None in held.versions:  # inference tensors have none
                is_written = _differs(held)
            else:
                is_written = [_version(t) for t in held.tensors] != held.versions
            if is_written:
                self.wrote.add(call)
                if self.knows_all and call not in self.written:
                    self.fails(writes_anew(self.kind, call.rpartition(":")[0]))


def writes_anew(kind: str, name: str) -> EchelonError:
    return EchelonError(
        f"{kind} writes in place into an output of {name}, but did not in the first passes with a batch like this. In a "
        "pipeline it must do so in every pass or in none: x = x + y makes a new tensor."
    )


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


def _version(t: torch.Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _differs(held: _Held) -> bool:
    if held.before is None:
        return False
    before = [t for t in pytree.tree_leaves(held.before) if isinstance(t, torch.Tensor) and not isinstance(t, Absent)]
    return any(
        a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(before, held.tensors, strict=True)
    )
