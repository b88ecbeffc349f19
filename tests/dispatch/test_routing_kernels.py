"""The kernels around the grouped GEMM, in Triton's interpreter, against plain PyTorch; CUDA runs are in tests/gpu."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.dispatch.experts.pairs.routing_kernels import sort_pairs, weighted_sum

CANARY = -77


def reference(x_RH, ids_RK, weights_RK, first, num_local, scale_EH):
    """Sorted pairs and their weighted sums, with `scale` of an expert in place of its GEMMs."""
    pairs = [
        (int(expert) - first, row, slot)
        for row, experts in enumerate(ids_RK.tolist())
        for slot, expert in enumerate(experts)
        if first <= expert < first + num_local
    ]
    pairs.sort()
    y_RH = torch.zeros(x_RH.shape)
    for row in range(x_RH.shape[0]):
        for expert, _, slot in sorted((pair for pair in pairs if pair[1] == row), key=lambda pair: pair[2]):
            z = x_RH[row].float() * scale_EH[expert]
            y_RH[row] += weights_RK[row, slot].float() * z
    return pairs, y_RH


def run(x_RH, ids_RK, weights_RK, first, num_local, scale_EH, max_pairs):
    offsets = torch.full((num_local + 1,), CANARY, dtype=torch.int32)
    source_row = torch.full((max_pairs + 4,), CANARY, dtype=torch.int32)
    position = torch.full(ids_RK.shape, CANARY, dtype=torch.int32)
    sort_pairs(ids_RK, first, num_local, offsets, source_row[:max_pairs], position)
    total = int(offsets[-1])
    z_PH = torch.full((max_pairs, x_RH.shape[1]), float("nan"), dtype=torch.float32)
    for expert in range(num_local):
        rows = source_row[offsets[expert] : offsets[expert + 1]].long()
        z_PH[offsets[expert] : offsets[expert + 1]] = x_RH[rows].float() * scale_EH[expert]
    y_RH = torch.full(x_RH.shape, float("nan"), dtype=torch.float32)
    weighted_sum(z_PH, ids_RK, weights_RK, position, first, num_local, y_RH)
    assert (source_row[max_pairs:] == CANARY).all(), "written past the bound"
    return offsets, source_row[:total], y_RH


def distinct_ids(num_rows, top_k, num_experts, generator):
    return torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_rows)]).int()


def check(x_RH, ids_RK, weights_RK, first, num_local, seed=0):
    scale_EH = torch.randn(num_local, x_RH.shape[1], generator=torch.Generator().manual_seed(seed))
    bound = ids_RK.shape[0] * min(ids_RK.shape[1], num_local)
    pairs, expected = reference(x_RH, ids_RK, weights_RK, first, num_local, scale_EH)
    offsets, source_row, y_RH = run(x_RH, ids_RK, weights_RK, first, num_local, scale_EH, bound)
    counts = [sum(1 for pair in pairs if pair[0] == expert) for expert in range(num_local)]
    assert [int(offsets[0]), *offsets.diff().tolist()] == [0, *counts]
    assert source_row.tolist() == [row for _, row, _ in pairs], "by expert, then by row: stable"
    assert torch.equal(y_RH, expected)


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "num_local", "hidden_size"),
    [(1, 1, 2, 1, 8), (7, 8, 16, 8, 96), (64, 6, 64, 16, 40), (129, 8, 8, 4, 16)],
)
def test_pairs_are_sorted_by_expert_and_summed_by_row(num_rows, top_k, num_experts, num_local, hidden_size):
    generator = torch.Generator().manual_seed(num_rows)
    x_RH = torch.randn(num_rows, hidden_size, generator=generator)
    ids_RK = distinct_ids(num_rows, top_k, num_experts, generator)
    weights_RK = torch.rand(num_rows, top_k, generator=generator)
    for first in {0, num_experts - num_local}:
        check(x_RH, ids_RK, weights_RK, first, num_local)


@pytest.mark.parametrize(
    ("num_rows", "first", "num_local"),
    [
        pytest.param(512, 8, 4, id="as many slots as a block holds"),
        pytest.param(513, 0, 32, id="one row more, all experts"),
        pytest.param(1100, 8, 4, id="three blocks"),
        pytest.param(8200, 27, 5, id="more blocks than are counted at once"),
    ],
)
def test_slots_of_several_blocks_are_sorted_alike(num_rows, first, num_local):
    generator = torch.Generator().manual_seed(9)
    packed = torch.full((num_rows, 11), 7, dtype=torch.int32)
    packed[:, 2:10] = torch.rand(num_rows, 32, generator=generator).topk(8, dim=1).indices
    packed[5::7, 2:6] = torch.tensor([-1, 2**31 - 1, -(2**31), 10**9], dtype=torch.int32)
    ids_RK = packed[:, 2:10]
    position_RK = torch.full(ids_RK.shape, CANARY, dtype=torch.int32)
    offsets, source_row = torch.zeros(num_local + 1, dtype=torch.int32), torch.zeros(num_rows * 8, dtype=torch.int32)
    sort_pairs(ids_RK, first, num_local, offsets, source_row, position_RK)
    expected = [(ids_RK == expert).any(dim=1).nonzero()[:, 0] for expert in range(first, first + num_local)]
    assert offsets[0] == 0
    assert offsets.diff().tolist() == [len(rows) for rows in expected]
    assert torch.equal(source_row[: offsets[-1]].long(), torch.cat(expected))
    here = (ids_RK >= first) & (ids_RK < first + num_local)
    assert torch.equal(source_row[position_RK[here].long()].long(), here.nonzero()[:, 0])
    assert (position_RK[~here] == CANARY).all()


def test_repeated_ids_of_several_blocks_beyond_the_bound_are_dropped():
    ids_RK = torch.zeros(1100, 8, dtype=torch.int32)
    offsets, source_row, y_RH = run(torch.ones(1100, 8), ids_RK, torch.ones(1100, 8), 0, 2, torch.ones(2, 8), 4800)
    assert offsets.tolist() == [0, 4800, 4800]
    assert source_row.tolist() == [row for row in range(600) for _ in range(8)]
    assert y_RH[:, 0].tolist() == [8.0] * 600 + [0.0] * 500


def test_experts_without_pairs_and_one_with_all():
    generator = torch.Generator().manual_seed(3)
    x_RH = torch.randn(20, 16, generator=generator)
    weights_RK = torch.rand(20, 2, generator=generator)
    ids_RK = torch.full((20, 2), -1, dtype=torch.int32)
    ids_RK[:, 0] = 5
    check(x_RH, ids_RK, weights_RK, 4, 4)


def test_rows_without_any_pair_become_zero_whatever_they_hold():
    x_RH = torch.full((9, 16), float("nan"), dtype=torch.float32)
    weights_RK = torch.full((9, 4), float("nan"))
    ids_RK = torch.full((9, 4), -1, dtype=torch.int32)
    offsets, source_row, y_RH = run(x_RH, ids_RK, weights_RK, 0, 8, torch.ones(8, 16), 36)
    assert offsets.tolist() == [0] * 9
    assert source_row.numel() == 0
    assert torch.equal(y_RH, torch.zeros(9, 16, dtype=torch.float32))


@pytest.mark.parametrize("first", [0, 8, 120])
def test_garbage_ids_weights_and_rows_touch_nothing(first):
    generator = torch.Generator().manual_seed(11)
    x_RH = torch.randn(40, 24, generator=generator)
    weights_RK = torch.rand(40, 4, generator=generator)
    ids_RK = distinct_ids(40, 4, 128, generator)
    garbage = torch.tensor([2**31 - 1, -(2**31), -1, 10**9], dtype=torch.int32)
    ids_RK[1::2] = garbage
    x_RH[1::2] = float("nan")
    weights_RK[1::2] = float("nan")
    check(x_RH, ids_RK, weights_RK, first, 8)


def test_slots_of_other_ranks_may_hold_any_weight():
    x_RH = torch.ones(2, 8, dtype=torch.float32)
    ids_RK = torch.tensor([[0, 9], [9, 1]], dtype=torch.int32)
    weights_RK = torch.tensor([[0.5, float("nan")], [float("inf"), 0.25]])
    check(x_RH, ids_RK, weights_RK, 0, 2)


def test_repeated_ids_beyond_the_bound_are_dropped_inside_the_buffers():
    x_RH = torch.ones(8, 8, dtype=torch.float32)
    ids_RK = torch.zeros(8, 4, dtype=torch.int32)
    offsets, source_row, y_RH = run(x_RH, ids_RK, torch.ones(8, 4), 0, 2, torch.ones(2, 8), 16)
    assert offsets.tolist() == [0, 16, 16]
    assert source_row.tolist() == [row for row in range(4) for _ in range(4)]
    assert y_RH[:, 0].tolist() == [4.0] * 4 + [0.0] * 4


def test_ids_and_weights_may_be_columns_of_packed_rows():
    generator = torch.Generator().manual_seed(5)
    packed = torch.zeros(30, 20, dtype=torch.int32)
    packed[:, 4:8] = distinct_ids(30, 4, 12, generator)
    weights = torch.rand(30, 16, generator=generator)
    x_RH = torch.randn(30, 16, generator=generator)
    check(x_RH, packed[:, 4:8], weights[:, 8:12], 6, 6)
