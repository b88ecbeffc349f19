"""The driver actor's process is killed: callers are told, and the pool comes back by itself, under its name."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from expert_pool.cluster import (
    CacheConfig,
    CheckpointError,
    DriverRestartError,
    ExpertPool,
    Limits,
    PoolConfig,
    RankError,
    RecoveryConfig,
    SamplingParams,
)
from expert_pool.cluster.driver.handle import NAMESPACE
from models import replace_weights
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table
from waiting import holds_in_time

pytestmark = pytest.mark.timeout(240)
PROMPT = [5, 17, 42]
LONG = SamplingParams(max_new_tokens=450, ignore_eos=True)
RETURNS = "the pool's driver actor ended, and what was in flight was lost with it"
eventually = partial(holds_in_time, within_s=30.0)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def config_of(model: str, **settings: Any) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=2,
        limits=Limits(max_running_requests=4, cuda_graph_bs=(4,), piecewise_cuda_graph_max_tokens=16),
        cache=CacheConfig(num_tokens=4096),
        **settings,
    )


def groups() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def nothing_left(pids: set[int]) -> bool:
    named = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    there = [pid for pid in pids if psutil.pid_exists(pid)]
    return not groups() and not named and not there and ray.available_resources().get("CPU") == 2


def processes_of(pool: ExpertPool) -> set[int]:
    status = pool.status()
    return {status.driver_pid, *(place.pid for place in status.places)}


def test_a_named_pool_comes_back_and_its_callers_are_told(address, random_models, references):
    expected = references["qwen3_moe"].greedy(PROMPT, 6)
    pids: set[int] = set()
    with ExpertPool.launch(config_of(random_models["qwen3_moe"]), name="comes-back", detached=True) as pool:
        completions = pool.generate(
            [PROMPT, *[[5, 17]] * 4], [SamplingParams(max_new_tokens=6, ignore_eos=True)] + [LONG] * 4
        )
        assert next(completions).token_ids == expected
        pids |= processes_of(pool)
        os.kill(pool.status().driver_pid, signal.SIGKILL)
        why = r"its process \d+ on \S+ ended: Worker unexpectedly exits"
        with pytest.raises(DriverRestartError, match=f"{RETURNS}.*; {why}"):
            list(completions)

        with ExpertPool.connect("comes-back") as again:
            [own] = again.generate([PROMPT], SamplingParams(max_new_tokens=6))
        assert own.token_ids == expected
        status = pool.status()
        assert (status.state, status.driver_restarts, status.restarts, status.unfinished) == ("ready", 1, 0, 0)
        assert status.notice.startswith("ready")
        assert pids.isdisjoint(processes_of(pool)), "all processes are new"
        assert len(groups()) == 1
        assert eventually(lambda: not any(map(psutil.pid_exists, pids)))
        pids |= processes_of(pool)
        pool.shutdown()
    assert eventually(lambda: nothing_left(pids))


@pytest.mark.long
def test_a_pool_whose_driver_comes_back_to_other_weights_says_so_and_does_not_serve(address, random_models, tmp_path):
    folder = Path(shutil.copytree(random_models["qwen3_moe"], tmp_path / "model"))
    pool = ExpertPool.launch(config_of(str(folder)), name="replaced", detached=True)
    pids = processes_of(pool)
    name = replace_weights(folder)
    os.kill(pool.status().driver_pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=rf"weights were replaced since the pool began: {name} \(\w+, now \w+\)"):
        list(pool.generate([PROMPT]))
    status = pool.status()
    assert (status.state, status.driver_restarts) == ("failed", 1)
    pids |= processes_of(pool)
    pool.shutdown()
    assert eventually(lambda: nothing_left(pids))
    assert internal_kv._internal_kv_list("", namespace="expert_pool") == []


@pytest.mark.long
def test_a_command_on_a_named_pool_goes_on_once_the_driver_is_back(address, random_models, prompts_file, tmp_path):
    lines = [{"prompt_token_ids": [5, 17, index], "max_new_tokens": 4 if index < 2 else 300} for index in range(10)]
    prompts = prompts_file(*({"ignore_eos": True, **line} for line in lines))
    output = tmp_path / "out.jsonl"
    pool = ExpertPool.launch(config_of(random_models["qwen3_moe"]), name="resumed", detached=True)
    undisturbed = {
        str(index + 1): completion.token_ids
        for completion in pool.generate(
            [line["prompt_token_ids"] for line in lines],
            [SamplingParams(max_new_tokens=line["max_new_tokens"], ignore_eos=True) for line in lines],
        )
        for index in [completion.index]
    }
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "expert_pool.cluster", "generate", "--pool", "resumed"),
            *("--prompts", prompts, "--output", str(output)),
        ],
        env={**os.environ, "RAY_ADDRESS": address},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert eventually(lambda: output.exists() and output.read_text().count("\n") >= 2, within_s=60)
    pids = processes_of(pool)
    os.kill(pool.status().driver_pid, signal.SIGKILL)
    _, told = command.communicate(timeout=120)
    assert command.returncode == 0, told
    assert re.search(rf"{RETURNS}.*asking again for [1-8] requests", told), told
    written = [json.loads(line) for line in Path(output).read_text().splitlines()]
    assert len(written) == 10
    assert {line["id"]: tuple(line["token_ids"]) for line in written} == undisturbed
    pids |= processes_of(pool)
    pool.shutdown()
    assert eventually(lambda: nothing_left(pids))


@pytest.mark.long
def test_the_owner_of_a_pool_keeps_it_and_ends_it(address, random_models):
    with ExpertPool.launch(config_of(random_models["qwen3_moe"])) as pool:
        pids = processes_of(pool)
        os.kill(pool.status().driver_pid, signal.SIGKILL)
        [own] = pool.generate([PROMPT], SamplingParams(max_new_tokens=6))
        assert own.num_completion_tokens == 6
        assert pool.status().driver_restarts == 1
        pids |= processes_of(pool)
    assert eventually(lambda: nothing_left(pids))


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pool_ends_with_its_owner_though_its_driver_was_started_anew(moment, address, random_models):
    program = f"""
import sys, time, ray
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]!r}
from test_driver_restart import config_of
from expert_pool.cluster import ExpertPool
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
pool = ExpertPool.launch(config_of(sys.argv[2]), name="owned")
print("launched", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, address, random_models["qwen3_moe"]], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "launched\n"
    pool = ExpertPool.connect("owned")
    pids = processes_of(pool)
    os.kill(pool.status().driver_pid, signal.SIGKILL)
    if moment == "after":
        assert eventually(lambda: pool.status().state == "ready", within_s=60), pool.status().notice
        pids |= processes_of(pool)
    owner.kill()
    owner.wait()
    assert eventually(lambda: nothing_left(pids), within_s=60)


@pytest.mark.long
def test_a_driver_that_dies_too_often_is_not_started_again(address, random_models):
    config = config_of(random_models["qwen3_moe"], recovery=RecoveryConfig(max_restarts=1))
    pool = ExpertPool.launch(config, name="twice", detached=True)
    pids: set[int] = set()
    for _ in range(2):
        assert eventually(lambda: pool.status().state == "ready", within_s=60), pool.status().notice
        pids |= processes_of(pool)
        os.kill(pool.status().driver_pid, signal.SIGKILL)
        time.sleep(2)
    with pytest.raises(RankError, match="the pool's driver actor died for good"):
        list(pool.generate([PROMPT], LONG))
    assert eventually(lambda: nothing_left(pids))
