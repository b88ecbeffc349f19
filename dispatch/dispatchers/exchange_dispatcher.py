"""What dispatchers have in common that send packed rows over `torch.distributed`: their buffers, and who they are."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from ..budgets.budget import ExchangeBudget
from ..budgets.geometry import StepGeometry
from ..budgets.path_settings import PathSettings, budget_for
from ..budgets.planned_buffer import PlannedBuffer
from ..way import DispatcherWay, RankParts
from .contract import Dispatched
from .exchange import ExchangeBuffers, planned_exchange

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives


class ExchangeDispatcher(DispatcherWay):
    """A dispatcher over `ExchangeBuffers`; see `dispatch.dispatchers.contract` for what it keeps.

    Args:
        collectives: through which everything is sent.
        rank: this rank.
        budget: sizes of the buffers, equal on every rank.
        device: where the rows live.
    """

    name: str

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        return planned_exchange(settings)

    @classmethod
    def make(cls, parts: RankParts) -> Self:
        return cls(parts.collectives, parts.rank, budget_for(parts.settings), parts.device)

    def __init__(self, collectives: Collectives, rank: int, budget: ExchangeBudget, device: torch.device):
        self._collectives = collectives
        self._rank = rank
        self.buffers = ExchangeBuffers(budget, device)

    @property
    def capacity(self) -> int:
        return self.buffers.budget.capacity

    @property
    def num_bytes(self) -> int:
        return self.buffers.num_bytes

    @abstractmethod
    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched: ...

    @abstractmethod
    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor: ...

    def close(self) -> None:
        """Nothing: buffers go with the dispatcher."""
