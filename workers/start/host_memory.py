"""Whether ranks on CPUs fit into the memory of their machine, by what they hold for their lives, before they start.

Memory of a KV cache is taken as the cache fills, so one within the default of `cache.max_bytes` counts as one full
context: a machine on which it never fills serves with less than it could hold.
"""

import contextlib
from pathlib import Path

import msgspec
import psutil

from ...dispatch.errors import ConfigError
from ...dispatch.paths.planned import planned_paths
from ...dispatch.registry import MEASURED
from ..attention.registry import chosen
from ..config import CacheConfig
from ..rank_config import RankConfig
from ..sizes.kv_blocks import block_bytes, least_blocks
from ..sizes.step_inputs import static_bytes

CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


class HostNeed(msgspec.Struct, frozen=True):
    """What one rank on CPUs holds for the life of the pool; bytes, the same for every rank.

    Attributes:
        weights: dense ones, and this rank's share of the experts.
        kv_cache: keys and values, the draft's included, at least: see above.
        buffers: of the exchange and of attention, and inputs of graphs. Where paths are measured, those are not known.
    """

    weights: int
    kv_cache: int
    buffers: int

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.buffers

    def __str__(self) -> str:
        return (
            f"{self.needed:,} bytes a rank: weights {self.weights:,}, KV cache at least {self.kv_cache:,}, "
            f"buffers {self.buffers:,}"
        )


def host_need(config: RankConfig) -> HostNeed | None:
    """What a rank holds; `None` on GPUs."""
    if config.worker.device != "cpu":
        return None
    attention_bytes = sum(buffer.num_bytes for buffer in chosen(config).planned(config))
    buffers, kv_cache = static_bytes(config) + attention_bytes, config.num_blocks * block_bytes(config)
    if kv_cache - block_bytes(config) <= CacheConfig().max_bytes:
        kv_cache = min(config.num_blocks, least_blocks(config)) * block_bytes(config)
    if config.dispatch != MEASURED:
        buffers += sum(buffer.num_bytes for buffer in planned_paths(config))
    return HostNeed(
        weights=config.spec.dense_bytes + config.expert_bytes // config.layout.world_size,
        kv_cache=kv_cache,
        buffers=buffers,
    )


def host_bytes() -> int:
    """Memory of this machine, swap included, or what its container may take of it."""
    found = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            found.append(int(Path(limit).read_text()))
    return min(found)


def host_problem(config: RankConfig, ranks_here: int) -> str | None:
    """Why ranks cannot fit on this machine, whatever else it runs; `None` where nothing says so, and on GPUs.

    Args:
        config: equal on every rank.
        ranks_here: ranks of the pool that this machine has, as far as that is known.
    """
    need, available = host_need(config), host_bytes()
    if need is None or need.needed * ranks_here <= available:
        return None
    return (
        f"{ranks_here} of ranks={config.layout.world_size} on this machine do not fit into its memory of {available:,} "
        f"bytes: needs {need}. Lower limits.max_running_requests, limits.chunked_prefill_size, cache.num_tokens or "
        "cache.max_bytes, whichever is largest, or use more machines"
    )


def refuse_beyond_host(config: RankConfig, ranks_here: int) -> None:
    """Refuse ranks that cannot fit on this machine.

    Raises:
        ConfigError: naming needed and available bytes, and the settings.
    """
    problem = host_problem(config, ranks_here)
    if problem is not None:
        raise ConfigError(problem)
