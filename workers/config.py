"""Settings of the rank side: the KV cache and how a rank computes."""

from typing import Literal

import msgspec

from ..dispatch.errors import ConfigError
from .observing.logs import LogLevel

DTypeName = Literal["float32", "bfloat16", "float16"]
DeviceName = Literal["cpu", "cuda"]
WeightsName = Literal["checkpoint", "random"]
StoredWeightsName = Literal["expand", "keep", "auto"]
GenerationConfigName = Literal["ignore", "model"]
PrefillBackend = Literal["fa2", "fa3", "auto"]
AttentionName = Literal["auto", "torch"]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


MAX_SECONDS = 1e7
MAX_TRACE_STEPS = 1_000_000
MAX_BLOCK_SIZE, MAX_THREADS = 65_536, 4096
# Positions in the cache are counted in 32 bits.
MAX_CACHE_TOKENS = 2**31 - 1


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a DP rank's paged KV cache, the same on every rank.

    Attributes:
        block_size: tokens a block holds.
        num_tokens: tokens the cache holds, on any device, rounded up to whole blocks. Unset: enough for
            `max_running_requests` requests of full context length, within the bound below, and never less than one
            request of full context length.
        max_bytes: bound on the default size on CPUs.
        gpu_memory_utilization: bound on the default size on GPUs: the share of a GPU's memory that weights, buffers,
            the largest step, graphs and the cache take together, whoever else uses the GPU included. Measured at start.
    """

    block_size: int = 16
    num_tokens: int | None = None
    max_bytes: int = 4 << 30
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"cache.block_size={self.block_size} is not between 1 and {MAX_BLOCK_SIZE:,}")
        if self.num_tokens is not None and not 1 <= self.num_tokens <= MAX_CACHE_TOKENS:
            raise ConfigError(f"cache.num_tokens={self.num_tokens} is not between 1 and {MAX_CACHE_TOKENS:,}")
        if not 1 <= self.max_bytes < 2**63:
            raise ConfigError(
                f"cache.max_bytes={self.max_bytes} is not between 1 and 2**63: it bounds the size of the cache on CPUs"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"cache.gpu_memory_utilization={self.gpu_memory_utilization} is not above 0 and at most 1: it is a "
                "share of a GPU's memory"
            )


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank computes, the same on every rank.

    Attributes:
        device: `cpu`, or `cuda` for one GPU a rank.
        attention: on GPUs, `auto` is FlashInfer where it has kernels for all layers, and PyTorch elsewhere; `torch` is
            PyTorch. On CPUs it is PyTorch.
        prefill_backend: FlashInfer's kernels for eager steps on GPUs; results in docs/ were made with `fa2`.
        threads: CPU threads of a rank.
        compile: run the dense part of layers through torch.compile; unset: on GPUs only. Where
            one rank cannot, none does, and its reason is said.
        overlap: whether a rank schedules, agrees on and packs a step while the one before it runs, at the price of a
            token computed in vain where a request ends at an end of sequence. Unset: on GPUs only, where it hides the
            host's work; a CPU would wait for itself.
        step_timeout_s: how long after a rank stops taking part the pool is given up at the latest.
        environment: variables that every rank gets, over those of the launching process; see
            `cluster.ranks.environment`.
        log_level: of the driver's and the ranks' log lines.
        trace_steps: how many of its last steps a rank remembers for a trace; 0: none.
        expert_load: count how often each expert is chosen, for metrics: one more small kernel a MoE layer.
    """

    device: DeviceName = "cpu"
    attention: AttentionName = "auto"
    prefill_backend: PrefillBackend = "fa2"
    threads: int = 1
    compile: bool | None = None
    overlap: bool | None = None
    step_timeout_s: float = 300.0
    environment: dict[str, str] = {}
    log_level: LogLevel = "info"
    trace_steps: int = 0
    expert_load: bool = False

    @property
    def compiles(self) -> bool:
        return self.device == "cuda" if self.compile is None else self.compile

    @property
    def overlaps(self) -> bool:
        return self.device == "cuda" if self.overlap is None else self.overlap

    @property
    def peer_wait_s(self) -> float:
        """How long a rank waits for another before it raises: the driver needs up to 4 s of `step_timeout_s` to find
        out which rank is missing, tell the others and report it."""
        return max(self.step_timeout_s - 4.0, self.step_timeout_s / 2)

    @property
    def device_timeout_s(self) -> float:
        """How long kernels wait for a peer. Past it NCCL and FlashInfer end the process that waits, and it would look
        like the one that failed: what the host notices after `step_timeout_s`, and says of whom, has to come first."""
        return 2 * self.step_timeout_s + 30.0

    def __post_init__(self) -> None:
        if VISIBLE_DEVICES in self.environment:
            raise ConfigError(
                f"worker.environment sets {VISIBLE_DEVICES}={self.environment[VISIBLE_DEVICES]!r}: Ray gives each rank "
                "its GPUs, so that no two pools share one; leave it out"
            )
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(
                f"worker.threads={self.threads} is not between 1 and {MAX_THREADS:,}: set it to the CPU threads "
                "of a rank"
            )
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"worker.environment sets {name!r} to {value!r:.60}: no variable can be that")
            try:
                (name + value).encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"worker.environment sets {name!r} to {value!r:.60}, which is no valid text: {error.reason}"
                ) from error
        if not 0 <= self.trace_steps <= MAX_TRACE_STEPS:
            raise ConfigError(f"worker.trace_steps={self.trace_steps} is not between 0 and {MAX_TRACE_STEPS:,}")
        if not 1 <= self.step_timeout_s <= MAX_SECONDS:
            raise ConfigError(f"worker.step_timeout_s={self.step_timeout_s} is not between 1 and {MAX_SECONDS:g}")
