"""The driver actor: owns the placement and the ranks, hands requests out and results back. Never part of a step."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ray.exceptions import RayActorError

from ..dispatch.errors import ExpertPoolError, RankError
from ..graphs.plan import CapturePlan, plan_captures
from ..graphs.report import GraphReport
from ..workers.mailbox import Intake
from ..workers.rank import RankPlace
from ..workers.rank_config import LoadReport, RankConfig
from ..workers.request import Completion, RankStats, Request, SamplingParams
from .capture import CaptureOutcome, capture_in_lockstep
from .config import PlacementConfig
from .driver_state import DriverState, may_follow
from .gang import Gang
from .placement import Placement
from .router import Router

logger = logging.getLogger(__name__)

_SERVING = (DriverState.READY, DriverState.CAPTURING)
_STOP_S = 10.0
_STATUS_S = 5.0


class Prompt(msgspec.Struct, frozen=True):
    """A request before the driver has given it a key."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


class PoolEvent(msgspec.Struct, frozen=True):
    """What a caller of `generate` receives: requests that finished (with their index), and how one rank stands."""

    finished: tuple[tuple[int, Completion], ...]
    stats: RankStats


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool as the driver sees it; graphs are of the ranks that answered in time, seconds of the last capture."""

    state: str
    failure: str | None
    places: tuple[RankPlace, ...]
    loads: tuple[LoadReport, ...]
    stats: tuple[RankStats, ...]
    graphs: tuple[GraphReport, ...]
    capture_seconds: float


@dataclass(eq=False)
class _Stream:
    """One call of `generate` under way."""

    index_of: dict[int, int] = field(default_factory=dict)
    events: "asyncio.Queue[PoolEvent | ExpertPoolError]" = field(default_factory=asyncio.Queue)


class Driver:
    """One pool. An asyncio actor: calls interleave, and none blocks another.

    Args:
        config: what every rank is built from.
        bundle: resources of one rank.
        placement: how long to wait for places and for the start.
        environment: variables that every rank gets; see `cluster.environment`.
    """

    def __init__(
        self,
        config: RankConfig,
        bundle: dict[str, float],
        placement: PlacementConfig,
        environment: Mapping[str, str],
    ):
        self._config = config
        self._placement = Placement(config.layout.world_size, bundle, placement.timeout_s)
        self._state = DriverState.CREATED
        self._failure: ExpertPoolError | None = None
        self._gang = Gang(config, bundle, placement.start_timeout_s, environment)
        self._loads: tuple[LoadReport, ...] = ()
        self._stats: dict[int, RankStats] = {}
        self._router = Router(config.layout.dp_size, window=2 * config.limits.max_running_requests)
        self._graphs = CaptureOutcome(CapturePlan(()), ())
        self._capture_seconds = 0.0
        self._streams: dict[int, _Stream] = {}
        self._open_streams: set[_Stream] = set()
        self._keys = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> AsyncIterator[str]:
        """Place, start and load all ranks; yields a line about each stage.

        Raises:
            PlacementError: no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        try:
            self._enter(DriverState.PLACING)
            yield f"placing {self._config.layout.world_size} ranks"
            async for facts in self._placement.acquire():
                yield facts
            self._enter(DriverState.STARTING)
            yield "starting ranks"
            await self._gang.start(self._placement)
            if self._config.worker.device == "cuda":
                self._enter(DriverState.PREPARING)
                async for line in self._gang.prepare_kernels():
                    yield line
            self._enter(DriverState.LOADING)
            yield f"loading {self._config.spec.path} on {len({place.node_id for place in self._gang.places})} node(s)"
            self._loads = tuple(await self._gang.call("load"))
            for line in self._loads[0].experts:
                yield line
            self._enter(DriverState.CAPTURING)
            self._graphs = await self._capture()
            for drop in self._graphs.dropped:
                yield str(drop)
            self._begin_running()
            self._enter(DriverState.READY)
            self._begin_collecting()
            yield (
                f"ready: loaded in {max(report.load_seconds for report in self._loads):.1f} s, "
                f"{len(self._graphs.plan.entries)} graphs on every rank, recorded in {self._capture_seconds:.1f} s, "
                f"KV cache of {self._loads[0].kv_cache_tokens:,} tokens a batch"
            )
        except BaseException as error:
            await self._fail(error if isinstance(error, ExpertPoolError) else RankError(f"start-up failed: {error}"))
            raise (self._failure or error) from None

    async def generate(self, prompts: list[Prompt]) -> AsyncIterator[PoolEvent]:
        """Run the prompts; yields events as requests finish, and at least every second while ranks are busy.

        Raises:
            RankError: a rank failed; requests that had finished were yielded before.
        """
        self._require_ready()
        stream = _Stream()
        self._open_streams.add(stream)
        for index, prompt in enumerate(prompts):
            key = next(self._keys)
            stream.index_of[key] = index
            self._streams[key] = stream
            self._router.add(Request(key=key, prompt_token_ids=prompt.token_ids, sampling=prompt.sampling))
        try:
            self._hand_out()
            while stream.index_of:
                event = await stream.events.get()
                if isinstance(event, ExpertPoolError):
                    raise event
                for _, completion in event.finished:
                    del stream.index_of[completion.key]
                yield event
        finally:
            self._abandon(stream)

    async def recapture(self) -> CaptureOutcome:
        """Have all ranks leave the loop at a step boundary, record all graphs anew, and go on.

        Where the capture fails without harm to the ranks, the pool goes on without graphs.

        Raises:
            GeometryError: ranks disagree about a graph.
            RankError: a rank was lost; the pool has failed.
        """
        self._require_ready()
        self._enter(DriverState.CAPTURING)
        try:
            await asyncio.gather(*self._gang.deliver({}, leave=True))
            await self._gang.loops_left()
            self._graphs = await self._capture()
            return self._graphs
        except ExpertPoolError as error:
            self._graphs = CaptureOutcome(CapturePlan(()), ())
            if self._gang.is_broken:
                await self._fail(error)
            raise
        finally:
            if self._state is DriverState.CAPTURING:
                self._begin_running()
                self._enter(DriverState.READY)

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
            loads=self._loads,
            stats=tuple(stats for _, stats in sorted(self._stats.items())),
            graphs=tuple(graphs),
            capture_seconds=self._capture_seconds,
        )

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
        self._end_streams(RankError("the pool was shut down"))
        await self._discard_ranks()
        self._enter(DriverState.STOPPED)

    async def _capture(self) -> CaptureOutcome:
        started = time.monotonic()
        outcome = await capture_in_lockstep(plan_captures(self._config.limits), self._capture_on_all_ranks)
        self._capture_seconds = time.monotonic() - started
        return outcome

    async def _capture_on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """One call of the capture protocol on every rank; see `graphs.lockstep.LockstepRank`."""
        timeout_s = _STOP_S if method == "fail" else None
        collective = method in ("warm_up", "record")
        return await self._gang.call("capture", method, *args, collective=collective, timeout_s=timeout_s)

    def _begin_running(self) -> None:
        self._gang.begin_loops()
        self._tasks.append(asyncio.ensure_future(self._watch()))

    def _begin_collecting(self) -> None:
        layout = self._config.layout
        for dp_rank in range(layout.dp_size):
            self._tasks.append(asyncio.ensure_future(self._collect(self._gang.actors[layout.leader(dp_rank)])))

    async def _watch(self) -> None:
        """End the gang when a rank ends: the others would wait for it in their next collective."""
        await self._gang.first_loop_end()
        if self._state is not DriverState.READY:
            return
        error = await self._gang.end_after_loop()
        if self._state is DriverState.READY:
            await self._fail(error)

    async def _collect(self, leader: Any) -> None:
        """Bring the results of one DP rank to the streams that wait for them."""
        while self._state in _SERVING:
            try:
                output = await leader.next_output.remote()
            except RayActorError:
                return
            self._stats[output.stats.dp_rank] = output.stats
            finished: dict[_Stream, list[tuple[int, Completion]]] = {stream: [] for stream in self._open_streams}
            self._router.forget({completion.key for completion in output.completions})
            for completion in output.completions:
                stream = self._streams.pop(completion.key, None)
                if stream is not None:
                    finished[stream].append((stream.index_of[completion.key], completion))
            for stream, completions in finished.items():
                stream.events.put_nowait(PoolEvent(tuple(completions), output.stats))
            if output.completions:
                self._hand_out()

    def _hand_out(self) -> None:
        assigned = self._router.assign()
        if assigned:
            self._gang.deliver({dp_rank: Intake(requests=tuple(requests)) for dp_rank, requests in assigned.items()})

    def _abandon(self, stream: _Stream) -> None:
        """Drop what a caller no longer waits for."""
        self._open_streams.discard(stream)
        left = {key for key in stream.index_of if self._streams.pop(key, None) is not None}
        aborts = self._router.forget(left)
        if aborts and self._state is DriverState.READY:
            self._gang.deliver({dp_rank: Intake(aborts=tuple(keys)) for dp_rank, keys in aborts.items()})
            self._hand_out()

    async def _fail(self, error: ExpertPoolError) -> None:
        if not may_follow(self._state, DriverState.FAILED):
            return
        logger.error("the pool failed: %s", error)
        self._failure = error
        self._enter(DriverState.FAILED)
        self._end_streams(error)
        await self._discard_ranks()

    def _end_streams(self, error: ExpertPoolError) -> None:
        for stream in self._open_streams:
            stream.events.put_nowait(error)
        self._streams.clear()

    async def _discard_ranks(self) -> None:
        self._gang.kill()
        await asyncio.to_thread(self._placement.release)

    def _enter(self, state: DriverState) -> None:
        if not may_follow(self._state, state):
            raise self._failure or RankError(f"the pool is {self._state.value} and cannot become {state.value}")
        self._state = state

    def _require_ready(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state is not DriverState.READY:
            raise RankError(f"the pool is {self._state.value}, not ready")


async def _await(ref: Any) -> Any:
    return await ref
