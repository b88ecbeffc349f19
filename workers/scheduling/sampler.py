"""From logits to tokens. A sampled token depends on its request's seed and position alone, never on its company.

Each draw takes one uniform number from Philox, a counter-based generator keyed by the seed with the position as its
counter, and inverts the cumulative distribution in vocabulary order. So any rank can draw any token of any request, in
any batch, again after a preemption or a restart. Nothing is read back from the device.
"""

import numpy
import torch

from ..request import SamplingParams
from .sequence import TokenSequence

NOT_FINITE = -1
"""Stands for a token where the logits of a row are not finite."""

# A draw takes about 50 bytes a logit at its peak, in float64. So many are drawn from at once: 0.4 GB.
_LOGITS_AT_ONCE = 1 << 23


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, `[N]` int64; `NOT_FINITE` where a row holds a number that is not finite.

    Graphs record it after the step.
    """
    least_N, largest_N = logits_NV.aminmax(dim=-1)  # both are NaN where anything is
    is_finite_N = torch.isfinite(least_N) & torch.isfinite(largest_N)
    return torch.where(is_finite_N, logits_NV.argmax(dim=-1), NOT_FINITE)


def sample(
    logits_NV: torch.Tensor, sequences: list[TokenSequence], greedy_N: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token of each sequence.

    Args:
        logits_NV: `[N, V]`, one row a sequence, any float dtype.
        sequences: the `N` sequences, before the step that yields the token is counted as launched.
        greedy_N: `greedy(logits_NV)`, where a graph found it already; it is not changed.

    Returns:
        `[N]` int64 on the device of the logits, a tensor of its own; `NOT_FINITE` where a row holds a number that is
        not finite.
    """
    if not sequences:
        return torch.empty(0, dtype=torch.int64, device=logits_NV.device)
    greedy_N = greedy(logits_NV) if greedy_N is None else greedy_N.clone()
    # The only token that top_k=1 leaves is the greedy one, also where several are as likely.
    drawn = [row for row, one in enumerate(sequences) if _draws(one.request.sampling)]
    if not drawn:
        return greedy_N
    tokens_N = greedy_N.clone()
    rows = to_device(drawn, torch.int64, logits_NV.device)
    at_once = max(1, _LOGITS_AT_ONCE // logits_NV.shape[1])
    parts = [
        _draw(logits_NV[rows[start : start + at_once]], [sequences[row] for row in drawn[start : start + at_once]])
        for start in range(0, len(drawn), at_once)
    ]
    tokens_N[rows] = torch.cat(parts)
    return torch.where(greedy_N == NOT_FINITE, NOT_FINITE, tokens_N)


def _draws(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0.0 and sampling.top_k != 1


def _draw(logits_MV: torch.Tensor, sequences: list[TokenSequence]) -> torch.Tensor:
    """`[M]` tokens drawn from `[M, V]` logits, each by its sequence's own settings, seed and position."""
    sampling, vocab_size, device = [one.request.sampling for one in sequences], logits_MV.shape[1], logits_MV.device

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float64, device).unsqueeze(1)

    # Rows that are not finite are sorted out by the caller; here they must only not disturb.
    logits_MV = logits_MV.double().nan_to_num()
    if any(0 < one.top_k < vocab_size for one in sampling):
        kept_M1 = to_device([one.top_k or vocab_size for one in sampling], torch.int64, device).unsqueeze(1)
        # Of equal logits at the last place, those of the lowest ids are kept.
        descending_MV, order_MV = logits_MV.sort(dim=-1, descending=True, stable=True)
        beyond_MV = torch.arange(vocab_size, device=device) >= kept_M1
        logits_MV = logits_MV.scatter(1, order_MV, descending_MV.masked_fill(beyond_MV, float("-inf")))
    # Relative to the largest: a tiny temperature must not overflow it.
    largest_M1 = logits_MV.max(dim=-1, keepdim=True).values
    weights_MV = torch.softmax((logits_MV - largest_M1) / column([one.temperature for one in sampling]), dim=-1)
    if any(one.top_p < 1.0 for one in sampling):
        descending_MV, order_MV = weights_MV.sort(dim=-1, descending=True, stable=True)
        shares_M1 = column([one.top_p if one.top_p < 1.0 else float("inf") for one in sampling])
        beyond_MV = descending_MV.cumsum(dim=-1) - descending_MV >= shares_M1
        weights_MV = weights_MV.scatter(1, order_MV, descending_MV.masked_fill(beyond_MV, 0.0))
    cumulative_MV = weights_MV.cumsum(dim=-1)
    uniform_M1 = column([_uniform_of(sequence) for sequence in sequences])
    index_M = torch.searchsorted(cumulative_MV, uniform_M1 * cumulative_MV[:, -1:], right=True)[:, 0]
    return torch.where(index_M < vocab_size, index_M, weights_MV.argmax(dim=-1))


def _uniform_of(sequence: TokenSequence) -> float:
    seed = sequence.request.sampling.seed
    assert seed is not None, "the driver gives every sampled request a seed"
    return uniform(seed, sequence.num_generated)


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one position of a seeded request."""
    return numpy.random.Generator(numpy.random.Philox(key=seed, counter=position)).random()


def to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A small list on a device, without waiting for what runs there."""
    on_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
