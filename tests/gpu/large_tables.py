"""The tables of check_large.py: decode steps beside their floors, scaling from size to size, the bare loop."""

from collections.abc import Mapping, Sequence

import msgspec
from expert_pool.workers.model.spec import ModelSpec
from harness import show
from plain_loop import PROMPT_TOKENS, Measured

BYTES_PER_S = 4.3e12


class PoolStep(msgspec.Struct, frozen=True):
    """Of one number of requests a rank. Milliseconds on rank 0 (medians of replayed steps), but for the mean of all
    ranks' decode steps by `RankStats`; generated tokens a second of the whole pool, prefill included."""

    step_ms: float
    stats_ms: float
    agree_ms: float
    host_ms: float
    tokens_per_s: float


Steps = Mapping[int, PoolStep]


def weight_bytes(spec: ModelSpec, ranks: int, count: int) -> float:
    """Bytes of weights that one rank's step of `count` requests reads: dense ones, and experts that are likely hit."""
    embedding = spec.vocab_size * spec.hidden_size * spec.dtype_bytes
    num_bytes = float(spec.dense_bytes - embedding)
    for layer in spec.moe:
        hit = layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** (ranks * count))
        num_bytes += hit / ranks * spec.expert_bytes / len(spec.moe) / layer.num_experts
    return num_bytes


def floor_ms(spec: ModelSpec, ranks: int, count: int, new_tokens: int) -> float:
    """Milliseconds to read what one rank's step of `count` requests has to read."""
    kv_bytes = count * (PROMPT_TOKENS + new_tokens / 2) * spec.kv_bytes_per_token
    return 1e3 * (weight_bytes(spec, ranks, count) + kv_bytes) / BYTES_PER_S


def show_steps(title: str, spec: ModelSpec, steps: Mapping[int, Steps], new_tokens: int) -> None:
    """Args: `steps` by number of ranks, then by requests a rank."""
    header = ["ranks", "requests a rank", "step ms", "by RankStats", "host ms", "agree us", "floor ms", "step/floor"]
    rows: list[list[object]] = [[*header, "tokens/s", "decode tokens/s"]]
    for ranks, by_count in steps.items():
        for count, one in by_count.items():
            floor = floor_ms(spec, ranks, count, new_tokens)
            times = [f"{value:.3f}" for value in (one.step_ms, one.stats_ms, one.host_ms)]
            beside = [f"{1e3 * one.agree_ms:.0f}", f"{floor:.2f}", f"{one.step_ms / floor:.2f}"]
            rates = [f"{one.tokens_per_s:.0f}", f"{decode_rate(ranks, count, one):.0f}"]
            rows.append([ranks, count, *times, *beside, *rates])
    if len(rows) > 1:
        show(title, rows)


def decode_rate(ranks: int, count: int, step: PoolStep) -> float:
    """Tokens a second while all requests decode."""
    return ranks * count / step.step_ms * 1e3


def show_scaling(steps: Mapping[int, Steps]) -> None:
    """Decode tokens a second a GPU over the smallest size's: at as many requests a rank, and at as many in all."""
    sizes = sorted(ranks for ranks in steps if steps[ranks])
    rows: list[list[object]] = [["from", "to", "alike", "requests a rank", "step ratio", "efficiency", "by whole run"]]
    for small, large in ((sizes[0], size) for size in sizes[1:]):
        for count, one in steps[small].items():
            for alike, other in (("a rank", count), ("in all", small * count / large)):
                if other in steps[large]:
                    there = steps[large][int(other)]
                    per_gpu = decode_rate(large, int(other), there) / large / (decode_rate(small, count, one) / small)
                    whole = there.tokens_per_s / large / (one.tokens_per_s / small)
                    ratio = f"{there.step_ms / one.step_ms:.3f}"
                    rows.append([small, large, alike, f"{count}->{other:g}", ratio, f"{per_gpu:.3f}", f"{whole:.3f}"])
    if len(rows) > 1:
        show("scaling: decode tokens/s a GPU over those of the smaller size", rows)


def show_bare(pool: Steps, plain: Sequence[Measured]) -> None:
    """The pool's step beside the same graphs without Ray; both generate from the same prompts."""
    rows: list[list[object]] = [["requests a rank", "pool ms", "loop ms", "bare ms", "pool/bare", "loop/bare"]]
    for one in plain:
        step = pool[one.requests].step_ms if one.requests in pool else float("nan")
        values = (step, one.loop_ms, one.bare_ms, step / one.bare_ms, one.loop_ms / one.bare_ms)
        rows.append([one.requests, *(f"{value:.3f}" for value in values)])
    if plain:
        show("the pool's step over the same graphs in a bare loop (bound 1.02)", rows)
    profiled = [one for one in plain if one.profile]
    if profiled:
        parts = list(dict.fromkeys(part for one in profiled for part in one.profile))
        lines = [[part, *(f"{one.profile.get(part, 0):.0f}" for one in profiled)] for part in parts]
        show("host, mean microseconds on rank 0", [["requests a rank", *(one.requests for one in profiled)], *lines])


def show_counting(on: Steps, off: Steps) -> None:
    """Steps with `worker.expert_load` beside the same without."""
    rows: list[list[object]] = [["requests a rank", "counting ms", "not counting ms", "ratio"]]
    for count in on:
        if count in off:
            ratio = on[count].step_ms / off[count].step_ms
            rows.append([count, f"{on[count].step_ms:.3f}", f"{off[count].step_ms:.3f}", f"{ratio:.4f}"])
    if len(rows) > 1:
        show("counting how often experts are chosen", rows)
