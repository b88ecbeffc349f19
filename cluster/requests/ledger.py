"""What the driver owes its callers: every unfinished request with the tokens it has, and the streams that wait for it.

Ranks come and go; the ledger stays. It is what lets a request go on elsewhere from its tokens, and it is the one place
where a request ends, so none ends twice.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ...dispatch.errors import ExpertPoolError
from ...workers.request import (
    Completion,
    Generated,
    GeneratedSoFar,
    RankOutput,
    RankStats,
    Request,
    SamplingParams,
)
from .router import Router

_STATS_INTERVAL_S = 1.0


class Prompt(msgspec.Struct, frozen=True):
    """A request before the driver has given it a key."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


class PoolEvent(msgspec.Struct, frozen=True):
    """What a caller of `generate` receives.

    Attributes:
        finished: requests that finished, with their index.
        stats: how one rank stands, where the event is a rank's report.
        notice: what happens to the pool, where it recovers or changes its size.
    """

    finished: tuple[tuple[int, Completion], ...]
    stats: RankStats | None
    notice: str | None = None


@dataclass(eq=False)
class Stream:
    """One call of `generate` under way: the indices of its unfinished requests by key, and what it is to be told."""

    index_of: dict[int, int] = field(default_factory=dict)
    events: "asyncio.Queue[PoolEvent | ExpertPoolError]" = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Entry:
    request: Request
    stream: Stream
    generated: GeneratedSoFar

    def resumed(self) -> Request:
        return msgspec.structs.replace(self.request, resume_from=self.generated.since(0))


class Ledger:
    """Unfinished requests, and which rank is to run them.

    Args:
        router: of the ranks there are at first.
        clock: in seconds.
    """

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic):
        self._router = router
        self._clock = clock
        self._stats_told_at: dict[int, float] = {}
        self._entries: dict[int, _Entry] = {}
        self._streams: set[Stream] = set()
        self._keys = itertools.count()

    @property
    def num_unfinished(self) -> int:
        return len(self._entries)

    def open(self, prompts: Iterable[Prompt]) -> Stream:
        """Take requests in; `close` has to be called with what this returns."""
        stream = Stream()
        self._streams.add(stream)
        for index, prompt in enumerate(prompts):
            request = Request(key=next(self._keys), prompt_token_ids=prompt.token_ids, sampling=prompt.sampling)
            stream.index_of[request.key] = index
            self._entries[request.key] = _Entry(request, stream, GeneratedSoFar(Generated()))
            self._router.add(request)
        return stream

    def close(self, stream: Stream) -> dict[int, list[int]]:
        """Forget what is left of a stream; returns the keys that each DP rank has of it."""
        self._streams.discard(stream)
        left = {key for key in stream.index_of if self._entries.pop(key, None) is not None}
        return self._router.forget(left)

    def assign(self) -> dict[int, list[Request]]:
        """Requests to hand to each DP rank now."""
        return self._router.assign()

    def settle(self, output: RankOutput) -> None:
        """Take a rank's report in: tokens are noted, and completions go to the streams that wait for them.

        Counters go along, and to streams for which nothing finished once a second: other callers may finish thousands.
        """
        self._router.forget({completion.key for completion in output.completions})
        finished: dict[Stream, list[tuple[int, Completion]]] = {}
        for completion in output.completions:
            entry = self._entries.pop(completion.key, None)
            if entry is not None:
                index = entry.stream.index_of.pop(completion.key)
                finished.setdefault(entry.stream, []).append((index, completion))
        for progress in output.progress:
            if progress.key in self._entries:
                self._entries[progress.key].generated.extend(progress.generated)
        for stream in self._streams if self._is_time_for(output.stats) else finished:
            stream.events.put_nowait(PoolEvent(tuple(finished.get(stream, ())), output.stats))

    def requeue(self, router: Router) -> None:
        """Other ranks take over: every unfinished request is to be handed out again, with the tokens it has."""
        self._router = router
        for entry in self._entries.values():
            router.add(entry.resumed())

    def tell(self, notice: str) -> None:
        """Every stream learns of it."""
        for stream in self._streams:
            stream.events.put_nowait(PoolEvent((), None, notice))

    def fail(self, error: ExpertPoolError) -> None:
        """Every stream ends with this error, and nothing is left."""
        for stream in self._streams:
            stream.events.put_nowait(error)
        self._entries.clear()

    def _is_time_for(self, stats: RankStats) -> bool:
        """Whether counters of this DP rank go to every stream."""
        now = self._clock()
        is_time = now - self._stats_told_at.get(stats.dp_rank, float("-inf")) >= _STATS_INTERVAL_S
        if is_time:
            self._stats_told_at[stats.dp_rank] = now
        return is_time
