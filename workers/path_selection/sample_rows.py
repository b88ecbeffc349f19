"""Rows to try a MoE layer with: random ones, or those that a model brought to it."""

from typing import NamedTuple

import torch

from ...dispatch.moe_layer import MoeLayer


class SampleRows(NamedTuple):
    """What one rank brings to a layer.

    Attributes:
        x_TH: rows, in the dtype that the model computes in.
        expert_ids_TK: global ids.
        expert_weights_TK: routing weights.
    """

    x_TH: torch.Tensor
    expert_ids_TK: torch.Tensor
    expert_weights_TK: torch.Tensor

    def first(self, num_rows: int) -> "SampleRows":
        """The first rows, or all where there are fewer."""
        return SampleRows(*(tensor[:num_rows] for tensor in self))


def random_rows(layer: MoeLayer, num_rows: int, seed: int, device: torch.device) -> SampleRows:
    """Rows of unit variance with routings spread evenly over all experts; other rows for another seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = layer.shape
    x_TH = torch.randn(num_rows, shape.hidden_size, generator=generator)
    scores_TE = torch.rand(num_rows, shape.num_experts, generator=generator)
    weights_TK, ids_TK = scores_TE.topk(shape.top_k, dim=-1)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    weights_TK = weights_TK.to(device, getattr(torch, shape.weights_dtype))
    return SampleRows(x_TH.to(device, layer.dtype), ids_TK.to(device), weights_TK)
