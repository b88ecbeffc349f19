"""What to do when the ranks of a pool have failed: whether to begin again, after how long, and what to say at the end.

A fault of a process or its machine passes, so the ranks are started anew. What would fail the same way again does not:
ranks that disagree (`GeometryError`), a model folder, a kernel or a setting that cannot work end the pool at once.
"""

from dataclasses import dataclass

import msgspec

from ...dispatch.errors import ConfigError, ExpertPoolError, RankError
from ...workers.config import MAX_SECONDS


class RecoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a pool begins again after its ranks failed.

    Attributes:
        max_restarts: restarts within `window_s`, at most; the failure after that ends the pool. 0: the first one does.
        window_s: a restart that is longer ago no longer counts.
        backoff_s: pause before the first restart; doubled for each further one within the window.
        max_backoff_s: the longest such pause.
    """

    max_restarts: int = 3
    window_s: float = 3600.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_restarts <= 1_000_000:
            raise ConfigError(f"recovery.max_restarts={self.max_restarts} is not between 0 and 1000000")
        if not 0 < self.window_s <= MAX_SECONDS:
            raise ConfigError(f"recovery.window_s={self.window_s} is not above 0 and at most {MAX_SECONDS:g}")
        for name in ("backoff_s", "max_backoff_s"):
            if not 0 <= getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(f"recovery.{name}={getattr(self, name)} is not between 0 and {MAX_SECONDS:g}")


@dataclass(frozen=True)
class Restart:
    """A decision to begin again.

    Attributes:
        at_s: when, on the caller's clock.
        cause: what happened.
        number: how many restarts there are within the window, this one included.
        delay_s: how long to wait before it.
    """

    at_s: float
    cause: str
    number: int
    delay_s: float


class Restarts:
    """The restarts of one pool, and whether there may be another.

    Args:
        config: the bounds.

    Attributes:
        total: since the pool began.
        last: the latest one.
    """

    def __init__(self, config: RecoveryConfig):
        self._config = config
        self._recent: list[Restart] = []
        self.total = 0
        self.last: Restart | None = None

    def decide(self, error: ExpertPoolError, now_s: float) -> Restart:
        """The restart that follows this failure.

        Raises:
            ExpertPoolError: there is none: the failure would come again (it is raised itself), or there were too many.
        """
        config = self._config
        self._recent = [restart for restart in self._recent if now_s - restart.at_s < config.window_s]
        if type(error) is not RankError or config.max_restarts == 0:
            raise error
        if len(self._recent) >= config.max_restarts:
            raise self.given_up(error, now_s)
        delay_s = min(config.max_backoff_s, config.backoff_s * 2.0 ** min(len(self._recent), 64))
        self.last = Restart(now_s, str(error), len(self._recent) + 1, delay_s)
        self._recent.append(self.last)
        self.total += 1
        return self.last

    def announce(self, restart: Restart) -> str:
        """One line about a restart that is to come."""
        pause = f" in {restart.delay_s:g} s" if restart.delay_s else ""
        return f"{restart.cause}; restarting{pause} ({restart.number} of {self._config.max_restarts})"

    def given_up(self, error: ExpertPoolError, now_s: float) -> ExpertPoolError:
        """The error that ends the pool: of the same type, with what happened each time."""
        if not self._recent:
            return error
        history = "; ".join(
            f"restart {restart.number}, {now_s - restart.at_s:.0f} s ago, after: {restart.cause}"
            for restart in self._recent
        )
        return type(error)(
            f"{error}. The pool was restarted {len(self._recent)} times within recovery.window_s="
            f"{self._config.window_s:g} (recovery.max_restarts={self._config.max_restarts}): {history}"
        )
