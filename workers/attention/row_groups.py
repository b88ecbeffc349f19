"""Single rows of many requests that attend together: on CPUs a decode step is made of calls more than of arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..model.spec import AttentionShape

# Keys that a request of a group may have less than the longest: each is gathered for nothing.
_MOST_SHORT = 32
# Keys and values that a group gathers, but for a request that has more alone: what a core's own cache holds.
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class AttendingRows:
    """Consecutive rows of a batch that attend to one request: row `i` to all but the last `len(rows) - 1 - i` keys."""

    rows: slice
    kv_len: int
    block_table: torch.Tensor


@dataclass(frozen=True)
class RowGroup:
    """`B` rows of a batch, which attend to `L` keys each or to fewer, in whole blocks.

    Attributes:
        rows_B: which rows, on the device.
        blocks: `[B * blocks of L]` of their keys, one row's after the other's.
        seen: keys that the only row of a group attends to; all where there are several.
        mask_B1L: which keys each row attends to; `None` for a group of one.
        unseen: where the others are among all `B * L`; what lies there may be anything, NaN included.
    """

    rows_B: torch.Tensor
    blocks: torch.Tensor
    seen: slice
    mask_B1L: torch.Tensor | None
    unseen: torch.Tensor | None


def group_rows(
    attending: Sequence[AttendingRows], shape: AttentionShape, block_size: int, itemsize: int
) -> list[RowGroup]:
    """Groups of rows that attend to about as many keys.

    Args:
        attending: one row each.
        shape: of the layer; with a sliding window a row attends to the last keys alone, itself included.
        block_size: tokens of a block.
        itemsize: bytes of one number of keys and values.
    """
    spans = [_span(one, shape.sliding_window, block_size) for one in attending]
    longest_first = sorted(range(len(spans)), key=lambda index: -spans[index].num_blocks)
    most_keys = _GROUP_BYTES // (shape.width * itemsize)
    groups: list[list[int]] = []
    for index in longest_first:
        longest = spans[groups[-1][0]].num_blocks if groups else 0
        is_like = (longest - spans[index].num_blocks) * block_size <= _MOST_SHORT
        if groups and is_like and (len(groups[-1]) + 1) * longest * block_size <= most_keys:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_grouped([attending[i] for i in group], [spans[i] for i in group], block_size) for group in groups]


@dataclass(frozen=True)
class _Span:
    """Keys that a row attends to: which blocks of its table, and which places in those."""

    first_block: int
    num_blocks: int
    first: int
    end: int


def _span(one: AttendingRows, sliding_window: int | None, block_size: int) -> _Span:
    first = 0 if sliding_window is None else max(0, one.kv_len - sliding_window)
    first_block = first // block_size
    skipped = first_block * block_size
    return _Span(first_block, -(-one.kv_len // block_size) - first_block, first - skipped, one.kv_len - skipped)


def _grouped(attending: list[AttendingRows], spans: list[_Span], block_size: int) -> RowGroup:
    device = attending[0].block_table.device
    rows_B = torch.tensor([one.rows.start for one in attending]).to(device)
    if len(attending) == 1:
        [span] = spans
        blocks = attending[0].block_table[span.first_block : span.first_block + span.num_blocks]
        return RowGroup(rows_B, blocks, slice(span.first, span.end), None, None)
    longest = spans[0].num_blocks
    bounds = torch.tensor([(s.first_block, s.first_block + s.num_blocks - 1, s.first, s.end) for s in spans])
    first_B1, last_B1, begin_B1, end_B1 = bounds.unsqueeze(2).unbind(1)
    # A row with fewer blocks has its last one again.
    columns = (first_B1 + torch.arange(longest)).minimum(last_B1).to(device)
    tables = torch.stack([one.block_table for one in attending])
    place = torch.arange(longest * block_size)
    mask_BL = (place >= begin_B1) & (place < end_B1)
    unseen = (~mask_BL).flatten().nonzero().squeeze(1)
    everything = slice(0, mask_BL.numel())
    return RowGroup(
        rows_B, tables.gather(1, columns).flatten(), everything, mask_BL.unsqueeze(1).to(device), unseen.to(device)
    )
