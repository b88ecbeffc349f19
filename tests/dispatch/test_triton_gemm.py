"""The Triton GEMMs of experts, in Triton's interpreter, against plain PyTorch; CUDA runs are in tests/gpu."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.dispatch.experts.pairs.routing_kernels import sort_pairs, weighted_sum
from expert_pool.dispatch.experts.pairs.triton_gemm import TritonTile, down_by_row, gate_up_by_slot, sorted_gemm

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 48, 40, 6, 3
# Blocks that divide the sizes and blocks that do not, and more than one of an expert's pairs.
SORTED = (
    TritonTile(16, 16, 16, 4, 2),
    TritonTile(16, 64, 64, 4, 2, weights_first=True),
    TritonTile(32, 32, 32, 4, 2),
)
BY_SLOT = (TritonTile(0, 16, 64, 4, 1), TritonTile(0, 32, 16, 4, 1))
GARBAGE = torch.tensor([2**31 - 1, -(2**31), -1], dtype=torch.int32)


def weights(num_local):
    generator = torch.Generator().manual_seed(5)
    gate_up_EFH = torch.randn(num_local, 2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5
    down_EHI = torch.randn(num_local, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    return gate_up_EFH, down_EHI


def rows(num_rows, num_experts=EXPERTS, top_k=TOP_K):
    generator = torch.Generator().manual_seed(num_rows)
    ids = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_rows)]
    x_RH = torch.randn(num_rows, HIDDEN, generator=generator)
    ids_RK = torch.stack(ids).int() if ids else torch.zeros(0, top_k, dtype=torch.int32)
    return x_RH, ids_RK, torch.rand(num_rows, top_k, generator=generator)


def reference(x_RH, ids_RK, weights_RK, first, gate_up_EFH, down_EHI):
    y_RH = torch.zeros(x_RH.shape)
    for expert in range(gate_up_EFH.shape[0]):
        row, slot = (ids_RK == first + expert).nonzero(as_tuple=True)
        gate, up = (x_RH[row] @ gate_up_EFH[expert].T).chunk(2, dim=-1)
        z = (torch.nn.functional.silu(gate) * up) @ down_EHI[expert].T
        y_RH.index_add_(0, row, z * weights_RK[row, slot].unsqueeze(1))
    return y_RH


def over_sorted_pairs(x_RH, ids_RK, weights_RK, first, gate_up_EFH, down_EHI, tile):
    num_local = gate_up_EFH.shape[0]
    num_pairs = ids_RK.shape[0] * min(ids_RK.shape[1], num_local)
    offsets = torch.zeros(num_local + 1, dtype=torch.int32)
    source_row, position = torch.zeros(num_pairs, dtype=torch.int32), torch.zeros(ids_RK.shape, dtype=torch.int32)
    hidden_PI = torch.full((num_pairs, INTERMEDIATE), float("nan"), dtype=x_RH.dtype)
    output_PH = torch.full((num_pairs, HIDDEN), float("nan"), dtype=x_RH.dtype)
    y_RH = torch.full_like(x_RH, float("nan"))
    sort_pairs(ids_RK, first, num_local, offsets, source_row, position)
    sorted_gemm(x_RH, gate_up_EFH, offsets, source_row, hidden_PI, tile)
    sorted_gemm(hidden_PI, down_EHI, offsets, None, output_PH, tile)
    weighted_sum(output_PH, ids_RK, weights_RK, position, first, num_local, y_RH)
    total = int(offsets[-1])
    assert hidden_PI[total:].isnan().all(), "written beyond the pairs"
    assert output_PH[total:].isnan().all(), "written beyond the pairs"
    return y_RH


def by_slot(x_RH, ids_RK, weights_RK, first, gate_up_EFH, down_EHI, tile):
    hidden_SI = torch.full((ids_RK.numel(), INTERMEDIATE), float("nan"), dtype=x_RH.dtype)
    y_RH = torch.full_like(x_RH, float("nan"))
    gate_up_by_slot(x_RH, gate_up_EFH, ids_RK, first, hidden_SI, tile)
    down_by_row(hidden_SI, down_EHI, ids_RK, weights_RK, first, y_RH, tile)
    return y_RH


WAYS = [(over_sorted_pairs, tile) for tile in SORTED] + [(by_slot, tile) for tile in BY_SLOT]
each_way = pytest.mark.parametrize(("way", "tile"), WAYS, ids=lambda value: getattr(value, "__name__", str(value)))


@each_way
@pytest.mark.parametrize(("num_rows", "first", "num_local"), [(1, 0, EXPERTS), (7, 2, 4), (33, 0, EXPERTS), (5, 5, 1)])
def test_rows_are_computed_by_their_experts(way, tile, num_rows, first, num_local):
    given = (*rows(num_rows), first, *weights(num_local))
    torch.testing.assert_close(way(*given, tile), reference(*given), rtol=1e-4, atol=1e-5)


@each_way
def test_half_precision_is_multiplied_into_float32_and_rounded_once_a_result(way, tile):
    """In float16: the interpreter's `tl.dot` takes bfloat16 for integers."""
    x_RH, ids_RK, weights_RK = rows(4)
    gate_up_EFH, down_EHI = (one.half() for one in weights(EXPERTS))
    x_RH = x_RH.half()
    y_RH = way(x_RH, ids_RK, weights_RK, 0, gate_up_EFH, down_EHI, tile)
    expected = reference(x_RH.float(), ids_RK, weights_RK, 0, gate_up_EFH.float(), down_EHI.float())
    assert y_RH.dtype == torch.float16
    assert (y_RH.float() - expected).norm() / expected.norm() < 2e-3


@each_way
def test_all_pairs_of_one_expert_and_none_of_the_others(way, tile):
    x_RH, ids_RK, weights_RK = rows(33)
    ids_RK[:] = -1
    ids_RK[:, 1] = 3
    given = x_RH, ids_RK, weights_RK, 0, *weights(EXPERTS)
    torch.testing.assert_close(way(*given, tile), reference(*given), rtol=1e-4, atol=1e-5)


@each_way
def test_rows_without_a_token_touch_nothing_and_become_zero(way, tile):
    x_RH, ids_RK, weights_RK = rows(9)
    ids_RK[1::2], x_RH[1::2], weights_RK[1::2] = GARBAGE, float("nan"), float("nan")
    y_RH = way(x_RH, ids_RK, weights_RK, 2, *weights(4), tile)
    own = (x_RH[::2], ids_RK[::2], weights_RK[::2], 2, *weights(4))
    torch.testing.assert_close(y_RH[::2], reference(*own), rtol=1e-4, atol=1e-5)
    assert torch.equal(y_RH[1::2], torch.zeros_like(y_RH[1::2]))
