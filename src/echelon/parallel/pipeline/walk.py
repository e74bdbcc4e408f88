"""Send one batch through all stages in turn: to learn which tensors they exchange, to evaluate and to predict.

A stage starts with absent tensors in place of the outputs it has not received. When its units, its loss or an `if` ask for the
values of an absent tensor, the pass ends, and begins again when its sources have arrived.

Trial passes have no lasting effect: RNG state and buffers are restored. Communication: for each stage an agreement and the needed
tensors, once more each time that the stage turns out to need more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.common.errors import EchelonError, PipelineError
from echelon.parallel.pipeline.gates import Cut
from echelon.parallel.pipeline.passes import Run
from echelon.parallel.pipeline.trial import Escapes, KeptByUnits, Trials, compute, leaves, same
from echelon.parallel.pipeline.values import Form, Needed, Unsendable, form_of
from echelon.world import agree, rng

__all__ = ["Needs", "Walk", "Walked", "to_all"]


@dataclass(frozen=True)
class Needs:
    """The calls whose outputs the stages exchange for batches of one structure.

    Args:
        calls: by stage, the calls of earlier stages' units that it needs.
        written: the calls whose outputs are written into in place.
    """

    calls: list[set[str]]
    written: set[str]

    def after(self, stage: int) -> set[str]:
        return set().union(*self.calls[stage + 1 :])


@dataclass
class Walked:
    """The result of a walk.

    Args:
        forms: by call of a unit, the form of its outputs.
        value: the value that `act` returned on the last stage, on all ranks of the pipeline; None unless it was shared.
        result: the form of that value.
    """

    forms: dict[str, Form]
    needs: Needs
    value: Any
    result: Form


# Computes a stage and reports on it. Called with the stage, the received outputs, the forms of earlier outputs, and `act`.
_Pass = Callable[[int, dict[str, Any], dict[str, Form], Callable[[], Any]], dict[str, Any]]


@dataclass
class Walk:
    """Passes a batch through the stages.

    Args:
        group: the ranks of the pipeline.
        ranks: by stage, the rank within `group` that has it.
    """

    module: nn.Module
    cut: Cut
    group: dist.ProcessGroup | None
    ranks: list[int]
    device: torch.device
    _held: dict[str, tuple[Form, list[torch.Tensor]]] = field(default_factory=dict)
    _value: Any = None  # the last stage's

    def __post_init__(self) -> None:
        self._trials = Trials(self.module, self.cut)

    def study(self, act: Callable[[], Any], known: Needs | None = None) -> Walked:
        """Find out which calls each stage needs. Collective over all ranks of the job, which must have batches of the same
        structure.

        Args:
            known: the needs for a batch of the same structure: one plain pass then shows the forms for this batch.
        """

        def watched() -> Any:
            with RefuseCollectives(self.cut.kind, self.group):
                return act()

        with self._whole(), self._trials.undone(), torch.enable_grad():
            return self._through(watched, known, self._studied if known is None else self._passed)

    def evaluate(self, act: Callable[[], Any], needs: Needs) -> Any:
        """Return on all ranks what `act` returns on the last stage. Values that cannot be sent, such as objects, become None."""
        with self._whole():
            return self._through(act, needs, partial(self._computed, share=True), share=True).value

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        return self.cut.whole() if agree.is_alone() else contextlib.nullcontext()

    def _rank_of(self, stage: int) -> int:
        """The rank within the group that computes the stage. This one in a world whose other ranks do not exist."""
        return dist.get_rank(self.group) if agree.is_alone() else self.ranks[stage]

    def _through(self, act: Callable[[], Any], known: Needs | None, pass_of: _Pass, *, share: bool = False) -> Walked:
        forms: dict[str, Form] = {}
        needs = Needs([set() for _ in range(self.cut.count)], set())
        if known is not None:
            needs = Needs([set(each) for each in known.calls], set(known.written))
        value: Any = None
        stage_report: dict[str, Any] = {}
        changed: dict[str, list[str]] = {}
        aliases: list[list[str]] = []
        for stage in range(self.cut.count):
            received: dict[str, Any] = {}
            have: set[str] = set()
            while True:
                self._move(sorted(needs.calls[stage] - have), stage, forms, received)
                have |= needs.calls[stage]
                report = partial(pass_of, stage, received, forms, act)
                reports = self._on_all(stage, stage in self.cut.own, report, everywhere=not share)
                needs.calls[stage].update(call for each in reports for call in each.get("more", ()))
                if needs.calls[stage] <= have:
                    break
            stage_report = next(each for each in reports if each.get("here"))
            for unit, *attribute in stage_report["kept"]:
                self.cut.kept.setdefault(unit, {}).setdefault(tuple(attribute[:2]), tuple(attribute[2:]))
            forms |= {call: Form.from_json(form) for call, form in stage_report["forms"].items()}
            needs.written.update(call for each in reports for call in each.get("wrote", ()))
            aliases += stage_report["aliases"]
            for name, sum_of in stage_report["changed"].items():
                changed.setdefault(name, []).append(sum_of)
        self._trials.refuse_lost(changed)
        self._refuse_written(needs, aliases)
        result = Form.from_json(stage_report["result"])
        if share:
            tensors = self._held["result"][1] if "result" in self._held else []
            value = to_all(self._value, result, tensors, self.group, self._rank_of(self.cut.count - 1), self.device)
            self._value = None
        self._held.clear()
        return Walked(forms, needs, value, result)

    def _refuse_written(self, needs: Needs, aliases: list[list[str]]) -> None:
        """Refuse in-place writes that a later stage cannot repeat."""
        for calls in aliases:
            written = [call for call in calls if call in needs.written]
            if len(written) > 1 and not needs.after(0).isdisjoint(calls):
                names = " and ".join(dict.fromkeys(call.rpartition(":")[0] for call in written))
                raise PipelineError(
                    f"{self.cut.kind} writes in place into outputs of {names}, which share memory: later stages of a pipeline "
                    "receive separate copies and cannot repeat these writes. Make a new tensor: x = x + y."
                )

    # --- this rank's part

    def _studied(self, stage: int, received: dict[str, Any], forms: dict[str, Form], act: Callable[[], Any]) -> dict[str, Any]:
        """Run a trial pass twice, and refuse a stage whose passes differ."""
        escapes = Escapes(unit for unit in self.cut.units if unit.stage == stage < self.cut.count - 1)
        kept, counts = KeptByUnits(unit for unit in self.cut.units if unit.stage == stage), [self._trials.counts()]
        try:
            run = Run(stage, received, forms, leaving=escapes.stage_ends)
            with self._trials.repeated(), self.cut.listed(), escapes.watched():
                value = compute(self.cut, run, act)
            # Copies: a detached tensor keeps its base, and with it the graph.
            seen = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves(run, value)]
            del run, value
            counts.append(self._trials.counts())
            self._refuse_kept(stage, escapes)
            run = Run(stage, received, forms)
            with self._trials.repeated(), self.cut.listed():
                value = compute(self.cut, run, act)
            report = self._report(run, value) | {"kept": kept.found()}
            counts.append(self._trials.counts())
            # Numbers that each pass changes, outside of the units.
            counted = [name for name, value in counts[2].items() if len({each.get(name) for each in counts} | {value}) > 2]
            report["changed"] |= dict.fromkeys(counted, "")
            if len(self.cut.own) > 1 and report["changed"]:
                self._refuse_accumulated(counted, report["changed"], lambda: compute(self.cut, Run(stage, received, forms), act))
        except Needed as needed:
            return {"more": sorted(needed.sources.calls)}
        if not same(seen, leaves(run, value)):
            raise PipelineError(
                f"stage {stage} of {self.cut.kind} must give the same for the same batch, but its output changes from call "
                "to call: a pipeline learns by repeated calls what its stages need. If a module keeps a value between calls, "
                "make it a buffer; if it draws from a generator of its own, use torch's default RNG."
            )
        return report

    def _refuse_accumulated(self, counted: list[str], changed: dict[str, str], go_through: Callable[[], Any]) -> None:
        """Refuse numbers and buffers outside of the units that change again with every pass."""
        with rng.unchanged():
            go_through()
        again = self._trials.changed()
        if names := counted or [name for name, value in again.items() if changed.get(name) != value]:
            raise PipelineError(
                f"{self.cut.kind}.{names[0]}, which lies in no stage, is changed by each pass, and a rank with "
                f"{len(self.cut.own)} stages makes as many passes with each batch. Use a schedule with one stage per rank, such "
                "as '1f1b'; or register a buffer in a module that lies in one stage, and count in on_train_step_end."
            )

    def _refuse_kept(self, stage: int, escapes: Escapes) -> None:
        if names := escapes.found():
            raise PipelineError(
                f"stage {stage} of {self.cut.kind} keeps something that {', '.join(names[:4])} computed, beside the outputs: in "
                "an attribute, in a list, or caught by a hook. It requires gradients, and later stages, on other ranks, would "
                "not see it. Return it with the outputs of forward, or detach() it if no loss uses it. Models of transformers "
                "keep such tensors for output_hidden_states, output_attentions and output_router_logits."
            )

    def _passed(self, stage: int, received: dict[str, Any], forms: dict[str, Form], act: Callable[[], Any]) -> dict[str, Any]:
        with self._trials.repeated(), self.cut.listed():
            return self._computed(stage, received, forms, act)

    def _computed(
        self, stage: int, received: dict[str, Any], forms: dict[str, Form], act: Callable[[], Any], *, share: bool = False
    ) -> dict[str, Any]:
        self.cut.draws.begin(0)
        run = Run(stage, received, forms)
        try:
            return self._report(run, compute(self.cut, run, act), share=share)
        except Needed as needed:
            return {"more": sorted(needed.sources.calls)}

    def _report(self, run: Run, value: Any, *, share: bool = False) -> dict[str, Any]:
        facts: dict[str, Any] = {"here": True, "forms": {}, "result": None, "changed": self._trials.changed()}
        facts |= {"kept": [], "aliases": run.aliases(), "wrote": sorted(run.wrote())}
        for call in run.gave:
            try:
                form, tensors = form_of(run.to_send(call))
            except Unsendable as error:
                if run.stage == self.cut.count - 1:
                    continue
                raise PipelineError(
                    f"{self.cut.kind}.{call.rpartition(':')[0]} returns a {error} among its outputs, but only tensors and plain "
                    "values can pass between the stages of a pipeline. Leave it out, for example with use_cache=False."
                ) from None
            facts["forms"][call] = form.to_json()
            self._held[call] = form, [t.detach() for t in tensors]
        if run.stage == self.cut.count - 1:
            form, tensors = form_of(value, lossy=True)
            facts["result"] = form.to_json()
            if share:
                self._held["result"] = form, [t.detach() for t in tensors]
                self._value = value
        return facts

    # --- between ranks

    def _on_all(
        self, stage: int, has_stage: bool, act: Callable[[], dict[str, Any]], *, everywhere: bool
    ) -> list[dict[str, Any]]:
        """Run `act` on the ranks of a stage and gather its reports on all ranks. An error on one rank is raised on all.

        Args:
            everywhere: gather from all ranks of the job, not only this pipeline's.
        """
        facts: dict[str, Any] = {}
        own: Exception | None = None
        if has_stage:
            try:
                facts = act()
            except Exception as error:  # of the user's code: the other ranks must not wait for this one
                if not isinstance(error, EchelonError) and dist.get_world_size() > dist.get_world_size(self.group):
                    raise  # perhaps on this rank alone: ranks that share the stage then wait in `act` and would not gather
                own, facts = error, {"error": [agree.rank(), *agree.in_json(error)]}
        every = agree.gather(facts, None if everywhere else self.group)
        if own is not None:
            raise own
        if failed := next((each["error"] for each in every if "error" in each), None):
            raise agree.told_error(f"stage {stage} of {self.cut.kind}", *failed)
        if everywhere and not agree.is_alone():
            members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            of_stage = every[members[self.ranks[stage]]]
            every = [of_stage, *({key: each[key] for key in ("wrote", "more") if key in each} for each in every)]
        return every

    def _move(self, calls: list[str], stage: int, forms: dict[str, Form], received: dict[str, Any]) -> None:
        """Send the outputs of these calls from the ranks that hold them to the rank that computes the stage."""
        me, there = dist.get_rank(self.group), self._rank_of(stage)
        for call in calls:
            source = self._rank_of(self.cut.stage_of[call.rpartition(":")[0]])
            if me == source:
                tensors = self._held[call][1]
            else:
                tensors = [leaf.empty(self.device) for leaf in forms[call].tensors] if me == there else []
            for tensor in tensors if source != there else ():
                if me == source:
                    dist.send(tensor.contiguous(), group=self.group, group_dst=there)
                elif me == there:
                    dist.recv(tensor, group=self.group, group_src=source)
            if me == there:
                kinds = forms[call].tensors
                learns = torch.is_grad_enabled()
                leaves = [t.detach().requires_grad_(kind.grad and learns) for t, kind in zip(tensors, kinds, strict=True)]
                received[call] = forms[call].filled(leaves)


def to_all(value: Any, form: Form, tensors: list[torch.Tensor], group: Any, source: int, device: torch.device) -> Any:
    """The value of one rank on all ranks of the group. Collective.

    Args:
        value, tensors: the value and its tensors; only those of `source` are read.
        form: of the value, on all ranks.
        source: the rank within the group.
    """
    is_source = dist.get_rank(group) == source
    sent = [t.detach().contiguous() for t in tensors] if is_source else [leaf.empty(device) for leaf in form.tensors]
    for tensor in sent:
        dist.broadcast(tensor, group=group, group_src=source)
    return value if is_source else form.filled(sent)


class RefuseCollectives(TorchDispatchMode):
    """Context in which a collective with a rank of another stage is an error: it would hang, or meet another collective.

    torch 2.13 has no public name for TorchDispatchMode. Patched functions of torch.distributed would not reach code that has
    imported the originals by name.

    Args:
        kind: the module's class.
        group: the ranks of the pipeline.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind, self._others = kind, {*dist.get_process_group_ranks(group or dist.group.WORLD)} - {dist.get_rank()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (ranks := _ranks(args)) & self._others:
            name = func.__name__.partition(".")[0].strip("_")
            raise PipelineError(
                f"compute_loss, or the forward of {self._kind}, must leave out collectives with ranks of other stages, which do "
                f"not come to them, got {name} over ranks {', '.join(map(str, sorted(ranks)[:8]))}. Communicate only among ranks "
                "of the same stage, which have other samples, or train without pp; compute sums for a log in on_train_step_end."
            )
        return func(*args, **(kwargs or {}))


def _ranks(args: Any) -> set[int]:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(each)))
            except RuntimeError:  # a ReduceOp
                continue
    return set()
