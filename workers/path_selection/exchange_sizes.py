"""Sizes of the buffers on the way to the experts, and formats of their rows, from a rank's configuration."""

import torch

from ...dispatch.budgets.budget import ExchangeBudget, RowFormat, exchange_budget, exchange_rows
from ...dispatch.experts.pair_budget import ExpertShape, PairBudget, pair_budget
from ..model.spec import ModelSpec
from ..rank_config import RankConfig


def row_formats(spec: ModelSpec) -> list[RowFormat]:
    """The wire format of each MoE layer."""
    return [
        RowFormat(layer.hidden_size, layer.top_k, getattr(torch, spec.dtype), getattr(torch, layer.weights_dtype))
        for layer in spec.moe
    ]


def budget_for(config: RankConfig) -> ExchangeBudget:
    """Exchange buffers of each rank."""
    return exchange_budget(config.limits, config.layout, row_formats(config.spec), capacity=config.capacity)


def pair_budget_for(config: RankConfig) -> PairBudget | None:
    """Buffers of each rank's CuTe DSL experts; `None` where others compute, or where what computes is measured."""
    if config.experts != "cutedsl" or config.dispatch in ("mega", "measured"):
        return None
    return largest_pair_budget(config)


def largest_pair_budget(config: RankConfig) -> PairBudget:
    """Buffers of each rank's CuTe DSL experts, whether or not they are what computes."""
    ep_size = config.layout.world_size
    shapes = [
        ExpertShape(layer.hidden_size, layer.intermediate_size, layer.top_k, layer.num_experts // ep_size)
        for layer in config.spec.moe
    ]
    return pair_budget(exchange_rows(config.layout, config.capacity), shapes)
