"""PyTorch's attention on CPUs, a request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.way import places
from ..rank_config import RankConfig
from .registry import register
from .way import AttentionWay

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .backend import AttentionBackend


@register
class SdpaWay(AttentionWay):
    """Serves every model and every kind of graph: static replay on CPUs runs the step itself."""

    kind = "sdpa"
    devices = places(cpu=100)

    @classmethod
    def make(cls, config: RankConfig, model: PreTrainedModel, cache: Any, device: torch.device) -> AttentionBackend:
        from .paged import SdpaAttention

        return SdpaAttention(cache, device)
