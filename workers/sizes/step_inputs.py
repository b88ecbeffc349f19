"""Static inputs of a rank's graphs, from its configuration: what plans count and `graphs.static` allocates.

Free of PyTorch. Equal on every rank.
"""

from ...dispatch.budgets.geometry import pad_to_ranks
from ...dispatch.budgets.step_kinds import KINDS
from ...graphs.buffer_spec import BufferSpec
from ...graphs.plan import CaptureEntry, plan_captures
from ..rank_config import RankConfig
from ..speculation.step_inputs import draft_specs
from .kv_blocks import PADDING_BLOCK, PADDING_SLOT, blocks_of_context

_INTEGER = "int64"


def buffer_specs(config: RankConfig) -> dict[str, dict[str, BufferSpec]]:
    """Static buffers by the model whose graphs read them; equal on every rank."""
    specs = {}
    for model, make in (("target", _target_specs), ("draft", draft_specs)):
        entries = [entry for entry in plan_captures(config.limits).entries if KINDS[entry.kind].model == model]
        if entries:
            specs[model] = make(config, entries, _most_tokens(config, entries))
    return specs


def _target_specs(config: RankConfig, entries: list[CaptureEntry], max_tokens: int) -> dict[str, BufferSpec]:
    by_request = [entry for entry in entries if KINDS[entry.kind].unit == "requests"]
    return target_buffer_specs(
        max_tokens=max_tokens,
        max_requests=max([config.limits.max_running_requests, *(entry.bucket for entry in by_request)]),
        max_due=max([config.limits.max_running_requests, *(entry.num_tokens for entry in by_request)]),
        max_blocks=blocks_of_context(config),
    )


def _most_tokens(config: RankConfig, entries: list[CaptureEntry]) -> int:
    return max(pad_to_ranks(entry.num_tokens, config.layout.attn_tp_size) for entry in entries)


def static_bytes(config: RankConfig) -> int:
    """Bytes of the static buffers of a rank, as they are allocated."""
    return sum(spec.num_bytes for specs in buffer_specs(config).values() for spec in specs.values())


def target_buffer_specs(max_tokens: int, max_requests: int, max_due: int, max_blocks: int) -> dict[str, BufferSpec]:
    """Static buffers of the target model's graphs.

    Args:
        max_tokens: of the largest graph, padded for the ranks that share a batch.
        max_requests: in any graph.
        max_due: rows of logits of any graph.
        max_blocks: KV blocks of one request.
    """
    return {
        "input_ids": BufferSpec((max_tokens,), _INTEGER, 0, "tokens"),
        "positions": BufferSpec((max_tokens,), _INTEGER, 0, "tokens"),
        "slots": BufferSpec((max_tokens,), _INTEGER, PADDING_SLOT, "tokens"),
        "due_rows": BufferSpec((max_due,), _INTEGER, 0, "due"),
        "query_starts": BufferSpec((max_requests,), _INTEGER, 0, "requests"),
        "query_lens": BufferSpec((max_requests,), _INTEGER, 0, "requests"),
        "context_lens": BufferSpec((max_requests,), _INTEGER, 0, "requests"),
        "block_tables": BufferSpec((max_requests, max_blocks), _INTEGER, PADDING_BLOCK, "requests"),
        "num_valid_tokens": BufferSpec((1,), "int32", 0, "step"),
    }
