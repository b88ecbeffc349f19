"""Which attention a rank computes by."""

import logging

import torch

from ..rank_config import RankConfig
from ..sizes.attention import pytorch_reason
from .backend import AttentionBackend
from .gathered import GatheredAttention
from .kv_cache import KvCache
from .paged import SdpaAttention

logger = logging.getLogger(__name__)


def make_attention(config: RankConfig, cache: KvCache, device: torch.device) -> AttentionBackend:
    """FlashInfer where it has kernels for all layers, PyTorch elsewhere; the same on every rank."""
    spec = config.spec
    if device.type == "cpu":
        return SdpaAttention(cache, device)
    from .flashinfer_attention import FlashInferAttention

    reason = pytorch_reason(config)
    if reason is not None:
        logger.warning("attention runs in PyTorch: %s", reason)
        return GatheredAttention(cache, spec.attention, spec.context_length, device)
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
