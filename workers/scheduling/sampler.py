"""From logits to tokens. A sampled token depends on its request's seed and position alone, never on its company.

Each draw takes one uniform number from Philox, a counter-based generator keyed by the seed with the position as its
counter, and inverts the cumulative distribution in vocabulary order. So any rank can draw any token of any request, in
any batch, again after a preemption or a restart. Nothing is read back from the device.
"""

import numpy
import torch

from ..request import SamplingParams
from .rows import RowFailure, StepRows
from .sequence import TokenSequence

# A draw takes about 50 bytes a logit at its peak, in float64. So many are drawn from at once: 0.4 GB.
_LOGITS_AT_ONCE = 1 << 23


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """The rows of the most likely tokens, as `StepRows.packed` has them. Graphs record it after the step."""
    return _rows(logits_NV, logits_NV.argmax(dim=-1)).packed()


def sample(logits_NV: torch.Tensor, sequences: list[TokenSequence], greedy_NF: torch.Tensor | None = None) -> StepRows:
    """What a step yields for each sequence.

    Args:
        logits_NV: `[N, V]`, one row a sequence, any float dtype.
        sequences: the `N` sequences, before the step that yields the token is counted as launched.
        greedy_NF: `greedy(logits_NV)`, where a graph found it already; it is not changed.

    Returns:
        On the device of the logits, tensors of their own; `RowFailure.NOT_FINITE` where a row of the logits holds a
        number that is not finite.
    """
    packed_NF = greedy(logits_NV) if greedy_NF is None else greedy_NF.clone()
    # The only token that top_k=1 leaves is the greedy one, also where several are as likely.
    drawn = [row for row, one in enumerate(sequences) if _draws(one.request.sampling)]
    if drawn:
        rows = to_device(drawn, torch.int64, logits_NV.device)
        at_once = max(1, _LOGITS_AT_ONCE // logits_NV.shape[1])
        parts = []
        for start in range(0, len(drawn), at_once):
            logits_MV = logits_NV[rows[start : start + at_once]]
            tokens_M = _draw(logits_MV, [sequences[row] for row in drawn[start : start + at_once]])
            parts.append(_rows(logits_MV, tokens_M).packed())
        packed_NF[rows] = torch.cat(parts)
    return StepRows.unpacked(packed_NF)


def _rows(logits_NV: torch.Tensor, token_ids_N: torch.Tensor) -> StepRows:
    """The rows that these logits and the tokens taken from them make."""
    least_N, largest_N = logits_NV.aminmax(dim=-1)  # both are NaN where anything is
    is_finite_N = torch.isfinite(least_N) & torch.isfinite(largest_N)
    return StepRows(token_ids_N=token_ids_N, failures_N=torch.where(is_finite_N, 0, RowFailure.NOT_FINITE))


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
