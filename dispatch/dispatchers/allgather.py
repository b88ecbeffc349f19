"""All-gather dispatch: every rank sees every row, and computes the share of it that its experts own.

MAX_LEN gathers equal, padded messages; SUM_LEN gathers the rows as they are. Either way the partial results go back to
the row's rank in one all-to-all and are summed there in rank order.
"""

import torch

from ..budgets.budget import ExchangeBudget, RowFormat
from ..budgets.geometry import PaddingMode, StepGeometry
from ..collectives import Collectives
from .contract import INVALID_EXPERT_ID, Dispatched, check_rows
from .exchange import ExchangeBuffers, hidden_of, ids_of, packed_rows, return_to_senders, weights_of


class AllGatherDispatcher:
    """Keeps the contract of `dispatch.dispatchers.contract` with an all-gather of rows.

    Args:
        collectives: through which everything is sent.
        rank: this rank.
        budget: sizes of the buffers, equal on every rank.
        device: where the rows live.
    """

    name = "allgather"

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

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        check_rows(x_TH, expert_ids_TK, geometry, self._rank, self.buffers.budget.capacity)
        num_rows, world_size = x_TH.shape[0], geometry.layout.world_size
        row_format = RowFormat(x_TH.shape[1], expert_ids_TK.shape[1], x_TH.dtype, expert_weights_TK.dtype)
        received = packed_rows(self.buffers.receive, sum(geometry.slot_sizes), row_format)

        if geometry.padding_mode is PaddingMode.MAX_LEN:
            sent = packed_rows(self.buffers.send, geometry.slot_sizes[self._rank], row_format)
            ids_of(sent, row_format)[num_rows:] = INVALID_EXPERT_ID
        else:
            sent = packed_rows(self.buffers.send, world_size * num_rows, row_format)
        hidden_of(sent, row_format)[:num_rows] = x_TH
        ids_of(sent, row_format)[:num_rows] = expert_ids_TK
        weights_of(sent, row_format)[:num_rows] = expert_weights_TK

        if geometry.padding_mode is PaddingMode.MAX_LEN:
            self._collectives.all_gather("ep", received, sent)
        else:
            # Gloo gathers equal sizes only, so rows of different number travel as an all-to-all of copies.
            sent.view(world_size, num_rows, sent.shape[1])[1:] = sent[:num_rows]
            self._collectives.all_to_all("ep", received, sent, list(geometry.slot_sizes), [num_rows] * world_size)

        return Dispatched(
            x_RH=hidden_of(received, row_format),
            expert_ids_RK=ids_of(received, row_format),
            expert_weights_RK=weights_of(received, row_format),
            geometry=geometry,
            row_format=row_format,
            first_expert=self._rank * num_local_experts,
        )

    def close(self) -> None:
        """Nothing: buffers go with the dispatcher."""

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        geometry = dispatched.geometry
        parts = return_to_senders(y_RH, geometry, self._rank, self.buffers.returned, self._collectives)
        return parts[:, : geometry.num_rows_per_rank[self._rank]].sum(dim=0)
