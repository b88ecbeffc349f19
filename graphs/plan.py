"""Which graphs are to exist: an ordered list with one encoding and one digest, the same on the driver and all ranks."""

import zlib

import msgspec

from ..dispatch.budgets.limits import Limits
from ..dispatch.budgets.step_kinds import KINDS, recorded_kinds


class CaptureEntry(msgspec.Struct, frozen=True, order=True):
    """One graph.

    Attributes:
        kind: what kind of step.
        bucket: requests, or tokens for a kind that counts those.
        tokens_per_request: width of the step.
        layer: which draft layer; 0 for everything that is not one of several.
    """

    kind: str
    bucket: int
    tokens_per_request: int = 1
    layer: int = 0

    @property
    def num_tokens(self) -> int:
        return self.bucket * self.tokens_per_request

    def __str__(self) -> str:
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{self.kind}[{self.bucket} x {self.tokens_per_request}{layer}]"


class CapturePlan(msgspec.Struct, frozen=True):
    """Entries in the order in which all ranks record them: target before draft graphs, largest first."""

    entries: tuple[CaptureEntry, ...]

    @property
    def digest(self) -> int:
        return zlib.crc32(msgspec.msgpack.encode(self))

    def without(self, dropped: set[CaptureEntry]) -> "CapturePlan":
        return CapturePlan(tuple(entry for entry in self.entries if entry not in dropped))


def plan_captures(limits: Limits) -> CapturePlan:
    """The plan that follows from the limits."""
    entries = [
        CaptureEntry(kind.name, bucket, kind.width(limits), layer)
        for kind in recorded_kinds(limits)
        for bucket in kind.buckets(limits)
        for layer in range(kind.layers(limits))
    ]
    order = list(KINDS)
    entries.sort(key=lambda e: (KINDS[e.kind].model == "draft", -e.num_tokens, order.index(e.kind), e.layer))
    return CapturePlan(tuple(entries))
