"""The generators of a torch DataLoader between two epochs. The next epoch's order is drawn from them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["generators_of", "is_between_epochs", "load_state_between_epochs", "state_between_epochs"]

_KEY = "generators"


def state_between_epochs(loader: Any) -> dict[str, Any] | None:
    """States of a loader's own generators; None if it has none: its order then follows from the process's RNG state or from the
    epoch's number. StatefulDataLoader's samplers have a generator; torch's have one if they were given one.
    """
    states = [base64.b64encode(generator.get_state().numpy().tobytes()).decode() for generator in generators_of(loader)]
    return {_KEY: states} if states else None


def load_state_between_epochs(loader: Any, state: dict[str, Any]) -> bool:
    """Restore the generators. False if the state is of another kind or number of generators; the order then starts anew."""
    generators, states = list(generators_of(loader)), state.get(_KEY)
    if not isinstance(states, list) or len(states) != len(generators):
        return False
    for generator, its in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(its)), dtype=torch.uint8))
    return True


def is_between_epochs(state: dict[str, Any]) -> bool:
    """Whether a loader's state holds only its generators."""
    return state.keys() == {_KEY}


def generators_of(loader: Any) -> Iterator[torch.Generator]:
    """Each generator once: the loader and its sampler may share one."""
    if not isinstance(loader, DataLoader):
        return
    seen: set[int] = set()
    batches = getattr(loader, "batch_sampler", None)
    for part in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in seen:
            seen.add(id(generator))
            yield generator
