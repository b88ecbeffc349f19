"""The ranks of a pool that serves are moved: to another number of them. Requests wait meanwhile, and then go on."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..dispatch.errors import ExpertPoolError, RankError
from ..workers.rank_config import RankConfig
from .config import PoolConfig
from .driver_state import DriverState
from .lifecycle import Lifecycle
from .resizing import resized


class Mover:
    """One move at a time.

    Args:
        life: of the pool.
        pool: what the user wrote: bounds of sizes.
    """

    def __init__(self, life: Lifecycle, pool: PoolConfig):
        self._life = life
        self._pool = pool
        self._is_moving = False

    async def resize(self, ranks: int) -> RankConfig:
        """See `Driver.resize`."""
        self._life.require(DriverState.READY)
        if self._is_moving:
            raise RankError("the pool is being resized already: wait for that call")
        return await self._alone(self._resize(ranks))

    async def _alone(self, move: Coroutine[Any, Any, RankConfig]) -> RankConfig:
        """Do it to the end, whoever stops waiting for it."""
        self._is_moving = True
        work = self._life.spawn(move)
        work.add_done_callback(lambda _: setattr(self, "_is_moving", False))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise RankError("the pool was shut down while it was being resized") from None
            raise

    async def _resize(self, ranks: int) -> RankConfig:
        life, fleet = self._life, self._life.fleet
        before = fleet.config
        wanted = await asyncio.to_thread(resized, self._pool, before, ranks)
        more = ranks - before.layout.world_size
        if more == 0:
            return before
        reserve = fleet.places_for(more)
        refusal: ExpertPoolError | None = None
        try:
            if more > 0:
                async for facts in reserve.acquire():
                    life.note(f"resizing to {ranks} ranks: {facts}")
            life.require(DriverState.READY)
            life.enter(DriverState.RESIZING)
            life.note(f"resizing from {before.layout.world_size} to {ranks} ranks")
            await life.leave_for_good()
            await asyncio.to_thread(reserve.release)
            refusal = await fleet.move(wanted, life.note)
            async for line in life.build():
                life.note(line)
        except ExpertPoolError as error:
            if life.state is not DriverState.RESIZING:
                raise
            refusal = refusal or error
            life.enter(DriverState.RECOVERING)
            await life.recover(error)
        finally:
            reserve.release()
        if life.failure is not None:
            raise life.failure
        if fleet.config is not wanted:
            assert refusal is not None
            raise type(refusal)(f"not resized, the pool has {fleet.config.layout.world_size} ranks: {refusal}")
        return wanted
