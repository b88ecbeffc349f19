"""Where ranks are put on a cluster of several nodes, some of which share an NVLink domain by their label."""

import asyncio
from collections.abc import Iterator

import pytest
import ray
from expert_pool.cluster import ConfigError, PlacementConfig, PlacementError
from expert_pool.cluster.ranks.placement import Placement
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

LABEL = "ray.io/gpu-domain"


@pytest.fixture(scope="module")
def domain_of() -> Iterator[dict[str, str | None]]:
    """Four CPUs in domain a on two nodes, three on a node without a domain."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    for num_cpus in (1, 3):
        cluster.add_node(num_cpus=num_cpus, labels={LABEL: "a"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield {node["NodeID"]: node["Labels"].get(LABEL) for node in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


async def acquire(placement: Placement) -> list[str]:
    return [facts async for facts in placement.acquire()]


def nodes_in_rank_order(placement: Placement) -> list[str]:
    nodes = placement_group_table(placement.group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in placement.rank_order()]


@pytest.mark.long
def test_all_ranks_are_in_one_domain_though_another_node_has_as_many_places(domain_of):
    placement = Placement(4, {"CPU": 1}, 30, LABEL)
    asyncio.run(acquire(placement))
    nodes = nodes_in_rank_order(placement)
    placement.release()
    assert [domain_of[node] for node in nodes] == ["a"] * 4
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes), "neighbours are on one node"


@pytest.mark.long
def test_a_pool_that_no_domain_holds_waits_and_fails_with_what_each_has(domain_of):
    placement = Placement(5, {"CPU": 1}, 1, LABEL)
    with pytest.raises(PlacementError) as refusal:
        asyncio.run(acquire(placement))
    said = str(refusal.value)
    assert f"waiting for 5 x {{CPU: 1}} in one domain by {LABEL} ('a' has {{CPU: 4}})" in said
    assert "unset placement.domain_label" in said
    assert "dispatch='allgather'" in said
    assert placement.group is None


@pytest.mark.long
def test_without_a_label_ranks_are_anywhere_and_neighbours_are_on_one_node(domain_of):
    placement = Placement(7, {"CPU": 1}, 30)
    asyncio.run(acquire(placement))
    nodes = nodes_in_rank_order(placement)
    placement.release()
    assert {domain_of[node] for node in nodes} == {"a", None}
    assert nodes == sorted(nodes)


def test_a_label_that_cannot_be_one_is_refused():
    with pytest.raises(ConfigError, match=r"placement.domain_label='gpu domain' is not a label's key"):
        PlacementConfig(domain_label="gpu domain")
