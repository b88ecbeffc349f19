"""What `generate` says of its rate and its steps: what the ranks' counters gain while it runs, whatever they held."""

import io
import re

import msgspec
import pytest
from expert_pool.cluster import progress as module
from expert_pool.cluster.progress import GenerationProgress
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

    def __init__(self, clock: Clock):
        self._text, self._clock = io.StringIO(), clock
        self.progress = GenerationProgress(Console(file=self._text, width=200), 4)

    def report(self, stats: RankStats, after_s: float, **gained: float) -> RankStats:
        """Some seconds later this rank reports that it has counted so much more."""
        self._clock.now += after_s
        sums = {name: getattr(stats, name) + amount for name, amount in gained.items()}
        self.progress.on_stats(stats := msgspec.structs.replace(stats, **sums))
        return stats

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
