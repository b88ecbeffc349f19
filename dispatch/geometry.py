"""The geometry of one step: how many rows each rank brings to the experts, and how they are padded.

Everything here is computed from the per-DP-rank counts of the step plan, which all ranks hold alike. A refusal is
therefore raised on every rank, before any collective of the step; no rank waits for one that raised.
"""

import enum
from dataclasses import dataclass

from .errors import GeometryError
from .layout import Layout


class PaddingMode(enum.IntEnum):
    """How ranks with different row counts meet in one exchange."""

    MAX_LEN = 0
    """Every rank is padded to the largest count; messages have one size."""
    SUM_LEN = 1
    """Counts are packed as they are; messages differ in size."""


def scatter_sizes(num_tokens: int, attn_tp_size: int) -> list[int]:
    """Rows of a shared batch that each of its ranks takes to the experts: consecutive, sizes differ by at most one."""
    base, extra = divmod(num_tokens, attn_tp_size)
    return [base + (index < extra) for index in range(attn_tp_size)]


def choose_padding_mode(num_tokens_per_dp_rank: tuple[int, ...]) -> PaddingMode:
    """MAX_LEN unless padding would more than double the rows that move.

    One size for all messages is the faster exchange, so a decode step with 31 and 32 rows pads; a prefill of 2048 rows
    beside a single decode row packs.
    """
    padded = max(num_tokens_per_dp_rank) * len(num_tokens_per_dp_rank)
    return PaddingMode.MAX_LEN if padded <= 2 * sum(num_tokens_per_dp_rank) else PaddingMode.SUM_LEN


@dataclass(frozen=True)
class StepGeometry:
    """What every rank knows about one step's exchange; equal on every rank in every field.

    Attributes:
        layout: the arrangement of ranks.
        num_tokens_per_dp_rank: tokens each DP rank runs, at least 1 each (an idle one runs a dummy token).
        padding_mode: how the counts are made to meet.
        num_rows_per_rank: rows each rank brings to the dispatcher; its DP rank's tokens, scattered.
        runtime_max_tokens_per_rank: the largest of them, at least 1.
        slot_sizes: rows of rank `s` in every exchange buffer, padding included.
    """

    layout: Layout
    num_tokens_per_dp_rank: tuple[int, ...]
    padding_mode: PaddingMode
    num_rows_per_rank: tuple[int, ...]
    runtime_max_tokens_per_rank: int
    slot_sizes: tuple[int, ...]

    @classmethod
    def build(
        cls,
        layout: Layout,
        num_tokens_per_dp_rank: tuple[int, ...],
        *,
        capacity: int,
        padding_mode: PaddingMode | None = None,
    ) -> "StepGeometry":
        """The geometry of a step in which DP rank `d` runs `num_tokens_per_dp_rank[d]` tokens.

        Args:
            layout: the arrangement of ranks.
            num_tokens_per_dp_rank: `[dp_size]`, from the step plan; equal on every rank.
            capacity: the most rows one rank may bring; equal on every rank.
            padding_mode: chosen from the counts when `None`; equal on every rank.

        Raises:
            GeometryError: on every rank alike, when a count is below 1, missing, or above what `capacity` holds.
        """
        if len(num_tokens_per_dp_rank) != layout.dp_size:
            raise GeometryError(
                f"{len(num_tokens_per_dp_rank)} token counts for dp_size={layout.dp_size}: {num_tokens_per_dp_rank}"
            )
        if min(num_tokens_per_dp_rank) < 1:
            raise GeometryError(
                f"token counts per DP rank {num_tokens_per_dp_rank}: an idle rank runs one dummy token, so none is 0"
            )
        rows = tuple(
            size for num_tokens in num_tokens_per_dp_rank for size in scatter_sizes(num_tokens, layout.attn_tp_size)
        )
        largest = max(rows)
        if largest > capacity:
            raise GeometryError(
                f"rank {rows.index(largest)} would dispatch {largest} rows, above the capacity of {capacity}: "
                f"token counts per DP rank are {num_tokens_per_dp_rank}; lower limits.chunked_prefill_size or "
                "limits.max_running_requests"
            )
        mode = choose_padding_mode(num_tokens_per_dp_rank) if padding_mode is None else padding_mode
        slots = (largest,) * layout.world_size if mode is PaddingMode.MAX_LEN else rows
        return cls(layout, tuple(num_tokens_per_dp_rank), mode, rows, largest, slots)

    def num_tokens(self, rank: int) -> int:
        """Tokens of the batch that `rank` holds, before they are scattered over the ranks that share it."""
        return self.num_tokens_per_dp_rank[self.layout.dp_rank(rank)]

    def row_range(self, rank: int) -> slice:
        """The rows of its DP rank's batch that `rank` takes to the experts."""
        peers = self.layout.ranks_of(self.layout.dp_rank(rank))
        start = sum(self.num_rows_per_rank[peer] for peer in peers if peer < rank)
        return slice(start, start + self.num_rows_per_rank[rank])
