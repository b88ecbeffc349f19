"""Pools under a name: launched by one process, used by others at once, ended on purpose or with their owner."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from click.testing import CliRunner
from conftest import REPOSITORY
from expert_pool.cluster import (
    CheckpointError,
    ConfigError,
    ExpertPool,
    Limits,
    PoolConfig,
    RankError,
    SamplingParams,
)
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.driver import handle as driver_handle
from expert_pool.cluster.driver.handle import NAMESPACE
from handle import driver_of
from ray.util.placement_group import placement_group_table
from waiting import holds_in_time

LONG = SamplingParams(max_new_tokens=450, ignore_eos=True)
LAUNCH_AND_GENERATE = """
import sys, ray
from expert_pool.cluster import ExpertPool, PoolConfig, SamplingParams
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
pool = ExpertPool.launch(PoolConfig(model=sys.argv[2], ranks=2), name="owned")
"""
CONNECT_AND_GENERATE = """
import sys
from expert_pool.cluster import ExpertPool, SamplingParams
pool = ExpertPool.connect("shared", sys.argv[1])
"""
STREAM = """
sampling = [SamplingParams(max_new_tokens=1)] + [SamplingParams(max_new_tokens=450, ignore_eos=True)] * 40
for completion in pool.generate([[5, 17]] * 41, sampling):
    print(completion.index, flush=True)
"""
SHORT_OF_TOP_K = """
from expert_pool.cluster import ConfigError
try:
    sampling = SamplingParams(max_new_tokens=6, top_k=3, ignore_eos=True)
    print([len(completion.token_ids) for completion in pool.generate([[5, 17]], sampling)])
except ConfigError as error:
    print(error)
"""
FEW_GRAPHS = ("--ranks", "2", "--cuda-graph-bs", "4", "--piecewise-cuda-graph-max-tokens", "16")
eventually = partial(holds_in_time, within_s=15.0)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def nothing_left() -> bool:
    groups = [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    drivers = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    return not groups and not drivers and ray.available_resources().get("CPU") == 2


def python(program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def expert_pool(*arguments: str, address: str) -> subprocess.CompletedProcess:
    """A command in a process of its own, on the cluster that the environment names."""
    return subprocess.run(
        [sys.executable, "-m", "expert_pool.cluster", *arguments],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
    )


def with_fields_in_another_order(folder: Path) -> Path:
    """Another version of the package, to be put on the path: what it calls `max_new_tokens` others take for `top_k`."""
    for name in ("cluster", "dispatch", "graphs", "workers"):
        shutil.copytree(REPOSITORY / name, folder / "expert_pool" / name, ignore=shutil.ignore_patterns("__pycache__"))
    request = folder / "expert_pool" / "workers" / "request.py"
    most, top_k = "    max_new_tokens: int = 128\n", "    top_k: int = 0\n"
    source = request.read_text()
    assert source.count(most) == source.count(top_k) == 1
    request.write_text(source.replace(most, "<most>").replace(top_k, most).replace("<most>", top_k))
    return folder


def with_a_field_less(folder: Path) -> Path:
    """Another version of the package, in which a pool's ranks are built from one thing less."""
    rank_config = with_fields_in_another_order(folder) / "expert_pool" / "workers" / "rank_config.py"
    field = "    start_timeout_s: float = 1800.0\n"
    assert rank_config.read_text().count(field) == 1
    rank_config.write_text(rank_config.read_text().replace(field, ""))
    return folder


def test_a_pool_of_another_version_is_refused_in_plain_words_and_can_be_shut_down(address, tiny_moe, tmp_path):
    """It was launched before an upgrade: it has to go, and only the new command is there."""
    limits = Limits(max_running_requests=4, disable_cuda_graph=True)
    ExpertPool.launch(PoolConfig(model=tiny_moe, limits=limits), name="before", detached=True)
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(with_a_field_less(tmp_path / "after"))}
    for command, code in (("status", 2), ("shutdown", 0)):
        program = [sys.executable, "-m", "expert_pool.cluster", command, "--pool", "before"]
        said = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
        assert said.returncode == code, said.stderr
        assert bool(re.match("refused: the code of the process that calls this pool", said.stderr)) == (code == 2)
    assert eventually(nothing_left)


def test_a_driver_on_a_node_with_other_code_starts_no_ranks(address, random_models, monkeypatch):
    monkeypatch.setattr(driver_handle, "own_code", lambda: "0123456789abcdef")
    with pytest.raises(
        ConfigError, match=r"calls this pool \(0123456789abcdef\) is not that of its driver actor \(\w+\)"
    ):
        ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"]))
    assert eventually(nothing_left)


@pytest.mark.timeout(300)
def test_a_detached_pool_serves_several_processes_and_outlives_all_of_them(
    address, random_models, references, prompts_file, tmp_path
):
    model = random_models["qwen3_moe"]
    launched = expert_pool("launch", "--name", "shared", "--model", model, *FEW_GRAPHS, address=address)
    assert launched.returncode == 0, launched.stderr
    assert "pool 'shared' stays" in launched.stderr

    with ExpertPool.connect("shared") as pool:
        caller = python(CONNECT_AND_GENERATE + STREAM, address)
        assert caller.stdout.readline() != "", "another driver is served"
        [own] = pool.generate([[5, 17, 42]], SamplingParams(max_new_tokens=6))
        assert own.token_ids == references["qwen3_moe"].greedy([5, 17, 42], 6), "while the other one is"
        assert sum(stats.running + stats.waiting for stats in pool.status().stats) > 0

        caller.kill()
        assert caller.wait() == -signal.SIGKILL
        [own] = pool.generate([[5, 17]], SamplingParams(max_new_tokens=200, ignore_eos=True))
        assert own.num_completion_tokens == 200
        idle = lambda: all(stats.running + stats.waiting == 0 for stats in pool.status().stats)  # noqa: E731
        assert eventually(idle), "what the dead caller asked for is dropped"
        assert sum(stats.generated_tokens for stats in pool.status().stats) < 40 * 450

    other = subprocess.run(
        [sys.executable, "-c", CONNECT_AND_GENERATE + SHORT_OF_TOP_K, address],
        env={**os.environ, "PYTHONPATH": str(with_fields_in_another_order(tmp_path / "other"))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert "each would read what the other sends as something else; install the same expert-pool" in other.stdout

    output = tmp_path / "out.jsonl"
    prompts = prompts_file({"prompt_token_ids": [5, 17, 42], "max_new_tokens": 6})
    job = expert_pool("generate", "--pool", "shared", "--prompts", prompts, "--output", str(output), address=address)
    assert job.returncode == 0, job.stderr
    assert json.loads(output.read_text())["token_ids"] == list(references["qwen3_moe"].greedy([5, 17, 42], 6))

    refused = CliRunner().invoke(
        main, ["generate", "--pool", "shared", "--ranks", "4", "--prompts", prompts, "--output", str(output)]
    )
    assert (refused.exit_code, refused.output) == (
        2,
        "refused: --pool shared runs already, with settings of its own: leave out --ranks\n",
    )
    with pytest.raises(ConfigError, match="a pool named 'shared' is there already"):
        ExpertPool.launch(PoolConfig(model=model), name="shared")
    with pytest.raises(ConfigError, match=r"no pool named 'other' .*named pools: shared"):
        ExpertPool.connect("other")

    shown = CliRunner().invoke(main, ["status", "--pool", "shared"]).output
    assert shown.startswith(f"pool 'shared', {model}\nready: 2 ranks on 1 node(s)\n")
    assert "unfinished" not in shown

    stream = pool.generate([[5, 17]] * 41, [SamplingParams(max_new_tokens=1)] + [LONG] * 40)
    next(stream)
    pids = [place.pid for place in pool.status().places]
    assert CliRunner().invoke(main, ["shutdown", "--pool", "shared"]).exit_code == 0
    with pytest.raises(RankError):
        list(stream)
    assert eventually(nothing_left)
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
@pytest.mark.parametrize("stage", ["starting", "serving"])
def test_a_pool_ends_with_the_process_that_launched_it(stage, address, random_models):
    owner = python(
        LAUNCH_AND_GENERATE.replace('name="owned")', 'name="owned", report=lambda line: print(line, flush=True))')
        + STREAM,
        address,
        random_models["qwen3_moe"],
    )
    last = "starting ranks\n" if stage == "starting" else "0\n"
    assert any(line == last for line in owner.stdout)
    if stage == "serving":
        pids = [place.pid for place in ExpertPool.connect("owned").status().places]
    owner.kill()
    owner.wait()
    assert eventually(nothing_left)
    if stage == "serving":
        assert eventually(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
def test_a_pool_ends_with_the_actor_that_launched_it_though_the_job_goes_on(address, random_models):
    class Owner:
        def launch(self, model: str) -> list[int]:
            self.pool = ExpertPool.launch(PoolConfig(model=model, ranks=2))
            return [place.pid for place in self.pool.status().places]

    owner = ray.remote(Owner).options(num_cpus=0).remote()
    pids = ray.get(owner.launch.remote(random_models["qwen3_moe"]))
    ray.kill(owner)
    assert eventually(nothing_left)
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
def test_more_open_calls_than_ray_allows_by_itself_keep_nobody_waiting(address, random_models):
    with ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], ranks=1), name="busy") as pool:
        held = [driver_of(pool).hold.remote(str(number)) for number in range(1100)]
        assert ray.get(driver_of(pool).status.remote(), timeout=60).state == "ready"
        assert not ray.wait(held, num_returns=1, timeout=0)[0]
    assert eventually(nothing_left)


@pytest.mark.long
def test_only_who_sends_a_text_needs_the_models_folder(address, tiny_moe, tmp_path):
    folder = shutil.copytree(tiny_moe, tmp_path / "model")
    with ExpertPool.launch(PoolConfig(model=str(folder)), name="elsewhere"):
        shutil.rmtree(folder)
        pool = ExpertPool.connect("elsewhere")
        assert pool.status().state == "ready"
        assert [one.num_completion_tokens for one in pool.generate([[5]], SamplingParams(max_new_tokens=2))] == [2]
        with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
            pool.generate(["def f("])


def test_a_detached_pool_needs_a_name_and_a_cluster_that_stays(random_models):
    config = PoolConfig(model=random_models["qwen3_moe"])
    with pytest.raises(ConfigError, match="a detached pool needs a name"):
        ExpertPool.launch(config, detached=True)
    ray.shutdown()  # of the whole module: this test is its last
    with pytest.raises(ConfigError, match=r"outlives its launcher.*`ray start --head`"):
        ExpertPool.launch(PoolConfig(model=random_models["qwen3_moe"], address="local"), name="x", detached=True)
    assert not ray.is_initialized()
