"""What comes back from the ranks that lead a batch: completions and tokens into the ledger, counters into metrics."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ...workers.rank_config import RankConfig
from ...workers.request import RankStats
from ..observing.metrics import LOAD_INTERVAL_S, PoolMetrics
from ..ranks.failure import LOST
from ..ranks.rank_set import RankSet
from .ledger import Ledger

logger = logging.getLogger(__name__)


class Collector:
    """Brings the results of ranks home, one set of them after another.

    Args:
        ledger: takes results in.
        metrics: of the pool.
        then: runs when requests have finished, so that there is room for others.
        broke: is told what kept results from being taken in, other than the end of a rank.

    Attributes:
        stats: the latest counters by DP rank.
    """

    def __init__(
        self,
        ledger: Ledger,
        metrics: PoolMetrics,
        then: Callable[[], None],
        broke: Callable[[Exception], None],
    ):
        self.stats: dict[int, RankStats] = {}
        self._ledger = ledger
        self._metrics = metrics
        self._then = then
        self._broke = broke
        self._results: list[asyncio.Task[None]] = []
        self._loads: list[asyncio.Task[None]] = []

    def begin(self, rank_set: RankSet, config: RankConfig) -> None:
        """Collect from the leaders of these ranks, which run."""
        layout = config.layout
        self.measure(self._metrics.begin, layout)
        leaders = [rank_set.actors[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
        self._results = [asyncio.ensure_future(self._collect(leader)) for leader in leaders]
        if config.worker.expert_load:
            self._loads = [asyncio.ensure_future(self._collect_expert_load(leaders))]

    async def last_results(self, timeout_s: float) -> None:
        """Wait until every leader has said that its report was the last."""
        await asyncio.wait(self._results, timeout=timeout_s)

    def stop(self) -> None:
        """Take nothing in any more."""
        for task in (*self._results, *self._loads):
            task.cancel()
        self._results, self._loads = [], []
        self.stats.clear()

    def measure(self, report: Callable[..., None], *values: Any) -> None:
        """Metrics that cannot be set keep nobody from an answer."""
        try:
            report(*values)
        except Exception:
            logger.exception("metrics could not be set")

    async def _collect(self, leader: Any) -> None:
        """Bring the results of one DP rank to the streams that wait for them."""
        try:
            await self._bring(leader)
        except Exception as error:
            logger.exception("results could not be taken in")
            self._broke(error)

    async def _bring(self, leader: Any) -> None:
        while True:
            try:
                output = await leader.next_output.remote()
            except LOST:
                return
            self.stats[output.stats.dp_rank] = output.stats
            self.measure(self._metrics.report, output.stats, output.is_last)
            self._ledger.settle(output)
            if output.is_last:
                return
            if output.completions:
                self._then()

    async def _collect_expert_load(self, leaders: list[Any]) -> None:
        """Counters are for metrics alone: what goes wrong with them is logged, and tried again next time."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            try:
                counts = await asyncio.gather(*(leader.expert_counts.remote() for leader in leaders))
            except LOST:
                return
            except Exception:
                logger.exception("expert load is unknown this time")
                continue
            self.measure(self._metrics.report_expert_load, counts)
