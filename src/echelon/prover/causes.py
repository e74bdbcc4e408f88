"""The catalogue of mistakes of distributed training that prove can recognise in the ranks' records.

Some mistakes change the numbers (a missing all-reduce), and are recognised by the values that they produce. Others leave the
numbers of a few updates unchanged (the same data on two ranks: the mean over two copies is the mean of one), and are found
in the micro-batches and RNG states; they fail a row as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from echelon.prover.micro import digest
from echelon.prover.pass_state import VARIABLE, unlike
from echelon.prover.proof import Difference, Verdict
from echelon.prover.records import RankRecord
from echelon.prover.values import UnitKind, near_values

__all__ = [
    "CAUSES",
    "CHANGE_EVERYTHING",
    "Cause",
    "from_mistakes",
    "from_records",
    "from_verdict",
    "gradients_apart",
    "is_of_one_rank",
    "models_apart",
    "of_scaler",
    "of_shards",
    "of_split",
    "of_state",
    "of_step",
    "of_underflow",
    "of_variables",
    "parameters_apart",
    "state_apart",
    "state_moves",
    "state_of_ranks",
]

Cause = tuple[str, str]  # its name, and what was seen
_FEW = 4  # parts of a state that are named one by one
_KEEPS = "the forward pass keeps state"
_HALF_DIGITS = 3e-2  # four roundings of bfloat16: the tolerance of a loss in half precision

# Underflow: elements above the first share of a gradient's largest, at least so many, of which more than the last share is zero.
_NO_SMALL_PART, _LEAST_LOST, _MOST_LOST = 1e-2, 8, 0.1

CAUSES = {
    "missing all-reduce": "the ranks step with gradients of their own: nothing reduces them",
    "loss weighted per rank": "the means of ranks or micro-batches are averaged as if they were equally large",
    "identical data on two ranks": "two ranks train on the same samples",
    "a sampler that ignores the rank": "the loader gives every rank all samples: use echelon.Loader or a DistributedSampler",
    "samples that depend on the rank": "ranks must read the same data in the same order: sort files and sets, seed shuffles",
    "an RNG without a seed": "each rank draws its own numbers: call echelon.seed(...) with one number before the first draw",
    "samples that ranks share": "ranks read the same samples: use echelon.Loader, or a sampler with one order for all ranks",
    "identical random numbers": "data-parallel ranks draw alike: seed each by its rank, after the model is built, not in a step",
    "identical augmentation": "seed each rank by its own number, and data workers by get_worker_info().seed",
    "a forward pass that cannot be repeated": "the forward pass draws from a source that prove cannot find, or keeps state",
    "other random numbers in the backward pass": "recomputation draws new numbers: the gradient is not that of the loss",
    "gradients that are still scaled": "clip and look at gradients after scaler.unscale_(optimizer)",
    "gradients that underflow": "they are too small for the type in which they are computed: use a gradient scaler, or bfloat16",
    "modules in evaluation mode on some ranks": "dropout and batch norm are off there: call train() on every rank",
    "unsynchronised buffers": "buffers differ between ranks",
    "an untracked or stale optimizer parameter": "the optimizer does not hold it: make the optimizer after the module is sharded",
    "batch norm over the local batch": (
        "its statistics are those of a micro-batch: use SyncBatchNorm, whose micro-batch spans all ranks, without "
        "accumulation; or another normalisation"
    ),
    "parameters that drift apart": (
        "gradients are the same on all ranks, but something else that changes parameters is not: learning rates, optimizer "
        "states, noise, or writes of the forward pass"
    ),
    "another learning rate": "the optimizer steps with another rate than in one process",
    "an optimizer that computes with its shard alone": (
        "such as a norm over p.to_local(): sums over a whole parameter must be reduced over the ranks"
    ),
    "another step of the optimizer": (
        "its gradients are right, but it computes with the rank or the number of ranks, draws random numbers, or something "
        "else changes parameters after it"
    ),
    "a change on one rank's shard": "that rank alone changes its part of the gradients or parameters: hooks, noise, states",
    "gradients that each rank changes": "hooks, noise or clipping work on a rank's own gradient, or differ between ranks",
    "gradients changed in the middle of an update": "only some of its batches are in them: clip by window.clip_grad_norm_",
    "clipping on each rank": "every rank clips its own gradient: reduce first, then clip",
    "collectives without a gradient": "all_gather and all_reduce of torch.distributed pass none: use torch.distributed.nn's",
    "a wrong scale": "all gradients are a constant times what they should be",
    "different initial parameters": "the model is not built from the same seed, or is changed before it is made parallel",
    "a loss that depends on the rank": (
        "the same samples have another loss on another rank, or with another number of ranks: all that the loss reads must be "
        "the same on all ranks; if the loop draws noise itself, draw it with the batch, in collate_fn"
    ),
    "a loss of what ranks send each other": (
        "the mean of the ranks' losses is not the loss of the whole batch: among gathered rows, a rank's own begin at "
        "rank x rows; divide a sum over ranks by the count of all ranks"
    ),
    "the forward pass keeps state": (
        "state that a pass changes must be the same on all ranks, and change once an update: reduce its inputs, or its "
        "gradient, over the ranks"
    ),
    "an operation over the whole batch": "the loss of a batch is not the mean of the losses of its parts",
}


CHANGE_EVERYTHING = {
    *("identical random numbers", "modules in evaluation mode on some ranks", "other random numbers in the backward pass"),
    *("gradients that are still scaled", "gradients that underflow", "an RNG without a seed"),
}


def from_records(records: list[RankRecord], per_sample: Callable[[], set[str] | None]) -> list[Cause]:
    """Causes that the ranks' own records show. Right numbers do not excuse them.

    Args:
        per_sample: returns the RNGs from which more samples draw more; None if unknown. Other RNGs may be the same
            on all ranks: they make choices that ranks have to make together.
    """
    of_data = [r for r in records if not r.is_replica]
    causes = [_same_data(of_data), _same_streams(of_data, per_sample), _same_reading(of_data), _modes_apart(records)]
    return [each for each in (*causes, *_differing(records), _stale(records)) if each is not None]


def _same_data(records: list[RankRecord]) -> Cause | None:
    digests = [[digest(m.plain) for m in r.micros if m.weight > 0] for r in records]
    twins = [(a, b) for a, b in combinations(range(len(records)), 2) if digests[a] == digests[b] and digests[a]]
    several = len({d for seen in digests for d in seen}) > 1  # a script that repeats one batch shows nothing
    if not twins or not several:
        return None
    a, b = (records[i].rank for i in twins[0])
    everywhere = len(twins) == len(records) * (len(records) - 1) // 2
    if everywhere and records[0].samples_by_rank is False:
        return (
            "a sampler that ignores the rank",
            f"all {len(records)} ranks got the same micro-batches from a {records[0].loader}",
        )
    return "identical data on two ranks", f"ranks {a} and {b} got the same micro-batches in every update"


def _same_streams(records: list[RankRecord], per_sample: Callable[[], set[str] | None]) -> Cause | None:
    """Ranks that draw from RNGs in the same state. A user's own train_step runs without dropout here: its draws are not tried."""
    for a, b in combinations(records, 2):
        for name in a.streams.keys() & b.streams.keys():
            before, after = (x == y for x, y in zip(a.streams[name], b.streams[name], strict=True))
            if not (before or after):
                continue
            more = None if name == "torch" and a.dropouts else per_sample()
            if more is None or name in more or not before:
                when = "began with" if before else "came out of their first forward pass with"
                which = "RNG state" if name == "torch" else f"RNG state of {name}"
                return "identical random numbers", f"ranks {a.rank} and {b.rank} {when} the same {which}"
    return None


def _same_reading(records: list[RankRecord]) -> Cause | None:
    draws = [bool(r.reading) for r in records]
    if any(draws) and not all(draws):
        seen = f"reading samples draws random numbers on rank {records[draws.index(True)].rank}, and on rank"
        return "samples that depend on the rank", f"{seen} {records[draws.index(False)].rank} it does not"
    for a, b in combinations(records, 2):
        for name in a.reading.keys() & b.reading.keys():
            if a.reading[name] & b.reading[name]:
                seen = f"ranks {a.rank} and {b.rank} read their first samples with the same RNG state of {name}"
                return "identical augmentation", seen
    return None


def _modes_apart(records: list[RankRecord]) -> Cause | None:
    for k, resting in enumerate(zip(*(r.resting for r in records), strict=False)):
        for record, names in zip(records, resting, strict=True):
            alone = [n for n in names if any(n not in others for others in resting)]
            if alone:
                seen = f"update {k}: {alone[0] or 'the model'} is in evaluation mode on rank {record.rank}, and not on all"
                return "modules in evaluation mode on some ranks", seen
    return None


def _differing(records: list[RankRecord]) -> list[Cause]:
    """Causes in values that must be the same on all ranks and are not."""
    names = _unlike([r.initial_digests for r in records])
    if names:
        return [("different initial parameters", f"{names[0]} is not the same on all ranks before the first update")]
    drifted, causes = _apart(records, "parameter"), list[Cause]()
    for what, cause in (("gradient", "missing all-reduce"), ("buffer", "unsynchronised buffers")):
        apart = _apart(records, what)
        if apart is not None and (drifted is None or apart[0] <= drifted[0]):  # and not because parameters were apart before
            causes.append((cause, f"update {apart[0]}: the {what} {apart[1][0]} is not the same on all ranks"))
    if causes or drifted is None:
        return causes
    k, names = drifted
    rates = {r.rank: r.rates[k] for r in records}
    other = next((rank for rank in rates if rates[rank] != rates[0]), None)
    if other is not None:
        seen = f"update {k}: {_rates(rates[other])} on rank {other}, on rank 0 {_rates(rates[0])}"
        return [("another learning rate", seen)]
    kept = _unlike([r.attribute_digests[k] for r in records])
    why = f"; {kept[0]} was not, when the optimizer stepped" if kept else ""
    return [("parameters that drift apart", f"update {k}: the parameter {names[0]} is not the same on all ranks{why}")]


def _apart(records: list[RankRecord], what: str) -> tuple[int, list[str]] | None:
    """The first update in which digests of `what` differ between ranks, and the names that differ."""
    each = enumerate(zip(*(getattr(r, f"{what}_digests") for r in records), strict=False))
    return next(((k, names) for k, of_ranks in each if (names := _unlike(of_ranks))), None)


def _unlike(digests: Sequence[Mapping[str, int]]) -> list[str]:
    return [n for n in digests[0] if len({d.get(n) for d in digests}) > 1]


def _stale(records: list[RankRecord]) -> Cause | None:
    strangers = next((r.strangers for r in records if r.strangers), 0)
    left_out = sorted(records[0].trainable - set().union(*(r.held for r in records)))
    if not strangers or not left_out:
        return None
    seen = f"{left_out[0]} is in no optimizer; they hold {strangers} parameters that are not the module's"
    return "an untracked or stale optimizer parameter", seen


# --- state that is kept between passes


def of_state(records: list[RankRecord], probed: Mapping[str, Any]) -> Cause | None:
    """A cause in state that the unit keeps between passes: losses depend on it, and it is not what one process keeps.

    Args:
        probed: facts from trying the forward pass in one process (`probe.py`).
    """
    if probed["writes"]:
        return _KEEPS, f"the forward pass itself sets the parameter {probed['writes']}, from the samples of its own batch"
    state: Mapping[str, Sequence[str]] = probed["state"]
    if cause := state_apart(records, state) or state_moves(records, state) or state_of_ranks(records, probed):
        return cause
    if probed["repeatable"]:
        return None
    variables = [name for name in state if name.startswith(VARIABLE)]
    if not variables:
        return "a forward pass that cannot be repeated", "the first forward pass gave another loss when it was run again"
    return _KEEPS, f"the first batch, given again, has another loss: {variables[0]} changes from one to the next"


def state_of_ranks(records: list[RankRecord], probed: Mapping[str, Any]) -> Cause | None:
    """State that is the same on all ranks after the first update, but not in one process that ran the same code and samples.

    Not tested if the unit is evaluated: the one process evaluates nothing here.
    """
    updates = records[0].updates
    later = updates[1][0].state if len(updates) > 1 and not records[0].evaluates else {}
    for name, paths in probed["state"].items():
        for path in paths:
            value, one = later.get(path), probed["kept"].get(path)
            if not near_values(value, one):
                numbers = f": {value:g} on every rank, {one:g} in one process" if isinstance(one, (int, float)) else ""
                return _KEEPS, f"after the first update {name} differs from one process{numbers}; the loss depends on it"
    return None


def state_apart(records: list[RankRecord], state: Mapping[str, Sequence[str]]) -> Cause | None:
    """State that is not the same on all ranks.

    Args:
        state: paths by name.
    """
    records = [r for r in records if not r.is_replica]
    for k, of_ranks in enumerate(zip(*(r.updates for r in records), strict=False)):
        for first, *others in zip(*of_ranks, strict=False):
            apart = set().union(*(unlike(first.state, other.state) for other in others))
            named = next(((name, paths) for name, paths in state.items() if apart.intersection(paths)), None)
            if named is not None:
                name = min(apart.intersection(named[1])) if len(named[1]) <= _FEW else named[0]
                seen = f"update {k}: {name} is not the same on all ranks, and the loss or its gradient depends on it"
                return _KEEPS, seen
    return None


def models_apart(records: list[RankRecord]) -> Cause | None:
    """A tensor that no rank changes but that differs between ranks, such as one of a frozen model that the layout does not know.
    Ranks may have such tensors for good reasons: use this cause only if nothing else explains a difference.
    """
    kept = [_unchanged([m.state for m in r.micros]) for r in records if not r.is_replica]
    names = [name for name in _unlike(kept) if all(name in each for each in kept)]
    if not names:
        return None
    return "different initial parameters", f"{names[0]} is not the same on all ranks, and the layout does not know it"


def _unchanged(states: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """By path, checksums of floating-point tensors that have the same value before every micro-batch where they exist."""
    seen: dict[str, list[int]] = {}
    for path, value in (item for state in states for item in state.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
            seen.setdefault(path, []).append(digest(value))
    return {path: each[0] for path, each in seen.items() if len(each) > 1 and len(set(each)) == 1}


def state_moves(records: list[RankRecord], state: Mapping[str, Sequence[str]]) -> Cause | None:
    """State that changes between the micro-batches of one update."""
    for update in (u for r in records for u in r.updates):
        moved = set().union(*(unlike(a.state, b.state) for a, b in pairwise(update)))
        name = next((name for name, paths in state.items() if moved.intersection(paths)), None)
        if name is not None:
            seen = f"{name} moves with every micro-batch, not with every update, and the loss or its gradient depends on it"
            how = "change it as an update ends, in on_train_step_end if self.has_updated, in a loop if window.is_last"
            return _KEEPS, f"{seen}: {how}"
    return None


# --- the first difference


def from_verdict(verdict: Verdict, records: list[RankRecord], facts: Mapping[str, Any]) -> Cause | None:
    """A cause that follows from the first difference itself.

    Args:
        facts: `held` and `rates` of the reference.
    """
    first = verdict.first
    if first is None:
        return None
    if first.phase == "initialisation":
        return "different initial parameters", f"{first.tensor} differs before the first update"
    if not records[0].flattened:
        left_out = sorted(facts["held"] - set().union(*(r.held for r in records)))
        if left_out or (first.phase == "update" and verdict.unmoved):
            name = left_out[0] if left_out else verdict.unmoved[0]
            return "an untracked or stale optimizer parameter", f"{name} did not change in update {first.update}"
    for record in records:
        if record.changed_within is not None and record.changed_within <= first.update:
            where = f"update {record.changed_within}, rank {record.rank}"
            seen = f"{where}: between two of its batches, as by torch.nn.utils.clip_grad_norm_"
            return "gradients changed in the middle of an update", seen
    right = facts["rates"][first.update]
    for record in records if first.phase == "update" else ():
        rates = record.rates[first.update]
        if set(rates) - set(right):
            where = f" on rank {record.rank}" if any(r.rates[first.update] != rates for r in records) else ""
            ranks = len([r for r in records if not r.is_replica])
            grows = all(abs(a - ranks * b) <= 1e-6 * a for a, b in zip(rates, right, strict=False))
            why = f": {ranks} times as large, with {ranks} ranks" if grows and not where else ""
            return "another learning rate", f"update {first.update}: {_rates(rates)}{where}, in one process {_rates(right)}{why}"
    return None


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))


def of_scaler(values: Mapping[str, torch.Tensor], rescaled: Mapping[str, torch.Tensor], factor: float) -> list[Cause]:
    """A cause if gradients at the optimizer's step change when the script's own scaler begins with `factor` times its scale."""
    before, after = (sum(float(g.double().square().sum()) for g in each.values()) ** 0.5 for each in (values, rescaled))
    if not before or not after or 0.8 < after / before < 1.25:
        return []
    seen = f"with {factor:g} times the scale, the optimizer steps with {after / before:.3g} times the gradient"
    return [("gradients that are still scaled", seen)]


def of_underflow(values: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], half: str) -> list[Cause]:
    """A cause if gradients are zero in a type with few digits, but not in float64."""
    for name, value in right.items():
        counts = value.abs() > _NO_SMALL_PART * float(value.abs().max()) if name in values and value.numel() else None
        if counts is not None and int(counts.sum()) >= _LEAST_LOST:
            lost = float((values[name][counts] == 0).double().mean())
            if lost > _MOST_LOST:
                return [("gradients that underflow", f"in {half} {lost:.0%} of the gradient of {name} is zero, in float64 not")]
    return []


def of_shards(
    first: Difference, values: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], owners: Mapping[str, Any]
) -> Cause | None:
    """A cause if all elements that differ are in the shards of some ranks.

    Args:
        values, right: gradients or parameters of the update and the phase in which something differs first.
        owners: by parameter, the rank of each element, or of the whole parameter.
    """
    errors: dict[int, float] = {}
    for name, owner in owners.items():
        if name not in values or name not in right or values[name].shape != getattr(owner, "shape", values[name].shape):
            continue
        error = (values[name].double() - right[name].double()).abs() / (float(right[name].abs().max()) or 1.0)
        whose = owner if isinstance(owner, torch.Tensor) else torch.full(error.shape, owner)
        for rank in whose.unique().tolist():
            errors[rank] = max(errors.get(rank, 0.0), float(error[whose == rank].max()))
    most = max(errors.values(), default=0.0)
    guilty = sorted(rank for rank, error in errors.items() if error > 1e-2 * most)
    if not 0 < len(guilty) < len(errors):
        return None
    ranks = f"rank {guilty[0]}" if len(guilty) == 1 else f"ranks {', '.join(map(str, guilty))}"
    what = "gradients" if first.phase == "gradient" else "parameters"
    seen = f"update {first.update}: all differences in the {what} are on {ranks}; the shards of the others are right"
    return "a change on one rank's shard", seen


def of_step(first: Difference, owners: Mapping[str, Any]) -> Cause | None:
    """The last resort: the optimizers' gradients are right, but the parameters after their step are not."""
    if first.phase != "update":
        return None
    split = ", which is split over the ranks," if first.tensor in owners else ""
    seen = f"update {first.update}: the loss and all gradients agree; {first.tensor}{split} differs after the optimizer's step"
    return "an optimizer that computes with its shard alone" if split else "another step of the optimizer", seen


def of_split(has_better_weights: bool, error: float, batch_norms: list[str], *, padded: bool) -> Cause:
    """Why a batch, taken apart in one process, is not the weighted mean of its parts. `padded`: each part by itself."""
    parts = "its parts, each padded to a width of its own," if padded else "its parts"
    seen = f"one batch, taken apart in one process, differs from the weighted mean of {parts} by {error:.1e}"
    if batch_norms:
        return "batch norm over the local batch", f"{seen}; {batch_norms[0]} normalises each micro-batch by itself"
    if has_better_weights:
        return (
            "loss weighted per rank",
            f"{seen}; other weights give its gradient (of an AutoUnit or Trainer: its weight; of a loop: window's weight=)",
        )
    return "an operation over the whole batch", f"{seen}, whatever their weights"


def from_mistakes(
    first: Difference,
    values: Mapping[str, Any],
    right: Mapping[str, Any],
    mistakes: Mapping[str, Any],
    records: list[RankRecord],
) -> Cause | None:
    """The wrong way of combining the ranks' shares that gives this row's gradients.

    Args:
        values, right: `loss` and `gradients` of the row and of the reference at the update that first differs.
        mistakes: the same for each way of combining, as the reference computed them.
    """
    record = records[0]
    batch_norms, is_of_several = record.batch_norms, record.is_of_several
    if is_of_several:  # in training a later loss follows a step, but was tried before it
        values, right = ({**each, "gradients": _only(each["gradients"], record.held_first)} for each in (values, right))
        if _distance(values["gradients"], right["gradients"]) <= 1e-6 * _size(right["gradients"]):
            return None
    gap = _distance(values["gradients"], right["gradients"])
    loss_gap = abs(values["loss"] - right["loss"]) if values["loss"] is not None and right["loss"] is not None else 0.0

    def explains(way: str) -> bool:
        """The mistake explains the difference if it is at least ten times nearer than the right value."""
        if way not in mistakes:
            return False
        nearer = _distance(values["gradients"], mistakes[way]["gradients"])
        if first.tensor == "loss" and not is_of_several:
            return abs(values["loss"] - mistakes[way]["loss"]) * 10 <= loss_gap and nearer * 10 <= max(gap, 1e-30)
        return nearer * 10 <= gap

    if explains("weighted"):
        return _of_parts(mistakes, batch_norms, first)
    if explains("unweighted"):
        return "loss weighted per rank", "micro-batches of different sizes count the same"
    alone = next((way for way in mistakes if way.startswith("rank ") and explains(way)), None)
    if alone is not None:
        return "missing all-reduce", f"the gradients are those of {alone}"
    if not mistakes["weighted"]["is_linear"]:
        return (
            "gradients that each rank changes",
            "half of a loss does not have half of its gradient: a hook changes the gradient of each micro-batch",
        )
    scale = _wrong_scale(values, right, gap)
    if not record.communicates:
        return scale or (None if is_of_several else _by_rank(mistakes, records, first.update))
    # A rank's loss depends on what other ranks send; and a step of the user's own may send gradients.
    if scale and (first.phase != "gradient" or record.kind is UnitKind.STEP):
        return scale
    if first.phase != "gradient":
        losses = [f"rank {rank} {recorded:.6g}" for rank, _, recorded in mistakes["weighted"]["losses"] if recorded is not None]
        if is_of_several or right["loss"] is None or not losses:
            return None
        seen = [f"losses of update {first.update}", *losses, f"one process on the whole batch {right['loss']:.6g}"]
        if len(record.updates[first.update]) > 1:
            more = "; ranks send each other one micro-batch at a time: with --accumulate 1 it is the whole batch"
            return "an operation over the whole batch", ", ".join(seen) + more
        return "a loss of what ranks send each other", ", ".join(seen)
    scaled = f": {scale[1]}" if scale else ""
    return "collectives without a gradient", f"the loss is right, its gradient is not; the forward pass uses collectives{scaled}"


def _by_rank(mistakes: Mapping[str, Any], records: list[RankRecord], update: int) -> Cause | None:
    """A cause in micro-batches for which a rank had another loss than one process has at the same parameters."""
    known = [each for each in mistakes["weighted"]["losses"] if each[2] is not None and not records[0].batch_norms]
    limit = _HALF_DIGITS if records[0].half or records[0].narrow else 1e-5
    wrong = [(rank, loss, recorded) for rank, loss, recorded in known if abs(loss - recorded) > limit * abs(loss)]
    if not wrong:
        return None
    rank, loss, recorded = wrong[0]
    seen = f"rank {rank}: {recorded:.6g}, one process on its samples: {loss:.6g}"
    firsts = {each[0]: each for each in reversed(known)}  # each rank's first micro-batch
    if not any(each in wrong for each in firsts.values()):
        return _KEEPS, f"update {update}, a later micro-batch: {seen}; each rank's first was right"
    if (kept := of_variables(records, update, f"{seen}; ")) is not None:
        return kept
    if update and len(wrong) == len(known):  # earlier updates left each rank, and one process, in different states
        return _KEEPS, f"update {update}: {seen}; the updates before it were right"
    apart = [f"; {name} is not the same on all ranks as training begins" for name in _unlike([r.kept for r in records])]
    return "a loss that depends on the rank", seen + "".join(apart[:1])


def of_variables(records: list[RankRecord], update: int, seen: str = "") -> Cause | None:
    """A cause in a loop's variables that carry over from the pass before, if there was one: prove cannot set them."""
    names = sorted(p.removeprefix(VARIABLE) for p in records[0].updates[update][0].state if p.startswith(VARIABLE))
    if not update or not names:
        return None
    return _KEEPS, f"update {update}: {seen}each process has its own values of {VARIABLE}{', '.join(names)}, from the pass before"


def _of_parts(mistakes: Mapping[str, Any], batch_norms: list[str], first: Difference) -> Cause:
    """Why the whole batch does not give the weighted mean of its parts, which the row has."""
    if batch_norms:
        return "batch norm over the local batch", f"{batch_norms[0]} normalises each micro-batch by itself"
    norms = mistakes["weighted"]["norms"]
    if len(norms) > 1 and max(norms) - min(norms) < 1e-4 * max(norms):
        return "clipping on each rank", f"every rank's own gradient has the norm {norms[0]:.4g}"
    if first.phase == "gradient":
        seen = "the loss of the whole batch is the mean of its parts' losses, but its gradient is not that of their gradients"
        if mistakes["weighted"]["is_linear"]:
            return "an operation over the whole batch", f"{seen}: a number of the batch is used detached, or a hook changes it"
        return "gradients that each rank changes", f"{seen}, nor does half of a loss have half of its gradient: a hook changes it"
    best = mistakes.get("best weights")
    if best is None or best["misses"] * 10 > mistakes["weighted"]["misses"]:
        seen = "no weights of the micro-batches give the gradient of the whole batch"
        without = next((rank for (rank, *_), norm in zip(mistakes["weighted"]["losses"], norms, strict=True) if not norm), None)
        left_out = "" if without is None else f"; one of rank {without} has no gradient, as if it were left out"
        return "an operation over the whole batch", seen + left_out
    if len(best["shares"]) > 1 and all(abs(share - 1) < 1e-3 for share in best["shares"]):
        return "loss weighted per rank", "the loss of the whole batch is the sum of its parts' losses: return a mean"
    if abs(sum(best["shares"]) - 1) > 1e-4:
        seen = "weights that give the gradient of the whole batch do not add up to 1, as with a root or a logarithm of a mean"
        return "an operation over the whole batch", seen
    of_whom = "of an AutoUnit or Trainer: its weight; of a loop: window's weight="
    seen = f"other weights of the micro-batches give the right gradient ({of_whom})"
    return "loss weighted per rank", seen


def parameters_apart(records: list[RankRecord]) -> int:
    """The first update after which parameters are not the same on all ranks; -1 if there is none."""
    apart = _apart(records, "parameter")
    return apart[0] if apart else -1


def gradients_apart(records: list[RankRecord]) -> int | None:
    """The first update whose gradients are not the same on all ranks."""
    apart = _apart(records, "gradient")
    return apart[0] if apart else None


def is_of_one_rank(
    values: Mapping[str, Any], right: Mapping[str, Any], mistakes: Mapping[str, Any], records: list[RankRecord], k: int
) -> bool:
    """Whether gradients that differ between ranks are those that the first rank computed alone."""
    names = _unlike([r.gradient_digests[k] for r in records])
    alone = mistakes.get(f"rank {records[0].rank} alone")
    if alone is None or not names:
        return True
    names = [n for n in names if n in alone["gradients"]]
    if not names:
        return True
    own, right_ones, of_alone = (_only(each["gradients"], {*names}) for each in (values, right, alone))
    return _distance(own, of_alone) * 10 <= _distance(own, right_ones)


def _wrong_scale(values: Mapping[str, Any], right: Mapping[str, Any], gap: float) -> Cause | None:
    factor, where = _factor(values["gradients"], right["gradients"]), ""
    norms = values["norm"], right["norm"]
    if factor is None and all(norms) and abs(norms[0] / norms[1] - 1) > 1e-3 and gap < 1e-3 * min(norms):
        factor, where = norms[0] / norms[1], ", before clipping"
    return ("a wrong scale", f"the gradients are {factor:.4g} times what they should be{where}") if factor is not None else None


def _only(tensors: Mapping[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n in names}


def _size(tensors: Mapping[str, torch.Tensor]) -> float:
    return _distance(tensors, {n: torch.zeros(()) for n in tensors}) if tensors else 0.0


def _distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Euclidean, over the tensors that both have."""
    parts = [float((a[n].double() - b[n].double()).norm()) for n in a if n in b]
    return float(torch.tensor(parts, dtype=torch.float64).norm()) if parts else float("inf")


def _factor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float | None:
    """The factor c with a = c b, to a thousandth; None if there is none, or if c is 1."""
    both = [n for n in a if n in b]
    dot = sum(float((a[n].double() * b[n].double()).sum()) for n in both)
    square = sum(float(b[n].double().square().sum()) for n in both)
    if not square:
        return None
    factor = dot / square
    rest = sum(float((a[n].double() - factor * b[n].double()).square().sum()) for n in both) ** 0.5
    return factor if rest < 1e-3 * abs(factor) * square**0.5 and abs(factor - 1) > 1e-3 else None
