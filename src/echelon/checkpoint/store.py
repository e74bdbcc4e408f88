"""Write states into a folder and read them back, at any number of ranks.

What is keyed by parameter name goes through torch.distributed.checkpoint, shard by shard, and can be read by another number
of ranks under another strategy. The rest is small, equal on all ranks and written once (`rest.pt`); what belongs to one rank
only, such as its random streams, lies in `rank-N.pt`. The small files are read without unpickling code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from echelon.contracts.errors import CheckpointError, CheckpointNotFoundError
from echelon.world import agree

__all__ = ["NamedState", "Stateful", "read_rank", "read_states", "write_states"]


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@runtime_checkable
class NamedState(Protocol):
    """A Stateful whose state is flat, keyed by parameter name; its tensors may be sharded."""

    keyed_by_name: bool

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def write_states(folder: Path, states: dict[str, Stateful], rank_state: dict[str, Any]) -> None:
    """Write all states into `folder`, which exists and is empty. Collective."""
    tensors: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, stateful in states.items():
        values = stateful.state_dict()
        if isinstance(stateful, NamedState):
            tensors |= {f"{name}.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
            rest[name] = {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
        else:
            rest[name] = values
    rank = dist.get_rank() if agree.is_joined() else 0
    try:
        if rank == 0:
            _save_readable(rest, folder / "rest.pt")
        _save(rank_state, folder / f"rank-{rank}.pt")
        if tensors:
            dcp.save(
                tensors, checkpoint_id=folder / "tensors", no_dist=not agree.is_joined(), process_group=agree.control_group()
            )
    except dcp.api.CheckpointException as error:  # no subclass of Exception: `except Exception` would miss it
        raise CheckpointError(f"rank {rank} could not write {folder}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"rank {rank} could not write {folder}: {error}") from error


def read_states(folder: Path, states: dict[str, Stateful], *, strict: bool = True) -> None:
    """Read what `write_states` wrote into the given states, whatever number of ranks wrote it. Collective.

    Raises:
        CheckpointNotFoundError: there is no checkpoint in `folder`.
        CheckpointError: a state or a parameter is missing, or has another shape. With strict=False the missing are left alone.
    """
    if not (folder / "rest.pt").exists():
        raise CheckpointNotFoundError(f"{folder} holds no checkpoint.")
    rest = _load(folder / "rest.pt")
    missing = [name for name in states if name not in rest]
    if missing and strict:
        raise CheckpointError(f"{folder} holds no state of {', '.join(missing)}; it has {', '.join(rest)}.")
    named = {n: s for n, s in states.items() if isinstance(s, NamedState) and n in rest}
    values = {name: dict(stateful.state_dict()) for name, stateful in named.items()}
    tensors = {f"{n}.{k}": v for n, state in values.items() for k, v in state.items() if isinstance(v, torch.Tensor)}
    for key in _never_used(folder, tensors):
        tensors.pop(key).zero_()  # an optimizer begins with zeros; to look at one, torch has made a step
    if tensors:
        try:
            dcp.load(
                tensors,
                checkpoint_id=folder / "tensors",
                no_dist=not agree.is_joined(),
                process_group=agree.control_group(),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=not strict),
            )
        except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} does not fit this model: {_cause(error)}") from error
    for name, stateful in states.items():
        if name in named:
            state = {k: tensors.get(f"{name}.{k}", v) for k, v in values[name].items()}
            stateful.load_state_dict({**state, **{k: v for k, v in rest[name].items() if k in state}})
        elif name in rest:
            stateful.load_state_dict(rest[name])


def _never_used(folder: Path, tensors: dict[str, Any]) -> list[str]:
    """Optimizer state that was not written because its parameter never had a gradient."""
    if not (folder / "tensors").is_dir():
        return []
    written = dcp.FileSystemReader(folder / "tensors").read_metadata().state_dict_metadata
    return [key for key in tensors if key not in written and ".state." in key]


def read_rank(folder: Path) -> dict[str, Any] | None:
    """What this rank wrote for itself; None if the checkpoint was written by another number of ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if agree.is_joined() else (0, 1)
    written = len(list(folder.glob("rank-*.pt")))
    return _load(folder / f"rank-{rank}.pt") if written == size else None


def _save_readable(rest: dict[str, Any], path: Path) -> None:
    """Save, and read back as a restore would: a state that only pickle can read is found now, not after the crash."""
    _save(rest, path)
    try:
        _load(path)
    except CheckpointError:
        for name, value in rest.items():
            _save({name: value}, path)
            try:
                _load(path)
            except CheckpointError as error:
                kind = "its state_dict must hold tensors, numbers, strings, lists and dicts only"
                raise CheckpointError(f"the state of {name!r} could not be read back: {kind} ({error.__cause__})") from error
        raise


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)


def _load(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return value


def _cause(error: BaseException) -> str:
    """DCP's own text is a page of tracebacks; its first line with a cause is what helps."""
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
