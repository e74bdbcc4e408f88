"""The generators of a torch DataLoader between two epochs: what the order of the next one is drawn from."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon.data.replayed import Replayed

__all__ = ["is_between_epochs", "load_state_between_epochs", "state_between_epochs"]

_KEY = "generators"


def state_between_epochs(loader: Any) -> dict[str, Any] | None:
    """None of a loader without generators of its own: its order is drawn from the RNG state of the process, or follows from
    the epoch's number. StatefulDataLoader's samplers have one, as torch's have if they were given one.
    """
    states = [base64.b64encode(generator.get_state().numpy().tobytes()).decode() for generator in _generators(loader)]
    return {_KEY: states} if states else None


def load_state_between_epochs(loader: Any, state: dict[str, Any]) -> bool:
    """Put the generators back; False if the state is none of such a loader, or it has not as many: then its order begins anew."""
    generators, states = list(_generators(loader)), state.get(_KEY)
    if not isinstance(states, list) or len(states) != len(generators):
        return False
    for generator, its in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(its)), dtype=torch.uint8))
    return True


def is_between_epochs(state: dict[str, Any]) -> bool:
    """Whether a loader's state is one of its generators."""
    return state.keys() == {_KEY}


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Each once: those of the loader and of its sampler may be one."""
    if isinstance(loader, Replayed):
        loader = loader.loader
    if not isinstance(loader, DataLoader):
        return
    seen: set[int] = set()
    batches = getattr(loader, "batch_sampler", None)
    for part in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in seen:
            seen.add(id(generator))
            yield generator
