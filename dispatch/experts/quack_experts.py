"""CuTe DSL experts for Hopper: QuACK's grouped GEMM pair in bf16, with one routing kernel before and one after it.

Four launches a layer: pairs are sorted by expert; the first GEMM gathers their rows itself, multiplies with gate and up
and applies SwiGLU; the second multiplies with down; a weighted sum per row goes to where the combine reads. Extents
come from offsets on the device, so slots without a pair cost nothing and nothing is read back. Repeats to the bit while
a pool lives: every sum has one order, given by rows, slots and tiles, and the tiles stay.

Triton and QuACK are imported with this module and at construction: only a rank that uses it imports it.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ..budgets.moe_shape import MoeShape
from ..dispatchers.contract import Dispatched
from ..errors import ConfigError, GeometryError
from ..moe_layer import MoeLayer
from ..probe import HostGroup
from .cutedsl import refuse_experts
from .expert_weights import DOWN, GATE_UP
from .pair_budget import CUTEDSL_SIZE_ALIGNMENT, PairBudget
from .pair_buffers import PairBuffers, PairViews
from .quack_gemm import GemmTile, QuackGemms
from .quack_tuning import TileTable, agree_on, down_tiles, fastest, gate_up_tiles, tuned_rows
from .routing_kernels import sort_pairs, weighted_sum

_ARCHITECTURE = (9, 0)


@dataclass(frozen=True)
class _Adopted:
    """What is kept for a layer: its weights, the model's own tensors, and what its shape's tiles are kept by."""

    shape: MoeShape
    num_local: int
    key: str
    gate_up_EFH: torch.Tensor
    down_EHI: torch.Tensor


class QuackExperts:
    """Keeps the contract of `dispatch.experts.backend` on SM90 in bf16.

    Args:
        budget: sizes of the buffers, equal on every rank.
        device: this rank's GPU.

    Raises:
        ConfigError: another architecture than SM90, or what `QuackGemms` refuses.
    """

    name = "QuACK CuTe DSL grouped GEMM pair, bf16"

    def __init__(self, budget: PairBudget, device: torch.device):
        architecture = torch.cuda.get_device_capability(device)
        if architecture != _ARCHITECTURE:
            raise ConfigError(
                f"experts='cutedsl' runs on compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has "
                f"{architecture[0]}.{architecture[1]}: set experts to 'torch'"
            )
        self._device = device
        self._gemms = QuackGemms()
        self._buffers = PairBuffers(budget, device)
        self._layers: dict[int, _Adopted] = {}
        self._tables: dict[str, TileTable] = {}
        self._compiled: set[tuple[str, int, int]] = set()
        self.tuning = ""

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def _describe_tiles(self) -> str:
        """Tiles of both GEMMs by the rows up to which they hold, for each shape of layer."""
        layers = sorted(self._by_shape().items())
        return "; ".join(
            f"{layer.num_local}x{layer.shape.hidden_size}x{layer.shape.intermediate_size} top-{layer.shape.top_k}: "
            f"{self._tables[key]}"
            for key, layer in layers
        )

    def _by_shape(self) -> dict[str, _Adopted]:
        """One layer of each shape."""
        return {layer.key: layer for layer in self._layers.values()}

    def adopt(self, layer: MoeLayer) -> None:
        refuse_experts(layer)
        hidden_size, intermediate_size = layer.shape.hidden_size, layer.shape.intermediate_size
        if hidden_size % CUTEDSL_SIZE_ALIGNMENT or intermediate_size % CUTEDSL_SIZE_ALIGNMENT:
            raise ConfigError(
                f"experts='cutedsl' needs sizes that are multiples of {CUTEDSL_SIZE_ALIGNMENT}, {layer.name} has "
                f"hidden size {hidden_size} and intermediate size {intermediate_size}: set experts to 'torch'"
            )
        gate_up_EFH, down_EHI = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
        self._layers[layer.index] = _Adopted(layer.shape, layer.num_local, layer.shape.text, gate_up_EFH, down_EHI)

    def prepare(self, group: HostGroup | None) -> None:
        # Paths over several dispatchers share one backend, and each prepares it.
        for key, layer in self._by_shape().items():
            if key in self._tables:
                continue
            self._tables[key] = agree_on(group, partial(self._tune, layer))
            for num_rows in self._tables[key].num_rows:
                # A first run compiles on the ranks that tuned nothing.
                self._on_random_rows(layer, num_rows, self._tables[key].tiles_for(num_rows))
        torch.cuda.synchronize(self._device)
        self.tuning = self._describe_tiles()  # read in every step

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        """See `ExpertBackend.run`.

        Raises:
            GeometryError: more rows than the buffers hold, or a recording that no run with as many rows preceded.
        """
        adopted = self._layers[layer.index]
        x_RH = dispatched.x_RH
        y_RH = dispatched.combine_input_RH
        y_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format) if y_RH is None else y_RH
        num_rows = x_RH.shape[0]
        if num_rows == 0:
            return y_RH
        self._check(adopted, num_rows, x_RH.stride(0))
        ids_RK, first = dispatched.expert_ids_RK, dispatched.first_expert
        views = self._buffers.views(adopted.shape, num_rows)
        tiles = self._tables[adopted.key].tiles_for(num_rows)
        sort_pairs(ids_RK, first, adopted.num_local, views.offsets, views.source_row_P, views.position_RK)
        self._gate_up(adopted, x_RH, views, tiles[0])
        self._down(adopted, views, tiles[1])
        weighted_sum(
            views.output_PH,
            ids_RK,
            dispatched.expert_weights_RK,
            views.position_RK,
            first,
            adopted.num_local,
            y_RH,
        )
        return y_RH

    def _check(self, layer: _Adopted, num_rows: int, row_stride: int) -> None:
        if num_rows > self._buffers.budget.num_rows:
            raise GeometryError(
                f"{num_rows} rows reached the experts, whose buffers were made for {self._buffers.budget.num_rows}: "
                "raise limits.max_dispatch_tokens_per_rank"
            )
        seen = (layer.key, num_rows, row_stride)
        if seen in self._compiled:
            return
        if torch.cuda.is_current_stream_capturing():
            raise GeometryError(
                f"a step with {num_rows} rows at the experts is recorded before it was run once: its kernels would be "
                "compiled inside the recording"
            )
        self._compiled.add(seen)

    def _gate_up(self, layer: _Adopted, x_RH: torch.Tensor, views: PairViews, tile: GemmTile) -> None:
        self._gemms.gated(x_RH, layer.gate_up_EFH, views.offsets, views.source_row_P, views.hidden_PI, tile)

    def _down(self, layer: _Adopted, views: PairViews, tile: GemmTile) -> None:
        self._gemms.plain(views.hidden_PI, layer.down_EHI, views.offsets, views.output_PH, tile)

    def _tune(self, layer: _Adopted) -> TileTable:
        """Measure both GEMMs on rows routed at random, for every number of rows that has a tile of its own."""
        rows = tuned_rows(self._buffers.budget.num_rows)
        tiles = []
        for num_rows in rows:
            x_RH, views = self._random_rows(layer, num_rows)
            pairs_an_expert = num_rows * layer.shape.top_k / layer.shape.num_experts
            gate_up = fastest(gate_up_tiles(pairs_an_expert), partial(self._gate_up, layer, x_RH, views))
            down = fastest(down_tiles(pairs_an_expert), partial(self._down, layer, views))
            tiles.append((gate_up, down))
        return TileTable(rows, tuple(tiles))

    def _on_random_rows(self, layer: _Adopted, num_rows: int, tiles: tuple[GemmTile, GemmTile]) -> None:
        x_RH, views = self._random_rows(layer, num_rows)
        self._gate_up(layer, x_RH, views, tiles[0])
        self._down(layer, views, tiles[1])

    def _random_rows(self, layer: _Adopted, num_rows: int) -> tuple[torch.Tensor, PairViews]:
        """Rows whose pairs are sorted into the buffers, as many here as a rank gets of evenly routed ones."""
        shape = layer.shape
        generator = torch.Generator(self._device).manual_seed(num_rows)
        scores = torch.rand(num_rows, shape.num_experts, generator=generator, device=self._device)
        ids_RK = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
        x_RH = torch.randn(num_rows, shape.hidden_size, generator=generator, device=self._device).to(torch.bfloat16)
        views = self._buffers.views(shape, num_rows)
        sort_pairs(ids_RK, 0, layer.num_local, views.offsets, views.source_row_P, views.position_RK)
        return x_RH, views
