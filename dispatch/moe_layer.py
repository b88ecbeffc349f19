"""One MoE layer of a rank, as a value: what is passed to everything that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .budgets.moe_shape import MoeShape

if TYPE_CHECKING:
    import torch

    from .experts.expert_weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """A layer with this rank's experts; all but `first_expert`, weights and forward are equal on every rank.

    Attributes:
        index: its place among the model's MoE layers; what is kept for a layer is kept by it.
        shape: over all ranks, with its traits.
        dtype: of rows, as the model computes.
        num_local: experts this rank owns.
        first_expert: id of the first of them.
        weights: of them.
        forward: the model family's own, `(x, local ids, routing weights) -> weighted sum`; skips ids from `num_local`
            on.
    """

    index: int
    shape: MoeShape
    dtype: torch.dtype
    num_local: int
    first_expert: int
    weights: ExpertWeights
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def name(self) -> str:
        """For messages."""
        return self.shape.name


def one_of_each_shape(layers: Sequence[MoeLayer]) -> dict[str, MoeLayer]:
    """The first layer of each shape, by its text, in order."""
    found: dict[str, MoeLayer] = {}
    for layer in layers:
        found.setdefault(layer.shape.text, layer)
    return found
