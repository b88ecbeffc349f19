"""What the user bounds: tokens of a step, requests at once, and the way tokens reach their experts."""

from typing import Literal

import msgspec

from .errors import ConfigError

DispatchKind = Literal["auto", "allgather", "alltoall"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one DP rank's step, the same on every rank.

    Attributes:
        chunked_prefill_size: tokens a DP rank prefills in one step, over all its requests together.
        max_running_requests: requests a DP rank decodes at once.
    """

    chunked_prefill_size: int = 2048
    max_running_requests: int = 128

    def __post_init__(self) -> None:
        for name in ("chunked_prefill_size", "max_running_requests"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"limits.{name}={value} is below 1: set limits.{name} to 1 or more")

    @property
    def max_tokens_per_step(self) -> int:
        """The most tokens one DP rank runs in one step: it prefills or decodes, never both."""
        return max(self.chunked_prefill_size, self.max_running_requests)
