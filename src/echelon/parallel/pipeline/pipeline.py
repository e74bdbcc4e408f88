"""A module in stages over ranks: the micro-batches of an update pass through the stages under one of torch's schedules.

Communication: between neighbouring stages, the tensors that a later stage needs, and their gradients. In each window an
agreement on the shapes of its micro-batches, and a broadcast of the losses.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from echelon.common.errors import EchelonError, PipelineError
from echelon.parallel.gradients.clip import pass_zeros
from echelon.parallel.guards.messages import explained
from echelon.parallel.patching import for_now
from echelon.parallel.pipeline.gates import Cut
from echelon.parallel.pipeline.passes import Run
from echelon.parallel.pipeline.schedules import Kind, StageModule, parts, torch_schedule
from echelon.parallel.pipeline.trial import compute
from echelon.parallel.pipeline.values import Form, Leaf, Unsendable, form_of, shape_of_batch
from echelon.parallel.pipeline.walk import Needs, Walk, Walked, to_all
from echelon.parallel.prepared import Batches, MicroBatch
from echelon.parallel.shards import local
from echelon.world import agree

__all__ = ["Learned", "Pipeline", "Shared"]

logger = logging.getLogger(__name__)

_MOST_SCHEDULES = 16  # each keeps receive buffers
_MOST_KINDS = 256  # kinds of micro-batches to remember; each takes some kilobytes


class Pipeline:
    """The stages of this rank, and the passes through all stages.

    Attributes:
        group: the ranks of the pipeline.
        has_last: whether this rank has the last stage, which computes the losses.
        batches: the `Batches` of the layout. `dry_run` is set in it during trial passes.
    """

    def __init__(
        self, module: nn.Module, cut: Cut, kind: Kind, ranks: list[int], group: dist.ProcessGroup | None, shared: Shared
    ) -> None:
        self.module, self.cut, self.kind, self.ranks, self.group, self.shared = module, cut, kind, ranks, group, shared
        self.has_last = cut.count - 1 in cut.own
        self._walk = Walk(module, cut, group, ranks, cut.device)
        self._needs: OrderedDict[Any, Needs] = OrderedDict()  # of evaluations, by structure
        self._learned: OrderedDict[Any, Learned] = OrderedDict()  # by kind, the latest last
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._under_way: Window | None = None
        # The trained parameters and the flags, as the ranks last compared them: of this rank, and digests of all ranks.
        self._compared: tuple[Any, Any] = (None, None)
        self._of_all: tuple[Any, Any] = ((), ())
        self.batches = Batches()

    # --- training

    def window(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], Made],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
        before_backward: Callable[[bool, int], None] | None,
        *,
        share: bool,
    ) -> list[Made]:
        """Run all micro-batches of an update under the schedule. Collective over all ranks of the job.

        Args:
            before_backward: called before each backward pass, with whether it is its stage's last in the window, and the number
                of backward passes before it.
            share: whether all ranks need the outputs that `compute_loss` returns besides the loss.
        """
        signatures, begins, unknown, number = self._agreed([each.data for each in micro_batches])
        for i in unknown:
            self._learn(signatures[i], micro_batches[i], forward)
        under_way = Window(list(micro_batches), forward, backward, before_backward)
        with for_now(self, _under_way=under_way), self.cut.draws.passes(number):
            for first, last in zip(begins, [*begins[1:], len(micro_batches)], strict=True):
                for size in parts(self.kind, last - first, self._pp):
                    self._run(signatures[first], first, size)
                    first += size
        # A pass that failed on any rank must fail on all before the gradients are used.
        agree.fail_together(under_way.wrong, f"a stage of {self.cut.kind}")
        while len(self._learned) > max(_MOST_KINDS, len(micro_batches)):
            self._learned.popitem(last=False)
        self.shared.sum_gradients()
        return self._told(under_way, self._learned[signatures[0]].loss, share)

    @functools.cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """Cached in the first window, when the module has its final form."""
        return list(self.module.parameters())

    @functools.cached_property
    def _roots(self) -> list[nn.Module]:
        """The modules whose code runs between the units, and the units."""
        inside = {part for unit in self.cut.units for part in unit.module.modules() if part is not unit.module}
        return [part for part in self.module.modules() if part not in inside]

    def _flags(self) -> tuple[bool, ...]:
        """The bool attributes that may change the path of the author's code; hooks and schedules switch them."""
        return tuple([value for part in self._roots for value in vars(part).values() if isinstance(value, bool)])

    @property
    def _pp(self) -> int:
        return dist.get_world_size(self.group)

    def _agreed(self, batches: list[Any]) -> tuple[list[Any], list[int], list[int], int]:
        """Agree on the micro-batches of a window, so that all ranks compute in one order.

        The kind of a micro-batch includes which parameters of every stage are trained: it decides which gradients are sent back.

        Returns:
            The kind of each micro-batch; the micro-batches at which the kind changes on any rank, where a new schedule begins;
            the first micro-batch of each kind that is new on any rank; the number that seeds the RNGs.
        """
        facts = tuple([p.requires_grad for p in self._parameters]), self._flags()
        signatures: list[Any] = []

        def news() -> list[bool]:
            signatures[:] = [(*self._of_all, *shape_of_batch(each)) for each in batches]
            new = [i == 0 or s != signatures[i - 1] for i, s in enumerate(signatures)]
            return new + [s not in self._learned and signatures.index(s) == i for i, s in enumerate(signatures)]

        flags, number = self._settled(facts, news)
        begins, unknown = ([i for i, each in enumerate(part) if each] for part in (flags[: len(batches)], flags[len(batches) :]))
        return signatures, begins, unknown, number

    def _settled(self, facts: tuple[Any, Any], ask: Callable[[], list[bool]]) -> tuple[list[bool], int]:
        """Compare `facts` on all ranks if they changed on any. Returns the flags that `ask` then gives, each true if it is true
        on any rank, and the number that seeds the RNGs. Collective.
        """
        number = self.cut.draws.number()
        while True:
            (changed, *flags), number = agree.any_ranks_and_number([facts != self._compared, *ask()], number)
            if not changed:
                return flags, number
            self._compare(facts)

    def _compare(self, facts: tuple[Any, Any]) -> None:
        """Gather digests of `facts`, so that a change on one rank gives another kind on all ranks. Collective."""
        self._compared = facts
        digests = agree.gather([hashlib.sha256(repr(each).encode()).hexdigest() for each in facts])
        self._of_all = tuple(trained for trained, _ in digests), tuple(flags for _, flags in digests)

    def _learn(self, signature: Any, micro_batch: MicroBatch[Any], forward: Callable[[MicroBatch[Any]], Made]) -> None:
        like = next((value for key, value in reversed(self._learned.items()) if key[:3] == signature[:3]), None)
        walked = self._studied(lambda: forward(micro_batch), like)
        self._learned[signature] = learned = self._made_of(walked)
        if len(self._learned) == 1 and agree.is_rank0():
            self._say(learned)

    def _made_of(self, walked: Walked) -> Learned:
        stages, sent = {call: self.cut.stage_of[call.rpartition(":")[0]] for call in walked.forms}, list[list[str]]()
        for stage in range(self.cut.count - 1):
            held = [call for call, at in stages.items() if at <= stage]
            sent.append(sorted(walked.needs.after(stage) & set(held)))
            if not sent[-1]:
                raise PipelineError(f"no stage after stage {stage} of {self.cut.kind} uses any of its outputs. Cut elsewhere.")
        return Learned(walked.forms, sent, walked.result.tensors[0], walked.needs)

    @functools.cached_property
    def _is_alone(self) -> bool:
        """Whether the ranks of the pipeline are all ranks of the job."""
        return self._pp == (dist.get_world_size() if dist.is_initialized() else 1)

    def _studied(self, act: Callable[[], Any], like: Learned | None = None) -> Walked:
        """Find out what the stages exchange for a batch. Collective over all ranks of the job.

        Args:
            like: what they exchange for a batch that differs only in shapes. One plain pass is then enough, unless it takes
                another path through the units.
        """
        act = explained(self.module)(act)
        with for_now(self.batches, dry_run=True):
            if not agree.any_rank(like is None):
                assert like is not None
                walked = self._walk.study(act, like.needs)
                if not agree.any_rank(walked.needs != like.needs or walked.forms.keys() != like.forms.keys()):
                    return walked
            return self._walk.study(act)

    def _say(self, learned: Learned) -> None:
        for stage in range(self.cut.count):
            units = [unit.name for unit in self.cut.units if unit.stage == stage]
            sent = learned.sent[stage] if stage < self.cut.count - 1 else []
            size = sum(leaf.size_bytes for leaf in learned.kinds(stage)) if sent else 0
            goes = (
                f"; sends {', '.join(c.rpartition(':')[0] for c in sent)}: {size / 2**20:.3g} MiB per micro-batch" if sent else ""
            )
            between = f"{units[0]} to {units[-1]}" if len(units) > 1 else units[0]
            logger.info("stage %d of %d, on rank %d of pp: %s%s", stage, self.cut.count, self.ranks[stage], between, goes)

    def _run(self, signature: Any, first: int, size: int) -> None:
        """Call a schedule once, for `size` micro-batches of one kind."""
        assert self._under_way is not None
        learned, self._under_way.first = self._learned[signature], first
        self._learned.move_to_end(signature)
        self._under_way.learned = learned
        key = (size, signature)
        if key not in self._schedules:
            if size < self.cut.count and agree.is_rank0():
                logger.warning(
                    "a window has %d micro-batches of one shape for %d stages: most stages wait. Use accumulate=%d or more",
                    size,
                    self.cut.count,
                    self.cut.count,
                )
            while len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.popitem(last=False)
            modules = {stage: self._stage_module(stage) for stage in self.cut.own}
            kinds = [learned.kinds(stage) for stage in range(self.cut.count - 1)]
            self._schedules[key] = torch_schedule(
                self.kind, size, modules, self.cut.count, kinds, learned.loss, self.group, self.cut.device
            )
        self._schedules.move_to_end(key)
        targets = torch.arange(size) if self.has_last else None  # unused, but torch requires targets
        try:
            self._schedules[key].step(target=targets, return_outputs=False)
        except RuntimeError as error:
            # torch raises a long list of tensors for a failed backward pass, with the error itself as its cause.
            failed = self._under_way.failed or (error.__cause__ if "Failed to run stage" in str(error) else None)
            if failed is not None:
                raise failed from None
            raise

    def _stage_module(self, stage: int) -> StageModule:
        weights = [p for p in self.module.parameters() if p.requires_grad] if self.kind.splits_backward else []
        return StageModule(lambda number, received: self._guarded(stage, number, received), weights)

    def _guarded(self, stage: int, number: int, received: tuple[torch.Tensor, ...]) -> Any:
        assert self._under_way is not None
        window = self._under_way
        try:
            return self._compute(window, stage, window.first + number, received)
        except Exception as error:  # torch would wrap it in a message of its own
            if "leaf Variable that requires grad is being used in an in-place operation" in str(error):
                error = EchelonError(
                    f"{self.cut.kind} writes in place into an output of an earlier stage, but did not in the first passes with a "
                    "batch like this. In a pipeline it must do so in every pass or in none: x = x + y makes a new tensor."
                )
            if self._is_alone and not self.kind.splits_backward:
                window.fails(error)  # other ranks wait for this rank's tensors; they hear of the error after all passes
                return self._nothing(window, stage, window.first + number)
            window.failed = error
            raise error

    def _nothing(self, window: Window, stage: int, number: int) -> Any:
        """The zeros that a failed pass sends."""
        last = stage == self.cut.count - 1
        kinds = [window.learned.loss] if last else window.learned.kinds(stage)
        made = [torch.zeros(kind.shape, dtype=kind.dtype, device=self.cut.device, requires_grad=kind.grad) for kind in kinds]
        if last:
            window.made[number] = made[0].detach(), None
            return made[0]
        return tuple(made)

    def _compute(self, window: Window, stage: int, number: int, received: tuple[torch.Tensor, ...]) -> Any:
        learned, micro_batch = window.learned, window.micro_batches[number]
        last = stage == self.cut.count - 1
        run = Run(
            stage,
            learned.given(stage, received),
            learned.forms,
            sends=() if last else learned.sent[stage],
            written=learned.needs.written,
            knows_all=True,
            fail=window.fails,
        )
        if not last:
            run.outgoing = lambda run: self._outgoing(run, learned)
        self.cut.draws.begin(number)
        made = compute(self.cut, run, lambda: window.forward(micro_batch))
        if last:
            window.made[number] = made[0].detach(), made[1]
            output = window.weighted(made[0], micro_batch)
            outputs: list[torch.Tensor] = [output]
        else:
            outputs = [t.to(kind.dtype).contiguous() for t, kind in zip(run.sent, learned.kinds(stage), strict=True)]
        if window.before_backward is not None:
            window.watch(stage, outputs)
        return tuple(outputs) if not last else outputs[0]

    def _outgoing(self, run: Run, learned: Learned) -> list[torch.Tensor]:
        for call, value in run.gave.items():
            if call not in learned.forms:
                continue  # if a later stage calls it, that stage raises
            if (how := learned.differs(call, value)) is not None:
                run.fails(
                    EchelonError(
                        f"{self.cut.kind}.{call.rpartition(':')[0]} {how}: in a pipeline shapes must follow from the batch's, "
                        "and values other than tensors must stay the same. Return numbers that change as tensors."
                    )
                )
        tensors: list[torch.Tensor] = []
        for call in learned.sent[run.stage]:
            # Zeros for a unit that this pass skipped: later stages skip it as well, or raise.
            value, kinds = run.to_send(call), learned.forms[call].tensors
            sent = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if [tuple(t.shape) for t in sent] != [kind.shape for kind in kinds]:
                sent = [torch.zeros(kind.shape, dtype=kind.dtype, device=self.cut.device) for kind in kinds]
            tensors += sent
        return tensors

    # --- results for all ranks

    def _told(self, window: Window, loss: Leaf, share: bool) -> list[Made]:
        """Send the losses of all micro-batches to all ranks, and the outputs if `share`."""
        count, device = len(window.micro_batches), self.cut.device
        if self.has_last:
            losses = torch.stack([window.made[i][0].double() for i in range(count)])
        else:
            losses = torch.empty(count, dtype=torch.float64, device=device)
        dist.broadcast(losses, group=self.group, group_src=self.ranks[-1])
        outputs = [window.made[i][1] for i in range(count)] if self.has_last else [None] * count
        if share:
            outputs = self._outputs(outputs)
        if self.has_last:
            return [(window.made[i][0], outputs[i]) for i in range(count)]
        made = []
        values = losses.to(loss.dtype).unbind()
        for i, (value, micro_batch) in enumerate(zip(values, window.micro_batches, strict=True)):
            window.backward(value, micro_batch)  # counts the loss
            made.append((value, outputs[i]))
        return made

    def _outputs(self, values: list[Any]) -> list[Any]:
        taken = [form_of(value, lossy=True) for value in values]
        forms = agree.gather([form.to_json() for form, _ in taken], self.group)[self.ranks[-1]]
        return [
            to_all(own, Form.from_json(packed), tensors, self.group, self.ranks[-1], self.cut.device)
            for own, (_, tensors), packed in zip(values, taken, forms, strict=True)
        ]

    # --- without gradients

    def evaluate(self, batch: Any, forward: Callable[[Any], Any]) -> Any:
        """Run `forward(batch)` through the stages and return its value on all ranks. Collective over all ranks of the job."""
        name = getattr(forward, "__qualname__", type(forward).__name__)

        def structure_now() -> Any:
            return ("evaluate", name, self._of_all[1], shape_of_batch(batch)[0])

        (is_new,), number = self._settled((self._compared[0], self._flags()), lambda: [structure_now() not in self._needs])
        structure = structure_now()
        if is_new:
            self._needs[structure] = self._studied(lambda: forward(batch)).needs
            while len(self._needs) > _MOST_KINDS:
                self._needs.popitem(last=False)
        self._needs.move_to_end(structure)
        with self.cut.draws.passes(number):
            return self._walk.evaluate(lambda: forward(batch), self._needs[structure])


# One update in a pipeline: its micro-batches, and the tensors that the stages exchange.

Made = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Learned:
    """The tensors that the stages exchange for micro-batches of one kind.

    Args:
        forms: by call of a unit, the form of its outputs.
        sent: by stage, the calls whose outputs it sends on, in this order.
        loss: the kind of the loss.
        needs: the calls that each stage needs.
    """

    forms: dict[str, Form]
    sent: list[list[str]]
    loss: Leaf
    needs: Needs = field(default_factory=lambda: Needs([], set()))

    def kinds(self, stage: int) -> list[Leaf]:
        return [leaf for call in self.sent[stage] for leaf in self.forms[call].tensors]

    def given(self, stage: int, received: Sequence[torch.Tensor]) -> dict[str, Any]:
        """By call of earlier stages, the outputs that a stage has received."""
        values, at = {}, 0
        for call in self.sent[stage - 1] if stage else ():
            form = self.forms[call]
            values[call] = form.filled(received[at : at + len(form.tensors)])
            at += len(form.tensors)
        return values

    def differs(self, call: str, value: Any) -> str | None:
        """How a unit's outputs differ in form from those of the trial pass; None if they do not."""
        form = self.forms[call]
        if form.is_tensor and isinstance(value, torch.Tensor):
            given: list[Any] = [tuple(value.shape)]
        else:
            try:
                now, _ = form_of(value)
            except Unsendable as error:
                return f"returned a {error}, but did not before"
            if now.tree != form.tree:
                return "returned another nesting than before"
            given = [leaf.shape if isinstance(leaf, Leaf) else leaf for leaf in now.leaves]
        before = [leaf.shape if isinstance(leaf, Leaf) else leaf for leaf in form.leaves]
        if given == before:
            return None
        at = next(i for i, pair in enumerate(zip(given, before, strict=True)) if pair[0] != pair[1])
        if isinstance(given[at], tuple) and isinstance(before[at], tuple):
            return f"returned a tensor of shape {given[at]}, but of {before[at]} before, for a batch of the same shape"
        return f"returned {given[at]!r} beside its tensors, but {before[at]!r} before"


class Window:
    """An update under way."""

    def __init__(
        self,
        micro_batches: list[MicroBatch[Any]],
        forward: Callable[[MicroBatch[Any]], Made],
        backward: Callable[[torch.Tensor, MicroBatch[Any]], None],
        before_backward: Callable[[bool, int], None] | None,
    ) -> None:
        self.micro_batches, self.forward, self.backward = micro_batches, forward, backward
        self.before_backward = before_backward
        self.first = 0
        self.learned: Learned
        self.made: dict[int, Made] = {}
        self.failed: Exception | None = None
        self.wrong: Exception | None = None  # of a pass that went on with zeros, because other ranks wait for its tensors
        self._begun: Counter[int] = Counter()
        self._starts: dict[float, torch.Tensor] = {}  # by weight, the gradient with which a backward pass begins

    def fails(self, error: Exception) -> None:
        """Note that the window must fail. All ranks raise when its passes have ended."""
        self.wrong = self.wrong or error

    def weighted(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        """The loss times its weight. torch's schedule starts its backward pass with the gradient 1.

        The loop's `backward` counts the loss and gives the gradient with which a backward pass begins. It runs on a detached
        tensor here. For further micro-batches of the same weight it only counts the loss.
        """
        weight, own = micro_batch.weight, loss.detach()
        start = None if isinstance(weight, torch.Tensor) else self._starts.get(weight)
        self.backward(own if start is not None else own.requires_grad_(), micro_batch)
        if start is None:
            start = own.grad
            assert start is not None
            if not isinstance(weight, torch.Tensor):
                self._starts[weight] = start
        if isinstance(weight, torch.Tensor):
            pass_zeros(loss, weight == 0)
        elif weight == 0:
            pass_zeros(loss)
        return loss * start

    def watch(self, stage: int, outputs: list[torch.Tensor]) -> None:
        """Call `before_backward` when the backward pass reaches the first of the outputs; an early output is reached late."""
        own = [t for t in outputs if t.requires_grad]
        if own:
            register_multi_grad_hook(own, lambda gradient: self._begins(stage), mode="any")

    def _begins(self, stage: int) -> None:
        before = self._begun.total()
        self._begun[stage] += 1
        assert self.before_backward is not None
        self.before_backward(self._begun[stage] == len(self.micro_batches), before)


# Parameters that several stages use: tied parameters, and those in no unit. Each stage that uses one keeps a copy.
#
# The copies start equal. Their gradients are summed over these stages before anything reads them, so the copies stay equal.
# Communication: a broadcast at the start; after the last backward pass of a window an all-reduce of the number of ranks that have
# each gradient, and an all-reduce of each gradient.


class Shared:
    """The parameters of which several ranks of the pipeline have a copy.

    Args:
        groups: by the first name of a parameter, the ranks that have a copy.
    Attributes:
        elsewhere: the parameters whose norm a rank of an earlier stage counts.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self._kept: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.elsewhere: set[nn.Parameter] = set()

    def bind(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Use the parameters that the module has now."""
        self._kept = [(p, self._groups[name]) for name, p in sorted(named, key=lambda pair: pair[0]) if name in self._groups]
        self.elsewhere = {p for p, group in self._kept if dist.get_rank(group) > 0}

    @torch.no_grad()
    def equalize(self) -> None:
        """Broadcast the first copy's values. Collective."""
        for parameter, group in self._kept:
            if not parameter.is_meta:
                value = local(parameter.detach()).contiguous()
                dist.broadcast(value, group=group, group_src=0)
                local(parameter.detach()).copy_(value)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of the copies, after the last backward pass. Collective.

        A copy without a gradient counts as zero. If no copy has a gradient, all stay without. A copy may be frozen on one rank
        alone, so every rank takes part for all shared parameters.
        """
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for parameter, group in self._kept:
            by_group.setdefault(group, []).append(parameter)
        for group, kept in by_group.items():
            flags = [float(p.requires_grad and p.grad is not None) for p in kept]
            has = torch.tensor(flags, device=local(kept[0]).device)
            dist.all_reduce(has, op=dist.ReduceOp.SUM, group=group)
            for parameter, count in zip(kept, has.tolist(), strict=True):
                if not count:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = local(parameter.grad)
                total = grad.contiguous()
                dist.all_reduce(total, group=group)
                grad.copy_(total)
