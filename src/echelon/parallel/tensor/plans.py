"""How a module's layers are split over ranks: by a plan of the user, the module or transformers, or by an inferred plan.

An inferred plan is right for any code. Attention code may assume all heads are present, so the outputs of its query, key and
value layers are gathered: only their weights and products are split. The two halves of an MLP stay split only if all submodules
between them are elementwise and one of them is an activation. An inferred plan is always logged (`Plan.text`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from echelon.common.errors import TensorParallelError, require
from echelon.hf.layers import without_adapter
from echelon.parallel.names import matching, tied_names
from echelon.parallel.tensor.layers import has_own_weights, is_transposed, split_dims

__all__ = ["ALIASES", "STYLES", "Plan", "plan_of", "tp_plan"]

# The styles of a plan. ALIASES maps names that transformers uses or used for the same.
STYLES = ("colwise", "rowwise", "colwise_gather", "rowwise_split", "summed")
ALIASES = {
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "colwise_logits": "colwise_gather",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise_gather",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "replicated_with_grad_allreduce": "summed",
}
# transformers' styles for experts, which every rank then computes in full, and for layers that are whole anyway.
_LEFT_WHOLE = {
    "replicate",
    "moe_tp_experts",
    "packed_colwise",
    "packed_rowwise",
    "grouped_gemm",
    "ep_dispatch_experts",
    "ep_router",
    "gather",
    "local_packed_rowwise",
}

# Replacements that are right for any code, used for the siblings of a layer whose transformers style is unknown here.
_WITH_ALL_HEADS = {"colwise": "colwise_gather", "rowwise": "rowwise_split"}

_QUERIES = {
    *("q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "to_q", "to_k", "to_v"),
    *("c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv", "query_key_value", "query_proj", "key_proj", "value_proj"),
}
_OUTS = {"o", "o_proj", "out_proj", "out", "proj", "c_proj", "wo", "to_out", "dense"}
# (widening layers, narrowing layer), by their names in one parent.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate", "up"), "down"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("wi",), "wo"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("w1",), "w2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_HEADS_OF_WORDS = {"lm_head", "head", "output", "embed_out", "decoder", "unembed", "output_layer"}


@dataclass(frozen=True)
class Plan:
    """Styles by pattern of names, and their origin.

    Args:
        source: where the plan comes from, for messages.
        given: the user or the module states this plan, so a layer that cannot be split is an error. Else it is left whole and
            reported.
        whole: by pattern, the layers that stay whole on every rank, with the reason.
    """

    source: str
    styles: Mapping[str, Any]
    given: bool = True
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The plan as text, one line for each pattern."""
        width = max([len(name) for name in (*self.styles, *self.whole)], default=0)
        lines = [f"  {name:<{width}}  {style}" for name, style in self.styles.items()]
        return "\n".join([f"{self.source}:", *lines, *(f"  {name:<{width}}  whole: {why}" for name, why in self.whole.items())])


def tp_plan(module: nn.Module, size: int = 1) -> dict[str, Any]:
    """The default plan by which tensor parallelism splits a module: patterns of submodule names to styles.

    It is the module's own `tp_plan`, or that of transformers, or inferred from names and shapes of common attention and MLP
    blocks. Print it before you train, correct it if necessary, and pass it to Layout(plan=...).

    Args:
        module: not yet made parallel; it may be on the meta device.
        size: number of ranks that share a layer. Inferred layers whose split dim it does not divide are left whole.
    Raises:
        UsageError: there is none, and nothing can be inferred.
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, kind=TensorParallelError)
    return dict(plan_of(module, None, size).styles)


def plan_of(module: nn.Module, given: Mapping[str, Any] | None, size: int) -> Plan:
    """The plan to use for a module.

    Raises:
        UsageError: there is none, and nothing can be inferred.
    """
    if given:
        return Plan("as given", given)
    own = dict(_own(module))
    if own and not _is_of_transformers(module):
        return Plan(f"as {type(module).__name__}.tp_plan says", own)
    plan = _with_inferred(module, own, size)
    if not plan.styles:
        raise TensorParallelError(_refusal(module, plan))
    return plan


def _own(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Patterns and styles of the plans that the module or its submodules have; an outer plan replaces those inside it."""
    if prefix == "" or "tp_plan" in vars(module) or hasattr(type(module), "tp_plan"):
        has = "tp_plan" in vars(module) or hasattr(type(module), "tp_plan")
        plan = module.tp_plan if has else vars(module).get("_tp_plan")
        plan = plan() if callable(plan) else plan
        if isinstance(plan, Mapping) and plan:
            yield from ((f"{prefix}{name}", style) for name, style in plan.items())
            return
    for name, child in module.named_children():
        yield from _own(child, f"{prefix}{name}.")


def _is_of_transformers(module: nn.Module) -> bool:
    return any(hasattr(m, "config") and isinstance(vars(m).get("_tp_plan"), Mapping) for m in module.modules())


# --- transformers' plans and inferred ones


def _with_inferred(module: nn.Module, own: Mapping[str, Any], size: int) -> Plan:
    """Complete a plan of transformers, which lists the layers that any model of a family might have, by inference."""
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, Any] = {}
    whole: dict[str, str] = {}
    taken: set[str] = set()
    known = {*STYLES, *ALIASES, *_LEFT_WHOLE}
    odd = {pattern for pattern, style in own.items() if isinstance(style, str) and style not in known}
    beside = {pattern.rpartition(".")[0] for pattern in odd if matching(pattern, names)}
    for pattern, style in own.items():
        matched = matching(pattern, names)
        style = ALIASES.get(style, style)
        if pattern.rpartition(".")[0] in beside:
            style = _WITH_ALL_HEADS.get(style, style)
        if style in _LEFT_WHOLE or pattern in odd or not matched:
            if matched:
                whole[pattern] = f"{style} is transformers' style for {'parts of its outputs' if pattern in odd else 'experts'}"
            continue
        styles[pattern] = style
        taken |= set(matched)
    inner = any("." in name for name in taken if not isinstance(module.get_submodule(name), nn.Embedding))
    if not inner:  # the plan has at most the head: a family without a plan for its blocks
        blocks = dict(_blocks(module, size, whole))
        for name, style in blocks.items():
            alike = all(blocks.get(other) == style for other in matching(_pattern(name), names))
            styles.setdefault(_pattern(name) if alike else name, style)
    _words(module, styles, whole, size)
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            whole[_pattern(name)] = "torch's MultiheadAttention has its first weights in one parameter, and reads them directly"
    source = f"inferred for {type(module).__name__}" if not inner else f"as transformers says of {type(module).__name__}"
    return Plan(source, styles, False, whole)


def _pattern(name: str) -> str:
    """The name with `*` in place of its first number, the block's."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join("*" if i == first else part for i, part in enumerate(parts))


def _blocks(module: nn.Module, size: int, whole: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, parent in module.named_modules():
        if isinstance(parent, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)):
            continue  # torch's code reads the weights of their layers directly
        prefix = f"{name}." if name else ""
        layers = {n: inner for n, layer in parent.named_children() if _splits(inner := without_adapter(layer))}
        layers_found = _mlp(parent, layers)
        attention = {n: "colwise_gather" for n in layers if n in _QUERIES}
        if attention:
            attention |= {n: "rowwise_split" for n in layers if n in _OUTS and n not in layers_found}
        for some in (attention, layers_found):
            wrong = [
                n
                for n, style in some.items()
                if layers[n].get_parameter("weight").shape[split_dims(layers[n], style)["weight"]] % size
            ]
            if wrong:
                whole |= dict.fromkeys(
                    (_pattern(prefix + n) for n in some), f"{size} ranks do not divide layer {prefix}{wrong[0]}"
                )
            else:
                yield from ((prefix + n, style) for n, style in some.items())


def _mlp(parent: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    if isinstance(parent, nn.Sequential):
        return _pairs_in_sequence(parent)
    for widening, narrow in _MLPS:
        if narrow not in layers or not set(widening) <= layers.keys():
            continue
        if list(layers).index(narrow) < list(layers).index(widening[0]):  # an adapter: first "down", then "up"
            continue
        others = [child for n, child in parent.named_children() if n not in (*widening, narrow)]
        features = {_features(layers[n])[1] for n in widening} | {_features(layers[narrow])[0]}
        # Without an activation among the children, forward may do anything between the halves: a softmax needs all features.
        known = any(_is_elementwise(child) and not isinstance(child, _EACH) for child in others)
        if known and len(features) == 1 and all(_is_elementwise(child) for child in others):
            return dict.fromkeys(widening, "colwise") | {narrow: "rowwise"}
        return dict.fromkeys(widening, "colwise_gather") | {narrow: "rowwise_split"}
    return {}


def _pairs_in_sequence(parent: nn.Sequential) -> dict[str, str]:
    """Styles for each run of Linear, elementwise modules, Linear."""
    styles: dict[str, str] = {}
    first: str | None = None
    for name, child in parent.named_children():
        if _splits(child):
            if first is not None:
                styles |= {first: "colwise", name: "rowwise"}
                first = None
            else:
                first = name
        elif not _is_elementwise(child):
            first = None
    return styles


def _splits(layer: nn.Module) -> bool:
    plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return (plain or is_transposed(layer)) and has_own_weights(layer)


def _features(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs)"""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(layer) else (columns, rows)


_ACROSS = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.Softmin,
    nn.GLU,
    nn.MultiheadAttention,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_EACH = (nn.Dropout, nn.Identity)


def _is_elementwise(part: nn.Module) -> bool:
    """Whether the module is known to be elementwise: dropout and parameter-free activation functions."""
    if any(True for _ in part.parameters()) or isinstance(part, _ACROSS):
        return False
    ours = type(part).__module__
    return isinstance(part, _EACH) or ours == "torch.nn.modules.activation" or ours == "transformers.activations"


# --- the vocabulary


def _words(module: nn.Module, styles: dict[str, Any], whole: dict[str, str], size: int) -> None:
    """Split layers with a row per token of the vocabulary by rows: an embedding and the Linear tied to it, or a head alone."""
    for group in _tables(module, styles):
        layers = {name: module.get_submodule(name) for name in group}
        for name in group:
            styles.pop(name, None)
            styles.pop(_pattern(name), None)
        rows = len(layers[group[0]].weight)  # type: ignore[arg-type]
        odd = [name for name, layer in layers.items() if not (_splits(layer) or isinstance(layer, nn.Embedding))]
        odd += [
            name
            for each in tied_names(module.named_parameters(remove_duplicate=False))
            if _ties_more(each, group)
            for name in each
        ]
        if odd:
            whole |= dict.fromkeys(group, f"{odd[0]} shares a parameter with it")
        elif rows % size:
            whole |= dict.fromkeys(group, f"{size} ranks do not divide its {rows} rows")
        else:
            styles |= {n: "rowwise" if isinstance(m, nn.Embedding) else "colwise_gather" for n, m in layers.items()}


def _tables(module: nn.Module, styles: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names of layers with a row per token of the vocabulary, in groups that share one weight."""
    named = tied_names(module.named_parameters(remove_duplicate=False))
    tied = [[name.rpartition(".")[0] for name in group] for group in named if all(n.endswith(".weight") for n in group)]
    tied = [group for group in tied if any(isinstance(module.get_submodule(name), nn.Embedding) for name in group)]
    yield from (group for group in tied if len(group) > 1 and _can_be_split(module, group))
    for name, layer in module.named_modules():
        alone = not any(name in group for group in tied) and _pattern(name) == name
        is_head = _splits(layer) and not is_transposed(layer) and (name in styles or name in _HEADS_OF_WORDS)
        if alone and (is_head or (isinstance(layer, nn.Embedding) and name in styles)):
            yield [name]


def _ties_more(names: list[str], group: list[str]) -> bool:
    """Whether a parameter belongs both to layers of the group and to others, such as a bias that a parent also has."""
    inside = [name.rpartition(".")[0] in group for name in names]
    return any(inside) and not all(inside)


def _can_be_split(module: nn.Module, group: list[str]) -> bool:
    """Whether the group has a Linear, which is called as a layer. Otherwise code may read the embedding's weight directly."""
    return any(isinstance(module.get_submodule(name), nn.Linear) for name in group)


def _refusal(module: nn.Module, plan: Plan) -> str:
    why = "".join(f" {name} stays whole: {reason}." for name, reason in list(plan.whole.items())[:2])
    return (
        f"layout 'tp': {type(module).__name__} has no tp_plan that says how its layers are split, and none can be inferred."
        f"{why} Give Layout(plan=...) or the module's attribute tp_plan a dict such as "
        '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.'
    )
