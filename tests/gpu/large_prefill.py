"""Prefill in one pool: prompts alone, and requests that come and go; for check_large.py."""

import random
import time

import msgspec
from expert_pool.cluster import ExpertPool, SamplingParams
from harness import show

PROMPTS, MIXED = 64, 192
PROMPT_TOKENS, SHORTEST, LONGEST, NEW_TOKENS = 512, 32, 768, 48


class PrefillRates(msgspec.Struct, frozen=True):
    """Of one way to run prefill steps; tokens a second of the whole pool.

    Attributes:
        prompt_rate: prompt tokens, of requests of one new token each.
        mixed_rate: prompt and new tokens, of requests of many lengths that take each other's places.
        eager_steps: steps of both that ran eagerly, by reason.
    """

    prompt_rate: float
    mixed_rate: float
    eager_steps: dict[str, int]


def longest_request(is_tiny: bool) -> int:
    """Tokens of prompt and answer."""
    return _sized(LONGEST, is_tiny) + NEW_TOKENS


def measure_prefill(pool: ExpertPool, is_tiny: bool) -> PrefillRates:
    """Both runs twice, of which the second counts."""
    dp_size, vocab_size = pool.rank_config.layout.dp_size, pool.rank_config.spec.vocab_size
    rng = random.Random(7)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, vocab_size) for _ in range(length))

    alone = [prompt(_sized(PROMPT_TOKENS, is_tiny)) for _ in range(_sized(PROMPTS, is_tiny) * dp_size)]
    bounds = _sized(SHORTEST, is_tiny), _sized(LONGEST, is_tiny)
    mixed = [prompt(rng.randint(*bounds)) for _ in range(_sized(MIXED, is_tiny) * dp_size)]
    rates: dict[str, float] = {}
    before: dict[str, int] = {}
    for _ in range(2):
        before = dict(pool.status().graphs[0].eager_steps)
        for name, batch, new_tokens in (("alone", alone, (1,)), ("mixed", mixed, range(1, NEW_TOKENS + 1))):
            rates[name] = _rate(pool, batch, list(new_tokens))
    after = dict(pool.status().graphs[0].eager_steps)
    eager = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return PrefillRates(rates["alone"], rates["mixed"], {reason: count for reason, count in eager.items() if count})


def _rate(pool: ExpertPool, batch: list[tuple[int, ...]], new_tokens: list[int]) -> float:
    samplings = [
        SamplingParams(max_new_tokens=new_tokens[index % len(new_tokens)], ignore_eos=True)
        for index in range(len(batch))
    ]
    started = time.monotonic()
    completions = list(pool.generate(batch, samplings))
    seconds = time.monotonic() - started
    errors = [completion.error for completion in completions if completion.error]
    if errors or len(completions) != len(batch):
        raise RuntimeError(f"{len(completions)} of {len(batch)} completions, errors {errors[:1]}")
    return (sum(map(len, batch)) + sum(one.num_completion_tokens for one in completions)) / seconds


def _sized(number: int, is_tiny: bool) -> int:
    return max(2, number // 16) if is_tiny else number


def show_prefill(with_graphs: PrefillRates | None, without: PrefillRates | None) -> None:
    rows: list[list[object]] = [["prefill", "prompts alone, tokens/s", "mixed, tokens/s", "eager steps"]]
    for name, rates in (("in graphs", with_graphs), ("eager", without)):
        if rates is not None:
            rows.append([name, f"{rates.prompt_rate:.0f}", f"{rates.mixed_rate:.0f}", f"{rates.eager_steps}"])
    if with_graphs is not None and without is not None:
        ratios = (with_graphs.prompt_rate / without.prompt_rate, with_graphs.mixed_rate / without.mixed_rate)
        rows.append(["graphs over eager", *(f"{ratio:.2f}" for ratio in ratios), ""])
    if len(rows) > 1:
        show("prefill in graphs beside eager prefill, a pool each", rows)
