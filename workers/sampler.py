"""From logits to tokens. A sampled token depends on its request's seed and position alone, never on its company.

Each draw takes one uniform number from Philox, a counter-based generator keyed by the seed with the position as its
counter, and inverts the cumulative distribution in vocabulary order. So any rank can draw any token of any request, in
any batch, again after a preemption or a restart.
"""

import numpy
import torch

from .sequence import Sequence


def sample(logits_NV: torch.Tensor, sequences: list[Sequence]) -> list[int | str]:
    """The next token of each sequence, or a message where its logits are not finite.

    Args:
        logits_NV: `[N, V]`, one row a sequence, any float dtype.
        sequences: the `N` sequences.
    """
    if not sequences:
        return []
    greedy = logits_NV.argmax(dim=-1).tolist()
    finite = torch.isfinite(logits_NV).all(dim=-1).tolist()
    results: list[int | str] = []
    for row, sequence in enumerate(sequences):
        if not finite[row]:
            results.append(f"the model's logits are not finite after {len(sequence.token_ids)} tokens")
        elif sequence.request.sampling.temperature == 0.0:
            results.append(greedy[row])
        else:
            results.append(_draw(logits_NV[row], sequence))
    return results


def _draw(logits_V: torch.Tensor, sequence: Sequence) -> int:
    sampling = sequence.request.sampling
    assert sampling.seed is not None, "the driver gives every sampled request a seed"
    logits = logits_V.double()
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    # Relative to the largest: a tiny temperature must not overflow it.
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        descending, order = probabilities.sort(descending=True, stable=True)
        beyond = descending.cumsum(dim=-1) - descending >= sampling.top_p
        probabilities[order[beyond]] = 0.0
    cumulative = probabilities.cumsum(dim=-1)
    drawn = uniform(sampling.seed, sequence.num_generated) * cumulative[-1].item()
    index = int(torch.searchsorted(cumulative, drawn, right=True))
    return index if index < logits.numel() else int(probabilities.argmax())


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one position of a seeded request."""
    return numpy.random.Generator(numpy.random.Philox(key=seed, counter=position)).random()
