"""The ranks of a pool through its life: their places, one `RankSet` after another in these places, and their graphs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec

from ...dispatch.errors import PlacementError
from ...graphs.plan import CapturePlan, plan_captures
from ...workers.rank_config import LoadReport, RankConfig
from ..config import PoolConfig
from ..driver.same_weights import WeightsRecord
from ..driver.sizes import resized, working_sizes
from ..driver.states import DriverState
from .capture import CaptureOutcome, capture_in_lockstep
from .placement import Placement, remove_own_groups
from .rank_set import RankSet

_FAIL_S = 10.0
AT_ONCE_S = 5.0
"""Enough for places that are free."""


class PoolRanks:
    """Whatever ranks there are, and how to get others.

    Args:
        config: what ranks are built from at first.
        pool: what the user wrote: bundles, deadlines, the fewest ranks.
        environment: variables that every rank gets; see `cluster.ranks.environment`.

    Attributes:
        config: what the present ranks are built from, or those that are to come into the places there are.
        rank_set: the present ranks.
        loads: their reports after loading.
        graphs: what they recorded.
        capture_seconds: how long that took.
    """

    def __init__(self, config: RankConfig, pool: PoolConfig, environment: Mapping[str, str]):
        self.config = config
        self.loads: tuple[LoadReport, ...] = ()
        self.graphs = CaptureOutcome(CapturePlan(()), ())
        self.capture_seconds = 0.0
        self._pool = pool
        self._environment = environment
        self._weights = WeightsRecord(config.spec.path)
        self._placement = self.places_for(config.layout.world_size)
        self.rank_set = self._new_rank_set()

    async def acquire(self) -> AsyncIterator[str]:
        """Wait for a place for every rank; see `Placement.acquire`."""
        async for facts in self._placement.acquire():
            yield facts

    async def begin_anew(self) -> AsyncIterator[str]:
        """Give back what a process before this one of the same driver actor asked for; then as `place_anew`."""
        await asyncio.to_thread(remove_own_groups)
        async for facts in self.place_anew():
            yield facts

    async def place_anew(self, timeout_s: float | None = None) -> AsyncIterator[str]:
        """Give all places back and look for others; with too few, for fewer ranks if `min_ranks` allows.

        Args:
            timeout_s: for a place for all ranks; `None`: `placement.timeout_s`.

        Raises:
            PlacementError: there are not enough.
        """
        try:
            async for facts in self._move_to(self.config, timeout_s):
                yield facts
        except PlacementError as error:
            smaller = await self._largest_size_placed_anew()
            if smaller is None:
                raise
            yield f"{error}; going on with {smaller} ranks, as min_ranks={self._pool.min_ranks} allows"

    async def regain(self) -> AsyncIterator[str]:
        """Wait for every place again; where some do not come back in time, go on with fewer if `min_ranks` allows.

        Raises:
            PlacementError: there are not enough.
        """
        try:
            async for facts in self._placement.wait_again():
                yield facts
        except PlacementError as error:
            smaller = await asyncio.to_thread(self._largest_size_that_is_placed)
            if smaller is None:
                raise
            yield f"{error}; going on with {smaller} ranks, as min_ranks={self._pool.min_ranks} allows"
            async for facts in self._move_to(resized(self._pool, self.config, smaller)):
                yield facts

    async def place_elsewhere(self, timeout_s: float | None) -> AsyncIterator[str]:
        """As `place_anew`; where others were faster it looks again, for as long as the setting says: a pool that served
        is not given up for that."""
        try:
            async for facts in self.place_anew(timeout_s):
                yield facts
        except PlacementError as error:
            yield f"{error}; looking again"
            async for facts in self.place_anew():
                yield facts

    async def resize(self, wanted: RankConfig) -> AsyncIterator[str]:
        """Places for another size. No rank may be left in the old ones.

        Raises:
            PlacementError: there are not enough; the size stays, and has no places.
        """
        async for facts in self._move_to(wanted):
            yield facts

    async def return_to(self, before: RankConfig) -> AsyncIterator[str]:
        """Places for a size that the pool had, or for fewer ranks if `min_ranks` allows.

        Raises:
            PlacementError: there are not enough.
        """
        self.config = before
        async for facts in self.place_anew():
            yield facts

    async def start_ranks(self, begin_stage: Callable[[DriverState], None]) -> AsyncIterator[str]:
        """Start a set of ranks in the places there are, load and record graphs; yields a line a stage.

        Raises:
            ExpertPoolError: a rank failed, or ranks have read other weights than the pool's first ranks.
        """
        self.rank_set = self._new_rank_set()
        begin_stage(DriverState.STARTING)
        yield "starting ranks"
        await self.rank_set.start(self._placement)
        if self.config.worker.device == "cuda":
            begin_stage(DriverState.PREPARING)
            async for line in self.rank_set.prepare_kernels():
                yield line
        begin_stage(DriverState.LOADING)
        spec, num_nodes = self.config.spec, len({place.node_id for place in self.rank_set.places})
        held_as = f", {self.config.held_as}" if self.config.held_as else ""
        yield f"loading {spec.path} on {num_nodes} node(s){held_as}"
        loads: list[LoadReport] = await self.rank_set.call("load", collective=True)
        await self._weights.require_same(loads)
        await self._weights.look_at_disk(self.rank_set.actors, self.rank_set.places)
        # Whoever asks for the status has no use for a line about every file from every rank.
        self.loads = tuple(msgspec.structs.replace(load, files=()) for load in loads)
        compiled = self.loads[0].layers[:1] if self.config.worker.compiles else ()
        for line in (*compiled, *self.loads[0].experts):
            yield line
        begin_stage(DriverState.CAPTURING)
        await self.capture()
        for line in self.graphs.what_was_dropped():
            yield line

    async def capture(self) -> None:
        """Have all ranks record all graphs, or none; see `capture_in_lockstep`."""
        started = time.monotonic()
        self.graphs = CaptureOutcome(CapturePlan(()), ())
        self.graphs = await capture_in_lockstep(plan_captures(self.config.limits), self._capture_on_all_ranks)
        self.capture_seconds = time.monotonic() - started

    def what_is_ready(self) -> str:
        return (
            f"ready: loaded in {max(report.load_seconds for report in self.loads):.1f} s, "
            f"{len(self.graphs.plan.entries)} graphs on every rank, recorded in {self.capture_seconds:.1f} s, "
            f"KV cache of {self.loads[0].kv_cache_tokens:,} tokens a batch"
        )

    def places_for(self, ranks: int, timeout_s: float | None = None) -> Placement:
        """Places to be acquired, of the pool's bundle, within `placement.timeout_s` unless said otherwise."""
        placement = self._pool.placement
        is_setting = timeout_s is None or placement.timeout_s <= timeout_s
        limit = placement.timeout_s if timeout_s is None or is_setting else timeout_s
        return Placement(ranks, self._pool.bundle, limit, placement.domain_label, is_setting)

    @contextlib.contextmanager
    def reserved(self, ranks: int, timeout_s: float | None = None) -> Iterator[Placement]:
        """`places_for` so many; what is still held at the end is given back."""
        reserve = self.places_for(ranks, timeout_s)
        try:
            yield reserve
        finally:
            reserve.release()

    async def release(self) -> None:
        """Give all places back, or withdraw the request for them."""
        await asyncio.to_thread(self._placement.release)

    async def require_weights_in_place(self) -> None:
        """Before the present ranks leave for others; see `WeightsRecord.require_same_on_disk`."""
        await self._weights.require_same_on_disk(self.rank_set.actors, self.rank_set.places)

    async def forget_weights(self) -> None:
        """The pool is shut down; see `WeightsRecord.forget`."""
        await self._weights.forget()

    async def _move_to(self, config: RankConfig, timeout_s: float | None = None) -> AsyncIterator[str]:
        """Other places. The pool has that size once it has them: after a refusal it looks for all of them again."""
        await self.release()
        self._placement = self.places_for(config.layout.world_size, timeout_s)
        async for facts in self._placement.acquire():
            yield facts
        self.config = config

    async def _largest_size_placed_anew(self) -> int | None:
        """Places for as many ranks as there is room for now."""
        if self._pool.min_ranks is None:
            return None
        for ranks in reversed(working_sizes(self._pool, self.config, self.config.layout.world_size - 1)):
            with contextlib.suppress(PlacementError):
                async for _ in self._move_to(resized(self._pool, self.config, ranks), AT_ONCE_S):
                    pass
                return ranks
        return None

    def _largest_size_that_is_placed(self) -> int | None:
        if self._pool.min_ranks is None:
            return None
        return max(working_sizes(self._pool, self.config, self._placement.num_placed()), default=None)

    def _new_rank_set(self) -> RankSet:
        return RankSet(self.config, self._pool.bundle, self._pool.placement.start_timeout_s, self._environment)

    async def _capture_on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """One call of the capture protocol on every rank; see `graphs.lockstep.LockstepRank`."""
        timeout_s = _FAIL_S if method == "fail" else None
        collective = method in ("warm_up", "record")
        return await self.rank_set.call("capture", method, *args, collective=collective, timeout_s=timeout_s)
