"""What to say when ranks fail: one error that names the rank where it began, and why."""

import asyncio
import itertools
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from ...dispatch.errors import ExpertPoolError, PlacementError, RankError
from ...workers.rank import RankPlace

LOST = (RayActorError, OutOfMemoryError, NodeDiedError)
"""What Ray raises where a process or its machine is gone; the second, which is no `RayActorError`, where its memory
monitor ended the process."""


class SilentRank(RankError):
    """A rank's process neither ended nor answered for so many seconds, more than `worker.step_timeout_s`."""

    def __init__(self, seconds: float, step_timeout_s: float):
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds
        self.step_timeout_s = step_timeout_s


GONE = (*LOST, SilentRank)
"""A rank that will not come back, and takes no call any more."""

Answer = TypeVar("Answer")

_LOST_PEER = 2
# Gloo's, NCCL's (ncclRemoteError) and our own deadlines'.
_SIGNS_OF_A_LOST_PEER = ("connection", "gloo", "remote process", "timed out")

_ADVICE = " Some common causes include"  # of Ray, a paragraph
_LOW_MEMORY, _MEMORY_TABLES = "low on memory", "Object store memory usage"  # of Ray's memory monitor


def describe_failure(
    failures: dict[int, BaseException],
    when: str,
    places: tuple[RankPlace, ...] = (),
    silent: dict[int, float] | None = None,
    last_words: Mapping[int, str] | None = None,
) -> ExpertPoolError:
    """One error from what several ranks report: deaths first, then the ranks' own errors, lost peers last.

    An error of our own hierarchy keeps its type.

    Args:
        failures: what each rank that failed raised.
        when: the stage, for the message.
        places: where ranks run, as far as that is known.
        silent: ranks that did not end, with the seconds that others waited for them at most.
        last_words: of ranks that are gone, where they are wanted.
    """
    if not failures:
        return RankError(f"all ranks stopped {when} without being told to")
    causes = {rank: _cause(error) for rank, error in failures.items()}
    rank, cause = min(causes.items(), key=lambda item: (_suspicion(item[1]), item[0]))
    if isinstance(cause, ExpertPoolError) and not isinstance(cause, (RankError, PlacementError)):
        return type(cause)(
            f"{cause} (raised on ranks {sorted(r for r, c in causes.items() if type(c) is type(cause))})"
        )
    if isinstance(cause, LOST):
        reason = reason_of_death(str(cause))
        if last_words and rank in last_words:
            reason = f"{reason.rstrip('.')}; {last_words[rank]}"
        return RankError(f"{_named(rank, places)} died {when}: {reason}")
    if isinstance(cause, SilentRank):
        return RankError(
            f"{_named(rank, places)} has not answered {when} for {cause.seconds:g} s, longer than "
            f"worker.step_timeout_s={cause.step_timeout_s:g}: its process or its machine is stopped"
        )
    if silent and _suspicion(cause) == _LOST_PEER:
        names = ", ".join(_named(one, places) for one in sorted(silent))
        if "timed out" not in str(cause).lower():
            return RankError(f"{names} broke off {when}: rank {rank} lost its connection: {_first_line(cause)}")
        return RankError(
            f"{names} did not take part in a step within worker.step_timeout_s={max(silent.values()):g}; "
            f"rank {rank} waited for it: {_first_line(cause)}"
        )
    return RankError(f"rank {rank} failed {when}: {type(cause).__name__}: {_first_line(cause)}")


async def answer_of(
    rank: int, call: Awaitable[Answer], when: str, timeout_s: float, places: tuple[RankPlace, ...] = ()
) -> Answer:
    """What a call of one rank returns.

    Args:
        rank: for the message.
        call: of the rank's method.
        when: what it does, for the message.
        timeout_s: how long it may take.
        places: as for `describe_failure`.

    Raises:
        RankError: the rank is lost, raised, or did not answer in time; names it.
    """
    try:
        return await asyncio.wait_for(call, timeout_s)
    except RayError as error:
        raise describe_failure({rank: error}, when, places) from error
    except TimeoutError:
        raise RankError(f"{_named(rank, places)} did not answer within {timeout_s:g} s {when}") from None


def is_origin(error: BaseException) -> bool:
    """Whether this is where a failure began, and not what a rank says that lost another."""
    return _suspicion(_cause(error)) < _LOST_PEER


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and error.cause else error


def _named(rank: int, places: tuple[RankPlace, ...]) -> str:
    return f"rank {rank}" + "".join(f" (process {p.pid} on {p.address})" for p in places if p.rank == rank)


def _suspicion(cause: BaseException) -> int:
    """Lower is more likely the origin: ranks that lose a peer report a broken connection."""
    if isinstance(cause, LOST):
        return 0
    text = str(cause).lower()
    return _LOST_PEER if any(sign in text for sign in _SIGNS_OF_A_LOST_PEER) else 1


def reason_of_death(said: str) -> str:
    """What Ray says of the end of a process, without ids of actors and jobs, advice, and tables of memory."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or line.startswith("Worker exit detail")]
    if any(_LOW_MEMORY in line for line in lines):
        telling = list(itertools.takewhile(lambda line: not line.startswith(_MEMORY_TABLES), lines))
    return " ".join(telling or lines[:3] or ["unknown"]).split(_ADVICE)[0]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
