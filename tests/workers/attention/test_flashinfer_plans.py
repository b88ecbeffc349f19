"""How much FlashInfer's prefill kernels keep of partial results in a graph; the kernels run on GPUs alone."""

from typing import Any

import pytest
from expert_pool.workers.attention.flashinfer_attention import partial_bytes, splits_contexts
from expert_pool.workers.model.spec import AttentionShape
from hypothesis import given
from hypothesis import strategies as st

H200_CTAS = 264
WORKSPACE = 256 << 20


def shape_of(num_heads: int, num_kv_heads: int, value_dim: int = 128) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=value_dim, value_dim=value_dim, scaling=1.0
    )


@given(st.data())
def test_no_batch_of_a_graph_keeps_more_partial_results_than_are_counted(data: Any) -> None:
    """A tile of queries keeps one partial result for each of its rows and each part of the keys."""
    num_kv_heads, group = data.draw(st.sampled_from([(1, 1), (4, 8), (8, 1), (2, 16), (128, 1)]))
    lens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=40))
    num_rows = max(len(lens), sum(lens) + data.draw(st.integers(0, 200)))
    shape = shape_of(num_kv_heads * group, num_kv_heads)
    longest = (num_rows - len(lens) + 1) * group
    tile = 128 if longest > 64 else 64 if longest > 16 else 16
    tiles = sum(-(-length * group // tile) for length in lens)
    # Without a split each tile has one part; with one, all tiles and parts together fill the GPU at most.
    most_parts = max(tiles, H200_CTAS // num_kv_heads)
    kept = -(-most_parts * tile // group) * shape.num_heads * (shape.value_dim + 1) * 4
    assert kept <= partial_bytes(shape, num_rows, len(lens), H200_CTAS)


@pytest.mark.parametrize(
    ("shape", "num_rows", "num_requests", "splits"),
    [
        (shape_of(32, 4), 64, 64, True),
        (shape_of(32, 4), 1024, 256, True),
        pytest.param(shape_of(32, 4), 2048, 256, False, id="the rows alone fill the GPU"),
        pytest.param(shape_of(64, 8, 64), 8192, 256, False, id="they fill it many times"),
        # Layers of DeepSeek-V3 in decode graphs of one row a request.
        (shape_of(128, 128), 1, 1, True),
        pytest.param(shape_of(128, 128), 256, 256, False, id="one row a request fills it, by 128 heads"),
        pytest.param(shape_of(16, 16), 512, 256, False, id="partial results have no room"),
    ],
)
def test_which_graphs_split_long_contexts(
    shape: AttentionShape, num_rows: int, num_requests: int, splits: bool
) -> None:
    assert splits_contexts(shape, num_rows, num_requests, H200_CTAS) == splits
