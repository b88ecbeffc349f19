"""From a layer's routed rows to their results: how they travel and what computes them, as one thing a rank has.

Whatever the path, it keeps the contract of `dispatch.contract`: the same calls in the same order on every rank, bounds
checked before anything is sent, every rank in every call.
"""

from typing import Protocol

import torch

from .contract import Dispatcher
from .geometry import StepGeometry
from .torch_experts import LocalExperts, routed_pairs, static_rows


class ExpertPath(Protocol):
    """One way for rows to be computed by their experts. All attributes are equal on every rank.

    Attributes:
        name: how rows travel.
        expert_backend: what computes.
        capacity: rows a rank that it was made for.
        num_bytes: of this rank's buffers.
    """

    expert_backend: str

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

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


class DispatchedPath:
    """A dispatcher with PyTorch's grouped GEMM behind it.

    Args:
        dispatcher: the same kind on every rank.
        device: where rows are; on a GPU, shapes must not depend on the routing.
    """

    expert_backend = "torch grouped_mm"

    def __init__(self, dispatcher: Dispatcher, device: torch.device):
        self.dispatcher = dispatcher
        self._compute = static_rows if device.type == "cuda" else routed_pairs

    @property
    def name(self) -> str:
        return self.dispatcher.name

    @property
    def capacity(self) -> int:
        return self.dispatcher.capacity

    @property
    def num_bytes(self) -> int:
        return self.dispatcher.num_bytes

    def run(
        self,
        experts: LocalExperts,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        dispatched = self.dispatcher.dispatch(x_TH, expert_ids_TK, expert_weights_TK, geometry, experts.num_local)
        y_RH = self._compute(experts, dispatched.x_RH, dispatched.expert_ids_RK, dispatched.expert_weights_RK)
        return self.dispatcher.combine(y_RH, dispatched)
