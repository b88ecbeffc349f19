"""Pools that cannot start, and pools that lose a rank."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import (
    CheckpointError,
    ConfigError,
    ExpertPool,
    Limits,
    PlacementConfig,
    PlacementError,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.driver.lifecycle import Lifecycle
from expert_pool.cluster.driver.rebuild import Rebuild
from expert_pool.cluster.driver.states import DriverState, Resizing
from expert_pool.cluster.planning.validation import validate
from expert_pool.cluster.ranks.pool_ranks import PoolRanks
from expert_pool.workers.rank_config import RankConfig
from models import replace_weights
from rank_logs import said_by
from ray.util.placement_group import placement_group_table
from waiting import holds_in_time


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """A cluster with two CPUs and nothing to grow by."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def placement_groups() -> set[str]:
    """Ids of the placement groups that are there or asked for."""
    return {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


def gone(pids: list[int], within_s: float) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_h19_more_ranks_than_the_cluster_holds_are_refused_at_the_deadline(random_models):
    lines: list[str] = []
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=8, placement=PlacementConfig(timeout_s=2))
    with pytest.raises(PlacementError) as refusal:
        ExpertPool.launch(config, report=lines.append)
    said = str(refusal.value)
    assert "no place for all ranks within placement.timeout_s=2" in said
    assert "0 of 8 bundles placed; waiting for 8 x {CPU: 1}; the cluster has 2 of 2 CPU free" in said
    assert "Set ranks or placement.cpus_per_rank" in said
    assert placement_groups() == set()
    assert "placing 8 ranks" in lines


def test_the_command_line_says_so_too_and_exits_with_1(random_models, prompts_file, tmp_path):
    result = CliRunner().invoke(
        main,
        [
            *("generate", "--model", random_models["qwen3_moe"], "--ranks", "4", "--placement-timeout", "1"),
            *("--prompts", prompts_file({"prompt_token_ids": [5]}), "--output", str(tmp_path / "out.jsonl")),
        ],
    )
    assert result.exit_code == 1
    assert "failed: no place for all ranks within placement.timeout_s=1" in result.output
    assert not (tmp_path / "out.jsonl").exists()
    assert placement_groups() == set()


def test_a_resource_that_no_node_has_is_named(random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=2, placement=PlacementConfig(gpus_per_rank=1, timeout_s=1)
    )
    with pytest.raises(PlacementError, match=r"waiting for 2 x \{CPU: 1, GPU: 1\}; .* 0 of 0 GPU free"):
        ExpertPool.launch(config)


def test_h21_a_rank_that_is_killed_ends_the_pool_in_seconds_and_is_named(random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        limits=Limits(disable_cuda_graph=True),
        recovery=RecoveryConfig(max_restarts=0),
    )
    sampling = [SamplingParams(max_new_tokens=2)] + [SamplingParams(max_new_tokens=450, ignore_eos=True)] * 40
    with ExpertPool.launch(config) as pool:
        pids = [place.pid for place in pool.status().places]
        assert len(placement_groups()) == 1
        stream = pool.generate([[5, 17]] * 41, sampling)
        assert next(stream).index == 0, "generation is under way"

        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 .*died while running") as raised:
            list(stream)
        assert time.monotonic() - killed < 10
        assert said_by(pids[0], f"rank 0 is ended: {raised.value}")

        assert gone(pids, within_s=10)
        assert placement_groups() == set()
        status = pool.status()
        assert status.state == "failed"
        assert "rank 1" in status.failure
        with pytest.raises(RankError, match="rank 1"):
            list(pool.generate([[5]]))


@pytest.mark.long
def test_a_rank_that_stalls_is_named_within_the_step_timeout(random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        worker=WorkerConfig(step_timeout_s=8),
        recovery=RecoveryConfig(max_restarts=0),
    )
    with ExpertPool.launch(config) as pool:
        pids = [place.pid for place in pool.status().places]
        lengths = [SamplingParams(max_new_tokens=1)] + [SamplingParams(max_new_tokens=300, ignore_eos=True)] * 40
        stream = pool.generate([[5, 17]] * 41, lengths)
        assert next(stream).index == 0, "generation is under way"
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        named = r"rank 1 \(process .*did not take part.*worker.step_timeout_s=8; rank 0"
        with pytest.raises(RankError, match=named) as raised:
            list(stream)
        assert time.monotonic() - stopped < 8
        assert said_by(pids[0], f"rank 0 is ended: {raised.value}")
        assert gone(pids, within_s=10)
        assert placement_groups() == set()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "idle"])
def test_a_frozen_rank_that_no_other_waits_for_is_found_and_replaced(ranks, random_models):
    """One alone, in the middle of its work; and one of two that have nothing to do."""
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=ranks,
        worker=WorkerConfig(step_timeout_s=4),
        recovery=RecoveryConfig(max_restarts=1, backoff_s=0),
    )
    sampling = [SamplingParams(max_new_tokens=1)] + [SamplingParams(max_new_tokens=400, ignore_eos=True)] * 8
    with ExpertPool.launch(config) as pool:
        frozen = pool.status().places[-1]
        if ranks == 1:
            stream = pool.generate([[5, 17]] * 9, sampling)
            assert next(stream).index == 0, "generation is under way"
        os.kill(frozen.pid, signal.SIGSTOP)
        assert holds_in_time(lambda: pool.status().restarts == 1, within_s=4 + 8)
        assert (pool.status().last_failure or "").startswith(
            f"rank {frozen.rank} (process {frozen.pid} on {frozen.address}) has not answered while running for 6 s, "
            "longer than worker.step_timeout_s=4: "
        )
        if ranks == 2:
            stream = pool.generate([[5, 17]] * 8, sampling[1:])
        assert {one.num_completion_tokens for one in stream} == {400}, "requests go on from their tokens"
        assert gone([frozen.pid], within_s=10)


@pytest.mark.long
def test_a_rank_that_freezes_while_it_leaves_its_loop_is_found(random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        worker=WorkerConfig(step_timeout_s=4),
        placement=PlacementConfig(cpus_per_rank=1),
        recovery=RecoveryConfig(max_restarts=1, backoff_s=0),
    )
    with ExpertPool.launch(config) as pool:
        for place in pool.status().places:  # all, so that none waits for another
            os.kill(place.pid, signal.SIGSTOP)
        with pytest.raises(RankError, match=r"not resized, the pool has 2 ranks: rank .* has not answered while leav"):
            pool.resize(1)
        assert (pool.status().state, pool.status().restarts) == ("ready", 1)


@pytest.mark.long
def test_status_answers_for_the_ranks_that_can(random_models):
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2)) as pool:
        os.kill(pool.status().places[1].pid, signal.SIGSTOP)
        assert [report.rank for report in pool.status().graphs] == [0]


def test_a_rank_that_cannot_load_is_named_and_leaves_nothing_behind(random_models, tmp_path):
    """The folder is whole when it is checked, and a shard is gone when the ranks come to read it."""
    folder = Path(shutil.copytree(random_models["qwen3_moe"], tmp_path / "model"))

    def remove_a_shard(line: str) -> None:
        if line == "starting ranks":
            next(folder.glob("*.safetensors")).unlink()

    with pytest.raises(CheckpointError, match=r"weight files missing: .* \(raised on ranks \["):
        ExpertPool.launch(PoolConfig(model=str(folder), ranks=2), report=remove_a_shard)
    assert placement_groups() == set()


@pytest.mark.long
def test_a_pool_whose_weights_were_replaced_does_not_go_on_with_others(random_models, tmp_path):
    """A rank dies, and those that take its place find a file of the same size and header with other values."""
    folder = Path(shutil.copytree(random_models["qwen3_moe"], tmp_path / "model"))
    lines: list[str] = []
    config = PoolConfig(model=str(folder), ranks=2, recovery=RecoveryConfig(backoff_s=0))
    sampling = [SamplingParams(max_new_tokens=2)] + [SamplingParams(max_new_tokens=450, ignore_eos=True)] * 6
    with ExpertPool.launch(config, report=lines.append) as pool:
        stream = pool.generate([[5, 17]] * 7, sampling)
        assert next(stream).index == 0, "the others are under way"
        name = replace_weights(folder)
        os.kill(pool.status().places[1].pid, signal.SIGKILL)
        said = (
            rf"weights were replaced since the pool began: {name} \(\w+, now \w+\); .*: put the files back, or launch"
        )
        with pytest.raises(CheckpointError, match=said):
            list(stream)
        assert sum(line.startswith("ready") for line in lines) == 1
        status = pool.status()
        assert (status.state, status.restarts) == ("failed", 1)
        with pytest.raises(CheckpointError, match=said):
            list(pool.generate([[5]]))
    assert placement_groups() == set()


def test_a_search_that_finds_no_places_changes_no_size(random_models, monkeypatch):
    """Sizes down to `min_ranks` are tried; the next search is for all ranks again."""
    monkeypatch.setattr("expert_pool.cluster.ranks.pool_ranks.AT_ONCE_S", 0.2)
    placement = PlacementConfig(cpus_per_rank=3, timeout_s=0.2)
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=4, min_ranks=1, placement=placement)
    pool_ranks = PoolRanks(validate(config), config, {})

    async def search() -> None:
        async for _ in pool_ranks.place_anew():
            pass

    for _ in range(2):
        with pytest.raises(PlacementError, match="0 of 4 bundles placed"):
            asyncio.run(search())
    assert placement_groups() == set()


@pytest.mark.long
def test_a_pool_that_is_shut_down_while_it_starts_says_so(random_models):
    def shut_down(line: str) -> None:
        if line.startswith("loading"):
            ExpertPool.connect("early").shutdown()

    with pytest.raises(RankError, match=r"^the pool was shut down while it started$"):
        ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2), report=shut_down, name="early")
    assert placement_groups() == set()


def test_a_bug_on_the_way_back_from_a_resize_ends_the_pool(random_models):
    """It would be `resizing` for ever, and take no other order."""
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=1)

    async def no_way_back(before: RankConfig) -> AsyncIterator[str]:
        raise ValueError("odd")
        yield ""

    async def go_back() -> None:
        life = Lifecycle(validate(config), config, {})
        for state in ("PLACING", "STARTING", "LOADING", "CAPTURING", "READY"):
            life.enter(DriverState[state])
        before = life.pool_ranks.config

        async def other_size() -> AsyncIterator[str]:
            life.pool_ranks.config = msgspec.structs.replace(before)
            yield "1 of 2 bundles placed"
            raise ConfigError("the other size cannot work")

        life.pool_ranks.return_to = no_way_back
        with pytest.raises(RankError, match=r"^moving the ranks failed: ValueError: odd$") as raised:
            await life.carry_out(Rebuild(Resizing(2, "more"), "moving the ranks", other_size, size_before=before))
        assert life.notice == "the other size did not start, going back to 1 ranks: the other size cannot work"
        assert (life.state, life.failure) == (DriverState.FAILED, raised.value)

    asyncio.run(go_back())


def test_a_pool_that_was_shut_down_leaves_no_process_and_no_place_behind(random_models):
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2)) as pool:
        pids = [place.pid for place in pool.status().places]
        assert len(list(pool.generate([[5], [6]], SamplingParams(max_new_tokens=2)))) == 2
    assert gone(pids, within_s=10)
    assert placement_groups() == set()
