"""What every way from a layer's routed rows to their results keeps, however rows travel and whatever computes them.

It keeps the contract of `dispatch.dispatchers.contract`: the same calls in the same order on every rank, bounds checked
before anything is sent, every rank in every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from .budgets.geometry import StepGeometry

if TYPE_CHECKING:
    import torch

    from .moe_layer import MoeLayer
    from .probe import HostGroup


class HeldAlike(msgspec.Struct, frozen=True):
    """What a rank holds of its way to the experts: compared at every step, and frozen by every recording.

    Equal on every rank in every field.

    Attributes:
        dispatcher: how rows travel, by name.
        expert_backend: what computes, by name.
        capacity: rows a rank that its buffers were made for.
        workspace_bytes: of this rank's buffers.
        tuning: of what computes, the table of paths where there is one; empty where nothing is tuned.
        quantisation_scales: constants with which ranks decode what others sent; empty where there are none.
    """

    dispatcher: str
    expert_backend: str
    capacity: int
    workspace_bytes: int
    tuning: str = ""
    quantisation_scales: tuple[float, ...] = ()


class ExpertPath(Protocol):
    """One way for rows to be computed by their experts."""

    @property
    def held(self) -> HeldAlike:
        """What ranks compare; read anew at every step."""
        ...

    def run(
        self,
        layer: MoeLayer,
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

    def adopt(self, layer: MoeLayer) -> None:
        """Take over one layer's experts, before any step; see `dispatch.experts.backend.ExpertBackend.adopt`."""
        ...

    def prepare(self, group: HostGroup | None) -> None:
        """Compile and tune for all layers that were adopted; see `dispatch.experts.backend.ExpertBackend.prepare`."""
        ...
