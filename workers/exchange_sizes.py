"""Sizes of the exchange buffers of a rank, from its configuration."""

import torch

from ..dispatch.budget import ExchangeBudget, RowFormat, exchange_budget
from .model_spec import ModelSpec
from .rank_config import RankConfig


def row_formats(spec: ModelSpec) -> list[RowFormat]:
    """The wire format of each MoE layer."""
    return [
        RowFormat(layer.hidden_size, layer.top_k, getattr(torch, spec.dtype), getattr(torch, layer.weights_dtype))
        for layer in spec.moe
    ]


def budget_for(config: RankConfig) -> ExchangeBudget:
    """Exchange buffers of each rank."""
    return exchange_budget(config.limits, config.layout, row_formats(config.spec), capacity=config.capacity)
