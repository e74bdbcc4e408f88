"""What one rank of a row wrote down, beside the values themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.prover.micro import Micro
from echelon.prover.samples import Plan
from echelon.prover.unit_kind import UnitKind

__all__ = ["RankRecord"]


@dataclass
class RankRecord:
    """What one rank saw. `digests[k]` has checksums of what should be the same on all ranks at update k."""

    kind: UnitKind | None = None  # None where nothing trained
    rank: int = 0
    is_replica: bool = False
    place: dict[str, int] = field(default_factory=dict)  # along each axis, of a module that is parallel in several directions
    part: tuple[int, int] = (0, 1)  # of each sequence: which, of how many
    stage: tuple[int, int] = (0, 1)  # of the layers
    overridable: bool = False
    own_layout: str = ""  # the script's, by name
    own_row: str = ""  # the same without its options: the name of a row that would repeat it
    is_own: bool = False  # the row has the script's own layout, with its options
    accumulation: int = 1
    loader: str = ""
    samples_by_rank: bool | None = None  # whether the loader has a sampler that knows of ranks; None: not a torch DataLoader
    global_batch: int | None = None
    hashes: bool = False  # the script makes sets, whose order may be another in each process
    drew_unseeded: set[str] = field(default_factory=set)  # numpy and Python's random, if before it trained
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
    # Checksums before and after the first pass that drew, by name.
    streams: dict[str, tuple[int, int]] = field(default_factory=dict)
    resting: list[list[str]] = field(default_factory=list)  # by update: modules in evaluation mode as it begins
    # As `streams`, of reading the first samples: in each process that does.
    reading: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    size: int | None = None  # of the data set that an echelon.Loader divides
    seen_of_data: list[int] | None = None  # of it, as far as a look tells: its length, and a checksum
    kept: dict[str, int] = field(default_factory=dict)  # checksums of what the unit keeps as training begins
    plan: Plan | None = None  # which samples the first epoch has for this rank, if the loader tells
    rates: list[list[float]] = field(default_factory=list)  # learning rates of the first optimizer's groups, by update
    is_double: bool = False  # the script computes in float64 by itself, which was not asked for
    evaluates: bool = False  # the loop evaluates the unit among the updates that are compared
    communicates: bool = False  # its steps speak to other ranks: SyncBatchNorm, or collectives that the script calls itself
    draws_apart: bool = False  # ranks that share samples draw other numbers for them than one process
    constant_draws: bool = False  # random operators gave a sample the same numbers in any batch
    wants_constant_draws: bool = False  # and should have, which was not known before
    compiles: bool = False  # the script calls torch.compile, or has it called
    half: str | None = None  # a type with few digits in which it computes: "bf16", "fp16", "float8"
    gathers: str | None = None  # the type in which a sharded module computes by itself, without autocast
    scaler: bool = False  # it makes a gradient scaler that works
    left_out: int = 0  # updates, by a gradient scaler or because they weigh nothing
    scales: list[float] = field(default_factory=list)  # by update: by how much the unit's scaler multiplied the loss
    warned: str = ""  # what the loop said of the loss's scale, as of one that is divided by the accumulation
    by_sample: bool = False  # and did so for each sample by itself
    kinds: set[tuple[str, int, bool]] = field(default_factory=set)  # these and `shapes`: see ConstantDraws
    shapes: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    unknown_draw: str | None = None  # with constant draws: an operator that still gave every sample other numbers
