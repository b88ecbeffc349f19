"""What ranks settle around mega kernels, over real groups; in place of FlashInfer's layer stands one whose every call
waits for all ranks, as FlashInfer's does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.mega_kernels import MegaKernels, leave_out_proxy
from expert_pool.dispatch.probe import Dropped, HostGroup, attempt
from expert_pool.workers.engine import RankEngine
from handle import layers_of, workspaces_of
from layers import layer_of
from plain_ranks import ForkedRanks
from running_disagreement import WITHIN_S

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def rank_set(random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=2, limits=Limits(max_running_requests=4), cache=CacheConfig(512)
    )
    with ForkedRanks(config, graphs=False) as ranks:
        yield ranks


@dataclass
class Handle:
    """A workspace, which all ranks give back together."""

    layer: "CollectiveLayer"
    _backend_workspace: Any

    def destroy(self) -> None:
        self.layer.meet("destroy")


@dataclass
class CollectiveLayer:
    """Keeps the calls of FlashInfer's layer: building, warming up and giving back are collective."""

    group: dist.ProcessGroup
    tiles: int
    fails_to: str
    calls: list[str] = field(default_factory=list)

    def meet(self, call: str) -> None:
        self.calls.append(call)
        dist.barrier(self.group)

    def create_workspace(self, capacity: int, knobs: dict[str, Any] | None) -> Handle:
        if self.fails_to == f"create {capacity}":
            raise RuntimeError("out of memory")
        self.calls.append("create")
        tensor = torch.zeros(capacity)
        compiled = SimpleNamespace(local_workspace=tensor, shared_workspace=tensor)
        frontend = SimpleNamespace(config=SimpleNamespace(swap_ab=False, mma_tiler_mnk=self.tiles), _mega=compiled)
        return Handle(self, SimpleNamespace(_frontend=frontend, _sym_roots=[tensor]))

    def warmup(self, workspace: Handle) -> None:
        self.meet("warm up")
        if self.fails_to == "warm up":
            raise RuntimeError("no such instruction")

    def destroy(self) -> None:
        self.meet("destroy layer")


class Kernels(MegaKernels):
    """Over `CollectiveLayer`; `tiles` is what this rank's host says."""

    tiles = 64
    fails_to = ""

    def _prepared(self, layer: MoeLayer, capacity: int) -> Any:
        return CollectiveLayer(self._group, self.tiles, self.fails_to)


def kernels_of(engine: RankEngine) -> tuple[Kernels, HostGroup, list[MoeLayer]]:
    """Kernels without layers, the host group, and a few layers."""
    kernels = Kernels(engine.joined.world, engine.config.layout, engine.rank, engine.device, "none")
    shape = MoeShape("experts", 4, 64, 2, "float32", intermediate_size=32)
    layers = [layer_of(shape, engine.config.layout.world_size, engine.rank, index) for index in range(NUM_LAYERS)]
    return kernels, HostGroup(engine.joined.host_group, engine.rank), layers


def build(kernels: Kernels, group: HostGroup, layers: list[MoeLayer], capacity: int) -> Any:
    def whole() -> str:
        for layer in layers:
            kernels.adopt(layer, capacity)
        kernels.prepare([layer.index for layer in layers], capacity, group)
        return "built"

    return attempt(group, f"mega@{capacity}", whole)


def calls_of(kernels: Kernels) -> list[list[str]]:
    return [adopted.layer.calls for adopted in layers_of(kernels)]


def with_other_settings(engine: RankEngine) -> tuple[str, list[list[str]], list[list[str]]]:
    kernels, group, layers = kernels_of(engine)
    kernels.tiles = 64 if engine.rank == 0 else 128
    built = build(kernels, group, layers, 8)
    calls = calls_of(kernels)
    before = [list(of_layer) for of_layer in calls]
    kernels.keep_only((), group)
    return built.reason if isinstance(built, Dropped) else built, before, calls


def test_launch_settings_that_differ_are_refused_on_every_rank_before_a_kernel_runs(rank_set):
    for reason, before, after in rank_set.call(with_other_settings, deadline_s=WITHIN_S):
        assert "launch settings of mega@8" in reason
        assert "(rank 0: swap_ab False, mma_tiler_mnk 64, rank 1: swap_ab False, mma_tiler_mnk 128)" in reason
        assert before == [["create"], []]
        assert after == [["create", "destroy", "destroy layer"], ["destroy layer"]]


def failing(engine: RankEngine, fails_to: str, faulty_rank: int) -> tuple[str, int, list[list[str]], int]:
    """Build two capacities, the second of which fails on one rank; then keep the first."""
    kernels, group, layers = kernels_of(engine)
    kernels.fails_to = fails_to if engine.rank == faulty_rank else ""
    build(kernels, group, layers, 8)
    second = build(kernels, group, layers, 64)
    counted = kernels.workspace_bytes(64)
    kernels.keep_only({8}, group)
    return str(second), counted, calls_of(kernels), kernels.workspace_bytes(64)


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_kernel_that_one_rank_cannot_build_is_dropped_on_all_and_nobody_waits(faulty_rank, rank_set):
    found = rank_set.call(failing, "create 64", faulty_rank, deadline_s=WITHIN_S)
    for rank, (second, counted, calls, left) in enumerate(found):
        assert second == f"mega@64 dropped on all ranks: rank {faulty_rank}: RuntimeError: out of memory"
        assert not any("destroy" in of_layer for of_layer in calls), "it takes all ranks to give memory back"
        assert (counted > 0) == (left > 0) == (rank != faulty_rank), "what is held stays counted"


def test_a_kernel_whose_first_run_fails_is_counted_and_given_back_by_all(rank_set):
    for second, counted, calls, left in rank_set.call(failing, "warm up", 1, deadline_s=WITHIN_S):
        assert "no such instruction" in second
        assert (counted > 0, left) == (True, 0)
        assert calls[0].count("destroy") == 1


def counts_unknown(engine: RankEngine) -> str:
    kernels, group, layers = kernels_of(engine)
    build(kernels, group, layers, 8)
    handle = next(iter(workspaces_of(kernels).values()))
    del handle._backend_workspace._sym_roots
    try:
        kernels.workspace_bytes(8)
    except ConfigError as error:
        return str(error)
    return "counted"


def test_memory_that_another_release_keeps_elsewhere_is_no_zero(rank_set):
    for message in rank_set.call(counts_unknown):
        assert "the memory of FlashInfer's mega kernel cannot be counted" in message


def test_nvshmem_starts_without_its_proxy_unless_the_user_wants_it():
    environment = {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "0"}
    leave_out_proxy(environment)
    assert environment == {
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
        "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "0",
        "NVSHMEM_IB_ENABLE_IBGDA": "0",
    }
    leave_out_proxy(environment := {})
    assert environment["NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"] == "1"
