"""What `generate` says of its rate, its steps and the time left: what the ranks' counters gain while it runs, whatever
they held, and what this run has finished.
"""

import io
import re

import msgspec
import pytest
from expert_pool.cluster.cli import progress as module
from expert_pool.cluster.cli.progress import GenerationProgress
from expert_pool.workers.request import RankStats
from rich.console import Console

USED = RankStats(0, steps=900, generated_tokens=10_000, decode_seconds=80.0, decode_model_seconds=20.0)


class Clock:
    """Stands for the module `time`, so that rates are exact."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Shown:
    """A run's progress on something that is no terminal, and the clock that it sees."""

    def __init__(self, clock: Clock, total: int = 4):
        self._text, self._clock = io.StringIO(), clock
        self.progress = GenerationProgress(Console(file=self._text, width=200), total)

    def report(self, stats: RankStats, after_s: float, **gained: float) -> RankStats:
        """Some seconds later this rank reports that it has counted so much more."""
        self._clock.now += after_s
        sums = {name: getattr(stats, name) + amount for name, amount in gained.items()}
        self.progress.on_stats(stats := msgspec.structs.replace(stats, **sums))
        return stats

    def finish(self, count: int, after_s: float) -> None:
        """Some seconds later so many requests finish."""
        self._clock.now += after_s
        for _ in range(count):
            self.progress.on_completion(10, failed=False)

    @property
    def last_line(self) -> str:
        return self._text.getvalue().splitlines()[-1]

    @property
    def rate(self) -> int:
        """Of the last line."""
        return int(re.findall(r"(\d+) tokens/s", self._text.getvalue())[-1])


def test_the_rate_is_that_of_this_run_on_a_pool_that_was_used_before(clock):
    shown = Shown(clock)
    stats = shown.report(USED, 3.0)
    other = shown.report(msgspec.structs.replace(USED, dp_rank=1, generated_tokens=7), 0.0)
    stats = shown.report(stats, 4.0, generated_tokens=100)
    shown.report(other, 6.0, generated_tokens=200)
    assert shown.rate == 30


def test_the_rate_does_not_forget_what_ranks_counted_before_they_were_started_anew(clock):
    shown = Shown(clock)
    stats = shown.report(USED, 0.0)
    shown.report(stats, 5.0, generated_tokens=500)
    assert shown.rate == 100
    anew = shown.report(RankStats(0, generated_tokens=20), 0.0)
    shown.report(anew, 5.0, generated_tokens=480)
    assert shown.rate == 100


def test_the_share_outside_the_model_is_that_of_this_run(clock):
    shown = Shown(clock)
    stats = shown.report(USED, 0.0)
    shown.report(stats, 1.0, decode_seconds=10.0, decode_model_seconds=9.0)
    assert shown.progress.summary().endswith("; 10% of decode steps outside the model")


def test_nothing_is_said_of_the_model_where_steps_overlap_and_its_time_is_unknown(clock):
    shown = Shown(clock)
    stats = shown.report(RankStats(0), 0.0)
    shown.report(stats, 1.0, decode_seconds=10.0)
    assert shown.progress.summary().endswith("tokens/s")


def test_the_time_left_is_told_once_something_has_finished_and_until_everything_has(clock):
    shown = Shown(clock, total=300)
    stats = shown.report(msgspec.structs.replace(USED, running=2, waiting=7), 6.0)
    assert shown.last_line == "0 of 300 requests, 0 tokens/s, running/waiting [0] 2/7"
    shown.finish(3, 0.0)
    stats = shown.report(stats, 6.0, generated_tokens=60)
    assert shown.last_line == "3 of 300 requests, 10 tokens/s, about 20 min left, running/waiting [0] 2/7"
    shown.finish(296, 1188.0)
    shown.report(stats, 5.0)
    assert shown.last_line.startswith("299 of 300 requests, 0 tokens/s, about 4 s left, ")
    shown.finish(1, 0.0)
    shown.report(stats, 5.0)
    assert shown.last_line == "300 of 300 requests, 0 tokens/s, running/waiting [0] 2/7"


@pytest.mark.parametrize(
    ("finished", "after_s", "said"),
    [
        (99, 5.0, "about 1 s left"),
        (50, 89.0, "about 89 s left"),
        (50, 90.0, "about 2 min left"),
        (50, 5399.0, "about 90 min left"),
        (50, 5400.0, "about 1.5 h left"),
        (1, 3600.0, "about 99.0 h left"),
    ],
)
def test_the_time_left_is_said_in_seconds_minutes_or_hours(finished, after_s, said, clock):
    shown = Shown(clock, total=100)
    shown.finish(finished - 1, 0.0)
    shown.finish(1, after_s)
    assert f"{finished} of 100 requests, 0 tokens/s, {said}, running/waiting " in shown.last_line


@pytest.mark.parametrize(("width", "is_said"), [(80, False), (100, True)])
def test_a_bar_has_the_time_left_where_it_does_not_take_the_place_of_what_is_there(width, is_said, clock):
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with GenerationProgress(console, 16) as progress:
        for rank in range(2):
            progress.on_stats(msgspec.structs.replace(USED, dp_rank=rank, running=2, waiting=3))
        clock.now += 20.0
        progress.on_completion(10, failed=False)
    last = [line for line in text.getvalue().splitlines() if "running" in line][-1]
    assert "running/waiting [0] 2/3 [1] 2/3 " in last
    assert ("about 5 min left, " in last) == is_said
