"""Calls that hang on a rank: found by a deadline of the host, wherever they hang, and named."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import ray
from expert_pool.cluster import (
    ExpertPool,
    PlacementConfig,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.driver import handle as driver_handle
from expert_pool.cluster.ranks import liveness
from expert_pool.cluster.ranks.failure import SilentRank, describe_failure
from expert_pool.cluster.ray_session.ray_internals import process_of
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank import RankPlace
from faults_at_start import PLUGIN, session_environment, want
from handle import executor_of
from kill_scene import processes_of
from plain_ranks import PlainRanks
from waiting import holds_in_time

HANGS_S, HANG_NOTICED_S = 300.0, 60.0
PLACES = tuple(RankPlace(rank, "node", "10.0.0.1", 100 + rank, ()) for rank in range(3))


def hang_in_a_launch(engine: RankEngine) -> None:
    """As where the device's queue is full of kernels that wait for a peer: the call neither returns nor raises."""
    executor, run = executor_of(engine), executor_of(engine).run
    launched = [0]

    def hang(*arguments):
        launched[0] += 1
        if launched[0] == 3:
            time.sleep(HANGS_S)
        return run(*arguments)

    executor.run = hang


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_that_hangs_ends_at_the_deadline(overlap, random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], worker=WorkerConfig(step_timeout_s=4, overlap=overlap))
    started = time.monotonic()
    with (
        pytest.raises(AssertionError, match=r"a step timed out: .* for 2 s \(worker.step_timeout_s, less "),
        PlainRanks(config, prepare=hang_in_a_launch) as ranks,
    ):
        ranks.generate([[5, 17]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert time.monotonic() - started < HANGS_S / 4


def test_a_pause_is_no_stall(random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2, worker=WorkerConfig(step_timeout_s=4))
    with PlainRanks(config) as ranks:
        first = ranks.generate([[5, 17]], SamplingParams(max_new_tokens=4))
        time.sleep(5)
        assert ranks.generate([[5, 17]], SamplingParams(max_new_tokens=4))[0].token_ids == first[0].token_ids


@contextmanager
def session_of(places: int) -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see the folder of the tests
    ray.init(address="local", num_cpus=places, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def session() -> Iterator[None]:
    with session_of(2):
        yield


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", ["rehearse", "warm_up"])
def test_a_rank_that_hangs_in_a_capture_takes_the_pool_down(stage, random_models, tmp_path):
    """It answers no other call, so the pool must not go on to serve with it."""
    faults = tmp_path / "faults.json"
    want(faults, [1], "hangs_inside", stage, HANGS_S)
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        plugins=(PLUGIN,),
        placement=PlacementConfig(start_timeout_s=HANG_NOTICED_S),
        recovery=RecoveryConfig(backoff_s=0),
    )
    started: list[psutil.Process] = []
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith("loading"):
            started.extend(processes_of("Rank"))

    with session_environment(faults), session_of(2):
        said = rf"^ranks \[.*1\] did not finish {stage}.* within placement.start_timeout_s={HANG_NOTICED_S:g}$"
        with pytest.raises(RankError, match=said):
            ExpertPool.launch(config, report=on_line)
        assert not [line for line in lines if "restarting" in line]
        assert len(started) == 2
        assert psutil.wait_procs(started, timeout=10)[1] == []


@pytest.mark.long
def test_callers_of_a_driver_whose_process_is_stopped_are_told(session, random_models, monkeypatch):
    """Ray goes on waiting for it: it has not ended."""
    monkeypatch.setattr(driver_handle, "_SILENT_S", 4.0)
    worker = WorkerConfig(step_timeout_s=4)
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], worker=worker)) as pool:
        sampling = [SamplingParams(max_new_tokens=1)] + [SamplingParams(max_new_tokens=400, ignore_eos=True)] * 8
        completions = pool.generate([[5, 17]] * 9, sampling)
        assert next(completions).index == 0, "generation is under way"
        pid = pool.status().driver_pid
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(RankError, match="the pool's driver actor has not answered for 4 s: its process"):
                list(completions)
            assert time.monotonic() - started < 20
            with pytest.raises(RankError, match="the pool's driver actor has not answered for 4 s: its process"):
                pool.resize(2)
        finally:
            os.kill(pid, signal.SIGCONT)


@ray.remote
class Frozen:
    """An actor whose process is stopped before it answers anything."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def clock(self) -> float:
        return time.perf_counter()


def test_a_process_that_never_answers_is_silent_and_one_that_is_not_there_yet_is_not(session, monkeypatch):
    """Ray may look for a place for long; once it has started a process, that has to answer."""
    monkeypatch.setattr(liveness, "_START_S", 2.0)
    frozen, placeless = Frozen.remote(), Frozen.options(num_cpus=100).remote()

    async def listen() -> None:
        signs = liveness.LivenessCheck()
        signs.begin([placeless, frozen], step_timeout_s=0.0)
        with pytest.raises(SilentRank, match="no answer for 2 s"):
            await signs.while_there(1, never())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(signs.while_there(0, never()), timeout=3.0)
        signs.stop()

    asyncio.run(listen())
    assert process_of(placeless) is None
    ray.kill(frozen)


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.long
def test_a_rank_that_freezes_before_its_first_answer_is_replaced(session, random_models):
    """Ray gives it a process that it holds ready, which is stopped."""

    def freeze(line: str) -> None:
        if line == "starting ranks" and not frozen:
            frozen.extend(process for process in processes_of("IDLE") if process.is_running())
            for process in frozen:
                process.suspend()

    def has_processes_ready() -> bool:
        return len(processes_of("IDLE")) >= 2  # one is the driver's

    frozen: list[psutil.Process] = []
    worker, recovery = WorkerConfig(step_timeout_s=4), RecoveryConfig(max_restarts=1, backoff_s=0)
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=1, worker=worker, recovery=recovery)
    assert holds_in_time(has_processes_ready, within_s=60)
    with ExpertPool.launch(config, report=freeze) as pool:
        assert frozen
        said = r"rank 0 \(process \d+ on .*\) has not answered during place for 60 s, longer than "
        assert re.match(said, pool.status().last_failure or ""), pool.status()
        assert len(list(pool.generate([[5]], SamplingParams(max_new_tokens=2)))) == 1
    assert gone_in_time(frozen)


def gone_in_time(frozen: list[psutil.Process]) -> bool:
    for process in frozen:
        if process.is_running():
            process.kill()
    return psutil.wait_procs(frozen, timeout=10)[1] == []


def test_whoever_launches_is_told_that_rays_memory_monitor_ended_the_driver(random_models, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.0001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with pytest.raises(RankError, match=r"driver actor ended while the pool started.*node running low on memory"):
            ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"]))
    finally:
        ray.shutdown()


def test_a_lost_connection_is_not_called_a_missed_deadline():
    failures = {0: RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234")}
    said = str(describe_failure(failures, "while running", PLACES, {1: 300.0}))
    assert said.startswith("rank 1 (process 101 on 10.0.0.1) broke off while running: rank 0 lost its connection: ")
    assert "step_timeout_s" not in said


@pytest.mark.parametrize(
    "waited",
    [
        RankError("a step on this rank's GPU timed out after 6 s (worker.step_timeout_s, less the driver's time)"),
        RankError("a step timed out: a call on this rank has not returned for 6 s (worker.step_timeout_s, less ...)"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation"),
    ],
)
def test_whoever_waited_the_silent_rank_is_named(waited):
    said = str(describe_failure({0: waited, 2: waited}, "while running", PLACES, {1: 10.0}))
    assert said.startswith(
        "rank 1 (process 101 on 10.0.0.1) did not take part in a step within worker.step_timeout_s=10"
    )
