"""The ranks of a pool as the driver holds them: they start together, are called together, and end together.

When one fails, the others are told which rank it was and why, raise that themselves, and are then ended: they may be
waiting for it inside a collective, where nothing else would reach them.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...dispatch.errors import ExpertPoolError, RankError
from ...graphs.plan import CaptureEntry
from ...workers.mailbox import Intake
from ...workers.rank import Rank, RankPlace
from ...workers.rank_config import RankConfig
from ...workers.start.code_digest import LaunchedWith, code_digest, plugged_in_digest
from ..observing.metrics import pool_label
from ..ray_session.ray_internals import process_of
from .environment import runtime_environment
from .failure import GONE, SilentRank, describe_failure, is_origin
from .kernels import prepare_kernels
from .last_words import last_words
from .liveness import LivenessCheck
from .placement import Placement

logger = logging.getLogger(__name__)

_OWN_CODE = code_digest()  # as this module is read: placing ranks may take long enough for another to be installed
_GRACE_S = 1.5
_ALIKE_S = 1.0
_TELL_S = 0.7

Calls = Mapping[int, "asyncio.Task[Any]"]


class RankSet:
    """One generation of ranks.

    Args:
        config: what every rank is built from.
        bundle: resources of one rank.
        start_timeout_s: how long ranks may take to start, meet and load.
        environment: variables that every rank gets; see `cluster.ranks.environment`.

    Attributes:
        actors: by rank.
        places: where they run, once known.
        is_broken: whether a failure has ended ranks, so that the ranks cannot go on.
        has_lost_a_process: whether that failure was the end of a rank's process or its machine, or that it stopped.
    """

    def __init__(
        self, config: RankConfig, bundle: dict[str, float], start_timeout_s: float, environment: Mapping[str, str]
    ):
        self.actors: list[Any] = []
        self.places: tuple[RankPlace, ...] = ()
        self.is_broken = False
        self.has_lost_a_process = False
        self._config = config
        self._bundle = bundle
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._code = _OWN_CODE
        self._fates: dict[int, asyncio.Task[BaseException | None]] = {}
        self._liveness = LivenessCheck()
        self._wake_epoch = 0

    async def start(self, placement: Placement) -> None:
        """Start a rank in every bundle and have them form their process groups.

        Raises:
            RankError: a rank did not start, or they did not meet.
        """
        order = await asyncio.to_thread(placement.rank_order)
        nodes = await asyncio.to_thread(ray.nodes)
        runtime = runtime_environment(self._environment, os.environ, sum(node["Alive"] for node in nodes))
        for rank, bundle_index in enumerate(order):
            options = cast(Any, Rank).options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, bundle_index),
                **({"runtime_env": runtime} if runtime else {}),
            )
            self.actors.append(options.remote(self._config, rank, pool_label()))
        self._liveness.begin(self.actors, self._config.worker.step_timeout_s)
        self.places = tuple(await self.call("place"))
        await self.call("make_engine")
        try:
            rendezvous = await asyncio.wait_for(self._call_one(0, "open_rendezvous"), self._start_timeout_s)
        except (RayError, SilentRank) as error:
            raise await self._described({0: error}, "while opening the rendezvous", is_start=True) from error
        except TimeoutError:
            self.is_broken = True
            raise RankError(
                f"rank 0 did not open the rendezvous within placement.start_timeout_s={self._start_timeout_s:g}"
            ) from None
        launched_with = LaunchedWith(self._code, await asyncio.to_thread(plugged_in_digest))
        await self.call("join", rendezvous, launched_with, collective=True)

    async def prepare_kernels(self) -> AsyncIterator[str]:
        """On GPUs: compile what nodes lack; see `cluster.ranks.kernels`. Yields a line every few seconds.

        Raises:
            ExpertPoolError: a kernel did not compile, or a rank died or was late.
        """
        statuses = await self.call("kernels_needed")
        async for line in prepare_kernels(statuses, self.places, self._call_one, self._start_timeout_s):
            yield line

    async def call(
        self, method: str, *args: Any, collective: bool = False, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method on every rank and wait for all answers.

        Args:
            method: of the rank actor.
            args: the same for all ranks.
            collective: whether the call makes ranks wait for each other: then a failure ends them all.
            timeout_s: for the slowest rank; `None`: the time that a start may take.

        Raises:
            ExpertPoolError: a rank raised, died or was late; names it. After a death, a failed collective call or a
                late answer the ranks are broken.
        """
        self._require_ranks()
        limit = self._start_timeout_s if timeout_s is None else timeout_s
        calls = {
            rank: asyncio.ensure_future(self._liveness.while_there(rank, getattr(actor, method).remote(*args)))
            for rank, actor in enumerate(self.actors)
        }
        until = asyncio.FIRST_EXCEPTION if collective else asyncio.ALL_COMPLETED
        _, pending = await asyncio.wait(calls.values(), timeout=limit, return_when=until)
        doing = f"during {_readable(method, args)}"
        failures = _failures(calls)
        if failures and (collective or any(isinstance(error, GONE) for error in failures.values())):
            raise await self._end(calls, doing, is_start=True)
        if failures:
            self._note_losses(failures)
            raise await self._described(failures, doing, is_start=True)
        if pending:
            self.is_broken = True  # a rank inside a call answers no other one
            late = [rank for rank, call in calls.items() if call in pending]
            within = f"placement.start_timeout_s={limit:g}" if timeout_s is None else f"{limit:g} s"
            raise RankError(f"ranks {late} did not finish {_readable(method, args)} within {within}")
        return [call.result() for call in calls.values()]

    def begin_loops(self) -> None:
        """Have every rank run its loop."""
        self._liveness.ranks_run()
        self._fates = {
            rank: asyncio.ensure_future(_fate(self._liveness.while_there(rank, actor.run.remote(self._wake_epoch))))
            for rank, actor in enumerate(self.actors)
        }

    async def first_loop_end(self) -> None:
        """Wait until some rank's loop has ended, for whatever reason."""
        await asyncio.wait(self._fates.values(), return_when=asyncio.FIRST_COMPLETED)

    async def loops_left(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have left their loops as they were told to.

        Args:
            timeout_s: for the slowest; `None`: the step under way and the one in which they leave may each take
                `worker.step_timeout_s`.

        Raises:
            ExpertPoolError: a rank failed instead, or was late.
        """
        limit = 2 * self._config.worker.step_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + limit
        while running := [rank for rank, fate in self._fates.items() if not fate.done()]:
            if _failures(self._fates):
                break
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                self.is_broken = True
                raise RankError(f"ranks {running} did not leave their loops within {limit:g} s")
            await asyncio.wait(
                [self._fates[rank] for rank in running], timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        if _failures(self._fates):
            raise await self._end(self._fates, "while leaving the loop")

    async def end_after_loop(self) -> ExpertPoolError:
        """The loop of some rank has ended unasked: end all ranks. Returns why, for the caller to raise."""
        return await self._end(self._fates, "while running", self._config.worker.step_timeout_s)

    def deliver(self, intakes: dict[int, Intake], leave: bool = False) -> list[Any]:
        """Requests go to the leaders of their DP ranks; the wake-up call goes to every rank."""
        self._wake_epoch += 1
        layout, sent = self._config.layout, []
        for rank, actor in enumerate(self.actors):
            dp_rank = layout.dp_rank(rank)
            intake = intakes.get(dp_rank, Intake()) if rank == layout.leader(dp_rank) else Intake()
            sent.append(actor.deliver.remote(intake, self._wake_epoch, leave))
        return sent

    async def close_outboxes(self, timeout_s: float) -> None:
        """After the loops were left for good: leaders hand out what they still have, and say that it is the last.

        A rank that is lost meanwhile is passed over: what it had is generated again.
        """
        self._require_ranks()
        layout = self._config.layout
        leaders = [self.actors[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
        await asyncio.wait(
            [asyncio.ensure_future(_fate(leader.close_outbox.remote())) for leader in leaders], timeout=timeout_s
        )

    def kill(self) -> None:
        """End the processes of all ranks."""
        self._liveness.stop()
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()

    async def _call_one(self, rank: int, method: str) -> Any:
        self._require_ranks()
        try:
            return await self._liveness.while_there(rank, getattr(self.actors[rank], method).remote())
        except (RayError, SilentRank) as error:
            self._note_losses({rank: error})
            raise

    async def _end(
        self, calls: Calls, when: str, waited_s: float | None = None, is_start: bool = False
    ) -> ExpertPoolError:
        """Find out why these calls fail, tell every rank that still lives, and end them all.

        Args:
            calls: by rank; at least one has ended.
            when: the stage, for the message.
            waited_s: how long ranks wait for each other at most, where the calls have no end of their own: ranks that
                have not ended by then are the silent ones.
            is_start: whether ranks are being started: what one that died said last is then said too.
        """
        is_first, self.is_broken = not self.is_broken, True
        await _causes(calls)
        failures = _failures(calls)
        if is_first:  # after that they have been ended here
            self._note_losses(failures)
        silent = {rank: waited_s for rank, call in calls.items() if waited_s is not None and not call.done()}
        error = await self._described(failures, when, silent, is_start)
        await self._tell(error)
        for actor in self.actors:
            ray.kill(actor)
        return error

    async def _described(
        self,
        failures: dict[int, BaseException],
        when: str,
        silent: dict[int, float] | None = None,
        is_start: bool = False,
    ) -> ExpertPoolError:
        """See `describe_failure`. Where ranks run that were lost before they said so, Ray's tables say."""
        lost = [rank for rank, error in failures.items() if isinstance(error, GONE) and rank < len(self.actors)]
        words: dict[int, str] = {}
        if lost and (is_start or not self.places):
            processes = await asyncio.to_thread(lambda: {rank: process_of(self.actors[rank]) for rank in lost})
            there = {rank: process for rank, process in processes.items() if process is not None}
            self.places = self.places or tuple(
                RankPlace(rank, process.node_id, process.address, process.pid, ()) for rank, process in there.items()
            )
            words = await asyncio.to_thread(lambda: {rank: last_words(process) for rank, process in there.items()})
        return describe_failure(failures, when, self.places, silent, words)

    def _require_ranks(self) -> None:
        """
        Raises:
            RankError: they were ended meanwhile.
        """
        if not self.actors:
            raise RankError("the ranks were ended")

    def _note_losses(self, failures: Mapping[int, BaseException]) -> None:
        """A rank whose constructor raised has not lost its process: it would raise again."""
        lost = [error for error in failures.values() if isinstance(error, GONE)]
        raised = [error for error in lost if isinstance(error, ActorDiedError) and "creation task" in str(error)]
        self.has_lost_a_process = self.has_lost_a_process or len(lost) > len(raised)

    async def _tell(self, error: ExpertPoolError) -> None:
        """Every rank that lives logs the failure and raises it; one that is stopped or gone cannot."""
        answers = [asyncio.ensure_future(actor.give_up.remote(type(error), str(error))) for actor in self.actors]
        if not answers:
            return
        _, unanswered = await asyncio.wait(answers, timeout=_TELL_S)
        if unanswered:
            silent = [rank for rank, answer in enumerate(answers) if answer in unanswered]
            logger.warning("ranks %s could not be told of the failure", silent)


async def _causes(calls: Calls) -> None:
    """Wait until it is known where a failure began, and a moment longer for ranks that raise the same.

    A rank that only lost a peer says so before Ray notices that the peer is gone.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + _GRACE_S
    while (left := deadline - clock()) > 0:
        waiting = [call for call in calls.values() if not call.done()]
        if not waiting:
            return
        if any(is_origin(error) for error in _failures(calls).values()):
            await asyncio.wait(waiting, timeout=min(left, _ALIKE_S))
            return
        await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _failures(calls: Calls) -> dict[int, BaseException]:
    """What each call that failed raised, or returned where its result is its fate."""
    failures = {}
    for rank, call in calls.items():
        if call.done() and not call.cancelled():
            error = call.exception() or call.result()
            if isinstance(error, BaseException):
                failures[rank] = error
    return failures


def _readable(method: str, args: tuple[Any, ...]) -> str:
    """A call on all ranks, for messages: the capture protocol's own method and entry rather than `capture`."""
    if method != "capture":
        return method
    protocol_method, *rest = args
    return " ".join([protocol_method, *(str(part) for part in rest if isinstance(part, CaptureEntry))])


async def _fate(loop: Awaitable[Any]) -> BaseException | None:
    """How a rank's loop ended: `None` when it was stopped."""
    try:
        await loop
    except Exception as error:
        return error
    return None
