"""Lockstep capture on plain ranks: the driver's half runs in the test, a rank's half in every rank, without Ray."""

import asyncio
from typing import Any

from expert_pool.cluster.ranks.capture import CaptureOutcome, capture_in_lockstep
from expert_pool.cluster.ranks.failure import describe_failure
from expert_pool.graphs.plan import plan_captures
from expert_pool.workers.engine import RankEngine
from plain_ranks import ForkedRanks
from rank_faults import Fault, inject, undo


class PlainCapture:
    """Captures on one set of ranks, as often as a test wants to.

    Attributes:
        told: what each rank raised when the driver gave the last capture up; empty where it did not.
    """

    def __init__(self, rank_set: ForkedRanks):
        self._rank_set = rank_set
        self.told: list[str] = []

    def run(self) -> CaptureOutcome:
        """
        Raises:
            ExpertPoolError: as a pool would; calls in which ranks wait for each other must not fail on some alone.
        """
        self.told = []
        return asyncio.run(capture_in_lockstep(plan_captures(self._rank_set.rank_config.limits), self._call_all))

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        answers = self._rank_set.call(_answer, method, args)
        failures = {rank: error for rank, (error, _) in enumerate(answers) if error is not None}
        if method == "fail":
            self.told = [str(error) for error in failures.values()]
        if failures:
            raise describe_failure(failures, f"during {method}")
        return [content for _, content in answers]


def _answer(engine: RankEngine, method: str, args: tuple[Any, ...]) -> tuple[Exception | None, Any]:
    try:
        return None, getattr(engine.graphs, method)(*args)
    except Exception as error:
        return error, None


def have_fault(engine: RankEngine, ranks: tuple[int, ...], fault: Fault, args: tuple[Any, ...]) -> None:
    if engine.rank in ranks:
        inject(engine, fault, *args)


def mend(engine: RankEngine, ranks: tuple[int, ...]) -> None:
    if engine.rank in ranks:
        undo(engine)
