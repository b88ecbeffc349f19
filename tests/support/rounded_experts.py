"""Experts in float32 on operands rounded to fp8 where FlashInfer's SM90 mega kernel rounds them.

What is rounded to e4m3 and where, in FlashInfer 0.7.4 (`sm90_fp8_fp8_bf16_pull_cutedsl`); no scale is a power of two:

- *Input rows*, before the first GEMM. One scale a tensor: a constant of the layer, equal on every rank (the pool clamps
  rows to what it can code). 128-blocks: a row's own largest in 128 columns, over 448.
- *First weights*. One scale a tensor: an expert's largest, over 448. 128-blocks: the largest of 128 x 128, over 448,
  after gate and up rows are interleaved eight by eight, so a block holds 64 rows of either.
- *Intermediate*, `silu(gate) * up * routing weight`: the routing weight enters before this rounding, and what returns
  to a token is summed without it. One scale a tensor: a constant of the layer. 128-blocks: a row's own largest in 64
  (not 128) columns. Multiplied by the scale's reciprocal, saturating.
- *Second weights*, as the first, without interleaving.

Sums are float32 here. Not repeated: the kernel returns each expert's output in bf16 and the layer's in bf16, and with
one scale a tensor its tensor cores keep one accumulator over all of K, which is coarser than float32. That moves the
intermediate a little before it is rounded, and what lies near the middle of two codes becomes the other one: an error
of a whole code, which is no error of a GEMM on the same operands. `accumulates_as_kernel` takes the first sums from the
same tensor cores (as FlashInfer's own reference does), so that the intermediate is rounded alike.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_INTERLEAVE = 8
_SMALLEST = 1e-30


def coded(x: torch.Tensor) -> torch.Tensor:
    """Codes of numbers that are scaled already, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def in_row_blocks(x_NK: torch.Tensor, width: int, by_reciprocal: bool) -> torch.Tensor:
    """Each row's blocks of `width` columns rounded to fp8 with a scale of their own, and multiplied out again."""
    blocks = x_NK.float().unflatten(1, (-1, width))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = (largest * (1 / FP8_MAX) if by_reciprocal else largest / FP8_MAX).clamp(min=_SMALLEST)
    scaled = blocks * scale.reciprocal() if by_reciprocal else blocks / scale
    return (coded(scaled).float() * scale).flatten(1)


def in_squares(w_NK: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 x 128 rounded to fp8 with a scale of their own, and multiplied out again."""
    num_rows, num_columns = w_NK.shape
    blocks = w_NK.float().view(num_rows // 128, 128, num_columns // 128, 128)
    scale = (blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX).clamp(min=_SMALLEST)
    return (coded(blocks / scale).float() * scale).view(num_rows, num_columns)


def interleaved(w_NK: torch.Tensor) -> torch.Tensor:
    """Gate rows, then up rows -> eight of either in turn."""
    gate, up = w_NK.chunk(2)
    pairs = torch.stack([gate.unflatten(0, (-1, _INTERLEAVE)), up.unflatten(0, (-1, _INTERLEAVE))], dim=1)
    return pairs.flatten(0, 2)


def apart(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up columns of interleaved ones."""
    pairs = x_NI.unflatten(1, (-1, 2, _INTERLEAVE))
    return pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)


@dataclass(frozen=True)
class PerTensor:
    """One scale a tensor.

    Attributes:
        gate_up_EIH: an expert's gate rows, then its up rows.
        down_EHI: an expert's second projection.
        scales: of the inputs of both projections: a number is its code times the scale.
        accumulates_as_kernel: the first sums are those of the GPU's fp8 tensor cores, not float32.
    """

    gate_up_EIH: torch.Tensor
    down_EHI: torch.Tensor
    scales: tuple[float, float]
    accumulates_as_kernel: bool = False

    def __call__(self, expert: int, x_NH: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
        """`[N, H]` rows and their routing weights -> `[N, H]` float32, weighted."""
        first, second = self.scales
        bound = FP8_MAX * first
        x = coded(x_NH.clamp(-bound, bound).float() / first)
        gate_up, gate_up_scale = self._weights(self.gate_up_EIH[expert])
        down, down_scale = self._weights(self.down_EHI[expert])
        gate, up = (self._first_sums(x, gate_up) * (first * gate_up_scale)).chunk(2, dim=-1)
        h = coded(silu(gate) * up * weight_N.float().unsqueeze(1) * (1 / second))
        return (h.float() @ down.float().T) * (second * down_scale)

    def _weights(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (w_NK.float().abs().amax() / FP8_MAX).clamp(min=1e-12)
        return coded(w_NK.float() / scale), scale

    def _first_sums(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        if not self.accumulates_as_kernel:
            return x_NK.float() @ w_MK.float().T
        if not len(x_NK):
            return x_NK.new_empty(0, len(w_MK), dtype=torch.float32)
        one = torch.ones((), device=x_NK.device)
        return torch._scaled_mm(x_NK, w_MK.T, one, one, out_dtype=torch.float32, use_fast_accum=True)


@dataclass(frozen=True)
class Blockwise:
    """Scales of blocks; the kernel adds up 128 columns at a time in float32, so its sums are close to these."""

    gate_up_EIH: torch.Tensor
    down_EHI: torch.Tensor

    def __call__(self, expert: int, x_NH: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
        """As `PerTensor`."""
        x = in_row_blocks(x_NH, 128, by_reciprocal=False)
        gate, up = apart(x @ in_squares(interleaved(self.gate_up_EIH[expert])).T)
        h = in_row_blocks(silu(gate) * up * weight_N.float().unsqueeze(1), 64, by_reciprocal=True)
        return h @ in_squares(self.down_EHI[expert]).T
