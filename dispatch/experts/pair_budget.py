"""Bytes of the buffers around a grouped GEMM pair, known before any GPU is asked for; see `quack_experts`.

A pair is a received row with one of its experts on this rank. The ids of a row are distinct, so a row makes at most
`min(top_k, num_local)` pairs; every row making as many is what the buffers hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Of hidden and intermediate sizes: QuACK loads 16 bytes at a time.
CUTEDSL_SIZE_ALIGNMENT = 8

_INT32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one MoE layer on one rank; equal on every rank.

    Attributes:
        hidden_size: of a token.
        intermediate_size: between the projections.
        top_k: experts a token goes to.
        num_local: experts this rank owns.
    """

    hidden_size: int
    intermediate_size: int
    top_k: int
    num_local: int

    def max_pairs(self, num_rows: int) -> int:
        """The most pairs that this many rows make."""
        return num_rows * min(self.top_k, self.num_local)


@dataclass(frozen=True)
class PairBudget:
    """Buffers of one rank, one set for all layers, sized for the largest of each; equal on every rank.

    Attributes:
        num_rows: received rows they are made for, every rank's share.
        num_pairs: the most pairs of any layer.
        num_local: the most experts of any layer.
        num_slots: the most (row, k) slots of any layer.
        hidden_elements: bf16 numbers between the GEMMs.
        output_elements: bf16 numbers after them.
    """

    num_rows: int
    num_pairs: int
    num_local: int
    num_slots: int
    hidden_elements: int
    output_elements: int

    @property
    def routing_bytes(self) -> int:
        return (self.num_local + 1 + self.num_pairs + self.num_slots) * _INT32_BYTES

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_elements * _BF16_BYTES

    @property
    def output_bytes(self) -> int:
        return self.output_elements * _BF16_BYTES

    @property
    def total_bytes(self) -> int:
        return self.routing_bytes + self.hidden_bytes + self.output_bytes


def pair_budget(num_rows: int, shapes: Sequence[ExpertShape]) -> PairBudget:
    """Buffers for these layers.

    Args:
        num_rows: rows that reach a rank at most, `budget.exchange_rows`; equal on every rank.
        shapes: of the MoE layers.
    """
    return PairBudget(
        num_rows=num_rows,
        num_pairs=max(shape.max_pairs(num_rows) for shape in shapes),
        num_local=max(shape.num_local for shape in shapes),
        num_slots=num_rows * max(shape.top_k for shape in shapes),
        hidden_elements=max(shape.max_pairs(num_rows) * shape.intermediate_size for shape in shapes),
        output_elements=max(shape.max_pairs(num_rows) * shape.hidden_size for shape in shapes),
    )
