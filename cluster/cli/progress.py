"""How a generation run shows itself: a rich bar on a terminal, plain lines elsewhere, and a summary at the end."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...workers.request import RankStats

_LINE_INTERVAL_S = 5.0
_WIDTH_WITH_TIME_LEFT = 100
_COUNTED = ("generated_tokens", "decode_seconds", "decode_model_seconds")


class GenerationProgress:
    """Counts requests and tokens, and shows them.

    Ranks count from their own start, for every caller of the pool: what is shown is what their counters gain during
    this run. So the rate while it lasts is the pool's, other callers' tokens included; the summary counts its own.
    The time left is this run's own: as if what is left finished as fast as what has. A bar has it on wide terminals.

    Args:
        console: where to; a terminal gets a bar.
        total: requests to run.
    """

    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total
        self._stats: dict[int, RankStats] = {}
        self._gained: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._started = self._last_line = time.monotonic()
        self._first_stats: float | None = None
        self.requests = 0
        self.failed = 0
        self.tokens = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),  # what follows is what one looks for, and fits 80 columns for two ranks
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task("requests", total=total, detail="")

    def on_stats(self, stats: RankStats) -> None:
        """A DP rank reported."""
        if self._first_stats is None:
            self._first_stats = time.monotonic()
        before = self._stats.get(stats.dp_rank, stats)
        is_anew = any(getattr(stats, name) < getattr(before, name) for name in _COUNTED)  # it counts from 0 again
        for name in _COUNTED:
            self._gained[name] += getattr(stats, name) - (0 if is_anew else getattr(before, name))
        self._stats[stats.dp_rank] = stats
        self._show()

    def on_completion(self, num_tokens: int, failed: bool) -> None:
        """A request finished."""
        self.requests += 1
        self.failed += failed
        self.tokens += num_tokens
        self._show()

    def summary(self) -> str:
        """One line: requests, tokens, time and rate of the whole run."""
        seconds = time.monotonic() - self._started
        failed = f", {self.failed} failed" if self.failed else ""
        model_share = self._gained["decode_model_seconds"] / max(self._gained["decode_seconds"], 1e-9)
        outside = f"; {1 - model_share:.0%} of decode steps outside the model" if model_share else ""
        return (
            f"{self.requests} of {self._total} requests{failed}, {self.tokens} tokens in {seconds:.1f} s, "
            f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s{outside}"
        )

    def __enter__(self) -> "GenerationProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it stands; more than once does no harm."""
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            time_left = self._time_left(now) if self._console.width >= _WIDTH_WITH_TIME_LEFT else ""
            self._bar.update(self._task, completed=self.requests, detail=self._detail(now, time_left))
        elif now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line = now
            detail = self._detail(now, self._time_left(now))
            self._console.print(f"{self.requests} of {self._total} requests, {detail}", highlight=False)

    def _time_left(self, now: float) -> str:
        """Empty while nothing has finished, and once everything has."""
        if not 0 < self.requests < self._total:
            return ""
        return f"about {_rounded((now - self._started) / self.requests * (self._total - self.requests))} left, "

    def _detail(self, now: float, time_left: str) -> str:
        seconds = 0.0 if self._first_stats is None else now - self._first_stats
        rate = f"{self._gained['generated_tokens'] / max(seconds, 1e-9):.0f} tokens/s"
        ranks = " ".join(f"[{rank}] {stats.running}/{stats.waiting}" for rank, stats in sorted(self._stats.items()))
        return f"{rate}, {time_left}running/waiting {ranks}".replace("[", r"\[")


def _rounded(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
