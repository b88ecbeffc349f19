"""A pool from one state to the next: its ranks are built, watched, begun anew after a failure, and given back.

What callers ask of the pool is in `cluster.driver.driver`; here is what goes on whether anybody asks or not.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from ...dispatch.errors import ExpertPoolError, PlacementError, RankError
from ...workers.mailbox import Intake
from ...workers.rank_config import RankConfig
from ..config import PoolConfig
from ..observing.metrics import PoolMetrics, pool_label
from ..ranks.pool_ranks import PoolRanks
from ..ranks.rank_set import RankSet
from ..requests.collecting import Collector
from ..requests.ledger import Ledger
from ..requests.router import Router
from .recovery import Restarts
from .states import DriverState, may_follow

logger = logging.getLogger(__name__)

_REBUILDING = (DriverState.RECOVERING, DriverState.RESIZING)
_OVER = (DriverState.STOPPING, DriverState.STOPPED)
_STOP_S = 10.0


class Lifecycle:
    """The state of one pool and the ways between states. Lives in the loop of its driver.

    Args:
        config: what every rank is built from at first.
        pool: what the user wrote: bounds of sizes, places, recovery.
        environment: variables that every rank gets; see `cluster.ranks.environment`.

    Attributes:
        pool_ranks: the ranks and their places.
        ledger: unfinished requests.
        restarts: how often ranks were started anew after a failure.
        state: where the pool stands.
        failure: what ended it, if something did.
        notice: the latest line about a recovery or another size.
        collector: brings results home.
    """

    def __init__(self, config: RankConfig, pool: PoolConfig, environment: Mapping[str, str]):
        self.pool_ranks = PoolRanks(config, pool, environment)
        self.ledger = Ledger(self._new_router())
        self.restarts = Restarts(pool.recovery)
        self.state = DriverState.CREATED
        self.failure: ExpertPoolError | None = None
        self.notice: str | None = None
        self._metrics = PoolMetrics(pool_label())
        self.collector = Collector(self.ledger, self._metrics, self.hand_out, self._lose_results)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def rank_set(self) -> RankSet:
        return self.pool_ranks.rank_set

    async def first_start(self) -> AsyncIterator[str]:
        """Place, start and load all ranks; yields a line about each stage.

        A rank whose process ends meanwhile is a failure that the pool recovers from; one that raises is not.

        Raises:
            PlacementError: no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        try:
            self.enter(DriverState.PLACING)
            yield f"placing {self.pool_ranks.config.layout.world_size} ranks"
            async for facts in self.pool_ranks.acquire():
                yield facts
            try:
                async for line in self.build():
                    yield line
            except RankError as error:
                if not self.rank_set.has_lost_a_process:
                    raise
                self.enter(DriverState.RECOVERING)
                async for line in self._rebuild_after(error):
                    yield line
        except BaseException as error:
            if isinstance(error, Exception) and self.state in _OVER:
                raise RankError("the pool was shut down while it started") from None
            await self.fail(error if isinstance(error, ExpertPoolError) else RankError(f"start-up failed: {error}"))
            raise (self.failure or error) from None

    def begin_anew(self, why: str) -> None:
        """This process replaces one that ended: place, start and load ranks again. The state says so already."""
        if self.state is not DriverState.RECOVERING:
            return  # it was shut down meanwhile
        self.note(why)
        self.spawn(self._begin_anew(RankError(why)))

    async def build(self) -> AsyncIterator[str]:
        """New ranks in the places there are, which go on with every unfinished request."""
        self.ledger.requeue(self._new_router())
        async for line in self.pool_ranks.start_ranks(self._begin_stage):
            yield line
        self.begin_running()
        self.enter(DriverState.READY)
        self.collector.begin(self.rank_set, self.pool_ranks.config)
        self.hand_out()
        yield self.pool_ranks.what_is_ready()

    def begin_running(self) -> None:
        """Ranks run their loops, and are watched."""
        self.rank_set.begin_loops()
        self.spawn(self._watch(self.rank_set))

    async def recover(self, error: ExpertPoolError) -> None:
        """The ranks have failed, and the state says so: begin again, or fail for good."""
        try:
            async for line in self._rebuild_after(error):
                self.note(line)
        except ExpertPoolError as final:
            await self.fail(final)
        except Exception as bug:
            await self.fail(RankError(f"the recovery failed: {type(bug).__name__}: {bug}; it followed: {error}"))

    async def leave_for_good(self) -> None:
        """All ranks leave their loops at one step boundary, say all that they have to say, and end.

        Raises:
            ExpertPoolError: a rank failed instead.
        """
        self.rank_set.deliver({}, leave=True)
        await self.rank_set.loops_left()
        await self.rank_set.close_outboxes(_STOP_S)
        await self.collector.last_results(_STOP_S)
        self.end_ranks()

    async def stop(self) -> None:
        """Stop all ranks together and give their places back; requests under way end with an error.

        Whoever asks while that is under way waits for it too.
        """
        if self._stopping is None:
            if not may_follow(self.state, DriverState.STOPPING):
                return
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        running = self.state is DriverState.READY
        self.enter(DriverState.STOPPING)
        if running:
            self.rank_set.deliver({}, leave=True)
            with contextlib.suppress(ExpertPoolError):
                await self.rank_set.loops_left(_STOP_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.ledger.fail(RankError("the pool was shut down"))
        await self._discard_ranks()
        self.enter(DriverState.STOPPED)

    def hand_out(self) -> None:
        """Requests that may go to ranks go there, if ranks run."""
        if self.state is not DriverState.READY:
            return
        assigned = self.ledger.assign()
        if assigned:
            self.rank_set.deliver({dp_rank: Intake(requests=tuple(requests)) for dp_rank, requests in assigned.items()})

    def abort(self, keys: Mapping[int, list[int]]) -> None:
        """Nobody waits for these requests of each DP rank any more."""
        if keys and self.state is DriverState.READY:
            self.rank_set.deliver({dp_rank: Intake(aborts=tuple(some)) for dp_rank, some in keys.items()})
            self.hand_out()

    def end_ranks(self) -> None:
        """End the processes of all ranks, and take nothing in from them."""
        self.collector.stop()
        self.rank_set.kill()

    def note(self, line: str) -> None:
        """What happens to a pool that serves: in the log, in `status`, and for everyone who waits."""
        logger.warning("%s", line)
        self.notice = line
        self.ledger.tell(line)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that goes on whoever waits for it, until the pool is shut down."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def enter(self, state: DriverState) -> None:
        """
        Raises:
            ExpertPoolError: the pool cannot become that from what it is, since it failed or was stopped, say.
        """
        if not may_follow(self.state, state):
            raise self.failure or RankError(f"the pool is {self.state.value} and cannot become {state.value}")
        self.state = state

    def require(self, *states: DriverState) -> None:
        """
        Raises:
            ExpertPoolError: the pool is in none of these states.
        """
        if self.failure is not None:
            raise self.failure
        if self.state not in states:
            raise RankError(f"the pool is {self.state.value}, not ready")

    async def _begin_anew(self, cause: ExpertPoolError) -> None:
        try:
            await self.pool_ranks.forget_places()
            async for facts in self.pool_ranks.place_anew():
                self.note(facts)
            async for line in self.build():
                self.note(line)
        except RankError as error:
            await self.recover(error)
        except ExpertPoolError as error:
            await self.fail(error)
        except Exception as bug:
            await self.fail(RankError(f"starting anew failed: {type(bug).__name__}: {bug}; it followed: {cause}"))

    async def _watch(self, rank_set: RankSet) -> None:
        """End the ranks when a rank ends, for the others would wait for it in their next collective; then recover."""
        await rank_set.first_loop_end()
        if self.state is DriverState.READY and rank_set is self.rank_set:
            self.enter(DriverState.RECOVERING)
            try:
                error = await rank_set.end_after_loop()
            except Exception as bug:
                error = RankError(f"a rank's loop ended, and why is unknown: {type(bug).__name__}: {bug}")
            await self.recover(error)

    def _lose_results(self, bug: Exception) -> None:
        """What the ranks report cannot be taken in: their callers would wait for ever, so other ranks start."""
        if self.state is DriverState.READY:
            self.enter(DriverState.RECOVERING)
            what = f"results of the ranks could not be taken in: {type(bug).__name__}: {bug}"
            self.spawn(self.recover(RankError(what)))

    async def _rebuild_after(self, error: ExpertPoolError) -> AsyncIterator[str]:
        """Start new ranks until they run, as often as `recovery` allows.

        Raises:
            ExpertPoolError: the last failure, with those before.
        """
        while True:
            restart = self.restarts.decide(error, time.monotonic())
            self.collector.measure(self._metrics.restarted)
            yield self.restarts.announce(restart)
            self.end_ranks()
            await asyncio.sleep(restart.delay_s)
            try:
                async for line in self.pool_ranks.regain():
                    yield line
            except PlacementError as nowhere:
                raise self.restarts.given_up(nowhere, time.monotonic()) from None
            try:
                async for line in self.build():
                    yield line
                return
            except ExpertPoolError as again:
                error = again

    def _new_router(self) -> Router:
        config = self.pool_ranks.config
        return Router(config.layout.dp_size, window=2 * config.limits.max_running_requests)

    def _begin_stage(self, state: DriverState) -> None:
        """A stage of the first start is a state of its own; a pool that recovers or is resized is that throughout."""
        if self.state not in _REBUILDING:
            self.enter(state)

    async def fail(self, error: ExpertPoolError) -> None:
        """The pool ends with this error: for those who wait, those who come, and in `status`."""
        if not may_follow(self.state, DriverState.FAILED):
            return
        logger.error("the pool failed: %s", error)
        self.failure = error
        self.enter(DriverState.FAILED)
        self.ledger.fail(error)
        await self._discard_ranks()

    async def _discard_ranks(self) -> None:
        self.end_ranks()
        await self.pool_ranks.release()
