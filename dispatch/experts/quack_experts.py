"""CuTe DSL experts for Hopper: QuACK's grouped GEMM pair in bf16, with one routing kernel before and one after it.

Four launches a layer: pairs are sorted by expert; the first GEMM gathers their rows itself, multiplies with gate and up
and applies SwiGLU; the second multiplies with down; a weighted sum per row goes to where the combine reads. Extents
come from offsets on the device, so slots without a pair cost nothing and nothing is read back. Repeats to the bit while
a pool lives: every sum has one order, given by rows, slots and tiles, and the tiles stay.

Triton and QuACK are imported with this module and at construction: only a rank that uses it imports it.
"""

from functools import partial

import torch

from ..errors import ConfigError
from ..moe_layer import MoeLayer
from ..paths.kept_measurements import KeptMeasurements
from .cutedsl import refuse_experts
from .pairs.pair_budget import CUTEDSL_SIZE_ALIGNMENT, PairBudget
from .pairs.quack_gemm import GemmTile, QuackGemms
from .pairs.quack_tuning import TUNED_ROWS, down_tiles, gate_up_tiles
from .pairs.tile_table import fastest, timed
from .pairs.tuned_experts import Adopted, Routed, TunedExperts

_ARCHITECTURE = (9, 0)


class QuackExperts(TunedExperts[GemmTile]):
    """Keeps the contract of `dispatch.experts.backend` on SM90 in bf16.

    Args:
        budget: sizes of the buffers, equal on every rank.
        device: this rank's GPU.
        kept: what starts before measured; `None`: tiles are measured.

    Raises:
        ConfigError: another architecture than SM90, or what `QuackGemms` refuses.
    """

    name = "QuACK CuTe DSL grouped GEMM pair, bf16"
    tile = GemmTile
    tuned_rows = TUNED_ROWS

    def __init__(self, budget: PairBudget, device: torch.device, kept: KeptMeasurements | None = None):
        architecture = torch.cuda.get_device_capability(device)
        if architecture != _ARCHITECTURE:
            raise ConfigError(
                f"experts='cutedsl' runs on compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has "
                f"{architecture[0]}.{architecture[1]}: set experts to 'torch'"
            )
        self._gemms = QuackGemms()
        super().__init__(budget, device, kept=kept)

    def _refuse(self, layer: MoeLayer) -> None:
        refuse_experts(layer)
        hidden_size, intermediate_size = layer.shape.hidden_size, layer.shape.intermediate_size
        if hidden_size % CUTEDSL_SIZE_ALIGNMENT or intermediate_size % CUTEDSL_SIZE_ALIGNMENT:
            raise ConfigError(
                f"experts='cutedsl' needs sizes that are multiples of {CUTEDSL_SIZE_ALIGNMENT}, {layer.name} has "
                f"hidden size {hidden_size} and intermediate size {intermediate_size}: set experts to 'torch'"
            )

    def _compute(self, layer: Adopted, routed: Routed, tiles: tuple[GemmTile, GemmTile]) -> None:
        self._sort(layer, routed)
        self._gate_up(layer, routed, tiles[0])
        self._down(layer, routed, tiles[1])
        self._sum(layer, routed)

    def _gate_up(self, layer: Adopted, routed: Routed, tile: GemmTile) -> None:
        views = routed.views
        self._gemms.gated(routed.x_RH, layer.gate_up_EFH, views.offsets, views.source_row_P, views.hidden_PI, tile)

    def _down(self, layer: Adopted, routed: Routed, tile: GemmTile) -> None:
        views = routed.views
        self._gemms.plain(views.hidden_PI, layer.down_EHI, views.offsets, views.output_PH, tile)

    def _tune(self, layer: Adopted, num_rows: int) -> tuple[GemmTile, GemmTile]:
        """Measure both GEMMs on rows routed at random."""
        routed = self._random_rows(layer, num_rows)
        pairs_an_expert = num_rows * layer.shape.top_k / layer.shape.num_experts
        first = timed(gate_up_tiles(pairs_an_expert), lambda tile: [partial(self._gate_up, layer, routed, tile)])
        second = timed(down_tiles(pairs_an_expert), lambda tile: [partial(self._down, layer, routed, tile)])
        return fastest(first, "experts='cutedsl'"), fastest(second, "experts='cutedsl'")
