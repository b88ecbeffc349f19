"""Ray says that a node will be taken away: ranks move off it before, and requests go on from the tokens they have."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
import ray
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    Limits,
    PlacementConfig,
    PlacementError,
    PoolConfig,
    RecoveryConfig,
    SamplingParams,
)
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from waiting import holds_in_time

pytestmark = pytest.mark.timeout(300)
PROMPTS = [[5, 17, index] for index in range(12)]
SAMPLING = [SamplingParams(max_new_tokens=1 if index == 0 else 250, ignore_eos=True) for index in range(12)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without places, and two nodes with one each."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        started.add_node(num_cpus=1)
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()


def config_of(model: str, **settings: object) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=2,
        limits=Limits(max_running_requests=4, cuda_graph_bs=(4,)),
        cache=CacheConfig(num_tokens=4096),
        recovery=RecoveryConfig(max_restarts=0),  # a failure would end the pool: there must be none
        **settings,
    )


def answers(pool: ExpertPool, then: Callable[[], None] | None = None) -> dict[int, tuple[int, ...]]:
    """Tokens by index, none twice; `then` runs after the first answer."""
    answered: dict[int, tuple[int, ...]] = {}
    for completion in pool.generate(PROMPTS, SAMPLING):
        assert completion.index not in answered
        if then is not None and not answered:
            then()
        answered[completion.index] = completion.token_ids
    return answered


def drain(cluster: Cluster, pool: ExpertPool, seconds: int) -> str:
    """The notice for a node that holds a rank and not the driver; returns its id."""
    status = pool.status()
    node = next(place.node_id for place in status.places if place.node_id != status.driver_node)
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address),
            *("--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
            *("--deadline-remaining-seconds", str(seconds)),
        ],
        check=True,
    )
    return node


def end_node(cluster: Cluster, node_id: str) -> None:
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == node_id), allow_graceful=False)


@pytest.mark.long
def test_ranks_leave_a_node_before_it_goes(cluster, random_models):
    lines: list[str] = []
    with ExpertPool.launch(config_of(random_models["qwen3_moe"]), report=lines.append) as pool:
        expected = answers(pool)
        cluster.add_node(num_cpus=1)
        drained: list[str] = []
        assert answers(pool, lambda: drained.append(drain(cluster, pool, 120))) == expected
        status = pool.status()
        assert status.state == "ready"
        assert drained[0] not in {place.node_id for place in status.places}
        assert len(status.places) == 2
        assert status.restarts == 0
        assert any(f"({drained[0][:8]}) away in" in line and line.endswith("moving the ranks") for line in lines), lines
        end_node(cluster, drained[0])
        assert answers(pool) == expected


@pytest.mark.long
def test_ranks_leave_a_node_also_while_a_resize_waits_for_places(cluster, random_models):
    config = config_of(random_models["qwen3_moe"], placement=PlacementConfig(timeout_s=45))
    with ExpertPool.launch(config) as pool, ThreadPoolExecutor(1) as threads:
        expected = answers(pool)
        resizing = threads.submit(pool.resize, 4)
        assert holds_in_time(lambda: "resizing to 4 ranks" in (pool.status().notice or ""), within_s=30)
        drained = drain(cluster, pool, 120)
        assert holds_in_time(lambda: "Ray takes node" in (pool.status().notice or ""), within_s=20)
        assert not resizing.done()
        cluster.add_node(num_cpus=1)  # enough for the rank that leaves, not for two more
        left = lambda: drained not in {place.node_id for place in pool.status().places}  # noqa: E731
        assert holds_in_time(left, within_s=60)
        with pytest.raises(PlacementError):
            resizing.result(timeout=60)
        assert answers(pool) == expected
        assert (pool.status().state, pool.status().restarts) == ("ready", 0)


@pytest.mark.long
def test_without_other_places_it_goes_on_with_fewer_ranks_where_that_is_allowed(cluster, random_models):
    lines: list[str] = []
    config = config_of(random_models["qwen3_moe"], min_ranks=1, placement=PlacementConfig(timeout_s=60))
    with ExpertPool.launch(config, report=lines.append) as pool:
        expected = answers(pool)
        drained: list[str] = []
        assert answers(pool, lambda: drained.append(drain(cluster, pool, 30))) == expected
        while len(pool.status().places) == 2:  # until ten seconds before the end
            assert answers(pool) == expected
        status = pool.status()
        assert (status.state, len(status.places), status.restarts) == ("ready", 1, 0)
        assert status.places[0].node_id != drained[0]
        assert any("going on with 1 ranks, as min_ranks=1 allows" in line for line in lines), lines
        end_node(cluster, drained[0])
        assert answers(pool) == expected


@pytest.mark.long
def test_a_pool_that_looks_for_other_places_is_shut_down_in_order(cluster, random_models):
    pool = ExpertPool.launch(config_of(random_models["qwen3_moe"]))
    processes = [psutil.Process(place.pid) for place in pool.status().places]
    drain(cluster, pool, 300)
    deadline = time.monotonic() + 30
    while "looking for 1 other places" not in (pool.status().notice or ""):
        assert time.monotonic() < deadline, pool.status().notice
    started = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - started < 15, "it is not the deadline of the call that ends it"
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


@pytest.mark.long
def test_a_pool_that_can_neither_move_nor_shrink_serves_until_its_node_is_gone(cluster, random_models):
    """Both ranks are needed, so the one that is about to lose its node stays there, and comes back on another."""
    placement, recovery = PlacementConfig(timeout_s=60), RecoveryConfig(max_restarts=1, backoff_s=0)
    config = config_of(random_models["qwen3_moe"], min_ranks=2, placement=placement)
    with ExpertPool.launch(msgspec.structs.replace(config, recovery=recovery)) as pool:
        expected = answers(pool)
        drained = drain(cluster, pool, 20)
        deadline = time.monotonic() + 40
        while "there are no other places" not in (pool.status().notice or ""):
            assert time.monotonic() < deadline, pool.status().notice
        assert (pool.status().state, len(pool.status().places)) == ("ready", 2)
        assert answers(pool) == expected
        cluster.add_node(num_cpus=1)
        end_node(cluster, drained)
        assert answers(pool) == expected
        assert (pool.status().state, pool.status().restarts) == ("ready", 1)
