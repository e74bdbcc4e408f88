"""The one way by which a Trainer's call comes to run: in this process, or in ranks that it starts.

What is trained is sent to the ranks. Back come its state, rank 0's attributes of it, of the Trainer and of what belongs to that,
and what the call returns.
"""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader

from echelon.data.base import BaseLoader
from echelon.launcher.functions.launch import launch
from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
from echelon.world import rng
from echelon.world.init import World

__all__ = ["Work", "in_order", "start", "state_of"]

logger = logging.getLogger(__name__)

_NONE = object()


@dataclass(eq=False)
class Work(ABC):
    """A call of a Trainer: what it runs, and how that is sent to ranks and comes back.

    Args:
        phase: "fit", "validate", "test" or "predict".
        loaders: for training and evaluation; in other calls than "fit", the phase's loader and None.
        ckpt_path: the checkpoint to begin from.
    """

    phase: str
    loaders: tuple[Any, Any]
    ckpt_path: str | None

    @abstractmethod
    def here(self, trainer: Any) -> Any:
        """Run it in this process, alone or as one of several ranks; return what the call returns."""

    @abstractmethod
    def sent(self, trainer: Any, folder: Path) -> AbstractContextManager[Work]:
        """Context in which the ranks run. It gives what they get."""

    @abstractmethod
    def leave(self, trainer: Any, folder: Path) -> tuple[Any, Any]:
        """In each rank, when it is done: save the state for `take_back`. Collective. Returns the unit, and its phase's loader."""

    @abstractmethod
    def take_back(self, trainer: Any, folder: Path) -> None:
        """In the caller: load what `leave` saved."""

    @abstractmethod
    def own(self, trainer: Any) -> list[tuple[object, Mapping[str, Any]]]:
        """What else comes back: objects with their attributes; first what is trained, then the Trainer. In the caller only the
        objects matter.
        """


@dataclass(frozen=True)
class Done:
    """What a rank gives back. Only rank 0's has the result, and attributes, pickled one by one, with their owners' types."""

    data_rank: int
    outputs: list[Any]
    result: Any = None
    attributes: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)


def start(trainer: Any, ranks: int, work: Work) -> Any:
    """Run the call in new ranks on this machine; return what it returns. The folder of its state stays if it can't be loaded."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-fit-"))
    keeps = False
    try:
        seeds = rng.draw()  # from the caller's RNGs, so that the caller's seed decides what ranks draw
        with work.sent(trainer, folder) as sent:
            args, env = (trainer, sent, folder, seeds), trainer.environment_of_ranks()
            done = launch(in_rank, ranks=ranks, args=args, env=env, run_dir=trainer.run_dir)
        try:
            work.take_back(trainer, folder)
        except Exception as error:
            keeps = work.phase == "fit"
            error.add_note(f"What the ranks trained is in {folder}.")
            raise
        first, second, *others = [thing for thing, _ in work.own(trainer)]
        left = list(done[0].attributes)
        for thing in (first, second):  # a sharded module has another class in ranks
            recall(thing, left.pop(0)[1])
        for thing in others:  # perhaps in another order, and with callbacks that ranks made
            if (same := next((i for i, (kind, _) in enumerate(left) if kind == _kind(thing)), None)) is not None:
                recall(thing, left.pop(same)[1])
        return in_order([(each.data_rank, each.outputs) for each in done]) if work.phase == "predict" else done[0].result
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


def in_rank(trainer: Any, work: Work, folder: Path, seeds: list[int]) -> Done:
    """Run the call in a rank that the Trainer started."""
    rng.start(seeds)
    made = work.here(trainer)
    unit, loader = work.leave(trainer, folder)
    world = World.current(torch.device("cpu"))
    data_rank, _ = unit.data_rank_and_size or (world.rank, world.size)
    # Iterables other than loaders give every rank the same.
    counts = work.phase == "predict" and (not world.rank or isinstance(loader, (BaseLoader, DataLoader)))
    outputs = made if counts else []
    if world.rank:
        return Done(data_rank, outputs)
    attributes = [(_kind(thing), remembered(thing, own)) for thing, own in work.own(trainer)]
    return Done(data_rank, outputs, None if work.phase == "predict" else made, attributes)


def in_order(outputs_of_ranks: Sequence[tuple[int, list[Any]]]) -> list[Any]:
    """The outputs of all ranks, batch by batch, from their data ranks and their outputs; of equal data ranks the first counts."""
    outputs = dict(reversed(outputs_of_ranks))
    parts = zip_longest(*(outputs[rank] for rank in sorted(outputs)), fillvalue=_NONE)
    return [output for of_batch in parts for output in of_batch if output is not _NONE]


def state_of(thing: object) -> dict[str, Any]:
    """Attributes of a callback or logger that come back. A saver's folder and lease are the rank's."""
    savers = DistributedCheckpointSaver
    state = {} if isinstance(thing, savers) else thing.__getstate__()
    own = state if isinstance(state, dict) else {}
    return {name: value for name, value in own.items() if name in vars(thing) and not isinstance(value, savers)}


def _kind(thing: object) -> str:
    return type(thing).__qualname__  # without the module: a script is another one in ranks


def remembered(owner: object, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Attributes of `owner`, pickled one by one for another process; a warning names those that cannot be sent."""
    pickled = {}
    for name, value in attributes.items():
        try:
            pickled[name] = _pickled(value)
        except Exception as error:  # any type can raise anything when it is pickled
            _warn_of_stale(owner, name, error)
    return pickled


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:
        if isinstance(value, io.IOBase):  # an open file would arrive as a file in memory
            raise
        file = io.BytesIO()
        torch.save(value, file, pickle_module=cloudpickle)  # functions of a script; they were sent here so, too
    return file.getvalue()


def recall(thing: object, pickled: Mapping[str, bytes]) -> None:
    """Set the attributes that `remembered` pickled in a process that this one started. Tensors are on the CPU."""
    for name, data in pickled.items():
        try:
            vars(thing)[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except Exception as error:  # any type can raise anything when it is loaded
            _warn_of_stale(thing, name, error)


def _warn_of_stale(owner: object, name: str, error: Exception) -> None:
    logger.warning(
        "%s.%s is after the call what it was before, not what the ranks made of it, since it cannot be sent between processes "
        "(%s). Keep what you need of it in attributes that pickle, or call the Trainer on ranks that run already (echelon run)",
        type(owner).__name__,
        name,
        error,
    )
