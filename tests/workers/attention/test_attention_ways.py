"""Which attention ranks take, and that whoever has another writes one class and registers it."""

import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expert_pool.cluster import CacheConfig, ConfigError, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.config import resolve_unchecked
from expert_pool.dispatch.way import places
from expert_pool.workers.attention import registry
from expert_pool.workers.attention.kv_sizing import make_attention
from expert_pool.workers.attention.registry import choice, chosen
from expert_pool.workers.attention.way import AttentionWay
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import RankConfig
from expert_pool.workers.sizes.attention import recorded_entries
from expert_pool.workers.start.host_memory import host_need
from handle import attentions_known, keep_registries, target_of
from plain_ranks import ForkedRanks
from rank_insides import run_script
from running_disagreement import NEW_TOKENS

PLUGIN = "joint_attention"


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with the attention, registered for this test alone."""
    keep_registries(monkeypatch.setattr)
    sys.modules.pop(PLUGIN, None)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)


def resolved(model: str, **settings: Any) -> RankConfig:
    config = PoolConfig(model=model, **settings)
    return resolve_unchecked(config, inspect_model(model, config.dtype))


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"worker": WorkerConfig()}, "sdpa", None),
        ({"worker": WorkerConfig(attention="torch")}, "sdpa", None),
        ({"worker": WorkerConfig(device="cuda"), "dtype": "bfloat16"}, "flashinfer", None),
        (
            {"worker": WorkerConfig(device="cuda"), "dtype": "float32"},
            "gathered",
            "FlashInfer attention needs bfloat16 or float16, the model is in float32",
        ),
        (
            {"worker": WorkerConfig(device="cuda", attention="torch"), "dtype": "bfloat16"},
            "gathered",
            "worker.attention is 'torch'",
        ),
    ],
    ids=["CPUs", "CPUs, PyTorch", "GPUs", "GPUs, no kernels", "GPUs, PyTorch"],
)
def test_which_attention_ranks_take(settings, kind, reason, tiny_moe, caplog):
    config = resolved(tiny_moe, **settings)
    assert (choice(config)[0].kind, choice(config)[1]) == (kind, reason)
    graphs = {entry.kind for entry in recorded_entries(config)}
    assert ("piecewise" in graphs) == config.limits.mixed_steps == (kind != "gathered")
    for wanted in (False, True):
        limits = Limits(mixed_steps=wanted)
        assert resolved(tiny_moe, **settings, limits=limits).limits.mixes_steps == wanted
    if kind != "flashinfer":
        bare = chosen(config).make_cache(config, 1, torch.device("cpu"))
        with caplog.at_level(logging.WARNING):
            make_attention(config, torch.nn.Module(), bare, torch.device("cpu"))
        assert caplog.messages == ([] if reason is None else [f"attention runs in PyTorch: {reason}"])


def test_an_attention_of_a_kind_that_another_has_is_refused(joint):
    class Other(AttentionWay):
        kind = "sdpa"
        devices = places(cpu=0)

    with pytest.raises(ConfigError, match=r"test_attention_ways registers 'sdpa', which .*sdpa_way has"):
        registry.register(Other)


def test_an_attention_that_makes_none_is_refused_by_what_it_lacks(joint):
    class Unfinished(AttentionWay):
        kind = "unfinished"
        devices = places(cpu=0)

    with pytest.raises(ConfigError, match=r"Unfinished lacks make, which an attention has to give"):
        registry.register(Unfinished)


def test_where_all_attentions_refuse_the_reasons_are_given(joint, random_models, monkeypatch):
    monkeypatch.delitem(attentions_known(), "sdpa")
    with pytest.raises(ConfigError, match=r"no attention on worker.device='cpu' serves .*some layer has sinks"):
        resolved(random_models["gpt_oss"])


def test_another_attention_is_taken_where_it_does_not_refuse(joint, random_models):
    model = random_models["qwen3_moe"]
    config = resolved(model)
    assert chosen(config).kind == "joint"
    assert [dict(shape.noted) for shape in config.spec.attention] == [{"joint_groups": 2}] * len(config.spec.attention)
    assert {entry.kind for entry in recorded_entries(config)} == {"decode"}
    assert choice(resolved(random_models["gpt_oss"]))[0].kind == "sdpa"


def held(engine: RankEngine, arrivals: list[dict[int, list[list[int]]]]) -> tuple[int, int, Any]:
    cache: Any = target_of(engine).cache
    generated = run_script(engine, arrivals, NEW_TOKENS)
    return cache.num_bytes, cache.num_written, generated.token_ids


def test_ranks_generate_with_another_attention_over_the_bytes_that_its_plan_has(joint, random_models, references):
    limits = Limits(disable_piecewise_cuda_graph=True, max_running_requests=4)
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        limits=limits,
        cache=CacheConfig(num_tokens=512),
        plugins=(PLUGIN,),
    )
    plan = plan_pool(config)
    assert (plan.problems, plan.refusals) == ((), ())
    assert plan.num_bytes("attention: joint") == 1 << 10
    need, others = (
        host_need(plan.config),
        plan.total_bytes - plan.num_bytes("dense weights") - plan.num_bytes("experts"),
    )
    assert need is not None
    assert need.buffers == others - plan.num_bytes("KV cache")
    prompts = [[5, 17, 42], [9] * 40]
    with ForkedRanks(config) as rank_set:
        ranks = rank_set.call(held, [{0: [prompt]} for prompt in prompts])
    assert {num_bytes for num_bytes, _, _ in ranks} == {plan.num_bytes("KV cache")}
    assert all(num_written >= len(plan.config.spec.attention) * 3 for _, num_written, _ in ranks)
    tokens = {key: token_ids for _, _, generated in ranks for key, token_ids in generated.items()}
    assert sorted(tokens.values()) == sorted(references["qwen3_moe"].greedy(prompt, NEW_TOKENS) for prompt in prompts)


def test_the_default_size_of_a_cache_counts_what_the_attention_keeps(joint, random_models):
    cache = CacheConfig(max_bytes=1_000_000)
    config = resolved(random_models["qwen3_moe"], cache=cache)
    kept, of_keys_and_values = chosen(config).token_bytes(config), config.spec.kv_bytes_per_token
    blocks = [cache.max_bytes // (num_bytes * cache.block_size) for num_bytes in (kept, of_keys_and_values)]
    assert config.num_blocks == blocks[0] + 1 < blocks[1] + 1
