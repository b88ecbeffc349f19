"""`expert-pool plan`: what it prints is what is allocated, and a configuration that cannot work says all of why."""

import re

import msgspec
import pytest
import ray
import torch
import yaml
from click.testing import CliRunner
from expert_pool.cluster import CacheConfig, ConfigError, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.planning.validation import validate
from expert_pool.dispatch.budgets.capacity import CAPACITY_VARIABLE
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.budgets.path_settings import budget_for, row_formats
from expert_pool.dispatch.budgets.step_kinds import kinds_of
from expert_pool.dispatch.collectives import Collectives
from expert_pool.dispatch.experts.cutedsl import cutedsl_problems
from expert_pool.dispatch.experts.pairs.pair_budget import pair_budget, pair_budget_for
from expert_pool.dispatch.experts.pairs.pair_buffers import PairBuffers
from expert_pool.dispatch.registry import dispatcher_of
from expert_pool.dispatch.way import RankParts
from expert_pool.graphs.static import StaticBuffers
from expert_pool.workers.attention.kv_cache import KvCache
from expert_pool.workers.graph_set import buffer_specs
from expert_pool.workers.speculation.draft import draft_cache
from models import FAMILIES

CPU = torch.device("cpu")
ON_GPU = {"dtype": "bfloat16", "worker": {"device": "cuda"}}


def plan(folder, tmp_path, exit_code=0, **settings) -> str:
    """What the command prints for these settings, given as a file."""
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump({"model": folder, **settings}))
    result = CliRunner().invoke(main, ["plan", "--config", str(path)])
    assert result.exit_code == exit_code, result.output
    assert not ray.is_initialized()
    return result.output


def printed(output: str, what: str) -> tuple[int | None, int]:
    """Rows and bytes that the table gives for a buffer."""
    [line] = [line for line in output.splitlines() if re.match(rf"│ {re.escape(what)} +│", line)]
    rows, num_bytes = (cell.strip().replace(",", "") for cell in line.split("│")[2:4])
    return int(rows) if rows else None, int(num_bytes)


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
@pytest.mark.parametrize("family", FAMILIES)
def test_h10_bytes_printed_equal_bytes_allocated(family, dispatch, random_models, tmp_path):
    limits = {"chunked_prefill_size": 96, "max_running_requests": 24}
    if dispatch == "alltoall":
        limits["max_dispatch_tokens_per_rank"] = 100
    settings = {
        "ranks": 4,
        "attn_tp_size": 2,
        "dispatch": dispatch,
        "cache": {"num_tokens": 1024, "block_size": 8},
    }
    output = plan(random_models[family], tmp_path, limits=limits, **settings)
    config = plan_pool(
        PoolConfig(
            model=random_models[family],
            ranks=4,
            attn_tp_size=2,
            dispatch=dispatch,
            cache=CacheConfig(num_tokens=1024, block_size=8),
            limits=Limits(**limits),
        )
    ).config

    dispatcher = dispatcher_of(config.dispatch).make(RankParts(config, 0, Collectives({}), None, CPU))
    names = ("dispatch: send", "dispatch: receive", "dispatch: combine")
    assert sum(printed(output, name)[1] for name in names) == dispatcher.num_bytes
    assert printed(output, "dispatch: send")[1] == dispatcher.buffers.send.nbytes
    assert printed(output, "dispatch: combine")[1] == dispatcher.buffers.returned.nbytes
    rows = {printed(output, name)[0] for name in names}
    assert rows == {4 * (100 if dispatch == "alltoall" else 48)}
    assert dispatcher.buffers.receive.nbytes == rows.pop() * max(
        row_format.row_bytes for row_format in row_formats(config.spec)
    )

    dtype = getattr(torch, config.spec.dtype)
    cache = KvCache(config.spec.attention, config.num_blocks, config.block_size, dtype, CPU)
    assert printed(output, "KV cache") == (1024 + 8, cache.num_bytes)
    total = sum(printed(output, name)[1] for name in (*names, "KV cache", "dense weights", "experts", "graph inputs"))
    assert printed(output, "total")[1] == total


@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])
def test_the_buffers_of_a_rank_have_the_capacity_of_its_configuration(dispatch, tiny_moe):
    report = plan_pool(PoolConfig(model=tiny_moe, ranks=2, dispatch=dispatch))
    assert report.config.capacity == {"allgather": 2048, "alltoall": 4096}[dispatch]
    assert budget_for(report.config).capacity == report.config.capacity


def test_a_single_rank_exchanges_nothing(tiny_moe, tmp_path):
    output = plan(tiny_moe, tmp_path, ranks=1)
    assert "dispatch local" in output
    assert "dispatch: send" not in output
    assert "capacity: 2,048 rows a rank, by limits.max_prefill_tokens, by default limits.chunked_prefill_size" in output


def test_h10_plan_shows_the_workspace_and_expert_rows_of_cutedsl_experts(tiny_moe, tmp_path):
    limits = {"max_dispatch_tokens_per_rank": 2048}
    output = plan(tiny_moe, tmp_path, ranks=4, dispatch="alltoall", experts="cutedsl", dtype="bfloat16", limits=limits)
    assert "FlashInfer" in output
    assert "generate would refuse: experts='cutedsl' does not run on worker.device='cpu'" in output
    settings = PoolConfig(
        model=tiny_moe, ranks=4, dispatch="alltoall", experts="cutedsl", dtype="bfloat16", limits=Limits(**limits)
    )
    budget = pair_budget_for(plan_pool(settings).config)
    assert budget.num_rows == 4 * 2048
    parts = ("routing", "hidden", "outputs")
    planned = [printed(output, f"experts: {part}") for part in parts]
    assert {rows for rows, _ in planned} == {4 * 2048 * 2}, "each row with both of its experts on one rank"
    assert planned[2][1] == 4 * 2048 * 2 * 256 * 2
    assert sum(num_bytes for _, num_bytes in planned) == PairBuffers(budget, CPU).num_bytes


def test_h15_buffers_of_cutedsl_experts_hold_the_largest_of_each_layer():
    shapes = [MoeShape("narrow", 8, 512, 8, "float32", 64), MoeShape("wide", 32, 256, 2, "float32", 384)]
    buffers = PairBuffers(pair_budget(10, shapes, ep_size=2), CPU)
    for shape in shapes:
        views = buffers.views(shape, 10)
        num_pairs = 10 * min(shape.top_k, shape.num_experts // 2)
        assert views.hidden_PI.shape == (num_pairs, shape.intermediate_size)
        assert views.output_PH.shape == (num_pairs, shape.hidden_size)
        assert views.offsets.shape == (shape.num_experts // 2 + 1,)
        assert views.position_RK.shape == (10 * shape.top_k,)


@pytest.mark.parametrize("family", FAMILIES)
def test_cutedsl_experts_are_refused_for_models_that_they_cannot_compute(family, random_models):
    settings = {"model": random_models[family], "ranks": 2, "experts": "cutedsl", "worker": WorkerConfig(device="cuda")}
    problems = plan_pool(PoolConfig(**settings, dtype="bfloat16")).problems
    if family == "gpt_oss":
        [problem] = problems
        assert "cannot run gpt_oss's experts: they have biases and their weights are stored transposed" in problem
        assert "set experts to 'torch'" in problem
    else:
        assert problems == ()
    half = plan_pool(PoolConfig(**settings, dtype="float16")).problems
    assert "experts='cutedsl' computes in bfloat16, the pool's dtype is float16" in half[0]
    twice, *_ = plan_pool(PoolConfig(**settings, dtype="bfloat16", dispatch="mega")).problems
    assert twice.startswith("experts='cutedsl' and dispatch='mega' both compute experts")


@pytest.mark.parametrize("family", FAMILIES)
def test_triton_experts_are_refused_for_models_that_they_cannot_compute(family, random_models):
    settings = {"model": random_models[family], "ranks": 2, "experts": "triton", "worker": WorkerConfig(device="cuda")}
    for dtype in ("bfloat16", "float16"):
        problems = plan_pool(PoolConfig(**settings, dtype=dtype)).problems
        if family == "gpt_oss":
            [problem] = problems
            assert "cannot run gpt_oss's experts: they have biases and their weights are stored transposed" in problem
            assert problem.endswith("set experts to 'torch'")
        else:
            assert problems == ()
    single, *_ = plan_pool(PoolConfig(**settings, dtype="float32")).problems
    assert single == (
        "experts='triton' computes in bfloat16 or float16, the pool's dtype is float32: set dtype to one of them"
    )
    refusals = plan_pool(PoolConfig(**settings | {"worker": WorkerConfig()}, dtype="bfloat16")).refusals
    assert any("experts='triton' does not run on worker.device='cpu', only on GPUs" in said for said in refusals)


def test_one_gpu_plans_buffers_of_all_experts_that_it_measures(tiny_moe, tmp_path):
    alone = {
        experts: sum(
            printed(plan(tiny_moe, tmp_path, ranks=1, experts=experts, **ON_GPU), f"experts: {part}")[1]
            for part in ("routing", "hidden", "outputs")
        )
        for experts in ("cutedsl", "triton")
    }
    output = plan(tiny_moe, tmp_path, ranks=1, **ON_GPU)
    assert "dispatch measured" in output
    assert printed(output, "dispatch: measured paths") == (None, sum(alone.values()))
    assert alone["cutedsl"] == alone["triton"] > 0


def test_cutedsl_experts_are_refused_for_sizes_that_are_not_aligned(tiny_moe):
    settings = {"model": tiny_moe, "ranks": 2, "experts": "cutedsl", "dtype": "bfloat16"}
    config = plan_pool(PoolConfig(**settings, worker=WorkerConfig(device="cuda"))).config
    assert cutedsl_problems(config) == ()
    odd = tuple(msgspec.structs.replace(layer, intermediate_size=100) for layer in config.spec.moe)
    spec = msgspec.structs.replace(config.spec, moe=odd)
    [problem] = cutedsl_problems(msgspec.structs.replace(config, spec=spec))
    assert "multiples of 8, qwen3_moe has 100: set experts to 'torch'" in problem


def test_a_pool_of_cutedsl_experts_without_exchange_shows_their_buffers(tiny_moe, tmp_path):
    output = plan(tiny_moe, tmp_path, ranks=1, experts="cutedsl", dtype="bfloat16", worker={"device": "cuda"})
    assert printed(output, "experts: outputs") == (2048 * 2, 2048 * 2 * 256 * 2)
    assert "generate would refuse" not in output


def test_h11_plan_sizes_the_allgather_for_every_batch(tiny_moe, tmp_path):
    output = plan(tiny_moe, tmp_path, ranks=4, dispatch="allgather", limits={"max_prefill_tokens": 3000})
    assert printed(output, "dispatch: receive")[0] == 4 * 3000
    assert "capacity: 3,000 rows a rank, by limits.max_prefill_tokens" in output


def test_plan_names_the_term_of_each_bound(tiny_moe, tmp_path, monkeypatch):
    monkeypatch.setenv(CAPACITY_VARIABLE, "6000")
    output = plan(
        tiny_moe,
        tmp_path,
        ranks=2,
        dispatch="alltoall",
        limits={
            "chunked_prefill_size": 512,
            "max_running_requests": 300,
            "speculative_algorithm": "EAGLE",
            "speculative_num_draft_tokens": 8,
        },
    )
    for line in (
        "prefill step: 512 tokens a batch, by limits.chunked_prefill_size",
        "tokens per request: 8 tokens, by target_verify",
        "largest step: 2,400 tokens a batch, by limits.max_running_requests x 8 tokens a request",
        "largest forward: 2,400 tokens a batch, by limits.max_running_requests x 8 tokens a request",
        "capacity: 6,000 rows a rank, by EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK",
        "capacity needed: 2,400 rows a rank, by limits.max_running_requests x 8 tokens a request",
    ):
        assert line in output


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE"])
def test_plan_lists_the_graphs_of_every_kind(algorithm, tiny_moe, tmp_path):
    limits = {
        "chunked_prefill_size": 64,
        "max_running_requests": 6,
        "speculative_algorithm": algorithm,
        "speculative_num_draft_tokens": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_steps": 2,
    }
    output = plan(tiny_moe, tmp_path, ranks=2, limits=limits)
    assert "graphs of piecewise, in tokens: 16, 32, 64\n" in output
    listed = dict(re.findall(r"graphs of (\w+), in requests x (\d+) tokens[^:]*: 1, 2, 4, 6\n", output))
    given = Limits(**limits)
    by_request = [kind for kind in kinds_of(given) if kind.unit == "requests"]
    assert listed == {kind.name: str(kind.width(given)) for kind in by_request}
    assert ("each for 2 draft layers" in output) == (algorithm == "MULTI_LAYER_EAGLE")


def test_plan_without_graphs_says_so(tiny_moe, tmp_path):
    output = plan(tiny_moe, tmp_path, ranks=2, limits={"disable_cuda_graph": True})
    assert "graphs: none" in output
    assert "graph inputs" not in output


def test_plan_of_a_bad_configuration_lists_every_problem(tiny_moe, tmp_path):
    output = plan(
        tiny_moe,
        tmp_path,
        exit_code=2,
        ranks=3,
        dispatch="alltoall",
        experts="cutedsl",
        limits={"max_prefill_tokens": 16384, "max_dispatch_tokens_per_rank": 100},
    )
    problems = [line for line in output.splitlines() if line.startswith("would fail: ")]
    assert len(problems) == 4
    for said, problem in zip(
        (
            "cannot be divided over ranks=3",
            "is below the 2048 rows",
            "below the 16384 tokens of the largest forward",
            "experts='cutedsl' computes in bfloat16, the pool's dtype is float32",
        ),
        problems,
        strict=True,
    ):
        assert said in problem
    assert "dispatch: FlashInfer" in output, "sizes are shown all the same"


def test_h11_plan_reports_a_step_above_the_allgather_buffers(tiny_moe, tmp_path):
    limits = {"max_prefill_tokens": 256, "disable_piecewise_cuda_graph": True}
    output = plan(tiny_moe, tmp_path, exit_code=2, ranks=2, dispatch="allgather", limits=limits)
    assert "would fail: a step may hold 2048 tokens of a batch" in output


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_roles_can_be_planned_for(mode, tiny_moe, tmp_path):
    output = plan(tiny_moe, tmp_path, ranks=2, limits={"disaggregation_mode": mode})
    assert f"role {mode}" in output
    assert f"generate would refuse: limits.disaggregation_mode='{mode}'" in output


def test_plan_says_that_a_capacity_rests_where_nothing_uses_it(tiny_moe, tmp_path):
    limits = {"max_dispatch_tokens_per_rank": 1}
    output = plan(tiny_moe, tmp_path, ranks=2, dispatch="allgather", limits=limits)
    assert "limits.max_dispatch_tokens_per_rank has no effect: dispatch allgather is not an all-to-all" in output


def test_what_a_launch_refuses_a_plan_refuses(tiny_moe):
    config = PoolConfig(model=tiny_moe, ranks=2, min_ranks=4, max_ranks=1, dispatch="alltoall")
    problems = plan_pool(config).problems
    assert problems == (
        "min_ranks=4 is not between 1 and ranks=2: set it so",
        "max_ranks=1 is below ranks=2: set it to that or more",
    )
    with pytest.raises(ConfigError, match="; ".join(problems)):
        validate(config)


def test_a_plan_that_holds_has_no_problems(tiny_moe):
    report = plan_pool(PoolConfig(model=tiny_moe, ranks=2, dispatch="alltoall"))
    assert report.problems == report.refusals == ()
    assert report.total_bytes == sum(buffer.num_bytes for buffer in report.buffers) > 0


@pytest.mark.parametrize("algorithm", ["EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE"])
def test_h10_inputs_of_graphs_and_the_cache_of_drafts_are_allocated_as_printed(algorithm, random_models, tmp_path):
    limits = {
        "max_running_requests": 6,
        "speculative_algorithm": algorithm,
        "speculative_num_draft_tokens": 3,
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 2,
    }
    settings = {"ranks": 2, "cache": {"num_tokens": 512}}
    output = plan(random_models["deepseek_v3"], tmp_path, limits=limits, **settings)
    config = plan_pool(
        PoolConfig(
            model=random_models["deepseek_v3"], ranks=2, cache=CacheConfig(num_tokens=512), limits=Limits(**limits)
        )
    ).config
    buffers = [StaticBuffers(specs, CPU) for specs in buffer_specs(config).values()]
    assert len(buffers) == 2
    assert printed(output, "graph inputs")[1] == sum(buffer.num_bytes for buffer in buffers)
    shapes = draft_cache(config)
    if algorithm == "FROZEN_KV_MTP":
        assert not shapes
        assert "draft KV cache" not in output
    else:
        cache = KvCache(shapes, config.num_blocks, config.block_size, torch.float32, CPU)
        assert printed(output, "draft KV cache")[1] == cache.num_bytes
