"""One batch through all stages, one after the other: to learn what passes between them, to evaluate and to predict.

What a stage needs of earlier ones is found by experiment, in the first passes with a batch of a new structure:

    1. With stand-ins for everything earlier, leaves of autograd's graph: what does that which leaves the stage depend on?
    2. With that received, and nan for the rest; then with 0 for the rest. If the two do not give the same, something is used
       behind autograd's back, such as a mask: it is found one by one, and is needed, too.

Nothing stays of these passes: RNG state and buffers are put back. Communication: two agreements and the needed tensors in each
stage; later walks one agreement in each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from echelon.contracts import errors
from echelon.contracts.errors import EchelonError, UsageError
from echelon.parallel.pipeline.collectives import RefuseCollectives
from echelon.parallel.pipeline.escapes import Escapes
from echelon.parallel.pipeline.gates import Cut, Run, reached
from echelon.parallel.pipeline.trial import Trials, compute, leaves, same
from echelon.parallel.pipeline.values import Form, Unsendable, form_of
from echelon.world import agree

__all__ = ["Needs", "Walk", "Walked"]

# By stage, the calls of earlier stages' units that it needs.
Needs = list[set[str]]


@dataclass
class Walked:
    """What a walk has found.

    Args:
        forms: of all calls of units, by call.
        value: what `forward` gave on the last stage, on all ranks of the pipeline.
        result: its form.
    """

    forms: dict[str, Form]
    needs: Needs
    value: Any
    result: Form


@dataclass
class Walk:
    """Passes a batch through the stages.

    Args:
        group: the ranks of the pipeline; `ranks` has the one of each stage, by its place in the group.
        solid: whether placeholders need memory of their own: set when the author's code turns out to write into them.
    """

    module: nn.Module
    cut: Cut
    group: dist.ProcessGroup | None
    ranks: list[int]
    device: torch.device
    solid: bool = False
    _held: dict[str, tuple[Form, list[torch.Tensor]]] = field(default_factory=dict)
    _value: Any = None  # of the last stage

    def __post_init__(self) -> None:
        self._trials = Trials(self.module, self.cut)

    def study(self, act: Callable[[], Any]) -> Walked:
        """Find out what each stage needs. Collective over all ranks of the job, which have batches of the same structure."""
        watched = partial(self._alone, RefuseCollectives(self.cut.kind, self.group), act)
        with self._trials.undone(), torch.enable_grad():
            return self._through(watched, None)

    @staticmethod
    def _alone(watch: RefuseCollectives, act: Callable[[], Any]) -> Any:
        with watch:
            return act()

    def again(self, act: Callable[[], Any], needs: Needs) -> Walked:
        """Shapes of a batch of known structure. Collective over the pipeline."""
        with self._trials.undone(), torch.enable_grad():
            return self._through(act, needs)

    def evaluate(self, act: Callable[[], Any], needs: Needs) -> Any:
        """What `act` gives on the last stage, on all ranks. What cannot be sent, such as an object, is None elsewhere."""
        walked = self._through(act, needs, share=True)
        return walked.value

    def owner(self, call: str) -> int:
        return self.ranks[self.cut.stage_of[call.rpartition(":")[0]]]

    def _through(self, act: Callable[[], Any], known: Needs | None, *, share: bool = False) -> Walked:
        forms: dict[str, Form] = {}
        needs: Needs = [set(each) for each in known] if known is not None else [set() for _ in range(self.cut.count)]
        received: dict[str, Any]
        value: Any = None
        told: dict[str, Any] = {}
        changed: dict[str, list[str]] = {}
        for stage in range(self.cut.count):
            mine, received = stage in self.cut.own, {}
            if known is None and stage:
                found = self._on_all(stage, mine, partial(self._needed, stage, forms, act), True)
                needs[stage] |= {call for each in found for call in each.get("needs", ())}
            have: set[str] = set()
            while True:
                self._move(sorted(needs[stage] - have), stage, forms, received)
                have |= needs[stage]
                if known is None:
                    report = partial(self._compared, stage, forms, received, set(have), act)
                else:
                    report = partial(self._computed, stage, forms, received, act, share)
                found = self._on_all(stage, mine, report, known is None)
                more = {call for each in found for call in each.get("more", ())}
                if not more - have:
                    break
                needs[stage] |= more
            told = next(each for each in found if each.get("here"))
            forms |= {call: Form.from_json(form) for call, form in told["forms"].items()}
            for name, sum_of in told["changed"].items():
                changed.setdefault(name, []).append(sum_of)
        self._trials.refuse_lost(changed)
        result = Form.from_json(told["result"])
        if share:
            value = self._shared(result)
        self._held.clear()
        return Walked(forms, needs, value, result)

    # --- this rank's part

    def _pass(self, run: Run, act: Callable[[], Any]) -> Any:
        run.solid = self.solid
        try:
            return compute(self.cut, run, act)
        except RuntimeError as error:
            if self.solid and "single memory location" in str(error):
                raise UsageError(
                    f"{self.cut.kind} writes into a parameter of another stage than stage {run.stage}, where it is not, or into "
                    f"what it has expanded itself. Let each module write into its own, within its forward. torch says: {error}"
                ) from error
            if self.solid or not any(word in str(error) for word in ("in-place", "single memory location")):
                raise
        self.solid = True
        fresh = Run(run.stage, run.received, run.forms, run.fills, True, run.tracked, leaving=run.leaving)
        value = self._pass(fresh, act)
        run.gave, run.stood_in = fresh.gave, fresh.stood_in
        return value

    def _needed(self, stage: int, forms: dict[str, Form], act: Callable[[], Any]) -> dict[str, Any]:
        with self._trials.repeated():
            run = Run(stage, forms=forms, tracked=True)
            value = self._pass(run, act)
        outputs = [t for t in pytree.tree_leaves([list(run.gave.values()), value]) if isinstance(t, torch.Tensor)]
        exact = {call for call, ts in run.stood_in.items() if any(not t.requires_grad for t in ts)}  # a stand-in is no mask
        return {"needs": sorted(reached(outputs, run.stood_in) | exact)}

    def _compared(
        self, stage: int, forms: dict[str, Form], received: dict[str, Any], have: set[str], act: Callable[[], Any]
    ) -> dict[str, Any]:
        """Whether what is not received matters; what of it does. What it does not find, it reports of the pass."""
        nan, zero = float("nan"), 0.0
        rest = [call for call in forms if call not in have]

        def once(fills: dict[str, float], leaving: Callable[[], None] = lambda: None) -> tuple[Run, Any]:
            run = Run(stage, received, forms, fills, leaving=leaving)
            with self._trials.repeated(), self.cut.listed():
                return run, self._pass(run, act)

        escapes = Escapes(unit for unit in self.cut.units if unit.stage == stage < self.cut.count - 1)
        with escapes.watched():
            first, value = once(dict.fromkeys(rest, nan), escapes.stage_ends)
        # Copies: what is detached has its origin, and the graph with it.
        seen = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves(first, value)]
        del first, value
        self._refuse_kept(stage, escapes)
        self.cut.fill_weights(zero)
        try:
            other, value = once(dict.fromkeys(rest, zero))
        finally:
            self.cut.fill_weights(nan)
        if not same(seen, leaves(other, value)):
            base = leaves(*once(dict.fromkeys(rest, zero)))
            if not same(base, leaves(*once(dict.fromkeys(rest, zero)))):
                raise self._changing(stage)
            if not same(base, leaves(other, value)):
                raise UsageError(
                    f"stage {stage} of {self.cut.kind} uses a parameter of another stage outside of its module. Cut so that both "
                    "are in one stage, or tie it to a parameter of a module that is called there: stages=. A penalty on all "
                    "parameters is the optimizer's: weight_decay."
                )
            more = [call for call in rest if not same(base, leaves(*once({**dict.fromkeys(rest, zero), call: nan})))]
            if not more and not rest:
                raise self._changing(stage)
            return {"more": more or rest}
        return self._report(stage, other, value)

    def _changing(self, stage: int) -> UsageError:
        return UsageError(
            f"stage {stage} of {self.cut.kind} must give the same for the same batch, but what it gives changes from call to "
            "call: a pipeline learns by repeated calls what its stages need of one another. Does a module keep a value between "
            "calls, or draw from a generator of its own? Let it be a buffer, and torch's own RNG."
        )

    def _refuse_kept(self, stage: int, escapes: Escapes) -> None:
        if names := escapes.found():
            raise UsageError(
                f"stage {stage} of {self.cut.kind} keeps something that {', '.join(names[:4])} computed, beside the outputs: an "
                "attribute, an entry of a list, what a hook has caught. It requires gradients, and later stages, on other ranks, "
                "would not see it. Pass it on with what forward returns; or detach() it, if no loss uses it. Models of "
                "transformers do so for output_hidden_states, output_attentions and output_router_logits."
            )

    def _computed(
        self, stage: int, forms: dict[str, Form], received: dict[str, Any], act: Callable[[], Any], share: bool
    ) -> dict[str, Any]:
        self.cut.draws.begin(0)
        run = Run(stage, received, forms)
        return self._report(stage, run, self._pass(run, act), share=share)

    def _report(self, stage: int, run: Run, value: Any, *, share: bool = False) -> dict[str, Any]:
        told: dict[str, Any] = {"here": True, "forms": {}, "result": None, "changed": self._trials.changed()}
        for call, given in run.gave.items():
            try:
                form, tensors = form_of(given)
            except Unsendable as error:
                if stage == self.cut.count - 1:
                    continue
                raise UsageError(
                    f"{self.cut.kind}.{call.rpartition(':')[0]} returns a {error} among its outputs, and only tensors and plain "
                    "values pass between the stages of a pipeline. Leave it out, as with use_cache=False."
                ) from None
            told["forms"][call] = form.to_json()
            self._held[call] = form, [t.detach() for t in tensors]
        if stage == self.cut.count - 1:
            form, tensors = form_of(value, lossy=True)
            told["result"] = form.to_json()
            if share:
                self._held["result"] = form, [t.detach() for t in tensors]
                self._value = value
        return told

    # --- between ranks

    def _on_all(self, stage: int, mine: bool, act: Callable[[], dict[str, Any]], everywhere: bool) -> list[dict[str, Any]]:
        """What the ranks of a stage report, told to all; what fails on one fails on all.

        Args:
            everywhere: ask all ranks of the job, not only this pipeline's.
        """
        told: dict[str, Any] = {}
        own: Exception | None = None
        if mine:
            try:
                told = act()
            except Exception as error:  # of the user's code: the other ranks must not wait for this one
                own, told = error, {"error": [type(error).__name__, str(error)]}
        every = agree.gather(told, None if everywhere else self.group)
        if own is not None:
            raise own
        if failed := next((each["error"] for each in every if "error" in each), None):
            kind = getattr(errors, failed[0], None)
            if isinstance(kind, type) and issubclass(kind, EchelonError):
                raise kind(failed[1])
            raise EchelonError(f"stage {stage} of {self.cut.kind} failed: {failed[0]}: {failed[1]}")
        if everywhere:
            members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            here = every[members[self.ranks[stage]]]
            every = [here, *({key: each[key] for key in ("needs", "more") if key in each} for each in every)]
        return every

    def _move(self, calls: list[str], stage: int, forms: dict[str, Form], received: dict[str, Any]) -> None:
        """Send these from the ranks that hold them to the one that computes the stage."""
        me, there = dist.get_rank(self.group), self.ranks[stage]
        for call in calls:
            source = self.owner(call)
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

    def _shared(self, result: Form) -> Any:
        """The last stage's value, on all ranks."""
        source = self.ranks[-1]
        is_source = dist.get_rank(self.group) == source
        tensors = self._held["result"][1] if is_source else [leaf.empty(self.device) for leaf in result.tensors]
        for tensor in tensors:
            dist.broadcast(tensor.contiguous(), group=self.group, group_src=source)
        if is_source:
            value, self._value = self._value, None
            return value
        return result.filled(tensors)
