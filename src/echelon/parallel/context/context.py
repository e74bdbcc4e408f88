"""Context parallelism: each sequence is cut over ranks that work on the same samples.

`ContextParallel` cuts the batches. Within its `active` context attention sees the keys and values of all its ranks
(`attention`), `positions` gives the positions of a rank's tokens, and dropout draws different masks on each rank. The rest of a
model must work token by token. Code that does not, such as attention written by hand, is found by a probe before training
(`probe`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.common.errors import ContextParallelError, EchelonError
from echelon.hf.context_parallel import adapt, with_shifted_labels
from echelon.parallel.context.attention import SplitAttention, attend, current, over
from echelon.parallel.context.batch import (
    SequenceDim,
    SequenceParts,
    check_sequence_dim,
    counted,
    cut_batch,
    named,
    sequence_dims,
    size_of,
)
from echelon.parallel.context.losses import KeptOutputs, Losses, check_counted, check_losses, check_separate
from echelon.parallel.context.probe import probe
from echelon.parallel.guards.messages import SHAPES
from echelon.parallel.patching import for_now, replace
from echelon.parallel.prepared import Batches
from echelon.parallel.recipe.recipe import Recipe
from echelon.world import agree, rng
from echelon.world.device import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ContextParallel", "check_context"]

logger = logging.getLogger(__name__)


def _has_sequence(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length


def check_context(module: nn.Module, recipe: Recipe) -> None:
    """Check that compilation and recomputation can be combined with context parallelism.

    Raises:
        UsageError: compiled blocks would recompute attention without the other ranks' keys.
    """
    compiled, recomputed = recipe.torch_compile, recipe.activation_checkpoint
    own = [type(part).__name__ for part in module.modules() if getattr(part, "gradient_checkpointing", False) is True]
    recomputes = own or (recomputed is not None and recomputed.memory_budget is None)
    if compiled is not None and not compiled.disable and recomputes:
        what = f"{own[0]}.gradient_checkpointing" if own else "recompute"
        raise ContextParallelError(
            f"context parallelism takes compile or {what}, got both: a compiled block that is recomputed would attend to this "
            "rank's tokens only (torch 2.13). Leave out one, or use a memory budget for each graph: "
            "ActivationCheckpointParams(memory_budget=0.5)."
        )


class ContextParallel(Batches):
    """A module's context parallelism on this rank. Create it before activation checkpointing, compilation and sharding.

    Args:
        module: changed in place: the `forward` of its submodules re-enters the context when a backward pass recomputes them.
        mesh: the ranks that share sequences, 1-D.
        device: where this rank computes.
        sequence_dim: the dim of the sequence in a batch's tensors; see `sequence_dims`.
        check: compare a pass over parts with a pass over whole sequences for the beginning of the first batch, before training.
    Attributes:
        parts: this rank's part of a sequence.
        gathered_in: the all-gather dtype of parameters; None if it is their own dtype.
        unchecked: the first pass, which is to be checked, has not ended yet.
        kept: the module's outputs for whole sequences, while losses are compared for the same outputs; else None.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        sequence_dim: SequenceDim = None,
        *,
        check: bool = True,
    ) -> None:
        self.parts = SequenceParts.over(mesh.get_group())
        self.gathered_in: torch.dtype | None = None
        self.doubts = agree.is_joined()
        self.kept: KeptOutputs | None = None
        self._outputs: list[torch.Tensor] = []  # of the latest pass, until `check_loss`
        self._rng_differs = False
        self._module, self._device, self._said = module, device, check_sequence_dim(sequence_dim)
        self._checks = check and agree.is_joined()
        self._cut, self.unchecked = "", self._checks
        self._rows = self._length = 0  # of the latest part of a batch
        self._here = threading.local()
        self._learns = False
        self._attend = torch.compiler.disable(self._split)  # graphs end where ranks exchange keys and values
        self._shifts = adapt(module, current, replace)
        for name, part in module.named_modules():
            if not name:
                replace(part, "forward", "context", _Root(self, part))
            elif not type(part).__module__.startswith("torch.nn."):
                replace(part, "forward", "context", _InContext(self, part))

    # --- batches

    def part_of(self, batch: Any) -> Any:
        """This rank's part of every tensor with a sequence, in the same structure.

        Raises:
            UsageError: there is no sequence, its length cannot be divided, or it is not clear whether a tensor has it.
        """
        batch, dims = self._dims_of(super().part_of(batch))
        return self._part_of(batch, dims)

    def _dims_of(self, batch: Any) -> tuple[Any, dict[str, int]]:
        said = self._said
        if self._shifts and (shifted := with_shifted_labels(batch)) is not batch:
            if isinstance(said, Mapping) and "labels" in said:  # it names the tensors as they come from the loader
                said = {"shift_labels": said["labels"], **said}
            batch = shifted
        return batch, sequence_dims(batch, said)

    def _part_of(self, batch: Any, dims: dict[str, int]) -> Any:
        part = cut_batch(batch, dims, self.parts)
        self._rows, self._length = size_of(part, dims)
        self.share = counted(batch, part, dims, self.parts.size)
        if not self._cut:
            self._cut = ", ".join(f"{name or 'the batch'} (dim {dim})" for name, dim in dims.items())
            if agree.is_rank0():
                logger.info(
                    "context parallel over %d ranks: %s cut along the sequence; the rest stays whole", self.parts.size, self._cut
                )
        return part

    def check_parts(
        self, batch: Any, weigh: Callable[[Any], Any], compute: Callable[[Any], Any], dtype: torch.dtype | None
    ) -> None:
        """Check for the first batch that weights and losses of its parts add up to those of the batch. Collective over all ranks.

        Raises:
            UsageError: on all ranks: tokens at the ends of parts are left out, each part counts as the whole, or the loss is not
                a mean over tokens.
        """
        self.doubts = False
        shifted, dims = self._dims_of(batch)
        part = self._part_of(shifted, dims)

        def weight_of(data: Any, share: float | torch.Tensor) -> float:
            self.share = share
            return float(weigh(data))

        self._check_weight(weight_of(part, self.share), weight_of(batch, 1.0))
        length = next((t.shape[dims[name]] for name, t in named(shifted) if name in dims), 0)
        if not all(agree.gather(self._checks and length > 0)):
            return

        def of_whole(piece: Any, *, keep: bool) -> tuple[Any, float]:
            short = next(t.shape[dims[name]] for name, t in named(piece) if name in dims)
            self.kept = KeptOutputs(self.parts, short) if keep else None
            with over(None):
                loss = compute(piece)
            if self.kept is not None:
                self.kept.check()
            return loss, weight_of(piece, 1.0)

        def of_part(piece: Any) -> tuple[Any, float]:
            part = self._part_of(with_shifted_labels(piece) if self._shifts else piece, dims)
            unchecked = self.unchecked
            try:
                with self.active():
                    return compute(part), weight_of(part, self.share)
            finally:
                self.unchecked = unchecked

        types = {p.dtype for p in self._module.parameters() if p.is_floating_point()}
        dtypes = [*types, *(t for t in (dtype, self.gathered_in) if t is not None)]
        with for_now(self, dry_run=True, _rng_differs=torch.is_grad_enabled(), kept=None):
            check_losses(self.parts, Losses(self._module, of_whole, of_part, dtypes), batch, dims, length)

    def look_at_outputs(self, module: nn.Module) -> None:
        """Record the module's outputs for `check_loss`. Call it after `fully_shard`: its hooks must stay outside the recorded
        outputs, so that gradients taken of these do not run them.
        """
        if not self._checks:
            return

        def note(module: nn.Module, args: Any, outputs: Any) -> Any:
            if torch.compiler.is_compiling() or not self.doubts or self.dry_run:
                return None
            if current() is None or not torch.is_grad_enabled():
                return None
            self._outputs.clear()
            return map_tensors(outputs, self._noted)

        module.register_forward_hook(note)

    def _noted(self, output: Any) -> Any:
        is_of_tokens = _has_sequence(output, self._length) and output.is_floating_point() and output.requires_grad
        if not is_of_tokens or hasattr(output, "to_local"):
            return output
        self._outputs.append(output.view_as(output))
        return self._outputs[-1]

    def check_loss(self, loss: torch.Tensor, *, by_share: bool) -> None:
        """Check for the first batch that the loss is a sum over tokens, if it cannot be recomputed. Collective over all ranks.

        Raises:
            UsageError: on all ranks: it is not, or its parts have other shares of these tokens than of the weight.
        """
        self.doubts = False
        outputs, self._outputs = self._outputs, []
        check_counted(self.parts, check_separate(loss, outputs), self.share if by_share else None)

    def _check_weight(self, part: float, whole: float) -> None:
        weights = agree.gather(part, self.parts.group)
        problem = (
            f"weight() of the {len(weights)} parts of a sequence must add up to weight() of the whole, {whole:g}, "
            f"got {' + '.join(f'{weight:g}' for weight in weights)}. Count a part's tokens, for a causal language model by "
            "echelon.count_tokens(data, next_token=True), since labels are shifted before a sequence is cut; to count rows, "
            "leave weight() to AutoUnit, or multiply by self.prepared.batches.share."
        )
        agree.raise_on_all(problem if abs(sum(weights) - whole) > 1e-6 * abs(whole) else None, ContextParallelError)

    def whole_of(self, outputs: Any) -> Any:
        """Outputs for the latest batch, from those for its parts: tensors with the sequence in dim 1 are gathered. Collective."""
        length = self._length
        return map_tensors(outputs, lambda t: self.parts.whole(t, 1) if _has_sequence(t, length) else t)

    # --- passes

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context of forward and backward passes over parts.

        With gradients this rank draws its own dropout masks. Their stream is seeded by a number that all ranks of the sequence
        draw alike, so the RNG state in a checkpoint is enough to resume.

        Raises:
            UsageError: instead of torch's error about shapes that do not fit: the dim that was cut may not be a sequence.
        """
        self._learns = torch.is_grad_enabled()
        streams = self._own_stream() if self._learns or self._rng_differs else contextlib.nullcontext()
        try:
            with over(self.parts), streams, self.in_this_thread():
                yield
        except RuntimeError as error:
            fits = not any(each in str(error) for each in SHAPES)
            if fits or not self._cut or isinstance(error, EchelonError):
                raise
            refusal = ContextParallelError(
                f"context parallelism: code met shapes that do not fit, after {self._cut} of the batch was cut into "
                f"{self.parts.size} parts. If that dimension is not the sequence, set Layout(sequence_dim=...); for a "
                f"batch without sequences use 'fsdp' or 'ddp'. Layers that mix tokens must be attention. torch says: {error}"
            )
            raise refusal.with_traceback(error.__traceback__) from error
        self.unchecked = False

    @property
    def is_here(self) -> bool:
        """Whether this thread has entered the `SplitAttention` mode."""
        return getattr(self._here, "entered", False)

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        if self.is_here:
            yield
            return
        self._here.entered = True
        try:
            with SplitAttention(self._of_targets, self._aside, self._attend):
                yield
        finally:
            self._here.entered = False

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context of a backward pass, during which torch disables the mode: modules that are recomputed enter it again."""
        self._here.entered = False
        try:
            yield
        finally:
            self._here.entered = True

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        common = int(torch.randint(2**62, ()))
        with rng.kept(self._device):
            rng.begin((common + 0x9E3779B97F4A7C15 * self.parts.rank) % 2**63, self._device)
            yield

    def _split(self, parts: SequenceParts, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute attention for this rank's part.

        Raises:
            UsageError: a backward pass will recompute this attention outside of a module, where the mode is not entered.
        """
        if self._learns and (again := _computed_again()) is not None:
            raise ContextParallelError(
                f"context parallelism: torch.utils.checkpoint will call {again} again in the backward pass, outside of a module, "
                "and its attention would see only this rank's tokens. Pass a module that computes attention, as in "
                "checkpoint(block, x), or use recompute='blocks'."
            )
        return attend(parts, *args, **kwargs)

    def _of_targets(self, targets: int) -> None:
        """In the first pass, refuse targets that were shifted within this rank's part.

        Raises:
            UsageError: their number is that of a shift by one token.
        """
        if self.unchecked and self._length > 2 and targets == self._rows * (self._length - 1):
            raise ContextParallelError(
                f"context parallelism over {self.parts.size} ranks: {self._rows} x {self._length - 1} targets were taken of "
                f"this rank's {self._rows} x {self._length} tokens. Were they shifted in compute_loss, as logits[:, :-1] and "
                "tokens[:, 1:]? The tokens of a part are not neighbours where its two chunks meet. Let the dataset give inputs "
                "and targets; a causal model of transformers computes its loss itself if it gets labels."
            )


class _InContext:
    """The `forward` of a module that a backward pass may recompute. A class, as activation checkpointing's."""

    def __init__(self, context: ContextParallel, module: nn.Module) -> None:
        self._context, self._forward = context, module.forward
        self.__wrapped__ = module.forward  # for inspect.signature, with which programs find a model's arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self._context
        if current() is None or torch.compiler.is_compiling() or context.is_here:
            return self._forward(*args, **kwargs)
        with context.in_this_thread():
            return self._forward(*args, **kwargs)


_ENTERS, _CHECKPOINT = _InContext.__call__.__code__, inspect.unwrap(checkpoint).__code__


def _computed_again() -> str | None:
    """The name of the function given to `checkpoint`, if the caller runs in it and not in a module inside it."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _ENTERS:
        if frame.f_code is _CHECKPOINT:
            function = frame.f_locals["function"]
            return getattr(function, "__qualname__", None) or type(function).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _Root(_InContext):
    """The `forward` of the root module, which compares parts with whole sequences in its first pass."""

    def __init__(self, context: ContextParallel, module: nn.Module) -> None:
        super().__init__(context, module)
        self._module, self._kind, self._compared = module, type(module).__name__, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (kept := self._context.kept) is not None and not torch.compiler.is_compiling():
            return kept.keep(self._forward(*args, **kwargs)) if current() is None else kept.part_of_next()
        context = self._context
        if current() is not None and not torch.compiler.is_compiling() and context.unchecked and not self._compared:
            self._compared = True
            probe(context.parts, self._kind, self._forward, self._module, args, kwargs)
        return super().__call__(*args, **kwargs)
