"""Which attention a rank runs on a GPU, which steps are recorded with it, and what a graph takes; free of PyTorch.

All from configuration: the memory check counts the graphs that ranks record.
"""

from collections.abc import Sequence

from ...dispatch.budgets.step_kinds import KINDS
from ...graphs.plan import CaptureEntry, plan_captures
from ..model.spec import AttentionShape
from ..rank_config import RankConfig

# An estimate of what one CUDA graph takes beside activations: its kernel nodes, and the allocator's rounding. Graphs of
# the small models in docs/gpu-results.md took less.
GRAPH_BYTES = 24 << 20
# Keys and values that one layer of one graph may gather. A graph that needs more is not recorded, on any rank.
GATHER_BYTES = 2 << 30
_HEAD_DIMS = (64, 128, 256)
_UNEQUAL_HEAD_DIMS = ((192, 128),)  # of DeepSeek's attention, keys and values expanded


def pytorch_reason(config: RankConfig) -> str | None:
    """Why attention runs in PyTorch on a GPU; `None` where it runs in FlashInfer, which has kernels for all layers."""
    if config.worker.attention != "auto":
        return f"worker.attention is {config.worker.attention!r}"
    return unsupported_reason(config.spec.attention, config.spec.dtype)


def unsupported_reason(shapes: Sequence[AttentionShape], dtype: str) -> str | None:
    """Why FlashInfer's wrappers cannot serve these layers; `None` where they can."""
    if dtype not in ("bfloat16", "float16"):
        return f"FlashInfer attention needs bfloat16 or float16, the model is in {dtype}"
    for layer, shape in enumerate(shapes):
        if shape.key_dim != shape.value_dim:
            if (shape.key_dim, shape.value_dim) not in _UNEQUAL_HEAD_DIMS or shape.has_sinks:
                return f"layer {layer} has keys of width {shape.key_dim} and values of width {shape.value_dim}"
        elif shape.key_dim not in _HEAD_DIMS:
            return f"layer {layer} has heads of width {shape.key_dim}, FlashInfer has kernels for {_HEAD_DIMS}"
    return None


def recorded_entries(config: RankConfig) -> list[CaptureEntry]:
    """The planned graphs that the attention of a rank's GPU can be recorded in."""
    entries = plan_captures(config.limits).entries
    if pytorch_reason(config) is None:
        return [entry for entry in entries if planned_refusal(entry) is None]
    spec = config.spec
    per_request = gathered_bytes(spec.attention, spec.context_length, config.block_size, spec.dtype_bytes)
    return [entry for entry in entries if gathered_refusal(entry, per_request) is None]


def planned_refusal(entry: CaptureEntry) -> str | None:
    """Why a kind of step has no graph with FlashInfer's attention; `None` where it has."""
    if KINDS[entry.kind].serves is not None:
        return None
    return f"records no {entry.kind} graphs on GPUs: their attention is not planned for graphs yet"


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
