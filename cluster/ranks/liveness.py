"""Whether the processes of ranks answer at all.

Ray tells of a process that ends (`RankSet.first_loop_end`), and not of one that is stopped: its calls wait for ever.
Where another rank waits for it in a step that one has a deadline; a lone rank, and ranks that are idle, have nobody but
the driver.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from ..ray_session.ray_internals import process_of
from .failure import SilentRank

_PAUSE_S = 2.0
_SLICE_S = 1.0
_MARGIN_S = 2.0
# Imports and compilers may keep a process from answering for seconds while it starts.
_START_S = 60.0

Answer = TypeVar("Answer")


class LivenessCheck:
    """Asks every rank of a set for a sign of life, every two seconds.

    A rank whose process is not there yet is not silent: Ray may look for a place, make a runtime environment or start
    the process for as long as the start may take.
    """

    def __init__(self) -> None:
        self._step_timeout_s = self._within_s = _START_S
        self._silent: list[asyncio.Future[SilentRank]] = []
        self._beats: list[asyncio.Task[None]] = []

    def begin(self, actors: Sequence[Any], step_timeout_s: float) -> None:
        """Ask these ranks, which were just asked for; while they start, a minute or more may pass from when a process
        is there.

        Args:
            actors: by rank.
            step_timeout_s: how long one may give no sign while it runs; ranks that wait for it have said so before.
        """
        self._step_timeout_s = step_timeout_s
        self._within_s = max(step_timeout_s + _MARGIN_S, _START_S)
        self._silent = [asyncio.get_running_loop().create_future() for _ in actors]
        self._beats = [asyncio.ensure_future(self._beat(*one)) for one in zip(actors, self._silent, strict=True)]

    def ranks_run(self) -> None:
        """They have started: from now on `step_timeout_s` counts."""
        self._within_s = self._step_timeout_s + _MARGIN_S

    def stop(self) -> None:
        for beat in self._beats:
            beat.cancel()

    async def while_there(self, rank: int, call: Awaitable[Answer]) -> Answer:
        """What a call of this rank returns.

        Raises:
            SilentRank: the rank stopped answering meanwhile.
        """
        if not self._silent:
            return await call
        work, silent = asyncio.ensure_future(call), self._silent[rank]
        either: list[asyncio.Future[Any]] = [work, silent]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise silent.result()
            return work.result()
        finally:
            work.cancel()

    async def _beat(self, actor: Any, silent: "asyncio.Future[SilentRank]") -> None:
        is_there = False
        while True:
            answer = asyncio.ensure_future(_answered(actor.clock.remote()))
            waited_s = 0.0
            # Slices are counted, not the clock: after a pause of this process itself answers are there to be read.
            while not (await asyncio.wait([answer], timeout=_SLICE_S))[0]:
                is_there = is_there or await asyncio.to_thread(process_of, actor) is not None
                waited_s += _SLICE_S if is_there else 0.0
                if waited_s >= self._within_s:
                    silent.set_result(SilentRank(waited_s, self._step_timeout_s))
                    return
            is_there = True
            await asyncio.sleep(_PAUSE_S)


async def _answered(ref: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception):  # that a process has ended is what its other calls say
        await ref
