"""A pool on Ray's real autoscaler, over its fake node provider: nodes come for it from nothing, and go when it is gone.

Not part of the suite: `make test-autoscaler`.
"""

import re
import time
from collections.abc import Iterator

import pytest
import ray
from expert_pool.cluster import ExpertPool, PlacementConfig, PlacementError, PoolConfig, SamplingParams
from ray_head import ray_head

pytestmark = [pytest.mark.autoscaler, pytest.mark.timeout(600)]

WORKERS = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
HEAD = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
CONFIG = {
    "cluster_name": "fake_multinode",
    "max_workers": 2,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.1,
    "available_node_types": {"ray.head.default": HEAD, "workers": WORKERS},
    "head_node_type": "ray.head.default",
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
# The version with the node provider that needs nothing but processes.
ENVIRONMENT = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "0"}


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_head("--num-cpus=0", environment=ENVIRONMENT, autoscaling=CONFIG) as head:
        ray.init(address=head.address, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


def num_workers() -> int:
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())


def await_workers(count: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while num_workers() != count:
        assert time.monotonic() < deadline, f"{num_workers()} worker nodes, not {count}"
        time.sleep(0.5)


def test_h19_nodes_come_for_a_pool_and_go_when_it_is_gone(session, random_models, references):
    lines: list[str] = []
    assert num_workers() == 0
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=4, placement=PlacementConfig(timeout_s=240))
    with ExpertPool.launch(config, report=lines.append) as pool:
        assert num_workers() == 2
        nodes = [place.node_id for place in pool.status().places]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "neighbours are on one node"
        for completion in pool.generate([[5, 17, index] for index in range(8)], SamplingParams(max_new_tokens=6)):
            assert completion.token_ids == references["qwen3_moe"].greedy([5, 17, completion.index], 6)
    waited = [line for line in lines if "bundles placed" in line]
    # How many nodes are there when the pool first says what it waits for, if it has to, is a matter of seconds.
    facts = r"0 of 4 bundles placed; waiting for 4 x \{CPU: 1\}; the cluster has \d of \d CPU free"
    assert all(re.fullmatch(facts, line) for line in waited), waited
    await_workers(0, within_s=120)


def test_h19_more_than_the_cluster_may_grow_to_is_refused_with_what_is_missing(session, random_models):
    config = PoolConfig(model=random_models["qwen3_moe"], ranks=8, placement=PlacementConfig(timeout_s=12))
    with pytest.raises(PlacementError, match=r"timeout_s=12: 0 of 8 bundles placed; waiting for 8 x \{CPU: 1\}"):
        ExpertPool.launch(config)
    await_workers(0, within_s=120)
