"""Whether a rank fits on its GPU, as far as that is known before anything starts.

Weights, buffers, the least KV cache, a lower bound on the largest step and the estimate for graphs are held against
`placement.gpu_memory_bytes`. The start measures the same sum (`workers.attention.kv_sizing`), with CUDA and
communication on top: a plan that just fits may fail there. Where paths are measured, all of `tuning.max_bytes` is set
aside for them.
"""

import msgspec

from ...dispatch.budgets.budget import largest_step
from ...dispatch.budgets.planned_buffer import BufferKind
from ...dispatch.budgets.step_kinds import tokens_per_request
from ...dispatch.errors import ConfigError
from ...workers.model.spec import AttentionShape, ModelSpec
from ...workers.rank_config import RankConfig
from ...workers.sizes.attention import GRAPH_BYTES, recorded_entries
from ..config import PoolConfig, resolve_unchecked
from .planned_buffers import planned_buffers

# Residual, normalised rows, what attention and experts return: hidden states that a layer holds at once, at least.
_HIDDEN_STATES = 4
_PARTS: dict[BufferKind, str] = {"weights": "weights", "KV cache": "kv_cache", "buffer": "buffers"}


class MemoryNeed(msgspec.Struct, frozen=True):
    """What one rank needs of its GPU, as far as it is known, and what it has; bytes, the same for every rank.

    Attributes:
        weights: dense ones, and this rank's share of the experts.
        kv_cache: as planned; where it is measured at start, that of one full context.
        buffers: everything else that is planned: exchange, experts, inputs of graphs.
        largest_step: a lower bound on what the largest step allocates.
        graphs: the estimate that the start makes for graphs, without their activations.
        gpu_memory: of the GPU; `None` where the configuration does not say.
        utilization: the share of it that all of this may take; 1 where `cache.num_tokens` settles the cache.
    """

    weights: int
    kv_cache: int
    buffers: int
    largest_step: int
    graphs: int
    gpu_memory: int | None
    utilization: float

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.buffers + self.largest_step + self.graphs

    @property
    def available(self) -> int | None:
        return None if self.gpu_memory is None else int(self.gpu_memory * self.utilization)

    @property
    def fits(self) -> bool:
        """Also where the memory of the GPU is not known."""
        return self.available is None or self.needed <= self.available

    def __str__(self) -> str:
        return (
            f"{self.needed:,} bytes a rank: weights {self.weights:,}, KV cache {self.kv_cache:,}, buffers "
            f"{self.buffers:,}, the largest step {self.largest_step:,}, graphs {self.graphs:,}"
        )


def memory_need(config: PoolConfig, rank_config: RankConfig) -> MemoryNeed | None:
    """What a rank needs of its GPU; `None` on CPUs.

    Args:
        config: the pool, which may say how much memory a GPU has.
        rank_config: what `config` resolves to.
    """
    if config.worker.device != "cuda":
        return None
    parts = {"weights": 0, "kv_cache": 0, "buffers": 0}
    for buffer in planned_buffers(rank_config):
        parts[_PARTS[buffer.kind]] += buffer.num_bytes
    return MemoryNeed(
        **parts,
        largest_step=largest_step_bytes(rank_config),
        graphs=len(recorded_entries(rank_config)) * GRAPH_BYTES,
        gpu_memory=config.placement.gpu_memory_bytes,
        utilization=rank_config.gpu_memory_utilization or 1.0,
    )


def largest_step_bytes(config: RankConfig) -> int:
    """A lower bound on what the largest step allocates: its rows in one attention layer, and its logits.

    Logits are those of the rows that are sampled, in the model's dtype, in float32, and as probabilities.
    """
    spec, num_tokens = config.spec, largest_step(config.limits).value
    num_due = min(num_tokens, config.limits.max_requests_per_step * tokens_per_request(config.limits))
    row_width = _HIDDEN_STATES * spec.hidden_size + max(_attention_width(shape) for shape in spec.attention)
    return num_tokens * row_width * spec.dtype_bytes + num_due * spec.vocab_size * (spec.dtype_bytes + 2 * 4)


def _attention_width(shape: AttentionShape) -> int:
    """Numbers of one token in queries, keys, values and the output of a layer."""
    return shape.num_heads * (shape.key_dim + shape.value_dim) + shape.width


def memory_problem(config: PoolConfig, rank_config: RankConfig) -> str | None:
    """Why a rank cannot fit on its GPU, with the smallest number of ranks that would; `None` where nothing says so."""
    need = memory_need(config, rank_config)
    if need is None or need.fits:
        return None
    spec = rank_config.spec
    stored = "" if spec.expanded_from is None else f" Weights, {spec.expanded_from}, are held expanded to {spec.dtype}."
    if rank_config.stored is not None:
        stored = f" Experts are kept as {rank_config.stored.format} stores them, other weights expanded."
    share = f" x cache.gpu_memory_utilization={need.utilization:g}" if need.utilization < 1 else ""
    return (
        f"ranks={config.ranks} does not fit: needs {need}; available are {need.available:,} "
        f"(placement.gpu_memory_bytes={need.gpu_memory:,}{share}).{stored} {_way_out(config, spec)}"
    )


def check_memory(config: PoolConfig, rank_config: RankConfig) -> None:
    """Refuse a pool whose ranks cannot fit on their GPUs.

    Raises:
        ConfigError: naming needed and available bytes, and the smallest number of ranks that would fit.
    """
    problem = memory_problem(config, rank_config)
    if problem is not None:
        raise ConfigError(problem)


def smallest_fit(config: PoolConfig, spec: ModelSpec) -> int | None:
    """The fewest ranks with which this configuration fits on its GPUs; `None` where no number does."""
    most = min(layer.num_experts for layer in spec.moe)
    for ranks in range(config.attn_tp_size, most + 1, config.attn_tp_size):
        if any(layer.num_experts % ranks for layer in spec.moe):
            continue
        resized = msgspec.structs.replace(config, ranks=ranks)
        need = memory_need(resized, resolve_unchecked(resized, spec))
        if need is not None and need.fits:
            return ranks
    return None


def _way_out(config: PoolConfig, spec: ModelSpec) -> str:
    settings = "cache.num_tokens (or set it), tuning.max_bytes or limits.chunked_prefill_size"
    ranks = smallest_fit(config, spec)
    if ranks is None:
        return (
            "No number of ranks would fit, since only experts are divided over them: use GPUs with more memory, or "
            f"lower {settings}"
        )
    return f"The smallest number of ranks that would fit is {ranks}: set ranks to it, or lower {settings}"
