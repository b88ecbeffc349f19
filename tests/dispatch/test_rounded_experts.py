"""The float32 reference of fp8 kernels against arithmetic spelled out number by number."""

import math

import numpy as np
import pytest
import torch
from rounded_experts import FP8_MAX, Blockwise, PerTensor, coded

HIDDEN, INTERMEDIATE, ROWS = 256, 128, 3
# e4m3: exponents from 2^-6 with three bits behind them, below that multiples of 2^-9.
CODES = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)][:-1]
)


def nearest_code(value: float) -> float:
    """The nearest code, of two as near the one that is even; the largest beyond it."""
    size = min(abs(value), FP8_MAX)
    above = int(np.searchsorted(CODES, size))
    below = max(above - 1, 0)
    gap_above, gap_below = CODES[above] - size, size - CODES[below]
    index = above if gap_above < gap_below or (gap_above == gap_below and above % 2 == 0) else below
    return math.copysign(float(CODES[index]), value)


def blocks_rounded(w: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scales and quotients in float32: numbers of bf16 are often halfway between two codes, and that decides."""
    rounded = np.empty_like(w)
    for top in range(0, w.shape[0], height):
        for left in range(0, w.shape[1], width):
            part = w[top : top + height, left : left + width]
            scale = np.float32(np.abs(part).max()) / np.float32(FP8_MAX)
            codes = [[nearest_code(float(np.float32(number) / scale)) for number in row] for row in part]
            rounded[top : top + height, left : left + width] = np.array(codes) * scale
    return rounded


def gated(gate: np.ndarray, up: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up * weights[:, None]


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    gate_up = (torch.randn(2, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 16).bfloat16()
    down = (torch.randn(2, HIDDEN, INTERMEDIATE, generator=generator) / 11).bfloat16()
    return x, gate_up, down, torch.rand(ROWS, generator=generator)


def exact(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.double().numpy() for tensor in tensors]


def error(ours: torch.Tensor, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours.double().numpy() - theirs) / np.linalg.norm(theirs))


def test_codes_are_the_nearest_of_e4m3() -> None:
    values = torch.cat([torch.linspace(-500, 500, 2001), torch.linspace(-0.05, 0.05, 201)])
    assert coded(values).float().tolist() == [nearest_code(value) for value in values.tolist()]


def test_one_scale_a_tensor(operands: tuple[torch.Tensor, ...]) -> None:
    x, gate_up, down, weights = operands
    # The largest input is beyond what the first scale codes.
    first, second = float(x.abs().max()) * 0.8 / FP8_MAX, 3.0 / FP8_MAX
    ours = PerTensor(gate_up, down, (first, second))(1, x, weights)
    rows, w1, w2, scores = exact(x, gate_up[1], down[1], weights)
    bound = FP8_MAX * first
    clamped = np.float32(rows.clip(-bound, bound)) / np.float32(first)
    coded_rows = [[nearest_code(float(number)) * first for number in row] for row in clamped]
    sums = np.array(coded_rows) @ blocks_rounded(w1, *w1.shape).T
    h = gated(sums[:, :INTERMEDIATE], sums[:, INTERMEDIATE:], scores)
    h = np.array([[nearest_code(number / second) * second for number in row] for row in h])
    assert error(ours, h @ blocks_rounded(w2, *w2.shape).T) < 1e-3


def test_scales_of_blocks(operands: tuple[torch.Tensor, ...]) -> None:
    x, gate_up, down, weights = operands
    ours = Blockwise(gate_up, down)(0, x, weights)
    rows, w1, w2, scores = exact(x, gate_up[0], down[0], weights)
    # Row n of the interleaved weights: of every sixteen, eight of the gate and eight of up.
    order = [n // 16 * 8 + n % 8 + (INTERMEDIATE if n % 16 >= 8 else 0) for n in range(2 * INTERMEDIATE)]
    sums = np.empty((ROWS, 2 * INTERMEDIATE))
    sums[:, order] = blocks_rounded(rows, 1, 128) @ blocks_rounded(w1[order], 128, 128).T
    h = blocks_rounded(gated(sums[:, :INTERMEDIATE], sums[:, INTERMEDIATE:], scores), 1, 64)
    assert error(ours, h @ blocks_rounded(w2, 128, 128).T) < 1e-3


def test_roundings_in_other_places_are_told_apart(operands: tuple[torch.Tensor, ...]) -> None:
    x, gate_up, down, weights = operands
    scales = float(x.abs().max()) / FP8_MAX, 3.0 / FP8_MAX
    by_tensor, by_block = PerTensor(gate_up, down, scales), Blockwise(gate_up, down)
    late = by_tensor(0, x, torch.ones(ROWS)) * weights.unsqueeze(1)
    for other in (by_block(0, x, weights), late):
        assert error(other, by_tensor(0, x, weights).double().numpy()) > 1e-2
