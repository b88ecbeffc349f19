"""How a generation run shows itself: a rich bar on a terminal, plain lines elsewhere, and a summary at the end."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..workers.request import RankStats

_LINE_INTERVAL_S = 5.0


class GenerationProgress:
    """Counts requests and tokens, and shows them.

    Args:
        console: where to; a terminal gets a bar.
        total: requests to run.
    """

    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total
        self._stats: dict[int, RankStats] = {}
        self._started = self._last_line = time.monotonic()
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
        decode_seconds = sum(stats.decode_seconds for stats in self._stats.values())
        model_seconds = sum(stats.decode_model_seconds for stats in self._stats.values())
        outside = (
            f"; {1 - model_seconds / decode_seconds:.0%} of decode steps outside the model" if decode_seconds else ""
        )
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
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.requests, detail=self._detail(now))
        elif now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line = now
            self._console.print(f"{self.requests} of {self._total} requests, {self._detail(now)}", highlight=False)

    def _detail(self, now: float) -> str:
        generated = sum(stats.generated_tokens for stats in self._stats.values())
        rate = f"{generated / max(now - self._started, 1e-9):.0f} tokens/s"
        ranks = " ".join(f"[{rank}] {stats.running}/{stats.waiting}" for rank, stats in sorted(self._stats.items()))
        return f"{rate}, running/waiting {ranks}".replace("[", r"\[")
