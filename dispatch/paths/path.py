"""A dispatcher with what computes experts behind it, as one path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..budgets.geometry import StepGeometry
from ..expert_path import HeldAlike

if TYPE_CHECKING:
    import torch

    from ..dispatchers.contract import Dispatcher
    from ..experts.backend import ExpertBackend
    from ..moe_layer import MoeLayer
    from ..probe import HostGroup


class DispatchedPath:
    """A dispatcher with an expert backend behind it; keeps `dispatch.expert_path.MemberPath`.

    Args:
        dispatcher: the same kind on every rank.
        experts: the same kind on every rank.
    """

    def __init__(self, dispatcher: Dispatcher, experts: ExpertBackend):
        self.dispatcher = dispatcher
        self.experts = experts

    @property
    def held(self) -> HeldAlike:
        return HeldAlike(
            dispatcher=self.dispatcher.name,
            expert_backend=self.experts.name,
            capacity=self.dispatcher.capacity,
            workspace_bytes=self.dispatcher.num_bytes + self.experts.num_bytes,
            tuning=self.experts.tuning,
        )

    def adopt(self, layer: MoeLayer) -> None:
        self.experts.adopt(layer)

    def prepare(self, group: HostGroup | None) -> None:
        self.experts.prepare(group)

    def run(
        self,
        layer: MoeLayer,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        dispatched = self.dispatcher.dispatch(x_TH, expert_ids_TK, expert_weights_TK, geometry, layer.num_local)
        return self.dispatcher.combine(self.experts.run(layer, dispatched), dispatched)
