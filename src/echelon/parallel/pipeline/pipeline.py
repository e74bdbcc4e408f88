"""A module in stages over ranks: the micro-batches of an update pass through them in the order of one of torch's schedules.

Communication: between neighbouring stages, the tensors that a later one needs, and their gradients; in each window an agreement
on the shapes of its micro-batches, and a broadcast of the losses.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from echelon.contracts.errors import EchelonError, UsageError
from echelon.parallel.micro_batch import MicroBatch
from echelon.parallel.pipeline.gates import Cut, Run
from echelon.parallel.pipeline.schedules import Kind, StageModule, parts, torch_schedule
from echelon.parallel.pipeline.shared import Shared
from echelon.parallel.pipeline.trial import compute
from echelon.parallel.pipeline.values import Form, Leaf, form_of, shape_of_batch
from echelon.parallel.pipeline.walk import Needs, Walk, Walked
from echelon.parallel.pipeline.window import Learned, Made, Window
from echelon.parallel.split_errors import explained
from echelon.world import agree

__all__ = ["Pipeline"]

logger = logging.getLogger(__name__)

_MOST_SCHEDULES = 16  # each keeps room for what it receives


class Pipeline:
    """The stages of this rank, and what the ranks of the pipeline do together.

    Attributes:
        group: the ranks of the pipeline.
        has_last: whether this rank has the last stage, which computes the losses.
        is_trying: what is computed now is thrown away.
    """

    def __init__(
        self, module: nn.Module, cut: Cut, kind: Kind, ranks: list[int], group: dist.ProcessGroup | None, shared: Shared
    ) -> None:
        self.module, self.cut, self.kind, self.ranks, self.group, self.shared = module, cut, kind, ranks, group, shared
        self.has_last = cut.count - 1 in cut.own
        self._walk = Walk(module, cut, group, ranks, cut.device)
        self._needs: dict[Any, Needs] = {}
        self._learned: dict[Any, Learned] = {}
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._under_way: Window | None = None
        self._trained: tuple[bool, ...] | None = None  # which parameters were, in the latest window
        self._trained_by_all: tuple[str, ...] = ()  # the same of every rank
        self.is_trying = False

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
        """All micro-batches of an update. Collective over all ranks of the job.

        Args:
            before_backward: is told before each backward pass whether it is its stage's last in the window, and how many were
                before.
            share: whether all ranks want what `compute_loss` returns besides the loss.
        """
        signatures, begins, unknown, number = self._agreed([each.data for each in micro_batches])
        for i in unknown:
            self._learn(signatures[i], micro_batches[i], forward)
        under_way = Window(list(micro_batches), forward, backward, before_backward)
        self._under_way = under_way
        try:
            with self.cut.draws.passes(number):
                for first, last in zip(begins, [*begins[1:], len(micro_batches)], strict=True):
                    for size in parts(self.kind, last - first, self._pp):
                        self._run(signatures[first], first, size)
                        first += size
        finally:
            self._under_way = None
        self.shared.sum_gradients()
        return self._told(under_way, self._learned[signatures[0]].loss, share)

    @functools.cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """In the first window the module has its final form."""
        return list(self.module.parameters())

    @property
    def _pp(self) -> int:
        return dist.get_world_size(self.group)

    def _agreed(self, batches: list[Any]) -> tuple[list[Any], list[int], list[int], int]:
        """The kinds of the micro-batches, where a schedule begins, and which are of a new kind: on any rank, so that all compute
        in one order; and the number from which random ones follow. What is sent back depends on which layers are trained, on
        every stage: that is a part of a kind.
        """
        trained = tuple([p.requires_grad for p in self._parameters])
        changed, number = trained != self._trained, self.cut.draws.number()
        while True:
            signatures = [(self.module.training, self._trained_by_all, shape_of_batch(each)) for each in batches]
            new = [i == 0 or s != signatures[i - 1] for i, s in enumerate(signatures)]
            first_seen = {s: i for i, s in reversed(list(enumerate(signatures)))}
            unseen = [s not in self._learned and first_seen[s] == i for i, s in enumerate(signatures)]
            (changed, *told), number = agree.any_ranks_and_number([changed, *new, *unseen], number)
            if not changed:
                begins, unknown = ([i for i, each in enumerate(flags) if each] for flags in (told[: len(new)], told[len(new) :]))
                return signatures, begins, unknown, number
            self._trained = trained
            self._trained_by_all = tuple(agree.gather(hashlib.sha256(bytes(trained)).hexdigest()))
            changed = False

    def _learn(self, signature: Any, micro_batch: MicroBatch[Any], forward: Callable[[MicroBatch[Any]], Made]) -> None:
        walked = self._studied(("train", signature[0], signature[2][0]), lambda: forward(micro_batch))
        stages, sent = {call: self.cut.stage_of[call.rpartition(":")[0]] for call in walked.forms}, list[list[str]]()
        for stage in range(self.cut.count - 1):
            later = set().union(*walked.needs[stage + 1 :])
            held = [call for call, at in stages.items() if at <= stage]
            sent.append(sorted(later & set(held)))
            if not sent[-1]:
                raise UsageError(
                    f"no stage after stage {stage} of {self.cut.kind} uses anything that it computes. Cut elsewhere."
                )
        self._learned[signature] = Learned(walked.forms, stages, sent, walked.result.tensors[0])
        if len(self._learned) == 1 and agree.is_rank0():
            self._say(self._learned[signature])

    def _studied(self, structure: Any, act: Callable[[], Any]) -> Walked:
        needs = self._needs.get(structure)
        act = explained(self.module)(act)
        self.is_trying = True
        try:
            walked = self._walk.again(act, needs) if needs is not None else self._walk.study(act)
        finally:
            self.is_trying = False
        self._needs[structure] = walked.needs
        return walked

    def _say(self, learned: Learned) -> None:
        for stage in range(self.cut.count):
            units = [unit.name for unit in self.cut.units if unit.stage == stage]
            sent = learned.sent[stage] if stage < self.cut.count - 1 else []
            size = sum(leaf.size_bytes for leaf in learned.kinds(stage)) if sent else 0
            goes = (
                f"; sends {', '.join(c.rpartition(':')[0] for c in sent)}: {size / 2**20:.3g} MiB a micro-batch" if sent else ""
            )
            between = f"{units[0]} to {units[-1]}" if len(units) > 1 else units[0]
            logger.info("stage %d of %d, on rank %d of pp: %s%s", stage, self.cut.count, self.ranks[stage], between, goes)

    def _run(self, signature: Any, first: int, size: int) -> None:
        """One call of a schedule, for `size` equal micro-batches."""
        assert self._under_way is not None
        learned, self._under_way.first = self._learned[signature], first
        self._under_way.learned = learned
        key = (size, signature)
        if key not in self._schedules:
            if size < self.cut.count and agree.is_rank0():
                logger.warning(
                    "a window has %d micro-batches of one shape for %d stages: most stages wait. Use "
                    "gradient_accumulation_steps=%d or more",
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
        numbers = torch.arange(size)
        try:
            self._schedules[key].step(number=numbers, target=numbers if self.has_last else None, return_outputs=False)
        except RuntimeError:
            if self._under_way.failed is not None:
                raise self._under_way.failed from None
            raise

    def _stage_module(self, stage: int) -> StageModule:
        weights = [p for p in self.module.parameters() if p.requires_grad] if self.kind.splits_backward else []
        return StageModule(lambda number, received: self._guarded(stage, number, received), weights)

    def _guarded(self, stage: int, number: int, received: tuple[torch.Tensor, ...]) -> Any:
        assert self._under_way is not None
        try:
            return self._compute(self._under_way, stage, self._under_way.first + number, received)
        except Exception as error:  # torch would tell of it in words of its own
            self._under_way.failed = error
            raise

    def _compute(self, window: Window, stage: int, number: int, received: tuple[torch.Tensor, ...]) -> Any:
        learned, micro_batch = window.learned, window.micro_batches[number]
        run = Run(stage, learned.given(stage, received, self.cut.device), learned.forms, solid=self._walk.solid)
        if stage < self.cut.count - 1:
            run.outgoing = lambda run: self._outgoing(run, learned)
        self.cut.draws.begin(number)
        made = compute(self.cut, run, lambda: window.forward(micro_batch))
        if stage == self.cut.count - 1:
            window.made[number] = made[0].detach(), made[1]
            output = window.weighted(made[0], micro_batch)
            outputs: list[torch.Tensor] = [output]
        else:
            outputs = self._sendable(run.sent, learned.kinds(stage))
        if window.before_backward is not None:
            window.watch(stage, outputs)
        return tuple(outputs) if len(outputs) > 1 or stage < self.cut.count - 1 else outputs[0]

    def _outgoing(self, run: Run, learned: Learned) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for call in learned.sent[run.stage]:
            value = run.gave[call] if call in run.gave else run.received.get(call)
            if value is None:
                raise EchelonError(
                    f"{self.cut.kind}.{call.rpartition(':')[0]} was called in the first step, but not in this one. A "
                    "pipeline sends the same in every step: let forward call the same modules, whatever it draws."
                )
            flat = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            found = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
            shapes = [leaf.shape for leaf in learned.forms[call].tensors]
            if [tuple(t.shape) for t in found] != shapes:
                raise EchelonError(
                    f"{self.cut.kind}.{call.rpartition(':')[0]} gave tensors of {[tuple(t.shape) for t in found]}, and of "
                    f"{shapes} before, for a batch of the same shape: in a pipeline shapes must follow from the batch's."
                )
            tensors += found
        return tensors

    def _sendable(self, tensors: list[torch.Tensor], kinds: list[Leaf]) -> list[torch.Tensor]:
        made, dense = [], torch.contiguous_format
        for tensor, kind in zip(tensors, kinds, strict=True):
            tensor = tensor if tensor.dtype == kind.dtype else tensor.to(kind.dtype)
            # What is received and sent on; and where outputs are detached in place, as the schedules that split backward passes
            # do, views and what the stage may have used itself: one of several outputs.
            copies = tensor.is_leaf or (self.kind.splits_backward and (tensor._base is not None or len(tensors) > 1))
            made.append(tensor.clone(memory_format=dense) if copies and kind.grad else tensor.contiguous())
        return made

    # --- what all ranks are told

    def _told(self, window: Window, loss: Leaf, share: bool) -> list[Made]:
        """Losses, and if they are wanted outputs, of all micro-batches on all ranks."""
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
            window.backward(value, micro_batch)  # counts it
            made.append((value, outputs[i]))
        return made

    def _outputs(self, values: list[Any]) -> list[Any]:
        taken = [form_of(value, lossy=True) for value in values]
        told = agree.gather([form.to_json() for form, _ in taken], self.group)[self.ranks[-1]]
        found = []
        for own, (_, tensors), packed in zip(values, taken, told, strict=True):
            form = Form.from_json(packed)
            sent = (
                [t.detach().contiguous() for t in tensors] if self.has_last else [k.empty(self.cut.device) for k in form.tensors]
            )
            for tensor in sent:
                dist.broadcast(tensor, group=self.group, group_src=self.ranks[-1])
            found.append(own if self.has_last else form.filled(sent))
        return found

    # --- without gradients

    def evaluate(self, batch: Any, forward: Callable[[Any], Any]) -> Any:
        """`forward(batch)` through the stages, on all ranks of the pipeline. Collective over all ranks of the job."""
        structure = (
            "evaluate",
            self.module.training,
            shape_of_batch(batch)[0],
            getattr(forward, "__qualname__", type(forward).__name__),
        )
        if structure not in self._needs:
            self._studied(structure, lambda: forward(batch))
        number = agree.gather(self.cut.draws.number(), self.group)[self.ranks[0]]
        with self.cut.draws.passes(number):
            return self._walk.evaluate(lambda: forward(batch), self._needs[structure])
