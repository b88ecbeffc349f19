"""The driver actor: owns the placement and the ranks, hands requests out and results back. Never part of a step."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..dispatch.errors import ExpertPoolError, PlacementError, RankError
from ..workers.mailbox import Intake
from ..workers.rank import Rank, RankPlace
from ..workers.rank_config import LoadReport, RankConfig
from ..workers.request import Completion, RankStats, Request, SamplingParams
from .config import PlacementConfig
from .driver_state import DriverState, may_follow
from .placement import Placement
from .router import Router

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
_STOP_S = 10.0


class Prompt(msgspec.Struct, frozen=True):
    """A request before the driver has given it a key."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


class PoolEvent(msgspec.Struct, frozen=True):
    """What a caller of `generate` receives: requests that finished (with their index), and how one rank stands."""

    finished: tuple[tuple[int, Completion], ...]
    stats: RankStats


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool as the driver sees it."""

    state: str
    failure: str | None
    places: tuple[RankPlace, ...]
    loads: tuple[LoadReport, ...]
    stats: tuple[RankStats, ...]


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
        self._streams: dict[int, _Stream] = {}
        self._open_streams: set[_Stream] = set()
        self._keys = itertools.count()
        self._wake_epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
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
            self._begin_running()
            self._enter(DriverState.READY)
            yield f"ready after {max(report.load_seconds for report in self._loads):.1f} s of loading"
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

    async def status(self) -> PoolStatus:
        return PoolStatus(
            state=self._state.value,
            failure=str(self._failure) if self._failure else None,
            places=self._places,
            loads=self._loads,
            stats=tuple(stats for _, stats in sorted(self._stats.items())),
        )

    async def shutdown(self) -> None:
        """Stop all ranks together and give their places back; requests under way end with an error."""
        if not may_follow(self._state, DriverState.STOPPING):
            return
        running = self._state is DriverState.READY
        self._enter(DriverState.STOPPING)
        if running:
            self._deliver({}, stop=True)
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
        await self._on_all_ranks("join", self._deadlines.start_timeout_s, host, port)

    async def _on_all_ranks(self, method: str, timeout_s: float, *args: Any) -> list[Any]:
        """Call a method on every rank; the first failure or the deadline ends the wait for all."""
        calls = {
            rank: asyncio.ensure_future(_await(getattr(actor, method).remote(*args)))
            for rank, actor in enumerate(self._ranks)
        }
        done, pending = await asyncio.wait(calls.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = {rank: call.exception() for rank, call in calls.items() if call in done}
        failures = {rank: error for rank, error in failed.items() if error is not None}
        if failures:
            raise describe_failure(failures, f"during {method}")
        if pending:
            late = [rank for rank, call in calls.items() if call in pending]
            raise RankError(
                f"ranks {late} did not finish {method} within placement.start_timeout_s="
                f"{self._deadlines.start_timeout_s:g}"
            )
        return [call.result() for call in calls.values()]

    def _begin_running(self) -> None:
        for rank, actor in enumerate(self._ranks):
            self._fates[rank] = asyncio.ensure_future(_fate(actor.run.remote()))
        self._tasks.append(asyncio.ensure_future(self._watch()))
        layout = self._config.layout
        for dp_rank in range(layout.dp_size):
            self._tasks.append(asyncio.ensure_future(self._collect(self._ranks[layout.leader(dp_rank)])))

    async def _watch(self) -> None:
        """End the gang when a rank ends: the others would wait for it in their next collective."""
        await asyncio.wait(self._fates.values(), return_when=asyncio.FIRST_COMPLETED)
        if self._state is not DriverState.READY:
            return
        # The ranks that lost a peer fail too, a moment later; waiting for them shows which one failed first.
        await asyncio.wait(self._fates.values(), timeout=_GRACE_S)
        if self._state is not DriverState.READY:
            return
        fates = {rank: fate.result() for rank, fate in self._fates.items() if fate.done()}
        await self._fail(describe_failure({rank: fate for rank, fate in fates.items() if fate}, "while running"))

    async def _collect(self, leader: Any) -> None:
        """Bring the results of one DP rank to the streams that wait for them."""
        while self._state is DriverState.READY:
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

    def _deliver(self, intakes: dict[int, Intake], stop: bool = False) -> None:
        """Requests go to the leaders of their DP ranks; the wake-up call goes to every rank."""
        self._wake_epoch += 1
        layout = self._config.layout
        for rank, actor in enumerate(self._ranks):
            dp_rank = layout.dp_rank(rank)
            intake = intakes.get(dp_rank, Intake()) if rank == layout.leader(dp_rank) else Intake()
            actor.deliver.remote(intake, self._wake_epoch, stop)

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


async def _await(ref: Any) -> Any:
    return await ref


async def _fate(ref: Any) -> BaseException | None:
    """How a rank's loop ended: `None` when it was stopped."""
    try:
        await ref
    except Exception as error:
        return error
    return None


def describe_failure(failures: dict[int, BaseException], when: str) -> ExpertPoolError:
    """One error from what several ranks report: deaths first, then the ranks' own errors, lost peers last.

    An error of our own hierarchy keeps its type.
    """
    if not failures:
        return RankError(f"all ranks stopped {when} without being told to")
    causes = {
        rank: (error.cause if isinstance(error, RayTaskError) and error.cause else error)
        for rank, error in failures.items()
    }
    rank, cause = min(causes.items(), key=lambda item: (_suspicion(item[1]), item[0]))
    if isinstance(cause, ExpertPoolError) and not isinstance(cause, (RankError, PlacementError)):
        return type(cause)(
            f"{cause} (raised on ranks {sorted(r for r, c in causes.items() if type(c) is type(cause))})"
        )
    if isinstance(cause, RayActorError):
        return RankError(f"rank {rank} died {when}: {_first_line(cause)}")
    return RankError(f"rank {rank} failed {when}: {type(cause).__name__}: {_first_line(cause)}")


def _suspicion(cause: BaseException) -> int:
    """Lower is more likely the origin: ranks that lose a peer report a broken connection."""
    if isinstance(cause, (ActorDiedError, RayActorError)):
        return 0
    text = str(cause).lower()
    return 2 if "connection" in text or "gloo" in text or "timed out" in text else 1


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
