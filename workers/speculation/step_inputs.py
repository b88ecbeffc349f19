"""Static inputs of draft graphs, from a rank's configuration; free of PyTorch. Equal on every rank."""

from ...dispatch.budgets.step_kinds import KINDS
from ...graphs.buffer_spec import BufferSpec
from ...graphs.plan import CaptureEntry
from ..rank_config import RankConfig
from ..sizes.kv_blocks import PADDING_BLOCK, PADDING_SLOT, blocks_of_context

_INTEGER = "int64"


def draft_specs(config: RankConfig, entries: list[CaptureEntry], max_tokens: int) -> dict[str, BufferSpec]:
    """Static buffers of the draft graphs of a rank.

    Args:
        config: of the rank.
        entries: graphs of draft kinds.
        max_tokens: of the largest, padded for the ranks that share a batch.
    """
    return draft_buffer_specs(
        max_tokens=max_tokens,
        max_tables=max(e.num_tokens if KINDS[e.kind].attends_by == "token" else e.bucket for e in entries),
        max_blocks=blocks_of_context(config),
        num_steps=config.limits.speculative_num_steps or 1,
        hidden_size=config.spec.hidden_size,
        dtype=config.spec.dtype,
    )


def draft_buffer_specs(
    max_tokens: int, max_tables: int, max_blocks: int, num_steps: int, hidden_size: int, dtype: str
) -> dict[str, BufferSpec]:
    """Static buffers of the draft graphs.

    Args:
        max_tokens: of the largest graph, padded for the ranks that share a batch.
        max_tables: requests or branches of the largest graph.
        max_blocks: KV blocks of one request.
        num_steps: draft steps in one graph.
        hidden_size: of the model.
        dtype: of its hidden states.
    """
    return {
        "input_ids": BufferSpec((max_tokens,), _INTEGER, 0, "tokens"),
        "hidden_states": BufferSpec((max_tokens, hidden_size), dtype, 0.0, "tokens"),
        "positions": BufferSpec((max_tokens,), _INTEGER, 0, "tokens"),
        "slots": BufferSpec((max_tokens, num_steps), _INTEGER, PADDING_SLOT, "tokens"),
        "query_starts": BufferSpec((max_tables,), _INTEGER, 0, "requests"),
        "query_lens": BufferSpec((max_tables,), _INTEGER, 0, "requests"),
        "context_lens": BufferSpec((max_tables,), _INTEGER, 0, "requests"),
        "block_tables": BufferSpec((max_tables, max_blocks), _INTEGER, PADDING_BLOCK, "requests"),
        "num_valid_tokens": BufferSpec((1,), "int32", 0, "step"),
    }
