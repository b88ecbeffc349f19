"""One rank is made to disagree, raise or die: an error for everyone that names it, soon, and nobody left waiting.

A disagreement is found before any collective, so the pool goes on once it is mended. Whatever ends a rank inside a
collective ends the pool.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import psutil
import pytest
import rank_faults
import rank_insides
import ray
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    GeometryError,
    Limits,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.driver.handle import get_answer, named_driver
from expert_pool.cluster.ranks.capture import CaptureOutcome
from expert_pool.dispatch.errors import ExpertPoolError
from expert_pool.graphs.plan import CaptureEntry, CapturePlan, plan_captures
from expert_pool.workers.engine import RankEngine
from plain_ranks import ForkedRanks
from rank_faults import (
    INJECTED,
    OTHER_BACKEND,
    OTHER_SCALE,
    OTHER_TABLE,
    Fault,
    cannot_record,
    capture_mode_entered_twice,
    capture_mode_left_on,
    during_capture,
    ends_inside,
    inject,
    one_collective_more,
    other_bucket,
    other_buffer_shape,
    other_capacity,
    other_committed_graphs,
    other_config,
    other_count,
    other_dispatcher,
    other_expert_backend,
    other_fp8_scale,
    other_padding_mode,
    other_plan,
    other_table,
    other_tokens_per_request,
    swapped_collectives,
    undo,
)
from rank_logs import said_by
from running_disagreement import NEW_TOKENS, PROMPTS, WITHIN_S, disagree_while_running
from waiting import holds_in_time

FULL_MATRIX = bool(os.environ.get("EXPERT_POOL_FULL_MATRIX"))
LATE_S = 4.0
MAX_REQUESTS = 3
LIMITS = Limits(
    max_running_requests=MAX_REQUESTS,
    cuda_graph_bs=(1, 2, 3),
    chunked_prefill_size=16,
    piecewise_cuda_graph_max_tokens=16,
)


def config_of(model: str, ranks: int, step_timeout_s: float = 60.0) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=ranks,
        dispatch="allgather",
        limits=LIMITS,
        cache=CacheConfig(num_tokens=1024),
        worker=WorkerConfig(step_timeout_s=step_timeout_s),
        recovery=RecoveryConfig(max_restarts=0),
    )


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """A Ray session for all pools here, with places for two at a time."""
    for module in (rank_faults, rank_insides, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)  # actors do not see the folder of the tests
    places = 8 if FULL_MATRIX else 4
    ray.init(address="local", num_cpus=places, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=[2, 4] if FULL_MATRIX else [2], ids=lambda ranks: f"{ranks}ranks")
def pool(request: pytest.FixtureRequest, session: None, random_models: dict[str, str]) -> Iterator[ExpertPool]:
    """One pool for all faults that a pool survives."""
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], request.param)) as launched:
        yield launched


def on_rank(pool: ExpertPool, rank: int, function: Any, *args: Any) -> Any:
    """What `function(engine, *args)` returns in the actor of this rank."""
    actors = get_answer(pool._driver.__ray_call__.remote(lambda driver: driver._rank_set.actors))
    return get_answer(actors[rank].__ray_call__.remote(lambda actor: function(actor._engine, *args)))


def recapture(pool: ExpertPool) -> CaptureOutcome:
    return get_answer(pool._driver.recapture.remote())


@contextmanager
def fault_on(pool: ExpertPool, rank: int, fault: Fault, *args: Any) -> Iterator[None]:
    """A fault that exists while graphs are being made."""
    on_rank(pool, rank, inject, during_capture, fault, *args)
    yield
    on_rank(pool, rank, undo)


def failed_recapture(pool: ExpertPool, kind: type[ExpertPoolError]) -> str:
    started = time.monotonic()
    with pytest.raises(kind) as raised:
        recapture(pool)
    assert time.monotonic() - started < WITHIN_S
    return str(raised.value)


def capture_state(engine: RankEngine) -> tuple[str | None, int, int]:
    """What the driver told this rank last, captures still open, and graphs held."""
    graphs = engine.graphs
    return graphs.last_failure, graphs.mode.depth, len(graphs.committed.entries)


def assert_generates(pool: ExpertPool, reference: Any) -> None:
    tokens = {one.index: one.token_ids for one in pool.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))}
    assert [tokens[index] for index in range(len(PROMPTS))] == [reference.greedy(p, NEW_TOKENS) for p in PROMPTS]


def assert_whole_again(pool: ExpertPool, reference: Any) -> None:
    plan, world_size = plan_captures(LIMITS), pool.rank_config.layout.world_size
    assert recapture(pool) == CaptureOutcome(plan, ())
    assert [on_rank(pool, rank, capture_state) for rank in range(world_size)] == [
        (None, 0, len(plan.entries))
    ] * world_size
    assert_generates(pool, reference)
    assert all(report.replays > 0 for report in pool.status().graphs)


def listed(world_size: int, alike: object, faulty_rank: int, other: object) -> str:
    """How a message lists who holds what."""
    return ", ".join(f"rank {rank}: {other if rank == faulty_rank else alike}" for rank in range(world_size))


DISAGREEMENTS = {
    "bucket": (other_bucket, "rehearsal of decode[2 x 1] bucket differs", 2, 1),
    "tokens_per_request": (other_tokens_per_request, "rehearsal of decode[1 x 1] tokens_per_request differs", 1, 2),
    "padding_mode": (other_padding_mode, "rehearsal of decode[3 x 1] padding_mode differs", "MAX_LEN", "SUM_LEN"),
    # The largest entry no longer fits the smaller capacity, so it is dropped before entries are compared.
    "capacity": (other_capacity, "rehearsal of decode[3 x 1] capacity differs", 16, 15),
    "dispatcher": (other_dispatcher, "piecewise[16 x 1] dispatcher differs", "allgather", "another dispatcher"),
    "expert_backend": (other_expert_backend, "expert_backend differs", "torch grouped_mm", OTHER_BACKEND),
    "tuning": (other_table, "rehearsal of piecewise[16 x 1] tuning differs", "", OTHER_TABLE),
    "fp8_scale": (other_fp8_scale, "piecewise[16 x 1] quantisation_scales[0] differs", "none", OTHER_SCALE),
    "buffer_shape": (other_buffer_shape, "rehearsal of piecewise[16 x 1] static_buffers[7].shape[1] differs", 32, 33),
    "capture_mode": (capture_mode_left_on, "rehearsal of piecewise[16 x 1] capture_depth differs", 1, 2),
    "capture_mode_while_recording": (
        capture_mode_entered_twice,
        "recording of piecewise[16 x 1] capture_depth differs",
        1,
        2,
    ),
    "one_collective_more": (
        one_collective_more,
        "rehearsal of decode[3 x 1] collectives[6] differs",
        "none",
        "all_gather ep (1, 7) float32",
    ),
    "collective_order": (
        swapped_collectives,
        "rehearsal of piecewise[16 x 1] collectives[0].op differs",
        "all_gather",
        "all_to_all",
    ),
}


@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_a_disagreement_at_capture_reaches_everyone_and_is_mended(field, pool, references):
    fault, sentence, alike, other = DISAGREEMENTS[field]
    world_size = pool.rank_config.layout.world_size
    with fault_on(pool, 1, fault):
        message = failed_recapture(pool, GeometryError)
        assert f"{sentence} ({listed(world_size, alike, 1, other)})" in message
        states = [on_rank(pool, rank, capture_state) for rank in range(world_size)]
        assert states == [(message, 0, 0)] * world_size
    assert_whole_again(pool, references["qwen3_moe"])


def test_capture_mode_that_every_rank_leaves_on_is_an_error_everywhere(pool, references):
    ranks = range(pool.rank_config.layout.world_size)
    with ExitStack() as faults:
        for rank in ranks:
            faults.enter_context(fault_on(pool, rank, capture_mode_left_on))
        message = failed_recapture(pool, GeometryError)
        assert "is 1 deep in capture mode after the last recording, and has to be out of it" in message
        assert [on_rank(pool, rank, capture_state)[1:] for rank in ranks] == [(0, 0)] * len(ranks)
    assert_whole_again(pool, references["qwen3_moe"])


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_every_entry_of_the_counts_is_compared(faulty_rank, pool, references):
    world_size = pool.rank_config.layout.world_size
    for dp_rank in range(world_size):
        with fault_on(pool, faulty_rank, other_count, dp_rank):
            message = failed_recapture(pool, GeometryError)
        expected = f"rehearsal of decode[3 x 1] global_num_tokens_cpu[{dp_rank}] differs"
        assert f"{expected} ({listed(world_size, 3, faulty_rank, 4)})" in message
        assert [on_rank(pool, r, capture_state) for r in range(world_size)] == [(message, 0, 0)] * world_size
    assert_whole_again(pool, references["qwen3_moe"])


def test_another_plan_on_one_rank_is_refused_by_its_digest(pool, references):
    plan, world_size = plan_captures(LIMITS), pool.rank_config.layout.world_size
    other = plan.without({plan.entries[0]}).digest
    with fault_on(pool, 1, other_plan):
        message = failed_recapture(pool, GeometryError)
    assert f"plan digest differs ({listed(world_size, plan.digest, 1, other)}, driver: {plan.digest})" in message
    assert [on_rank(pool, rank, capture_state) for rank in range(world_size)] == [(message, 0, 0)] * world_size
    assert_whole_again(pool, references["qwen3_moe"])


def test_h5_what_one_rank_cannot_record_no_rank_records(pool, references):
    """The reason and the rank are in the outcome and in the driver's log; batches of that size run otherwise."""
    entry, reason = CaptureEntry("decode", 3), "needs 3 KV blocks, this rank has 2"
    world_size = pool.rank_config.layout.world_size
    get_answer(pool._driver.__ray_call__.remote(keep_warnings))
    with fault_on(pool, 1, cannot_record, entry, reason):
        outcome = recapture(pool)
        assert outcome.plan == plan_captures(LIMITS).without({entry})
        [drop] = outcome.dropped
        assert str(drop) == f"decode[3 x 1] dropped on all ranks: rank 1 {reason}"
        assert get_answer(pool._driver.__ray_call__.remote(kept_warnings)) == [str(drop)]
        states = [on_rank(pool, rank, capture_state) for rank in range(world_size)]
        assert states == [(None, 0, len(outcome.plan.entries))] * world_size
        assert_generates(pool, references["qwen3_moe"])
    assert_whole_again(pool, references["qwen3_moe"])


class KeepingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def keep_warnings(driver: Any) -> None:
    driver.kept = KeepingHandler()
    logging.getLogger("expert_pool.cluster.ranks.capture").addHandler(driver.kept)


def kept_warnings(driver: Any) -> list[str]:
    logging.getLogger("expert_pool.cluster.ranks.capture").removeHandler(driver.kept)
    return driver.kept.messages


def test_a_rank_that_raises_in_rehearsal_is_named_and_the_pool_goes_on(pool, references):
    world_size = pool.rank_config.layout.world_size
    with fault_on(pool, 1, ends_inside, "rehearse", "raising"):
        message = failed_recapture(pool, RankError)
        assert message == f"rank 1 failed during rehearse: RuntimeError: {INJECTED}"
        assert [on_rank(pool, rank, capture_state) for rank in range(world_size)] == [(message, 0, 0)] * world_size
        assert pool.status().state == "ready"
    assert_whole_again(pool, references["qwen3_moe"])


def agree_late(engine: RankEngine) -> None:
    agree = engine.graphs.agree

    def late(plan: CapturePlan) -> Any:
        del engine.graphs.agree
        time.sleep(LATE_S)
        return agree(plan)

    engine.graphs.agree = late


def generated_tokens(pool: ExpertPool) -> int:
    return sum(stats.generated_tokens for stats in pool.status().stats)


def test_what_a_caller_leaves_during_a_capture_is_dropped_on_its_rank(pool):
    before = generated_tokens(pool)
    sampling = [SamplingParams(max_new_tokens=number, ignore_eos=True) for number in (1, 450)]
    completions = pool.generate([PROMPTS[0]] * 2, sampling)
    next(completions)
    on_rank(pool, 0, agree_late)
    captured = pool._driver.recapture.remote()
    assert holds_in_time(lambda: pool.status().state == "capturing", LATE_S)
    completions.close()
    assert get_answer(captured).dropped == ()
    idle = lambda: all(stats.running + stats.waiting == 0 for stats in pool.status().stats)  # noqa: E731
    assert holds_in_time(idle, WITHIN_S)
    assert generated_tokens(pool) - before < 450


ENDINGS = [("dying", "rehearse"), *((by, stage) for by in ("raising", "dying") for stage in ("warm_up", "record"))]
SAMPLE_ENDINGS = [("raising", "warm_up"), ("dying", "record")]


@pytest.mark.parametrize("ranks", [2, 4] if FULL_MATRIX else [2])
@pytest.mark.parametrize(("by", "stage"), ENDINGS if FULL_MATRIX else SAMPLE_ENDINGS)
def test_a_rank_that_ends_inside_capture_is_named_and_takes_no_rank_into_a_hang(
    by, stage, ranks, session, random_models
):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], ranks)) as pool:
        processes = [psutil.Process(place.pid) for place in pool.status().places]
        on_rank(pool, 1, inject, ends_inside, stage, by)
        message = failed_recapture(pool, RankError)
        where = stage if stage == "rehearse" else f"{stage} piecewise[16 x 1]"
        cause = f"failed during {where}: RuntimeError: {INJECTED}" if by == "raising" else f"died during {where}: "
        assert message.startswith("rank 1 ")
        assert cause in message
        assert pool.status().state == "failed"
        assert message in (pool.status().failure or "")
        assert_told_and_ended(processes, message, survivors=[rank for rank in range(ranks) if rank != 1])
        with pytest.raises(RankError, match="rank 1"):
            next(pool.generate(PROMPTS))


@pytest.mark.long
def test_a_rank_that_raises_in_the_first_capture_is_not_tried_again(session, random_models):
    """That the others are then ended is no loss of a process, which would be a reason to begin again."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line == "starting ranks":
            get_answer(named_driver("first").__ray_call__.remote(raise_in_the_first_capture))

    config = msgspec.structs.replace(config_of(random_models["qwen3_moe"], 2), recovery=RecoveryConfig(backoff_s=0))
    with pytest.raises(RankError, match=rf"^rank 1 failed during warm_up .*{INJECTED}"):
        ExpertPool.launch(config, report=on_line, name="first")
    assert not [line for line in lines if "restarting" in line]


def raise_in_the_first_capture(driver: Any) -> None:
    pool_ranks = driver._life.pool_ranks
    capture = pool_ranks.capture

    async def with_a_fault() -> None:
        await pool_ranks.rank_set.actors[1].__ray_call__.remote(
            lambda actor: inject(actor._engine, ends_inside, "warm_up", "raising")
        )
        await capture()

    pool_ranks.capture = with_a_fault


@pytest.mark.parametrize("ranks", [2, 4] if FULL_MATRIX else [2])
@pytest.mark.parametrize("by", ["raising", pytest.param("dying", marks=pytest.mark.long)])
def test_a_rank_that_ends_inside_a_step_is_named_on_every_survivor(by, ranks, session, random_models):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], ranks)) as pool:
        processes = [psutil.Process(place.pid) for place in pool.status().places]
        completions = pool.generate(PROMPTS, SamplingParams(max_new_tokens=480, ignore_eos=True))
        on_rank(pool, 1, inject, ends_inside, "step", by)
        started = time.monotonic()
        with pytest.raises(RankError) as raised:
            list(completions)
        assert time.monotonic() - started < WITHIN_S
        cause = f"rank 1 failed while running: RuntimeError: {INJECTED}" if by == "raising" else "died while running: "
        assert cause in str(raised.value)
        assert_told_and_ended(processes, str(raised.value), survivors=[rank for rank in range(ranks) if rank != 1])


def assert_told_and_ended(processes: list[psutil.Process], message: str, survivors: list[int]) -> None:
    """The ranks that lived heard and said which rank ended the pool and why, and no process is left."""
    assert message.startswith("rank 1 ")
    for rank in survivors:
        assert said_by(processes[rank].pid, f"rank {rank} is ended: {message}")
    _, left = psutil.wait_procs(processes, timeout=WITHIN_S)
    assert left == []


@pytest.mark.parametrize("ranks", [2, 4] if FULL_MATRIX else [2])
def test_a_disagreement_in_a_running_pool_ends_it_for_everyone(ranks, session, random_models):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], ranks)) as pool:
        processes = [psutil.Process(place.pid) for place in pool.status().places]
        lengths = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in (1, 480, 480)]
        completions = pool.generate([[3, 4], [5, 6], [7, 8]], lengths)
        assert next(completions).num_completion_tokens == 1
        started = time.monotonic()
        on_rank(pool, 1, inject, other_expert_backend)
        with pytest.raises(GeometryError) as raised:
            list(completions)
        assert time.monotonic() - started < WITHIN_S
        expected = f"expert_backend differs ({listed(ranks, 'torch grouped_mm', 1, OTHER_BACKEND)})"
        assert expected in str(raised.value)
        assert f"raised on ranks {list(range(ranks))}" in str(raised.value)
        _, left = psutil.wait_procs(processes, timeout=WITHIN_S)
        assert left == []


STEP_DISAGREEMENTS = {
    "capacity": (other_capacity, "capacity differs", 16, 15),
    "dispatcher": (other_dispatcher, "dispatcher differs", "allgather", "another dispatcher"),
    "expert_backend": (other_expert_backend, "expert_backend differs", "torch grouped_mm", OTHER_BACKEND),
    "tuning": (other_table, "tuning differs", "", OTHER_TABLE),
    "fp8_scale": (other_fp8_scale, "quantisation_scales[0] differs", "none", OTHER_SCALE),
    "capture_mode": (capture_mode_left_on, "capture_depth differs", 0, 1),
    "graphs": (other_committed_graphs, "graphs.entries[3] differs", "decode 1 1 0", "none"),
    "config": (other_config, "config.limits.max_running_requests differs", MAX_REQUESTS, MAX_REQUESTS + 1),
}


@pytest.fixture(scope="module", params=[2, 4] if FULL_MATRIX else [2], ids=lambda ranks: f"{ranks}ranks")
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    with ForkedRanks(config_of(random_models["qwen3_moe"], request.param)) as ranks:
        yield ranks


@pytest.mark.parametrize("field", STEP_DISAGREEMENTS)
def test_a_disagreement_at_a_step_is_raised_on_all_ranks_and_generation_goes_on_once_mended(
    field, rank_set, references
):
    fault, sentence, alike, other = STEP_DISAGREEMENTS[field]
    world_size = rank_set.rank_config.layout.world_size
    by_rank = rank_set.call(disagree_while_running, fault, world_size - 1)
    tokens: dict[int, tuple[int, ...]] = {}
    for message, seconds, generated in by_rank:
        assert message.startswith("ranks disagree before a step: ")
        assert f"{sentence} ({listed(world_size, alike, world_size - 1, other)})" in message
        assert seconds < WITHIN_S
        tokens |= generated
    for key, prompt in enumerate(PROMPTS[:world_size]):
        expected = references["qwen3_moe"].greedy(prompt, NEW_TOKENS)
        assert tokens[key][: len(expected)] == expected
