"""The driver actor: owns the placement and the ranks, hands requests out and results back. Never part of a step."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError

from ..dispatch.errors import ExpertPoolError, PlacementError, RankError
from ..graphs.report import GraphReport
from ..workers.logs import configure_logs
from ..workers.mailbox import Intake
from ..workers.rank import RankPlace
from ..workers.rank_config import LoadReport, RankConfig
from ..workers.request import RankStats
from ..workers.trace import RankTrace
from .capture import CaptureOutcome
from .config import PoolConfig
from .driver_state import DriverState, may_follow
from .fleet import Fleet
from .gang import Gang
from .ledger import Ledger, PoolEvent, Prompt
from .lifeline import Lifeline, Lifelines, end_unless_started
from .metrics import LOAD_INTERVAL_S, PoolMetrics, pool_label
from .recovery import Restarts
from .resizing import resized
from .router import Router
from .trace_clock import collect_traces

logger = logging.getLogger(__name__)

_ACCEPTING = (DriverState.READY, DriverState.RECOVERING, DriverState.RESIZING)
_DELIVERING = (DriverState.READY, DriverState.CAPTURING)
_REBUILDING = (DriverState.RECOVERING, DriverState.RESIZING)
_STOP_S = 10.0
_STATUS_S = 5.0


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool as the driver sees it; graphs are of the ranks that answered in time, seconds of the last capture.

    Attributes:
        notice: the latest line about a recovery or another size; `None` where there was none.
        restarts: how often the ranks were started anew after a failure.
        last_failure: what the latest of those failures was.
        unfinished: requests that somebody waits for.
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


class Driver:
    """One pool. An asyncio actor: calls interleave, and none blocks another.

    Args:
        config: what every rank is built from at first.
        pool: what the user wrote: bounds of sizes, places, recovery.
        environment: variables that every rank gets; see `cluster.environment`.
    """

    def __init__(self, config: RankConfig, pool: PoolConfig, environment: Mapping[str, str]):
        self._fleet = Fleet(config, pool, environment)
        self._pool = pool
        self._state = DriverState.CREATED
        self._failure: ExpertPoolError | None = None
        self._notice: str | None = None
        self._ledger = Ledger(self._new_router())
        self._restarts = Restarts(pool.recovery)
        self._stats: dict[int, RankStats] = {}
        self._is_resizing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._collectors: list[asyncio.Task[None]] = []
        self._metrics = PoolMetrics(pool_label())
        configure_logs(pool_label(), "driver", lambda: None, config.worker.log_level)
        self._lifelines = Lifelines()
        end_unless_started(lambda: self._state is not DriverState.CREATED)

    @property
    def _gang(self) -> Gang:
        return self._fleet.gang

    async def hold(self, key: str) -> None:
        """See `Lifelines.hold`."""
        await self._lifelines.hold(key)

    async def rank_config(self) -> RankConfig:
        """What the present ranks are built from, for those who connect."""
        return self._fleet.config

    async def start(self, owner: Lifeline | None = None) -> AsyncIterator[str]:
        """Place, start and load all ranks; yields a line about each stage.

        A rank whose process ends meanwhile is a failure that the pool recovers from; one that raises is not.

        Args:
            owner: with whose process the pool ends; `None`: it stays until it is shut down.

        Raises:
            PlacementError: no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        if owner is not None:
            self._lifelines.when_gone(owner, self._end)
        try:
            self._enter(DriverState.PLACING)
            yield f"placing {self._fleet.config.layout.world_size} ranks"
            async for facts in self._fleet.acquire():
                yield facts
            try:
                async for line in self._build():
                    yield line
            except RankError as error:
                if not self._gang.has_lost_a_process:
                    raise
                self._enter(DriverState.RECOVERING)
                async for line in self._rebuild_after(error):
                    yield line
        except BaseException as error:
            await self._fail(error if isinstance(error, ExpertPoolError) else RankError(f"start-up failed: {error}"))
            raise (self._failure or error) from None

    async def generate(self, prompts: list[Prompt], caller: Lifeline) -> AsyncIterator[PoolEvent]:
        """Run the prompts; yields events as requests finish, and at least every second while ranks are busy.

        While the pool recovers or changes its size, requests wait and then go on from the tokens they have.

        Args:
            prompts: to complete.
            caller: when its process is gone, what is left of them is dropped.

        Raises:
            RankError: the pool failed for good; requests that had finished were yielded before.
        """
        try:
            self._require(_ACCEPTING)
        except ExpertPoolError:
            self._lifelines.drop(caller)
            raise
        stream = self._ledger.open(prompts)
        self._lifelines.when_gone(caller, lambda: stream.events.put_nowait(RankError("the caller is gone")))
        left = len(prompts)
        try:
            self._hand_out()
            while left:
                event = await stream.events.get()
                if isinstance(event, ExpertPoolError):
                    raise event
                left -= len(event.finished)
                yield event
        finally:
            self._lifelines.drop(caller)
            aborts = self._ledger.close(stream)
            if aborts and self._state is DriverState.READY:
                self._gang.deliver({dp_rank: Intake(aborts=tuple(keys)) for dp_rank, keys in aborts.items()})
                self._hand_out()

    async def recapture(self) -> CaptureOutcome:
        """Have all ranks leave the loop at a step boundary, record all graphs anew, and go on.

        Where the capture fails without harm to the ranks, the pool goes on without graphs.

        Raises:
            GeometryError: ranks disagree about a graph.
            RankError: a rank was lost; the pool has recovered, or has failed.
        """
        self._require((DriverState.READY,))
        self._enter(DriverState.CAPTURING)
        try:
            await asyncio.gather(*self._gang.deliver({}, leave=True))
            await self._gang.loops_left()
            await self._fleet.capture()
            return self._fleet.graphs
        except ExpertPoolError as error:
            if self._gang.is_broken:
                self._enter(DriverState.RECOVERING)
                await asyncio.shield(self._spawn(self._recover(error)))
            raise
        finally:
            if self._state is DriverState.CAPTURING:
                self._begin_running()
                self._enter(DriverState.READY)

    async def resize(self, ranks: int) -> RankConfig:
        """Go on with another number of ranks; returns what they are built from.

        More places are waited for while the pool serves. Then ranks leave their loop at a step boundary, new ones
        share the experts out anew and record their graphs, and unfinished requests go on from their tokens.

        Raises:
            ConfigError: a size that cannot work; nothing was changed.
            PlacementError: no place for so many; the pool goes on as before.
            RankError: ranks were lost on the way; the pool goes on with the size it has then, or has failed.
        """
        self._require((DriverState.READY,))
        if self._is_resizing:
            raise RankError("the pool is being resized already: wait for that call")
        self._is_resizing = True
        work = self._spawn(self._resize(ranks))
        work.add_done_callback(lambda _: setattr(self, "_is_resizing", False))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise RankError("the pool was shut down while it was being resized") from None
            raise

    async def status(self) -> PoolStatus:
        graphs: list[GraphReport] = []
        if self._state is DriverState.READY:
            reports = {asyncio.ensure_future(_await(actor.capture.remote("report"))) for actor in self._gang.actors}
            answered, _ = await asyncio.wait(reports, timeout=_STATUS_S)
            graphs = [report.result() for report in answered if report.exception() is None]
            graphs.sort(key=lambda report: report.rank)
        return PoolStatus(
            state=self._state.value,
            failure=str(self._failure) if self._failure else None,
            places=self._gang.places,
            loads=self._fleet.loads,
            stats=tuple(stats for _, stats in sorted(self._stats.items())),
            graphs=tuple(graphs),
            capture_seconds=self._fleet.capture_seconds,
            notice=self._notice,
            restarts=self._restarts.total,
            last_failure=self._restarts.last.cause if self._restarts.last else None,
            unfinished=self._ledger.num_unfinished,
        )

    async def trace(self) -> tuple[RankTrace, ...]:
        """The steps that ranks remember, on one clock; see `cluster.trace_clock`."""
        self._require((DriverState.READY,))
        return await collect_traces(self._gang.actors, self._gang.places)

    async def shutdown(self) -> None:
        """Stop all ranks together and give their places back; requests under way end with an error."""
        if not may_follow(self._state, DriverState.STOPPING):
            return
        running = self._state is DriverState.READY
        self._enter(DriverState.STOPPING)
        if running:
            self._gang.deliver({}, leave=True)
            with contextlib.suppress(ExpertPoolError):
                await self._gang.loops_left(_STOP_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ledger.fail(RankError("the pool was shut down"))
        await self._discard_ranks()
        self._enter(DriverState.STOPPED)

    async def _end(self) -> None:
        """The process that the pool belongs to is gone: give everything back and end this actor."""
        logger.warning("the process that launched the pool is gone: the pool ends")
        await self.shutdown()
        ray.kill(ray.get_runtime_context().current_actor)

    async def _build(self) -> AsyncIterator[str]:
        """New ranks in the places there are, which go on with every unfinished request."""
        self._ledger.begin_anew(self._new_router())
        async for line in self._fleet.build(self._begin_stage):
            yield line
        self._begin_running()
        self._enter(DriverState.READY)
        self._begin_collecting()
        self._hand_out()
        yield self._fleet.what_is_ready()

    def _begin_running(self) -> None:
        self._gang.begin_loops()
        self._spawn(self._watch(self._gang))

    def _begin_collecting(self) -> None:
        layout = self._fleet.config.layout
        self._metrics.begin(layout)
        leaders = [self._gang.actors[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
        self._collectors = [asyncio.ensure_future(self._collect(leader)) for leader in leaders]
        if self._fleet.config.worker.expert_load:
            self._spawn(self._collect_expert_load(leaders))

    async def _watch(self, gang: Gang) -> None:
        """End the gang when a rank ends, for the others would wait for it in their next collective; then recover."""
        await gang.first_loop_end()
        if self._state is DriverState.READY:
            self._enter(DriverState.RECOVERING)
            await self._recover(await gang.end_after_loop())

    async def _collect(self, leader: Any) -> None:
        """Bring the results of one DP rank to the streams that wait for them."""
        while True:
            try:
                output = await leader.next_output.remote()
            except RayActorError:
                return
            self._stats[output.stats.dp_rank] = output.stats
            self._metrics.report(output.stats, at_once=output.is_last)
            self._ledger.settle(output)
            if output.is_last:
                return
            if output.completions:
                self._hand_out()

    async def _collect_expert_load(self, leaders: list[Any]) -> None:
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            try:
                counts = await asyncio.gather(*(_await(leader.expert_counts.remote()) for leader in leaders))
            except RayActorError:
                return
            self._metrics.report_expert_load(counts)

    def _hand_out(self) -> None:
        if self._state not in _DELIVERING:
            return
        assigned = self._ledger.assign()
        if assigned:
            self._gang.deliver({dp_rank: Intake(requests=tuple(requests)) for dp_rank, requests in assigned.items()})

    async def _recover(self, error: ExpertPoolError) -> None:
        """The ranks have failed, and the state says so: begin again, or fail for good."""
        try:
            async for line in self._rebuild_after(error):
                self._note(line)
        except ExpertPoolError as final:
            await self._fail(final)
        except Exception as bug:
            await self._fail(RankError(f"the recovery failed: {type(bug).__name__}: {bug}; it followed: {error}"))

    async def _rebuild_after(self, error: ExpertPoolError) -> AsyncIterator[str]:
        """Start new ranks until they run, as often as `recovery` allows.

        Raises:
            ExpertPoolError: the last failure, with those before.
        """
        while True:
            restart = self._restarts.decide(error, time.monotonic())
            self._metrics.restarted()
            yield self._restarts.announce(restart)
            await self._end_gang()
            await asyncio.sleep(restart.delay_s)
            try:
                async for line in self._fleet.regain():
                    yield line
            except PlacementError as nowhere:
                raise self._restarts.given_up(nowhere, time.monotonic()) from None
            try:
                async for line in self._build():
                    yield line
                return
            except ExpertPoolError as again:
                error = again

    async def _resize(self, ranks: int) -> RankConfig:
        before = self._fleet.config
        wanted = await asyncio.to_thread(resized, self._pool, before, ranks)
        more = ranks - before.layout.world_size
        if more == 0:
            return before
        reserve = self._fleet.places_for(more)
        refusal: ExpertPoolError | None = None
        try:
            if more > 0:
                async for facts in reserve.acquire():
                    self._note(f"resizing to {ranks} ranks: {facts}")
            self._require((DriverState.READY,))
            self._enter(DriverState.RESIZING)
            self._note(f"resizing from {before.layout.world_size} to {ranks} ranks")
            await self._leave_for_good()
            await self._end_gang()
            await asyncio.to_thread(reserve.release)
            refusal = await self._fleet.move(wanted, self._note)
            async for line in self._build():
                self._note(line)
        except ExpertPoolError as error:
            if self._state is not DriverState.RESIZING:
                raise
            refusal = refusal or error
            self._enter(DriverState.RECOVERING)
            await self._recover(error)
        finally:
            reserve.release()
        if self._failure is not None:
            raise self._failure
        if self._fleet.config is not wanted:
            assert refusal is not None
            raise type(refusal)(f"not resized, the pool has {self._fleet.config.layout.world_size} ranks: {refusal}")
        return wanted

    async def _leave_for_good(self) -> None:
        """All ranks leave their loops at one step boundary, and all that they have to say is taken in."""
        self._gang.deliver({}, leave=True)
        await self._gang.loops_left()
        await self._gang.close(_STOP_S)
        await asyncio.wait(self._collectors, timeout=_STOP_S)

    def _new_router(self) -> Router:
        return Router(self._fleet.config.layout.dp_size, window=2 * self._fleet.config.limits.max_running_requests)

    async def _fail(self, error: ExpertPoolError) -> None:
        if not may_follow(self._state, DriverState.FAILED):
            return
        logger.error("the pool failed: %s", error)
        self._failure = error
        self._enter(DriverState.FAILED)
        self._ledger.fail(error)
        await self._discard_ranks()

    async def _end_gang(self) -> None:
        for collector in self._collectors:
            collector.cancel()
        self._collectors.clear()
        self._stats.clear()
        self._gang.kill()

    async def _discard_ranks(self) -> None:
        await self._end_gang()
        await self._fleet.release()

    def _note(self, line: str) -> None:
        """What happens to a pool that serves: in the log, in `status`, and for everyone who waits."""
        logger.warning("%s", line)
        self._notice = line
        self._ledger.tell(line)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Work that goes on whoever waits for it, until the pool is shut down."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_stage(self, state: DriverState) -> None:
        """A stage of the first start is a state of its own; a pool that recovers or is resized is that throughout."""
        if self._state not in _REBUILDING:
            self._enter(state)

    def _enter(self, state: DriverState) -> None:
        if not may_follow(self._state, state):
            raise self._failure or RankError(f"the pool is {self._state.value} and cannot become {state.value}")
        self._state = state

    def _require(self, states: tuple[DriverState, ...]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state not in states:
            raise RankError(f"the pool is {self._state.value}, not ready")


async def _await(ref: Any) -> Any:
    return await ref
