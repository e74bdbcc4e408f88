"""What ranks leave: the record of each, and the values of each step.

A rank may know only a part of the sequences (context parallelism), or of the layers (a pipeline). The judge and the reference
need whole micro-batches, and every name on every rank: records are completed as they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from echelon.prover.micro import Micro, widths_of
from echelon.prover.reading import Plan
from echelon.prover.values import UnitKind, as_real

__all__ = ["RankRecord", "StopLoop", "by_index", "load_records", "load_values", "micros_in_order", "stage_files", "widths"]


class StopLoop(BaseException):
    """Ends a script when all that is compared has been seen. Not an Exception, so that no script swallows it."""


@dataclass
class RankRecord:
    """What one rank saw. `digests[k]` has checksums of what should be the same on all ranks at update k."""

    kind: UnitKind | None = None  # None where nothing trained
    rank: int = 0
    is_replica: bool = False
    place: dict[str, int] = field(default_factory=dict)  # its index along each axis, if the module has several axes
    part: tuple[int, int] = (0, 1)  # of each sequence: (which, of how many)
    stage: tuple[int, int] = (0, 1)  # of the layers: (which, of how many)
    overridable: bool = False
    own_layout: str = ""  # the script's, by name
    own_row: str = ""  # the same without its options: the name of a row that would repeat it
    is_own: bool = False  # the row has the script's own layout, with its options
    accumulation: int = 1
    loader: str = ""
    samples_by_rank: bool | None = None  # whether the loader has a sampler that knows of ranks; None: not a torch DataLoader
    global_batch: int | None = None
    hashes: bool = False  # the script makes sets, whose order may differ between processes
    drew_unseeded: set[str] = field(default_factory=set)  # numpy's and Python's RNGs, if drawn from unseeded before training
    initial_digests: dict[str, int] = field(default_factory=dict)
    updates: list[list[Micro]] = field(default_factory=list)
    gradient_digests: list[dict[str, int]] = field(default_factory=list)
    parameter_digests: list[dict[str, int]] = field(default_factory=list)
    attribute_digests: list[dict[str, int]] = field(default_factory=list)  # of the script's own optimizers, as they step
    buffer_digests: list[dict[str, int]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)  # to which norms were clipped
    held: set[str] = field(default_factory=set)  # parameters that some optimizer of this rank holds
    held_first: set[str] = field(default_factory=set)  # those of the optimizer that stepped first
    strangers: int = 0  # parameters in an optimizer that belong to no module of the unit
    trainable: set[str] = field(default_factory=set)
    owners: dict[str, Any] = field(default_factory=dict)  # the rank of each element, of parameters that are split
    changed_within: int | None = None  # the update in the middle of which the loop changed gradients
    narrow: str = ""  # the type of parameters that are kept in half precision
    flattened: bool = False  # in the older FullyShardedDataParallel: gradients cannot be seen whole
    batch_norms: list[str] = field(default_factory=list)
    dropouts: int = 0
    # By RNG, checksums of its state before and after the first pass that drew from it.
    streams: dict[str, tuple[int, int]] = field(default_factory=dict)
    resting: list[list[str]] = field(default_factory=list)  # by update: modules in evaluation mode as it begins
    # By RNG, checksums before and after the first read of samples that drew from it, in each process that reads.
    reading: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    size: int | None = None  # of the data set that an echelon.Loader divides
    seen_of_data: list[int] | None = None  # of that data set: its length, and the checksum of a sample
    kept: dict[str, int] = field(default_factory=dict)  # checksums of what the unit keeps as training begins
    plan: Plan | None = None  # which samples the first epoch has for this rank, if the loader tells
    rates: list[list[float]] = field(default_factory=list)  # learning rates of the first optimizer's groups, by update
    is_double: bool = False  # the script computes in float64 by itself, which was not asked for
    evaluates: bool = False  # the loop evaluates the unit among the updates that are compared
    reads_beside: bool = False  # a loop of its own reads another loader beside the training loader, as by `zip`
    communicates: bool = False  # its steps use SyncBatchNorm, or collectives that the script calls itself
    rng_differs: bool = False  # ranks that share samples draw other numbers for them than one process
    constant_draws: bool = False  # random operators gave a sample the same numbers in any batch
    wants_constant_draws: bool = False  # they should have, which was not known before the run
    compiles: bool = False  # the script calls torch.compile, or has it called
    half: str | None = None  # a type with few digits in which it computes: "bf16", "fp16", "float8"
    gathers: str | None = None  # the type in which a sharded module computes by itself, without autocast
    scaler: bool = False  # the script makes a gradient scaler that is enabled
    left_out: int = 0  # updates that a gradient scaler skipped, or that have no weight
    scales: list[float] = field(default_factory=list)  # by update: by how much the unit's scaler multiplied the loss
    warned: str = ""  # the loop's warning about the loss's scale, such as a loss divided by the accumulation
    by_sample: bool = False  # with constant draws: each sample had its own numbers
    kinds: set[tuple[str, int, bool]] = field(default_factory=set)  # these and `shapes`: see ConstantDraws
    shapes: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    unknown_draw: str | None = None  # with constant draws: an operator that still gave every sample other numbers

    @property
    def is_of_several(self) -> bool:
        return self.kind is not None and self.kind.is_of_several

    @property
    def draws_by_itself(self) -> bool:
        return self.kind is not None and self.kind.draws_by_itself

    @property
    def micros(self) -> list[Micro]:
        """Of all updates."""
        return [micro for update in self.updates for micro in update]

    @property
    def digests(self) -> tuple[list[dict[str, int]], ...]:
        """The digests by name of tensors that belong to layers."""
        return [self.initial_digests], self.gradient_digests, self.parameter_digests, self.buffer_digests


def load_records(paths: Sequence[Path | str]) -> list[RankRecord]:
    """What the ranks of a row wrote down, in their order, with whole micro-batches."""
    records: list[RankRecord] = [torch.load(path, weights_only=False) for path in paths]
    if any(r.stage[1] > 1 for r in records):
        _over_stages(records)
    if any(r.part[1] > 1 for r in records):
        for same in _groups(records, "cp"):
            _over_parts(sorted(same, key=lambda r: r.part))
    return records


def stage_files(path: Path) -> list[Path]:
    """Where the values of a step are: in one file, or in one for each stage."""
    return [path, *sorted(path.parent.glob(f"{path.stem}.stage*{path.suffix}"))]


def _groups(records: list[RankRecord], axis: str) -> list[list[RankRecord]]:
    """Ranks that differ along this axis only."""
    groups: dict[Any, list[RankRecord]] = {}
    for record in records:
        groups.setdefault(tuple(each for each in record.place.items() if each[0] != axis), []).append(record)
    return list(groups.values())


def _over_stages(records: list[RankRecord]) -> None:
    """Complete the records of pipeline stages: the last stage has the losses; every stage has the names of its layers."""
    for same in _groups(records, "pp"):
        last = max(sorted(same, key=lambda r: r.stage), key=lambda r: len(r.micros))  # on whichever rank a schedule has it
        for record in (r for r in same if r is not last):
            record.updates = [[replace(micro, weight=0.0) for micro in update] for update in last.updates]
            record.streams, record.resting = {}, last.resting
    held, trainable = (set[str]().union(*names) for names in zip(*((r.held, r.trainable) for r in records), strict=True))
    for record in records:  # a rank gets the names that it lacks from its peers of other stages
        record.held, record.trainable = held, trainable
        for peer in (r for r in records if r.stage != record.stage):
            for digest, theirs in zip(record.digests, peer.digests, strict=True):
                for one, other in zip(digest, theirs, strict=False):
                    one.update(other | one)


def _over_parts(same: list[RankRecord]) -> None:
    """Give the whole micro-batch, with the weight and the loss of all parts, to the first of the ranks that share sequences."""
    for k, update in enumerate(same[0].updates):
        for m, micro in enumerate(update):
            parts: list[Micro] = [r.updates[k][m] for r in same]
            weight = sum(part.weight for part in parts)
            losses = [(part.loss, part.weight) for part in parts if part.loss is not None]
            loss = sum(value * w for value, w in losses) / weight if losses and weight else micro.loss
            update[m] = replace(micro, weight=weight, loss=loss)
    for record in same[1:]:
        record.updates = [[replace(micro, weight=0.0) for micro in update] for update in record.updates]
        record.is_replica = True


def load_values(path: Path) -> dict[str, Any]:
    """The written values of a step: tensors by name, and numbers. Complex tensors become real ones of their two parts."""
    values: dict[str, Any] = {}
    for file in stage_files(path):
        # No code is unpickled.
        for kind, each in torch.load(file, weights_only=True, mmap=True).items():
            values[kind] = {**values.get(kind, {}), **each} if isinstance(each, dict) else each
    return {kind: as_real(each) if isinstance(each, dict) else each for kind, each in values.items()}


def micros_in_order(records: list[RankRecord]) -> list[list[Micro]]:
    """The micro-batches of each update over all ranks: by index, then by rank, without those of weight 0."""
    updates = min((len(r.updates) for r in records), default=0)
    return [[micro for same in by_index(records, k) for micro in same if micro.weight > 0] for k in range(updates)]


def by_index(records: list[RankRecord], k: int) -> list[list[Micro]]:
    """The micro-batches of update k in groups: those with the same index on all ranks."""
    of_ranks = [r.updates[k] for r in records]
    return [[r[m] for r in of_ranks if m < len(r)] for m in range(max(map(len, of_ranks)))]


def widths(records: list[RankRecord]) -> set[tuple[torch.Size, ...]]:
    """The shapes of the tensors of all micro-batches of these ranks, each without its first dimension, the samples."""
    return {tuple(widths_of(m.plain)) for record in records for m in record.micros}
