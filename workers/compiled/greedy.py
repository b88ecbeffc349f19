"""The most likely token of each row and whether the row is finite, in one pass over the logits.

A row is looked at in parts, since a handful of long rows would keep a handful of multiprocessors busy.
"""

from collections.abc import Callable

import torch

from ...dispatch.errors import ConfigError
from ..model.spec import ModelSpec
from ..scheduling.rows import RowFailure, StepRows
from ..scheduling.sampler import greedy

_SEED = 0
_MOST_PARTS = 256


def greedy_in_parts(logits_NV: torch.Tensor) -> torch.Tensor:
    """What `sampler.greedy` returns, to the bit."""
    vocab_size = logits_NV.shape[1]
    num_parts = max(number for number in range(1, _MOST_PARTS + 1) if vocab_size % number == 0)
    logits_NPC = logits_NV.view(-1, num_parts, vocab_size // num_parts)
    largest_NP, place_NP = logits_NPC.max(dim=-1)  # of NaN and of equals the first, as argmax has it
    is_finite_N = torch.isfinite(logits_NPC).all(dim=-1).all(dim=-1)
    part_N1 = largest_NP.argmax(dim=-1, keepdim=True)
    token_ids_N = (part_N1 * logits_NPC.shape[2] + place_NP.gather(1, part_N1))[:, 0]
    failures_N = torch.where(is_finite_N, 0, RowFailure.NOT_FINITE)
    return StepRows(token_ids_N=token_ids_N, failures_N=failures_N).packed()


def compile_greedy(
    spec: ModelSpec, device: torch.device, backend: str = "inductor"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`sampler.greedy` compiled, for one row and for any other number of rows.

    Args:
        spec: of the model whose logits it gets.
        device: of the logits.
        backend: torch.compile's.

    Raises:
        ConfigError: it finds other tokens, where some are as likely or a row is not finite too.
    """
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(greedy_in_parts, backend=backend, dynamic=True)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.inference_mode():
        for num_rows in (1, 7):
            logits_NV = torch.randn(num_rows, spec.vocab_size, generator=generator)
            largest = logits_NV.max() + 1
            logits_NV[-1, [spec.vocab_size // 3, -1]] = largest  # as likely
            for row, value in enumerate((float("nan"), float("inf"), float("-inf")), start=1):
                if row < num_rows - 1:
                    logits_NV[row, spec.vocab_size // 2] = value
            logits_NV = logits_NV.to(device, getattr(torch, spec.dtype))
            expected, found = greedy(logits_NV), compiled(logits_NV)
            if not torch.equal(expected, found):
                raise ConfigError(f"the compiled choice of tokens differs: {found.tolist()}, not {expected.tolist()}")
    return compiled
