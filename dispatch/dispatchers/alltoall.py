"""All-to-all dispatch: a row goes only to the ranks that own one of its experts.

Rank `s` has a slot of `geometry.slot_sizes[s]` rows at every other rank, large enough for all its rows, since a row
goes to a rank at most once however many of its experts live there. Routed rows stand at the front of a slot; the rest
carries no token and costs the experts nothing. The layout is that of one-sided GPU all-to-alls, with the same bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..budgets.geometry import StepGeometry
from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..registry import experts_of
from ..way import places
from .contract import INVALID_EXPERT_ID, Dispatched, check_rows
from .exchange import PackedRows, return_to_senders, row_format_of
from .exchange_dispatcher import ExchangeDispatcher
from .flashinfer_workspace import planned_workspace

if TYPE_CHECKING:
    import torch


class AllToAllDispatcher(ExchangeDispatcher):
    """Keeps the contract of `dispatch.dispatchers.contract` with an all-to-all of routed rows."""

    kind = name = "alltoall"
    devices = places(cpu=1)

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        """Before experts that only GPUs have, what FlashInfer's all-to-all holds there."""
        if "cpu" not in experts_of(settings.experts).devices:
            return planned_workspace(settings)
        return super().planned(settings)

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        import torch

        check_rows(x_TH, expert_ids_TK, geometry, self._rank, self.buffers.budget.capacity)
        world_size, slot = geometry.layout.world_size, geometry.slot_sizes[self._rank]
        row_format = row_format_of(x_TH, expert_ids_TK, expert_weights_TK.dtype)
        sent = PackedRows(self.buffers.send, world_size * slot, row_format)
        received = PackedRows(self.buffers.receive, sum(geometry.slot_sizes), row_format)

        ranks = torch.arange(world_size, device=x_TH.device)
        at_rank_WTK = expert_ids_TK.div(num_local_experts, rounding_mode="floor").unsqueeze(0) == ranks.view(-1, 1, 1)
        goes_WT = at_rank_WTK.any(dim=-1)
        position_WT = goes_WT.cumsum(dim=1) - 1
        destination, own_row = goes_WT.nonzero(as_tuple=True)
        sent_row = destination * slot + position_WT[destination, own_row]

        local_ids_WTK = torch.where(at_rank_WTK, (expert_ids_TK % num_local_experts).unsqueeze(0), INVALID_EXPERT_ID)
        sent.ids.fill_(INVALID_EXPERT_ID)
        sent.ids[sent_row] = local_ids_WTK[destination, own_row].to(torch.int32)
        sent.hidden[sent_row] = x_TH[own_row]
        sent.weights[sent_row] = expert_weights_TK[own_row]
        returned_to = own_row.new_full((world_size * slot,), -1)
        returned_to[sent_row] = own_row

        sizes = list(geometry.slot_sizes), [slot] * world_size
        self._collectives.all_to_all("ep", received.packed, sent.packed, *sizes)
        return Dispatched(
            x_RH=received.hidden,
            expert_ids_RK=received.ids,
            expert_weights_RK=received.weights,
            geometry=geometry,
            row_format=row_format,
            returned_to=returned_to,
        )

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        assert dispatched.returned_to is not None
        geometry = dispatched.geometry
        parts = return_to_senders(y_RH, geometry, self._rank, self.buffers.returned, self._collectives).flatten(0, 1)
        carries_row = dispatched.returned_to >= 0
        result = y_RH.new_zeros(geometry.num_rows_per_rank[self._rank], y_RH.shape[1])
        return result.index_add_(0, dispatched.returned_to[carries_row], parts[carries_row])
