"""What check_large.py asks of counters."""

from array import array
from collections.abc import Sequence
from typing import Any

from expert_pool.workers.request import ExpertCounts, RankStats


def totals(counts: ExpertCounts) -> list[int]:
    """Pairs counted in each layer."""
    numbers, sums, begin = array("q", counts.counts), [], 0
    for num_experts in counts.num_experts:
        sums.append(sum(numbers[begin : begin + num_experts]))
        begin += num_experts
    return sums


def counting_problems(
    before: Sequence[ExpertCounts],
    after: Sequence[ExpertCounts],
    stats_before: Sequence[RankStats],
    stats_after: Sequence[RankStats],
    new_tokens: int,
    top_k: int,
) -> list[str]:
    """What is wrong with the pairs that each DP rank counted in a generation of requests of `new_tokens` each.

    A rank forwards its prompts and all tokens but each request's last. Beside them it may run a dummy token in each
    step that it is idle in.
    """
    problems = []
    for dp_rank, (earlier, later, then, now) in enumerate(zip(before, after, stats_before, stats_after, strict=True)):
        grown = [new - old for old, new in zip(totals(earlier), totals(later), strict=True)]

        def more(name: str, then: Any = then, now: Any = now) -> int:
            return int(getattr(now, name) - getattr(then, name))

        generated = more("generated_tokens")
        forwarded = more("prompt_tokens") + generated - generated // new_tokens
        fewest, most = top_k * forwarded, top_k * (forwarded + more("idle_steps"))
        if forwarded == 0 or len(set(grown)) != 1 or not fewest <= grown[0] <= most:
            problems.append(f"DP rank {dp_rank} counted {sorted(set(grown))} a layer, wanted {fewest} to {most}")
    return problems
