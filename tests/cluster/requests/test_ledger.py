"""What the driver keeps of requests: tokens across failures, one answer each, nothing of callers that are gone."""

import asyncio

import pytest
from expert_pool.cluster import RankError, RankStats, SamplingParams
from expert_pool.cluster.requests.ledger import Ledger, PoolEvent, Prompt
from expert_pool.cluster.requests.router import Router
from expert_pool.workers.request import Completion, Generated, Progress, RankOutput

PROMPTS = [Prompt((1, 2), SamplingParams(max_new_tokens=9)), Prompt((3,), SamplingParams(max_new_tokens=9))]


def ledger(dp_size: int = 1) -> Ledger:
    return Ledger(Router(dp_size, window=4))


def output(*completions: Completion, progress: tuple[Progress, ...] = ()) -> RankOutput:
    return RankOutput(completions, RankStats(0), progress)


def completion(key: int) -> Completion:
    return Completion(key, Generated((7, 8)), None, "length", 1)


def events(stream) -> list:
    return [stream.events.get_nowait() for _ in range(stream.events.qsize())]


def test_unfinished_requests_are_handed_out_again_with_the_tokens_they_have():
    kept = ledger()
    kept.open(PROMPTS)
    [first, second] = kept.assign()[0]
    kept.settle(output(progress=(Progress(first.key, Generated((5, 6))),)))
    kept.settle(output(completion(second.key), progress=(Progress(first.key, Generated((7,))),)))
    kept.requeue(Router(2, window=4))
    [[again]] = kept.assign().values()
    assert (again.key, again.prompt_token_ids, again.resume_from) == (
        first.key,
        (1, 2),
        Generated((5, 6, 7)),
    )
    assert kept.num_unfinished == 1


def test_a_request_that_finishes_twice_is_answered_once():
    kept = ledger()
    stream = kept.open(PROMPTS)
    kept.assign()
    kept.settle(output(completion(1)))
    kept.requeue(Router(1, window=4))
    kept.settle(output(completion(1), progress=(Progress(1, Generated((9,))),)))
    assert [finished for event in events(stream) for finished in event.finished] == [(1, completion(1))]


def test_what_a_caller_left_is_known_to_be_dropped_on_its_rank_and_is_not_handed_out_again():
    kept = ledger()
    stream = kept.open(PROMPTS)
    kept.assign()
    assert kept.close(stream) == {0: [0, 1]}
    kept.requeue(Router(1, window=4))
    assert kept.assign() == {}
    kept.settle(output(completion(0)))
    assert events(stream) == []


def test_notices_and_the_end_reach_every_caller():
    kept = ledger()
    streams = [kept.open(PROMPTS), kept.open(PROMPTS)]
    error = RankError("over")
    kept.tell("restarting")
    kept.fail(error)
    for stream in streams:
        assert events(stream) == [PoolEvent((), None, "restarting"), error]
    assert kept.num_unfinished == 0
    with pytest.raises(asyncio.QueueEmpty):
        streams[0].events.get_nowait()


def test_what_other_callers_finish_brings_a_stream_counters_once_a_second_a_rank():
    now = [100.0]
    kept = Ledger(Router(1, window=2000), clock=lambda: now[0])
    waiting, busy = kept.open(PROMPTS[:1]), kept.open(PROMPTS[:1] * 1000)
    kept.assign()
    for key in range(1, 1001):
        now[0] += 0.002
        kept.settle(RankOutput((completion(key),), RankStats(key % 2), ()))
    assert [one.finished for one in events(busy)] == [((index, completion(index + 1)),) for index in range(1000)]
    told = events(waiting)
    assert [one.finished for one in told] == [()] * 4
    assert sorted(one.stats.dp_rank for one in told) == [0, 0, 1, 1]
    kept.settle(RankOutput((completion(0),), RankStats(0), ()))
    assert [one.finished for one in events(waiting)] == [((0, completion(0)),)]
