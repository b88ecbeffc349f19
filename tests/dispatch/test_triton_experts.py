"""Triton experts from `adopt` to `run`, in Triton's interpreter; CUDA runs are in tests/gpu."""

import os
from contextlib import ExitStack

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.dispatch.budgets.budget import RowFormat
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.dispatchers.local import LocalDispatcher
from expert_pool.dispatch.errors import ConfigError, GeometryError
from expert_pool.dispatch.experts import triton_experts
from expert_pool.dispatch.experts.expert_weights import DOWN, GATE_UP, PLAIN, ExpertWeights
from expert_pool.dispatch.experts.pairs import tile_table
from expert_pool.dispatch.experts.pairs.pair_budget import pair_budget
from expert_pool.dispatch.experts.pairs.tile_table import TileTable
from expert_pool.dispatch.experts.pairs.triton_gemm import TritonTile
from expert_pool.dispatch.experts.triton_experts import TritonExperts
from expert_pool.dispatch.paths.path import DispatchedPath
from handle import replaced, tile_tables_of
from layers import layer_of

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, ROWS = 48, 40, 6, 3, 50
SHAPE = MoeShape("experts", EXPERTS, HIDDEN, TOP_K, "float32", INTERMEDIATE)
CPU = torch.device("cpu")


def weights_of():
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    return {GATE_UP: gate_up.half(), DOWN: down.half()}


@pytest.fixture(scope="module")
def path():
    """Ready to run, with tiles chosen by a clock to which all launches are the same: the fewest win."""
    with ExitStack() as stack:
        for module in (tile_table, triton_experts):
            stack.enter_context(replaced(module, "milliseconds", lambda launches: 1.0))
        yield made_ready()


def made_ready():
    experts = TritonExperts(pair_budget(ROWS, [SHAPE], 1), CPU, torch.float16)
    made = DispatchedPath(LocalDispatcher(ROWS), experts)
    made.adopt(layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, weights_of())))
    made.prepare(None)
    return made


def test_every_number_of_rows_is_computed_right_and_repeats_to_the_bit(path):
    layer = layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, weights_of()))
    gate_up, down = (tensor.float() for tensor in weights_of().values())
    for num_rows in (1, 7, 33):
        generator = torch.Generator().manual_seed(num_rows)
        x_TH = torch.randn(num_rows, HIDDEN, generator=generator).half()
        scores_TK, ids_TK = torch.rand(num_rows, EXPERTS, generator=generator).topk(TOP_K)
        ids_TK[3::4] = -1
        expected = torch.zeros(num_rows, HIDDEN)
        for row, experts in enumerate(ids_TK.tolist()):
            for slot, expert in enumerate(experts):
                if expert >= 0:
                    gate, up = (gate_up[expert] @ x_TH[row].float()).chunk(2)
                    y = down[expert] @ (torch.nn.functional.silu(gate) * up)
                    expected[row] += scores_TK[row, slot] * y
        geometry = StepGeometry.eager(Layout(1), (num_rows,), capacity=ROWS)
        found, again = (path.run(layer, x_TH, ids_TK, scores_TK, geometry).clone() for _ in range(2))
        torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=5e-3)
        assert torch.equal(found, again)


def test_no_rows_launch_nothing(path):
    layer = layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, weights_of()))
    none = torch.zeros(0, TOP_K)
    dispatched = Dispatched(
        torch.zeros(0, HIDDEN).half(),
        none.int(),
        none,
        StepGeometry.eager(Layout(1), (1,), capacity=ROWS),
        RowFormat(HIDDEN, TOP_K, "float16", "float32"),
    )
    assert path.experts.run(layer, dispatched).shape == (0, HIDDEN)


def test_tiles_are_chosen_for_several_numbers_of_rows_and_few_rows_sort_nothing(path):
    table = tile_tables_of(path.experts)[SHAPE.text]
    assert table.num_rows == (1, 2, 4, 8, 16, ROWS)
    by_slot = [tiles[0].rows == 0 and tiles[1].rows == 0 for tiles in table.tiles]
    assert by_slot == [True] * 5 + [False]
    assert msgspec.convert(msgspec.to_builtins(table), TileTable[TritonTile]) == table
    assert path.held.tuning.startswith(f"{EXPERTS}x{HIDDEN}x{INTERMEDIATE} top-{TOP_K}: <=1 slot-")


def test_more_rows_than_there_are_buffers_for_are_refused(path):
    layer = layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, weights_of()))
    path = DispatchedPath(LocalDispatcher(ROWS + 1), path.experts)
    geometry = StepGeometry.eager(Layout(1), (ROWS + 1,), capacity=ROWS + 1)
    ids_TK = torch.zeros(ROWS + 1, TOP_K, dtype=torch.int64)
    with pytest.raises(GeometryError, match="51 rows reached the experts, whose buffers were made for 50"):
        path.run(layer, torch.zeros(ROWS + 1, HIDDEN).half(), ids_TK, ids_TK.float(), geometry)


def test_where_no_tile_runs_the_setting_is_named():
    def failing(launches):
        raise RuntimeError("out of resources")

    experts = TritonExperts(pair_budget(1, [SHAPE], 1), CPU, torch.float16)
    experts.adopt(layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, weights_of())))
    with (
        replaced(tile_table, "milliseconds", failing),
        replaced(triton_experts, "milliseconds", lambda launches: 1.0),
        pytest.raises(ConfigError, match="experts='triton': no tile of its grouped GEMM runs here"),
    ):
        experts.prepare(None)
