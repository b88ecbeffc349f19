"""The one door to `torch.distributed` for what a model's forward exchanges.

Ranks that share a batch also broadcast its requests and its tokens, outside what is recorded.

Whatever passes through can be listed (what did this step issue, in what order, with which shapes), and it can be
rehearsed: the same code runs and the same list results, but nothing is sent, so nothing can hang.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from .collective_call import CollectiveCall

GroupName = Literal["ep", "attn_tp"]
# PyTorch 2.13 renamed it and warns about the old name at every call; 2.11 has only that.
all_gather_tensors = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_EMPTY_BYTE = 0xFF


class Collectives:
    """Collectives of one rank; all ranks of a group issue the same calls in the same order.

    Args:
        groups: process group by name; `attn_tp` only where ranks share a batch.
    """

    def __init__(self, groups: Mapping[GroupName, dist.ProcessGroup]):
        self._groups = groups
        self._log: list[CollectiveCall] | None = None
        self._sends = True

    @contextmanager
    def listing(self) -> Iterator[list[CollectiveCall]]:
        """Calls issued inside are executed and listed."""
        previous, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = previous

    @contextmanager
    def rehearsing(self) -> Iterator[list[CollectiveCall]]:
        """Calls issued inside are listed and not sent. Rows come back empty: bytes of ones, so expert ids are -1."""
        previous, self._sends = self._sends, False
        try:
            with self.listing() as log:
                yield log
        finally:
            self._sends = previous

    def all_gather(self, group: GroupName, output: torch.Tensor, sent: torch.Tensor) -> None:
        """Equal parts of all ranks, in rank order along the first dimension."""
        if self._issue_into(output, "all_gather", group, sent):
            all_gather_tensors(output, sent, group=self._groups[group])

    def all_to_all(
        self, group: GroupName, output: torch.Tensor, sent: torch.Tensor, output_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        """Part `s` of what this rank sends goes to rank `s`; sizes are rows of the first dimension."""
        if self._issue_into(output, "all_to_all", group, sent):
            dist.all_to_all_single(output, sent, output_sizes, sent_sizes, group=self._groups[group])

    def issue(self, op: str, group: GroupName, sent: torch.Tensor) -> bool:
        """List an exchange that does not go through `torch.distributed`; returns whether it is to be carried out."""
        if self._log is not None:
            dtype = str(sent.dtype).removeprefix("torch.")
            self._log.append(CollectiveCall(op, group, tuple(sent.shape), dtype))
        return self._sends

    def _issue_into(self, output: torch.Tensor, op: str, group: GroupName, sent: torch.Tensor) -> bool:
        """The same for an exchange that fills `output`, which comes back empty in a rehearsal."""
        if not self.issue(op, group, sent):
            output.fill_(_EMPTY_BYTE if output.dtype == torch.uint8 else 0)
        return self._sends
