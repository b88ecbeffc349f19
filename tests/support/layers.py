"""MoE layers as ranks describe them, without a model."""

from collections.abc import Callable
from typing import NoReturn

import torch
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.experts.expert_weights import PLAIN, ExpertWeights
from expert_pool.dispatch.moe_layer import MoeLayer

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def no_forward(*_: torch.Tensor) -> NoReturn:
    raise AssertionError("the model's own experts are not asked")


def layer_of(
    shape: MoeShape,
    ep_size: int = 1,
    rank: int = 0,
    index: int = 0,
    weights: ExpertWeights | None = None,
    forward: Forward = no_forward,
) -> MoeLayer:
    """A layer of one rank; without weights, where nothing is read of them."""
    num_local = shape.num_local(ep_size)
    weights = weights or ExpertWeights(shape.name, PLAIN, {})
    return MoeLayer(index, shape, torch.bfloat16, num_local, rank * num_local, weights, forward)
