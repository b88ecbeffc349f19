"""Greedy tokens equal those of Transformers, whatever the family, the layout and the dispatch.

The suite runs a seeded sample, three cases a family; `make test-matrix` runs all of them.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from expert_pool.cluster import Limits, PoolConfig
from expert_pool.graphs.plan import CapturePlan
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.step_plan import EAGER_NO_GRAPHS
from models import FAMILIES, VOCAB_SIZE
from plain_ranks import ForkedRanks
from rank_insides import Generated, run_script

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
    chosen = random.Random(216)  # a seed whose sample has every layout with every dispatch
    return [
        (family, *case) for family in FAMILIES for case in (layouts if whole else sorted(chosen.sample(layouts, 2)))
    ]


def without_graphs(engine: RankEngine, *arguments: Any) -> Generated:
    """As a pool that committed none."""
    engine.graphs.commit_plan(CapturePlan(()))
    return run_script(engine, *arguments)


def tokens_of(by_rank: list[Generated]) -> dict[int, tuple[int, ...]]:
    return {key: token_ids for generated in by_rank for key, token_ids in generated.token_ids.items()}


@pytest.mark.parametrize(("family", "ranks", "attn_tp_size", "dispatch"), cases())
def test_greedy_tokens_equal_transformers(family, ranks, attn_tp_size, dispatch, random_models, references):
    """With graphs and without; of the steps in which every busy rank decodes all replay, and every rank reports it."""
    limits = Limits(chunked_prefill_size=64, max_running_requests=len(PROMPT_LENGTHS), cuda_graph_bs=(1, 2, 4, 7))
    config = PoolConfig(
        model=random_models[family], ranks=ranks, attn_tp_size=attn_tp_size, dispatch=dispatch, limits=limits
    )
    dp_size = config.layout.dp_size
    split = [prompts_of(PROMPT_LENGTHS)[dp_rank::dp_size] for dp_rank in range(dp_size)]
    arrivals = [{0: mine} for mine in split]
    with ForkedRanks(config) as rank_set:
        replayed = rank_set.call(run_script, arrivals, NEW_TOKENS, False)
        eager = rank_set.call(without_graphs, arrivals, NEW_TOKENS, False)

    expected = [references[family].greedy(prompt, NEW_TOKENS) for mine in split for prompt in mine]
    assert tokens_of(replayed) == tokens_of(eager) == dict(enumerate(expected))
    for with_graphs, without in zip(replayed, eager, strict=True):
        decodes = [step for step in with_graphs.steps if set(step.kinds) <= {"IDLE", "DECODE"}]
        replays = Counter()
        for use in with_graphs.report.graphs:
            replays[use.entry.kind] += use.replays
        assert len(decodes) > 0
        assert replays["piecewise"] > 0
        assert replays["decode"] == len(decodes)
        assert all(step.graph is not None and step.graph.bucket >= max(step.num_tokens) for step in decodes)
        assert not with_graphs.report.eager_steps
        assert replays["decode"] + replays["piecewise"] == len(with_graphs.steps)
        assert without.report.replays == 0
        assert {step.eager_reason for step in without.steps} == {EAGER_NO_GRAPHS}
        assert all(step.graph is None for step in without.steps)
