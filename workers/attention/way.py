"""What an attention says of itself: one class an attention, looked up in `attention.registry`; free of PyTorch.

An attention is how a rank computes the attention of its layers, with the cache that it keeps for requests. Which one
ranks take is decided from their configuration alone, so it is the same on every rank, and plans know it.

- **Before anything starts**, on the driver's side too: everything but `notes`, `make_cache` and `make`. What these need
  of PyTorch, and of libraries for GPUs, is imported inside: the module is read without it.
- **The cache** has blocks of tokens, numbered alike for all attentions: block 0 belongs to nobody. What a block holds
  of a token is the attention's own, and `token_bytes` counts it.
- **What is made** keeps `attention.backend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...dispatch.budgets.planned_buffer import PlannedBuffer
from ...graphs.plan import CaptureEntry
from ..rank_config import RankConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .backend import AttentionBackend, PagedCache


class AttentionWay(ABC):
    """One way to attend.

    Attributes:
        kind: its name among the attentions.
        devices: on which it runs, each with its place among the attentions there: the first that does not refuse is
            taken.
        computed_in: what the setting `worker.attention` calls what computes it, beside `auto`.
    """

    kind: ClassVar[str]
    devices: ClassVar[Mapping[str, int]]
    computed_in: ClassVar[str] = "torch"

    @classmethod
    def notes(cls, module: torch.nn.Module) -> tuple[tuple[str, int], ...]:
        """Numbers of a layer that it has to know beside its `AttentionShape`, into whose `noted` they go.

        Args:
            module: the layer's attention, on the meta device. Layers with equal shapes have to attend alike.
        """
        return ()

    @classmethod
    def refusal(cls, config: RankConfig) -> str | None:
        """Why it cannot serve this model as configured, so that the next is asked; `None` where it can."""
        return None

    @classmethod
    def entry_refusal(cls, config: RankConfig, entry: CaptureEntry) -> str | None:
        """Why a step can have no graph with it; `None` where it can. Continues "rank 0 "."""
        return None

    @classmethod
    def token_bytes(cls, config: RankConfig) -> int:
        """Bytes that its cache takes for a token, over all layers of the model."""
        return config.spec.kv_bytes_per_token

    @classmethod
    def said(cls, config: RankConfig, layer: int) -> str:
        """What attends in a layer, for people."""
        return f"attention by PyTorch ({cls.kind})"

    @classmethod
    def planned(cls, config: RankConfig) -> list[PlannedBuffer]:
        """What it allocates beside the cache and is not measured at start, by the same arithmetic as `make`."""
        return []

    @classmethod
    def kernel_modules(cls, config: RankConfig) -> list[tuple[str, Any]]:
        """What FlashInfer compiles for it on first use: specifications of its modules, each with a label for people."""
        return []

    @classmethod
    def make_cache(cls, config: RankConfig, num_blocks: int, device: torch.device) -> PagedCache:
        """The cache of a rank, outside inference mode.

        Args:
            config: equal on every rank.
            num_blocks: the padding block included; equal on every rank.
            device: where it lies.
        """
        import torch

        from .kv_cache import KvCache

        spec = config.spec
        return KvCache(spec.attention, num_blocks, config.block_size, getattr(torch, spec.dtype), device)

    @classmethod
    @abstractmethod
    def make(cls, config: RankConfig, model: PreTrainedModel, cache: Any, device: torch.device) -> AttentionBackend:
        """The attention of a rank; takes no other rank, and may be made again for another cache.

        Args:
            config: equal on every rank.
            model: that will attend with it, on its device.
            cache: what `make_cache` returned.
            device: of this rank.
        """
