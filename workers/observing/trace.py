"""What a rank remembers of its last steps, stage by stage, for a trace; free of PyTorch, since the driver reads it."""

import threading
from collections import deque

import msgspec


class TraceEvent(msgspec.Struct, frozen=True):
    """One stage of one step on one rank.

    Attributes:
        stage: `schedule`, `agree`, `launch`, `wait` or `resolve`.
        step: iterations since the start of the loop; equal on every rank for the same step.
        began: seconds on the clock of whoever holds the event: `time.perf_counter` of the rank at first.
        ended: on the same clock.
        kind: what this rank's batch did: `idle`, `prefill`, `decode`, or both in one, `mixed`.
        num_tokens: of its batch, without padding.
        graph: the graph that was replayed, or why the step ran eagerly; `None` where nothing was launched.
    """

    stage: str
    step: int
    began: float
    ended: float
    kind: str
    num_tokens: int
    graph: str | None


class RankTrace(msgspec.Struct, frozen=True):
    """The stages that a rank remembers, oldest first.

    Attributes:
        rank: which rank.
        dropped_steps: steps before them that it has forgotten.
        events: in the order in which they ended.
    """

    rank: int
    dropped_steps: int
    events: tuple[TraceEvent, ...]


class StepTrace:
    """The last steps of a rank; written by its loop, read by another thread.

    Args:
        num_steps: steps to remember.
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._steps: deque[tuple[int, list[TraceEvent]]] = deque()
        self._dropped = 0

    def add(self, *events: TraceEvent) -> None:
        """Stages of one step; those of a step that is forgotten already are dropped."""
        step = events[0].step
        with self._lock:
            for remembered, kept in reversed(self._steps):
                if remembered == step:
                    kept.extend(events)
                    return
                if remembered < step:
                    break
            if self._steps and step < self._steps[0][0]:
                return
            self._steps.append((step, list(events)))
            if len(self._steps) > self._num_steps:
                self._steps.popleft()
                self._dropped += 1

    def read(self, rank: int) -> RankTrace:
        """All that is remembered now."""
        with self._lock:
            events = [event for _, kept in self._steps for event in kept]
            dropped = self._dropped
        return RankTrace(rank, dropped, tuple(sorted(events, key=lambda event: event.ended)))
