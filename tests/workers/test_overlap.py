"""A step is launched before the one before it has come back: the same tokens, whatever ends or moves meanwhile."""

from collections import deque

import pytest
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, SamplingParams, WorkerConfig
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.workers.attention.kv_cache import BlockAllocator
from expert_pool.workers.request import Completion, Generated, Request
from expert_pool.workers.scheduling.rows import Row
from expert_pool.workers.scheduling.scheduler import BatchKind, ScheduledBatch, Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_ranks import ForkedRanks, PlainRanks
from rank_insides import run_script

VOCAB_SIZE, EOS = 1000, 999
OVERLAP = WorkerConfig(overlap=True)


def said(key: int, position: int, ends_at: int) -> int:
    """Stands in for a model: what it says depends on the request and the position alone."""
    return EOS if position >= ends_at else (31 * key + 7 * position) % (VOCAB_SIZE - 1)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(0, 12), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    ),
    chunk=st.integers(1, 30),
    running=st.integers(1, 6),
    block_size=st.integers(1, 8),
    spare_blocks=st.integers(0, 4),
    aborted=st.sets(st.integers(0, 11), max_size=2),
    mixed_steps=st.booleans(),
)
def test_requests_end_as_they_would_without_overlap(
    sizes, chunk, running, block_size, spare_blocks, aborted, mixed_steps
):
    """Requests of any length, over a cache with little room, that end by length or by a token nobody foresees."""
    blocks = -(-max(prompt + new for prompt, new, _, _ in sizes) // block_size) + spare_blocks
    under_test = Scheduler(
        Limits(chunked_prefill_size=chunk, max_running_requests=running, mixed_steps=mixed_steps),
        BlockAllocator(blocks + 1, block_size),
        context_length=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        decode=None,
    )
    requests = [
        Request(key, (key,) * prompt, SamplingParams(max_new_tokens=new))
        for key, (prompt, new, _, _) in enumerate(sizes)
    ]
    ends = [len(one.prompt_token_ids) + size[3] for one, size in zip(requests, sizes, strict=True)]
    under_way: deque[tuple[ScheduledBatch, list[Row]]] = deque()
    finished: dict[int, Completion] = {}
    for number in range(20_000):
        for key, (_, _, arrival, _) in enumerate(sizes):
            if arrival == number:
                assert under_test.add(requests[key]) is None
        if number == 7:
            for key in aborted:
                under_test.abort(key)
        waiting, preempted = under_test.num_waiting, under_test.num_preemptions
        batch = under_test.schedule()
        if preempted := under_test.num_preemptions - preempted:
            assert under_test.num_waiting == waiting + preempted, "who gives way is not admitted in the same step"
        held = [block for piece in batch.slices for block in piece.sequence.blocks]
        assert len(held) == len(set(held)), "two requests hold the same block"
        for piece in batch.slices:
            sequence = piece.sequence
            assert not sequence.is_over
            assert len(sequence.blocks) * block_size >= sequence.num_computed + piece.num_tokens
            assert sequence.num_pending <= 1, "only tokens of the step before may be unknown"
        due = [piece.sequence for piece in batch.slices if piece.reaches_end]
        rows = [Row(Generated((said(one.request.key, one.num_tokens, ends[one.request.key]),))) for one in due]
        under_test.launch(batch)
        under_way.append((batch, rows))
        if len(under_way) > 1:
            for completion in under_test.resolve(*under_way.popleft()):
                assert completion.key not in finished
                finished[completion.key] = completion
        if number > 12 and batch.kind is BatchKind.IDLE and under_test.num_running + under_test.num_waiting == 0:
            break
    for key, one in enumerate(requests):
        start = len(one.prompt_token_ids)
        whole = [said(key, position, ends[key]) for position in range(start, start + one.sampling.max_new_tokens)]
        expected = tuple(whole[: whole.index(EOS) + 1] if EOS in whole else whole)
        assert key in finished or key in aborted
        assert key not in finished or finished[key].token_ids == expected
    assert under_test.num_free_blocks == blocks


LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(2, 2), pytest.param(Layout(4, 2), marks=pytest.mark.long)]
PROMPTS = [[5, 17, 42], [9], [100, 3] * 12, [64], list(range(2, 50)), [7, 7, 7], [1] * 30]
SAMPLING = [
    SamplingParams(max_new_tokens=20, ignore_eos=True),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=30),
    SamplingParams(max_new_tokens=25, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=1.2, seed=6, top_k=9, top_p=0.9),
    SamplingParams(max_new_tokens=2),
    SamplingParams(max_new_tokens=40, ignore_eos=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.dp_size}x{layout.attn_tp_size}")
def test_overlap_changes_no_completion(layout, random_models):
    """With a cache too small for all, so that requests give way while their tokens are under way."""
    completions = {}
    for overlap in (False, True):
        config = PoolConfig(
            model=random_models["qwen3_moe"],
            ranks=layout.world_size,
            attn_tp_size=layout.attn_tp_size,
            limits=Limits(chunked_prefill_size=16, max_running_requests=6, cuda_graph_bs=(1, 2, 4, 6)),
            cache=CacheConfig(block_size=4, num_tokens=96),
            worker=WorkerConfig(overlap=overlap),
        )
        with PlainRanks(config, graphs=True) as ranks:
            ranks.generate([[9]], SamplingParams(max_new_tokens=2, ignore_eos=True))
            for stats in ranks.stats.values():
                assert stats.decode_model_seconds <= stats.decode_seconds, "also after one decode step"
            completions[overlap] = [ranks.generate(PROMPTS, SAMPLING), ranks.generate(PROMPTS[::-1], SAMPLING)]
            for stats in ranks.stats.values():
                assert stats.decode_seconds > 0
                assert (stats.decode_model_seconds > 0) is not overlap, "a launch is not the model's time"
            assert layout.dp_size > 1 or sum(stats.preemptions for stats in ranks.stats.values()) > 0
    assert completions[True] == completions[False]


def test_a_text_that_stops_a_request_drops_what_was_computed_beyond_it(tiny_moe):
    """The token after the stop text is under way when it is found."""
    prompts = [[10, 11, 12], [40, 41]]
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with PlainRanks(PoolConfig(model=tiny_moe, worker=OVERLAP)) as ranks:
        whole = ranks.generate(prompts, sampling)
        stop = whole[0].text[len(whole[0].text) // 2 :][:2]
        stopped = ranks.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,)))
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].text == whole[0].text[: whole[0].text.index(stop)]
    assert whole[0].token_ids[: len(stopped[0].token_ids)] == stopped[0].token_ids


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_overlap_every_decode_step_still_replays(ranks, random_models, references):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=ranks,
        limits=Limits(max_running_requests=3, cuda_graph_bs=(1, 2, 3)),
        worker=OVERLAP,
    )
    with ForkedRanks(config) as rank_set:
        arrivals = [{0: [[3, 4]], 2: [[5, 6, 7]]}, {1: [[9] * 9]}][:ranks]
        by_rank = rank_set.call(run_script, arrivals, 12)
    tokens = {key: ids for generated in by_rank for key, ids in generated.token_ids.items()}
    for key, prompt in enumerate([[3, 4], [5, 6, 7], [9] * 9][: len(tokens)]):
        expected = references["qwen3_moe"].greedy(prompt, 12)
        assert tokens[key][: len(expected)] == expected
    for generated in by_rank:
        decodes = [step for step in generated.steps if set(step.kinds) <= {"DECODE", "IDLE"}]
        assert len(decodes) >= 11
        assert all(step.graph is not None for step in decodes)
