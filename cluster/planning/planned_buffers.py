"""What one rank allocates for the life of a pool, from its configuration alone."""

import msgspec

from ...dispatch.budgets.budget import ExchangeBudget, RowFormat, exchange_rows
from ...dispatch.dispatchers.flashinfer_workspace import flashinfer_workspace_bytes
from ...workers.attention.kv_sizing import least_blocks
from ...workers.graph_set import static_bytes
from ...workers.path_selection.exchange_sizes import budget_for, pair_budget_for, row_formats
from ...workers.rank_config import RankConfig
from ...workers.speculation.draft import draft_cache


class PlannedBuffer(msgspec.Struct, frozen=True):
    """Memory that one rank holds for the life of the pool, the same on every rank.

    Attributes:
        name: what it is.
        rows: rows it holds; `None` where it is not made of rows.
        num_bytes: what is allocated for it.
        made_of: where the size comes from.
    """

    name: str
    rows: int | None
    num_bytes: int
    made_of: str


def planned_buffers(config: RankConfig) -> tuple[PlannedBuffer, ...]:
    """Everything that a rank of this configuration allocates for the life of the pool, weights included."""
    spec, ep_size = config.spec, config.layout.world_size
    buffers = [
        PlannedBuffer("dense weights", None, spec.dense_bytes, "in full on every rank"),
        PlannedBuffer("experts", None, spec.expert_bytes // ep_size, f"{spec.expert_bytes:,} bytes / {ep_size} ranks"),
        *_caches(config),
    ]
    graph_bytes = static_bytes(config)
    if graph_bytes:
        buffers.append(PlannedBuffer("graph inputs", None, graph_bytes, "static buffers that all buckets share"))
    if config.dispatch == "measured":
        bound = config.tuning.max_bytes
        buffers.append(PlannedBuffer("dispatch: measured paths", None, bound, "at most, by tuning.max_bytes"))
    elif config.dispatch == "mega":
        buffers.append(_mega_staging(config, row_formats(spec)))
    elif config.dispatch == "flashinfer" or (config.dispatch == "alltoall" and config.experts == "cutedsl"):
        buffers.append(_flashinfer_workspace(config, row_formats(spec)))
    elif config.dispatch != "local":
        buffers += _exchange_buffers(config, budget_for(config))
    return (*buffers, *_pair_buffers(config))


def _pair_buffers(config: RankConfig) -> list[PlannedBuffer]:
    """Of CuTe DSL experts: every row that can reach a rank, with every expert that it can have there."""
    budget = pair_budget_for(config)
    if budget is None:
        return []
    made_of = f"{_rows_of(config, config.capacity)}, with every expert that a row can have there"
    sizes = (
        ("routing", budget.routing_bytes),
        ("hidden", budget.hidden_bytes),
        ("outputs", budget.output_bytes),
    )
    return [PlannedBuffer(f"experts: {name}", budget.num_pairs, num, made_of) for name, num in sizes]


def _caches(config: RankConfig) -> list[PlannedBuffer]:
    """The KV caches; those that are measured on GPUs at their least, one full context, and so not in rows."""
    spec, measured = config.spec, config.gpu_memory_utilization is not None
    num_blocks = least_blocks(config) if measured else config.num_blocks
    slots = num_blocks * config.block_size
    made_of = f"{num_blocks - 1} blocks of {config.block_size} tokens, and one for padding; "
    if measured:
        made_of = (
            f"at least one full context; measured at start, up to {config.num_blocks - 1} blocks of "
            f"{config.block_size} tokens within cache.gpu_memory_utilization={config.gpu_memory_utilization:g}; "
        )
    made_of += f"{spec.kv_bytes_per_token:,} bytes a token"
    rows = None if measured else slots
    caches = [PlannedBuffer("KV cache", rows, slots * spec.kv_bytes_per_token, made_of)]
    draft_width = sum(shape.width for shape in draft_cache(config))
    if draft_width:
        num_bytes = slots * draft_width * spec.dtype_bytes
        caches.append(PlannedBuffer("draft KV cache", rows, num_bytes, "of the draft layers, same blocks"))
    return caches


def _exchange_buffers(config: RankConfig, budget: ExchangeBudget) -> list[PlannedBuffer]:
    rows, made_of = exchange_rows(config.layout, budget.capacity), _rows_of(config, budget.capacity)
    sizes = (("send", budget.send_bytes), ("receive", budget.receive_bytes), ("combine", budget.combine_bytes))
    return [PlannedBuffer(f"dispatch: {name}", rows, num_bytes, made_of) for name, num_bytes in sizes]


def _flashinfer_workspace(config: RankConfig, formats: list[RowFormat]) -> PlannedBuffer:
    ep_size = config.layout.world_size
    num_formats = len({(one.hidden_size, one.top_k, one.dtype) for one in formats})
    made_of = _rows_of(config, config.capacity)
    return PlannedBuffer(
        "dispatch: FlashInfer workspace",
        exchange_rows(config.layout, config.capacity),
        flashinfer_workspace_bytes(ep_size, config.capacity, formats),
        made_of if num_formats == 1 else f"{made_of}, for each of {num_formats} row formats",
    )


def _mega_staging(config: RankConfig, formats: list[RowFormat]) -> PlannedBuffer:
    """What is known before the kernel is compiled: rows in and out, expert ids (int64) and weights (float32)."""
    row_bytes = max(2 * row_format.hidden_bytes + 12 * row_format.top_k for row_format in formats)
    made_of = "rows in and out; the compiled kernel adds its own workspace"
    return PlannedBuffer("dispatch: mega kernel", config.capacity, config.capacity * row_bytes, made_of)


def _rows_of(config: RankConfig, capacity: int) -> str:
    return f"ep_size {config.layout.world_size} x capacity {capacity}"
