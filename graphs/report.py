"""What ranks answer about their graphs; free of PyTorch, since the driver reads it."""

import msgspec

from .plan import CaptureEntry


class AgreeReply(msgspec.Struct, frozen=True):
    """What a rank says to a plan.

    Attributes:
        rank: which rank.
        plan_digest: of the plan it received.
        refused: entries it cannot record, with the reason.
    """

    rank: int
    plan_digest: int
    refused: tuple[tuple[CaptureEntry, str], ...]


class GraphUse(msgspec.Struct, frozen=True):
    """One graph and how often it ran since it was committed."""

    entry: CaptureEntry
    num_bytes: int
    replays: int


class GraphReport(msgspec.Struct, frozen=True):
    """The graphs of one rank.

    Attributes:
        rank: which rank.
        backend: how they are replayed.
        static_bytes: input buffers, target and draft.
        graphs: each graph.
        eager_steps: steps that ran without one, by reason.
    """

    rank: int
    backend: str
    static_bytes: int
    graphs: tuple[GraphUse, ...]
    eager_steps: tuple[tuple[str, int], ...]

    @property
    def replays(self) -> int:
        return sum(use.replays for use in self.graphs)
