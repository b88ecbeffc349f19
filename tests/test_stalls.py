"""Calls that hang on a rank: found by a deadline of the host, wherever they hang, and named."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import ray
from expert_pool.cluster import (
    ExpertPool,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
    driver_handle,
)
from expert_pool.cluster.driver_handle import get_answer
from expert_pool.cluster.failure import describe_failure
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank import RankPlace
from plain_ranks import PlainRanks

HANGS_S = 100.0
PLACES = tuple(RankPlace(rank, "node", "10.0.0.1", 100 + rank, ()) for rank in range(3))


def hang_in_a_launch(engine: RankEngine) -> None:
    """As where the device's queue is full of kernels that wait for a peer: the call neither returns nor raises."""
    executor, run = engine._loop._executor, engine._loop._executor.run
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
    assert time.monotonic() - started < HANGS_S / 2


def test_a_pause_is_no_stall(random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2, worker=WorkerConfig(step_timeout_s=4))
    with PlainRanks(config) as ranks:
        first = ranks.generate([[5, 17]], SamplingParams(max_new_tokens=4))
        time.sleep(5)
        assert ranks.generate([[5, 17]], SamplingParams(max_new_tokens=4))[0].token_ids == first[0].token_ids


@pytest.fixture
def session() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see the folder of the tests
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("stage", ["rehearse", "warm_up"])
def test_a_rank_that_hangs_in_a_capture_takes_the_pool_down(stage, session, random_models):
    """It answers no other call, so the pool must not go on to serve with it."""
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2, recovery=RecoveryConfig(max_restarts=0))
    with ExpertPool.launch(config) as pool:
        processes = [psutil.Process(place.pid) for place in pool.status().places]
        set_deadline = pool._driver.__ray_call__.remote(lambda driver: setattr(driver._gang, "_start_timeout_s", 2.0))
        get_answer(set_deadline)
        actors = get_answer(pool._driver.__ray_call__.remote(lambda driver: driver._gang.actors))
        get_answer(actors[1].__ray_call__.remote(lambda actor: hang_in(actor._engine.graphs, stage)))
        with pytest.raises(RankError, match=rf"ranks \[.*1\] did not finish {stage}.* within"):
            get_answer(pool._driver.recapture.remote())
        assert pool.status().state == "failed"
        assert psutil.wait_procs(processes, timeout=10)[1] == []


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


def hang_in(graphs, stage: str) -> None:
    setattr(graphs, stage, lambda *arguments: time.sleep(100.0))


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
