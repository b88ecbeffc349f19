"""The paged KV cache of one rank: tensors of blocks, and who holds which block.

Block 0 belongs to nobody: padding and dummy tokens write there, and nothing reads it.
"""

from collections.abc import Sequence

import torch

from ..model.spec import AttentionShape
from ..sizes.kv_blocks import PADDING_BLOCK
from ..sizes.kv_blocks import PADDING_SLOT as PADDING_SLOT


class KvCache:
    """Keys and values of all layers, `[num_blocks, block_size, num_kv_heads, dim]` each.

    Args:
        shapes: what each layer stores for a token, and how it attends.
        num_blocks: blocks, the padding block included; equal on every rank.
        block_size: tokens a block holds; equal on every rank.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys = [
            torch.zeros(num_blocks, block_size, s.num_kv_heads, s.key_dim, dtype=dtype, device=device) for s in shapes
        ]
        self._values = [
            torch.zeros(num_blocks, block_size, s.num_kv_heads, s.value_dim, dtype=dtype, device=device) for s in shapes
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self._keys[0].itemsize

    def write(self, layer: int, slots_T: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor) -> None:
        """Store the keys and values of `T` tokens; slot `s` is place `s % block_size` of block `s // block_size`."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots_T, key_THD)
        self._values[layer].flatten(0, 1).index_copy_(0, slots_T, value_THD)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, `[num_blocks, block_size, H, D]` each."""
        return self._keys[layer], self._values[layer]

    def read(self, layer: int, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` keys `[length, H, D]` and values of a request whose blocks are `block_table` (int64)."""
        blocks = block_table[: -(-length // self.block_size)]
        keys = self._keys[layer].index_select(0, blocks).flatten(0, 1)[:length]
        values = self._values[layer].index_select(0, blocks).flatten(0, 1)[:length]
        return keys, values


class BlockAllocator:
    """Hands out block numbers; the order is a function of the calls alone, so ranks that share a batch agree.

    Attributes:
        block_size: tokens a block holds.
        num_blocks: blocks that can be handed out, the padding block not among them.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, blocks: list[int], num_tokens: int) -> bool:
        """Extend `blocks` until they hold `num_tokens`; take none and return False where too few are free."""
        needed = self.blocks_for(num_tokens) - len(blocks)
        if needed > self.num_free:
            return False
        for _ in range(needed):
            blocks.append(self._free.pop())
        return True

    def release(self, blocks: list[int]) -> None:
        """Give all of `blocks` back, and empty the list."""
        self._free.extend(reversed(blocks))
        blocks.clear()
