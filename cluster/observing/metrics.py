"""The pool's metrics, through `ray.util.metrics`, which exports them as `ray_<name>` on every node.

Ranks keep plain counters and report them; the driver sets the metrics from those reports, at most once a second for
each DP rank. No step and no rank calls Ray for them.
"""

import time
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from ...dispatch.budgets.layout import Layout
from ...workers.request import STEP_TIME_BOUNDS_S, ExpertCounts, RankStats

LOAD_INTERVAL_S = 1.0
_INTERVAL_S = 1.0


class Declaration(NamedTuple):
    """One metric; every one also has the tag `pool`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    tags: tuple[str, ...]
    description: str


METRICS = (
    Declaration("expert_pool_generated_tokens", "counter", ("dp_rank",), "Tokens sampled."),
    Declaration("expert_pool_prompt_tokens", "counter", ("dp_rank",), "Tokens prefilled, after preemptions again."),
    Declaration("expert_pool_requests_running", "gauge", ("dp_rank",), "Requests being prefilled or decoded."),
    Declaration("expert_pool_requests_waiting", "gauge", ("dp_rank",), "Requests not admitted yet, on their DP rank."),
    Declaration("expert_pool_preemptions", "counter", ("dp_rank",), "Requests sent back because KV blocks ran out."),
    Declaration("expert_pool_kv_cache_use", "gauge", ("dp_rank",), "Share of KV blocks in use, 0 to 1."),
    Declaration("expert_pool_steps", "counter", ("dp_rank",), "Steps, idle ones included."),
    Declaration("expert_pool_replayed_steps", "counter", ("dp_rank",), "Steps that replayed a graph."),
    Declaration("expert_pool_mixed_steps", "counter", ("dp_rank",), "Steps that decoded and prefilled on the DP rank."),
    Declaration("expert_pool_idle_steps", "counter", ("dp_rank",), "Steps in which the DP rank had nothing to run."),
    Declaration("expert_pool_step_time_seconds", "histogram", ("dp_rank",), "Time of a step, its agreement included."),
    Declaration("expert_pool_step_seconds", "counter", ("dp_rank",), "Time of all steps together."),
    Declaration("expert_pool_agreement_seconds", "counter", ("dp_rank",), "Of that, time spent in agreements."),
    Declaration("expert_pool_dispatched_rows", "counter", ("rank",), "Rows handed to every MoE layer, with padding."),
    Declaration(
        "expert_pool_expert_load_imbalance",
        "gauge",
        ("layer",),
        "Tokens of a layer's busiest expert over the mean of its experts; needs worker.expert_load.",
    ),
    Declaration(
        "expert_pool_rank_load_imbalance",
        "gauge",
        ("layer",),
        "Tokens for the experts of the busiest rank over the mean of ranks; needs worker.expert_load.",
    ),
    Declaration("expert_pool_restarts", "counter", (), "Times that all ranks were started anew after a failure."),
)

_COUNTED = {
    "expert_pool_generated_tokens": "generated_tokens",
    "expert_pool_prompt_tokens": "prompt_tokens",
    "expert_pool_preemptions": "preemptions",
    "expert_pool_steps": "steps",
    "expert_pool_replayed_steps": "replayed_steps",
    "expert_pool_mixed_steps": "mixed_steps",
    "expert_pool_idle_steps": "idle_steps",
    "expert_pool_step_seconds": "step_seconds",
    "expert_pool_agreement_seconds": "agree_seconds",
}

# Ranks count steps by bucket, so a step is observed as the middle of its bucket; sums come from `step_seconds`.
_STEP_TIMES = tuple(
    (low + high) / 2
    for low, high in zip((0.0, *STEP_TIME_BOUNDS_S), (*STEP_TIME_BOUNDS_S, 2 * STEP_TIME_BOUNDS_S[-1]), strict=True)
)


def pool_label() -> str:
    """What the pool is called in metrics and logs: the driver actor's name, or the beginning of its id."""
    if not ray.is_initialized():
        return "none"
    context = ray.get_runtime_context()
    return context.get_actor_name() or (context.get_actor_id() or "none")[:8]


class PoolMetrics:
    """Sets the metrics of one pool; lives in its driver.

    Args:
        pool: its name.
    """

    def __init__(self, pool: str):
        self._layout = Layout(world_size=1)
        self._metrics: dict[str, Any] = {one.name: _make(one, pool) for one in METRICS}
        self._counted: dict[int, RankStats] = {}
        self._counted_at: dict[int, float] = {}
        self._expert_counts: list[array[int]] | None = None

    def begin(self, layout: Layout) -> None:
        """Ranks begin, in this arrangement, and count from zero; those of before, if any, are gone."""
        before = tuple(self._counted)
        self._layout = layout
        self._counted.clear()
        self._counted_at.clear()
        self._expert_counts = None
        for dp_rank in before:
            for name in ("expert_pool_requests_running", "expert_pool_requests_waiting", "expert_pool_kv_cache_use"):
                self._metrics[name].set(0, {"dp_rank": str(dp_rank)})

    def report(self, stats: RankStats, at_once: bool = False) -> None:
        """A DP rank reported; counts come from the difference to what it said when it was last taken in.

        Args:
            stats: its counters.
            at_once: take it in however soon it comes after the one before; for the last one.
        """
        now, dp_rank = time.monotonic(), stats.dp_rank
        may_wait = not at_once and (stats.running or stats.waiting)
        if may_wait and now - self._counted_at.get(dp_rank, float("-inf")) < _INTERVAL_S:
            return
        before = self._counted.get(dp_rank, RankStats(dp_rank))
        self._counted[dp_rank], self._counted_at[dp_rank] = stats, now
        tags = {"dp_rank": str(dp_rank)}
        for name, attribute in _COUNTED.items():
            self._count(name, getattr(stats, attribute) - getattr(before, attribute), tags)
        for middle, steps in zip(_STEP_TIMES, _grown(stats.step_times, before.step_times), strict=False):
            for _ in range(steps):
                self._metrics["expert_pool_step_time_seconds"].observe(middle, tags)
        for rank, rows in zip(
            self._layout.ranks_of(dp_rank), _grown(stats.dispatched_rows, before.dispatched_rows), strict=False
        ):
            self._count("expert_pool_dispatched_rows", rows, {"rank": str(rank)})
        self._metrics["expert_pool_requests_running"].set(stats.running, tags)
        self._metrics["expert_pool_requests_waiting"].set(stats.waiting, tags)
        if stats.num_kv_blocks:
            self._metrics["expert_pool_kv_cache_use"].set(1 - stats.free_kv_blocks / stats.num_kv_blocks, tags)

    def report_expert_load(self, counts: Sequence[ExpertCounts | None]) -> None:
        """The leaders of all DP ranks said how often experts were chosen since their start."""
        layers = _summed([one for one in counts if one is not None])
        before, self._expert_counts = self._expert_counts, layers
        for layer, now in enumerate(layers):
            chosen = list(now) if before is None else _grown(now, before[layer])
            if sum(chosen) == 0:
                continue
            tags = {"layer": str(layer)}
            own = len(chosen) // self._layout.world_size
            by_rank = [sum(chosen[first : first + own]) for first in range(0, len(chosen), own)]
            self._metrics["expert_pool_expert_load_imbalance"].set(imbalance(chosen), tags)
            self._metrics["expert_pool_rank_load_imbalance"].set(imbalance(by_rank), tags)

    def restarted(self) -> None:
        """All ranks are started anew after a failure."""
        self._metrics["expert_pool_restarts"].inc()

    def _count(self, name: str, amount: float, tags: dict[str, str]) -> None:
        if amount > 0:
            self._metrics[name].inc(amount, tags)


def imbalance(loads: Sequence[int]) -> float:
    """The largest load over the mean, 1 where all are equal; `loads` are not all zero."""
    return max(loads) * len(loads) / sum(loads)


def _summed(counts: Sequence[ExpertCounts]) -> list["array[int]"]:
    """Counts of each layer's experts over all DP ranks."""
    layers: list[array[int]] = []
    for one in counts:
        numbers, first = array("q", one.counts), 0
        for layer, num_experts in enumerate(one.num_experts):
            own = numbers[first : first + num_experts]
            first += num_experts
            if layer == len(layers):
                layers.append(own)
            else:
                layers[layer] = array("q", [a + b for a, b in zip(layers[layer], own, strict=True)])
    return layers


def _grown(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """What each counter grew by; before there were any, they were zero."""
    return [value - (before[index] if before else 0) for index, value in enumerate(now)]


def _make(declared: Declaration, pool: str) -> Any:
    tags = ("pool", *declared.tags)
    if declared.kind == "histogram":
        bounds = list(STEP_TIME_BOUNDS_S)
        return Histogram(declared.name, declared.description, bounds, tags).set_default_tags({"pool": pool})
    kind = Counter if declared.kind == "counter" else Gauge
    return kind(declared.name, declared.description, tags).set_default_tags({"pool": pool})
