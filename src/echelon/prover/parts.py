"""Ranks that each know a part: of the sequences (context parallelism), or of the layers (a pipeline). The judge and the reference
want whole micro-batches, and every name on every rank; here the ranks' records are put together to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon.prover.micro import Micro

__all__ = ["load_records", "stage_files"]

_BY_NAME = ("initial_digests", "gradient_digests", "parameter_digests", "buffer_digests")
_SETS = ("held", "trainable")


def load_records(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """What the ranks of a row wrote down, in their order, with whole micro-batches."""
    records: list[dict[str, Any]] = [torch.load(path, weights_only=False) for path in paths]
    if any(r["stage"][1] > 1 for r in records):
        _over_stages(records)
    if any(r["part"][1] > 1 for r in records):
        for same in _groups(records, "part"):
            _over_parts(same)
    return records


def stage_files(path: Path) -> list[Path]:
    """Where the values of a step are: in one file, or in one for each stage."""
    return [path, *sorted(path.parent.glob(f"{path.stem}.stage*{path.suffix}"))]


def _groups(records: list[dict[str, Any]], axis: str) -> list[list[dict[str, Any]]]:
    """Ranks that differ in this axis only, in its order."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        place = {name: where for name, where in record["place"].items() if name != {"part": "cp", "stage": "pp"}[axis]}
        found.setdefault(tuple(place.items()), []).append(record)
    return [sorted(each, key=lambda r: r[axis]) for each in found.values()]


def _over_stages(records: list[dict[str, Any]]) -> None:
    """The last stage has the losses; every stage has the names of its layers."""
    for same in _groups(records, "stage"):
        last = max(same, key=lambda r: sum(map(len, r["updates"])))  # on whichever rank a schedule has it
        for record in (r for r in same if r is not last):
            record["updates"] = [[replace(micro, weight=0.0) for micro in update] for update in last["updates"]]
            record["streams"], record["resting"] = {}, last["resting"]
    for name in _SETS:
        union = set().union(*(r[name] for r in records))
        for record in records:
            record[name] = union
    for record in records:  # what a rank does not have itself is as its peers of the other stages have it
        peers = [r for r in records if r["stage"] != record["stage"]]
        for name in _BY_NAME:
            mine = record[name]
            for k, digests in enumerate(mine) if isinstance(mine, list) else [(None, mine)]:
                for peer in peers:
                    theirs = peer[name] if k is None else peer[name][k] if k < len(peer[name]) else {}
                    for key, value in theirs.items():
                        digests.setdefault(key, value)


def _over_parts(same: list[dict[str, Any]]) -> None:
    """Of ranks that share sequences, the first has the whole micro-batch, with the weight and the loss of all parts."""
    for k, update in enumerate(same[0]["updates"]):
        for m, micro in enumerate(update):
            parts: list[Micro] = [r["updates"][k][m] for r in same]
            weight = sum(part.weight for part in parts)
            losses = [(part.loss, part.weight) for part in parts if part.loss is not None]
            loss = sum(value * w for value, w in losses) / weight if losses and weight else micro.loss
            update[m] = replace(micro, weight=weight, loss=loss)
    for record in same[1:]:
        record["updates"] = [[replace(micro, weight=0.0) for micro in update] for update in record["updates"]]
        record["is_replica"] = True
