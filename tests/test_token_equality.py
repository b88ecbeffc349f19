"""Greedy tokens equal those of Transformers, whatever the family, the layout and the dispatch.

The suite runs a seeded sample, three cases a family; `make test-matrix` runs all of them.
"""

import os
import random

import pytest
from expert_pool.cluster import Limits, PoolConfig, SamplingParams
from models import FAMILIES, VOCAB_SIZE
from plain_ranks import PlainRanks

PROMPT_LENGTHS = (1, 3, 17, 40, 64, 150, 300)
LAYOUTS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))
NEW_TOKENS = 12


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[(7 * length + 3 * position) % (VOCAB_SIZE - 2) + 2 for position in range(length)] for length in lengths]


def cases() -> list[tuple[str, int, int, str]]:
    layouts = [
        (ranks, attn_tp_size, dispatch)
        for ranks, attn_tp_size in LAYOUTS
        for dispatch in ("allgather", "alltoall")
        if ranks > 1 or dispatch == "allgather"
    ]
    whole = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
    chosen = random.Random(2)  # a seed whose sample has every layout with every dispatch
    return [
        (family, *case) for family in FAMILIES for case in (layouts if whole else sorted(chosen.sample(layouts, 3)))
    ]


@pytest.mark.parametrize(("family", "ranks", "attn_tp_size", "dispatch"), cases())
def test_greedy_tokens_equal_transformers(family, ranks, attn_tp_size, dispatch, random_models, references):
    config = PoolConfig(
        model=random_models[family],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=Limits(chunked_prefill_size=64),
    )
    prompts = prompts_of(PROMPT_LENGTHS)
    with PlainRanks(config) as pool:
        completions = pool.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == references[family].greedy(prompt, NEW_TOKENS), len(prompt)
