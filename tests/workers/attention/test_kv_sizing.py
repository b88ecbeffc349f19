"""The KV cache on GPUs: how many blocks fit, the same on all ranks, and what is said where one context does not."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from expert_pool.cluster import CacheConfig, ConfigError, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.config import resolve
from expert_pool.dispatch.budgets.budget import largest_step
from expert_pool.dispatch.dispatchers.local import LocalDispatcher
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.paths.path import DispatchedPath
from expert_pool.graphs.lockstep import LockstepRank
from expert_pool.graphs.plan import CaptureEntry, plan_captures
from expert_pool.graphs.record import differences
from expert_pool.workers.agreement import Agreement, StateReader
from expert_pool.workers.attention.kv_cache import PADDING_BLOCK, BlockAllocator
from expert_pool.workers.attention.kv_sizing import (
    GRAPH_BYTES,
    MemoryReading,
    agree_on_blocks,
    block_bytes,
    blocks_for_all,
    blocks_that_fit,
    graph_reserve,
    largest_inputs,
    least_blocks,
    make_attention,
    run_largest_step,
)
from expert_pool.workers.attention.registry import chosen
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.graph_set import RecordingMeans, activation_bytes
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import RankConfig
from handle import collectives_of, path_of, target_of, with_draws
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB_SIZE
from plain_ranks import run_on_ranks

GIB = 1 << 30
sizes = st.integers(0, 200 * GIB)


def on_gpus(model: str, **settings: object) -> RankConfig:
    config = PoolConfig(model=model, worker=WorkerConfig(device="cuda"), **settings)
    return resolve(config, inspect_model(config.model, config.dtype))


@given(total=sizes, others=sizes, peak=sizes, graphs=sizes, share=st.floats(0.01, 1.0), block=st.integers(1, 1 << 24))
def test_blocks_fill_the_share_and_never_exceed_it(total, others, peak, graphs, share, block):
    reading = MemoryReading(total, others, peak, graphs)
    blocks = blocks_that_fit(reading, share, block)
    taken = others + peak + graphs
    if blocks:
        assert taken + blocks * block <= total * share
    assert taken + (blocks + 1) * block > int(total * share)


def test_blocks_of_a_worked_example():
    """80 GiB at 0.9 are 72; 2 for CUDA, 30 at the peak of the largest step and 1 for graphs leave 39."""
    reading = MemoryReading(total=80 * GIB, others=2 * GIB, peak=30 * GIB, graphs=GIB)
    assert blocks_that_fit(reading, 0.9, GIB // 4) == 39 * 4
    assert blocks_that_fit(reading, 0.4, GIB // 4) == 0


def test_the_share_is_settled_on_the_ranks_and_other_sizes_on_the_driver(tiny_moe):
    measured = on_gpus(
        tiny_moe, cache=CacheConfig(gpu_memory_utilization=0.5, max_bytes=1), limits=Limits(max_running_requests=3)
    )
    assert measured.gpu_memory_utilization == 0.5
    assert measured.num_blocks == 3 * (1024 // 16) + 1, "no more than the requests can use, whatever max_bytes says"
    by_hand = on_gpus(tiny_moe, cache=CacheConfig(num_tokens=160))
    assert (by_hand.num_blocks, by_hand.gpu_memory_utilization) == (11, None)
    assert on_gpus(tiny_moe, cache=CacheConfig(num_tokens=161)).num_blocks == 12, "never less than what was asked for"
    on_cpus = resolve(PoolConfig(model=tiny_moe), inspect_model(tiny_moe))
    assert on_cpus.gpu_memory_utilization is None


def test_what_ranks_settled_on_is_part_of_what_they_compare(tiny_moe):
    config = on_gpus(tiny_moe)
    settled = [msgspec.structs.replace(config, num_blocks=blocks, gpu_memory_utilization=None) for blocks in (70, 71)]
    assert settled[0].digest != settled[1].digest
    assert differences({"rank 0": settled[0], "rank 1": settled[1]}) == ["num_blocks differs (rank 0: 70, rank 1: 71)"]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_of_memory_is_between_nothing_and_all(share):
    with pytest.raises(ConfigError, match=r"cache.gpu_memory_utilization=\S+ is not above 0 and at most 1"):
        CacheConfig(gpu_memory_utilization=share)


def test_where_no_context_fits_the_error_names_the_rank_the_bytes_and_the_setting(tiny_moe):
    config = on_gpus(tiny_moe, ranks=2, dispatch="allgather")
    needed = least_blocks(config) * block_bytes(config)
    room = MemoryReading(total=GIB, others=0, peak=GIB // 4, graphs=0)
    full = MemoryReading(total=GIB, others=1000, peak=int(0.9 * GIB) - 2500, graphs=500)
    with pytest.raises(ConfigError) as refused:
        blocks_for_all([room, full], config)
    message = str(refused.value)
    assert f"one full context (1024 tokens) needs {needed:,} bytes" in message
    assert "cache.gpu_memory_utilization=0.9 leaves 1,000 on rank 1" in message
    assert "everything else 1,000. Raise cache.gpu_memory_utilization" in message
    assert blocks_for_all([room, room], config) == config.num_blocks


def test_graphs_are_reserved_for_by_their_number_and_by_the_largest(tiny_moe):
    config = on_gpus(
        tiny_moe, limits=Limits(chunked_prefill_size=1024, cuda_graph_bs=(1, 256), max_running_requests=256)
    )
    entries = [entry for entry in plan_captures(config.limits).entries if entry.kind == "decode"]
    assert largest_step(config.limits).value == 1024
    reserved = graph_reserve(config, entries, step_bytes=4000, attention_bytes=7)
    assert reserved - graph_reserve(config, [], 4000, 0) == 1000 + 2 * GRAPH_BYTES + 7


def test_plan_says_that_the_cache_is_measured(tiny_moe):
    report = plan_pool(PoolConfig(model=tiny_moe, worker=WorkerConfig(device="cuda")))
    [cache] = [buffer for buffer in report.buffers if buffer.name == "KV cache"]
    assert cache.rows is None
    assert cache.num_bytes == least_blocks(report.config) * block_bytes(report.config)
    assert "measured at start, up to 8192 blocks" in cache.made_of
    assert "cache.gpu_memory_utilization=0.9" in cache.made_of


@pytest.mark.parametrize(("chunk", "running"), [(100, 8), (2000, 8), (16, 300)])
def test_the_largest_step_has_every_token_the_limits_allow_at_the_end_of_its_context(chunk, running, tiny_moe):
    config = on_gpus(
        tiny_moe, limits=Limits(chunked_prefill_size=chunk, max_running_requests=running, disable_cuda_graph=True)
    )
    inputs = largest_inputs(config)
    num_tokens = max(chunk, running)
    assert inputs.input_ids.numel() == inputs.query_lens.sum() == inputs.num_valid_tokens == num_tokens
    assert (inputs.context_lens + inputs.query_lens == config.spec.context_length).all()
    assert inputs.positions.max() == config.spec.context_length - 1
    assert inputs.due_rows.numel() == min(num_tokens, running)
    assert inputs.block_tables.shape[1] * config.block_size >= config.spec.context_length
    assert (inputs.block_tables == PADDING_BLOCK).all()


def test_a_graph_is_refused_by_the_memory_of_the_device_that_records_it(tiny_moe, monkeypatch):
    """On a GPU: what nobody holds, and what PyTorch holds and does not use; the host may have as much as it will."""
    config = on_gpus(tiny_moe, cache=CacheConfig(num_tokens=4096))
    entry, gpu = CaptureEntry("decode", 8, 1), torch.device("cuda", 0)
    needed = activation_bytes(config, entry)
    allocator = BlockAllocator(config.num_blocks, config.block_size)
    path = DispatchedPath(LocalDispatcher(64), TorchExperts(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 100, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1100)
    for allocated, is_recorded in ((1000, True), (1001, False)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, held=allocated: held)
        refusal = RecordingMeans(config, allocator, path, gpu)(entry)
        assert (refusal is None) == is_recorded
    for setting in ("limits.cuda_graph_max_bs", "cache.num_tokens", "cache.gpu_memory_utilization"):
        assert setting in refusal


def agree(engine: RankEngine, readings: list[MemoryReading], config: RankConfig) -> int | str:
    try:
        return agree_on_blocks(readings[engine.rank], config, engine.joined.host_group)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_all_ranks_take_what_fits_on_the_fullest(ranks, random_models):
    config = on_gpus(random_models["qwen3_moe"], ranks=ranks, dispatch="allgather")
    one = block_bytes(config)

    def reading(blocks: int) -> MemoryReading:
        return MemoryReading(total=10_000_000 * one, others=1, peak=9_000_000 * one - blocks * one - 1, graphs=0)

    with_room = [reading(500 + rank) for rank in range(ranks)]
    first_full, last_full = [reading(7), *with_room[1:]], [*with_room[:-1], reading(7)]
    pool = PoolConfig(model=random_models["qwen3_moe"], ranks=ranks)
    assert run_on_ranks(pool, agree, with_room, config, graphs=False) == [500] * ranks
    for readings, rank in ((first_full, 0), (last_full, ranks - 1)):
        answers = run_on_ranks(pool, agree, readings, config, graphs=False)
        assert len(set(answers)) == 1
        assert f"leaves {7 * one:,} on rank {rank}" in answers[0]


def largest_step_on_a_bare_cache(engine: RankEngine, faulty_rank: int | None) -> tuple[int, list[str], Any]:
    """The measured step on CPU ranks, over the padding block alone; one rank may have another configuration.

    Returns:
        How many collectives, and which; whether the cache was written, and the rows, width and settings of sampling.
    """
    target, config = target_of(engine), engine.config
    kept = target.cache, target.attention
    bare = chosen(config).make_cache(config, 1, engine.device)
    target.cache, target.attention = bare, make_attention(config, target.model, bare, engine.device)
    if engine.rank == faulty_rank:
        config = msgspec.structs.replace(config, num_blocks=config.num_blocks + 1)
    state = StateReader(config, path_of(engine), engine.loaded.layers, LockstepRank(engine.rank, {}, lambda _: None))
    agreement = Agreement(engine.joined.host_group, config.layout)
    drawn = []

    def draw(sample: Callable[..., torch.Tensor], logits_MV: torch.Tensor, sequences: list[Any]) -> torch.Tensor:
        drawn.append((*logits_MV.shape, {sequence.request.sampling for sequence in sequences}))
        return sample(logits_MV, sequences)

    try:
        with collectives_of(engine).listing() as calls, with_draws(draw):
            run_largest_step(config, target, agreement, state)
    except Exception as error:
        return 0, [str(error)], None
    finally:
        target.cache, target.attention = kept
    return len(calls), [call.op for call in calls], (bool(bare.pages(0)[0].any()), drawn)


@pytest.mark.parametrize(("ranks", "attn_tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_the_measured_step_is_a_step_of_all_ranks(ranks, attn_tp_size, random_models):
    pool = PoolConfig(
        model=random_models["gpt_oss"],
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        limits=Limits(chunked_prefill_size=600, max_running_requests=4),
    )
    answers = run_on_ranks(pool, largest_step_on_a_bare_cache, None, graphs=False)
    assert all(answer == answers[0] for answer in answers)
    num_calls, _, (wrote, [(num_rows, vocab_size, settings)]) = answers[0]
    assert wrote
    assert (num_rows, vocab_size) == (4, VOCAB_SIZE), "the real sampler draws for every row that may be due"
    [sampling] = settings
    assert sampling.temperature > 0
    assert sampling.top_p < 1
    assert 0 < sampling.top_k < VOCAB_SIZE
    assert num_calls == {(1, 1): 0, (2, 1): 8, (2, 2): 12}[ranks, attn_tp_size], "exchanges of four layers"


def test_a_rank_that_would_measure_another_configuration_is_found_before_anything_is_sent(random_models):
    pool = PoolConfig(model=random_models["qwen3_moe"], ranks=2, limits=Limits(chunked_prefill_size=64))
    answers = run_on_ranks(pool, largest_step_on_a_bare_cache, 1, graphs=False)
    assert all("ranks disagree before a step: config.num_blocks differs" in told for _, [told], _ in answers)


def test_a_prefill_graph_needs_logits_of_its_requests_not_of_its_tokens(random_models):
    """Counted by tokens, a large vocabulary would have such graphs refused on GPUs that have room for them."""
    limits = Limits(max_running_requests=4, chunked_prefill_size=4096)
    config = on_gpus(random_models["qwen3_moe"], limits=limits)
    wide = msgspec.structs.replace(config, spec=msgspec.structs.replace(config.spec, vocab_size=1 << 20))
    of_logits = activation_bytes(wide, CaptureEntry("piecewise", 4096)) - activation_bytes(
        config, CaptureEntry("piecewise", 4096)
    )
    assert of_logits == 4 * 4 * ((1 << 20) - config.spec.vocab_size)
    assert activation_bytes(wide, CaptureEntry("piecewise", 2)) > 2 * 4 * (1 << 20)
