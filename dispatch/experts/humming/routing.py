"""The Triton kernels between sort and GEMMs: rows in the order of their pairs, and what gated experts do in between.

Pairs are those of `pairs.routing_kernels`: their number is read on the device, and rows beyond it are left as they are.

Triton is imported with this module: only a rank that uses it imports it.
"""

import torch
import triton
import triton.language as tl

from ...budgets.moe_shape import Gating

_LARGEST_BLOCK = 1024


@triton.jit(do_not_specialize=["num_experts"])
def _gather(  # type: ignore[no-untyped-def]
    x_ptr, source_row_ptr, offsets_ptr, rows_ptr, x_stride, num_experts, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a pair and a block of its columns."""
    pair = tl.program_id(0).to(tl.int64)
    if pair < tl.load(offsets_ptr + num_experts):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        row = tl.load(source_row_ptr + pair).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside)
        tl.store(rows_ptr + pair * WIDTH + column, x, mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def _gate(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    hidden_ptr,
    offsets_ptr,
    factors_ptr,
    num_experts,
    alpha,
    plus,
    limit,
    WIDTH: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_LIMITED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a pair and a block of its columns; in float32, rounded once."""
    pair = tl.program_id(0).to(tl.int64)
    if pair < tl.load(offsets_ptr + num_experts):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        start = gate_up_ptr + pair * 2 * WIDTH
        if IS_INTERLEAVED:
            gate = tl.load(start + 2 * column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(start + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)
        else:
            gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(start + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        down_factor = 1.0
        if HAS_FACTORS:
            expert = tl.arange(0, EXPERTS)
            ends = tl.load(offsets_ptr + 1 + expert, mask=expert < num_experts, other=2147483647)
            own = tl.sum((ends <= pair).to(tl.int32), axis=0)
            gate *= tl.load(factors_ptr + 3 * own)
            up *= tl.load(factors_ptr + 3 * own + 1)
            down_factor = tl.load(factors_ptr + 3 * own + 2)
        if IS_LIMITED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        hidden = (up + plus) * gate / (1.0 + tl.exp(-alpha * gate)) * down_factor
        tl.store(hidden_ptr + pair * WIDTH + column, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


def gather_rows(x_RH: torch.Tensor, source_row_P: torch.Tensor, offsets: torch.Tensor, rows_PH: torch.Tensor) -> None:
    """`rows[p] = x[source_row[p]]` for every pair.

    Args:
        x_RH: rows of any stride.
        source_row_P: `[P]` int32.
        offsets: `[E + 1]` int32, the last of which is the number of pairs.
        rows_PH: contiguous, written.
    """
    num_pairs, width = rows_PH.shape
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    grid = num_pairs, triton.cdiv(width, block)
    num_experts = offsets.shape[0] - 1
    _gather[grid](x_RH, source_row_P, offsets, rows_PH, x_RH.stride(0), num_experts, WIDTH=width, BLOCK=block)


def gate_rows(
    gating: Gating,
    gate_up_PN: torch.Tensor,
    offsets: torch.Tensor,
    factors_E3: torch.Tensor | None,
    hidden_PI: torch.Tensor,
) -> None:
    """What gated experts do between their projections, for every pair; see `Gating`.

    Args:
        gating: of the layer.
        gate_up_PN: `[P, 2I]` contiguous results of the first projection, sorted by expert.
        offsets: `[E + 1]` int32, where each expert's pairs start, and their number.
        factors_E3: see `weights.whole_factors`; the last is multiplied into what the second projection reads.
        hidden_PI: contiguous, written.
    """
    num_pairs, width = hidden_PI.shape
    num_experts = offsets.shape[0] - 1
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    _gate[num_pairs, triton.cdiv(width, block)](
        gate_up_PN,
        hidden_PI,
        offsets,
        offsets if factors_E3 is None else factors_E3,
        num_experts,
        float(gating.alpha),
        float(gating.plus),
        float(gating.limit or 0.0),
        WIDTH=width,
        IS_INTERLEAVED=gating.is_interleaved,
        IS_LIMITED=gating.limit is not None,
        HAS_FACTORS=factors_E3 is not None,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=block,
    )
