"""All-gather dispatch: every rank sees every row, and computes the share of it that its experts own.

MAX_LEN gathers equal, padded messages; SUM_LEN gathers the rows as they are. Either way the partial results go back to
the row's rank in one all-to-all and are summed there in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..budgets.budget import Bound, largest_forward, largest_step, shared_term
from ..budgets.geometry import PaddingMode, StepGeometry
from ..budgets.layout import Layout
from ..budgets.limits import Limits
from ..way import ExpertsWay, places
from .contract import INVALID_EXPERT_ID, Dispatched, check_rows
from .exchange import PackedRows, return_to_senders, row_format_of
from .exchange_dispatcher import ExchangeDispatcher

if TYPE_CHECKING:
    import torch


class AllGatherDispatcher(ExchangeDispatcher):
    """Keeps the contract of `dispatch.dispatchers.contract` with an all-gather of rows."""

    kind = name = "allgather"
    devices = places(cpu=0, cuda=3)
    has_own_capacity = False
    is_plain = True

    @classmethod
    def capacity_bound(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> Bound:
        """This rank's share of the largest forward, so that all shares together hold `dp_size` times it."""
        forward = largest_forward(limits)
        share = -(-forward.value // layout.attn_tp_size)
        return Bound(share, shared_term(forward.term, "attn_tp_size", layout.attn_tp_size))

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> list[str]:
        """No step may exceed the largest forward, which the buffers are made for."""
        step, forward = largest_step(limits), largest_forward(limits)
        if step.value <= forward.value:
            return []
        # Both hold the same graph and decode terms, so what exceeds is the prefill step, and chunking is on.
        return [
            f"a step may hold {step.value} tokens of a batch ({step.term}), above the largest forward of "
            f"{forward.value} ({forward.term}) that the all-gather buffers hold for each of {layout.dp_size} batches: "
            f"set limits.max_prefill_tokens to {step.value} or more, or limits.chunked_prefill_size to "
            f"{forward.value} or less"
        ]

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
        row_format = row_format_of(x_TH, expert_ids_TK, expert_weights_TK.dtype)
        received = PackedRows(self.buffers.receive, sum(geometry.slot_sizes), row_format)

        if geometry.padding_mode is PaddingMode.MAX_LEN:
            sent = PackedRows(self.buffers.send, geometry.slot_sizes[self._rank], row_format)
            sent.ids[num_rows:] = INVALID_EXPERT_ID
        else:
            sent = PackedRows(self.buffers.send, world_size * num_rows, row_format)
        sent.hidden[:num_rows] = x_TH
        sent.ids[:num_rows] = expert_ids_TK
        sent.weights[:num_rows] = expert_weights_TK

        if geometry.padding_mode is PaddingMode.MAX_LEN:
            self._collectives.all_gather("ep", received.packed, sent.packed)
        else:
            # Gloo gathers equal sizes only, so rows of different number travel as an all-to-all of copies.
            copies = sent.packed.view(world_size, num_rows, row_format.row_bytes)
            copies[1:] = copies[0]
            self._collectives.all_to_all(
                "ep", received.packed, sent.packed, list(geometry.slot_sizes), [num_rows] * world_size
            )

        return Dispatched(
            x_RH=received.hidden,
            expert_ids_RK=received.ids,
            expert_weights_RK=received.weights,
            geometry=geometry,
            row_format=row_format,
            first_expert=self._rank * num_local_experts,
        )

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        geometry = dispatched.geometry
        parts = return_to_senders(y_RH, geometry, self._rank, self.buffers.returned, self._collectives)
        return parts[:, : geometry.num_rows_per_rank[self._rank]].sum(dim=0)
