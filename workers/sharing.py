"""The ranks that hold one batch together, and the groups over which they keep it alike."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class SharingRanks:
    """The ranks of one DP rank, as one of them sees them.

    Attributes:
        rank: this rank.
        dp_rank: whose batch it is.
        ranks: all of them, in order. The first, their leader, is sent the requests, and the others take its tokens.
        host_group: a Gloo group of them; `None` where this rank is alone.
        step_group: their group for what is part of a step; `None` where this rank is alone.
    """

    rank: int
    dp_rank: int
    ranks: range
    host_group: dist.ProcessGroup | None = None
    step_group: dist.ProcessGroup | None = None

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader
