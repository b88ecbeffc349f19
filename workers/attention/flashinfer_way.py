"""FlashInfer's attention on GPUs: which models it has kernels for, and which steps it is planned for."""

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

_HEAD_DIMS = (64, 128, 256)
_UNEQUAL_HEAD_DIMS = ((192, 128),)  # of DeepSeek's attention, keys and values expanded


@register
class FlashInferWay(AttentionWay):
    """Serves models for all of whose layers FlashInfer has kernels. Its workspace is there when the cache is measured,
    and is not planned."""

    kind = "flashinfer"
    devices = places(cuda=10)
    computed_in = "flashinfer"

    @classmethod
    def refusal(cls, config: RankConfig) -> str | None:
        return unsupported_reason(config.spec.attention, config.spec.dtype)

    @classmethod
    def entry_refusal(cls, config: RankConfig, entry: CaptureEntry) -> str | None:
        if KINDS[entry.kind].serves is not None:
            return None
        return f"records no {entry.kind} graphs on GPUs: their attention is not planned for graphs yet"

    @classmethod
    def said(cls, config: RankConfig, layer: int) -> str:
        from .flashinfer_writes import appends_in_one_kernel

        in_one = (
            ", keys and values written in one kernel" if appends_in_one_kernel(config.spec.attention[layer]) else ""
        )
        return f"attention by FlashInfer{in_one}"

    @classmethod
    def kernel_modules(cls, config: RankConfig) -> list[tuple[str, Any]]:
        from ..kernels.attention_modules import attention_modules

        return list(attention_modules(config))

    @classmethod
    def make(cls, config: RankConfig, model: PreTrainedModel, cache: Any, device: torch.device) -> AttentionBackend:
        import torch

        from .flashinfer_attention import FlashInferAttention

        spec = config.spec
        pages_of_one = -(-spec.context_length // config.block_size)
        max_pages = min(config.num_blocks, pages_of_one * config.limits.max_requests_per_step)
        return FlashInferAttention(
            cache,
            spec.attention,
            config.limits.max_running_requests,
            max_pages + config.limits.max_requests_per_step + config.layout.attn_tp_size,
            getattr(torch, spec.dtype),
            config.worker.prefill_backend,
            config.layout.attn_tp_size,
            device,
        )


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
