"""The units that `fully_shard` splits and gathers one by one: blocks, experts, embeddings, the head, modules kept in float32."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from echelon.common.errors import LayoutError
from echelon.parallel.experts.distribute import divided_experts
from echelon.parallel.gradients.unreduced_params import tracked_tensors
from echelon.parallel.names import matching
from echelon.parallel.older_torch import shards_integers
from echelon.parallel.patching import for_now, in_front_of, replace_class
from echelon.parallel.recipe.blocks import Blocks, blocks_to_shard, without_shared
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.shards import gathered_copy, is_fully_sharded, is_split
from echelon.world.device import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "Unit",
    "always_under_autocast",
    "decides",
    "edges_of",
    "expert_units",
    "experts_apart",
    "follow_unfreezing",
    "give_no_views",
    "hear_of_all_outputs",
    "hear_of_loss",
    "keep_readable",
    "of_another_type",
    "policy_for",
    "prefetch",
    "resharded",
    "units_of",
    "unsplittable",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and freed together.

    Args:
        name: the module's name; the head's if norm and head are one unit.
        policy: mixed precision.
        reshard: whether to reshard after the forward, as in `fully_shard`.
        in_order: the units with this flag are in forward order, so each can be prefetched by the one before it.
        is_read: parameters may be read in the root's forward outside of their own module's forward; see below.
        mesh: the unit's mesh, if it differs from the other units'.
        placement: how its parameters are sharded, if it differs from the other units'.
    """

    name: str
    modules: tuple[nn.Module, ...]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    in_order: bool = True
    is_read: bool = False
    mesh: DeviceMesh | None = None
    placement: Callable[[nn.Parameter], Any] | None = None


def units_of(
    module: nn.Module,
    chosen: Blocks | None,
    precision: Precision | None,
    policy: MixedPrecisionPolicy | None,
    reshard: bool | int,
    device: torch.device,
) -> list[Unit]:
    """The units in the order in which they are split. The root, which gets all other parameters, is not among them.

    Args:
        chosen: blocks, innermost first; None takes the repeated blocks.
        precision, policy: see `policy_for`.
    """
    blocks = without_shared(module, blocks_to_shard(module) if chosen is None else chosen)
    full = without_shared(module, in_full(module, device)) if decides(precision, policy) else []
    done = {part for _, part in full}
    units = [Unit(name, (part,), policy_for(part, None, policy), False, in_order=False, is_read=True) for name, part in full]
    embeddings, head = edges_of(module, blocks) if chosen is None else ([], [])
    embeddings = [(name, part) for name, part in embeddings if part not in done]
    head = [(name, part) for name, part in head if part not in done]
    units += [Unit(name, (part,), policy_for(part, precision, policy), reshard, is_read=True) for name, part in embeddings]
    units += [Unit(name, (b,), policy_for(b, precision, policy), reshard) for name, b in blocks if b not in done]
    if head:
        (name, last), together = head[-1], tuple(part for _, part in head)
        kept = False if reshard is True else reshard  # the backward pass begins with the head
        units.append(Unit(name, together, policy_for(last, precision, policy), kept, is_read=True))
    return units


def experts_apart(module: nn.Module, precision: Precision | None, policy: MixedPrecisionPolicy | None) -> set[nn.Parameter]:
    """Parameters of experts that no other data-parallel rank has, so there is nothing to gather or reduce.

    A unit over a single rank would copy them in each pass. If their compute dtype differs from the stored one, they stay a unit,
    which casts them.
    """
    return {
        parameter
        for _, part, dispatch in divided_experts(module)
        if dispatch.data_mesh.size() == 1 and policy_for(part, precision, policy).param_dtype is None
        for parameter in part.parameters()
    }


def expert_units(
    module: nn.Module,
    precision: Precision | None,
    policy: MixedPrecisionPolicy | None,
    reshard: bool | int,
    apart: Collection[nn.Parameter] = (),
) -> list[Unit]:
    """Units of experts that are divided over ranks: sharded over the ranks that have the same experts. They are split first.

    Args:
        apart: parameters of experts that are not in a unit.
    """
    return [
        Unit(
            name,
            (part,),
            policy_for(part, precision, policy),
            reshard is not False,  # a number counts ranks of the other units' mesh
            in_order=False,
            mesh=dispatch.data_mesh,
            placement=dispatch.placement,
        )
        for name, part, dispatch in divided_experts(module)
        if not any(parameter in apart for parameter in part.parameters())
    ]


def resharded(units: list[Unit], module: nn.Module, by_name: Mapping[str, bool | int]) -> list[Unit]:
    """The units with the user's reshard_after_forward, by patterns of names. The first matching pattern counts.

    Raises:
        UsageError: a pattern matches no unit.
    """
    names = {part: name for name, part in module.named_modules()}
    every = {names[part] for unit in units for part in unit.modules}
    matches = {pattern: set(matching(pattern, every)) for pattern in by_name}
    for pattern, matched in matches.items():
        if not matched:
            raise LayoutError(
                f"reshard_after_forward has {pattern!r}, which matches no module that is sharded one by one: "
                f"{', '.join(sorted(every)) or 'the module is sharded as a whole'}."
            )
    made = []
    for unit in units:
        unit_names = {names[part] for part in unit.modules}
        choices = [by_name[pattern] for pattern, matched in matches.items() if matched & unit_names]
        made.append(replace(unit, reshard=choices[0]) if choices else unit)
    return made


def prefetch(units: list[Unit], forward: int, backward: int | None) -> None:
    """While one unit computes, prefetch the next `forward` units, and in the backward pass the `backward` units before it.

    Args:
        backward: None leaves it to `fully_shard`, which prefetches one.
    """
    ordered = [unit.modules[0] for unit in units if unit.in_order]
    for i, part in enumerate(ordered):
        if following := ordered[i + 1 : i + 1 + forward]:
            part.set_modules_to_forward_prefetch(following)  # type: ignore[operator]
        if backward is not None and (before := ordered[max(0, i - backward) : i][::-1]):
            part.set_modules_to_backward_prefetch(before)  # type: ignore[operator]


# The large layers around a model's blocks, embeddings and head, are units of their own, so that the root need not keep them
# gathered throughout the step.
#
# They are found by class and place: each `nn.Embedding` outside the blocks; the last `nn.Linear` after the blocks, with the norm
# before it. A layer that is tied, or small in bytes or compared to a block, stays with the root.
#
# The root's forward can read its own parameters anywhere, as `x @ self.embedding.weight.T` does. These layers' parameters can be
# read likewise, outside of their own layer's forward. Such a read gathers an embedding until the backward pass, in this step and
# in all later ones. A head's gradients are reduced when the backward pass leaves the norm, too early for an earlier use, so such
# a read gets a copy.

# As a fraction of the largest block, and in bytes. A smaller layer is not worth a collective: its latency would exceed the
# transfer.
_WORTH, _WORTH_BYTES = 0.25, 1 << 20


def edges_of(module: nn.Module, blocks: Blocks) -> tuple[Blocks, Blocks]:
    """(embeddings, one unit each; norm and head, which are one unit together)."""
    if not blocks:
        return [], []
    inside = tuple(f"{name}." for name, _ in blocks)
    order = [(n, m) for n, m in module.named_modules() if f"{n}.".startswith(inside) or not any(True for _ in m.children())]
    last = max(i for i, (n, _) in enumerate(order) if f"{n}.".startswith(inside))
    least = _WORTH * max(_size(block) for _, block in blocks)
    outside = [(n, m) for n, m in order if not f"{n}.".startswith(inside)]
    embeddings: Blocks = [(n, m) for n, m in outside if type(m) is nn.Embedding and _is_large(m, least)]
    after = [(n, m) for n, m in order[last + 1 :] if _size(m)]
    heads = [i for i, (_, m) in enumerate(after) if type(m) is nn.Linear and _is_large(m, least)]
    head: Blocks = []
    if heads:
        at = heads[-1]
        norm = [pair for pair in after[max(at - 1, 0) : at] if all(p.dim() == 1 for p in pair[1].parameters())]
        head = [*norm, after[at]]
    embeddings, head = without_shared(module, embeddings), without_shared(module, head)
    return embeddings, head if any(type(m) is nn.Linear for _, m in head) else []


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_large(module: nn.Module, least: float) -> bool:
    return _size(module) >= least and sum(p.nbytes for p in module.parameters()) >= _WORTH_BYTES


class _Within:
    """Records whether the root's forward pass is running."""

    now = False

    def enter(self, root: nn.Module, args: Any) -> None:
        self.now = True

    def leave(self, root: nn.Module, args: Any, output: Any) -> None:
        self.now = False


class _GathersWhenRead:
    """Put before the class of a split module: gathers parameters that are read outside of their own module's forward."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        within, mesh = vars(self).get("_echelon_edge", (None, None))
        if within is None or not within.now or getattr(value, "device_mesh", None) is not mesh:
            return value
        if not isinstance(self, nn.Embedding):
            return gathered_copy(value)
        _gather(self, within)
        return super().__getattr__(name)  # type: ignore[misc]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch iterates over the states of all modules, which change
def _gather(module: Any, within: _Within) -> None:
    with for_now(within, now=False):  # torch reads the parameters, too, which must not gather again
        module.set_reshard_after_forward(False)
        module.unshard()


class _NoView(torch.autograd.Function):
    """The same memory, as a tensor that autograd does not treat as a view."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def give_no_views(module: nn.Module) -> None:
    """Have a split module return no views, before `fully_shard` puts its hook on the outputs. An in-place operation on a view
    (x = block(x); x += y) drops the view's hooks, so the module's parameters would not be gathered for the backward pass.
    """

    def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
        own: Any = _NoView.apply
        if not any(map(_is_tracked_view, tree_leaves(output))):
            return None
        return map_tensors(output, lambda value: own(value) if _is_tracked_view(value) else value)

    module.register_forward_hook(torch.compiler.disable(without_views), prepend=True)


def _is_tracked_view(value: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.requires_grad and value._base is not None


# A backward pass may reach a module's graph before it reaches an output with `fully_shard`'s hook: torch finds outputs only in
# containers and dataclasses. Then freed parameters would not be gathered yet, and gradients of parameters that were not freed
# would never be reduced. So torch's hook is also put on tensors in other objects (distributions), on tensors that layers keep for
# the loss, and on the loss itself if no output was found. Tested with torch 2.13; tests/parallel/test_edges.py notices a change.


def hear_of_all_outputs(module: nn.Module) -> None:
    """Put `fully_shard`'s hook on further tensors of a split module, after its own hook on the outputs."""
    layers = list(_layers_of_its_own(module))

    def listen(module: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        given = tracked_tensors(output)
        state = module._get_fsdp_state()
        state._is_unheard = not given  # not an attribute of the module: a pipeline checks what a pass changes there
        kept = [tensor for layer in layers for tensor in _kept(layer) if not hasattr(tensor, "_is_heard")]
        for tensor in (*given, *kept):
            if tensor is not output:
                tensor._is_heard = True  # type: ignore[attr-defined]  # a kept tensor may still be there after the next pass
                tensor.register_hook(state._pre_backward)

    module.register_forward_hook(torch.compiler.disable(listen))


def hear_of_loss(root: Any, loss: torch.Tensor) -> None:
    """Put the hook on the loss if no output of the root's latest forward was found. Call before the backward pass."""
    if is_fully_sharded(root) and loss.requires_grad:
        state = root._get_fsdp_state()
        if getattr(state, "_is_unheard", False):
            loss.register_hook(state._pre_backward)


def _layers_of_its_own(module: nn.Module) -> Iterable[nn.Module]:
    yield module
    for child in module.children():
        if not is_fully_sharded(child):
            yield from _layers_of_its_own(child)


def _kept(layer: nn.Module) -> Iterable[torch.Tensor]:
    """Tensors with a graph among a layer's attributes, and in attributes that are lists ending with a tensor."""
    for value in vars(layer).values():
        each = value if isinstance(value, list | tuple) else (value,)
        if each and isinstance(each[-1], torch.Tensor):
            yield from (tensor for tensor in each if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None)


def keep_readable(root: nn.Module, parts: list[nn.Module]) -> None:
    """Let parameters of the split modules `parts` be read in the root's forward, outside of their own module's forward."""
    within = _Within()
    for part in parts:
        mesh = next((p.device_mesh for p in part.parameters() if is_split(p)), None)  # type: ignore[attr-defined]
        if mesh is None:
            continue
        kind = type(part)
        # torch finds a module's original class by its index in the MRO: two classes are put before the two of fully_shard.
        replace_class(part, "embedding_and_head", in_front_of(kind, _GathersWhenRead, _orig_cls_mro_index=4))
        vars(part)["_echelon_edge"] = (within, mesh)
    if parts:
        root.register_forward_pre_hook(torch.compiler.disable(within.enter))  # after torch's, which looks at all parameters
        root.register_forward_hook(torch.compiler.disable(within.leave), always_call=True)


# The dtype in which `fully_shard` gathers parameters: what the precision means for a split module.
#
# Autocast casts each float32 weight where it is used, and the backward pass keeps the copies: a whole model in half precision on
# every rank. So a split module's parameters are cast shard by shard before they are gathered, which also halves the traffic.
# Autocast stays on: it has no weights left to cast, and casts losses, softmax and products of mixed dtypes as in one process.
# Inputs are not cast: a time step or a target among the arguments keeps its digits.
#
# Shards, reduced gradients and optimizer state stay float32. A layer that computes in float32 under autocast and cannot take
# weights of another dtype, such as batch norm, is a unit of its own, gathered in float32.

_ALWAYS = (nn.modules.batchnorm._NormBase, nn.PReLU, nn.Bilinear, nn.EmbeddingBag)  # _NormBase: batch and instance norms
# On a GPU, autocast computes these norms in float32 whatever the weights' dtype, and an embedding sums gradients in float32.
_ON_CPU = (nn.LayerNorm, nn.GroupNorm, nn.Embedding)


def policy_for(part: nn.Module, precision: Precision | None, given: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The user's policy, completed by the precision where the policy leaves dtypes open.

    Args:
        part: the module to be split with this policy.
        given: the user's policy.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = given or MixedPrecisionPolicy()
    if not decides(precision, policy) or not _can_be_cast(part.parameters()):
        return policy
    assert precision is not None
    reduce = policy.reduce_dtype or torch.float32
    return replace(policy, param_dtype=precision.dtype, reduce_dtype=reduce, cast_forward_inputs=False)


def decides(precision: Precision | None, given: MixedPrecisionPolicy | None) -> bool:
    """Whether the precision, not the user's policy, decides the dtype in which parameters are gathered."""
    return precision is not None and precision.dtype is not None and (given is None or given.param_dtype is None)


def _can_be_cast(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether autocast would cast all of these: not float64, which it leaves alone, nor complex, which would lose a half."""
    kept = (torch.float32, torch.bfloat16, torch.float16)
    return all(p.dtype in kept or not (p.is_floating_point() or p.is_complex()) for p in parameters)


def in_full(module: nn.Module, device: torch.device) -> Blocks:
    """The submodules whose parameters are gathered in float32, innermost first."""
    on_cpu = device.type == "cpu"
    kinds = (*_ALWAYS, *_ON_CPU) if on_cpu else _ALWAYS

    def whole(part: nn.Module) -> bool:
        return isinstance(part, kinds) or parametrize.is_parametrized(part) or (on_cpu and _is_a_norm(part))

    modules = [(n, m) for n, m in module.named_modules() if n and whole(m) and any(True for _ in m.parameters())]
    return sorted(modules, key=lambda pair: -pair[0].count("."))


def _is_a_norm(part: nn.Module) -> bool:
    """Whether it may be anybody's norm, for example by `F.layer_norm`: no children, and only vectors for parameters."""
    return next(part.children(), None) is None and all(p.dim() <= 1 for p in part.parameters(recurse=False))


def always_under_autocast(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """Run calls of the module outside of a step, from hooks or scripts, under autocast, too: its weights are in half precision
    there as well, and its arguments are not.
    """
    entered: list[Any] = []

    def before(_: nn.Module, args: Any) -> None:
        entered.append(None if torch.is_autocast_enabled(device.type) else precision.autocast(device))
        if entered[-1] is not None:
            entered[-1].__enter__()

    def after(_: nn.Module, args: Any, made: Any) -> None:
        # Empty if the call failed before `before` ran.
        if entered and (context := entered.pop()) is not None:
            context.__exit__(None, None, None)

    module.register_forward_pre_hook(torch.compiler.disable(before))
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)


def follow_unfreezing(parts: Sequence[nn.Module], split: set[nn.Parameter]) -> None:
    """Have `fully_shard` choose a unit's dtypes anew when a unit that was frozen as a whole is trained. It looks at
    trained parameters, once (torch 2.13), and without any leaves later gradients in half precision, which torch refuses.

    Args:
        parts: the unit's modules, which `fully_shard` has split.
        split: parameters of other units, within these modules; the unit's own are added.
    """
    own = [(part, name) for part in parts for name, p in part.named_parameters() if p not in split]
    split.update(p for part in parts for p in part.parameters())
    frozen = False

    def look(first: Any, _: Any) -> None:
        nonlocal frozen
        if not any(part.get_parameter(name).requires_grad for part, name in own):
            frozen = True
            return
        if frozen:
            first.unshard()  # torch's hook has gathered it already
        watch.remove()

    watch = parts[0].register_forward_pre_hook(torch.compiler.disable(look))


# Parameters that `fully_shard` cannot split stay whole on every rank; `gradients/unreduced_params` averages their gradients.


def unsplittable(module: nn.Module) -> set[nn.Parameter]:
    """Scalars and empty parameters, which `fully_shard` refuses or breaks on; complex ones, which it would gather as real numbers
    if a precision is set; with an older torch, all that are not floating-point.
    """
    integers = shards_integers()
    return {
        p
        for p in module.parameters()
        if p.dim() == 0 or p.numel() == 0 or p.is_complex() or not (integers or p.is_floating_point())
    }


def of_another_type(module: nn.Module, units: Iterable[Sequence[nn.Module]], ignored: set[nn.Parameter]) -> set[nn.Parameter]:
    """Trained parameters whose dtype differs from most in their unit: `fully_shard` takes one dtype per unit.

    Args:
        units: modules that are gathered together; parameters in none of them are gathered with the root.
        ignored: parameters that already stay whole.
    """
    others: set[nn.Parameter] = set()
    done = set(ignored)
    for modules in (*units, (module,)):
        own_parameters = dict.fromkeys(
            p for each in modules for p in each.parameters() if p not in done
        )  # in order: the same on all ranks
        done |= own_parameters.keys()
        sizes: Counter[torch.dtype] = Counter()
        for parameter in own_parameters:
            sizes[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
        main = max(sizes, key=sizes.__getitem__, default=None)
        others |= {p for p in own_parameters if p.requires_grad and p.dtype is not main}
    if others:
        first = next(name for name, p in module.named_parameters() if p in others)
        logger.warning(
            "%s parameters, such as %s, have another dtype than most parameters around them: every rank holds them whole",
            len(others),
            first,
        )
    return others
