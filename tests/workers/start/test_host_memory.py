"""Ranks on CPUs that cannot fit into their machine's memory are refused, by the driver and by each rank."""

from pathlib import Path

import msgspec
import pytest
from expert_pool.cluster import CacheConfig, ConfigError, ExpertPool, Limits, PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.start import host_memory
from expert_pool.workers.start.host_memory import host_bytes, host_need, host_problem, refuse_beyond_host
from plain_ranks import run_on_ranks


def config_of(model: str, address: str | None = None) -> PoolConfig:
    limits = Limits(chunked_prefill_size=16, max_running_requests=4)
    return PoolConfig(model=model, ranks=2, limits=limits, cache=CacheConfig(num_tokens=256), address=address)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says how much memory this process's container may take, read in the place of the system's."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "CGROUP_LIMITS", (str(limit),))
    return limit


@pytest.mark.parametrize("said", ["max", "not a number", None])
def test_a_container_without_a_limit_has_its_machines_memory(said, machine):
    if said is not None:
        machine.write_text(said)
    unbounded = host_bytes()
    machine.write_text(str(unbounded - 1))
    assert host_bytes() == unbounded - 1


def test_as_many_ranks_as_fit_are_taken_and_one_more_is_refused_by_what_it_needs(tiny_moe, machine):
    config = resolve(config_of(tiny_moe), inspect_model(tiny_moe))
    needed = host_need(config).needed
    machine.write_text(str(2 * needed))
    assert host_problem(config, 2) is None
    assert host_problem(config, 3).startswith(
        f"3 of ranks=2 on this machine do not fit into its memory of {2 * needed:,} bytes: needs {needed:,} bytes a "
    )
    with pytest.raises(ConfigError, match=r"Lower limits.max_running_requests, limits.chunked_prefill_size, "):
        refuse_beyond_host(config, 3)


def test_a_larger_cache_or_more_requests_need_more(tiny_moe):
    spec = inspect_model(tiny_moe)
    small = resolve(config_of(tiny_moe), spec)
    large = msgspec.structs.replace(
        config_of(tiny_moe), limits=Limits(chunked_prefill_size=1024, max_running_requests=4)
    )
    assert host_need(resolve(large, spec)).buffers > host_need(small).buffers
    filled = msgspec.structs.replace(config_of(tiny_moe), cache=CacheConfig(num_tokens=2**31 - 1))
    assert host_need(resolve(filled, spec)).kv_cache > host_need(small).kv_cache


def test_a_pool_beyond_this_machine_is_refused_before_anything_starts(tiny_moe, machine):
    machine.write_text("1000000")
    with pytest.raises(
        ConfigError, match=r"2 of ranks=2 on this machine do not fit into its memory of 1,000,000 bytes"
    ):
        ExpertPool.launch(config_of(tiny_moe, address="local"))


def said_to_a_rank_that_loads(engine: RankEngine, limit: str) -> str:
    """In the process of a rank, whose machine has less memory than when it loaded first."""
    host_memory.CGROUP_LIMITS = (limit,)
    try:
        engine.load()
    except ConfigError as error:
        return str(error)
    return "loaded"


def test_each_rank_looks_for_itself_before_it_allocates(tiny_moe, machine):
    """As on a node with less memory than the others, of which the driver knows nothing."""
    machine.write_text("1000000")
    said = run_on_ranks(config_of(tiny_moe), said_to_a_rank_that_loads, str(machine), graphs=False)
    for one in said:
        assert one.startswith("1 of ranks=2 on this machine do not fit into its memory of 1,000,000 bytes: needs ")
