"""Where the actor's threads meet the step loop: requests come in, completions go out, no step calls Ray."""

import threading
from collections.abc import Iterable

import msgspec

from .request import Completion, Progress, RankOutput, RankStats, Request

_REPORT_INTERVAL_S = 1.0
_IDLE_REPORT_INTERVAL_S = 60.0


class Intake(msgspec.Struct, frozen=True):
    """Requests that arrived, and keys of requests whose caller is gone."""

    requests: tuple[Request, ...] = ()
    aborts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborts)


class Inbox:
    """Requests for this rank, wake-up calls and the order to leave; filled by an actor thread, drained by the loop."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._requests: list[Request] = []
        self._aborts: list[int] = []
        self.wake_epoch = 0
        self._leave_epoch = 0
        self._begun_epoch = 0

    def deliver(self, intake: Intake, wake_epoch: int, leave: bool = False) -> None:
        """Every delivery is also a wake-up call: the driver sends the same `wake_epoch` to all ranks."""
        with self._condition:
            self._requests.extend(intake.requests)
            self._aborts.extend(intake.aborts)
            self.wake_epoch = max(self.wake_epoch, wake_epoch)
            if leave:
                self._leave_epoch = max(self._leave_epoch, wake_epoch)
            self._condition.notify_all()

    def take(self) -> tuple[Intake, int, bool]:
        """All that arrived, the wake epoch it belongs to, and whether to leave the loop; read together."""
        with self._condition:
            intake = Intake(tuple(self._requests), tuple(self._aborts))
            self._requests.clear()
            self._aborts.clear()
            return intake, self.wake_epoch, self._leave_epoch > self._begun_epoch

    def stay(self, wake_epoch: int) -> None:
        """A loop begins: an order to leave that is no later than this wake-up call was to the loop before.

        A later one holds, also where it came before the loop began: calls of different threads overtake each other.
        """
        with self._condition:
            self._begun_epoch = wake_epoch

    def wait_beyond(self, wake_epoch: int) -> None:
        """Sleep until a wake-up call later than `wake_epoch` has come."""
        with self._condition:
            self._condition.wait_for(lambda: self.wake_epoch > wake_epoch)


class Outbox:
    """Completions, progress and counters on their way to the driver; filled by the loop, drained by an actor thread."""

    def __init__(self, dp_rank: int) -> None:
        self._condition = threading.Condition()
        self._completions: list[Completion] = []
        self._progress: list[Progress] = []
        self._is_closed = False
        self._stats = RankStats(dp_rank)
        self._reported = self._stats
        self._reader_waits_for_news = False

    def publish(self, completions: Iterable[Completion], stats: RankStats, progress: Iterable[Progress] = ()) -> None:
        """Whatever was generated before a completion is in that completion, so progress and it come in any order."""
        with self._condition:
            self._completions.extend(completions)
            self._progress.extend(progress)
            self._stats = stats
            if self._completions or self._reader_waits_for_news:
                self._condition.notify_all()

    def close(self) -> None:
        """The loop was left for good: what is here is handed out at once, as the last."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def next(self) -> RankOutput:
        """Wait for completions, at most a second while the rank is busy and a minute while it is idle."""
        with self._condition:
            self._reader_waits_for_news = True
            self._condition.wait_for(
                lambda: self._completions or self._is_closed or self._stats is not self._reported,
                _IDLE_REPORT_INTERVAL_S,
            )
            self._reader_waits_for_news = False
            self._condition.wait_for(lambda: self._completions or self._is_closed, _REPORT_INTERVAL_S)
            output = RankOutput(tuple(self._completions), self._stats, tuple(self._progress), self._is_closed)
            self._completions.clear()
            self._progress.clear()
            self._reported = self._stats
            return output
