"""The steps that ranks remember, brought to the driver with all their times on the driver's clock."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from ...workers.observing.trace import RankTrace
from ...workers.rank import RankPlace
from ..ranks.failure import answer_of

_PINGS = 8
_ANSWER_S = 30.0


async def collect_traces(actors: Sequence[Any], places: Sequence[RankPlace]) -> tuple[RankTrace, ...]:
    """What every rank remembers, in rank order, on this process's `time.perf_counter`.

    That clock is one for all processes of a node. For ranks on other nodes its offset is measured over the network, and
    is right to within half the fastest answer's time.

    Raises:
        RankError: a rank died, or did not answer for half a minute; names it.
    """
    here = ray.get_runtime_context().get_node_id()
    known = tuple(places)
    traces = await asyncio.gather(
        *(
            answer_of(rank, actor.trace.remote(), "while handing out its trace", _ANSWER_S, known)
            for rank, actor in enumerate(actors)
        )
    )
    moved = []
    for rank, (actor, place, trace) in enumerate(zip(actors, places, traces, strict=True)):
        offset = 0.0
        if place.node_id != here:
            offset = offset_of(await answer_of(rank, ping(actor), "while its clock was read", _ANSWER_S, known))
        moved.append(shifted(trace, offset))
    return tuple(moved)


async def ping(actor: Any) -> list[tuple[float, float, float]]:
    """Read a rank's clock a few times: this clock before, the rank's, this clock after."""
    readings = []
    for _ in range(_PINGS):
        before = time.perf_counter()
        read = await actor.clock.remote()
        readings.append((before, read, time.perf_counter()))
    return readings


def offset_of(readings: Sequence[tuple[float, float, float]]) -> float:
    """Seconds to add to a rank's times, from the fastest answer, which took half its time each way."""
    before, read, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) / 2 - read


def shifted(trace: RankTrace, offset_s: float) -> RankTrace:
    """The same events, that many seconds later."""
    events = [
        msgspec.structs.replace(event, began=event.began + offset_s, ended=event.ended + offset_s)
        for event in trace.events
    ]
    return msgspec.structs.replace(trace, events=tuple(events))
