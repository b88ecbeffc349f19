"""What all ranks can do, found together: a way to the experts that one rank cannot take is taken by none.

Every function here is collective over all ranks, on the host group; what they return is equal on every rank. What a
rank can refuse by itself (a library that is missing, another GPU) is agreed on before anything collective is built, so
that no rank waits inside a construction that another never enters.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from .errors import ConfigError
from .messages import gather_values

Built = TypeVar("Built")
Value = TypeVar("Value")


class Dropped(msgspec.Struct, frozen=True):
    """A path that no rank takes because some rank cannot."""

    path: str
    rank: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} dropped on all ranks: rank {self.rank}: {self.reason}"


class _Outcome(msgspec.Struct):
    """Where a rank stands in what all attempt together: still in the middle of it, or at its end, failed or not."""

    is_meeting: bool
    reason: str | None = None
    is_of_another: bool = False


class PeerGaveUp(Exception):
    """Another rank failed in what all attempt together."""


class HostGroup:
    """All ranks, on the host.

    Args:
        group: a Gloo group of all ranks.
        rank: this rank.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int):
        self.group = group
        self.rank = rank

    def gather(self, value: Value, kind: Any) -> list[Value]:
        """What each rank brings, in rank order; see `gather_values`."""
        return gather_values(value, kind, self.group)

    def gather_met(self, value: Value, kind: Any) -> list[Value]:
        """The same in the middle of something that all ranks attempt together: not before all of them are there.

        Raises:
            PeerGaveUp: see `meet`.
        """
        self.meet()
        return self.gather(value, kind)

    def from_first(self, value: Value | None, kind: Any) -> Value:
        """What rank 0 brings; the others bring nothing."""
        first = self.gather(value if self.rank == 0 else None, kind | None)[0]
        assert first is not None, "rank 0 brings a value"
        return first

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each number over all ranks."""
        reduced = values.to("cpu", torch.float64, copy=True)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.group)
        return reduced

    def meet(self) -> None:
        """Wait for all ranks in the middle of something they attempt together.

        Raises:
            PeerGaveUp: some rank is not coming, since it has failed and waits in `failure`.
        """
        found = self.gather(_Outcome(is_meeting=True), _Outcome)
        missing = [rank for rank, outcome in enumerate(found) if not outcome.is_meeting]
        if missing:
            raise PeerGaveUp(f"ranks {missing} gave up")

    def failure(self, reason: str | None, is_of_another: bool) -> tuple[int, str] | None:
        """The first rank whose attempt failed, with its reason, or `None`; equal on every rank.

        A rank that still meets others learns of it there, and comes here too.

        Args:
            reason: why this rank's own failed, if it did.
            is_of_another: whether only because another rank gave up; that one's reason goes before.
        """
        while True:
            found = self.gather(_Outcome(False, reason, is_of_another), _Outcome)
            if not any(outcome.is_meeting for outcome in found):
                break
        failed = [(outcome.is_of_another, rank, outcome.reason) for rank, outcome in enumerate(found) if outcome.reason]
        if not failed:
            return None
        _, rank, first = min(failed)
        assert first is not None
        return rank, first


def agree_on_refusals(group: HostGroup, refusals: Mapping[str, str | None]) -> dict[str, Dropped]:
    """The paths that some rank refuses, with the first of those ranks and its reason.

    Args:
        group: all ranks.
        refusals: of this rank, by path: why it cannot take it, or `None`. The same paths on every rank.
    """
    by_rank = group.gather(dict(refusals), dict[str, str | None])
    dropped: dict[str, Dropped] = {}
    for rank, found in enumerate(by_rank):
        for path, reason in found.items():
            if reason is not None:
                dropped.setdefault(path, Dropped(path, rank, reason))
    return dropped


def require_equal(group: HostGroup, what: str, value: str) -> None:
    """Refuse to go on with what has to be alike on all ranks and is not; inside what they attempt together.

    Args:
        group: all ranks.
        what: for messages; equal on every rank.
        value: of this rank.

    Raises:
        ConfigError: on every rank alike; names the values of the first ranks that differ.
        PeerGaveUp: see `HostGroup.meet`.
    """
    values = group.gather_met(value, str)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ConfigError(f"{what} differs between ranks (rank 0: {values[0]}, rank {rank}: {other})")


def attempt(group: HostGroup, path: str, build: Callable[[], Built]) -> Built | Dropped:
    """What `build` returns, if it does on every rank; otherwise which rank it failed on, and why.

    Args:
        group: all ranks.
        path: that is being built.
        build: may be collective, and meet the other ranks on the way; what it raises is taken as this rank's refusal.
            What it gathers on the host group it gathers with `gather_met`: a rank that has failed answers there alone.
    """
    built: Built | None = None
    raised: Exception | None = None
    try:
        built = build()
    except Exception as error:
        raised = error
    reason = None if raised is None else f"{type(raised).__name__}: {raised}"
    failure = group.failure(reason, isinstance(raised, PeerGaveUp))
    if failure is not None:
        return Dropped(path, *failure)
    assert built is not None
    return built
