"""Experts of another's own that read kept weights in e4m3, on CPUs: a module that the setting `plugins` may name.

A file `lacks_N` in the model folder has rank N refuse them, as one without a library would.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.experts.expert_weights import gated
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.probe import HostGroup
from expert_pool.dispatch.registry import register
from expert_pool.dispatch.way import ExpertsWay, RankParts, places


class KeptReader(ExpertsWay):
    """As kernels do: weights in an order of its own, from codes and scales; the stored ones are given up then."""

    kind = name = "kept_reader"
    devices = places(cpu=5)
    reads = ("e4m3",)
    weights_layout = "columns first"
    num_bytes = 0
    tuning = ""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        lacks = Path(parts.settings.spec.path, f"lacks_{parts.rank}").exists()
        return "its library is not installed; set stored_weights to 'expand'" if lacks else None

    @classmethod
    def make(cls, parts: RankParts) -> Any:
        return cls()

    def adopt(self, layer: MoeLayer) -> None:
        if layer.index not in self._weights:
            self._weights[layer.index] = columns_first(layer, "gate_up"), columns_first(layer, "down")

    def prepare(self, group: HostGroup | None) -> None:
        """Nothing is compiled."""

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        gate_up, down = self._weights[layer.index]
        gating = layer.shape.gating
        assert gating is not None
        y_RH = torch.zeros_like(dispatched.x_RH)
        for expert in range(layer.num_local):
            row, slot = (dispatched.local_ids_RK == expert).nonzero(as_tuple=True)
            hidden = gated(gating, dispatched.x_RH[row] @ gate_up[expert])
            y_RH.index_add_(0, row, (hidden @ down[expert]) * dispatched.expert_weights_RK[row, slot].unsqueeze(1))
        return y_RH


def columns_first(layer: MoeLayer, name: str) -> torch.Tensor:
    """`[E, K, N]` of codes and scales in blocks."""
    coding = layer.weights.coding
    assert coding is not None
    codes, scales = layer.weights.tensor(f"{name}.codes"), layer.weights.tensor(f"{name}.scales")
    rows, columns = codes.shape[-2:]
    factors = scales.repeat_interleave(coding.block[0], 2)[:, :, :rows].repeat_interleave(coding.block[1], 3)
    return (codes.float() * factors[..., :columns]).flatten(1, 2).mT.contiguous()


register(KeptReader)
