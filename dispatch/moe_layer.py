"""One MoE layer of a rank, as what computes its experts sees it before any step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .budgets.path_settings import shape_of
from .experts.local_experts import LocalExperts


@dataclass(frozen=True)
class MoeLayer:
    """A layer with this rank's experts; all but the weights are equal on every rank.

    Attributes:
        name: for messages.
        num_experts: over all ranks.
        top_k: experts a token goes to.
        hidden_size: of a token.
        intermediate_size: width between the projections.
        weights_dtype: of routing weights.
        experts: this rank's.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    weights_dtype: torch.dtype
    experts: LocalExperts

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The weights by name, stacked over this rank's experts."""
        return {name: getattr(self.experts.module, name) for name in ("gate_up_proj", "down_proj")}

    @property
    def shape(self) -> str:
        """Of the layer, as tables name it."""
        return shape_of(self.num_experts, self.hidden_size, self.intermediate_size, self.top_k)

    def release_weights(self) -> None:
        """Drop the model's own weights, which something else holds now."""
        for weights in self.parameters.values():
            weights.data = weights.data.new_empty(0)


def one_of_each_shape(layers: Sequence[MoeLayer]) -> dict[str, MoeLayer]:
    """The first layer of each shape, by shape, in order."""
    found: dict[str, MoeLayer] = {}
    for layer in layers:
        found.setdefault(layer.shape, layer)
    return found
