"""Which submodules are sharded, recomputed or compiled one by one: a model's repeated blocks, or those that the user chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from echelon.common.arguments import several
from echelon.common.errors import LayoutError
from echelon.parallel.names import names_of_each

__all__ = ["blocks_by_policy", "blocks_to_shard", "chosen_blocks", "without_shared"]

Blocks = list[tuple[str, nn.Module]]
_LISTS = (nn.ModuleList, nn.ModuleDict)  # containers without a forward


def blocks_to_shard(module: nn.Module) -> Blocks:
    """The repeated blocks of a model: children of a ModuleList, ModuleDict or Sequential that share a class, outermost first.
    Lists inside of them are replaced by their items, since lists are not called: a layer may be a list of its attention and MLP.

    Blocks are the right size: sharding every layer would cost a collective each; sharding only the root would gather the whole
    model at once.
    """
    blocks: Blocks = []
    seen: set[nn.Module] = set()  # a module registered in several places counts at the first

    def visit(name: str, parent: nn.Module) -> None:
        children: Blocks = []
        for within, child in _called(name, parent):
            if child not in seen:
                seen.add(child)
                children.append((within, child))
        kinds = [type(child) for _, child in children if isinstance(parent, (*_LISTS, nn.Sequential))]
        for within, child in children:
            repeats = kinds.count(type(child)) > 1 and any(True for _ in child.parameters())
            if repeats and any(True for _ in child.children()):
                blocks.append((within, child))
            else:
                visit(within, child)

    visit("", module)
    return blocks


def _called(name: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children by name; a list inside of a list or Sequential is replaced by its items."""
    for child_name, child in parent.named_children():
        within = f"{name}.{child_name}" if name else child_name
        if isinstance(child, _LISTS) and isinstance(parent, (*_LISTS, nn.Sequential)):
            yield from _called(within, child)
        else:
            yield within, child


def chosen_blocks(module: nn.Module, chosen: Iterable[str | type[nn.Module]], option: str) -> Blocks:
    """The submodules of these names and classes, innermost first.

    Raises:
        UsageError: no submodule has one of the names or classes, or it is a container without a forward. Names `option`.
    """
    what = "a list of names or classes of submodules"
    wanted = several(option, [chosen] if isinstance(chosen, str) else chosen, what, lambda one: isinstance(one, str | type))
    blocks: Blocks = []
    for one in wanted:
        hits = [(n, m) for n, m in module.named_modules() if n and (n == one if isinstance(one, str) else isinstance(m, one))]
        if not hits:
            what = f"named {one!r}" if isinstance(one, str) else f"of class {one.__name__}"
            raise LayoutError(f"{option}: no submodule {what} in {type(module).__name__}.")
        blocks += [hit for hit in hits if hit not in blocks]
    for name, block in blocks:
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):  # what is done to a block that is never called has no effect
            raise LayoutError(
                f"{option}: {name} is a {type(block).__name__}, which has no forward of its own. Name its children."
            )
    return innermost_first(blocks)


def blocks_by_policy(module: nn.Module, policy: Any, ignored: set[nn.Parameter]) -> Blocks:
    """The submodules chosen by an `auto_wrap_policy` of the older FullyShardedDataParallel, innermost first. The policy is a set
    of classes, one of torch's policies, or a function of (module, recurse, nonwrapped_numel).
    """
    if isinstance(policy, (set, frozenset, list, tuple)):
        return chosen_blocks(module, policy, "auto_wrap_policy")
    if callable(policy):
        return innermost_first(_by_function(module, policy, ignored))
    return innermost_first(_by_custom_policy(module, policy))


def _by_function(root: nn.Module, policy: Callable[..., bool], ignored: set[nn.Parameter]) -> Blocks:
    """Walk as torch does: children first, so that a policy by size sees the parameters that they have left over."""
    chosen: Blocks = []

    def visit(name: str, module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters() if p not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        taken = sum(visit(f"{name}.{n}" if name else n, child) for n, child in module.named_children())
        if name and policy(module=module, recurse=False, nonwrapped_numel=size - taken):
            chosen.append((name, module))
            return size
        return taken

    visit("", root)
    return chosen


def _by_custom_policy(module: nn.Module, policy: Any) -> Blocks:
    """torch's CustomPolicy has only `_run_policy` to apply it (torch 2.13; test_strategies.py notices a change)."""
    run = getattr(policy, "_run_policy", None)
    if run is None:
        raise LayoutError(f"auto_wrap_policy must be a set of module classes or a policy function, got {type(policy).__name__}.")
    options: dict[nn.Module, dict[str, Any]] = run(module, set(), {})
    chosen = [(n, m) for n, m in module.named_modules() if n and m in options]
    for name, block in chosen:
        if options[block]:
            raise LayoutError(
                f"auto_wrap_policy gives {name} options of its own ({', '.join(options[block])}), but all blocks have the "
                "layout's options. If one must differ, call fully_shard yourself and pass the module without a layout."
            )
    return chosen


def innermost_first(blocks: Sequence[tuple[str, nn.Module]]) -> Blocks:
    """Sort blocks innermost first, since fully_shard gives each parameter to the first call that reaches it."""
    return sorted(blocks, key=lambda pair: -pair[0].count("."))


def without_shared(module: nn.Module, blocks: Blocks) -> Blocks:
    """Leave out blocks with a parameter that is also used outside of them: if split with the block, it would not stay tied."""
    owners = names_of_each(module.named_parameters(remove_duplicate=False))
    return [
        (name, block)
        for name, block in blocks
        if all(owner.startswith(f"{name}.") for p in block.parameters() for owner in owners[p])
    ]
