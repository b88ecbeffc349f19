"""Two Triton kernels for what model code spells out as many small ones: rotary embedding, and the choice of experts.

Triton is imported with this module: only ranks on GPUs import it.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    rotated_q_ptr,
    rotated_k_ptr,
    q_head_stride,
    q_token_stride,
    k_head_stride,
    k_token_stride,
    rotated_q_head_stride,
    rotated_q_token_stride,
    rotated_k_head_stride,
    rotated_k_token_stride,
    angle_stride,
    NUM_Q_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SECOND_ANGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and a head. Products are rounded before they are added, as in the operations replaced."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    x_ptr, y_ptr = q_ptr + head * q_head_stride, rotated_q_ptr + head * rotated_q_head_stride
    x_token_stride, y_token_stride = q_token_stride, rotated_q_token_stride
    if head >= NUM_Q_HEADS:
        x_ptr = k_ptr + (head - NUM_Q_HEADS) * k_head_stride
        y_ptr = rotated_k_ptr + (head - NUM_Q_HEADS) * rotated_k_head_stride
        x_token_stride, y_token_stride = k_token_stride, rotated_k_token_stride
    x_ptr += token * x_token_stride
    y_ptr += token * y_token_stride
    index = tl.arange(0, BLOCK)
    here = index < HALF
    dtype = y_ptr.dtype.element_ty
    first = tl.load(x_ptr + index, mask=here).to(tl.float32)
    second = tl.load(x_ptr + HALF + index, mask=here).to(tl.float32)
    angle = token * angle_stride + index
    first_cos = tl.load(cos_ptr + angle, mask=here).to(tl.float32)
    first_sin = tl.load(sin_ptr + angle, mask=here).to(tl.float32)
    second_cos = tl.load(cos_ptr + angle + SECOND_ANGLE, mask=here).to(tl.float32)
    second_sin = tl.load(sin_ptr + angle + SECOND_ANGLE, mask=here).to(tl.float32)
    rotated_first = (first * first_cos).to(dtype).to(tl.float32) - (second * first_sin).to(dtype).to(tl.float32)
    rotated_second = (second * second_cos).to(dtype).to(tl.float32) + (first * second_sin).to(dtype).to(tl.float32)
    tl.store(y_ptr + index, rotated_first.to(dtype), mask=here)
    tl.store(y_ptr + HALF + index, rotated_second.to(dtype), mask=here)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits_ptr,
    weights_ptr,
    ids_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program a row. Where logits are NaN the ids are those of experts all the same, and the weights NaN."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    here = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=here, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, axis=0))
    shares = shares / tl.sum(tl.where(here, shares, 0.0), axis=0)
    left = tl.where(shares == shares, shares, 2.0)
    left = tl.where(here, left, -1.0)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int64)
    weights = tl.zeros([SLOTS], tl.float32)
    for k in tl.static_range(TOP_K):
        chosen = tl.min(tl.where(left == tl.max(left, axis=0), expert, BLOCK), axis=0)
        weight = tl.sum(tl.where(expert == chosen, shares, 0.0), axis=0)
        ids = tl.where(slot == k, chosen, ids)
        weights = tl.where(slot == k, weight, weights)
        left = tl.where(expert == chosen, -1.0, left)
    if NORMALISED:
        weights = weights / tl.sum(weights, axis=0)
    address = row * TOP_K + slot
    tl.store(ids_ptr + address, ids, mask=slot < TOP_K)
    tl.store(weights_ptr + address, weights.to(weights_ptr.dtype.element_ty), mask=slot < TOP_K)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with rotary embedding, halves against each other; one kernel.

    Args:
        q: `[1, N, T, D]`, any strides but of its last dimension; D is even.
        k: `[1, M, T, D]`, of the same dtype, likewise.
        cos: `[1, T, D]` contiguous, or `[1, T, D/2]` where both halves of a head have the same angles.
        sin: likewise.

    Returns:
        Both rotated, of the same shapes and, where they are dense, strides.
    """
    num_tokens, half = q.shape[2], q.shape[3] // 2
    rotated_q, rotated_k = torch.empty_like(q), torch.empty_like(k)
    if num_tokens:
        _rotate[num_tokens, q.shape[1] + k.shape[1]](
            q,
            k,
            cos,
            sin,
            rotated_q,
            rotated_k,
            *(q.stride(1), q.stride(2), k.stride(1), k.stride(2)),
            *(rotated_q.stride(1), rotated_q.stride(2), rotated_k.stride(1), rotated_k.stride(2)),
            cos.shape[-1],
            NUM_Q_HEADS=q.shape[1],
            HALF=half,
            SECOND_ANGLE=half if cos.shape[-1] == 2 * half else 0,
            BLOCK=triton.next_power_of_2(half),
        )
    return rotated_q, rotated_k


def choose_experts(
    logits_TE: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of each row by the softmax of its logits; one kernel.

    Args:
        logits_TE: `[T, E]` contiguous; the softmax is taken in float32.
        top_k: at most E.
        is_normalised: divide the chosen weights by their sum.
        dtype: of the weights.

    Returns:
        `[T, K]` weights, largest first, and `[T, K]` int64 expert ids; the lower id comes first among equals.
    """
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty(num_tokens, top_k, dtype=dtype, device=logits_TE.device)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if num_tokens:
        _choose[num_tokens,](
            logits_TE,
            weights_TK,
            ids_TK,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            NORMALISED=is_normalised,
            BLOCK=triton.next_power_of_2(num_experts),
            SLOTS=triton.next_power_of_2(top_k),
        )
    return weights_TK, ids_TK
