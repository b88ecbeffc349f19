"""Ranks that share a batch and whose logits differ: the leader's tokens count, on all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, SamplingParams
from expert_pool.workers.engine import RankEngine
from handle import change_logits
from plain_ranks import PlainRanks

PROMPTS = [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
LEADER, FOLLOWER = 0, 1
SAMPLINGS = (
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
)


def other_token(logits_NV: torch.Tensor) -> torch.Tensor:
    """The least likely becomes the most likely."""
    return -logits_NV


def not_a_number(logits_NV: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits_NV, float("nan"))


def change_logits_of(
    engine: RankEngine, ranks: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    if engine.rank in ranks:
        change_logits(engine, change)


def completions(model: str, sampling: SamplingParams, prepare: Callable[[RankEngine], None] | None = None) -> list[Any]:
    config = PoolConfig(
        model=model,
        ranks=2,
        attn_tp_size=2,
        limits=Limits(max_running_requests=4, disable_cuda_graph=True),
        cache=CacheConfig(num_tokens=1024),
    )
    with PlainRanks(config, prepare) as ranks:
        done = ranks.generate(PROMPTS, sampling)
    return [(one.finish_reason, one.token_ids, one.error) for one in done]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("change", [other_token, not_a_number])
def test_logits_of_a_rank_that_does_not_lead_its_batch_change_no_token(change, sampling, random_models):
    model = random_models["qwen3_moe"]
    undisturbed = completions(model, sampling)
    assert {reason for reason, *_ in undisturbed} == {"length"}
    assert completions(model, sampling, partial(change_logits_of, ranks=(FOLLOWER,), change=change)) == undisturbed


def test_logits_that_are_not_finite_on_the_rank_that_leads_a_batch_end_its_requests_with_the_reason(random_models):
    disturbed = partial(change_logits_of, ranks=(LEADER,), change=not_a_number)
    for reason, _, error in completions(random_models["qwen3_moe"], SAMPLINGS[0], disturbed):
        assert reason == "error"
        assert "logits are not finite" in error


def test_every_rank_of_a_batch_continues_from_its_leaders_tokens(random_models):
    """Each computes some of its rows: were one to continue from tokens of its own, they would be of another text."""
    model, sampling = random_models["qwen3_moe"], SAMPLINGS[0]
    led = completions(model, sampling, partial(change_logits_of, ranks=(LEADER,), change=other_token))
    assert led == completions(model, sampling, partial(change_logits_of, ranks=(LEADER, FOLLOWER), change=other_token))
    assert led != completions(model, sampling)
