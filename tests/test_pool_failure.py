"""Pools that cannot start, and pools that lose a rank."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import (
    CheckpointError,
    ExpertPool,
    PlacementConfig,
    PlacementError,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.cli import main
from rank_logs import said_by
from ray.util.placement_group import placement_group_table


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
    assert (tmp_path / "out.jsonl").read_text() == ""
    assert placement_groups() == set()


def test_a_resource_that_no_node_has_is_named(random_models):
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=2, placement=PlacementConfig(gpus_per_rank=1, timeout_s=1)
    )
    with pytest.raises(PlacementError, match=r"waiting for 2 x \{CPU: 1, GPU: 1\}; .* 0 of 0 GPU free"):
        ExpertPool.launch(config)


def test_h21_a_rank_that_is_killed_ends_the_pool_in_seconds_and_is_named(random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=2, recovery=RecoveryConfig(max_restarts=0))
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


def test_a_pool_that_was_shut_down_leaves_no_process_and_no_place_behind(random_models):
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=2)) as pool:
        pids = [place.pid for place in pool.status().places]
        assert len(list(pool.generate([[5], [6]], SamplingParams(max_new_tokens=2)))) == 2
    assert gone(pids, within_s=10)
    assert placement_groups() == set()
