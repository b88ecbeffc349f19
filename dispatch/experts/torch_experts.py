"""Experts in PyTorch: the model family's own experts module, on the rows that reached this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import PLAIN_EXPERTS
from ..way import ExpertsWay, RankParts, places

if TYPE_CHECKING:
    import torch

    from ..dispatchers.contract import Dispatched
    from ..moe_layer import MoeLayer
    from ..probe import HostGroup


class TorchExperts(ExpertsWay):
    """The model's own experts module, with PyTorch's grouped GEMM; needs no preparation.

    Repeats to the bit.

    Args:
        device: where rows are; on a GPU, shapes must not depend on the routing.
    """

    kind = PLAIN_EXPERTS
    devices = places(cpu=0, cuda=1)
    is_plain = True
    name = "torch grouped_mm"
    num_bytes = 0
    tuning = ""

    @classmethod
    def make(cls, parts: RankParts) -> TorchExperts:
        return cls(parts.device)

    def __init__(self, device: torch.device):
        self._compute = static_rows if device.type == "cuda" else routed_pairs

    def adopt(self, layer: MoeLayer) -> None:
        """Nothing: the model computes its own layer."""

    def prepare(self, group: HostGroup | None) -> None:
        """Nothing is compiled or tuned."""

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        return self._compute(layer, dispatched.x_RH, dispatched.local_ids_RK, dispatched.expert_weights_RK)


def routed_pairs(
    layer: MoeLayer, x_RH: torch.Tensor, expert_ids_RK: torch.Tensor, expert_weights_RK: torch.Tensor
) -> torch.Tensor:
    """Compute the (row, expert) pairs that are this rank's own and nothing else; shapes follow the routing.

    Args:
        layer: with this rank's experts.
        x_RH: `[R, H]` received rows.
        expert_ids_RK: `[R, K]` local expert ids; outside `[0, num_local)` where there is nothing to compute.
        expert_weights_RK: `[R, K]` routing weights.

    Returns:
        `[R, H]`: weighted sums over this rank's experts, zero where it owns none of a row's experts.
    """
    row, slot = _is_here(layer, expert_ids_RK).nonzero(as_tuple=True)
    y_RH = x_RH.new_zeros(x_RH.shape)
    if row.numel() == 0:
        return y_RH
    ids_P1 = expert_ids_RK[row, slot].unsqueeze(1).long()
    weights_P1 = expert_weights_RK[row, slot].unsqueeze(1)
    return y_RH.index_add_(0, row, layer.forward(x_RH[row], ids_P1, weights_P1).to(y_RH.dtype))


def static_rows(
    layer: MoeLayer, x_RH: torch.Tensor, expert_ids_RK: torch.Tensor, expert_weights_RK: torch.Tensor
) -> torch.Tensor:
    """The same with shapes that do not depend on the routing, as a recorded step needs; see `routed_pairs`.

    Slots with nothing to compute get the id that the grouped GEMM skips, and no weight.
    """
    here_RK = _is_here(layer, expert_ids_RK)
    ids_RK = expert_ids_RK.where(here_RK, layer.num_local).long()
    return layer.forward(x_RH, ids_RK, expert_weights_RK.masked_fill(~here_RK, 0.0))


def _is_here(layer: MoeLayer, expert_ids_RK: torch.Tensor) -> torch.Tensor:
    return (expert_ids_RK >= 0) & (expert_ids_RK < layer.num_local)
