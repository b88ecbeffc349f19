"""How a pool stands, as its driver sees it."""

import asyncio
from typing import Any

import msgspec

from ...graphs.report import GraphReport
from ...workers.rank import RankPlace
from ...workers.rank_config import LoadReport
from ...workers.request import RankStats

_REPORTS_S = 5.0


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool as the driver sees it; graphs are of the ranks that answered in time, seconds of the last capture.

    Attributes:
        notice: the latest line about a recovery or another size; `None` where there was none.
        restarts: how often the ranks were started anew after a failure.
        last_failure: what the latest of those failures was.
        unfinished: requests that somebody waits for.
        driver_node: id of the node that the driver actor runs on.
        driver_pid: its process there.
        driver_restarts: how often Ray has started it anew; restarts of ranks are counted from the last time on.
    """

    state: str
    failure: str | None
    places: tuple[RankPlace, ...]
    loads: tuple[LoadReport, ...]
    stats: tuple[RankStats, ...]
    graphs: tuple[GraphReport, ...]
    capture_seconds: float
    notice: str | None
    restarts: int
    last_failure: str | None
    unfinished: int
    driver_node: str
    driver_pid: int
    driver_restarts: int


async def graph_reports(actors: list[Any]) -> tuple[GraphReport, ...]:
    """What ranks say of their graphs, by rank; of those that answer within seconds."""
    if not actors:
        return ()
    reports = {asyncio.ensure_future(actor.capture.remote("report")) for actor in actors}
    answered, _ = await asyncio.wait(reports, timeout=_REPORTS_S)
    graphs = [report.result() for report in answered if report.exception() is None]
    return tuple(sorted(graphs, key=lambda report: report.rank))
