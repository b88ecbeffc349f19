"""What is around humming's GEMMs, in Triton's interpreter: rows in the order of their pairs, and gated experts.

The GEMMs themselves run on GPUs alone: tests/gpu/check_stored.py.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.dispatch.budgets.moe_shape import Gating
from expert_pool.dispatch.experts.expert_weights import gated
from expert_pool.dispatch.experts.humming.routing import gate_rows, gather_rows

EXPERTS, PAIRS, ROWS, WIDTH = 5, 12, 7, 40
# Two experts without a pair, one at the end, and rows of the buffers that no pair has.
OFFSETS = torch.tensor([0, 3, 3, 4, 9, 9], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(3)
NAN = float("nan")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def test_rows_come_in_the_order_of_their_pairs_and_rows_without_one_are_left():
    x = random(ROWS, 2 * WIDTH)[:, :WIDTH]  # of another stride than its width
    source = torch.randint(0, ROWS, (PAIRS,), dtype=torch.int32, generator=GENERATOR)
    rows = torch.full((PAIRS, WIDTH), NAN)
    gather_rows(x, source, OFFSETS, rows)
    assert torch.equal(rows[:9], x[source[:9].long()])
    assert rows[9:].isnan().all()


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize(
    "gating",
    [Gating(), Gating(is_interleaved=True), Gating(1.702, 1.0, 7.0, is_interleaved=True, has_bias=True)],
    ids=["silu", "interleaved", "gpt-oss"],
)
def test_gated_rows_are_those_of_pytorch(gating, has_factors):
    gate_up = 6 * random(PAIRS, 2 * WIDTH)
    gate_up[9:] = NAN
    factors = random(EXPERTS, 3).abs() if has_factors else None
    hidden = torch.full((PAIRS, WIDTH), NAN)
    gate_rows(gating, gate_up, OFFSETS, factors, hidden)
    expected = []
    for expert in range(EXPERTS):
        rows = gate_up[OFFSETS[expert] : OFFSETS[expert + 1]].clone()
        of_gate, of_up, of_down = (1.0, 1.0, 1.0) if factors is None else factors[expert]
        halves = (
            (slice(None, None, 2), slice(1, None, 2)) if gating.is_interleaved else (slice(WIDTH), slice(WIDTH, None))
        )
        for half, factor in zip(halves, (of_gate, of_up), strict=True):
            rows[:, half] *= factor
        expected.append(gated(gating, rows) * of_down)
    torch.testing.assert_close(hidden[:9], torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert hidden[9:].isnan().all()
