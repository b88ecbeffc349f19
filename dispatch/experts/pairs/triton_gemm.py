"""Grouped GEMMs of gated experts in Triton, on Hugging Face's expert weights as they are stored.

Two ways to cut the work, each of two launches:

- **sorted**: a program takes a block of one expert's sorted pairs and a block of columns. It finds its expert in the
  offsets that the sort wrote, so the grid is a bound that the number of rows gives, and programs beyond the blocks that
  there are end at once.
- **by slot**, for a handful of rows: nothing is sorted. A program of the first launch takes one slot and a block of
  columns, one of the second a row and a block of columns, whose slots it sums in their order. Products are formed
  outside the tensor cores, which would compute sixteen rows for one, and loads of weights go straight to registers.

Every sum has one order, given by rows, slots and tiles: results repeat to the bit while tiles stay.

Triton is imported with this module: only backends that run on GPUs import it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class TritonTile:
    """How a launch is cut; equal on every rank for the same layer and rows.

    Attributes:
        rows: sorted pairs of a block; 0 where a launch goes by slot.
        columns: of the result.
        depth: of the input's width that is loaded at once.
        warps: of a program.
        stages: loads under way in turn; of no meaning where a launch goes by slot.
        weights_first: whether weights are the left operand of the tensor cores, whose left operand has 64 rows on
            Hopper: few pairs then do not leave most of it empty.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    weights_first: bool = False

    def __str__(self) -> str:
        rows = f"{self.rows}x" if self.rows else "slot-"
        return f"{rows}{self.columns}x{self.depth}w{self.warps}s{self.stages}{'t' if self.weights_first else ''}"


@triton.jit(do_not_specialize=["num_experts"])
def _sorted_gemm(  # type: ignore[no-untyped-def]
    x_ptr,
    weights_ptr,
    offsets_ptr,
    source_row_ptr,
    out_ptr,
    x_stride,
    expert_stride,
    num_experts,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    GATHERED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A block of one expert's pairs times a block of its columns; gate and up together where `GATED`."""
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // column_blocks
    column = (tl.program_id(0) % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)

    expert_E = tl.arange(0, BLOCK_E)
    there = expert_E < num_experts
    start_E = tl.load(offsets_ptr + expert_E, mask=there, other=0)
    end_E = tl.load(offsets_ptr + expert_E + 1, mask=there, other=0)
    blocks_before_end = tl.cumsum((end_E - start_E + BLOCK_M - 1) // BLOCK_M, axis=0)
    is_before = there & (blocks_before_end <= block)
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    if expert >= num_experts:
        return
    first_block = tl.max(tl.where(is_before, blocks_before_end, 0), axis=0)
    start = tl.load(offsets_ptr + expert) + (block - first_block) * BLOCK_M
    end = tl.load(offsets_ptr + expert + 1)

    pair = start + tl.arange(0, BLOCK_M)
    is_pair = pair < end
    row = tl.load(source_row_ptr + pair, mask=is_pair, other=0).to(tl.int64) if GATHERED else pair.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside = column < COLUMNS
    # Columns beyond the last read the last one's weights: a mask would cost in every load.
    weights_row = tl.minimum(column, COLUMNS - 1).to(tl.int64) * DEPTH
    weights_ptr += expert.to(tl.int64) * expert_stride
    up_offset: tl.constexpr = COLUMNS * DEPTH

    if WEIGHTS_FIRST:
        x_at = x_ptr + row[None, :] * x_stride + k[:, None]
        w_at = weights_ptr + weights_row[:, None] + k[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        x_at = x_ptr + row[:, None] * x_stride + k[None, :]
        w_at = weights_ptr + weights_row[None, :] + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        x_mask = is_pair[None, :] if WEIGHTS_FIRST else is_pair[:, None]
        if DEPTH % BLOCK_K == 0:
            x = tl.load(x_at + begin, mask=x_mask, other=0.0)
            w = tl.load(w_at + begin)
        else:
            is_k = begin + k < DEPTH
            if WEIGHTS_FIRST:
                x = tl.load(x_at + begin, mask=x_mask & is_k[:, None], other=0.0)
                w = tl.load(w_at + begin, mask=is_k[None, :], other=0.0)
            else:
                x = tl.load(x_at + begin, mask=x_mask & is_k[None, :], other=0.0)
                w = tl.load(w_at + begin, mask=is_k[:, None], other=0.0)
        total = tl.dot(w, x, total) if WEIGHTS_FIRST else tl.dot(x, w, total)
        if GATED:
            if DEPTH % BLOCK_K == 0:
                v = tl.load(w_at + up_offset + begin)
            elif WEIGHTS_FIRST:
                v = tl.load(w_at + up_offset + begin, mask=(begin + k < DEPTH)[None, :], other=0.0)
            else:
                v = tl.load(w_at + up_offset + begin, mask=(begin + k < DEPTH)[:, None], other=0.0)
            up = tl.dot(v, x, up) if WEIGHTS_FIRST else tl.dot(x, v, up)
    if GATED:
        total = total * tl.sigmoid(total) * up
    result = total.to(out_ptr.dtype.element_ty)
    out_row = pair.to(tl.int64) * COLUMNS
    if WEIGHTS_FIRST:
        tl.store(out_ptr + out_row[None, :] + column[:, None], result, mask=is_pair[None, :] & inside[:, None])
    else:
        tl.store(out_ptr + out_row[:, None] + column[None, :], result, mask=is_pair[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _gate_up_by_slot(  # type: ignore[no-untyped-def]
    x_ptr,
    weights_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    ids_stride,
    expert_stride,
    first_expert,
    num_experts,
    TOP_K: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One slot's block of columns between the projections."""
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    slot = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = (tl.program_id(0) % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_ptr + (slot // TOP_K) * ids_stride + slot % TOP_K)
    if (expert < first_expert) | (expert >= first_expert + num_experts):
        return
    weights_ptr += (expert - first_expert).to(tl.int64) * expert_stride
    x_ptr += (slot // TOP_K) * x_stride
    k = tl.arange(0, BLOCK_K)
    w_at = weights_ptr + tl.minimum(column, COLUMNS - 1).to(tl.int64)[:, None] * DEPTH + k[None, :]
    up_offset: tl.constexpr = COLUMNS * DEPTH
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in tl.static_range(0, DEPTH, BLOCK_K):
        is_k = begin + k < DEPTH
        x = tl.load(x_ptr + begin + k, mask=is_k, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(w_at + begin, mask=is_k[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32) * x
        v = tl.load(w_at + up_offset + begin, mask=is_k[None, :], other=0.0, eviction_policy="evict_first")
        up += v.to(tl.float32) * x
    gate_N = tl.sum(gate, axis=1)
    hidden = gate_N * tl.sigmoid(gate_N) * tl.sum(up, axis=1)
    tl.store(hidden_ptr + slot * COLUMNS + column, hidden.to(hidden_ptr.dtype.element_ty), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _down_by_row(  # type: ignore[no-untyped-def]
    hidden_ptr,
    weights_ptr,
    ids_ptr,
    routing_ptr,
    y_ptr,
    ids_stride,
    routing_stride,
    y_stride,
    expert_stride,
    first_expert,
    num_experts,
    TOP_K: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row's block of columns after the projections, its slots weighted and summed in their order."""
    column_blocks: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = (tl.program_id(0) % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = weights_ptr + tl.minimum(column, COLUMNS - 1).to(tl.int64)[:, None] * DEPTH + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + row * ids_stride + slot)
        own = (expert >= first_expert) & (expert < first_expert + num_experts)
        routing = tl.load(routing_ptr + row * routing_stride + slot, mask=own, other=0.0).to(tl.float32)
        expert_at = tl.where(own, expert - first_expert, 0).to(tl.int64) * expert_stride
        for begin in tl.static_range(0, DEPTH, BLOCK_K):
            is_k = own & (begin + k < DEPTH)
            h = tl.load(hidden_ptr + (row * TOP_K + slot) * DEPTH + begin + k, mask=is_k, other=0.0).to(tl.float32)
            w = tl.load(w_at + expert_at + begin, mask=is_k[None, :], other=0.0, eviction_policy="evict_first")
            total += w.to(tl.float32) * (h * routing)[None, :]
    y = tl.sum(total, axis=1).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * y_stride + column, y, mask=column < COLUMNS)


def sorted_gemm(
    x: torch.Tensor,
    weights_ENK: torch.Tensor,
    offsets: torch.Tensor,
    source_row_P: torch.Tensor | None,
    out_PN: torch.Tensor,
    tile: TritonTile,
) -> None:
    """`out[p] = x[p] @ weights[e].T` for the sorted pairs `p` of each expert `e`; or gated, by twice as many weights.

    Args:
        x: `[R, K]` rows of any stride, read at `source_row_P`; or `[P, K]`, read at the pair itself where that is None.
        weights_ENK: `[E, N, K]` contiguous; or `[E, 2N, K]`, gate first: `silu(gate) * up` is written.
        offsets: `[E + 1]` int32, where each expert's pairs start.
        source_row_P: `[P]` int32.
        out_PN: `[P, N]` contiguous, written for the pairs.
        tile: with `rows`.
    """
    num_experts, num_columns, depth = weights_ENK.shape
    num_pairs, columns = out_PN.shape
    blocks = min(num_pairs, num_experts) + num_pairs // tile.rows
    _sorted_gemm[(blocks * triton.cdiv(columns, tile.columns),)](
        x,
        weights_ENK,
        offsets,
        source_row_P if source_row_P is not None else offsets,
        out_PN,
        x.stride(0),
        weights_ENK.stride(0),
        num_experts,
        DEPTH=depth,
        COLUMNS=columns,
        GATED=num_columns == 2 * columns,
        GATHERED=source_row_P is not None,
        WEIGHTS_FIRST=tile.weights_first,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def gate_up_by_slot(
    x_RH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    expert_ids_RK: torch.Tensor,
    first_expert: int,
    hidden_SI: torch.Tensor,
    tile: TritonTile,
) -> None:
    """`hidden[r * K + k] = silu(gate[e] @ x[r]) * (up[e] @ x[r])` for the slots whose expert is this rank's.

    Args:
        x_RH: `[R, H]`, rows of any stride.
        gate_up_EFH: `[E, 2I, H]` contiguous, gate first.
        expert_ids_RK: `[R, K]` int32 or int64, rows of any stride.
        first_expert: id of this rank's first expert.
        hidden_SI: `[R * K, I]` contiguous, written for this rank's slots.
        tile: without `rows`.
    """
    num_rows, top_k = expert_ids_RK.shape
    columns = hidden_SI.shape[1]
    _gate_up_by_slot[(num_rows * top_k * triton.cdiv(columns, tile.columns),)](
        x_RH,
        gate_up_EFH,
        expert_ids_RK,
        hidden_SI,
        x_RH.stride(0),
        expert_ids_RK.stride(0),
        gate_up_EFH.stride(0),
        first_expert,
        gate_up_EFH.shape[0],
        TOP_K=top_k,
        DEPTH=gate_up_EFH.shape[2],
        COLUMNS=columns,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
    )


def down_by_row(
    hidden_SI: torch.Tensor,
    down_EHI: torch.Tensor,
    expert_ids_RK: torch.Tensor,
    expert_weights_RK: torch.Tensor,
    first_expert: int,
    y_RH: torch.Tensor,
    tile: TritonTile,
) -> None:
    """`y[r] = sum over k of weight[r, k] * down[e] @ hidden[r * K + k]` in float32; zero where no slot is this rank's.

    Args:
        hidden_SI: `[R * K, I]` contiguous, from `gate_up_by_slot`.
        down_EHI: `[E, H, I]` contiguous.
        expert_ids_RK, first_expert: as there.
        expert_weights_RK: `[R, K]` routing weights, rows of any stride.
        y_RH: `[R, H]`, rows of any stride, written.
        tile: without `rows`.
    """
    num_rows, top_k = expert_ids_RK.shape
    columns, depth = down_EHI.shape[1:]
    _down_by_row[(num_rows * triton.cdiv(columns, tile.columns),)](
        hidden_SI,
        down_EHI,
        expert_ids_RK,
        expert_weights_RK,
        y_RH,
        expert_ids_RK.stride(0),
        expert_weights_RK.stride(0),
        y_RH.stride(0),
        down_EHI.stride(0),
        first_expert,
        down_EHI.shape[0],
        TOP_K=top_k,
        DEPTH=depth,
        COLUMNS=columns,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
    )
