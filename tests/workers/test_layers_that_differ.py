"""Models whose MoE layers differ, whole: one exchange serves them all, and tokens are those of Transformers."""

from collections.abc import Iterator

import pytest
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.config import resolve_unchecked
from expert_pool.cluster.planning.planned_buffers import planned_buffers
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.budgets.path_settings import row_formats
from expert_pool.dispatch.dispatchers.flashinfer_workspace import flashinfer_workspace_bytes
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.checkpoint import absent_expert_weights, check_weights
from expert_pool.workers.model.inspection import inspect_model
from handle import dispatcher_of
from models import VOCAB_SIZE
from plain_ranks import ForkedRanks
from rank_insides import run_script

NEW_TOKENS = 10
# Experts, width of a row and experts a token, of each layer.
SHAPES = {
    "hunyuan_v1_moe": [(8, 64, 1), (8, 64, 8), (8, 64, 2)],
    "test_latent_moe": [(16, 32, 3), (8, 64, 2), (16, 32, 3)],
}
LAYOUTS = [(1, 1, "allgather"), (2, 1, "allgather"), (2, 1, "alltoall"), (2, 2, "alltoall")]
CASES = [(family, *layout) for family in SHAPES for layout in LAYOUTS]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}ranks-tp{case[2]}-{case[3]}")
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    family, ranks, attn_tp_size, dispatch = request.param
    config = PoolConfig(
        model=random_models[family],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dispatch=dispatch,
        limits=Limits(
            max_running_requests=4,
            cuda_graph_bs=(1, 2, 4),
            chunked_prefill_size=32,
            speculative_algorithm="EAGLE",
            speculative_num_draft_tokens=2,
            speculative_eagle_topk=2,
            speculative_num_steps=2,
        ),
        cache=CacheConfig(num_tokens=1024),
    )
    with ForkedRanks(config) as ranks_of_case:
        yield ranks_of_case


@pytest.mark.parametrize("family", SHAPES)
def test_a_model_is_described_layer_by_layer(family, random_models):
    spec = inspect_model(random_models[family])
    assert [(layer.num_experts, layer.hidden_size, layer.top_k) for layer in spec.moe] == SHAPES[family]
    assert [layer.name for layer in spec.moe] == [f"model.layers.{n}.mlp.experts" for n in range(len(spec.moe))]
    assert spec.hidden_size == 64
    check_weights(spec)


def test_h15_a_plan_has_a_flashinfer_workspace_for_each_row_format(random_models):
    spec = inspect_model(random_models["test_latent_moe"])
    config = PoolConfig(model=spec.path, ranks=2, dispatch="flashinfer", worker=WorkerConfig(device="cuda"))
    resolved = resolve_unchecked(config, spec)
    [planned] = [buffer for buffer in planned_buffers(resolved) if "FlashInfer" in buffer.name]
    first, second, _ = row_formats(spec)
    alone = [flashinfer_workspace_bytes(2, resolved.capacity, [row_format]) for row_format in (first, second)]
    assert planned.num_bytes == sum(alone)
    assert planned.made_of == "ep_size 2 x capacity 4096, for each of 2 row formats"


def exchange_of(engine: RankEngine) -> tuple[int, int] | None:
    buffers = getattr(dispatcher_of(engine), "buffers", None)
    return buffers and (buffers.budget.send_bytes, buffers.budget.combine_bytes)


def test_h15_a_model_of_two_kinds_of_layers_generates_as_transformers_does_and_replays(rank_set, references):
    dp_size, spec = rank_set.rank_config.layout.dp_size, rank_set.rank_config.spec
    prompts = [[(7 * n + 3 * place) % (VOCAB_SIZE - 2) + 2 for place in range(n)] for n in (1, 9, 40, 70, 5, 3, 17, 2)]
    # The DP ranks hold different numbers, and all at once are within the largest bucket.
    split = [prompts[: 2 + dp_rank] if dp_rank == 0 else prompts[2:6] for dp_rank in range(dp_size)]
    by_rank = rank_set.call(run_script, [{0: mine} for mine in split], NEW_TOKENS, False)
    tokens = {key: ids for generated in by_rank for key, ids in generated.token_ids.items()}
    family = spec.model_type
    asked = [prompt for mine in split for prompt in mine]
    assert sorted(tokens) == list(range(len(asked)))
    for key, prompt in enumerate(asked):
        assert tokens[key] == references[family].greedy(prompt, NEW_TOKENS), len(prompt)
    for generated in by_rank:
        decodes = [step for step in generated.steps if set(step.kinds) <= {"IDLE", "DECODE"}]
        assert len(decodes) >= NEW_TOKENS - 1
        assert all(step.graph is not None and step.graph.kind == "decode" for step in decodes)

    rows = rank_set.rank_config.capacity * rank_set.rank_config.layout.world_size
    sizes = {
        (rows * max(f.row_bytes for f in row_formats(spec)), rows * max(f.hidden_bytes for f in row_formats(spec)))
    }
    expected = {None} if rank_set.rank_config.layout.world_size == 1 else sizes
    assert set(rank_set.call(exchange_of)) == expected


def test_weights_of_single_experts_are_counted_by_layer():
    moe = [MoeShape(f"model.layers.{n}.mlp.experts", count, 8, 1, "float32") for n, count in enumerate((2, 4))]
    names = [f"model.layers.{n}.mlp.experts.{e}.w" for n, count in enumerate((2, 4)) for e in range(count)]
    assert absent_expert_weights(names, moe) == []
    assert absent_expert_weights([name for name in names if ".1.mlp.experts.3" not in name], moe) == [
        "model.layers.1.mlp.experts.3.w"
    ]
