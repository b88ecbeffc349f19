"""A step's token counts where kernels can read them."""

import torch

from .geometry import StepGeometry


class CountTensors:
    """Token counts of all DP ranks where kernels can read them; allocated once, int32.

    Attributes:
        num_tokens: `[dp_size]`, tokens of each DP rank after padding.
        num_tokens_for_logprob: `[dp_size]`, rows of each DP rank whose logits are due.
    """

    def __init__(self, dp_size: int, device: torch.device):
        self.num_tokens = torch.zeros(dp_size, dtype=torch.int32, device=device)
        self.num_tokens_for_logprob = torch.zeros(dp_size, dtype=torch.int32, device=device)

    def fill(self, geometry: StepGeometry, num_due_per_dp_rank: tuple[int, ...]) -> None:
        """Copy a step's counts in, equal on every rank."""
        self.num_tokens.copy_(torch.tensor(geometry.num_tokens_per_dp_rank, dtype=torch.int32))
        self.num_tokens_for_logprob.copy_(torch.tensor(num_due_per_dp_rank, dtype=torch.int32))
