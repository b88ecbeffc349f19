"""The driver actor: owns the placement and the ranks, hands requests out and results back. Never part of a step."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..dispatch.errors import ExpertPoolError, RankError
from ..graphs.plan import CaptureEntry, CapturePlan, plan_captures
from ..graphs.report import GraphReport
from ..workers.mailbox import Intake
from ..workers.rank import Rank, RankPlace
from ..workers.rank_config import LoadReport, RankConfig
from ..workers.request import Completion, RankStats, Request, SamplingParams
from .capture import CaptureOutcome, capture_in_lockstep
from .config import PlacementConfig
from .driver_state import DriverState, may_follow
from .failure import describe_failure
from .placement import Placement
from .router import Router

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
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
    """The pool as the driver sees it; `graphs` of the ranks that answered in time."""

    state: str
    failure: str | None
    places: tuple[RankPlace, ...]
    loads: tuple[LoadReport, ...]
    stats: tuple[RankStats, ...]
    graphs: tuple[GraphReport, ...]


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
    """

    def __init__(self, config: RankConfig, bundle: dict[str, float], placement: PlacementConfig):
        self._config = config
        self._bundle = bundle
        self._deadlines = placement
        self._placement = Placement(config.layout.world_size, bundle, placement.timeout_s)
        self._state = DriverState.CREATED
        self._failure: ExpertPoolError | None = None
        self._ranks: list[Any] = []
        self._places: tuple[RankPlace, ...] = ()
        self._loads: tuple[LoadReport, ...] = ()
        self._stats: dict[int, RankStats] = {}
        self._router = Router(config.layout.dp_size, window=2 * config.limits.max_running_requests)
        self._graphs = CaptureOutcome(CapturePlan(()), ())
        self._streams: dict[int, _Stream] = {}
        self._open_streams: set[_Stream] = set()
        self._keys = itertools.count()
        self._wake_epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ended_ranks: set[int] = set()
        self._fates: dict[int, asyncio.Task[BaseException | None]] = {}

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
            await self._start_ranks()
            self._enter(DriverState.LOADING)
            yield f"loading {self._config.spec.path} on {len({place.node_id for place in self._places})} node(s)"
            self._loads = tuple(await self._on_all_ranks("load", self._deadlines.start_timeout_s))
            self._enter(DriverState.CAPTURING)
            self._graphs = await capture_in_lockstep(plan_captures(self._config.limits), self._capture_on_all_ranks)
            for drop in self._graphs.dropped:
                yield str(drop)
            self._begin_running()
            self._enter(DriverState.READY)
            self._begin_collecting()
            yield (
                f"ready: loaded in {max(report.load_seconds for report in self._loads):.1f} s, "
                f"{len(self._graphs.plan.entries)} graphs on every rank"
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
        await asyncio.gather(*self._deliver({}, leave=True))
        await asyncio.wait(self._fates.values())
        lost = {rank: error for rank, fate in self._fates.items() if (error := fate.result()) is not None}
        if lost:
            await self._fail(describe_failure(lost, "while leaving the loop", self._places))
            raise cast(ExpertPoolError, self._failure)
        try:
            self._graphs = await capture_in_lockstep(plan_captures(self._config.limits), self._capture_on_all_ranks)
            return self._graphs
        except ExpertPoolError as error:
            self._graphs = CaptureOutcome(CapturePlan(()), ())
            if self._ended_ranks:
                await self._fail(error)
            raise
        finally:
            if self._state is DriverState.CAPTURING:
                self._begin_running()
                self._enter(DriverState.READY)

    async def status(self) -> PoolStatus:
        graphs: list[GraphReport] = []
        if self._state is DriverState.READY:
            reports = {asyncio.ensure_future(_await(actor.capture.remote("report"))) for actor in self._ranks}
            answered, _ = await asyncio.wait(reports, timeout=_STATUS_S)
            graphs = [report.result() for report in answered if report.exception() is None]
            graphs.sort(key=lambda report: report.rank)
        return PoolStatus(
            state=self._state.value,
            failure=str(self._failure) if self._failure else None,
            places=self._places,
            loads=self._loads,
            stats=tuple(stats for _, stats in sorted(self._stats.items())),
            graphs=tuple(graphs),
        )

    async def shutdown(self) -> None:
        """Stop all ranks together and give their places back; requests under way end with an error."""
        if not may_follow(self._state, DriverState.STOPPING):
            return
        running = self._state is DriverState.READY
        self._enter(DriverState.STOPPING)
        if running:
            self._deliver({}, leave=True)
            await asyncio.wait(self._fates.values(), timeout=_STOP_S)
        self._end_streams(RankError("the pool was shut down"))
        await self._discard_ranks()
        self._enter(DriverState.STOPPED)

    async def _start_ranks(self) -> None:
        order = await asyncio.to_thread(self._placement.rank_order)
        for rank, bundle_index in enumerate(order):
            options = cast(Any, Rank).options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement.group, bundle_index),
            )
            self._ranks.append(options.remote(self._config, rank))
        self._places = tuple(await self._on_all_ranks("place", self._deadlines.start_timeout_s))
        host, port = await self._ranks[0].open_rendezvous.remote()
        await self._on_all_ranks("join", self._deadlines.start_timeout_s, host, port, collective=True)

    async def _on_all_ranks(self, method: str, timeout_s: float, *args: Any, collective: bool = False) -> list[Any]:
        """Call a method on every rank and wait for all answers.

        Args:
            method: of the rank actor.
            timeout_s: for the slowest rank.
            args: the same for all ranks.
            collective: whether the call makes ranks wait for each other, so that one that fails takes the others along.
        """
        calls = {
            rank: asyncio.ensure_future(_await(getattr(actor, method).remote(*args)))
            for rank, actor in enumerate(self._ranks)
        }
        until = asyncio.FIRST_EXCEPTION if collective else asyncio.ALL_COMPLETED
        done, pending = await asyncio.wait(calls.values(), timeout=timeout_s, return_when=until)
        failed = any(call.exception() for call in done)
        ended = await self._follow_failure(calls) if failed and pending else calls
        failures = {rank: error for rank, call in ended.items() if call.done() and (error := call.exception())}
        self._ended_ranks |= {rank for rank, error in failures.items() if isinstance(error, RayActorError)}
        if failures:
            raise describe_failure(failures, f"during {_readable(method, args)}", self._places)
        if pending:
            late = [rank for rank, call in calls.items() if call in pending]
            raise RankError(
                f"ranks {late} did not finish {_readable(method, args)} within placement.start_timeout_s="
                f"{self._deadlines.start_timeout_s:g}"
            )
        return [call.result() for call in calls.values()]

    async def _capture_on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """One call of the capture protocol on every rank; see `graphs.lockstep.LockstepRank`."""
        deadline = _STOP_S if method == "fail" else self._deadlines.start_timeout_s
        collective = method in ("warm_up", "record")
        return await self._on_all_ranks("capture", deadline, method, *args, collective=collective)

    def _begin_running(self) -> None:
        for rank, actor in enumerate(self._ranks):
            self._fates[rank] = asyncio.ensure_future(_fate(actor.run.remote()))
        self._tasks.append(asyncio.ensure_future(self._watch()))

    def _begin_collecting(self) -> None:
        layout = self._config.layout
        for dp_rank in range(layout.dp_size):
            self._tasks.append(asyncio.ensure_future(self._collect(self._ranks[layout.leader(dp_rank)])))

    async def _watch(self) -> None:
        """End the gang when a rank ends: the others would wait for it in their next collective."""
        await asyncio.wait(self._fates.values(), return_when=asyncio.FIRST_COMPLETED)
        if self._state is not DriverState.READY:
            return
        fates = await self._follow_failure(self._fates)
        if self._state is DriverState.READY:
            failures = {rank: fate.result() for rank, fate in fates.items()}
            found = {rank: error for rank, error in failures.items() if error}
            silent = {rank: self._config.worker.step_timeout_s for rank in self._fates if rank not in fates}
            await self._fail(describe_failure(found, "while running", self._places, silent))

    async def _follow_failure(self, calls: "Mapping[int, asyncio.Task[Any]]") -> "dict[int, asyncio.Task[Any]]":
        """The calls that ended once one of them failed.

        A rank that failed is ended at once: that closes its connections, so the ranks that wait for it in a collective
        raise too, instead of being found there by a deadline.
        """
        ended: dict[int, asyncio.Task[Any]] = {}
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while True:
            for rank, call in calls.items():
                if call.done() and rank not in ended:
                    ended[rank] = call
                    self._ended_ranks.add(rank)
                    ray.kill(self._ranks[rank])
            left = [call for call in calls.values() if not call.done()]
            remaining = deadline - asyncio.get_running_loop().time()
            if not left or remaining <= 0:
                return ended
            await asyncio.wait(left, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)

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
            self._deliver({dp_rank: Intake(requests=tuple(requests)) for dp_rank, requests in assigned.items()})

    def _deliver(self, intakes: dict[int, Intake], leave: bool = False) -> list[Any]:
        """Requests go to the leaders of their DP ranks; the wake-up call goes to every rank."""
        self._wake_epoch += 1
        layout, sent = self._config.layout, []
        for rank, actor in enumerate(self._ranks):
            dp_rank = layout.dp_rank(rank)
            intake = intakes.get(dp_rank, Intake()) if rank == layout.leader(dp_rank) else Intake()
            sent.append(actor.deliver.remote(intake, self._wake_epoch, leave))
        return sent

    def _abandon(self, stream: _Stream) -> None:
        """Drop what a caller no longer waits for."""
        self._open_streams.discard(stream)
        left = {key for key in stream.index_of if self._streams.pop(key, None) is not None}
        aborts = self._router.forget(left)
        if aborts and self._state is DriverState.READY:
            self._deliver({dp_rank: Intake(aborts=tuple(keys)) for dp_rank, keys in aborts.items()})
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
        for actor in self._ranks:
            ray.kill(actor)
        self._ranks.clear()
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


def _readable(method: str, args: tuple[Any, ...]) -> str:
    """A call on all ranks, for messages: the capture protocol's own method and entry rather than `capture`."""
    return " ".join(str(part) for part in args if isinstance(part, (str, CaptureEntry))) or method


async def _await(ref: Any) -> Any:
    return await ref


async def _fate(ref: Any) -> BaseException | None:
    """How a rank's loop ended: `None` when it was stopped."""
    try:
        await ref
    except Exception as error:
        return error
    return None
