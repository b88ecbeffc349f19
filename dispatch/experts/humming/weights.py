"""From kept weights to the order that humming's kernels read them in, without another rounding of codes.

humming is imported with this module: only a rank that uses it imports it.
"""

import torch
from humming.config import LayerConfig
from humming.transform import transform_humming_tensors

from ...budgets.stored_coding import StoredCoding
from ..expert_weights import BIAS, DOWN, GATE_UP, ExpertWeights
from .sizes import GemmSize

# The exponent of 1.
_E8M0_ONE = 127


def prepared(
    weights: ExpertWeights, name: str, size: GemmSize, coding: StoredCoding, config: LayerConfig
) -> dict[str, torch.Tensor]:
    """One projection's tensors, by the library's names; kept ones are read and left.

    Scales in float32 are rounded to bfloat16, and repeated for each row of a block.

    Args:
        weights: of the layer, kept.
        name: of the projection.
        size: of it.
        coding: of the weights.
        config: of the kernel.
    """
    codes, scales = weights.tensor(f"{name}.codes"), weights.tensor(f"{name}.scales")
    bytes_ENB = codes.contiguous().view(torch.uint8).reshape(codes.shape[0], size.num_rows, -1)
    padded_bytes = size.padded_columns * coding.code_bits // 8
    tensors = {
        "weight": _padded(bytes_ENB, size.padded_rows, padded_bytes, 0).view(torch.int32),
        "weight_scale": _scales(scales, size, coding),
    }
    if config.has_bias:
        bias_EN = weights.tensor(f"{name}.{BIAS}").to(torch.bfloat16)
        tensors[BIAS] = torch.nn.functional.pad(bias_EN, (0, size.padded_rows - size.num_rows))
    return transform_humming_tensors(config, tensors, already_padded=True)


def whole_factors(weights: ExpertWeights) -> torch.Tensor:
    """`[E, 3]` float32: what results of gate, of up and of down are to be multiplied by, beside the scales."""
    gate_up_EP, down_EP = weights.tensor(f"{GATE_UP}.scale").float(), weights.tensor(f"{DOWN}.scale").float()
    return torch.cat((gate_up_EP[:, :1], gate_up_EP[:, -1:], down_EP[:, :1]), dim=1).contiguous()


def _scales(scales: torch.Tensor, size: GemmSize, coding: StoredCoding) -> torch.Tensor:
    """`[E, padded rows, scales of a row]`, from `[E, pieces, blocks of rows, scales of a row]`."""
    num_experts, pieces = scales.shape[:2]
    rows = size.num_rows // pieces
    in_a_row = scales.shape[-1] if coding.block[1] else 1  # one of a whole weight may have no dimension
    scales = scales.reshape(num_experts, pieces, -1, in_a_row)
    per_row = size.padded_columns // coding.block[1] if coding.block[1] else 1
    is_coded = coding.scales in ("e4m3", "e8m0")
    scales = scales.view(torch.uint8) if is_coded else scales.to(torch.bfloat16)
    if coding.block[0] != 1:
        scales = scales.repeat_interleave(coding.block[0] or rows, 2)[:, :, :rows]
    scales_ENC = scales.reshape(num_experts, size.num_rows, -1)
    filling = _E8M0_ONE if coding.scales == "e8m0" else 0
    scales_ENC = _padded(scales_ENC, size.padded_rows, per_row, filling)
    dtypes = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
    return scales_ENC.view(dtypes[coding.scales]) if is_coded else scales_ENC


def _padded(tensor_ENC: torch.Tensor, rows: int, columns: int, filling: int) -> torch.Tensor:
    """With rows and columns added; the same tensor where there are none to add."""
    added = rows - tensor_ENC.shape[1], columns - tensor_ENC.shape[2]
    if not any(added):
        return tensor_ENC.contiguous()
    return torch.nn.functional.pad(tensor_ENC, (0, added[1], 0, added[0]), value=filling)
