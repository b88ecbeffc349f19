"""The driver actor: owns the placement and the ranks, hands requests out and results back. Never part of a step."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping

import ray

from ...dispatch.errors import ConfigError, ExpertPoolError, RankError
from ...dispatch.registry import load_plugins
from ...workers.observing.logs import configure_logs
from ...workers.observing.trace import RankTrace
from ...workers.rank import end_with_parent
from ...workers.rank_config import RankConfig
from ..arguments import number_of_ranks
from ..config import PoolConfig
from ..observing.metrics import pool_label
from ..observing.trace_clock import collect_traces
from ..ranks.rank_set import RankSet
from ..ray_session.ray_internals import num_restarts_of_this_actor
from ..requests.ledger import PoolEvent, Prompt
from .caller_links import CallerLink, CallerLinks, end_unless_started
from .lifecycle import Lifecycle
from .moves import RankMoves
from .pool_status import PoolStatus, graph_reports
from .same_code import own_code, require_same_code
from .states import DriverState, Recovering

logger = logging.getLogger(__name__)

_ACCEPTING = (DriverState.READY, DriverState.RECOVERING, DriverState.RESIZING)
# Ray repeats the owner's call as soon as it knows that the actor is there again.
_OWNER_S = 30.0
_END_S = 30.0
_TOLD_S, _LOOK_S = 2.0, 0.02


class Driver:
    """One pool. An asyncio actor: calls interleave, and none blocks another.

    Args:
        config: what every rank is built from at first.
        pool: what the user wrote: bounds of sizes, places, recovery.
        environment: variables that every rank gets; see `cluster.ranks.environment`.
        has_owner: whether the pool ends with a process, which then calls `belong_to`.
        launchers_code: `own_code` of the process that made the arguments before.
    """

    def __init__(
        self,
        config: RankConfig,
        pool: PoolConfig,
        environment: Mapping[str, str],
        has_owner: bool,
        launchers_code: str,
    ):
        configure_logs(pool_label(), "driver", lambda: None, config.worker.log_level)
        end_with_parent()
        self._life = Lifecycle(config, pool, environment)
        self._pool = pool
        self._code, self._launchers_code = own_code(), launchers_code
        self._moves = RankMoves(self._life, pool)
        self._links = CallerLinks()
        self._has_owner = has_owner
        self._owned = asyncio.Event()
        self._is_over = asyncio.Event()
        self._num_streams = 0
        self._restarts = num_restarts_of_this_actor()
        if self._restarts:
            self._life.enter(Recovering(None))
            # Ray runs the constructor of an asyncio actor in its loop.
            self._beginning = asyncio.ensure_future(self._begin_anew())
        end_unless_started(lambda: self._life.state is not DriverState.CREATED)

    @property
    def _rank_set(self) -> RankSet:
        return self._life.rank_set

    async def hold(self, key: str) -> None:
        """See `CallerLinks.hold`."""
        await self._links.hold(key)

    async def belong_to(self, owner: CallerLink) -> None:
        """The pool ends with the process of the owner. Returns when it was shut down: Ray calls it again in a driver
        that is begun anew, and says so to the owner where the actor is gone for good meanwhile."""
        self._links.when_gone(owner, self._end)
        self._owned.set()
        await self._is_over.wait()
        self._links.drop(owner)

    async def _begin_anew(self) -> None:
        """Ray has started this actor again: the ranks have ended with the process before, and so have requests."""
        try:
            require_same_code(self._launchers_code, self._code)
        except ConfigError as error:
            await self._life.fail(error)
            return
        if self._has_owner:
            try:
                await asyncio.wait_for(self._owned.wait(), _OWNER_S)
            except TimeoutError:
                await self._end()
                return
        why = (
            f"the driver actor ended and was started anew ({self._restarts} of {self._pool.recovery.max_restarts}); "
            "the requests that it had are lost"
        )
        self._life.spawn(self._life.begin_anew(RankError(why)))
        self._life.spawn(self._moves.watch_nodes())

    async def code(self) -> str:
        """For those who send requests; see `cluster.driver.same_code`."""
        return self._code

    async def rank_config(self) -> RankConfig:
        """What the present ranks are built from, for those who connect."""
        return self._life.pool_ranks.config

    async def start(self) -> AsyncIterator[str]:
        """Place, start and load all ranks; yields a line about each stage. See `Lifecycle.first_start`.

        Raises:
            ConfigError: the launching process runs other code, or a plugin cannot be imported here.
            PlacementError: no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        require_same_code(self._launchers_code, self._code)
        load_plugins(self._pool.plugins)
        with self._stream_under_way():
            async for line in self._life.first_start():
                logger.info("%s", line)
                yield line
            self._life.spawn(self._moves.watch_nodes())

    async def generate(self, prompts: list[Prompt], caller: CallerLink) -> AsyncIterator[PoolEvent]:
        """Run the prompts; yields events as requests finish, and at least every second while ranks are busy.

        While the pool recovers or changes its size, requests wait and then go on from the tokens they have.

        Args:
            prompts: to complete.
            caller: when its process is gone, what is left of them is dropped.

        Raises:
            RankError: the pool failed for good; requests that had finished were yielded before.
        """
        try:
            self._life.require(*_ACCEPTING)
        except ExpertPoolError:
            self._links.drop(caller)
            raise
        stream = self._life.ledger.open(prompts)
        gone = RankError("the caller is gone")
        self._links.when_gone(caller, lambda: stream.events.put_nowait(gone), or_cut_off=True)
        left = len(prompts)
        with self._stream_under_way():
            try:
                self._life.hand_out()
                while left:
                    event = await stream.events.get()
                    if isinstance(event, ExpertPoolError):
                        raise event
                    left -= len(event.finished)
                    yield event
            finally:
                self._links.drop(caller)
                self._life.abort(self._life.ledger.close(stream))

    async def resize(self, ranks: int) -> RankConfig:
        """Go on with another number of ranks; returns what they are built from.

        More places are waited for while the pool serves. Then ranks leave their loop at a step boundary, new ones
        share the experts out anew and record their graphs, and unfinished requests go on from their tokens.

        Raises:
            ConfigError: a size that cannot work; nothing was changed.
            CheckpointError: ranks would read other weights than those there are; nothing was changed.
            PlacementError: no place for so many; the pool goes on as before.
            RankError: ranks were lost on the way, or did not come up at the new size; the pool goes on with the size it
                has then, or has failed.
        """
        return await self._moves.resize(number_of_ranks(ranks))

    async def status(self) -> PoolStatus:
        """How the pool stands, whatever its state."""
        life, pool_ranks = self._life, self._life.pool_ranks
        graphs = await graph_reports(life.rank_set.actors) if life.state is DriverState.READY else ()
        return PoolStatus(
            state=life.state.value,
            failure=str(life.failure) if life.failure else None,
            places=life.rank_set.places,
            loads=pool_ranks.loads,
            stats=tuple(stats for _, stats in sorted(life.collector.stats.items())),
            graphs=graphs,
            capture_seconds=pool_ranks.capture_seconds,
            notice=life.notice,
            restarts=life.restarts.total,
            last_failure=life.restarts.last.cause if life.restarts.last else None,
            unfinished=life.ledger.num_unfinished,
            driver_node=ray.get_runtime_context().get_node_id(),
            driver_pid=os.getpid(),
            driver_restarts=self._restarts,
        )

    async def trace(self) -> tuple[RankTrace, ...]:
        """The steps that ranks remember, on one clock; see `cluster.observing.trace_clock`."""
        self._life.require(DriverState.READY)
        return await collect_traces(tuple(self._life.rank_set.actors), self._life.rank_set.places)

    async def shutdown(self) -> None:
        """Stop all ranks together and give their places back; requests under way end with an error."""
        await self._life.stop()
        self._is_over.set()
        await self._life.pool_ranks.forget_weights()
        # Whoever asked ends this actor next, and those who wait at a stream would hear of a dead actor alone.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._streams_ended(), _TOLD_S)

    @contextlib.contextmanager
    def _stream_under_way(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def _streams_ended(self) -> None:
        while self._num_streams:
            await asyncio.sleep(_LOOK_S)

    async def _end(self) -> None:
        """The process that the pool belongs to is gone: give everything back and end this actor."""
        logger.warning("the process that launched the pool is gone: the pool ends")
        try:
            await asyncio.wait_for(self.shutdown(), _END_S)
        finally:  # Ray ends ranks and gives places back with this actor, if it comes to that
            ray.kill(ray.get_runtime_context().current_actor)
