"""Exchange buffers and the packing of rows, shared by the dispatchers that use `torch.distributed`."""

import torch

from ..budgets.budget import ExchangeBudget, RowFormat
from ..budgets.geometry import StepGeometry
from ..collectives import Collectives


class ExchangeBuffers:
    """Send, receive and combine buffers of one rank, allocated once from the budget and shared by all layers."""

    def __init__(self, budget: ExchangeBudget, device: torch.device):
        self.budget = budget
        self.send = torch.zeros(budget.send_bytes, dtype=torch.uint8, device=device)
        self.receive = torch.zeros(budget.receive_bytes, dtype=torch.uint8, device=device)
        self.returned = torch.zeros(budget.combine_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.send, self.receive, self.returned))


def packed_rows(buffer: torch.Tensor, num_rows: int, row_format: RowFormat) -> torch.Tensor:
    """The first `num_rows` rows of a byte buffer, `[num_rows, row_bytes]` uint8."""
    return buffer[: num_rows * row_format.row_bytes].view(num_rows, row_format.row_bytes)


def hidden_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the hidden states in packed rows, `[num_rows, H]`."""
    return rows[:, : row_format.hidden_size * row_format.dtype.itemsize].view(row_format.dtype)


def ids_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the expert ids in packed rows, `[num_rows, K]` int32."""
    start = row_format.ids_offset
    return rows[:, start : start + 4 * row_format.top_k].view(torch.int32)


def weights_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View of the routing weights in packed rows, `[num_rows, K]`."""
    start = row_format.weights_offset
    return rows[:, start : start + row_format.top_k * row_format.weights_dtype.itemsize].view(row_format.weights_dtype)


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
