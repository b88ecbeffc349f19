"""The stage between placing and loading on GPUs: compile the kernels that are not in each node's cache yet.

FlashInfer and humming compile their kernels on first use, which takes a minute or two, and keep them. One rank a node
compiles, all of what is missing there at once; the others find it in the cache when they load. Knows no Ray: it is
handed a way to call a rank.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...dispatch.errors import RankError
from ...workers.rank import RankPlace
from ...workers.rank_config import KernelStatus
from .failure import describe_failure

REPORT_INTERVAL_S = 10.0

CallOne = Callable[[int, str], Awaitable[Any]]
"""`await call(rank, method)`: the method of the rank actor of that number."""


def builders(
    statuses: list[tuple[KernelStatus, ...]], places: tuple[RankPlace, ...]
) -> dict[int, tuple[KernelStatus, ...]]:
    """The lowest rank of each node that lacks a kernel, and what is missing there.

    Args:
        statuses: what each rank needs, in rank order.
        places: where each rank runs.
    """
    chosen: dict[int, tuple[KernelStatus, ...]] = {}
    nodes: set[str] = set()
    for place in sorted(places, key=lambda place: place.rank):
        missing = tuple(status for status in statuses[place.rank] if not status.is_built)
        if missing and place.node_id not in nodes:
            nodes.add(place.node_id)
            chosen[place.rank] = missing
    return chosen


async def prepare_kernels(
    statuses: list[tuple[KernelStatus, ...]],
    places: tuple[RankPlace, ...],
    call: CallOne,
    timeout_s: float,
    interval_s: float = REPORT_INTERVAL_S,
) -> AsyncIterator[str]:
    """Compile what is missing, one rank a node; yields what is done, and every few seconds for how long.

    Args:
        statuses: what each rank needs, in rank order.
        places: where each rank runs.
        call: calls one rank.
        timeout_s: for the slowest node.
        interval_s: between lines.

    Raises:
        KernelError: a kernel did not compile; ends with the compiler's last lines.
        RankError: a rank died, or the deadline passed.
    """
    chosen = builders(statuses, places)
    if not chosen:
        return
    missing = {status.name: status for lacking in chosen.values() for status in lacking}
    labels = ", ".join(sorted({status.label for status in missing.values()}))
    folders = ", ".join(sorted({status.cached_in for status in missing.values()}))
    yield f"compiling {len(missing)} kernel modules on first use ({labels}), one rank a node; cached in {folders}"
    started = time.monotonic()
    calls = {rank: asyncio.ensure_future(call(rank, "build_kernels")) for rank in chosen}
    try:
        while pending := [rank for rank, one in calls.items() if not one.done()]:
            left = started + timeout_s - time.monotonic()
            if left <= 0:
                raise RankError(
                    f"ranks {pending} did not compile their kernels within placement.start_timeout_s={timeout_s:g}"
                )
            await asyncio.wait(
                [calls[rank] for rank in pending],
                timeout=min(interval_s, left),
                return_when=asyncio.FIRST_EXCEPTION,
            )
            failures = {rank: error for rank, one in calls.items() if one.done() and (error := one.exception())}
            if failures:
                raise describe_failure(failures, "while compiling kernels", places)
            elapsed = time.monotonic() - started
            if compiling := [f"rank {rank}" for rank, one in calls.items() if not one.done()]:
                yield f"compiling kernels on {', '.join(compiling)}: {elapsed:.0f} s"
    finally:
        for one in calls.values():
            one.cancel()
    yield f"compiled kernels in {time.monotonic() - started:.0f} s"
