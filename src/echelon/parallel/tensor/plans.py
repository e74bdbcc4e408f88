"""How a module's layers are split over ranks: as the user says, as the module says, as transformers says, or inferred.

What is inferred is right for any code: attention, whose code may count on all heads, gets the outputs of its first layers put
together again, and only their weights and products are split. Between the two halves of an MLP everything works on single
features if its submodules, of which one is an activation, say so: then these stay split. Nothing is inferred in silence:
`Plan.text` is logged.
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

# What may be written in a plan. The others are names that transformers has or had for the same.
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
# Styles of transformers for experts, which all ranks then compute whole, and for what is whole anyway.
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

# What is right for any code, beside a layer that transformers splits as nothing else does.
_WITH_ALL_HEADS = {"colwise": "colwise_gather", "rowwise": "rowwise_split"}

_QUERIES = {
    *("q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "to_q", "to_k", "to_v"),
    *("c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv", "query_key_value", "query_proj", "key_proj", "value_proj"),
}
_OUTS = {"o", "o_proj", "out_proj", "out", "proj", "c_proj", "wo", "to_out", "dense"}
# (what widens, what narrows), by the names that one parent gives them.
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
    """Styles by pattern of names, and where they are from.

    Args:
        source: for messages.
        given: the user wrote it for this module, so that what does not fit is an error; else it is left out and reported.
        whole: what stays whole on every rank, and why.
    """

    source: str
    styles: Mapping[str, Any]
    given: bool = True
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """For people: a line for each pattern."""
        width = max([len(name) for name in (*self.styles, *self.whole)], default=0)
        lines = [f"  {name:<{width}}  {style}" for name, style in self.styles.items()]
        return "\n".join([f"{self.source}:", *lines, *(f"  {name:<{width}}  whole: {why}" for name, why in self.whole.items())])


def tp_plan(module: nn.Module, size: int = 1) -> dict[str, Any]:
    """The plan by which tensor parallelism splits a module that is given none: patterns of submodule names to styles.

    It is the module's own `tp_plan`, or that of transformers, or inferred from names and shapes of common attention and MLP
    blocks. Print it before you train, change what you know better, and give it to Layout(plan=...).

    Args:
        module: not yet made parallel; the meta device will do.
        size: ranks that share a layer: inferred parts of the vocabulary that it does not divide are left whole.
    Raises:
        UsageError: there is none, and nothing can be inferred.
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, kind=TensorParallelError)
    return dict(plan_of(module, None, size).styles)


def plan_of(module: nn.Module, given: Mapping[str, Any] | None, size: int) -> Plan:
    """The plan that counts for a module.

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
    """The plans that classes or modules have, outermost first."""
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


# --- transformers, and what is inferred


def _with_inferred(module: nn.Module, own: Mapping[str, Any], size: int) -> Plan:
    """A plan of transformers, which says what any model of a family might have; what it says nothing of is inferred."""
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
    if not inner:  # the head at most: a family without a plan for its blocks
        blocks = dict(_blocks(module, size, whole))
        for name, style in blocks.items():
            alike = all(blocks.get(other) == style for other in matching(_pattern(name), names))
            styles.setdefault(_pattern(name) if alike else name, style)
    _words(module, styles, whole, size)
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            whole[_pattern(name)] = "torch's MultiheadAttention has its first weights in one parameter, and takes them itself"
    source = f"inferred for {type(module).__name__}" if not inner else f"as transformers says of {type(module).__name__}"
    return Plan(source, styles, False, whole)


def _pattern(name: str) -> str:
    """The name with `*` for its first number, that of a block."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join("*" if i == first else part for i, part in enumerate(parts))


def _blocks(module: nn.Module, size: int, whole: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, parent in module.named_modules():
        if isinstance(parent, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)):
            continue  # torch's code takes the weights of their layers itself
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
        # Without an activation among the children, what forward does between the halves is not known: softmax needs all features.
        known = any(_is_elementwise(child) and not isinstance(child, _EACH) for child in others)
        if known and len(features) == 1 and all(_is_elementwise(child) for child in others):
            return dict.fromkeys(widening, "colwise") | {narrow: "rowwise"}
        return dict.fromkeys(widening, "colwise_gather") | {narrow: "rowwise_split"}
    return {}


def _pairs_in_sequence(parent: nn.Sequential) -> dict[str, str]:
    """Linear, functions of single features, Linear."""
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
    """Whether it is known to work on each feature by itself: dropout, and activation functions, which have no parameters."""
    if any(True for _ in part.parameters()) or isinstance(part, _ACROSS):
        return False
    ours = type(part).__module__
    return isinstance(part, _EACH) or ours == "torch.nn.modules.activation" or ours == "transformers.activations"


# --- the vocabulary


def _words(module: nn.Module, styles: dict[str, Any], whole: dict[str, str], size: int) -> None:
    """What has a row for each word is split by words: an embedding and the Linear that shares its weight, or a head alone."""
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
    """The names of the layers that share a weight with a row for each word."""
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
    """Whether these names of one parameter are of these layers and of others, such as a bias that a parent has, too."""
    inside = [name.rpartition(".")[0] in group for name in names]
    return any(inside) and not all(inside)


def _can_be_split(module: nn.Module, group: list[str]) -> bool:
    """A Linear among them is called as a layer: code that takes an embedding's weight by itself has none."""
    return any(isinstance(module.get_submodule(name), nn.Linear) for name in group)


def _refusal(module: nn.Module, plan: Plan) -> str:
    why = "".join(f" {name} stays whole: {reason}." for name, reason in list(plan.whole.items())[:2])
    return (
        f"layout 'tp': {type(module).__name__} has no tp_plan that says how its layers are split, and none can be inferred."
        f"{why} Give Layout(plan=...) or the module's attribute tp_plan a dict such as "
        '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.'
    )
