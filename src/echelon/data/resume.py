"""Check that a loader may resume from a saved position, with a table of changes since the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.common.arguments import is_list
from echelon.common.errors import LoaderError
from echelon.common.terminal import columns

__all__ = ["Change", "cannot_divide", "changes", "check_accepted", "check_same", "facts"]

# A loader's position is not compared.
_POSITION = {"epoch", "position"}

# Facts that decide the samples of the coming global batches, and what resuming in spite of a change means.
_MATTERS = {
    "samples": "another order: in this epoch some samples come twice or not at all",
    "seed": "another order: in this epoch some samples come twice or not at all",
    "shuffle": "another order: in this epoch some samples come twice or not at all",
    "order": "another order: in this epoch some samples come twice or not at all",
    "global_batch": "other global batches: up to one of them is seen twice",
    "fingerprint": "other data, or the same in another order",
}
_HARMLESS = {
    "accumulation": "harmless: the same global batches, split differently",
    "tail": "harmless: the last, short global batch of an epoch",
}


def called(name: str) -> str:
    """The argument's name for a name in a state."""
    return "accumulate" if name == "accumulation" else name


def check_accepted(names: Collection[str]) -> None:
    """
    Raises:
        UsageError: a name of something that cannot be accepted.
    """
    unknown = sorted({*names} - {*_MATTERS}, key=str) if is_list(names) else [names]
    if unknown:
        raise LoaderError(
            f"accept_changes must be a collection of names among {', '.join(map(repr, _MATTERS))}, got "
            f"{', '.join(map(repr, unknown))}."
        )


@dataclass(frozen=True)
class Change:
    """A difference between two loaders.

    Attributes:
        meaning: what resuming in spite of it means.
        harmful: whether it changes the samples that are trained on.
    """

    name: str
    saved: str
    now: str
    meaning: str
    harmful: bool


def facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a loader's state that is compared: all but its position."""
    return {name: value for name, value in state.items() if name not in _POSITION}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Differences between two loaders' states or facts, in a fixed order. Facts that an older state lacks are not compared."""
    saved = {**saved, "order": str(saved.get("order", 1))}  # states without a number are of formula 1
    changed: list[Change] = []
    for name, meaning in {**_MATTERS, **_HARMLESS}.items():
        if name not in saved or saved[name] == now[name]:
            continue
        was, is_ = saved[name], now[name]
        if name == "fingerprint":
            difference = _difference(was, is_, length_is_told="samples" in [each.name for each in changed])
            if difference is None:
                continue
            was, is_ = difference
        changed.append(Change(called(name), str(was), str(is_), meaning, name in _MATTERS))
    return changed


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], accepted: Collection[str]) -> None:
    """
    Raises:
        UsageError: a harmful change was not accepted; with a table of all changes.
    """
    changed = changes(saved, now)
    refused = [each.name for each in changed if each.harmful and each.name not in accepted]
    if not refused:
        return
    rows = [("what", "saved", "now", "what it means")]
    rows += [(c.name, c.saved, c.now, c.meaning + (" (accepted)" if c.name in accepted else "")) for c in changed]
    table = "\n".join(f"  {line}" for line in columns(rows))
    names = ", ".join(map(repr, refused))
    raise LoaderError(
        f"the loader cannot resume from the saved position, because of these changes:\n{table}\n"
        f"Undo the change, or allow it with LoaderOptions(accept_changes={{{names}}})."
    )


def _difference(saved: Any, now: Any, *, length_is_told: bool) -> tuple[str, str] | None:
    """How two fingerprints differ, in a few words each; None if all that both can compare is equal."""
    if not isinstance(saved, dict) or not isinstance(now, dict):
        return (_short(saved), _short(now)) if isinstance(saved, str) and isinstance(now, str) else None
    if saved["length"] != now["length"] and not length_is_told:
        return f"{saved['length']} long", f"{now['length']} long"
    for index, was in saved["samples"].items():
        is_ = now["samples"].get(index)
        if was is not None and is_ is not None and was != is_:
            return f"sample {index}: {was:08x}", f"{is_:08x}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:21]}..."


def cannot_divide(global_batch: int, ranks: int, accumulation: int) -> str:
    """The message for a global batch that cannot be divided, with numbers of ranks and global batches that can."""
    parts = ranks * accumulation
    near = sorted({max(parts, global_batch // parts * parts), (global_batch // parts + 1) * parts})
    text = f"global_batch {global_batch} cannot be divided by {ranks} ranks x accumulate={accumulation}, which is {parts}. "
    fitting = [n for n in range(1, global_batch + 1) if global_batch % (n * accumulation) == 0]
    if fitting:
        low = [n for n in fitting if n < ranks][-4:]
        shown = [*low, *[n for n in fitting if n > ranks][:4]]
        text += f"Numbers of ranks that can, with accumulate={accumulation}: {', '.join(map(str, shown))}. "
    others = [a for a in range(1, min(global_batch, 1024) + 1) if global_batch % (a * ranks) == 0][:4]
    if others:
        text += f"With {ranks} ranks accumulate={' or '.join(map(str, others))} can. "
    return text + f"Nearest global_batch that can: {' or '.join(map(str, near))}."
