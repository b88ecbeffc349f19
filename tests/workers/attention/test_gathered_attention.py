"""Decode attention on fixed shapes attends as the one that reads lengths on the host, whatever padding holds."""

from types import SimpleNamespace

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, SamplingParams
from expert_pool.graphs.plan import CaptureEntry
from expert_pool.workers.attention.gathered import GatheredAttention, GatheredBatch
from expert_pool.workers.attention.gathered_way import GATHER_BYTES, gathered_bytes, gathered_refusal
from expert_pool.workers.attention.kv_cache import PADDING_BLOCK, PADDING_SLOT, KvCache
from expert_pool.workers.attention.paged import SdpaAttention
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.spec import AttentionShape
from expert_pool.workers.scheduling.inputs import StepInputs
from handle import target_of
from models import FAMILIES
from plain_ranks import PlainRanks

CPU = torch.device("cpu")
BLOCK, MAX_BLOCKS, NUM_BLOCKS = 4, 8, 40
NAN = float("nan")

SHAPES = {
    "one KV head a query head": AttentionShape(4, 16, 16, 4, 0.25),
    "grouped": AttentionShape(2, 16, 16, 8, 0.25),
    "sinks": AttentionShape(2, 16, 16, 8, 0.25, has_sinks=True),
    "window": AttentionShape(2, 16, 16, 8, 0.25, sliding_window=5),
    "sinks and window": AttentionShape(2, 16, 16, 8, 0.25, sliding_window=5, has_sinks=True),
    "values narrower": AttentionShape(4, 24, 16, 4, 0.2),
    "values narrower, grouped": AttentionShape(2, 24, 8, 4, 0.2),
}


def decode_inputs(contexts: list[int], padded_to: int, num_rows: int) -> StepInputs:
    """A decode step of these requests in the static buffers of a graph: requests first, then padding."""
    num_requests, width = len(contexts), MAX_BLOCKS
    free = torch.randperm(NUM_BLOCKS - 1) + 1
    tables = torch.full((padded_to, width), PADDING_BLOCK)
    slots = torch.full((num_rows,), PADDING_SLOT)
    for index, context in enumerate(contexts):
        blocks = -(-(context + 1) // BLOCK)
        tables[index, :blocks], free = free[:blocks], free[blocks:]
        slots[index] = tables[index, context // BLOCK] * BLOCK + context % BLOCK
    active = torch.arange(padded_to) < num_requests
    return StepInputs(
        input_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        slots=slots,
        due_rows=torch.arange(padded_to),
        query_starts=torch.where(active, torch.arange(padded_to), 0),
        query_lens=active.long(),
        context_lens=torch.tensor(contexts + [0] * (padded_to - num_requests)),
        block_tables=tables,
        num_valid_tokens=torch.tensor([num_requests], dtype=torch.int32),
    )


def filled_cache(shape: AttentionShape, inputs: StepInputs, poisoned: bool) -> KvCache:
    """Random where requests have tokens; NaN wherever nothing may be read from, if poisoned."""
    cache = KvCache([shape], NUM_BLOCKS, BLOCK, torch.float32, CPU)
    for pages in cache.pages(0):
        rows = pages.flatten(0, 1)
        rows.fill_(NAN if poisoned else 0.0)
        for table, context in zip(inputs.block_tables.tolist(), inputs.context_lens.tolist(), strict=True):
            for position in range(context):
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                rows[slot] = torch.randn(rows.shape[1:], generator=torch.Generator().manual_seed(slot))
    return cache


def attended(name: str, contexts: list[int], padded_to: int, num_rows: int, poisoned: bool) -> tuple[torch.Tensor, ...]:
    """What both attentions make of one step, with the same inputs and caches."""
    torch.manual_seed(len(contexts) + padded_to)
    shape = SHAPES[name]
    inputs = decode_inputs(contexts, padded_to, num_rows)
    query = torch.randn(1, shape.num_heads, num_rows, shape.key_dim)
    key = torch.randn(1, shape.num_kv_heads, num_rows, shape.key_dim)
    value = torch.randn(1, shape.num_kv_heads, num_rows, shape.value_dim)
    if poisoned:
        for tensor in (query, key, value):
            tensor[:, :, len(contexts) :] = NAN
    sinks = torch.randn(shape.num_heads) if shape.has_sinks else None
    entry, module = CaptureEntry("decode", padded_to, 1), SimpleNamespace(layer_idx=0)
    outputs = []
    for make in (lambda c: SdpaAttention(c, CPU), lambda c: GatheredAttention(c, (shape,), MAX_BLOCKS * BLOCK, CPU)):
        batch = make(filled_cache(shape, inputs, poisoned)).batch(inputs, entry, inputs.slots)
        outputs.append(batch.attend(module, query, key, value, scaling=shape.scaling, sinks=sinks))
    assert isinstance(batch, GatheredBatch)
    return tuple(outputs)


@pytest.mark.parametrize("poisoned", [False, True], ids=["clean", "poisoned"])
@pytest.mark.parametrize("name", SHAPES)
def test_gathered_attention_is_that_of_each_request_alone(name, poisoned):
    for contexts, padded_to, num_rows in (
        ([0], 1, 1),
        ([3, 4, 5], 4, 4),
        ([31, 0, 17, 8], 4, 6),
        ([7, 30, 1, 12, 2], 8, 8),
        ([], 4, 4),
    ):
        expected, output = attended(name, contexts, padded_to, num_rows, poisoned)
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        assert not output[:, len(contexts) :].any(), "padding yields zero"


def test_it_can_see_differences():
    """The comparison above would notice a window that is one too wide, or a key too many."""
    expected, output = attended("window", [9, 12], 2, 2, False)
    wider = SHAPES["window"]
    SHAPES["wider"] = AttentionShape(wider.num_kv_heads, 16, 16, wider.num_heads, 0.25, sliding_window=6)
    try:
        _, other = attended("wider", [9, 12], 2, 2, False)
    finally:
        del SHAPES["wider"]
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert (other - expected).abs().max() > 1e-3


def test_a_recorded_step_reads_no_length_on_the_host(monkeypatch):
    """What CUDA refuses while it records: numbers, lists and shapes that come from the device."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a length was read on the host")

    shape = SHAPES["sinks and window"]
    inputs = decode_inputs([3, 9], 4, 4)
    cache = filled_cache(shape, inputs, poisoned=False)
    tensors = [torch.randn(1, heads, 4, 16) for heads in (8, 2, 2)]
    attention = GatheredAttention(cache, (shape,), MAX_BLOCKS * BLOCK, CPU)
    for name in ("tolist", "item", "__bool__", "__int__", "nonzero", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    batch = attention.batch(inputs, CaptureEntry("decode", 4, 1), inputs.slots)
    batch.attend(SimpleNamespace(layer_idx=0), *tensors, scaling=0.25, sinks=torch.randn(8))


def test_graphs_that_would_gather_too_much_are_refused_and_the_others_reserved_for():
    shape = AttentionShape(8, 128, 128, 8, 0.1)
    cache = KvCache([shape], 2, BLOCK, torch.bfloat16, CPU)
    attention = GatheredAttention(cache, (shape,), 32768, CPU)
    per_request = gathered_bytes((shape,), 32768, BLOCK, cache.itemsize)
    assert per_request == 32768 * 8 * 256 * 2
    fitting = GATHER_BYTES // per_request
    assert gathered_refusal(CaptureEntry("decode", fitting, 1), per_request) is None
    assert f"more than {GATHER_BYTES:,}" in gathered_refusal(CaptureEntry("decode", fitting + 1, 1), per_request)
    assert "records no piecewise graphs" in gathered_refusal(CaptureEntry("piecewise", 64, 1), per_request)
    assert attention.graph_bytes([CaptureEntry("decode", size, 1) for size in (1, 4)]) == 3 * 4 * per_request


def gather(engine: RankEngine) -> None:
    """Have this rank's graphs attend as those on a GPU without FlashInfer's kernels do."""
    target, spec = target_of(engine), engine.config.spec
    target.attention = GatheredAttention(target.cache, spec.attention, spec.context_length, engine.device)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_that_gathers_in_its_decode_graphs_generates_what_transformers_does(family, random_models, references):
    config = PoolConfig(
        model=random_models[family],
        ranks=2,
        limits=Limits(max_running_requests=4, disable_piecewise_cuda_graph=True),
        cache=CacheConfig(num_tokens=4096),
    )
    prompts = [[(11 * length + 5 * position) % 126 + 2 for position in range(length)] for length in (1, 9, 30, 70, 3)]
    with PlainRanks(config, prepare=gather, graphs=True) as ranks:
        completions = ranks.generate(prompts, SamplingParams(max_new_tokens=12))
        assert all(stats.replayed_steps for stats in ranks.stats.values())
    assert [one.token_ids for one in completions] == [references[family].greedy(prompt, 12) for prompt in prompts]
