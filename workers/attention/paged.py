"""Attention over packed batches and a paged KV cache, behind Transformers' `AttentionInterface`.

The model is called with the tokens of many requests side by side, `[1, T]`, and with the keyword `paged`. Each
attention layer ends up in `paged.attend(...)`: the batch knows how it lies in memory, the model does not.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from ...dispatch.errors import CheckpointError
from ...graphs.plan import CaptureEntry
from ..model.spec import AttentionShape
from ..scheduling.inputs import StepInputs
from .backend import AttendingBatch, PagedCache
from .row_groups import AttendingRows as AttendingRows
from .row_groups import RowGroup, group_rows

ATTENTION_NAME = "expert_pool_paged"
# What models hand their attention that changes nothing here: dropout is for training, positions are in queries and keys
# already, the cache knows each layer's window, and the others ask the model for further outputs.
_WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "position_ids",
        "sliding_window",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def register_attention() -> None:
    """Make `attn_implementation="expert_pool_paged"` known to Transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: AttendingBatch,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The window is not taken from the argument, which not every family hands on: the batch has the layer's shape."""
    assert attention_mask is None, "the batch masks itself; a mask here means that Transformers built one for nothing"
    refuse_unknown_arguments(arguments)
    return paged.attend(module, query, key, value, scaling=scaling, sinks=s_aux), None


def refuse_unknown_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what a family's attention needs and ours does not know, rather than attend without it.

    Raises:
        CheckpointError: names the argument.
    """
    for name, value in arguments.items():
        is_known = value is None or name in _WITHOUT_EFFECT or (name == "is_causal" and value)
        if not is_known:
            raise CheckpointError(f"its attention takes {name}=, which attention over a paged cache has not")


def layer_index(module: torch.nn.Module) -> int:
    """Which decoder layer an attention module belongs to; every family keeps it there."""
    return int(cast(int, module.layer_idx))


class SdpaAttention:
    """PyTorch's scaled-dot-product attention; for CPUs.

    Lengths are read on the host, so its steps cannot be recorded in CUDA graphs; `GatheredAttention` is for those.

    Args:
        cache: keys and values of this rank's requests.
        device: of the rank.
    """

    def __init__(self, cache: PagedCache, device: torch.device):
        self._cache = cache
        self._device = device

    def graph_bytes(self, entries: Sequence[CaptureEntry]) -> int:
        return 0

    def prepare(self, entry: CaptureEntry, values: Mapping[str, torch.Tensor]) -> None:
        pass

    def batch(self, inputs: StepInputs, entry: CaptureEntry | None, slots_T: torch.Tensor) -> "PagedBatch":
        attending = attending_requests(
            inputs.query_starts,
            inputs.query_lens,
            inputs.context_lens,
            inputs.block_tables.to(self._device, non_blocking=True),
        )
        return PagedBatch(self._cache, slots_T, attending)


def attending_requests(
    query_starts: torch.Tensor, query_lens: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor
) -> list[AttendingRows]:
    """The requests of a batch (`[B]` each, tables `[B, M]`): each attends to its cached tokens and its new ones."""
    spans = zip(query_starts.tolist(), query_lens.tolist(), context_lens.tolist(), strict=True)
    return [
        AttendingRows(slice(start, start + query_len), context_len + query_len, block_tables[index])
        for index, (start, query_len, context_len) in enumerate(spans)
        if query_len > 0
    ]


class PagedBatch:
    """A packed batch of one step, and attention over it by PyTorch's scaled-dot-product kernels.

    Requests with one row, as those that decode have, attend in groups of like length, others each by itself.

    Rows outside all requests are padding: they write to the padding block, attend to nothing and yield zero. So what
    the padding of a buffer holds, or the padding block, can reach no request.

    Args:
        cache: where keys and values are.
        slots_T: `[T]` slot each row's key and value go to; `None` for a step that adds none.
        attending: which rows attend to which keys.
        cache_layer: layer of the cache that is used whatever layer attends; `None`: the attending layer's own.
    """

    def __init__(
        self,
        cache: PagedCache,
        slots_T: torch.Tensor | None,
        attending: list[AttendingRows],
        cache_layer: int | None = None,
    ):
        self._cache = cache
        self._slots_T = slots_T
        self._single = [one for one in attending if one.rows.stop - one.rows.start == 1]
        self._long = [one for one in attending if one.rows.stop - one.rows.start > 1]
        self._cache_layer = cache_layer
        self._masks: dict[tuple[int, int, int | None], torch.Tensor | None] = {}
        self._groups: dict[AttentionShape, list[RowGroup]] = {}

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
        layer = layer_index(module) if self._cache_layer is None else self._cache_layer
        shape = self._cache.shapes[layer]
        if self._slots_T is not None:
            self._cache.write(layer, self._slots_T, key[0].transpose(0, 1), value[0].transpose(0, 1))
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for part in self._long:
            rows = part.rows
            keys, values = self._cache.read(layer, part.block_table, part.kv_len)
            mask = self._mask(rows.stop - rows.start, part.kv_len, shape.sliding_window, query.device)
            output[:, rows] = _attend(query[:, :, rows], keys.unsqueeze(0), values.unsqueeze(0), scaling, mask, sinks)
        for group in self._groups_of(shape, query):
            rows_B = group.rows_B
            keys, values = self._cache.read(layer, group.blocks, group.blocks.numel() * self._cache.block_size)
            if group.unseen is not None:  # a masked NaN would still be one once multiplied
                keys.index_fill_(0, group.unseen, 0.0)
                values.index_fill_(0, group.unseen, 0.0)
            keys, values = (tensor[group.seen].unflatten(0, (rows_B.numel(), -1)) for tensor in (keys, values))
            rows_BH1D = query[0].index_select(1, rows_B).transpose(0, 1).unsqueeze(2)
            output[0].index_copy_(0, rows_B, _attend(rows_BH1D, keys, values, scaling, group.mask_B1L, sinks)[:, 0])
        return output

    def _groups_of(self, shape: AttentionShape, query: torch.Tensor) -> list[RowGroup]:
        if shape not in self._groups:
            self._groups[shape] = group_rows(self._single, shape, self._cache.block_size, query.itemsize)
        return self._groups[shape]

    def _mask(
        self, query_len: int, kv_len: int, sliding_window: int | None, device: torch.device
    ) -> torch.Tensor | None:
        """`[1, query_len, kv_len]` bool, true where a query sees a key; `None` where it sees all of them."""
        shape = (query_len, kv_len, sliding_window)
        if shape not in self._masks:
            mask = causal_mask(*shape, device=device)
            self._masks[shape] = None if mask is None else mask.unsqueeze(0)
        return self._masks[shape]


def causal_mask(
    query_len: int, kv_len: int, sliding_window: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor | None:
    """Which of `kv_len` keys the last `query_len` positions see; a window of 3 is a position and the two before it."""
    window = sliding_window if sliding_window is not None and sliding_window < kv_len else None
    if query_len == 1 and window is None:
        return None
    position = torch.arange(kv_len - query_len, kv_len, device=device).unsqueeze(1)
    key_position = torch.arange(kv_len, device=device).unsqueeze(0)
    mask = key_position <= position
    if window is not None:
        mask &= key_position > position - window
    return mask


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`B` requests of as many rows: `[B, Hq, Q, D]` over `[B, L, Hkv, D]` and `[B, L, Hkv, Dv]` -> `[B, Q, Hq, Dv]`.

    Query heads that share a KV head are folded into the query dimension, so grouped-query attention copies no keys.
    The mask is `[B, Q, L]`, true where a query sees a key. A sink is a logit per head that takes part in the softmax
    and carries no value: one more key, all zero, with the sink as its bias.
    """
    num_requests, num_heads, query_len, _ = query.shape
    num_kv_heads = keys.shape[2]
    groups = num_heads // num_kv_heads
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    folded = query.reshape(num_requests, num_kv_heads, groups * query_len, -1)
    if mask is not None:
        mask = mask.unsqueeze(1)
    if sinks is not None:
        bias = query.new_zeros(num_requests, num_heads, query_len, keys.shape[2] + 1)
        if mask is not None:
            bias[..., :-1].masked_fill_(~mask, float("-inf"))
        bias[..., -1] = sinks.to(bias.dtype).unsqueeze(1)
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        mask = bias.view(num_requests, num_kv_heads, groups * query_len, -1)
    elif mask is not None and groups > 1 and query_len > 1:
        mask = mask.repeat(1, 1, groups, 1)
    output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return output.view(num_requests, num_heads, query_len, -1).transpose(1, 2)
