"""Bytes of the buffers around a grouped GEMM pair, known before any GPU is asked for; see `tuned_experts`.

A pair is a received row with one of its experts on this rank. The ids of a row are distinct, so a row makes at most
`min(top_k, num_local)` pairs; every row making as many is what the buffers hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...budgets.budget import exchange_rows
from ...budgets.moe_shape import MoeShape
from ...budgets.path_settings import PathSettings, rows_of
from ...budgets.planned_buffer import PlannedBuffer

# Of hidden and intermediate sizes: QuACK loads 16 bytes at a time.
CUTEDSL_SIZE_ALIGNMENT = 8

_INT32_BYTES = 4
_ROW_DTYPE_BYTES = 2


@dataclass(frozen=True)
class PairBudget:
    """Buffers of one rank, one set for all layers, sized for the largest of each; equal on every rank.

    Attributes:
        ep_size: ranks that the experts are divided over.
        num_rows: received rows they are made for, every rank's share.
        num_pairs: the most pairs of any layer.
        num_local: the most experts of any layer.
        num_slots: the most (row, k) slots of any layer.
        hidden_elements: numbers of 2 bytes between the GEMMs.
        output_elements: numbers of 2 bytes after them.
    """

    ep_size: int
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
        return self.hidden_elements * _ROW_DTYPE_BYTES

    @property
    def output_bytes(self) -> int:
        return self.output_elements * _ROW_DTYPE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.routing_bytes + self.hidden_bytes + self.output_bytes


def pair_budget(num_rows: int, shapes: Sequence[MoeShape], ep_size: int) -> PairBudget:
    """Buffers for these layers.

    Args:
        num_rows: rows that reach a rank at most, `budget.exchange_rows`; equal on every rank.
        shapes: of the MoE layers.
        ep_size: ranks that their experts are divided over.
    """
    pairs = [(shape, shape.max_pairs(num_rows, ep_size)) for shape in shapes]
    return PairBudget(
        ep_size=ep_size,
        num_rows=num_rows,
        num_pairs=max(num_pairs for _, num_pairs in pairs),
        num_local=max(shape.num_local(ep_size) for shape in shapes),
        num_slots=num_rows * max(shape.top_k for shape in shapes),
        hidden_elements=max(num_pairs * shape.intermediate_size for shape, num_pairs in pairs),
        output_elements=max(num_pairs * shape.hidden_size for shape, num_pairs in pairs),
    )


def pair_budget_for(settings: PathSettings) -> PairBudget:
    """Buffers of each rank of a pool."""
    rows = exchange_rows(settings.layout, settings.capacity)
    return pair_budget(rows, settings.spec.moe, settings.layout.world_size)


def planned_pairs(settings: PathSettings) -> list[PlannedBuffer]:
    """Every row that can reach a rank, with every expert that it can have there."""
    budget = pair_budget_for(settings)
    made_of = f"{rows_of(settings)}, with every expert that a row can have there"
    sizes = (("routing", budget.routing_bytes), ("hidden", budget.hidden_bytes), ("outputs", budget.output_bytes))
    return [PlannedBuffer(f"experts: {name}", budget.num_pairs, num, made_of) for name, num in sizes]
