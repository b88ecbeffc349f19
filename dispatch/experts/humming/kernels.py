"""The library's grouped GEMM of one projection: its configuration, compiled for some numbers of pairs, and its launch.

humming is imported with this module: only a rank that uses it imports it.
"""

from typing import Any

import torch
from humming import dtypes, ops
from humming.config import LayerConfig
from humming.kernel.humming import HummingKernel
from humming.schema import HummingWeightSchema
from humming.transform import prepare_layer_config
from humming.tune import get_heuristics_config

from ...budgets.stored_coding import StoredCoding
from .sizes import GemmSize

_GEMM_TYPE = "grouped_contiguous"
_COMPUTE = f'{{"gemm_type": "{_GEMM_TYPE}"}}'
_LAST = 1 << 30
_CODES = {
    "e4m3": dtypes.float8e4m3,
    "e2m1": dtypes.float4e2m1,
    "int4": dtypes.uint4,
    "int8": dtypes.uint8,
}
# Others are rounded to the dtype of rows.
_SCALES = {"e4m3": dtypes.float8e4m3, "e8m0": dtypes.float8e8m0}

Interval = tuple[int, int, dict[str, Any]]
"""Pairs above the first number and up to the second, and the tiles that they take."""


def layer_config(
    size: GemmSize, coding: StoredCoding, num_local: int, has_bias: bool, device: torch.device
) -> LayerConfig:
    """What the library compiles a projection from.

    Args:
        size: of it.
        coding: of its weights.
        num_local: experts of this rank.
        has_bias: in bfloat16.
        device: this rank's GPU.
    """
    schema = HummingWeightSchema(
        b_dtype=_CODES[coding.codes],
        bs_dtype=_SCALES.get(coding.scales),
        weight_scale_group_size=coding.block[1],
    )
    return prepare_layer_config(
        shape_n=size.num_rows,
        shape_k=size.num_columns,
        weight_schema=schema,
        num_experts=num_local,
        pad_n_to_multiple=size.padded_rows,
        pad_k_to_multiple=size.padded_columns,
        has_bias=has_bias,
        torch_dtype=torch.bfloat16,
        device=device,
    )


def intervals(config: LayerConfig, max_pairs: int, device: torch.device) -> list[Interval]:
    """Tiles for every number of pairs, as the library chooses them for some: each holds up to its number.

    The library itself lists a hundred numbers with some forty kernels; a third of those leave hardly anything.

    Args:
        config: of the projection.
        max_pairs: as expected of the largest step.
        device: this rank's GPU.
    """
    chosen = get_heuristics_config(config, gemm_type=_GEMM_TYPE, device=device)
    found: list[Interval] = []
    lowest = 0
    for bound in bounds_up_to(max_pairs):
        tiles = next(tiles for low, high, tiles in chosen if low < bound <= high)
        if found and found[-1][2] == tiles:
            lowest = found.pop()[0]
        found.append((lowest, bound, tiles))
        lowest = bound
    low, _, tiles = found[-1]
    return [*found[:-1], (low, _LAST, tiles)]


def bounds_up_to(max_pairs: int) -> list[int]:
    """Powers of two, and the numbers half way between them, up to the first that is `max_pairs` or more."""
    found, power = [1], 1
    while found[-1] < max_pairs:
        found += [size for size in (power * 3 // 2, power * 2) if size > found[-1]]
        power *= 2
    return [size for index, size in enumerate(found) if index == 0 or found[index - 1] < max_pairs]


class Gemm:
    """One projection of all layers of a shape; compiled where the cache lacks it.

    Args:
        config: see `layer_config`.
        tiles: see `intervals`.
        device: this rank's GPU.
    """

    def __init__(self, config: LayerConfig, tiles: list[Interval], device: torch.device):
        self.config = config
        self.tiles = tiles
        self._kernels = HummingKernel.prepare_kernels(config.to_str(), _COMPUTE, tiles, device)

    def run(
        self,
        rows_PK: torch.Tensor,
        weights: dict[str, torch.Tensor],
        offsets: torch.Tensor,
        locks: torch.Tensor,
        num_expected: int,
        results_PN: torch.Tensor,
    ) -> None:
        """Multiply each expert's rows with its weight; nothing is read back, rows of no expert are left.

        Args:
            rows_PK: sorted by expert.
            weights: of the layer; see `weights.prepared`.
            offsets: `[E + 1]` int32, where each expert's rows start.
            locks: `[NUM_LOCKS]` int32, zeros, which it leaves as zeros.
            num_expected: rows by which tiles are chosen.
            results_PN: written.
        """
        ops.launch_kernel(
            configs=self._kernels,
            inputs=rows_PK,
            weight=weights["weight"],
            weight_scale=weights["weight_scale"],
            bias=weights.get("bias"),
            outputs=results_PN,
            expert_layout=offsets,
            locks=locks,
            valid_shape_m=num_expected,
        )

    def __str__(self) -> str:
        named = [f"<={high if high < _LAST else 'all'} {shape_of(tiles)}" for _, high, tiles in self.tiles]
        return ", ".join(named)


def shape_of(tiles: dict[str, Any]) -> str:
    """Of a block, with what tells it from others of its shape."""
    flags = "".join(
        letter for letter, name in (("k", "use_stream_k"), ("t", "use_tma"), ("w", "use_warp_spec")) if tiles.get(name)
    )
    return f"{'x'.join(map(str, tiles['block_shape']))}{flags}x{tiles.get('num_stages', 2)}"
