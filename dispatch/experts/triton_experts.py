"""Experts in our own Triton grouped GEMMs, made for few rows, where a layer is as fast as its weights are read.

A handful of rows takes two launches, by slot and by row, without a sort; more take four: sort, gate and up with SwiGLU,
down, weighted sum per row. Which, and with which tiles, is measured at start for several numbers of rows. Extents come
from ids and offsets on the device, so slots without a pair cost nothing and nothing is read back. Repeats to the bit
while a pool lives: every sum has one order, given by rows, slots and tiles, and the tiles stay.

Triton is imported with this module: only a rank that uses it imports it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..budgets.moe_shape import MoeShape
from ..dispatchers.contract import Dispatched
from ..errors import ConfigError, GeometryError
from ..moe_layer import MoeLayer
from ..probe import HostGroup
from .expert_weights import DOWN, GATE_UP
from .pair_budget import PairBudget
from .pair_buffers import PairBuffers, PairViews
from .quack_tuning import TileTable, agree_on, milliseconds, tuned_rows
from .routing_kernels import sort_pairs, weighted_sum
from .triton_gemm import TritonTile, down_by_row, gate_up_by_slot, sorted_gemm
from .triton_tuning import by_slot_tiles, sorted_tiles

_ROUTINGS = 8
FEW_ROWS = (1, 4, 8)


@dataclass(frozen=True)
class _Adopted:
    """What is kept for a layer: its weights, the model's own tensors, and what its shape's tiles are kept by."""

    shape: MoeShape
    num_local: int
    key: str
    gate_up_EFH: torch.Tensor
    down_EHI: torch.Tensor


@dataclass(frozen=True)
class Routed:
    """Rows with their experts, and the buffers that their pairs go through."""

    x_RH: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    first_expert: int
    views: PairViews
    y_RH: torch.Tensor


class TritonExperts:
    """Keeps the contract of `dispatch.experts.backend` in bf16 and fp16.

    Args:
        budget: sizes of the buffers, equal on every rank.
        device: this rank's GPU.
    """

    name = "Triton grouped GEMM pair"

    def __init__(self, budget: PairBudget, device: torch.device):
        self._device = device
        self._buffers = PairBuffers(budget, device)
        self._layers: dict[int, _Adopted] = {}
        self._tables: dict[str, TileTable] = {}
        self._compiled: set[tuple[str, int, int]] = set()
        self.tuning = ""

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def adopt(self, layer: MoeLayer) -> None:
        gate_up_EFH, down_EHI = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
        self._layers[layer.index] = _Adopted(layer.shape, layer.num_local, layer.shape.text, gate_up_EFH, down_EHI)

    def prepare(self, group: HostGroup | None) -> None:
        for key, layer in {layer.key: layer for layer in self._layers.values()}.items():
            if key in self._tables:
                continue
            self._tables[key] = agree_on(group, partial(self._tune, layer))
            for num_rows in self._tables[key].num_rows:
                self._launch(layer, self._random(layer, num_rows, 0), self._tables[key].tiles_for(num_rows))
        torch.cuda.synchronize(self._device)
        self.tuning = "; ".join(f"{key}: {table}" for key, table in self._tables.items())

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        """See `ExpertBackend.run`."""
        adopted = self._layers[layer.index]
        x_RH = dispatched.x_RH
        y_RH = dispatched.combine_input_RH
        y_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format) if y_RH is None else y_RH
        num_rows = x_RH.shape[0]
        if num_rows == 0:
            return y_RH
        self._check(adopted, num_rows, x_RH.stride(0))
        views = self._buffers.views(adopted.shape, num_rows)
        routed = Routed(
            x_RH, dispatched.expert_ids_RK, dispatched.expert_weights_RK, dispatched.first_expert, views, y_RH
        )
        self._launch(adopted, routed, self._tables[adopted.key].tiles_for(num_rows))
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

    def _launch(self, layer: _Adopted, routed: Routed, tiles: tuple[TritonTile, TritonTile]) -> None:
        gate_up, down = tiles
        if not gate_up.rows:
            self._gate_up(layer, routed, gate_up)
            self._down(layer, routed, down)
            return
        self._sort(layer, routed)
        self._gate_up(layer, routed, gate_up)
        self._down(layer, routed, down)
        self._sum(layer, routed)

    def _sort(self, layer: _Adopted, routed: Routed) -> None:
        views = routed.views
        sort_pairs(
            routed.ids_RK,
            routed.first_expert,
            layer.num_local,
            views.offsets,
            views.source_row_P,
            views.position_RK,
        )

    def _gate_up(self, layer: _Adopted, routed: Routed, tile: TritonTile) -> None:
        views = routed.views
        if tile.rows:
            sorted_gemm(routed.x_RH, layer.gate_up_EFH, views.offsets, views.source_row_P, views.hidden_PI, tile)
        else:
            gate_up_by_slot(routed.x_RH, layer.gate_up_EFH, routed.ids_RK, routed.first_expert, views.hidden_PI, tile)

    def _down(self, layer: _Adopted, routed: Routed, tile: TritonTile) -> None:
        views = routed.views
        if tile.rows:
            sorted_gemm(views.hidden_PI, layer.down_EHI, views.offsets, None, views.output_PH, tile)
        else:
            down_by_row(
                views.hidden_PI,
                layer.down_EHI,
                routed.ids_RK,
                routed.weights_RK,
                routed.first_expert,
                routed.y_RH,
                tile,
            )

    def _sum(self, layer: _Adopted, routed: Routed) -> None:
        views = routed.views
        weighted_sum(
            views.output_PH,
            routed.ids_RK,
            routed.weights_RK,
            views.position_RK,
            routed.first_expert,
            layer.num_local,
            routed.y_RH,
        )

    def _tune(self, layer: _Adopted) -> TileTable:
        rows = tuple(
            sorted(
                {rows for rows in FEW_ROWS if rows < self._buffers.budget.num_rows}
                | set(tuned_rows(self._buffers.budget.num_rows))
            )
        )
        return TileTable(rows, tuple(self.measured(layer, num_rows)[0] for num_rows in rows))

    def measured(
        self, layer: _Adopted, num_rows: int
    ) -> tuple[tuple[TritonTile, TritonTile], dict[str, dict[TritonTile, float]]]:
        """Tiles that are fastest on rows routed at random, and milliseconds of every candidate.

        Each launch that is measured meets other rows, routed otherwise: few rows of the same experts again would find
        their weights in the L2 cache, which in a step hold those of another layer.
        """
        shape = layer.shape
        batches = [self._random(layer, num_rows, seed) for seed in range(_ROUTINGS if num_rows <= 64 else 2)]
        slots = by_slot_tiles(num_rows * shape.top_k) if shape.top_k <= layer.num_local else ((), ())
        over = sorted_tiles(num_rows * shape.top_k / shape.num_experts)
        times: dict[str, dict[TritonTile, float]] = {}
        times["gate_up by slot"] = self._times(slots[0], batches, partial(self._gate_up, layer))
        times["down by row"] = self._times(slots[1], batches, partial(self._down, layer))
        times["gate_up sorted"] = self._times(over[0], batches, partial(self._gate_up, layer))
        times["down sorted"] = self._times(over[1], batches, partial(self._down, layer))
        around = milliseconds([partial(self._around, layer, batch) for batch in batches])
        found: list[tuple[float, tuple[TritonTile, TritonTile]]] = []
        for gate_up, down, extra in (
            ("gate_up by slot", "down by row", 0.0),
            ("gate_up sorted", "down sorted", around),
        ):
            if times[gate_up] and times[down]:
                first = min(times[gate_up], key=lambda tile: times[gate_up][tile])
                second = min(times[down], key=lambda tile: times[down][tile])
                found.append((times[gate_up][first] + times[down][second] + extra, (first, second)))
        if not found:
            raise ConfigError("experts='triton': no tile runs here: set experts to 'torch'")
        return min(found, key=lambda one: one[0])[1], times

    def _around(self, layer: _Adopted, routed: Routed) -> None:
        self._sort(layer, routed)
        self._sum(layer, routed)

    def _times(
        self, tiles: Sequence[TritonTile], batches: Sequence[Routed], launch: Callable[[Routed, TritonTile], None]
    ) -> dict[TritonTile, float]:
        times = {}
        for tile in tiles:
            try:
                times[tile] = milliseconds([partial(launch, batch, tile) for batch in batches])
            except Exception as error:
                print("tile left out", tile, type(error).__name__, str(error)[:200])
        return times

    def _random(self, layer: _Adopted, num_rows: int, seed: int) -> Routed:
        """Rows with sorted pairs, as many here as a rank gets of evenly routed ones; with a routing of their own."""
        shape, device = layer.shape, self._device
        generator = torch.Generator(device).manual_seed(num_rows + 100_000 * seed)
        scores = torch.rand(num_rows, shape.num_experts, generator=generator, device=device)
        weights_RK, ids_RK = scores.topk(shape.top_k, dim=1)
        x_RH = torch.randn(num_rows, shape.hidden_size, generator=generator, device=device).to(layer.gate_up_EFH.dtype)
        shared = self._buffers.views(shape, num_rows)
        views = PairViews(
            torch.zeros_like(shared.offsets),
            torch.zeros_like(shared.source_row_P),
            torch.zeros_like(shared.position_RK),
            shared.hidden_PI,
            shared.output_PH,
        )
        routed = Routed(x_RH, ids_RK.to(torch.int32), weights_RK, 0, views, torch.empty_like(x_RH))
        self._sort(layer, routed)
        return routed
