"""Keys and values of a step into their slots of the paged cache: one kernel of FlashInfer's a layer, where it has one.

FlashInfer is imported at construction.
"""

from dataclasses import dataclass

import torch

from ..model.spec import AttentionShape
from .kv_cache import KvCache

# What the kernel is made for; a block of it has threads for all heads of a token.
_WIDTHS, _MOST_HEADS = (64, 128, 256), 32


def appends_in_one_kernel(shape: AttentionShape) -> bool:
    """Whether FlashInfer writes keys and values of such a layer to their pages; else PyTorch copies each."""
    return shape.key_dim == shape.value_dim and shape.key_dim in _WIDTHS and shape.num_kv_heads <= _MOST_HEADS


class KvWriter:
    """Writes keys and values into the cache.

    Args:
        cache: where to.
        device: of it.
    """

    def __init__(self, cache: KvCache, device: torch.device):
        from flashinfer import append_paged_kv_cache

        self.append = append_paged_kv_cache
        self.cache = cache
        # To the kernel the whole cache is one request, whose positions are slots.
        self.pages = torch.arange(cache.num_blocks, dtype=torch.int32, device=device)
        self.offsets = torch.tensor([0, cache.num_blocks], dtype=torch.int32, device=device)
        self.last = torch.tensor([cache.block_size], dtype=torch.int32, device=device)

    def of_step(self, slots_T: torch.Tensor) -> "StepWriter":
        """What writes to these slots, the same in each layer."""
        return StepWriter(self, slots_T, slots_T.int(), torch.zeros_like(slots_T, dtype=torch.int32))


@dataclass(frozen=True)
class StepWriter:
    """Writes of one step, the same slots in each layer; `KvWriter.of_step` makes it."""

    writer: KvWriter
    slots_T: torch.Tensor
    positions_T: torch.Tensor
    requests_T: torch.Tensor

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`[1, H, T, D]` each, any strides but of the last dimension."""
        writer, key_THD, value_THD = self.writer, key[0].transpose(0, 1), value[0].transpose(0, 1)
        if not appends_in_one_kernel(writer.cache.shapes[layer]):
            writer.cache.write(layer, self.slots_T, key_THD, value_THD)
            return
        writer.append(
            key_THD,
            value_THD,
            self.requests_T,
            self.positions_T,
            writer.cache.pages(layer),
            writer.pages,
            writer.offsets,
            writer.last,
        )
