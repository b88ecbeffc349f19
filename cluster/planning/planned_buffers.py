"""What one rank allocates for the life of a pool, from its configuration alone."""

from ...dispatch.budgets.planned_buffer import PlannedBuffer
from ...dispatch.paths.planned import planned_paths
from ...workers.attention.registry import chosen
from ...workers.rank_config import RankConfig
from ...workers.sizes.kv_blocks import bytes_per_token, draft_bytes_per_token, least_blocks
from ...workers.sizes.step_inputs import static_bytes


def planned_buffers(config: RankConfig) -> tuple[PlannedBuffer, ...]:
    """Everything that a rank of this configuration allocates for the life of the pool, weights included."""
    spec, ep_size = config.spec, config.layout.world_size
    made_of = f"{config.expert_bytes:,} bytes / {ep_size} ranks"
    if config.stored is not None:
        made_of += f", kept as {config.stored.format} stores them"
    buffers = [
        PlannedBuffer("dense weights", None, spec.dense_bytes, "in full on every rank", "weights"),
        PlannedBuffer("experts", None, config.expert_bytes // ep_size, made_of, "weights"),
        *_caches(config),
    ]
    graph_bytes = static_bytes(config)
    if graph_bytes:
        buffers.append(PlannedBuffer("graph inputs", None, graph_bytes, "static buffers that all buckets share"))
    return (*buffers, *chosen(config).planned(config), *planned_paths(config))


def _caches(config: RankConfig) -> list[PlannedBuffer]:
    """The KV caches; those that are measured on GPUs at their least, one full context, and so not in rows."""
    token_bytes, measured = bytes_per_token(config), config.gpu_memory_utilization is not None
    num_blocks = least_blocks(config) if measured else config.num_blocks
    slots = num_blocks * config.block_size
    made_of = f"{num_blocks - 1} blocks of {config.block_size} tokens, and one for padding; "
    if measured:
        made_of = (
            f"at least one full context; measured at start, up to {config.num_blocks - 1} blocks of "
            f"{config.block_size} tokens within cache.gpu_memory_utilization={config.gpu_memory_utilization:g}; "
        )
    made_of += f"{token_bytes:,} bytes a token"
    rows = None if measured else slots
    caches = [PlannedBuffer("KV cache", rows, slots * token_bytes, made_of, "KV cache")]
    draft_bytes = draft_bytes_per_token(config)
    if draft_bytes:
        num_bytes = slots * draft_bytes
        caches.append(PlannedBuffer("draft KV cache", rows, num_bytes, "of the draft layers, same blocks", "KV cache"))
    return caches
