"""A step's token counts where kernels can read them."""

import torch

from .geometry import StepGeometry


class CountTensors:
    """Token counts of all DP ranks where kernels can read them; allocated once, int32, filled without waiting.

    They are for kernels that need the counts of other ranks on the device. No dispatcher here has such: all take them
    from the `StepGeometry`, on the host.

    Attributes:
        num_tokens: `[dp_size]`, tokens of each DP rank after padding.
        num_tokens_for_logprob: `[dp_size]`, rows of each DP rank whose logits are due.
    """

    def __init__(self, dp_size: int, device: torch.device):
        self._both = torch.zeros(2, dp_size, dtype=torch.int32, device=device)
        self.num_tokens, self.num_tokens_for_logprob = self._both

    def fill(self, geometry: StepGeometry, num_due_per_dp_rank: tuple[int, ...]) -> None:
        """Copy a step's counts in, equal on every rank."""
        counts = torch.tensor(
            [geometry.num_tokens_per_dp_rank, num_due_per_dp_rank], dtype=torch.int32, pin_memory=self._both.is_cuda
        )
        self._both.copy_(counts, non_blocking=True)
