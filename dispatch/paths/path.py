"""From a layer's routed rows to their results: how they travel and what computes them, as one thing a rank has.

Whatever the path, it keeps the contract of `dispatch.dispatchers.contract`: the same calls in the same order on every
rank, bounds checked before anything is sent, every rank in every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..budgets.geometry import StepGeometry
from .held import HeldAlike

if TYPE_CHECKING:
    import torch

    from ..dispatchers.contract import Dispatcher
    from ..experts.backend import ExpertBackend
    from ..experts.local_experts import LocalExperts
    from ..probe import HostGroup


class ExpertPath(Protocol):
    """One way for rows to be computed by their experts."""

    @property
    def held(self) -> HeldAlike:
        """What ranks compare; read anew at every step."""
        ...

    def run(
        self,
        experts: LocalExperts,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        """`[T, H]` rows of this rank, `[T, K]` global expert ids and weights -> `[T, H]`; collective over all ranks.

        Raises:
            GeometryError: before anything is sent, when the rows are not what the geometry says or exceed the capacity.
        """
        ...


class MemberPath(ExpertPath, Protocol):
    """A path that takes layers over itself, rather than through others."""

    def adopt(self, experts: torch.nn.Module, name: str, num_experts: int, top_k: int) -> None:
        """Take over one layer's experts, before any step; see `dispatch.experts.backend.ExpertBackend.adopt`."""
        ...

    def prepare(self, group: HostGroup | None) -> None:
        """Compile and tune for all layers that were adopted; see `dispatch.experts.backend.ExpertBackend.prepare`."""
        ...


class DispatchedPath:
    """A dispatcher with an expert backend behind it.

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

    def adopt(self, experts: torch.nn.Module, name: str, num_experts: int, top_k: int) -> None:
        self.experts.adopt(experts, name, num_experts, top_k)

    def prepare(self, group: HostGroup | None) -> None:
        self.experts.prepare(group)

    def run(
        self,
        experts: LocalExperts,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        dispatched = self.dispatcher.dispatch(x_TH, expert_ids_TK, expert_weights_TK, geometry, experts.num_local)
        return self.dispatcher.combine(self.experts.run(experts, dispatched), dispatched)
