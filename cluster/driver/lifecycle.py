"""A pool from one state to the next: its ranks are built, watched, begun anew after a failure, and given back.

What callers ask of the pool is in `cluster.driver.driver`; here is what goes on whether anybody asks or not.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
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
from .rebuild import Rebuild
from .recovery import Restarts
from .states import DriverState, Failed, Recovering, State, may_follow, name_of

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
        self._state: State = DriverState.CREATED
        self.notice: str | None = None
        self._metrics = PoolMetrics(pool_label())
        self.collector = Collector(self.ledger, self._metrics, self.hand_out, self._lose_results)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def state(self) -> DriverState:
        return name_of(self._state)

    @property
    def failure(self) -> ExpertPoolError | None:
        return self._state.error if isinstance(self._state, Failed) else None

    @property
    def rank_set(self) -> RankSet:
        return self.pool_ranks.rank_set

    def first_start(self) -> AsyncIterator[str]:
        """Place, start and load all ranks; see `rebuilding`.

        A rank whose process ends meanwhile is a failure that the pool recovers from; one that raises is not.
        """
        says = f"placing {self.pool_ranks.config.layout.world_size} ranks"
        return self.rebuilding(
            Rebuild(DriverState.PLACING, "start-up", self.pool_ranks.acquire, says=says, is_first=True)
        )

    async def begin_anew(self, cause: ExpertPoolError) -> None:
        """This process replaces one that ended: place, start and load ranks again. The state says so already."""
        if self.state is not DriverState.RECOVERING:
            return  # it was shut down meanwhile
        with contextlib.suppress(ExpertPoolError):  # it is what the pool has failed with
            await self.carry_out(
                Rebuild(Recovering(cause), "starting anew", self.pool_ranks.begin_anew, says=str(cause))
            )

    async def recover(self, error: ExpertPoolError) -> None:
        """The ranks have failed, and the state says so: begin again, or fail for good."""
        with contextlib.suppress(ExpertPoolError):  # it is what the pool has failed with
            await self.carry_out(await self._recovery(error))

    async def carry_out(self, rebuild: Rebuild) -> ExpertPoolError | None:
        """See `rebuilding`; lines are noted. Returns what went wrong first, if something did on the way."""
        setbacks: list[ExpertPoolError] = []
        async for line in self.rebuilding(rebuild, setbacks):
            self.note(line)
        return setbacks[0] if setbacks else None

    async def rebuilding(self, rebuild: Rebuild, setbacks: list[ExpertPoolError] | None = None) -> AsyncIterator[str]:
        """Have ranks run by this rebuild or, where it fails, by what `_after` says; yields a line about each stage.

        Args:
            rebuild: to begin with.
            setbacks: takes what each rebuild failed with that another one followed.

        Raises:
            ExpertPoolError: the pool has failed with it, or was shut down.
        """
        following: Rebuild | None = rebuild
        while following is not None:
            under_way, following = following, None
            try:
                self.enter(under_way.state)
                async for line in self._stages(under_way):
                    yield line
            except Exception as raised:
                error = raised if isinstance(raised, ExpertPoolError) else under_way.error_of(raised)
                following = await self._after(under_way, error, is_bug=error is not raised)
                if setbacks is not None:
                    setbacks.append(error)
            except BaseException as gone:  # by a shutdown, which fails no pool; or who waits for the first start left
                await self.fail(under_way.error_of(gone))
                raise

    async def _stages(self, rebuild: Rebuild) -> AsyncIterator[str]:
        if rebuild.says:
            yield rebuild.says
        if rebuild.ranks_leave:
            await self.leave_for_good()
        else:
            self.end_ranks()
        if rebuild.reserve is not None:
            await asyncio.to_thread(rebuild.reserve.release)
        await asyncio.sleep(rebuild.pause_s)
        async for facts in rebuild.places():
            yield facts
        async for line in self.build():
            yield line

    async def _after(self, rebuild: Rebuild, error: ExpertPoolError, is_bug: bool) -> Rebuild:
        """What follows a rebuild that failed. Another size is given up for the one before, whatever ended it: memory
        that is missing looks like any fault. Else the rules of recovery hold, and a bug ends the pool.

        Raises:
            ExpertPoolError: nothing follows: the pool has failed with this, or was shut down.
        """
        if self.state in _OVER:  # which ends every rebuild but the first start by itself
            raise RankError("the pool was shut down while it started")
        before = rebuild.size_before
        if before is not None and self.state is DriverState.RESIZING:
            begun = None if self.pool_ranks.config is before else self.pool_ranks.config
            if begun is not None or isinstance(error, PlacementError):
                return rebuild.back(functools.partial(self.pool_ranks.return_to, before), error, begun)
        if rebuild.given_up is not None and isinstance(error, PlacementError):
            # Others have the places that a smaller size gave back: what did not start is all that there may be.
            begun, why = rebuild.given_up
            self.note(f"{error}; looking for places for {begun.layout.world_size} ranks again")
            return await self._recovery(why, places=functools.partial(self.pool_ranks.return_to, begun))
        if not is_bug and (not rebuild.is_first or self.rank_set.has_lost_a_process):
            return await self._recovery(error, rebuild)
        await self.fail(error)
        raise self.failure or error

    async def _recovery(
        self,
        error: ExpertPoolError,
        failed: Rebuild | None = None,
        places: Callable[[], AsyncIterator[str]] | None = None,
    ) -> Rebuild:
        """What the rules of recovery have follow a failure.

        Args:
            error: the failure.
            failed: the rebuild that it ended, if it was one.
            places: where there are others than those that the pool had.

        Raises:
            ExpertPoolError: nothing follows: the pool has failed with this.
        """
        now_s = time.monotonic()
        try:
            if isinstance(error, PlacementError) and failed is not None and isinstance(failed.state, Recovering):
                raise self.restarts.given_up(error, now_s)
            restart = self.restarts.decide(error, now_s)
        except ExpertPoolError as final:
            await self.fail(final)
            raise
        self.collector.measure(self._metrics.restarted)
        says = self.restarts.announce(restart)
        return Rebuild(
            Recovering(error), "the recovery", places or self.pool_ranks.regain, says=says, pause_s=restart.delay_s
        )

    async def build(self) -> AsyncIterator[str]:
        """New ranks in the places there are, which go on with every unfinished request."""
        self.ledger.requeue(self._new_router())
        async for line in self.pool_ranks.start_ranks(self._begin_stage):
            yield line
        self.rank_set.begin_loops()
        self.spawn(self._watch(self.rank_set))
        self.enter(DriverState.READY)
        self.collector.begin(self.rank_set, self.pool_ranks.config)
        self.hand_out()
        yield self.pool_ranks.what_is_ready()

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

    def enter(self, state: State) -> None:
        """Every change of state is made here.

        Raises:
            ExpertPoolError: the pool cannot become that from what it is, since it failed or was stopped, say.
        """
        following = name_of(state)
        if not may_follow(self.state, following):
            raise self.failure or RankError(f"the pool is {self.state.value} and cannot become {following.value}")
        self._state = state
        if isinstance(state, Failed):
            logger.error("the pool failed: %s", state.error)

    def require(self, *states: DriverState) -> None:
        """
        Raises:
            ExpertPoolError: the pool is in none of these states.
        """
        if self.failure is not None:
            raise self.failure
        if self.state not in states:
            raise RankError(f"the pool is {self.state.value}, not ready")

    async def _watch(self, rank_set: RankSet) -> None:
        """End the ranks when a rank ends, for the others would wait for it in their next collective; then recover."""
        await rank_set.first_loop_end()
        if self.state is DriverState.READY and rank_set is self.rank_set:
            self.enter(Recovering(None))
            try:
                error = await rank_set.end_after_loop()
            except Exception as bug:
                error = RankError(f"a rank's loop ended, and why is unknown: {type(bug).__name__}: {bug}")
            await self.recover(error)

    def _lose_results(self, bug: Exception) -> None:
        """What the ranks report cannot be taken in: their callers would wait for ever, so other ranks start."""
        if self.state is DriverState.READY:
            error = RankError(f"results of the ranks could not be taken in: {type(bug).__name__}: {bug}")
            self.enter(Recovering(error))
            self.spawn(self.recover(error))

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
        self.enter(Failed(error))
        self.ledger.fail(error)
        await self._discard_ranks()

    async def _discard_ranks(self) -> None:
        self.end_ranks()
        await self.pool_ranks.release()
