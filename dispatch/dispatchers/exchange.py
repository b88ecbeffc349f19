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


class PackedRows:
    """Rows as they travel, over the beginning of a buffer.

    Args:
        buffer: bytes.
        num_rows: how many rows.
        row_format: of each.

    Attributes:
        row_format: of each.
        packed: `[num_rows, row_bytes]` uint8; the others are views of it.
        hidden: hidden states, `[num_rows, H]`.
        ids: expert ids, `[num_rows, K]` int32.
        weights: routing weights, `[num_rows, K]`.
    """

    def __init__(self, buffer: torch.Tensor, num_rows: int, row_format: RowFormat):
        import torch

        def part(start: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
            return self.packed[:, start : start + num_bytes].view(dtype)

        self.row_format = row_format
        self.packed = buffer[: num_rows * row_format.row_bytes].view(num_rows, row_format.row_bytes)
        self.hidden = part(0, row_format.hidden_bytes, getattr(torch, row_format.dtype))
        self.ids = part(row_format.ids_offset, 4 * row_format.top_k, torch.int32)
        weights_dtype = getattr(torch, row_format.weights_dtype)
        self.weights = part(row_format.weights_offset, row_format.weights_bytes, weights_dtype)


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
