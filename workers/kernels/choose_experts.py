"""The choice of experts in one Triton kernel. Triton is imported with this module: only ranks on GPUs import it."""

import torch
import triton
import triton.language as tl


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
            num_warps=1,  # each choice waits for the one before it: between warps that takes longer
        )
    return weights_TK, ids_TK
