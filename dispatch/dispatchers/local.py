"""The pool of one rank: all experts are here, nothing travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..budgets.budget import Bound, largest_forward, largest_of, largest_step
from ..budgets.geometry import StepGeometry
from ..budgets.layout import Layout
from ..budgets.limits import Limits
from ..registry import LOCAL
from ..way import DispatcherWay, ExpertsWay, RankParts
from .contract import Dispatched, check_rows
from .exchange import row_format_of

if TYPE_CHECKING:
    import torch


class LocalDispatcher(DispatcherWay):
    """Keeps the contract of `dispatch.dispatchers.contract` for `ep_size == 1`, without collectives or buffers."""

    kind = name = LOCAL
    has_own_capacity = False
    is_chosen = False
    is_plain = True
    exchanges = False
    num_bytes = 0

    @classmethod
    def capacity_bound(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> Bound:
        """The largest forward or step; nothing is allocated by it."""
        return largest_of(largest_forward(limits), largest_step(limits))

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> list[str]:
        return []

    @classmethod
    def make(cls, parts: RankParts) -> LocalDispatcher:
        return cls(parts.settings.capacity)

    def __init__(self, capacity: int):
        self.capacity = capacity

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        check_rows(x_TH, expert_ids_TK, geometry, rank=0, capacity=self.capacity)
        row_format = row_format_of(x_TH, expert_ids_TK, expert_weights_TK.dtype)
        return Dispatched(x_TH, expert_ids_TK, expert_weights_TK, geometry, row_format)

    def close(self) -> None:
        """Nothing is held."""

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return y_RH
