"""Sizes of the GEMMs and buffers of humming's experts, from configuration alone."""

from dataclasses import dataclass

from ...budgets.moe_shape import MoeShape
from ...budgets.path_settings import PathSettings, rows_of
from ...budgets.planned_buffer import PlannedBuffer
from ...budgets.stored_coding import StoredCoding
from ..expert_weights import DOWN, GATE_UP
from ..pairs.pair_budget import PairBudget, pair_budget_for

# Of rows, as all tiles are; for fewer the library finds none (2880 of gpt-oss).
_ROW_MULTIPLE = 128
# Of columns, as the smallest tiles are.
_COLUMN_MULTIPLE = 64
# Of rows and columns without what is added to them: the library copies 16 bytes of activations at a time.
SIZE_ALIGNMENT = 8
_BYTES = 2
NUM_LOCKS = 2048
"""Counters between blocks that share a result, as the library itself allocates them."""


@dataclass(frozen=True)
class GemmSize:
    """Of one projection of an expert.

    Attributes:
        num_rows: of its weight, `N`.
        num_columns: `K`.
        padded_rows: what the kernel has; added rows have no result.
        padded_columns: likewise; added columns meet no activation.
    """

    num_rows: int
    num_columns: int
    padded_rows: int
    padded_columns: int


def gemm_sizes(shape: MoeShape, coding: StoredCoding) -> dict[str, GemmSize]:
    """Of both projections of a layer, by name."""
    # Both are powers of two.
    columns = max(_COLUMN_MULTIPLE, coding.block[1])
    wanted = {
        GATE_UP: (2 * shape.intermediate_size, shape.hidden_size),
        DOWN: (shape.hidden_size, shape.intermediate_size),
    }
    return {
        name: GemmSize(rows, columns_of, _up(rows, _ROW_MULTIPLE), _up(columns_of, columns))
        for name, (rows, columns_of) in wanted.items()
    }


def expected_pairs(shape: MoeShape, num_local: int, num_rows: int) -> int:
    """Pairs that so many received rows make with this rank's experts where they are routed evenly; at least 1.

    Extents are read on the device; this is what tiles are chosen by, equal on every rank.
    """
    return max(1, -(-num_rows * shape.top_k * num_local // shape.num_experts))


@dataclass(frozen=True)
class HummingBudget:
    """Buffers of one rank, one set for all layers; equal on every rank.

    Attributes:
        pairs: numbers of rows, pairs, slots and experts that they are made for.
        gate_up_elements: of the first projection's results.
    """

    pairs: PairBudget
    gate_up_elements: int

    @property
    def routing_bytes(self) -> int:
        return self.pairs.routing_bytes + NUM_LOCKS * 4

    @property
    def between_bytes(self) -> int:
        return self.pairs.hidden_bytes + self.gate_up_elements * _BYTES

    @property
    def rows_bytes(self) -> int:
        """Sorted rows, whose memory the second projection's results take afterwards."""
        return self.pairs.output_bytes

    @property
    def total_bytes(self) -> int:
        return self.routing_bytes + self.between_bytes + self.rows_bytes


def budget_for(settings: PathSettings) -> HummingBudget:
    """Buffers of each rank of a pool."""
    pairs = pair_budget_for(settings)
    return HummingBudget(pairs, 2 * pairs.hidden_elements)


def planned_buffers(settings: PathSettings) -> list[PlannedBuffer]:
    """Every row that can reach a rank, with every expert that it can have there."""
    budget = budget_for(settings)
    made_of = f"{rows_of(settings)}, with every expert that a row can have there"
    sizes = (("routing", budget.routing_bytes), ("between", budget.between_bytes), ("rows", budget.rows_bytes))
    return [PlannedBuffer(f"experts: {name}", budget.pairs.num_pairs, num, made_of) for name, num in sizes]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
