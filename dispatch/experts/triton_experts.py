"""Experts in our own Triton grouped GEMMs, made for few rows, where a layer is as fast as its weights are read.

A handful of rows takes two launches, by slot and by row, without a sort; more take four: sort, gate and up with SwiGLU,
down, weighted sum per row. Which, and with which tiles, is measured at start for several numbers of rows. Extents come
from ids and offsets on the device, so slots without a pair cost nothing and nothing is read back. Repeats to the bit
while a pool lives: every sum has one order, given by rows, slots and tiles, and the tiles stay.

Triton is imported with this module: only a rank that uses it imports it.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch

from ..moe_layer import MoeLayer
from .pairs.tile_table import fastest, milliseconds, timed
from .pairs.triton_gemm import TritonTile, down_by_row, gate_up_by_slot, sorted_gemm
from .pairs.triton_tuning import TUNED_ROWS, by_slot_tiles, num_routings, sorted_tiles
from .pairs.tuned_experts import Adopted, Routed, TunedExperts
from .triton_way import refuse_experts

_COMPILERS = 8

Times = dict[str, dict[TritonTile, float]]
"""Milliseconds of each launch with each of its candidates."""
GATE_UP_BY_SLOT, DOWN_BY_ROW = "gate_up by slot", "down by row"
GATE_UP_SORTED, DOWN_SORTED, AROUND = "gate_up sorted", "down sorted", "sort and sum"


class TritonExperts(TunedExperts[TritonTile]):
    """Keeps the contract of `dispatch.experts.backend` in bf16 and fp16, from compute capability 8.0 on."""

    name = "Triton grouped GEMM pair"
    tile = TritonTile
    tuned_rows = TUNED_ROWS

    def _refuse(self, layer: MoeLayer) -> None:
        refuse_experts(layer)

    def _compute(self, layer: Adopted, routed: Routed, tiles: tuple[TritonTile, TritonTile]) -> None:
        is_sorted = tiles[0].rows > 0
        if is_sorted:
            self._sort(layer, routed)
        self._gate_up(layer, routed, tiles[0])
        self._down(layer, routed, tiles[1])
        if is_sorted:
            self._sum(layer, routed)

    def _gate_up(self, layer: Adopted, routed: Routed, tile: TritonTile) -> None:
        x_RH, gate_up_EFH, views = routed.x_RH, layer.gate_up_EFH, routed.views
        if tile.rows:
            sorted_gemm(x_RH, gate_up_EFH, views.offsets, views.source_row_P, views.hidden_PI, tile)
        else:
            gate_up_by_slot(x_RH, gate_up_EFH, routed.ids_RK, routed.first_expert, views.hidden_PI, tile)

    def _down(self, layer: Adopted, routed: Routed, tile: TritonTile) -> None:
        hidden_PI, down_EHI, views = routed.views.hidden_PI, layer.down_EHI, routed.views
        if tile.rows:
            sorted_gemm(hidden_PI, down_EHI, views.offsets, None, views.output_PH, tile)
        else:
            ids_RK, weights_RK = routed.ids_RK, routed.weights_RK
            down_by_row(hidden_PI, down_EHI, ids_RK, weights_RK, routed.first_expert, routed.y_RH, tile)

    def _tune(self, layer: Adopted, num_rows: int) -> tuple[TritonTile, TritonTile]:
        times, around = self._times(layer, num_rows)
        sums = {
            names: sum(min(times[name].values()) for name in names) + extra
            for names, extra in (((GATE_UP_BY_SLOT, DOWN_BY_ROW), 0.0), ((GATE_UP_SORTED, DOWN_SORTED), around))
            if all(times[name] for name in names)
        }
        names = min(sums, key=lambda names: sums[names], default=(GATE_UP_SORTED, DOWN_SORTED))
        first, second = (fastest(times[name], "experts='triton'") for name in names)
        return first, second

    def candidate_times(self, layer: MoeLayer, num_rows: int) -> tuple[Times, float]:
        """What tiles are chosen by, for so many rows of a layer that has been adopted; see `_times`."""
        return self._times(self._layers[layer.index], num_rows)

    def _times(self, layer: Adopted, num_rows: int) -> tuple[Times, float]:
        """Milliseconds of every candidate on rows routed at random, and those of sort and sum.

        Each launch that is measured meets other rows, routed otherwise: few rows of the same experts again would find
        their weights in the L2 cache, which in a step holds those of another layer.
        """
        shape = layer.shape
        batches = [self._random_rows(layer, num_rows, seed) for seed in range(num_routings(num_rows))]
        # A slot's result stands at the slot, so the buffers have to hold every slot.
        fits = shape.top_k <= layer.num_local
        by_slot = by_slot_tiles(num_rows * shape.top_k if fits else None)
        by_pair = sorted_tiles(num_rows * shape.top_k / shape.num_experts)
        gate_up, down = partial(self._gate_up, layer), partial(self._down, layer)
        for launch, tiles in ((gate_up, by_slot[0]), (down, by_slot[1]), (gate_up, by_pair[0]), (down, by_pair[1])):
            self._compile(partial(launch, batches[0]), tiles)
        times = {
            GATE_UP_BY_SLOT: _timed(by_slot[0], batches, gate_up),
            DOWN_BY_ROW: _timed(by_slot[1], batches, down),
            GATE_UP_SORTED: _timed(by_pair[0], batches, gate_up),
            DOWN_SORTED: _timed(by_pair[1], batches, down),
        }
        return times, milliseconds([partial(self._sort_and_sum, layer, batch) for batch in batches])

    def _compile(self, launch: Callable[[TritonTile], None], tiles: Sequence[TritonTile]) -> None:
        """Have kernels compiled side by side; what fails here fails again where it is timed, and is said there."""

        def attempt(tile: TritonTile) -> None:
            with suppress(Exception), torch.cuda.device(self._device):
                launch(tile)

        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as threads:
            # One alone, and then all: the first launch of a kernel makes what Triton keeps for it.
            for part in (tiles[:1], tiles[1:]):
                list(threads.map(attempt, part))

    def _sort_and_sum(self, layer: Adopted, routed: Routed) -> None:
        self._sort(layer, routed)
        self._sum(layer, routed)


def _timed(
    tiles: Sequence[TritonTile], batches: Sequence[Routed], launch: Callable[[Routed, TritonTile], None]
) -> dict[TritonTile, float]:
    return timed(tiles, lambda tile: [partial(launch, batch, tile) for batch in batches])
