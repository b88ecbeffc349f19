"""PyTorch's attention on GPUs: for models that nothing else there has kernels for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...dispatch.budgets.step_kinds import KINDS
from ...dispatch.way import places
from ...graphs.plan import CaptureEntry
from ..model.spec import AttentionShape
from ..rank_config import RankConfig
from .registry import register
from .way import AttentionWay

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .backend import AttentionBackend

# Keys and values that one layer of one graph may gather. A graph that needs more is not recorded, on any rank.
GATHER_BYTES = 2 << 30


@register
class GatheredWay(AttentionWay):
    """Serves every model; of graphs, those of decode steps that do not gather too much."""

    kind = "gathered"
    devices = places(cuda=100)

    @classmethod
    def entry_refusal(cls, config: RankConfig, entry: CaptureEntry) -> str | None:
        spec = config.spec
        per_request = gathered_bytes(spec.attention, spec.context_length, config.block_size, spec.dtype_bytes)
        return gathered_refusal(entry, per_request)

    @classmethod
    def make(cls, config: RankConfig, model: PreTrainedModel, cache: Any, device: torch.device) -> AttentionBackend:
        from .gathered import GatheredAttention

        return GatheredAttention(cache, config.spec.attention, config.spec.context_length, device)


def gathered_refusal(entry: CaptureEntry, request_bytes: int) -> str | None:
    """Why a step has no graph with attention in PyTorch; `None` where it has.

    Args:
        entry: which graph.
        request_bytes: what one request gathers; see `gathered_bytes`.
    """
    if KINDS[entry.kind].serves != "decode":
        return f"records no {entry.kind} graphs on GPUs: their attention runs in PyTorch, request by request"
    needed = entry.bucket * request_bytes
    if needed > GATHER_BYTES:
        return (
            f"records no graph of {entry.bucket} requests: attention in PyTorch would gather {needed:,} bytes of "
            f"keys and values a layer, more than {GATHER_BYTES:,}"
        )
    return None


def gathered_bytes(shapes: Sequence[AttentionShape], context_length: int, block_size: int, itemsize: int) -> int:
    """Keys and values of one request that the widest layer gathers in a graph: those of full context length.

    Args:
        shapes: of each layer.
        context_length: the most tokens of a request.
        block_size: tokens of a KV block.
        itemsize: bytes of one number.
    """
    widest = max(shape.width for shape in shapes)
    return -(-context_length // block_size) * block_size * widest * itemsize
