"""What a DP rank runs next: chunks, admission, preemption, and that nothing is lost whatever the cache holds."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, SamplingParams
from expert_pool.workers.attention.kv_cache import BlockAllocator
from expert_pool.workers.request import Completion, Generated, Request
from expert_pool.workers.scheduling.rows import Row, RowFailure
from expert_pool.workers.scheduling.scheduler import BatchKind, ScheduledBatch, Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_ranks import PlainRanks

VOCAB_SIZE, EOS = 1000, 999


def scheduler(
    chunk: int = 64, running: int = 8, blocks: int = 64, block_size: int = 4, context: int = 512, **limits: Any
) -> Scheduler:
    return Scheduler(
        Limits(chunked_prefill_size=chunk, max_running_requests=running, **limits),
        BlockAllocator(blocks + 1, block_size),
        context_length=context,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        decode=None,
    )


def request(key: int, prompt_length: int, new_tokens: int = 4) -> Request:
    return Request(key, tuple([key % VOCAB_SIZE] * prompt_length), SamplingParams(max_new_tokens=new_tokens))


def keys(batch: ScheduledBatch) -> list[int]:
    return [piece.sequence.request.key for piece in batch.slices]


def token(key: int, position: int) -> int:
    """Stands in for a model: what it says depends on the request and the position, never end-of-sequence."""
    return (31 * key + 7 * position) % (VOCAB_SIZE - 1)


def run(under_test: Scheduler, batch: ScheduledBatch, results: list[int | RowFailure]) -> list[Completion]:
    """The batch is launched and comes back before the next one is scheduled."""
    under_test.launch(batch)
    rows = [Row(Generated(), one) if isinstance(one, RowFailure) else Row(Generated((one,))) for one in results]
    return under_test.resolve(batch, rows)


def step(under_test: Scheduler) -> tuple[ScheduledBatch, list[Completion]]:
    """Schedule and run once."""
    batch = under_test.schedule()
    due = [piece.sequence for piece in batch.slices if piece.reaches_end]
    completions = run(under_test, batch, [token(sequence.request.key, len(sequence.token_ids)) for sequence in due])
    return batch, completions


def run_until_idle(under_test: Scheduler) -> dict[int, Completion]:
    finished: dict[int, Completion] = {}
    for _ in range(20_000):
        batch, completions = step(under_test)
        finished |= {completion.key: completion for completion in completions}
        if batch.kind is BatchKind.IDLE:
            return finished
    raise AssertionError("the scheduler did not come to an end")


def expected_tokens(one: Request) -> tuple[int, ...]:
    start = len(one.prompt_token_ids)
    return tuple(token(one.key, position) for position in range(start, start + one.sampling.max_new_tokens))


def test_nothing_to_do_is_an_idle_batch():
    assert scheduler().schedule() == ScheduledBatch(BatchKind.IDLE)


def test_a_prompt_longer_than_a_chunk_is_prefilled_over_several_steps():
    under_test = scheduler(chunk=10)
    under_test.add(request(1, prompt_length=25))
    steps = []
    for _ in range(4):
        batch = under_test.schedule()
        [piece] = batch.slices
        steps.append((batch.kind, piece.num_tokens, piece.reaches_end))
        run(under_test, batch, [5] if piece.reaches_end else [])
    assert steps == [
        (BatchKind.PREFILL, 10, False),
        (BatchKind.PREFILL, 10, False),
        (BatchKind.PREFILL, 5, True),
        (BatchKind.DECODE, 1, True),
    ]


@given(st.integers(1, 30), st.integers(1, 40), st.data())
def test_a_request_resumes_from_its_tokens_and_completes_as_if_it_had_never_stopped(prompt_length, new_tokens, data):
    one = request(1, prompt_length, new_tokens)
    num_had = data.draw(st.integers(0, new_tokens - 1))
    under_test = scheduler(chunk=8)
    assert under_test.add(msgspec.structs.replace(one, resume_from=Generated(expected_tokens(one)[:num_had]))) is None
    completion = run_until_idle(under_test)[1]
    assert (completion.token_ids, completion.num_prompt_tokens) == (expected_tokens(one), prompt_length)
    assert completion.finish_reason == "length"


def test_reports_of_progress_follow_each_other_without_gaps_whoever_is_preempted():
    under_test = scheduler(blocks=6, block_size=4)
    for key in (1, 2, 3):
        under_test.add(request(key, prompt_length=8, new_tokens=8))
    reported: dict[int, tuple[int, ...]] = {1: (), 2: (), 3: ()}
    finished: dict[int, Completion] = {}
    while len(finished) < 3:
        for progress in under_test.progress():
            assert progress.generated.token_ids
            assert progress.key not in finished
            reported[progress.key] += progress.generated.token_ids
        finished |= {completion.key: completion for completion in step(under_test)[1]}
    assert under_test.num_preemptions
    assert all(finished[key].token_ids[:7] == tokens for key, tokens in reported.items())
    assert under_test.progress() == []


def test_a_chunk_bounds_all_requests_of_a_step_together():
    under_test = scheduler(chunk=10)
    for key in (1, 2, 3):
        under_test.add(request(key, prompt_length=7))
    batch, _ = step(under_test)
    assert [(piece.sequence.request.key, piece.num_tokens) for piece in batch.slices] == [(1, 7), (2, 3)]
    batch, _ = step(under_test)
    assert shape(batch) == [(1, 1), (2, 4), (3, 5)]


def shape(batch: ScheduledBatch) -> list[tuple[int, int]]:
    """Keys with the tokens that they run."""
    return [(piece.sequence.request.key, piece.num_tokens) for piece in batch.slices]


def test_without_mixed_steps_a_new_prompt_is_prefilled_before_others_decode_on():
    under_test = scheduler(mixed_steps=False)
    under_test.add(request(1, 3, new_tokens=9))
    step(under_test)
    assert step(under_test)[0].kind is BatchKind.DECODE
    under_test.add(request(2, 3, new_tokens=9))
    batch, _ = step(under_test)
    assert (batch.kind, keys(batch)) == (BatchKind.PREFILL, [2])
    batch, _ = step(under_test)
    assert (batch.kind, keys(batch)) == (BatchKind.DECODE, [1, 2])


def test_a_new_prompt_takes_what_those_that_decode_leave_of_a_step():
    under_test = scheduler(chunk=8)
    for key in (1, 2):
        under_test.add(request(key, 3, new_tokens=9))
    step(under_test)
    under_test.add(request(3, 13, new_tokens=9))
    under_test.add(request(4, 4, new_tokens=9))
    batches = [step(under_test)[0] for _ in range(4)]
    assert [(batch.kind, shape(batch), batch.num_prompt_tokens) for batch in batches] == [
        (BatchKind.MIXED, [(1, 1), (2, 1), (3, 6)], 6),
        (BatchKind.MIXED, [(1, 1), (2, 1), (3, 6)], 6),
        (BatchKind.MIXED, [(1, 1), (2, 1), (3, 1), (4, 4)], 5),
        (BatchKind.DECODE, [(1, 1), (2, 1), (3, 1), (4, 1)], 0),
    ]


@pytest.mark.parametrize("chunk", [1, 2])
def test_prompts_and_those_that_decode_take_turns_where_these_fill_a_step(chunk):
    under_test = scheduler(chunk=chunk)
    for key in (1, 2):
        under_test.add(request(key, 1, new_tokens=30))
    while under_test.num_waiting:
        step(under_test)
    under_test.add(request(3, 4 * chunk, new_tokens=9))
    batches = [step(under_test)[0] for _ in range(8)]
    turns = [(BatchKind.DECODE, [(1, 1), (2, 1)]), (BatchKind.PREFILL, [(3, chunk)])]
    assert [(batch.kind, shape(batch)) for batch in batches] == turns * 4


def test_a_prompt_that_is_prefilled_whole_goes_beside_others_or_in_its_turn():
    under_test = scheduler(chunk=0, max_prefill_tokens=10)
    for key in (1, 2):
        under_test.add(request(key, 2, new_tokens=9))
    step(under_test)
    under_test.add(request(3, 8, new_tokens=2))
    under_test.add(request(4, 9, new_tokens=2))
    batches = [step(under_test)[0] for _ in range(4)]
    assert [(batch.kind, shape(batch)) for batch in batches] == [
        (BatchKind.MIXED, [(1, 1), (2, 1), (3, 8)]),
        (BatchKind.DECODE, [(1, 1), (2, 1), (3, 1)]),
        (BatchKind.PREFILL, [(4, 9)]),
        (BatchKind.DECODE, [(1, 1), (2, 1), (4, 1)]),
    ]


def test_what_was_not_launched_is_scheduled_again_and_a_whole_prompt_stays_whole():
    under_test = scheduler(chunk=0, max_prefill_tokens=10)
    for key in (1, 2):
        under_test.add(request(key, 2, new_tokens=9))
    step(under_test)
    step(under_test)
    under_test.add(request(3, 9, new_tokens=2))
    assert shape(under_test.schedule()) == [(3, 9)]
    assert shape(under_test.schedule()) == [(3, 9)]


def test_a_prompt_gives_way_in_the_middle_of_its_chunks_and_is_not_admitted_again_at_once():
    under_test = scheduler(chunk=4, blocks=6, block_size=4)
    requests = [request(1, 4, new_tokens=12), request(2, 16, new_tokens=2)]
    under_test.add(requests[0])
    step(under_test)
    under_test.add(requests[1])
    shapes, finished = [], {}
    for _ in range(40):
        batch, completions = step(under_test)
        shapes.append(shape(batch))
        finished |= {completion.key: completion for completion in completions}
    assert shapes[:6] == [[(1, 1), (2, 3)]] * 4 + [[(1, 1)]] * 2
    assert under_test.num_preemptions == 1
    assert {key: one.token_ids for key, one in finished.items()} == {one.key: expected_tokens(one) for one in requests}


def test_no_more_requests_run_than_max_running_requests():
    under_test = scheduler(running=2)
    for key in range(5):
        under_test.add(request(key, 3))
    step(under_test)
    assert (under_test.num_running, under_test.num_waiting) == (2, 3)


def test_a_prompt_waits_until_the_cache_has_room_for_all_of_it():
    under_test = scheduler(blocks=4, block_size=4)
    under_test.add(request(1, prompt_length=9, new_tokens=2))
    under_test.add(request(2, prompt_length=5, new_tokens=2))
    batch, _ = step(under_test)
    assert (keys(batch), under_test.num_waiting) == ([1], 1)
    assert run_until_idle(under_test).keys() == {1, 2}


def test_the_youngest_request_gives_way_and_comes_back_first():
    under_test = scheduler(blocks=6, block_size=4)
    requests = [request(key, prompt_length=8, new_tokens=8) for key in (1, 2, 3)]
    for one in requests:
        under_test.add(one)
    under_test.add(request(4, prompt_length=8, new_tokens=2))
    assert keys(step(under_test)[0]) == [1, 2, 3]
    assert keys(step(under_test)[0]) == [1, 2], "each needs a third block and none is free: 3 gives its two to 1 and 2"
    assert under_test.num_preemptions == 1
    admitted = []
    finished: dict[int, Completion] = {}
    while len(finished) < 4:
        batch, completions = step(under_test)
        admitted += [piece.sequence.request.key for piece in batch.slices if piece.num_tokens > 1]
        finished |= {completion.key: completion for completion in completions}
    assert admitted.index(3) < admitted.index(4)
    for one in requests:
        assert finished[one.key].token_ids == expected_tokens(one)


def test_an_aborted_request_frees_its_blocks_and_others_go_on():
    under_test = scheduler()
    free = under_test.num_free_blocks
    under_test.add(request(1, 9, new_tokens=50))
    under_test.add(request(2, 9, new_tokens=3))
    step(under_test)
    under_test.abort(1)
    under_test.abort(77)
    assert run_until_idle(under_test).keys() == {2}
    assert under_test.num_free_blocks == free


def test_a_request_whose_step_failed_ends_alone():
    under_test = scheduler()
    free = under_test.num_free_blocks
    for key in (1, 2):
        under_test.add(request(key, 3))
    [failed] = run(under_test, under_test.schedule(), [token(1, 3), RowFailure.NOT_FINITE])
    assert (failed.key, failed.finish_reason, failed.error) == (
        2,
        "error",
        "the model's logits are not finite after 3 tokens",
    )
    assert run_until_idle(under_test)[1].token_ids == expected_tokens(request(1, 3))
    assert under_test.num_free_blocks == free


def test_end_of_sequence_ends_a_request_unless_it_is_ignored():
    under_test = scheduler()
    under_test.add(request(1, 3, new_tokens=5))
    under_test.add(Request(2, (5,), SamplingParams(max_new_tokens=5, ignore_eos=True)))
    [stopped] = run(under_test, under_test.schedule(), [EOS, EOS])
    assert (stopped.key, stopped.token_ids, stopped.finish_reason) == (1, (EOS,), "stop")
    assert run_until_idle(under_test)[2].num_completion_tokens == 5


def test_the_context_ends_a_request():
    under_test = scheduler(context=10)
    under_test.add(request(1, prompt_length=7, new_tokens=100))
    completion = run_until_idle(under_test)[1]
    assert (completion.num_completion_tokens, completion.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Request(1, (), SamplingParams()), "the prompt is empty"),
        (Request(1, (1,) * 512, SamplingParams()), "the prompt has 512 tokens; the model's context of 512 holds"),
        (Request(1, (5, VOCAB_SIZE), SamplingParams()), "token id 1000 is outside the vocabulary of 1000"),
        (Request(1, (5, -1), SamplingParams()), "token id -1 is outside the vocabulary of 1000"),
        (Request(1, (5,), SamplingParams(stop=("x",))), "stop texts need a tokenizer"),
        (Request(1, (5,), SamplingParams(max_new_tokens=300)), "300 cached tokens, the KV cache holds 256"),
    ],
)
def test_a_request_that_can_never_run_is_answered_at_once(bad, complaint):
    under_test = scheduler()
    answer = under_test.add(bad)
    assert answer is not None
    assert (answer.key, answer.finish_reason, answer.token_ids) == (1, "error", ())
    assert complaint in answer.error
    assert (under_test.num_running, under_test.num_waiting) == (0, 0)


SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=14)
CHUNKS = st.one_of(st.integers(1, 8), st.integers(1, 40), st.just(0))


@settings(max_examples=200, deadline=None)
@given(
    sizes=SIZES,
    chunk=CHUNKS,
    running=st.integers(1, 6),
    block_size=st.integers(1, 8),
    spare_blocks=st.integers(0, 4),
    mixed_steps=st.booleans(),
)
def test_all_requests_finish_whole_however_small_the_cache(
    sizes, chunk, running, block_size, spare_blocks, mixed_steps
):
    """Requests of any length, arriving at any step, over a cache that holds the longest of them and little more."""
    longest = max(prompt + new for prompt, new, _ in sizes)
    blocks = -(-longest // block_size) + spare_blocks
    under_test = scheduler(chunk, running, blocks, block_size, max_prefill_tokens=longest, mixed_steps=mixed_steps)
    requests = [request(key, prompt, new) for key, (prompt, new, _) in enumerate(sizes)]
    arrivals = {key: arrival for key, (_, _, arrival) in enumerate(sizes)}
    prefilled = 0
    finished: dict[int, Completion] = {}
    for number in range(20_000):
        for key, arrival in arrivals.items():
            if arrival == number:
                assert under_test.add(requests[key]) is None
        waiting, preempted = under_test.num_waiting, under_test.num_preemptions
        batch = under_test.schedule()
        if preempted := under_test.num_preemptions - preempted:
            assert under_test.num_waiting == waiting + preempted, "who gives way is not admitted in the same step"
        held = [block for piece in batch.slices for block in piece.sequence.blocks]
        assert len(held) == len(set(held)), "two requests hold the same block"
        assert 0 not in held, "a request holds the padding block"
        assert batch.num_tokens <= (chunk or longest if batch.kind.prefills else running)
        assert mixed_steps or batch.kind is not BatchKind.MIXED
        prefilled += batch.num_prompt_tokens
        for piece in batch.slices:
            assert len(piece.sequence.blocks) * block_size >= piece.sequence.num_computed + piece.num_tokens
        assert under_test.num_running <= running
        due = [piece.sequence for piece in batch.slices if piece.reaches_end]
        for completion in run(under_test, batch, [token(s.request.key, len(s.token_ids)) for s in due]):
            assert completion.key not in finished
            finished[completion.key] = completion
        if len(finished) == len(requests):
            break
    assert {key: completion.token_ids for key, completion in finished.items()} == {
        one.key: expected_tokens(one) for one in requests
    }
    assert under_test.num_free_blocks == blocks
    prompts = sum(len(one.prompt_token_ids) for one in requests)
    assert prefilled == prompts if not under_test.num_preemptions else prefilled > prompts


def launched_batches(
    under_test: Scheduler, requests: list[Request], arrivals: list[int], overlap: bool
) -> Iterator[tuple[ScheduledBatch, set[int], bool]]:
    """Steps until all requests are done: the batch, the keys of all that could have decoded, whether prompts could go.

    Args:
        under_test: with a cache that holds everything, so that nobody waits for blocks.
        requests: each arrives at the step that `arrivals` says.
        arrivals: of each request.
        overlap: whether a batch comes back after the next one is launched.
    """
    decoding: dict[int, int] = {}  # tokens that are still to be launched, of those whose prompts are done
    prompts: dict[int, int] = {}
    under_way: list[tuple[ScheduledBatch, list[Row]]] = []
    for number in range(5_000):
        for one, arrival in zip(requests, arrivals, strict=True):
            if arrival == number:
                assert under_test.add(one) is None
                prompts[one.key] = len(one.prompt_token_ids)
        could_decode = {key for key, left in decoding.items() if left}
        batch = under_test.schedule()
        yield batch, could_decode, bool(prompts)
        for key, num_tokens in shape(batch):
            if key in prompts:
                prompts[key] -= num_tokens
                if prompts[key] == 0:
                    del prompts[key]
                    decoding[key] = requests[key].sampling.max_new_tokens - 1
            else:
                decoding[key] -= 1
        due = [piece.sequence for piece in batch.slices if piece.reaches_end]
        rows = [Row(Generated((token(one.request.key, one.num_tokens),))) for one in due]
        under_test.launch(batch)
        under_way.append((batch, rows))
        if len(under_way) > overlap:
            under_test.resolve(*under_way.pop(0))
        if number > max(arrivals) and batch.kind is BatchKind.IDLE and not under_test.num_running:
            return
    raise AssertionError("the scheduler did not come to an end")


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, chunk=CHUNKS, running=st.integers(1, 14), overlap=st.booleans())
def test_no_running_request_waits_more_than_one_step_for_anothers_prompt(sizes, chunk, running, overlap):
    """Nor do prompts wait for those that decode: of two steps one holds some, or as many run as may."""
    longest = max(prompt + new for prompt, new, _ in sizes)
    under_test = scheduler(chunk, running, blocks=512, max_prefill_tokens=longest, mixed_steps=True)
    requests = [request(key, prompt, new) for key, (prompt, new, _) in enumerate(sizes)]
    waited: set[int] = set()
    prompts_waited = False
    for batch, could_decode, has_prompts in launched_batches(under_test, requests, [s[2] for s in sizes], overlap):
        left_out = could_decode - set(keys(batch))
        assert left_out in (set(), could_decode), "those that decode go together"
        assert not left_out & waited
        assert not left_out or len(could_decode) + (1 if chunk else batch.num_prompt_tokens) > (chunk or longest)
        waited = left_out
        left_out_prompts = has_prompts and not batch.kind.prefills and under_test.num_running < running
        assert not (left_out_prompts and prompts_waited)
        prompts_waited = left_out_prompts


def test_a_cache_too_small_for_all_requests_changes_no_token(random_models, references):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        limits=Limits(chunked_prefill_size=64),
        cache=CacheConfig(num_tokens=320),
    )
    prompts = [[(7 * index + 3 * position) % 126 + 2 for position in range(90)] for index in range(8)]
    with PlainRanks(config) as rank_set:
        completions = rank_set.generate(prompts, SamplingParams(max_new_tokens=40))
        assert sum(stats.preemptions for stats in rank_set.stats.values()) > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == references["qwen3_moe"].greedy(prompt, 40)


@pytest.mark.parametrize("chunk", [7, 300, 1000])
def test_seven_prompts_of_mixed_length_on_four_ranks_whatever_the_chunk(chunk, random_models, references):
    lengths = (1, 3, 17, 40, 64, 150, 300)
    prompts = [[(7 * length + 3 * position) % 126 + 2 for position in range(length)] for length in lengths]
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=4, limits=Limits(chunked_prefill_size=chunk, max_running_requests=4)
    )
    with PlainRanks(config) as rank_set:
        completions = rank_set.generate(prompts, SamplingParams(max_new_tokens=8))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == references["qwen3_moe"].greedy(prompt, 8), len(prompt)
