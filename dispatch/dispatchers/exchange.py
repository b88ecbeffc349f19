"""Exchange buffers and the packing of rows, shared by the dispatchers that use `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..budgets.budget import ExchangeBudget, RowFormat, exchange_rows
from ..budgets.geometry import StepGeometry
from ..budgets.path_settings import PathSettings, budget_for, rows_of
from ..budgets.planned_buffer import PlannedBuffer
from ..dtypes import dtype_name

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives


class ExchangeBuffers:
    """Send, receive and combine buffers of one rank, allocated once from the budget and shared by all layers."""

    def __init__(self, budget: ExchangeBudget, device: torch.device):
        import torch

        self.budget = budget
        self.send = torch.zeros(budget.send_bytes, dtype=torch.uint8, device=device)
        self.receive = torch.zeros(budget.receive_bytes, dtype=torch.uint8, device=device)
        self.returned = torch.zeros(budget.combine_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.send, self.receive, self.returned))


def planned_exchange(settings: PathSettings) -> list[PlannedBuffer]:
    """The buffers of a rank, as plans show them."""
    budget = budget_for(settings)
    rows = exchange_rows(settings.layout, budget.capacity)
    sizes = (("send", budget.send_bytes), ("receive", budget.receive_bytes), ("combine", budget.combine_bytes))
    return [PlannedBuffer(f"dispatch: {name}", rows, num_bytes, rows_of(settings)) for name, num_bytes in sizes]


def row_format_of(x_TH: torch.Tensor, expert_ids_TK: torch.Tensor, weights_dtype: torch.dtype) -> RowFormat:
    """The format in which these rows travel."""
    return RowFormat(x_TH.shape[1], expert_ids_TK.shape[1], dtype_name(x_TH.dtype), dtype_name(weights_dtype))


def packed_rows(buffer: torch.Tensor, num_rows: int, row_format: RowFormat) -> torch.Tensor:
    """The first `num_rows` rows of a byte buffer, `[num_rows, row_bytes]` uint8."""
    return buffer[: num_rows * row_format.row_bytes].view(num_rows, row_format.row_bytes)


def hidden_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the hidden states in packed rows, `[num_rows, H]`."""
    import torch

    return rows[:, : row_format.hidden_bytes].view(getattr(torch, row_format.dtype))


def ids_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the expert ids in packed rows, `[num_rows, K]` int32."""
    import torch

    start = row_format.ids_offset
    return rows[:, start : start + 4 * row_format.top_k].view(torch.int32)


def weights_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the routing weights in packed rows, `[num_rows, K]`."""
    import torch

    start = row_format.weights_offset
    return rows[:, start : start + row_format.weights_bytes].view(getattr(torch, row_format.weights_dtype))


def return_to_senders(
    y_RH: torch.Tensor, geometry: StepGeometry, rank: int, returned: torch.Tensor, collectives: Collectives
) -> torch.Tensor:
    """One all-to-all that takes slot `s` of `y_RH` back to rank `s`.

    Returns `[ep_size, slot, H]`, a view of `returned`: what each rank computed for this rank's slot, in rank order.
    """
    world_size = geometry.layout.world_size
    slot, hidden_size = geometry.slot_sizes[rank], y_RH.shape[1]
    received = returned.view(y_RH.dtype)[: world_size * slot * hidden_size].view(world_size * slot, hidden_size)
    collectives.all_to_all("ep", received, y_RH.contiguous(), [slot] * world_size, list(geometry.slot_sizes))
    return received.view(world_size, slot, hidden_size)
