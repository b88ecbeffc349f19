"""The experts of one layer that this rank owns, as every expert backend is handed them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one layer that this rank owns.

    Attributes:
        module: the model's own experts module, sharded.
        forward: its forward, `(x, local ids, weights) -> weighted sum`; skips ids from `num_local` on.
        num_local: how many experts these are.
    """

    module: torch.nn.Module
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    num_local: int
