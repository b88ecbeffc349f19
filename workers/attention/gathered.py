"""Decode attention in PyTorch on fixed shapes: what a CUDA graph can record where FlashInfer has no kernel.

Every request's blocks are gathered to the full context length, and what lies beyond its own tokens is masked on the
device. So no length is read on the host, and every step of a bucket runs the same kernels. The price is the gather:
memory and reading grow with the context length that the model allows, not with the tokens that are there.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ...graphs.plan import CaptureEntry
from ..model.spec import AttentionShape
from ..scheduling.inputs import StepInputs
from .backend import AttendingBatch
from .gathered_way import gathered_bytes
from .kv_cache import KvCache
from .paged import SdpaAttention, layer_index

# The gather, the copy without what is masked, and the same again inside the attention kernel.
_COPIES = 3


class GatheredAttention:
    """PyTorch attention on a GPU: a request at a time in eager steps, gathered in decode graphs.

    Args:
        cache: keys and values of this rank's requests.
        shapes: of each layer.
        context_length: the most tokens of a request, equal on every rank.
        device: of the rank.
    """

    def __init__(self, cache: KvCache, shapes: tuple[AttentionShape, ...], context_length: int, device: torch.device):
        self._cache = cache
        self._eager = SdpaAttention(cache, device)
        self._request_bytes = gathered_bytes(shapes, context_length, cache.block_size, cache.itemsize)

    def graph_bytes(self, entries: Sequence[CaptureEntry]) -> int:
        """Graphs of one pool run one at a time and share this memory, so it is the largest one's."""
        return _COPIES * max((entry.bucket for entry in entries), default=0) * self._request_bytes

    def prepare(self, entry: CaptureEntry, values: Mapping[str, torch.Tensor]) -> None:
        pass

    def batch(self, inputs: StepInputs, entry: CaptureEntry | None, slots_T: torch.Tensor) -> AttendingBatch:
        if entry is None:
            return self._eager.batch(inputs, None, slots_T)
        return GatheredBatch(self._cache, inputs)


class GatheredBatch:
    """Attention of a decode step on static buffers: row `i` is the one new token of request `i`.

    Rows without a request are padding: they write to the padding block and yield zero, and nothing that the padding
    block or a buffer holds reaches a request, NaN included.

    Args:
        cache: keys and values.
        inputs: of the step, on the cache's device; one row a request, then padding.
    """

    def __init__(self, cache: KvCache, inputs: StepInputs):
        self._cache = cache
        self._slots_T = inputs.slots
        self._tables_BM = inputs.block_tables
        num_keys = self._tables_BM.shape[1] * cache.block_size
        key_position = torch.arange(num_keys, device=self._tables_BM.device)
        self._position_B1 = inputs.context_lens.unsqueeze(1)
        self._active_B = inputs.query_lens > 0
        self._causal_BL = (key_position <= self._position_B1) & self._active_B.unsqueeze(1)
        self._key_position = key_position
        self._seen: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`; what is added is written first."""
        layer = layer_index(module)
        self._cache.write(layer, self._slots_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
        num_requests = self._tables_BM.shape[0]
        seen_BL = self._mask(self._cache.shapes[layer].sliding_window)
        keys, values = (self._gather(pages, seen_BL) for pages in self._cache.pages(layer))
        query_BHD = query[0].transpose(0, 1)[:num_requests]
        attended_BHD = _attend_all(query_BHD, keys, values, seen_BL, scaling, sinks)
        attended_BHD = torch.where(self._active_B[:, None, None], attended_BHD, 0.0)
        return F.pad(attended_BHD, (0, 0, 0, 0, 0, query.shape[2] - num_requests)).unsqueeze(0)

    def _mask(self, sliding_window: int | None) -> torch.Tensor:
        """`[B, L]` bool, true where a request sees a key; a window of 3 is a position and the two before it."""
        if sliding_window not in self._seen:
            seen = self._causal_BL
            if sliding_window is not None:
                seen = seen & (self._key_position > self._position_B1 - sliding_window)
            self._seen[sliding_window] = seen
        return self._seen[sliding_window]

    def _gather(self, pages: torch.Tensor, seen_BL: torch.Tensor) -> torch.Tensor:
        """`[B, L, Hkv, D]`, zero where nothing is seen: a masked NaN would still be one once multiplied."""
        num_requests, num_blocks = self._tables_BM.shape
        gathered = pages.index_select(0, self._tables_BM.flatten())
        rows = gathered.view(num_requests, num_blocks * pages.shape[1], *pages.shape[2:])
        return torch.where(seen_BL[:, :, None, None], rows, 0.0)


def _attend_all(
    query_BHD: torch.Tensor,
    keys_BLHD: torch.Tensor,
    values_BLHD: torch.Tensor,
    seen_BL: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row a request over its own keys; see `paged._attend_one` for folded heads and sinks."""
    num_requests, num_heads, _ = query_BHD.shape
    num_kv_heads = keys_BLHD.shape[2]
    groups = num_heads // num_kv_heads
    keys, values = keys_BLHD.transpose(1, 2), values_BLHD.transpose(1, 2)
    bias = torch.zeros_like(seen_BL, dtype=query_BHD.dtype).masked_fill(~seen_BL, float("-inf"))
    if sinks is None:
        # A row that sees nothing would be NaN, and is cleared afterwards; a NaN costs some kernels their fast path.
        bias = torch.where(seen_BL.any(dim=1, keepdim=True), bias, 0.0)
        mask = bias.view(num_requests, 1, 1, -1).expand(-1, num_kv_heads, groups, -1)
    else:
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        of_heads = sinks.to(bias.dtype).view(1, num_kv_heads, groups, 1).expand(num_requests, -1, -1, -1)
        mask = torch.cat((bias.view(num_requests, 1, 1, -1).expand(-1, num_kv_heads, groups, -1), of_heads), dim=-1)
    folded = query_BHD.reshape(num_requests, num_kv_heads, groups, -1)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(num_requests, num_heads, -1)
