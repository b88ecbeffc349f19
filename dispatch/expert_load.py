"""How evenly tokens spread over the experts, counted on the device: a step reads nothing back for it.

One small kernel a layer adds to a counter for each expert, and can be recorded in a graph. A copy of the counters comes
to the host between steps, at most once a second, and nobody waits for it. Nothing here is compared between ranks.
"""

import time
from collections.abc import Sequence

import torch

_INTERVAL_S = 1.0


class ExpertLoad:
    """Counters of (token, expert) pairs that one DP rank's batches made, since the start.

    Args:
        num_experts: of each layer, over all ranks.
        device: where the layers run.

    Attributes:
        num_experts: of each layer.
        latest: the counters as they last came to the host: int64 in native order, layer after layer.
    """

    def __init__(self, num_experts: Sequence[int], device: torch.device):
        self.num_experts = tuple(num_experts)
        # Steps run in inference mode and add to these, which is refused for tensors that were made there.
        with torch.inference_mode(False):
            self._counts = torch.zeros(sum(num_experts), dtype=torch.int64, device=device)
            self._on_host = torch.zeros(sum(num_experts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._layers = self._counts.split(list(num_experts))
        self._copied: torch.cuda.Event | None = None
        self._read_at = time.monotonic()
        self.latest = self._on_host.numpy().tobytes()

    def count(self, layer: int, expert_ids_TK: torch.Tensor, carried_TK: torch.Tensor) -> None:
        """Add one layer's routing, on the device.

        Args:
            layer: in the order of the model.
            expert_ids_TK: `[T, K]` global expert ids, all of them valid.
            carried_TK: `[T, K]` int64, 1 for the pairs of tokens and 0 for those of padding.
        """
        self._layers[layer].index_add_(0, expert_ids_TK.flatten(), carried_TK.flatten())

    def poll(self) -> None:
        """Between two steps: begin a copy to the host if the last one is old, or take in one that has come."""
        if self._copied is not None:
            if self._copied.query():
                self._take()
        elif time.monotonic() - self._read_at >= _INTERVAL_S:
            self._begin()

    def settle(self) -> None:
        """While no step is under way: bring the counters to the host now."""
        if self._copied is None:
            self._begin()
        if self._copied is not None:
            self._copied.synchronize()
            self._take()

    def _begin(self) -> None:
        self._on_host.copy_(self._counts, non_blocking=True)
        if self._counts.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._take()

    def _take(self) -> None:
        self._copied, self._read_at = None, time.monotonic()
        self.latest = self._on_host.numpy().tobytes()
