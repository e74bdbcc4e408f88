"""Layers and losses that work when split over ranks: mixtures of experts, the loss of a large vocabulary, split sequences."""

from echelon.parallel.context.attention import positions, whole_sequence
from echelon.parallel.experts.loads import auxiliary_loss, balance_experts, expert_loads
from echelon.parallel.experts.moe import MoE
from echelon.parallel.experts.stacks import GroupedExperts
from echelon.parallel.recipe.activation import checkpoint_wrapper
from echelon.parallel.tensor.linear_cross_entropy import linear_cross_entropy

__all__ = [
    "GroupedExperts",
    "MoE",
    "auxiliary_loss",
    "balance_experts",
    "checkpoint_wrapper",
    "expert_loads",
    "linear_cross_entropy",
    "positions",
    "whole_sequence",
]
