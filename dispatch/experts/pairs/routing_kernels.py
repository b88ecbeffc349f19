"""The Triton kernels around a grouped GEMM: sorting pairs by expert before it, the weighted sum of rows after it.

A pair is a slot `(row, k)` whose expert id is this rank's own. Pairs are sorted by expert, and within an expert by row
and slot, so the order and with it every sum is the same in every run. Nothing is read back to the host, and rows
without a pair are neither read nor multiplied. Ids may be any int32 and rows without a token may hold anything, NaN
included.

Triton is imported with this module: only backends that run on GPUs import it.
"""

import torch
import triton
import triton.language as tl

_SMALL_BLOCK, _LARGE_BLOCK = 512, 4096
_BLOCKS_AT_ONCE = 16  # whose counts a program adds up in one go
_LARGEST_HIDDEN_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_experts", "max_pairs"])
def _sort_pairs(  # type: ignore[no-untyped-def]
    ids_ptr,
    offsets_ptr,
    source_row_ptr,
    position_ptr,
    num_rows,
    row_stride,
    first_expert,
    num_experts,
    max_pairs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program an expert: counts the pairs of experts before it, then writes its own in order."""
    expert = tl.program_id(0)
    num_slots = num_rows * TOP_K
    before = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < num_slots:
        slot = start + tl.arange(0, BLOCK)
        here = slot < num_slots
        address = (slot // TOP_K).to(tl.int64) * row_stride + slot % TOP_K
        expert_id = tl.load(ids_ptr + address, mask=here, other=first_expert - 1)
        before += (here & (expert_id >= first_expert) & (expert_id < first_expert + expert)).to(tl.int32)
        start += BLOCK
    end = tl.minimum(tl.sum(before, axis=0), max_pairs)
    tl.store(offsets_ptr + expert, end)

    start = 0
    while start < num_slots:
        slot = start + tl.arange(0, BLOCK)
        here = slot < num_slots
        address = (slot // TOP_K).to(tl.int64) * row_stride + slot % TOP_K
        expert_id = tl.load(ids_ptr + address, mask=here, other=first_expert - 1)
        own = (here & (expert_id == first_expert + expert)).to(tl.int32)
        position = end + tl.cumsum(own, axis=0) - own
        own_and_fits = (own != 0) & (position < max_pairs)
        tl.store(source_row_ptr + position, slot // TOP_K, mask=own_and_fits)
        tl.store(position_ptr + slot, position, mask=own != 0)
        end = tl.minimum(end + tl.sum(own, axis=0), max_pairs)
        start += BLOCK
    if expert == num_experts - 1:
        tl.store(offsets_ptr + num_experts, end)


@triton.jit(do_not_specialize=["num_rows", "first_expert"])
def _count_pairs(  # type: ignore[no-untyped-def]
    ids_ptr,
    counts_ptr,
    num_rows,
    row_stride,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of slots: how many pairs of each expert it has, `[blocks, E]`."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    here = slot < num_rows * TOP_K
    address = (slot // TOP_K).to(tl.int64) * row_stride + slot % TOP_K
    place = tl.load(ids_ptr + address, mask=here, other=first_expert - 1) - first_expert
    own = here & (place >= 0) & (place < NUM_EXPERTS)
    # The bin behind the experts' takes what is not this rank's.
    counts = tl.histogram(tl.where(own, place, NUM_EXPERTS).to(tl.int32), BINS)
    expert = tl.arange(0, BINS)
    tl.store(counts_ptr + block * NUM_EXPERTS + expert, counts, mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_blocks", "max_pairs"])
def _place_pairs(  # type: ignore[no-untyped-def]
    ids_ptr,
    counts_ptr,
    offsets_ptr,
    source_row_ptr,
    position_ptr,
    num_rows,
    row_stride,
    first_expert,
    num_blocks,
    max_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):
    """One program an expert and a block of slots: writes the expert's pairs of this block behind all that precede."""
    expert = tl.program_id(0)
    own_block = tl.program_id(1)
    column = tl.arange(0, BINS)[None, :]
    before = tl.zeros([BLOCKS_AT_ONCE, BINS], tl.int32)
    total = tl.zeros([BLOCKS_AT_ONCE, BINS], tl.int32)
    first = 0
    while first < num_blocks:
        block = first + tl.arange(0, BLOCKS_AT_ONCE)[:, None]
        counted = tl.load(
            counts_ptr + block * NUM_EXPERTS + column, mask=(block < num_blocks) & (column < NUM_EXPERTS), other=0
        )
        precedes = (column < expert) | ((column == expert) & (block < own_block))
        before += tl.where(precedes, counted, 0)
        total += counted
        first += BLOCKS_AT_ONCE
    start = tl.minimum(tl.sum(tl.sum(before, axis=1), axis=0), max_pairs)
    if own_block == 0:
        tl.store(offsets_ptr + expert, start)
        if expert == NUM_EXPERTS - 1:
            end = tl.minimum(tl.sum(tl.sum(total, axis=1), axis=0), max_pairs)
            tl.store(offsets_ptr + NUM_EXPERTS, end)
    slot = own_block * BLOCK + tl.arange(0, BLOCK)
    here = slot < num_rows * TOP_K
    address = (slot // TOP_K).to(tl.int64) * row_stride + slot % TOP_K
    expert_id = tl.load(ids_ptr + address, mask=here, other=first_expert - 1)
    own = (here & (expert_id == first_expert + expert)).to(tl.int32)
    position = start + tl.cumsum(own, axis=0) - own
    tl.store(source_row_ptr + position, slot // TOP_K, mask=(own != 0) & (position < max_pairs))
    tl.store(position_ptr + slot, position, mask=own != 0)


@triton.jit(do_not_specialize=["first_expert", "num_experts", "max_pairs"])
def _weighted_sum(  # type: ignore[no-untyped-def]
    z_ptr,
    ids_ptr,
    weights_ptr,
    position_ptr,
    y_ptr,
    ids_stride,
    weights_stride,
    y_stride,
    first_expert,
    num_experts,
    max_pairs,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and a block of its columns; sums in float32, in the order of the slots."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        expert_id = tl.load(ids_ptr + row * ids_stride + k)
        own = (expert_id >= first_expert) & (expert_id < first_expert + num_experts)
        position = tl.load(position_ptr + row * TOP_K + k, mask=own, other=max_pairs)
        own = own & (position < max_pairs)
        weight = tl.load(weights_ptr + row * weights_stride + k, mask=own, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + position.to(tl.int64) * HIDDEN + column, mask=inside & own, other=0.0)
        total += weight * z.to(tl.float32)
    tl.store(y_ptr + row * y_stride + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def sort_pairs(
    expert_ids_RK: torch.Tensor,
    first_expert: int,
    num_local: int,
    offsets: torch.Tensor,
    source_row_P: torch.Tensor,
    position_RK: torch.Tensor,
) -> None:
    """Sort the pairs of this rank's experts; one kernel, two where slots are many, no value read back.

    Args:
        expert_ids_RK: `[R, K]` int32 or int64, rows of any stride; ids outside
            `[first_expert, first_expert + num_local)` are not this rank's.
        first_expert: id of this rank's first expert.
        num_local: experts this rank owns, `E`.
        offsets: `[E + 1]` int32, written: where each expert's pairs start, and their number.
        source_row_P: `[P]` int32, written up to the number of pairs: the row of each sorted pair. Pairs beyond `P`,
            which rows of distinct ids do not have, are dropped.
        position_RK: `[R * K]` int32 or more, written for this rank's pairs: where each stands in the sorted order.
    """
    num_rows, top_k = expert_ids_RK.shape
    if num_rows * top_k > _LARGE_BLOCK:
        _sort_by_blocks(expert_ids_RK, first_expert, num_local, offsets, source_row_P, position_RK)
        return
    block = _SMALL_BLOCK if num_rows * top_k <= _SMALL_BLOCK else _LARGE_BLOCK
    _sort_pairs[(num_local,)](
        expert_ids_RK,
        offsets,
        source_row_P,
        position_RK,
        num_rows,
        expert_ids_RK.stride(0),
        first_expert,
        num_local,
        source_row_P.shape[0],
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4 if block == _SMALL_BLOCK else 8,
    )


def _sort_by_blocks(
    expert_ids_RK: torch.Tensor,
    first_expert: int,
    num_local: int,
    offsets: torch.Tensor,
    source_row_P: torch.Tensor,
    position_RK: torch.Tensor,
) -> None:
    """As `sort_pairs`: one kernel walks all slots once an expert, which takes as long as the GEMMs of few rows here."""
    num_rows, top_k = expert_ids_RK.shape
    num_blocks = triton.cdiv(num_rows * top_k, _LARGE_BLOCK)
    counts = torch.empty(num_blocks, num_local, dtype=torch.int32, device=expert_ids_RK.device)
    slots = (num_rows, expert_ids_RK.stride(0), first_expert)
    bins = triton.next_power_of_2(num_local + 1)
    sizes = {"NUM_EXPERTS": num_local, "BINS": bins, "TOP_K": top_k, "BLOCK": _LARGE_BLOCK, "num_warps": 8}
    _count_pairs[(num_blocks,)](expert_ids_RK, counts, *slots, **sizes)
    _place_pairs[(num_local, num_blocks)](
        expert_ids_RK,
        counts,
        offsets,
        source_row_P,
        position_RK,
        *slots,
        num_blocks,
        source_row_P.shape[0],
        **sizes,
        BLOCKS_AT_ONCE=_BLOCKS_AT_ONCE,
    )


def weighted_sum(
    z_PH: torch.Tensor,
    expert_ids_RK: torch.Tensor,
    expert_weights_RK: torch.Tensor,
    position_RK: torch.Tensor,
    first_expert: int,
    num_local: int,
    y_RH: torch.Tensor,
) -> None:
    """`y[r] = sum over k of weight[r, k] * z[position[r, k]]` over this rank's pairs, in float32; zero without any.

    Args:
        z_PH: `[P, H]` contiguous results of the sorted pairs.
        expert_ids_RK: as for `sort_pairs`.
        expert_weights_RK: `[R, K]` routing weights, rows of any stride.
        position_RK: from `sort_pairs`.
        first_expert: id of this rank's first expert.
        num_local: experts this rank owns.
        y_RH: `[R, H]`, rows of any stride, written.
    """
    num_rows, top_k = expert_ids_RK.shape
    hidden_size = z_PH.shape[1]
    block = min(_LARGEST_HIDDEN_BLOCK, triton.next_power_of_2(hidden_size))
    _weighted_sum[(num_rows, triton.cdiv(hidden_size, block))](
        z_PH,
        expert_ids_RK,
        expert_weights_RK,
        position_RK,
        y_RH,
        expert_ids_RK.stride(0),
        expert_weights_RK.stride(0),
        y_RH.stride(0),
        first_expert,
        num_local,
        z_PH.shape[0],
        TOP_K=top_k,
        HIDDEN=hidden_size,
        BLOCK=block,
        num_warps=4,
    )
