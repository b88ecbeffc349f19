"""What follows from the limits: rows a rank may dispatch, and the bytes of the buffers that hold them.

Buffers are sized here, from configuration, before any step runs; no step can outgrow one by configuration.
"""

from dataclasses import dataclass

import torch

from .layout import Layout
from .limits import Limits

_ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class RowFormat:
    """One token on the wire: hidden state, expert ids and routing weights, side by side in one row of bytes.

    Equal on every rank for a layer. `dtype` is that of the hidden state, `weights_dtype` of the routing weights; expert
    ids travel as int32.
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    weights_dtype: torch.dtype

    @property
    def ids_offset(self) -> int:
        return _align(self.hidden_size * self.dtype.itemsize)

    @property
    def weights_offset(self) -> int:
        return _align(self.ids_offset + self.top_k * 4)

    @property
    def row_bytes(self) -> int:
        return _align(self.weights_offset + self.top_k * self.weights_dtype.itemsize)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True)
class ExchangeBudget:
    """Rows and bytes of the exchange buffers of one rank, the same on every rank.

    Attributes:
        capacity: the most rows one rank dispatches in one step.
        send_bytes: rows on their way to the experts (`ep_size * capacity` of them in the all-to-all).
        receive_bytes: rows from all ranks, `ep_size * capacity`.
        combine_bytes: partial results on their way back, `ep_size * capacity` rows of hidden states.
    """

    capacity: int
    send_bytes: int
    receive_bytes: int
    combine_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.send_bytes + self.receive_bytes + self.combine_bytes


def dispatch_capacity(limits: Limits, layout: Layout) -> int:
    """Rows one rank may dispatch: the largest step of a DP rank, divided over the ranks that share it, rounded up."""
    return -(-limits.max_tokens_per_step // layout.attn_tp_size)


def exchange_budget(limits: Limits, layout: Layout, formats: list[RowFormat]) -> ExchangeBudget:
    """One set of buffers for all layers, sized for the largest of each (layers may differ in hidden size or top-k)."""
    capacity = dispatch_capacity(limits, layout)
    rows = layout.world_size * capacity
    row_bytes = max(row_format.row_bytes for row_format in formats)
    hidden_bytes = max(row_format.hidden_size * row_format.dtype.itemsize for row_format in formats)
    return ExchangeBudget(
        capacity=capacity,
        send_bytes=rows * row_bytes,
        receive_bytes=rows * row_bytes,
        combine_bytes=rows * hidden_bytes,
    )
