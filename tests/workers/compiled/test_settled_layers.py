"""Ranks with `worker.compile` on run what they compiled while they loaded, and nothing else, or all run uncompiled.

PyTorch's `eager` backend stands behind torch.compile here, as in `test_compiled_regions`.
"""

from typing import Any

import pytest
from expert_pool.cluster import Limits, PoolConfig, WorkerConfig
from expert_pool.workers.compiled.regions import graphs_so_far
from expert_pool.workers.engine import RankEngine
from plain_ranks import record_all, run_on_ranks
from rank_insides import run_script

PROMPTS = [[5, 9, 2, 17, 3], [4], [11, 7, 8]]
NEW_TOKENS = 6


def config_of(model: str, plugin: str) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=2,
        plugins=(plugin,),
        limits=Limits(max_running_requests=4, cuda_graph_bs=(1, 2, 4)),
        worker=WorkerConfig(compile=True),
    )


def generated(engine: RankEngine) -> tuple[Any, int, str]:
    """Tokens, regions that were compiled while graphs were recorded and run, and what runs in the layers."""
    before = graphs_so_far()
    record_all(engine)
    arrivals = [{0: [PROMPTS[0]], 2: [PROMPTS[1]]}, {1: [PROMPTS[2]]}]
    tokens = run_script(engine, arrivals, NEW_TOKENS, False).token_ids
    return tokens, graphs_so_far() - before, engine.loaded.layers


def test_compiled_ranks_give_the_same_tokens_and_compile_nothing_once_loaded(tiny_moe, references):
    by_rank = run_on_ranks(config_of(tiny_moe, "compiled_eagerly"), generated, graphs=False)
    found = {key: token_ids for tokens, _, _ in by_rank for key, token_ids in tokens.items()}
    assert found == {key: references["tiny_moe"].greedy(prompt, NEW_TOKENS) for key, prompt in enumerate(PROMPTS)}
    assert [since for _, since, _ in by_rank] == [0, 0]
    assert len({said for _, _, said in by_rank}) == 1
    assert "4 Qwen3MoeDecoderLayer" in by_rank[0][2]


@pytest.mark.long
def test_what_one_rank_cannot_compile_no_rank_runs_compiled(tiny_moe, references):
    by_rank = run_on_ranks(config_of(tiny_moe, "refused_compile"), generated, graphs=False)
    said = "uncompiled: compiled layers dropped on all ranks: rank 1: ConfigError: no compiler here"
    assert [text for _, _, text in by_rank] == [said] * 2
    found = {key: token_ids for tokens, _, _ in by_rank for key, token_ids in tokens.items()}
    assert found == {key: references["tiny_moe"].greedy(prompt, NEW_TOKENS) for key, prompt in enumerate(PROMPTS)}
