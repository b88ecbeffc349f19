"""One rank is made to disagree, raise or die: an error for everyone that names it, soon, and nobody left waiting.

A disagreement is found before any collective, so the pool goes on once it is mended. Whatever ends a rank inside a
collective ends the pool.
"""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
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
from expert_pool.graphs.plan import CaptureEntry, plan_captures
from expert_pool.workers.engine import RankEngine
from faults_at_start import PLUGIN, session_environment, want
from handle import in_rank
from plain_capture import PlainCapture, have_fault, mend
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
)
from rank_insides import run_script
from rank_logs import said_by
from running_disagreement import NEW_TOKENS, PROMPTS, WITHIN_S, disagree_while_running
from waiting import holds_in_time

FULL_MATRIX = bool(os.environ.get("EXPERT_POOL_FULL_MATRIX"))
LATE_S, START_S = 4.0, 60.0
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


@pytest.fixture(scope="module", params=[2, 4] if FULL_MATRIX else [2], ids=lambda ranks: f"{ranks}ranks")
def rank_set(request: pytest.FixtureRequest, random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    """One set of ranks for all faults that ranks survive."""
    with ForkedRanks(config_of(random_models["qwen3_moe"], request.param)) as ranks:
        yield ranks


@contextmanager
def fault_on(rank_set: ForkedRanks, ranks: tuple[int, ...], fault: Fault, *args: Any) -> Iterator[None]:
    """A fault that these ranks have while the context is open."""
    rank_set.call(have_fault, ranks, fault, args)
    yield
    rank_set.call(mend, ranks)


def failed_capture(rank_set: ForkedRanks, kind: type[ExpertPoolError]) -> str:
    """What the driver raises. Every rank has raised the same, is out of capture mode and holds no graphs."""
    capture, started = PlainCapture(rank_set), time.monotonic()
    with pytest.raises(kind) as raised:
        capture.run()
    assert time.monotonic() - started < WITHIN_S
    message, world_size = str(raised.value), rank_set.rank_config.layout.world_size
    assert capture.told == [message] * world_size
    assert rank_set.call(capture_state) == [(0, 0)] * world_size
    return message


def capture_state(engine: RankEngine) -> tuple[int, int]:
    """Captures still open, and graphs held."""
    return engine.graphs.capture_depth, len(engine.graphs.committed.entries)


def assert_generates(rank_set: ForkedRanks, reference: Any) -> None:
    prompts = PROMPTS[: rank_set.rank_config.layout.world_size]
    by_rank = rank_set.call(run_script, [{0: [prompt]} for prompt in prompts], NEW_TOKENS, False)
    tokens = {key: ids for generated in by_rank for key, ids in generated.token_ids.items()}
    assert [tokens[key] for key in range(len(prompts))] == [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    assert all(generated.report.replays > 0 for generated in by_rank)


def assert_whole_again(rank_set: ForkedRanks, reference: Any) -> None:
    plan, world_size = plan_captures(LIMITS), rank_set.rank_config.layout.world_size
    assert PlainCapture(rank_set).run() == CaptureOutcome(plan, ())
    assert rank_set.call(capture_state) == [(0, len(plan.entries))] * world_size
    assert_generates(rank_set, reference)


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
def test_a_disagreement_at_capture_reaches_everyone_and_is_mended(field, rank_set, references):
    fault, sentence, alike, other = DISAGREEMENTS[field]
    world_size = rank_set.rank_config.layout.world_size
    with fault_on(rank_set, (1,), fault):
        message = failed_capture(rank_set, GeometryError)
    assert f"{sentence} ({listed(world_size, alike, 1, other)})" in message
    assert_whole_again(rank_set, references["qwen3_moe"])


def test_capture_mode_that_every_rank_leaves_on_is_an_error_everywhere(rank_set, references):
    with fault_on(rank_set, tuple(range(rank_set.rank_config.layout.world_size)), capture_mode_left_on):
        message = failed_capture(rank_set, GeometryError)
    assert "is 1 deep in capture mode after the last recording, and has to be out of it" in message
    assert_whole_again(rank_set, references["qwen3_moe"])


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_every_entry_of_the_counts_is_compared(faulty_rank, rank_set, references):
    world_size = rank_set.rank_config.layout.world_size
    for dp_rank in range(world_size):
        with fault_on(rank_set, (faulty_rank,), other_count, dp_rank):
            message = failed_capture(rank_set, GeometryError)
        expected = f"rehearsal of decode[3 x 1] global_num_tokens_cpu[{dp_rank}] differs"
        assert f"{expected} ({listed(world_size, 3, faulty_rank, 4)})" in message
    assert_whole_again(rank_set, references["qwen3_moe"])


def test_another_plan_on_one_rank_is_refused_by_its_digest(rank_set, references):
    plan, world_size = plan_captures(LIMITS), rank_set.rank_config.layout.world_size
    other = plan.without({plan.entries[0]}).digest
    with fault_on(rank_set, (1,), other_plan):
        message = failed_capture(rank_set, GeometryError)
    assert f"plan digest differs ({listed(world_size, plan.digest, 1, other)}, driver: {plan.digest})" in message
    assert_whole_again(rank_set, references["qwen3_moe"])


ENTRY, REASON = CaptureEntry("decode", 3), "needs 3 KV blocks, this rank has 2"
DROPPED = f"decode[3 x 1] dropped on all ranks: rank 1 {REASON}"


def test_h5_what_one_rank_cannot_record_no_rank_records(rank_set, references, caplog):
    """The reason and the rank are in the outcome and in the driver's log; batches of that size run otherwise."""
    with fault_on(rank_set, (1,), cannot_record, str(ENTRY), REASON):
        outcome = PlainCapture(rank_set).run()
        assert outcome.plan == plan_captures(LIMITS).without({ENTRY})
        assert [str(drop) for drop in outcome.dropped] == [DROPPED]
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [DROPPED]
        states = rank_set.call(capture_state)
        assert states == [(0, len(outcome.plan.entries))] * len(states)
        assert_generates(rank_set, references["qwen3_moe"])
    assert_whole_again(rank_set, references["qwen3_moe"])


def test_a_rank_that_raises_in_rehearsal_is_named_and_others_go_on_with_it(rank_set, references):
    with fault_on(rank_set, (1,), ends_inside, "rehearse", "raising"):
        message = failed_capture(rank_set, RankError)
    assert message == f"rank 1 failed during rehearse: RuntimeError: {INJECTED}"
    assert_whole_again(rank_set, references["qwen3_moe"])


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which faults ranks of pools start with; see `faults_at_start.want`."""
    return tmp_path_factory.mktemp("faults") / "wanted.json"


@pytest.fixture(scope="module")
def session(faults: Path) -> Iterator[None]:
    """A Ray session for all pools here, with places for two at a time."""
    for module in (rank_faults, rank_insides, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)  # actors do not see the folder of the tests
    places = 8 if FULL_MATRIX else 4
    with session_environment(faults):
        ray.init(address="local", num_cpus=places, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_fault_is_left(faults: Path) -> Iterator[None]:
    yield
    faults.unlink(missing_ok=True)


def with_faults(model: str, ranks: int, **recovery: Any) -> PoolConfig:
    config = config_of(model, ranks)
    return msgspec.structs.replace(config, plugins=(PLUGIN,), recovery=RecoveryConfig(backoff_s=0, **recovery))


def generated_by(pool: ExpertPool) -> list[tuple[int, ...]]:
    tokens = {one.index: one.token_ids for one in pool.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))}
    return [tokens[index] for index in range(len(PROMPTS))]


@pytest.mark.long
def test_h5_a_pool_that_drops_a_graph_says_so_and_one_that_disagrees_at_another_size_keeps_the_one_it_has(
    faults, session, random_models, references, tmp_path
):
    """And what a caller leaves while ranks record is run by none of them."""
    expected = [references["qwen3_moe"].greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    lines: list[str] = []
    want(faults, [1], "cannot_record", str(ENTRY), REASON)
    config = with_faults(random_models["qwen3_moe"], 2, max_restarts=0)
    with ExpertPool.launch(config, report=lines.append) as pool, ThreadPoolExecutor(1) as threads:
        assert DROPPED in lines
        for report in pool.status().graphs:
            assert [use.entry for use in report.graphs] == list(plan_captures(LIMITS).without({ENTRY}).entries)
        assert generated_by(pool) == expected

        stamp = tmp_path / "asked"
        want(faults, [0], "agrees_late", str(stamp), LATE_S)
        sampling = [SamplingParams(max_new_tokens=number, ignore_eos=True) for number in (1, 450)]
        completions = pool.generate([PROMPTS[0]] * 2, sampling)
        next(completions)
        resizing = threads.submit(pool.resize, 1)
        assert holds_in_time(stamp.exists, START_S)
        assert pool.status().state == "resizing"
        completions.close()
        resizing.result()
        status = pool.status()
        assert (status.unfinished, sum(stats.generated_tokens for stats in status.stats)) == (0, 0)

        want(faults, [1], "other_bucket")
        said = rf"^not resized, the pool has 1 ranks: ranks disagree: .*bucket differs \({listed(2, 2, 1, 1)}\)"
        with pytest.raises(GeometryError, match=said):
            pool.resize(2)
        status = pool.status()
        assert (status.state, len(status.places), status.restarts) == ("ready", 1, 0)
        assert [use.entry for use in status.graphs[0].graphs] == list(plan_captures(LIMITS).entries)
        assert generated_by(pool) == expected
        assert pool.status().graphs[0].replays > 0


ENDINGS = [(by, stage) for by in ("raising", "dying") for stage in ("rehearse", "warm_up", "record")]
SAMPLE_ENDINGS = [("dying", "record")]


@pytest.mark.parametrize("ranks", [2, 4] if FULL_MATRIX else [2])
@pytest.mark.parametrize(("by", "stage"), ENDINGS if FULL_MATRIX else SAMPLE_ENDINGS)
def test_a_rank_that_ends_inside_capture_is_named_and_takes_no_rank_into_a_hang(
    by, stage, ranks, faults, session, random_models
):
    """Where it raises, the pool is not started again: that the others are then ended is no loss of a process."""
    lines: list[str] = []
    processes: list[psutil.Process] = []
    name = f"{by}-{stage}-{ranks}"

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith("loading"):
            places = get_answer(named_driver(name).status.remote()).places
            processes.extend(psutil.Process(place.pid) for place in places)

    want(faults, [1], "ends_inside", stage, by)
    config = with_faults(random_models["qwen3_moe"], ranks, max_restarts=3 if by == "raising" else 0)
    with pytest.raises(RankError) as raised:
        ExpertPool.launch(config, report=on_line, name=name)
    message = str(raised.value)
    where = stage if stage == "rehearse" else f"{stage} piecewise[16 x 1]"
    cause = f"failed during {where}: RuntimeError: {INJECTED}" if by == "raising" else f"died during {where}: "
    assert message.startswith("rank 1 ")
    assert cause in message
    assert not [line for line in lines if "restarting" in line]
    assert len(processes) == ranks
    # Where nothing was sent yet, ranks go on, until the pool that could not start ends them.
    told = [rank for rank in range(ranks) if rank != 1 and (by, stage) != ("raising", "rehearse")]
    assert_told_and_ended(processes, message, survivors=told)


@pytest.mark.parametrize("ranks", [2, 4] if FULL_MATRIX else [2])
@pytest.mark.parametrize("by", ["raising", pytest.param("dying", marks=pytest.mark.long)])
def test_a_rank_that_ends_inside_a_step_is_named_on_every_survivor(by, ranks, session, random_models):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"], ranks)) as pool:
        processes = [psutil.Process(place.pid) for place in pool.status().places]
        completions = pool.generate(PROMPTS, SamplingParams(max_new_tokens=480, ignore_eos=True))
        in_rank(pool, 1, inject, ends_inside, "step", by)
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
        in_rank(pool, 1, inject, other_expert_backend)
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
