"""Which ranks share a batch: `world_size = dp_size * attn_tp_size`, `ep_size = world_size`."""

import msgspec

from ..errors import ConfigError


class Layout(msgspec.Struct, frozen=True):
    """The arrangement of ranks, the same value on every rank.

    Rank `r` belongs to DP rank `r // attn_tp_size`; the `attn_tp_size` ranks of a DP rank are consecutive, hold the
    same requests and KV cache, and each owns a different share of the experts.
    """

    world_size: int
    attn_tp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.attn_tp_size < 1 or self.world_size % self.attn_tp_size:
            raise ConfigError(
                f"ranks={self.world_size} is not a positive multiple of attn_tp_size={self.attn_tp_size}: "
                "set ranks to dp_size * attn_tp_size"
            )

    @property
    def dp_size(self) -> int:
        return self.world_size // self.attn_tp_size

    def dp_rank(self, rank: int) -> int:
        return rank // self.attn_tp_size

    def leader(self, dp_rank: int) -> int:
        """The rank that receives the requests of this DP rank and samples its tokens."""
        return dp_rank * self.attn_tp_size

    def ranks_of(self, dp_rank: int) -> range:
        return range(dp_rank * self.attn_tp_size, (dp_rank + 1) * self.attn_tp_size)
