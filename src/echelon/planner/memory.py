"""Memory of a rank and time of an update under each layout. Each layout is traced in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from echelon.common.errors import EchelonError, PlanError
from echelon.common.machine import usable_cores
from echelon.common.terminal import columns
from echelon.common.traces import in_library
from echelon.launcher.local.server import die_with_parent
from echelon.loop.target import Target
from echelon.planner.devices import Device
from echelon.planner.links import Links
from echelon.planner.timeline import Timeline, fused, run_together, simulate
from echelon.planner.trace import BINS, KINDS
from echelon.planner.update import Model, trace_update

__all__ = [
    "PASSING",
    "Answer",
    "Job",
    "Setting",
    "all_traced",
    "duration",
    "equal_parts",
    "layouts_for",
    "lines",
    "plan_memory",
    "size",
    "state_by_formula",
    "traced",
]

# Memory that a trace does not see: the caching allocator cannot use all that it reserves (a tenth is assumed); CUDA's context,
# NCCL's buffers and cuBLAS's workspaces lie beside it (a GiB is assumed). Both are rules of thumb, not measurements.
_UNUSABLE, _BESIDE = 0.10, 2**30
_MOST_AT_A_TIME = 8  # processes that trace at the same time; each takes about half a GiB
PASSING = ("activations", "temporary")  # kinds of memory in proportion to the samples of a micro-batch, including logits


@dataclass(frozen=True)
class Picture:
    """An update in equal parts.

    Args:
        memory: for each part of equally many steps, bytes by `KINDS`.
        shares: by (kind, whether it is a collective): for each part of the time, the share that the kind takes.
    """

    memory: list[list[int]]
    shares: dict[tuple[str, bool], list[float]]


@dataclass(frozen=True)
class Answer:
    """The plan of a layout.

    Args:
        layout: as written for `layout=`.
        is_own: whether it is the script's own layout.
        model, parameters: the module's class, and the number of parameters of the whole model.
        peak: bytes at the fullest moment of an update; 0 if it could not be traced.
        reserved: bytes that CUDA's caching allocator would reserve; 0 on a CPU.
        by_kind: the bytes of the peak by kind.
        largest: the modules with the most activations at the peak, with bytes.
        moment: of the peak: forward, backward or optimizer, and the module.
        flops: of matrix products and attention, for an update on a rank.
        sent: bytes that a rank sends in an update.
        read: number of tensor values that the script read; they were made up.
        samples, tokens, micro_batches: of an update; samples and tokens on all ranks, micro-batches on each rank.
        seconds: of an update; this and the next three are empty without a device of known speed.
        busy: seconds of operators, by kind: product, attention, memory.
        waits: seconds in which operators waited for collectives, by kind.
        mfu: share of the device's peak that the model's own products and attention use, without recomputation.
        parameter_bytes: of the whole model.
        experts: the largest number that divides the experts of each layer of experts.
        recompute: repeated blocks were recomputed in the backward pass, instead of what the script recomputes.
        offload: shards of the state were in the host's memory, whatever the script says.
        by_hand: the script itself made its modules parallel, so only this layout can be planned.
        stages: of a pipeline, the peak of each stage; the other numbers are of the fullest, and times are means over all.
        dtype: of most products and attention.
        verdict: fits, at risk, does not fit; "" without a budget.
        why: the reason why it could not be traced.
        state: bytes of parameters, gradients and AdamW's moments on a rank, by a formula.
        picture: the update as the page draws it; `to_json` leaves it out.
    """

    layout: str
    is_own: bool
    model: str = ""
    parameters: int = 0
    peak: int = 0
    reserved: int = 0
    by_kind: dict[str, int] | None = None
    largest: list[tuple[str, int]] | None = None
    moment: str = ""
    flops: int = 0
    sent: int = 0
    read: int = 0
    samples: int = 0
    tokens: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    busy: dict[str, float] | None = None
    waits: dict[str, float] | None = None
    mfu: float = 0.0
    parameter_bytes: int = 0
    experts: int = 0
    recompute: bool = False
    offload: bool = False
    by_hand: bool = False
    stages: list[int] | None = None
    dtype: str = ""
    verdict: str = ""
    why: str = ""
    state: int = 0
    picture: Picture | None = None

    @property
    def rate(self) -> float:
        """Tokens a second on all devices, or samples if there are no tokens."""
        return (self.tokens or self.samples) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(replace(self, picture=None), dict_factory=lambda fields: {k: v for k, v in fields if k != "picture"})


@dataclass(frozen=True)
class Setting:
    """Where a script would train.

    Args:
        per_node: number of ranks of a node.
        budget: bytes of memory of a device.
        device: for estimates of time.
        precision: "fp32", "bf16", "fp16" or "float8"; replaces the script's own.
        planned_ranks: number of ranks for which micro-batches were sized; with fewer ranks, an update has more micro-batches.
        shapes: number of elements that a line of the script selects, where it depends on values: (("train.py:8", 64),).
    """

    ranks: int
    per_node: int = 8
    budget: int | None = None
    device: Device | None = None
    precision: str | None = None
    planned_ranks: int | None = None
    shapes: tuple[tuple[str, int], ...] = ()

    @property
    def is_gpu(self) -> bool:
        return self.device is None or self.device.overlaps


def layouts_for(ranks: int, per_node: int, experts: int = 0) -> list[str]:
    """The layouts that are tried beside a script's own, the simplest first.

    Args:
        experts: number of experts of a layer.
    """
    if ranks == 1:
        return []
    layouts = ["ddp", "zero1", "zero2", "fsdp"]
    if ranks > per_node and ranks % per_node == 0:
        layouts.append("hsdp")
    layouts += [f"dp_shard={ranks // tp},tp={tp}" for tp in (2, 4, 8) if tp <= per_node and ranks % tp == 0 and ranks > tp]
    if (ep := math.gcd(ranks, per_node, experts)) > 1 and experts:
        layouts.append(f"ep={ep}")
    return layouts


def plan_memory(target: Target, setting: Setting, *, layouts: Sequence[str] = (), only: str | None = None) -> list[Answer]:
    """Trace two updates of the script under each layout, as one rank of the setting's world. The script's own layout comes first.

    Args:
        layouts: layouts to try besides; by default `layouts_for`.
        only: trace only this layout; "yours" is the script's own.
    """
    if only is not None:
        return [traced(target, None if only == "yours" else only, setting)]
    own = traced(target, None, setting)
    if (own.by_hand and not layouts) or (own.why and not own.model):
        return [own]  # a script that failed before it gave a module would fail alike under each layout
    others = [layout for layout in layouts or layouts_for(setting.ranks, setting.per_node, own.experts) if layout != own.layout]
    return [own, *all_traced([Job(target, layout, setting) for layout in others])]


@dataclass(frozen=True)
class Job:
    """The task of a process that traces.

    Args:
        layout: None is the script's own.
        accumulation: number of micro-batches of an update; replaces the script's own.
        recompute: recompute repeated blocks in the backward pass, instead of what the script recomputes.
        offload: keep shards of the state in the host's memory, whatever the script says.
        rank: the rank as which it traces.
    """

    target: Target
    layout: str | None
    setting: Setting
    accumulation: int | None = None
    recompute: bool = False
    offload: bool = False
    rank: int = 0


def traced(
    target: Target, layout: str | None, setting: Setting, accumulation: int | None = None, *, recompute: bool = False
) -> Answer:
    """The plan of one layout; see `Job`."""
    return all_traced([Job(target, layout, setting, accumulation, recompute)])[0]


def all_traced(jobs: Sequence[Job]) -> list[Answer]:
    """Trace each job as rank 0, and a pipeline as one rank of each stage."""
    firsts = _in_processes(jobs)
    stages = [[replace(job, rank=rank) for rank in first.pipeline[1:]] for job, first in zip(jobs, firsts, strict=True)]
    others = iter(_in_processes([each for those in stages for each in those]))
    return [_answer(job, [first, *(next(others) for _ in those)]) for job, first, those in zip(jobs, firsts, stages, strict=True)]


@dataclass(frozen=True)
class _Rank:
    """The result of tracing one rank.

    Args:
        counted: number of micro-batches that were traced; not all of a pipeline's, whose passes repeat.
        own_flops: without recomputation.
        peak_flops: the device's peak FLOP/s.
    """

    answer: Answer
    pipeline: tuple[int, ...] = ()
    counted: int = 1
    timeline: Timeline | None = None
    own_flops: int = 0
    peak_flops: float = 0.0

    @property
    def times(self) -> float:
        """The factor from the traced micro-batches to those of the update."""
        return self.answer.micro_batches / self.counted if self.counted else 1.0


def _answer(job: Job, ranks: list[_Rank]) -> Answer:
    if failed := next((each.answer for each in ranks if each.answer.why), None):
        return failed
    made = max((each.answer for each in ranks), key=lambda answer: answer.peak)
    if ranks[0].timeline is not None:
        made = _timed(made, job.setting, ranks)
    if len(ranks) > 1:
        made = replace(
            made,
            stages=[each.answer.peak for each in ranks],
            sent=int(ranks[0].times * max(each.answer.sent for each in ranks)),
            flops=int(ranks[0].times * max(each.answer.flops for each in ranks)),
        )
    return replace(made, verdict=_verdict(made.peak, job.setting.budget)) if job.setting.budget and made.peak else made


def _timed(answer: Answer, setting: Setting, ranks: list[_Rank]) -> Answer:
    """Add the times to a plan; for a pipeline they are means over its stages."""
    timelines = [each.timeline for each in ranks if each.timeline is not None]
    more = ranks[0].times
    busy: defaultdict[str, float] = defaultdict(float)
    waits: defaultdict[str, float] = defaultdict(float)
    for timeline in timelines:
        for sums, parts in ((busy, timeline.busy), (waits, timeline.waits)):
            for kind, much in parts.items():
                sums[kind] += much * more / len(ranks)
    seconds = timelines[0].seconds
    if len(ranks) > 1:
        together = run_together(dict(zip(ranks[0].pipeline, timelines, strict=True)), _links(setting))
        # Once a pipeline is full, a micro-batch takes as long as the slowest stage needs for one.
        slowest = max(timeline.passes for timeline in timelines) / ranks[0].counted
        seconds = together + slowest * (answer.micro_batches - ranks[0].counted)
        waits["other stages"] = max(0.0, seconds - sum((*busy.values(), *waits.values())))
    own, available = more * sum(each.own_flops for each in ranks), seconds * sum(each.peak_flops for each in ranks)
    mfu = own / available if available else 0.0
    return replace(answer, seconds=seconds, busy=dict(busy), waits=dict(waits), mfu=mfu)


def _in_processes(jobs: Sequence[Job]) -> list[_Rank]:
    """Run each job in its own process, since a script changes its process for good; as many at a time as there are cores."""
    context, waiting = multiprocessing.get_context("fork"), list(enumerate(jobs))
    running: dict[Connection, tuple[int, Any]] = {}
    answers: dict[int, _Rank] = {}
    while waiting or running:
        while waiting and len(running) < min(usable_cores(), _MOST_AT_A_TIME):
            number, job = waiting.pop(0)
            receiver, there = context.Pipe(duplex=False)
            child = context.Process(target=_trace, args=(there, job))  # no daemon: its loader may have workers
            with warnings.catch_warnings(action="ignore"):  # about torch's threads, which the child does not use
                child.start()
            there.close()
            running[receiver] = number, child
        ready = connection.wait(list(running))
        for receiver in [each for each in running if each in ready]:
            number, child = running.pop(receiver)
            try:
                answers[number] = receiver.recv()
            except EOFError:
                child.join()
                why = f"its process ended with exit code {child.exitcode}, as the kernel's OOM killer ends one with -9"
                answers[number] = _Rank(Answer(jobs[number].layout or "", jobs[number].layout is None, why=why))
            child.join()
    return [answers[number] for number in range(len(jobs))]


def _trace(there: Connection, job: Job) -> None:
    result: _Rank
    die_with_parent(signal.SIGKILL)  # nobody would read the result
    os.dup2(2, 1)  # the script's output must not mix with the plan
    warnings.simplefilter("ignore")
    if job.rank:
        logging.disable(logging.WARNING)  # rank 0 gives the same warnings
    setting, blank = job.setting, Answer(job.layout or "", job.layout is None)

    def tell(model: Model) -> None:
        nonlocal blank
        blank = replace(
            blank,
            layout=model.layout,
            model=model.name,
            parameters=model.parameters,
            parameter_bytes=model.parameter_bytes,
            experts=model.experts,
            by_hand=model.by_hand,
            state=state_by_formula(model.layout, setting, model.parameter_bytes),
        )

    try:
        with contextlib.redirect_stdout(sys.stderr):
            planned = trace_update(
                job.target,
                job.layout,
                setting.ranks,
                per_node=setting.per_node,
                accumulation=job.accumulation,
                recompute=job.recompute,
                offload=job.offload,
                precision=setting.precision,
                planned_ranks=setting.planned_ranks,
                shapes=dict(setting.shapes),
                device=setting.device,
                budget=setting.budget,
                rank=job.rank,
                tell=tell,
            )
        trace = planned.traced
        made = replace(
            blank,
            peak=trace.peak,
            reserved=trace.reserved if setting.is_gpu else 0,
            by_kind=trace.by_kind,
            largest=list(trace.by_module.items())[:3],
            moment=f"{trace.moment} pass" + (f" of {trace.module}" if trace.module else ""),
            flops=trace.flops,
            sent=int(trace.sent()),
            read=planned.read,
            samples=planned.samples,
            tokens=planned.tokens,
            micro_batches=planned.micro_batches,
            dtype=trace.types.most_common(1)[0][0] if trace.types else "",
        )
        shares: dict[tuple[str, bool], list[float]] = {}
        result = _Rank(made, planned.pipeline, planned.counted)
        if setting.device is not None and setting.device.is_timed:
            steps = fused(trace.steps) if planned.is_compiled else trace.steps
            peak = setting.device.peak_of(made.dtype) if made.dtype else 0.0
            timeline = simulate(steps, setting.device, _links(setting))
            shares = dict(timeline.shares(BINS))
            timeline.spans.clear()
            result = replace(result, timeline=timeline, own_flops=trace.flops - trace.repeated, peak_flops=peak)
        result = replace(result, answer=replace(made, picture=Picture(trace.curve, shares)))
    except BaseException as error:
        result = _Rank(replace(blank, why=_said(error, job.layout is None)))
    there.send(result)
    there.close()
    os._exit(0)  # skips the script's exit functions, which would get tensors without memory


def _links(setting: Setting) -> Links:
    assert setting.device is not None
    return Links(setting.device, setting.per_node)


def _said(error: BaseException, is_own: bool) -> str:
    """The text of an error in the script, of an operation that needs values, or of a refusal. A refusal names the script's line
    only if the layout is the script's own.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    files = [(file, line) for file, line in frames if not file.startswith("<") and not in_library(file)]
    where = " at {}:{}".format(*files[-1]) if files else ""
    if isinstance(error, EchelonError):
        text, names = str(error), [f"{Path(file).name}:{line}" for file, line in files[-1:] if is_own]
        return " ".join([text, *(f"({name})" for name in names if name not in text)])
    kind = type(error)
    if kind.__module__.startswith("torch._subclasses"):
        return f"{error}{where} needs the values of a tensor, and a plan has shapes alone"
    return f"{kind.__name__}: {error}{where}"


def state_by_formula(layout: str, setting: Setting, parameter_bytes: int) -> int:
    """Bytes of parameters, gradients and AdamW's two moments on a rank, each divided by the ranks over which the layout splits
    it; 0 for an unknown layout. Source: Rajbhandari et al. 2020, "ZeRO", section 5.
    """
    ranks = setting.ranks
    by_word = {"none": (1, 1), "noop": (1, 1), "ddp": (1, 1), "zero1": (1, 1), "zero2": (1, ranks)}
    by_word |= {"zero3": (ranks, ranks), "fsdp": (ranks, ranks), "hsdp": (setting.per_node, setting.per_node)}
    if layout in by_word:
        parameters, gradients = by_word[layout]
        moments = ranks if layout == "zero1" else gradients
    else:
        sizes = [int(size) for size in re.findall(r"(?:dp_shard|tp|pp|cp)=([0-9]+)", layout)]
        if not sizes:
            return 0
        parameters = gradients = moments = math.prod(sizes)
    return sum(-(-parameter_bytes // over) for over in (parameters, gradients, moments, moments))


def _only_known_by_formula(answers: Sequence[Answer], ranks: int, budget: int | None) -> list[str]:
    table = [["layout", "at least"]]
    for each in answers:
        if each.state:
            over = budget is not None and each.state > budget
            table.append([f"{each.layout}{' (yours)' if each.is_own else ''}", size(each.state), *["does not fit"] * over])
    width = max(map(len, table))
    first = next(each for each in answers if each.state)
    return [
        f"{first.model}, {first.parameters:,} parameters, on {ranks} ranks. Nothing could be traced: {first.why}",
        "By formula a rank holds parameters, gradients and AdamW's moments:",
        "",
        *columns([[*row, *[""] * (width - len(row))] for row in table]),
        "",
        "Activations, gathered parameters and all that an operator needs for itself come on top: this is no plan.",
    ]


def _verdict(peak: int, budget: int) -> str:
    if peak * (1 + _UNUSABLE) + _BESIDE <= budget:
        return "fits"
    return "at risk" if peak <= budget else "does not fit"


def lines(answers: Sequence[Answer], ranks: int, device: str, budget: int | None) -> list[str]:
    """The plan as lines of text: a table, where the peak is, and what was left out.

    Raises:
        PlanError: nothing could be traced.
    """
    known = [each for each in answers if each.peak]
    if not known and any(each.state for each in answers):
        return _only_known_by_formula(answers, ranks, budget)
    if not known:
        raise PlanError(f"nothing could be traced: {answers[0].why}")
    kinds = [kind for kind in KINDS if any((each.by_kind or {}).get(kind) for each in known)]
    timed, unit = any(each.seconds for each in known), "tokens" if known[0].tokens else "samples"
    reserves = any(each.reserved for each in known)
    table = [["layout", "peak", *kinds, *["reserved"] * reserves, "sent"]]
    table[0] += ["update", f"{unit}/s/device", "MFU", "waits"] if timed else []
    table[0] += ["verdict"] if budget else []
    for each in known:
        sizes = [(each.by_kind or {}).get(kind, 0) for kind in kinds]
        more = (", recompute" if each.recompute and not each.is_own else "") + (", offload" if each.offload else "")
        name = f"{each.layout}{' (yours)' if each.is_own else more}"
        table.append([name, size(each.peak), *map(size, sizes), *[size(each.reserved)] * reserves, size(each.sent)])
        if timed:
            table[-1] += [duration(each.seconds), f"{each.rate / ranks:,.4g}", f"{each.mfu:.1%}", _most_waited(each)]
        table[-1] += [each.verdict] if budget else []
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    words = {0, len(widths) - 1} if budget else {0}  # the other columns are numbers
    table = [[cell if at in words else cell.rjust(widths[at]) for at, cell in enumerate(row)] for row in table]
    of = f" of {size(budget)}" if budget else ""
    first = known[0]
    on = f"{device or 'a device'}{of}"
    of_what = "memory and time" if timed else "memory"
    made = [f"{first.model}, {first.parameters:,} parameters, on {ranks} ranks: {of_what} of a rank in an update, on {on}"]
    made += ["", *columns(table), ""]
    most = ", ".join(f"{name or 'outside of modules'} {size(much)}" for name, much in first.largest or [])
    made.append(f"{first.layout} is fullest in the {first.moment}; most activations then: {most or 'none'}.")
    if first.seconds:
        parts = {**(first.busy or {}), **{f"waiting for {kind}": much for kind, much in (first.waits or {}).items()}}
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        took = ", ".join(f"{name} {much / first.seconds:.0%}" for name, much in ordered if much >= first.seconds / 200)
        made.append(f"{first.layout}: {duration(first.seconds)} are {took}.")
    for each in known:
        if each.stages:
            peaks = ", ".join(map(size, each.stages))
            made.append(f"{each.layout}: memory is that of its fullest stage, of {peaks}; times are means over the stages.")
    unknown: defaultdict[str, list[str]] = defaultdict(list)
    for each in answers:
        if not each.peak:
            unknown[each.why].append(each.layout or "yours")
    made += [f"Not traced: {'; '.join(those)}. {why}" for why, those in unknown.items()]
    if first.read:
        made.append(f"The script read {first.read} values of tensors, which a plan does not have: they were taken to be 1.")
    if first.seconds and first.dtype == "float32":
        made.append("The script computes in float32. --precision bf16 plans it under autocast.")
    made.append(
        "Traced: two updates of the script, eager, with the kernels of CPUs. Beside it lie CUDA's context and the workspaces "
        "of NCCL and cuBLAS; a peak within a tenth and a GiB of the budget is at risk."
    )
    if not any(each.verdict == "fits" for each in known) and budget:
        least = min(known, key=lambda each: each.peak)
        made.append(f"None is sure to fit. {least.layout} needs least, {_remedy(least, ranks, budget)}")
    return made


def _most_waited(answer: Answer) -> str:
    waits = answer.waits or {}
    kind = max(waits, key=lambda each: waits[each], default="")
    return f"{sum(waits.values()) / answer.seconds:.0%} {kind}" if kind else "0%"


def duration(seconds: float) -> str:
    """A time as text."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _remedy(answer: Answer, ranks: int, budget: int) -> str:
    """By how much the layout is too large, and roughly what would fit."""
    kinds, usable = answer.by_kind or {}, int((budget - _BESIDE) / (1 + _UNUSABLE))
    if usable <= 0:
        return f"{size(answer.peak)} beside the {size(_BESIDE)} of CUDA and NCCL. Take a device with more memory."
    over = f"{size(answer.peak - usable)} too much to be sure."
    passing = sum(kinds.get(kind, 0) for kind in PASSING)
    held = answer.peak - passing
    if held < usable:
        many, most = -(-passing * answer.micro_batches // (usable - held)), max(1, answer.samples // ranks)
        if many <= most:
            many = equal_parts(most, many)
            return f"{over} Give about accumulate={many} in place of {answer.micro_batches}, or recompute='blocks'."
        return f"{over} Give recompute='blocks', or split layers or sequences (tp, cp): one sample's activations are too large."
    split = sum(kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
    room = usable - (answer.peak - split)
    if room > 0:
        return f"{over} Take about {-(-ranks * split // room)} ranks, over which a layout such as fsdp splits the model's state."
    return f"{over} Take more ranks, and give recompute='blocks' or smaller micro-batches (accumulate=)."


def equal_parts(rows: int, least: int) -> int:
    """The smallest number of equal parts of `rows`, at least `least`."""
    return next((each for each in range(least, rows) if rows % each == 0), rows)


def size(number: int) -> str:
    """A number of bytes as text."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 2**10:.1f} KiB" if number else "0"
