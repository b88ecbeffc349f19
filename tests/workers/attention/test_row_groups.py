"""Single rows that attend in groups: the same as each by itself, whatever lies where none of them looks."""

from types import SimpleNamespace

import pytest
import torch
from expert_pool.workers.attention.kv_cache import KvCache
from expert_pool.workers.attention.paged import AttendingRows, PagedBatch
from expert_pool.workers.attention.row_groups import group_rows
from expert_pool.workers.model.spec import AttentionShape
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS = 4, 200, 4


def shape_of(sliding_window: int | None = None, has_sinks: bool = False, width: int = 8) -> AttentionShape:
    return AttentionShape(
        num_heads=NUM_HEADS,
        num_kv_heads=2,
        key_dim=width,
        value_dim=width,
        scaling=0.3,
        sliding_window=sliding_window,
        has_sinks=has_sinks,
    )


def rows_of(lengths: list[int]) -> list[AttendingRows]:
    """One row a request, each with blocks of its own, in tables as wide as the longest."""
    widest = max(-(-length // BLOCK_SIZE) for length in lengths)
    free = iter(torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(len(lengths))).add(1).tolist())
    attending = []
    for row, length in enumerate(lengths):
        table = torch.zeros(widest, dtype=torch.int64)
        count = -(-length // BLOCK_SIZE)
        table[:count] = torch.tensor([next(free) for _ in range(count)])
        attending.append(AttendingRows(slice(row, row + 1), length, table))
    return attending


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    sliding_window=st.none() | st.integers(1, 30),
    has_sinks=st.booleans(),
)
def test_rows_attend_as_by_the_definition_whatever_their_company(lengths, sliding_window, has_sinks):
    """With NaN in every slot that is none of a row's keys, those of other requests' blocks' ends included."""
    shape, generator = shape_of(sliding_window, has_sinks), torch.Generator().manual_seed(0)
    cache = KvCache((shape,), NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    for tensor in cache.pages(0):
        tensor.fill_(float("nan"))
    attending, expected = rows_of(lengths), []
    query = torch.randn(1, NUM_HEADS, len(lengths), 8, generator=generator)
    sinks = torch.randn(NUM_HEADS, generator=generator) if has_sinks else None
    for one in attending:
        first = 0 if sliding_window is None else max(0, one.kv_len - sliding_window)
        keys, values = torch.randn(2, one.kv_len - first, 2, 8, generator=generator)
        places = torch.arange(first, one.kv_len)
        slots = one.block_table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        cache.write(0, slots, keys, values)
        keys, values = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        scores = torch.einsum("hd,lhd->hl", query[0, :, one.rows.start], keys) * shape.scaling
        if sinks is not None:
            scores = torch.cat([scores, sinks.unsqueeze(1)], dim=1)
        weights = scores.softmax(dim=1)[:, : keys.shape[0]]
        expected.append(torch.einsum("hl,lhd->hd", weights, values))
    batch = PagedBatch(cache, None, attending)
    attended = batch.attend(
        SimpleNamespace(layer_idx=0), query, query[:, :2], query[:, :2], scaling=shape.scaling, sinks=sinks
    )
    torch.testing.assert_close(attended[0], torch.stack(expected), rtol=0, atol=2e-6)


def test_rows_of_like_length_share_a_group():
    lengths = [3, 40, 9, 33, 60, 5]
    groups = group_rows(rows_of(lengths), shape_of(), BLOCK_SIZE, itemsize=4)
    assert [sorted(lengths[row] for row in group.rows_B.tolist()) for group in groups] == [[33, 40, 60], [3, 5, 9]]
    windowed = group_rows(rows_of(lengths), shape_of(sliding_window=8), BLOCK_SIZE, itemsize=4)
    assert [group.rows_B.numel() for group in windowed] == [6]


@pytest.mark.parametrize(("width", "num_groups"), [(8, 1), (4096, 2), (8192, 4)])
def test_a_group_gathers_no_more_than_a_core_keeps(width, num_groups):
    groups = group_rows(rows_of([8] * 4), shape_of(width=width), BLOCK_SIZE, itemsize=4)
    assert len(groups) == num_groups
