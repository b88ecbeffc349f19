"""8 and 16 ranks on one machine generate what Transformers does: `make test-scale`."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from conftest import Reference
from expert_pool.cluster import CacheConfig, ExpertPool, Limits, PoolConfig, RecoveryConfig, SamplingParams
from models import VOCAB_SIZE, save_random_model
from plain_ranks import ForkedRanks
from rank_insides import run_script

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_EXPERTS = 16
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As many experts as the most ranks."""
    folder = tmp_path_factory.mktemp("many_experts")
    save_random_model("qwen3_moe", folder, num_experts=NUM_EXPERTS, num_hidden_layers=2)
    return str(folder)


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    return Reference(model)


def prompts_of(count: int) -> list[list[int]]:
    """Of unequal lengths, so that ranks prefill and decode at different times."""
    return [
        [(11 * index + 3 * position) % (VOCAB_SIZE - 2) + 2 for position in range(1 + 5 * index % 23)]
        for index in range(count)
    ]


def config_of(model: str, ranks: int, attn_tp_size: int, dispatch: Any) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=Limits(chunked_prefill_size=16, max_running_requests=4, cuda_graph_bs=(1, 2, 4)),
        cache=CacheConfig(num_tokens=1024),
        recovery=RecoveryConfig(max_restarts=0),
    )


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
@pytest.mark.parametrize(("ranks", "attn_tp_size"), [(8, 1), (8, 8), (16, 1), (16, 4)])
def test_many_ranks_generate_as_transformers_does(ranks, attn_tp_size, dispatch, model, reference):
    """Half of the batches are busy, and the others idle beside them."""
    config = config_of(model, ranks, attn_tp_size, dispatch)
    dp_size = config.layout.dp_size
    prompts = prompts_of(2 * max(1, dp_size // 2))
    split = [prompts[2 * dp_rank : 2 * dp_rank + 2] for dp_rank in range(dp_size)]
    with ForkedRanks(config) as rank_set:
        by_rank = rank_set.call(run_script, [{0: mine} for mine in split], NEW_TOKENS, False)
    tokens = {key: token_ids for generated in by_rank for key, token_ids in generated.token_ids.items()}
    assert tokens == {index: reference.greedy(prompt, NEW_TOKENS) for index, prompt in enumerate(prompts)}
    assert all(any(step.graph is not None for step in generated.steps) for generated in by_rank)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_pool_of_many_actors_generates_as_transformers_does(ranks, session, model, reference):
    prompts = prompts_of(ranks + 3)
    with ExpertPool.launch(config_of(model, ranks, 1, "auto")) as pool:
        tokens = {one.index: one.token_ids for one in pool.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS))}
        status = pool.status()
    assert tokens == {index: reference.greedy(prompt, NEW_TOKENS) for index, prompt in enumerate(prompts)}
    assert [report.rank for report in status.graphs] == list(range(ranks))
    assert len({report.replays for report in status.graphs}) == 1
    assert status.graphs[0].replays > 0
