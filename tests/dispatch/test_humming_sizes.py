"""Sizes of humming's GEMMs and buffers, and what it refuses: arithmetic alone, without the library."""

import pytest
from expert_pool.dispatch.budgets.moe_shape import Gating, MoeShape
from expert_pool.dispatch.budgets.stored_coding import StoredCoding
from expert_pool.dispatch.experts.expert_weights import DOWN, GATE_UP
from expert_pool.dispatch.experts.humming.sizes import GemmSize, expected_pairs, gemm_sizes
from expert_pool.dispatch.experts.humming.way import shape_problem

BLOCKS = StoredCoding("block_fp8", "e4m3", (128, 128), "float32")
MXFP4 = StoredCoding("mxfp4", "e2m1", (1, 32), "e8m0")
NVFP4 = StoredCoding("nvfp4", "e2m1", (1, 16), "e4m3", has_whole=True)
GPT_OSS = Gating(1.702, 1.0, 7.0, is_interleaved=True, has_bias=True)


def shape(hidden: int, intermediate: int, gating: Gating | None = Gating()) -> MoeShape:  # noqa: B008 (frozen)
    return MoeShape("experts", 128, hidden, 8, "float32", intermediate, (), gating)


def test_rows_are_added_to_128_and_columns_to_the_blocks_of_scales():
    assert gemm_sizes(shape(2048, 768), BLOCKS) == {
        GATE_UP: GemmSize(1536, 2048, 1536, 2048),
        DOWN: GemmSize(2048, 768, 2048, 768),
    }
    # 2880 rows are no multiple of 128; 2880 columns are one of 64, which is enough.
    assert gemm_sizes(shape(2880, 2880), MXFP4) == {
        GATE_UP: GemmSize(5760, 2880, 5760, 2880),
        DOWN: GemmSize(2880, 2880, 2944, 2880),
    }
    assert gemm_sizes(shape(576, 192), BLOCKS) == {
        GATE_UP: GemmSize(384, 576, 384, 640),
        DOWN: GemmSize(576, 192, 640, 256),
    }


@pytest.mark.parametrize(("num_rows", "pairs"), [(1, 4), (64, 256), (3, 12)])
def test_pairs_are_expected_as_evenly_routed_rows_make_them(num_rows, pairs):
    assert expected_pairs(shape(64, 64), 64, num_rows) == pairs
    assert expected_pairs(shape(64, 64), 1, 1) == 1


@pytest.mark.parametrize(
    ("layer", "coding", "said"),
    [
        (shape(2048, 768), BLOCKS, None),
        (shape(2880, 2880, GPT_OSS), MXFP4, None),
        (shape(2880, 2880, GPT_OSS), NVFP4, "a factor that is applied after those"),
        (shape(2048, 768, None), BLOCKS, "is not known to be gated SiLU"),
        (shape(2048, 764), BLOCKS, "sizes [764] are no multiples of 8"),
        (shape(2048, 768), StoredCoding("x", "int4", (1, 96), "bfloat16"), "96 columns share a scale"),
        (shape(2048, 768), StoredCoding("x", "int4", (1, 8), "bfloat16"), "8 columns share a scale"),
        (shape(2048, 768), StoredCoding("x", "e4m3", (1, 0), "bfloat16"), None),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_with_the_reason(layer, coding, said):
    problem = shape_problem(layer, coding)
    assert problem is None if said is None else said in str(problem)


def test_bytes_of_a_weight_count_blocks_that_are_smaller():
    assert BLOCKS.num_bytes(576, 192) == 576 * 192 + 5 * 2 * 4
    assert MXFP4.num_bytes(64, 96) == 64 * 48 + 64 * 3
    assert NVFP4.num_bytes(64, 96) == 64 * 48 + 64 * 6 + 4
    assert StoredCoding("x", "e4m3", (1, 0), "bfloat16").num_bytes(10, 16) == 160 + 20
    assert StoredCoding("x", "e4m3", (0, 0), "float32").num_bytes(10, 16) == 160 + 4
