"""The ranks of a pool that serves are moved: to another number of them, or off nodes that are about to go.

All ranks leave their loops at one step boundary, others take their place, and requests go on from the tokens they have.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Coroutine
from typing import Any

from ...dispatch.errors import ExpertPoolError, PlacementError, RankError
from ...workers.rank_config import RankConfig
from ..config import PoolConfig
from ..ranks.placement import Placement
from ..ranks.pool_ranks import AT_ONCE_S
from ..ray_session.ray_internals import can_tell_draining_nodes, draining_nodes
from .lifecycle import Lifecycle
from .rebuild import Rebuild
from .sizes import resized, working_sizes
from .states import DriverState, Resizing

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# Before a node goes: for a step to end, for ranks to leave and their results to be taken in.
_LEAVE_S = 10.0
_FOREVER_S = 1e7
_MOVING = "moving the ranks"


class RankMoves:
    """One move at a time; but while a resize waits for places ranks may leave a node, which would not wait for it.

    Args:
        life: of the pool.
        pool: what the user wrote: bounds of sizes.
    """

    def __init__(self, life: Lifecycle, pool: PoolConfig):
        self._life = life
        self._pool_ranks = life.pool_ranks
        self._pool = pool
        self._under_way: set[asyncio.Task[RankConfig]] = set()
        self._stays_on: set[str] = set()

    async def watch_nodes(self) -> None:
        """Move ranks off nodes that are about to go, for as long as the pool lives."""
        if not can_tell_draining_nodes():
            return
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._life.state is not DriverState.READY:
                continue
            try:
                going = await asyncio.to_thread(draining_nodes)
            except Exception as error:  # it is asked again, whatever Ray raises
                logger.warning("cannot tell which nodes are about to go: %s", error)
                continue
            self._stays_on &= going.keys()
            held = {place.node_id for place in self._pool_ranks.rank_set.places} - self._stays_on
            deadlines = {node: deadline for node, deadline in going.items() if node in held}
            if deadlines and self._life.state is DriverState.READY:
                with contextlib.suppress(ExpertPoolError):  # it has been noted, and is what `status` says
                    await self._to_the_end(self._leave_nodes(deadlines))

    async def resize(self, ranks: int) -> RankConfig:
        """See `Driver.resize`."""
        self._life.require(DriverState.READY)
        if self._under_way:
            raise RankError("the pool is being resized or moved already: wait until it is done")
        return await self._to_the_end(self._resize(ranks))

    async def _to_the_end(self, move: Coroutine[Any, Any, RankConfig]) -> RankConfig:
        """Do it to the end, whoever stops waiting for it."""
        work = self._life.spawn(move)
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if work.cancelled() and not (this and this.cancelling()):
                raise RankError("the pool was shut down while its ranks were being moved") from None
            raise
        except ExpertPoolError:
            raise
        except Exception as bug:  # before anything was given up
            raise RankError(f"{_MOVING} failed: {type(bug).__name__}: {bug}") from bug

    async def _resize(self, ranks: int) -> RankConfig:
        life, pool_ranks = self._life, self._pool_ranks
        before = pool_ranks.config
        wanted = await asyncio.to_thread(resized, self._pool, before, ranks)
        more = ranks - before.layout.world_size
        if more == 0:
            return before
        with pool_ranks.reserved(more) as reserve:
            if more > 0:
                async for facts in reserve.acquire():
                    life.note(f"resizing to {ranks} ranks: {facts}")
            self._require_size(before)
            await pool_ranks.require_weights_in_place()
            self._require_size(before)
            says = f"resizing from {before.layout.world_size} to {ranks} ranks"
            refusal = await life.carry_out(
                Rebuild(
                    Resizing(ranks, says),
                    _MOVING,
                    functools.partial(pool_ranks.resize, wanted),
                    says=says,
                    ranks_leave=True,
                    reserve=reserve,
                    size_before=before,
                )
            )
        if pool_ranks.config is not wanted:
            assert refusal is not None
            raise type(refusal)(f"not resized, the pool has {pool_ranks.config.layout.world_size} ranks: {refusal}")
        return wanted

    def _require_size(self, before: RankConfig) -> None:
        """
        Raises:
            ExpertPoolError: the pool does not serve any more, or has not the size any more, that a resize began with.
        """
        if self._life.state is DriverState.RESIZING:
            # What was free may be what the other move has just left, and is about to take elsewhere.
            raise RankError("its ranks are being moved off a node that goes away: resize the pool again after that")
        self._life.require(DriverState.READY)
        if (now := self._pool_ranks.config) is not before:
            raise RankError(f"the pool has {now.layout.world_size} ranks by now: resize it again")

    async def _leave_nodes(self, deadlines: dict[str, float]) -> RankConfig:
        """Other places for the ranks on these nodes while they serve, if there are any; then all ranks begin there.

        Args:
            deadlines: of nodes by id, in seconds since the epoch.
        """
        life, pool_ranks, rank_set = self._life, self._pool_ranks, self._pool_ranks.rank_set
        left_s = min(deadlines.values()) - time.time()
        leaving = [place for place in rank_set.places if place.node_id in deadlines]
        hosts = ", ".join(sorted({f"{place.address} ({place.node_id[:8]})" for place in leaving}))
        within = f"in {max(0.0, left_s):.0f} s" if left_s < _FOREVER_S else "soon"
        why = f"Ray takes node {hosts} away {within}"
        # Where all ranks have to be in one domain, the ones that leave take the others along.
        num_places = len(leaving) if self._pool.placement.domain_label is None else len(rank_set.places)
        life.note(f"{why}: looking for {num_places} other places")
        with pool_ranks.reserved(num_places, max(left_s - _LEAVE_S, left_s / 2, 1.0)) as reserve:
            has_room = await self._wait_for(reserve, why)
            if pool_ranks.rank_set is not rank_set:
                return pool_ranks.config  # others by now, which are looked at again
            if not has_room and not await asyncio.to_thread(self._may_shrink_by, len(leaving)):
                self._stays_on.update(deadlines)
                life.note(
                    f"{why}, and there are no other places: the pool serves until then, and then waits for places"
                )
                return pool_ranks.config
            life.require(DriverState.READY)
            await life.carry_out(
                Rebuild(
                    Resizing(pool_ranks.config.layout.world_size, why),
                    _MOVING,
                    functools.partial(pool_ranks.place_elsewhere, None if has_room else AT_ONCE_S),
                    says=f"{why}: moving the ranks",
                    ranks_leave=True,
                    reserve=reserve,
                )
            )
        return pool_ranks.config

    def _may_shrink_by(self, leaving: int) -> bool:
        config = self._pool_ranks.config
        left = config.layout.world_size - leaving
        return self._pool.min_ranks is not None and bool(working_sizes(self._pool, config, left))

    async def _wait_for(self, reserve: Placement, why: str) -> bool:
        try:
            async for facts in reserve.acquire():
                self._life.note(f"{why}: {facts}")
        except PlacementError:
            return False
        return True
