"""The driver's half of lockstep capture: agree, rehearse, record, commit.

Knows neither Ray nor the model: it calls a method on all ranks and compares what they answer. Up to the comparison of
the rehearsals nothing has been sent between ranks, so a disagreement found until then can hang nobody.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ...dispatch.errors import ExpertPoolError, GeometryError
from ...graphs.plan import CaptureEntry, CapturePlan
from ...graphs.record import RecordedGeometry, differences
from ...graphs.report import AgreeReply

logger = logging.getLogger(__name__)

_STAGES = ("rehearsal", "recording")

CallAll = Callable[..., Awaitable[list[Any]]]
"""`await call_all(method, *args)`: the method of `LockstepRank` on every rank; answers in rank order."""


class DroppedEntry(msgspec.Struct, frozen=True):
    """An entry that no rank records because some rank cannot."""

    entry: CaptureEntry
    rank: int
    reason: str

    def __str__(self) -> str:
        return f"{self.entry} dropped on all ranks: rank {self.rank} {self.reason}"


class CaptureOutcome(msgspec.Struct, frozen=True):
    """The graphs that all ranks hold, and what was dropped from the plan."""

    plan: CapturePlan
    dropped: tuple[DroppedEntry, ...]

    def what_was_dropped(self) -> list[str]:
        """A line for all entries of one kind that one rank cannot record for one reason."""
        alike: dict[tuple[str, int, str], list[DroppedEntry]] = {}
        for drop in self.dropped:
            alike.setdefault((drop.entry.kind, drop.rank, drop.reason), []).append(drop)
        lines = []
        for (_, rank, reason), drops in alike.items():
            entries = (
                f"{drops[0].entry} to {drops[-1].entry}, {len(drops)} graphs," if drops[1:] else str(drops[0].entry)
            )
            lines.append(f"{entries} dropped on all ranks: rank {rank} {reason}")
        return lines


async def capture_in_lockstep(plan: CapturePlan, call_all: CallAll) -> CaptureOutcome:
    """Have all ranks record the same graphs, or none.

    Args:
        plan: what to record.
        call_all: raises when a rank raises, dies or misses the deadline.

    Raises:
        GeometryError: ranks disagree; names the field, the ranks and the values. Raised on every rank too.
        ExpertPoolError: what `call_all` raises; every rank that still answers raises it too.
    """
    try:
        plan, dropped = await _agree(plan, call_all)
        rehearsed = await _rehearse(plan, call_all)
        await call_all("begin")
        for entry in plan.entries:
            await call_all("warm_up", entry)
            recorded = await call_all("record", entry)
            _require_alike(f"recording of {entry}", recorded)
            _require_alike(f"recording of {entry} and its rehearsal", [rehearsed[entry], recorded[0]], _STAGES)
        _require_alike("capture mode after the last recording", await call_all("end"))
        _require_alike("graphs that are held", await call_all("commit", plan))
    except ExpertPoolError as error:
        await _fail_everywhere(call_all, str(error))
        raise
    return CaptureOutcome(plan, dropped)


async def _agree(plan: CapturePlan, call_all: CallAll) -> tuple[CapturePlan, tuple[DroppedEntry, ...]]:
    replies: list[AgreeReply] = await call_all("agree", plan)
    _require_alike("plan digest", [*(reply.plan_digest for reply in replies), plan.digest], _ranks(replies, "driver"))
    dropped: dict[CaptureEntry, DroppedEntry] = {}
    for reply in replies:
        for entry, reason in reply.refused:
            dropped.setdefault(entry, DroppedEntry(entry, reply.rank, reason))
    for drop in dropped.values():
        logger.warning("%s", drop)
    return plan.without(set(dropped)), tuple(dropped.values())


async def _rehearse(plan: CapturePlan, call_all: CallAll) -> dict[CaptureEntry, RecordedGeometry]:
    by_rank: list[tuple[RecordedGeometry, ...]] = await call_all("rehearse", plan)
    for index, entry in enumerate(plan.entries):
        _require_alike(f"rehearsal of {entry}", [records[index] for records in by_rank])
    return dict(zip(plan.entries, by_rank[0], strict=True))


async def _fail_everywhere(call_all: CallAll, message: str) -> None:
    """Every rank raises the error and holds no graphs; a rank that is gone cannot."""
    try:
        await call_all("fail", message)
    except ExpertPoolError as answer:
        logger.debug("ranks gave the capture up: %s", answer)


def _require_alike(what: str, values: list[Any], holders: tuple[str, ...] | None = None) -> None:
    names = holders or _ranks(values)
    found = differences(dict(zip(names, values, strict=True)))
    if found:
        listed = "; ".join(f"{what} {sentence}".replace("  ", " ") for sentence in found[:5])
        raise GeometryError(f"ranks disagree: {listed}")


def _ranks(values: list[Any], *others: str) -> tuple[str, ...]:
    return (*(f"rank {rank}" for rank in range(len(values))), *others)
