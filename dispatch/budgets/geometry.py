"""The geometry of one step: how many rows each rank brings to the experts, and how they are padded.

Everything here is computed from the per-DP-rank counts of the step plan, which all ranks hold alike. A refusal is
therefore raised on every rank, before any collective of the step; no rank waits for one that raised. Each rule stands
in one function, and every runner, the idle rank's dummy step included, calls it.
"""

import enum
from dataclasses import dataclass

from ..errors import GeometryError
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
    """The mode of an eager step: MAX_LEN unless padding would more than double the rows that move.

    One size for all messages is the faster exchange, so a decode step with 31 and 32 rows pads; a prefill of 2048 rows
    beside three single decode rows packs.
    """
    padded = max(num_tokens_per_dp_rank) * len(num_tokens_per_dp_rank)
    return PaddingMode.MAX_LEN if padded <= 2 * sum(num_tokens_per_dp_rank) else PaddingMode.SUM_LEN


def global_num_tokens_cpu(layout: Layout, num_tokens_per_dp_rank: tuple[int, ...]) -> list[int] | None:
    """Token counts on the host, in the form that says which gather there is.

    One entry a DP rank where the exchange spans batches; one entry where only ranks of one batch meet; `None` where
    nothing is gathered.
    """
    if layout.dp_size > 1:
        return list(num_tokens_per_dp_rank)
    return [num_tokens_per_dp_rank[0]] if layout.attn_tp_size > 1 else None


def runtime_max_tokens_per_rank(
    *,
    num_rows: int,
    layout: Layout,
    global_num_tokens_cpu: list[int] | None,
    capacity: int,
    in_capture: bool,
) -> int:
    """The most rows any rank brings to the dispatcher in this step: the same number on every rank.

    1. Counts of more than one DP rank are known: the largest, over the ranks that share a batch, rounded up.
    2. One DP rank, `ep_size > 1`, not in capture mode: the capacity.
    3. In capture mode, or `ep_size == 1`: `num_rows`, which padding makes equal on every rank. A graph that froze the
       capacity would be wrong and slow, so rule 2 does not apply in capture mode.

    Args:
        num_rows: rows this rank brings, `x.shape[0]`.
        layout: the arrangement of ranks, equal on every rank.
        global_num_tokens_cpu: counts of all DP ranks, equal on every rank.
        capacity: the most rows one rank may bring in any step, equal on every rank.
        in_capture: whether a graph is being recorded or replayed, equal on every rank.

    Raises:
        GeometryError: ranks hold different batches and their counts are not known, so that `num_rows` would differ
            between ranks; or the result is above `capacity` or below `num_rows`.
    """
    known = len(global_num_tokens_cpu) if global_num_tokens_cpu is not None else 0
    if layout.dp_size > 1 and known != layout.dp_size:
        raise GeometryError(
            f"dp_size={layout.dp_size} ranks hold different batches and {known} of their token counts are known: "
            f"{num_rows} rows on this rank say nothing about the others"
        )
    if layout.dp_size > 1:
        assert global_num_tokens_cpu is not None
        largest = -(-max(global_num_tokens_cpu) // layout.attn_tp_size)
    elif layout.world_size > 1 and not in_capture:
        largest = capacity
    else:
        largest = num_rows
    largest = max(1, largest)
    if not num_rows <= largest <= capacity:
        raise GeometryError(
            f"runtime_max_tokens_per_rank={largest} must cover the {num_rows} rows of this rank and stay within the "
            f"capacity of {capacity}; token counts are {global_num_tokens_cpu}: raise "
            "limits.max_dispatch_tokens_per_rank or lower limits.chunked_prefill_size and limits.max_running_requests"
        )
    return largest


@dataclass(frozen=True)
class DpBufferLengths:
    """Lengths of the gathered buffer: of all ranks, of this rank, and how they are padded.

    Attributes:
        global_length: rows of the gathered buffer; `None` where nothing is gathered.
        local_length: rows of this DP rank.
        is_max_len: whether every DP rank has the same number of rows.
        num_tokens: rows of each DP rank; `None` where nothing is gathered.
    """

    global_length: int | None
    local_length: int
    is_max_len: bool
    num_tokens: list[int] | None


def set_dp_buffer_lengths(
    global_length: int | None, local_length: int, is_max_len: bool, num_tokens: list[int] | None
) -> DpBufferLengths:
    """The lengths, checked against each other.

    Raises:
        GeometryError: the parts do not sum to the whole, or are not equal where MAX_LEN says so.
    """
    if (global_length is None) != (num_tokens is None):
        raise GeometryError(f"global length {global_length} beside token counts {num_tokens}: both or neither")
    if num_tokens is not None:
        if sum(num_tokens) != global_length:
            raise GeometryError(f"token counts {num_tokens} sum to {sum(num_tokens)}, not to {global_length}")
        if local_length not in num_tokens:
            raise GeometryError(f"this rank's {local_length} tokens are none of the counts {num_tokens}")
        if is_max_len and len(set(num_tokens)) > 1:
            raise GeometryError(f"MAX_LEN with different token counts {num_tokens}")
    return DpBufferLengths(global_length, local_length, is_max_len, num_tokens)


@dataclass(frozen=True)
class StepGeometry:
    """What every rank knows about one step's exchange; equal on every rank in every field.

    Attributes:
        layout: the arrangement of ranks.
        num_tokens_per_dp_rank: tokens each DP rank runs after padding, at least 1 each (an idle one runs a dummy).
        padding_mode: how the counts are made to meet.
        in_capture: whether the step belongs to a graph.
        capacity: the most rows one rank may bring in any step.
        num_rows_per_rank: rows each rank brings to the dispatcher; its DP rank's tokens, scattered.
        slot_sizes: rows of rank `s` in every exchange buffer, padding included.
        runtime_max_tokens_per_rank: see the function of this name.
    """

    layout: Layout
    num_tokens_per_dp_rank: tuple[int, ...]
    padding_mode: PaddingMode
    in_capture: bool
    capacity: int
    num_rows_per_rank: tuple[int, ...]
    slot_sizes: tuple[int, ...]
    runtime_max_tokens_per_rank: int

    @classmethod
    def eager(
        cls,
        layout: Layout,
        num_tokens_per_dp_rank: tuple[int, ...],
        *,
        capacity: int,
        padding_mode: PaddingMode | None = None,
    ) -> "StepGeometry":
        """A step outside graphs, in which DP rank `d` runs `num_tokens_per_dp_rank[d]` tokens.

        Args:
            layout: the arrangement of ranks.
            num_tokens_per_dp_rank: `[dp_size]`, from the step plan; equal on every rank.
            capacity: the most rows one rank may bring; equal on every rank.
            padding_mode: chosen from the counts when `None`; equal on every rank.

        Raises:
            GeometryError: on every rank alike, when a count is below 1, missing, or above what `capacity` holds.
        """
        mode = choose_padding_mode(num_tokens_per_dp_rank) if padding_mode is None else padding_mode
        return cls._build(layout, tuple(num_tokens_per_dp_rank), mode, False, capacity)

    @classmethod
    def captured(cls, layout: Layout, num_tokens: int, *, capacity: int) -> "StepGeometry":
        """A step of a graph: every DP rank runs `num_tokens` tokens, padded so that every rank brings equal rows.

        Raises:
            GeometryError: on every rank alike, when `capacity` does not hold them.
        """
        padded = pad_to_ranks(num_tokens, layout.attn_tp_size)
        return cls._build(layout, (padded,) * layout.dp_size, PaddingMode.MAX_LEN, True, capacity)

    @classmethod
    def _build(
        cls, layout: Layout, counts: tuple[int, ...], mode: PaddingMode, in_capture: bool, capacity: int
    ) -> "StepGeometry":
        if len(counts) != layout.dp_size:
            raise GeometryError(f"{len(counts)} token counts for dp_size={layout.dp_size}: {counts}")
        if min(counts) < 1:
            raise GeometryError(
                f"token counts per DP rank {counts}: an idle rank runs one dummy token, so none is below 1"
            )
        rows = tuple(size for count in counts for size in scatter_sizes(count, layout.attn_tp_size))
        largest = max(rows)
        if largest > capacity:
            raise GeometryError(
                f"rank {rows.index(largest)} would dispatch {largest} rows, above the capacity of {capacity}: token "
                f"counts per DP rank are {counts}; raise limits.max_dispatch_tokens_per_rank or lower "
                "limits.chunked_prefill_size and limits.max_running_requests"
            )
        slots = (largest,) * layout.world_size if mode is PaddingMode.MAX_LEN else rows
        most = runtime_max_tokens_per_rank(
            num_rows=largest,
            layout=layout,
            global_num_tokens_cpu=global_num_tokens_cpu(layout, counts),
            capacity=capacity,
            in_capture=in_capture,
        )
        return cls(layout, counts, mode, in_capture, capacity, rows, slots, most)

    @property
    def global_num_tokens_cpu(self) -> list[int] | None:
        return global_num_tokens_cpu(self.layout, self.num_tokens_per_dp_rank)

    def buffer_lengths(self, rank: int) -> DpBufferLengths:
        """Lengths of the gathered buffer, seen from `rank`."""
        counts = self.global_num_tokens_cpu
        return set_dp_buffer_lengths(
            None if counts is None else sum(counts),
            self.num_tokens(rank),
            self.padding_mode is PaddingMode.MAX_LEN and len(set(self.num_tokens_per_dp_rank)) == 1,
            counts,
        )

    def num_tokens(self, rank: int) -> int:
        """Tokens of the batch that `rank` holds after padding, before they are scattered over those that share it."""
        return self.num_tokens_per_dp_rank[self.layout.dp_rank(rank)]

    def row_range(self, rank: int) -> slice:
        """The rows of its DP rank's batch that `rank` takes to the experts."""
        peers = self.layout.ranks_of(self.layout.dp_rank(rank))
        start = sum(self.num_rows_per_rank[peer] for peer in peers if peer < rank)
        return slice(start, start + self.num_rows_per_rank[rank])


def pad_to_ranks(num_tokens: int, attn_tp_size: int) -> int:
    """The next number of tokens that divides evenly over the ranks that share a batch."""
    return -(-num_tokens // attn_tp_size) * attn_tp_size
