"""A node of the cluster is gone, with the ranks on it: the pool waits for places, or goes on with fewer ranks.

The faults of a node that `make test-kill-matrix` counts are here, and what follows where no other node comes.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kill_scene
import pytest
import ray
from expert_pool.cluster import ExpertPool, PlacementConfig, PlacementError
from handle import in_driver
from kill_report import case
from kill_scene import Scene, config_of
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.skipif(os.environ.get("EXPERT_POOL_FULL_MATRIX") != "1", reason="a part of make test-kill-matrix"),
    pytest.mark.timeout(400),
]


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """A head without places, and two nodes with two each."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        started.add_node(num_cpus=2)
    ray.init(address=started.address, log_to_driver=False, logging_level=logging.ERROR)
    for module in (kill_scene, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with two_nodes() as started:
        yield started


def a_node_of_ranks(cluster: Cluster, pool: ExpertPool) -> Callable[[], None]:
    """What ends a node by SIGKILL of its raylet, when called. The driver actor is on another one."""
    of_driver = in_driver(pool, lambda driver: ray.get_runtime_context().get_node_id())
    held = {place.node_id for place in pool.status().places} - {of_driver}
    node = next(node for node in cluster.worker_nodes if node.node_id in held)
    return lambda: cluster.remove_node(node, allow_graceful=False)


def test_a_pool_goes_on_with_fewer_ranks_and_grows_again_when_there_is_a_node(cluster, random_models, tmp_path):
    lines: list[str] = []
    config = config_of(random_models["qwen3_moe"], 4, min_ranks=1, placement=PlacementConfig(timeout_s=20))
    with ExpertPool.launch(config, report=lines.append) as pool:
        scene = Scene(pool, tmp_path, seed=5)
        assert scene.answers(then=a_node_of_ranks(cluster, pool)) == scene.expected
        status = pool.status()
        assert (status.state, len(status.places)) == ("ready", 2)
        assert any("going on with 2 ranks, as min_ranks=1 allows" in line for line in lines)
        assert any("2 of 4 bundles placed; waiting for 2 x {CPU: 1}" in line for line in lines)
        cluster.add_node(num_cpus=2)
        pool.resize(4)
        assert scene.answers() == scene.expected
        assert len(pool.status().places) == 4


def test_without_enough_places_the_pool_fails_with_what_happened(cluster, random_models):
    config = config_of(random_models["qwen3_moe"], 4, placement=PlacementConfig(timeout_s=10))
    with ExpertPool.launch(config) as pool:
        completions = pool.generate([[5, 17]] * 8)
        next(completions)
        a_node_of_ranks(cluster, pool)()
        with pytest.raises(PlacementError, match=r"2 of 4 bundles placed.* was restarted [12] times.*died"):
            list(pool.generate([[5, 17]] * 8))
        assert pool.status().state == "failed"


@pytest.fixture(scope="module")
def lossy(random_models, tmp_path_factory) -> Iterator[tuple[Cluster, Scene]]:
    """One pool for all faults of nodes; used last in this file, for its session lasts as long."""
    lines: list[tuple[float, str]] = []
    with two_nodes() as cluster:
        config = config_of(random_models["qwen3_moe"], 4)
        with ExpertPool.launch(config, report=lambda line: lines.append((time.time(), line))) as pool:
            yield cluster, Scene(pool, tmp_path_factory.mktemp("stamps"), seed=7, lines=lines)


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_moves_to_a_spare_node_with_all_its_ranks(seed, lossy):
    cluster, scene = lossy
    fault = "SIGKILL of a node's raylet"
    scene.rng.seed(f"{fault} {seed}")
    end_node, pause = a_node_of_ranks(cluster, scene.pool), scene.rng.uniform(0.0, 1.5)

    cluster.add_node(num_cpus=2)

    def end_it() -> None:
        time.sleep(pause)
        scene.stamp.write_text(str(time.time()))
        end_node()

    with case(fault, seed) as row:
        scene.aim = f"{pause:.2f} s after the requests"
        scene.survives(row, range(1, 4), first=threading.Thread(target=end_it).start)
        assert len(scene.pool.status().places) == 4
