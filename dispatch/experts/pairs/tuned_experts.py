"""What expert backends over sorted pairs have in common: buffers, a table of tiles for each shape, one call a layer.

Triton is imported with this module: only a rank that uses such a backend imports it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic

import torch

from ...budgets.moe_shape import MoeShape
from ...dispatchers.contract import Dispatched
from ...errors import GeometryError
from ...moe_layer import MoeLayer
from ...paths.kept_measurements import KeptMeasurements
from ...probe import HostGroup
from ..expert_weights import DOWN, GATE_UP
from .pair_budget import PairBudget
from .pair_buffers import PairBuffers, PairViews
from .routing_kernels import sort_pairs, weighted_sum
from .tile_table import Tile, TileTable, agree_on, tuned_rows


@dataclass(frozen=True)
class Adopted:
    """What is kept for a layer: its weights, the model's own tensors, and what its shape's tiles are kept by."""

    shape: MoeShape
    num_local: int
    key: str
    gate_up_EFH: torch.Tensor
    down_EHI: torch.Tensor


@dataclass(frozen=True)
class Routed:
    """Rows with their experts, the buffers that their pairs go through, and where their sums are written.

    Attributes:
        x_RH: `[R, H]`, rows of any stride.
        ids_RK, weights_RK: as in `Dispatched`.
        first_expert: id of this rank's first expert.
        views: of the buffers, for `R` rows.
        y_RH: `[R, H]`.
    """

    x_RH: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    first_expert: int
    views: PairViews
    y_RH: torch.Tensor


class TunedExperts(ABC, Generic[Tile]):
    """Keeps the contract of `dispatch.experts.backend`; what computes is the subclass's.

    Args:
        budget: sizes of the buffers, equal on every rank.
        device: this rank's GPU.
        dtype: of rows and weights, of 2 bytes.
        kept: what starts before measured; `None`: tiles are measured.

    Attributes:
        tile: what tiles are.
        tuned_rows: numbers of received rows that get tiles of their own, ascending; the most that there are does too.
    """

    name: str
    tile: type[Tile]
    tuned_rows: ClassVar[Sequence[int]]

    def __init__(
        self,
        budget: PairBudget,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        kept: KeptMeasurements | None = None,
    ):
        self._kept = kept
        self._device = device
        self._on_gpu = device.type == "cuda"  # elsewhere kernels are interpreted
        self._dtype = dtype
        self._buffers = PairBuffers(budget, device, dtype)
        self._layers: dict[int, Adopted] = {}
        self._tables: dict[str, TileTable[Tile]] = {}
        self._compiled: set[tuple[object, ...]] = set()
        self.tuning = ""

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_bytes

    def adopt(self, layer: MoeLayer) -> None:
        self._refuse(layer)
        gate_up_EFH, down_EHI = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
        self._layers[layer.index] = Adopted(layer.shape, layer.num_local, layer.shape.text, gate_up_EFH, down_EHI)

    def prepare(self, group: HostGroup | None) -> None:
        # Paths over several dispatchers share one backend, and each prepares it.
        for key, layer in self._by_shape().items():
            if key in self._tables:
                continue
            self._tables[key] = agree_on(
                group, partial(self._table, layer), self.tile, self._kept, self._held_for(layer)
            )
            for num_rows in self._tables[key].num_rows:
                # A first run compiles on the ranks that tuned nothing.
                self._compute(layer, self._random_rows(layer, num_rows), self._tables[key].tiles_for(num_rows))
        if self._on_gpu:
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
        self._check(adopted, dispatched)
        routed = Routed(
            x_RH,
            dispatched.expert_ids_RK,
            dispatched.expert_weights_RK,
            dispatched.first_expert,
            self._buffers.views(adopted.shape, num_rows),
            y_RH,
        )
        self._compute(adopted, routed, self._tables[adopted.key].tiles_for(num_rows))
        return y_RH

    @abstractmethod
    def _refuse(self, layer: MoeLayer) -> None:
        """
        Raises:
            ConfigError: on every rank alike, where these experts cannot be computed.
        """

    @abstractmethod
    def _tune(self, layer: Adopted, num_rows: int) -> tuple[Tile, Tile]:
        """The fastest tiles for so many rows of a layer.

        Raises:
            ConfigError: none runs.
        """

    @abstractmethod
    def _compute(self, layer: Adopted, routed: Routed, tiles: tuple[Tile, Tile]) -> None:
        """Write `routed.y_RH`."""

    def _sort(self, layer: Adopted, routed: Routed) -> None:
        views = routed.views
        sort_pairs(
            routed.ids_RK,
            routed.first_expert,
            layer.num_local,
            views.offsets,
            views.source_row_P,
            views.position_RK,
        )

    def _sum(self, layer: Adopted, routed: Routed) -> None:
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

    def _random_rows(self, layer: Adopted, num_rows: int, seed: int = 0) -> Routed:
        """Rows whose pairs are sorted, as many here as a rank gets of evenly routed ones; others for another seed.

        Their routing has memory of its own, so that several stand side by side; what is between the GEMMs is shared.
        """
        shape, device = layer.shape, self._device
        generator = torch.Generator(device).manual_seed(num_rows + (seed << 32))
        scores = torch.rand(num_rows, shape.num_experts, generator=generator, device=device)
        weights_RK, ids_RK = scores.topk(shape.top_k, dim=1)
        x_RH = torch.randn(num_rows, shape.hidden_size, generator=generator, device=device).to(self._dtype)
        views = self._buffers.views(shape, num_rows).with_own_routing()
        routed = Routed(x_RH, ids_RK.to(torch.int32), weights_RK, 0, views, torch.empty_like(x_RH))
        self._sort(layer, routed)
        return routed

    def _table(self, layer: Adopted) -> TileTable[Tile]:
        rows = tuned_rows(self.tuned_rows, self._buffers.budget.num_rows)
        return TileTable(rows, tuple(self._tune(layer, num_rows) for num_rows in rows))

    def _held_for(self, layer: Adopted) -> str:
        """What its table of tiles holds for, beside GPU and code."""
        rows = tuned_rows(self.tuned_rows, self._buffers.budget.num_rows)
        return f"tiles of {self.name} for {layer.num_local} x ({layer.key}) in {self._dtype}; rows {rows}"

    def _check(self, layer: Adopted, dispatched: Dispatched) -> None:
        num_rows, row_stride = dispatched.x_RH.shape[0], dispatched.x_RH.stride(0)
        if num_rows > self._buffers.budget.num_rows:
            raise GeometryError(
                f"{num_rows} rows reached the experts, whose buffers were made for {self._buffers.budget.num_rows}: "
                "raise limits.max_dispatch_tokens_per_rank"
            )
        seen = (layer.key, num_rows, row_stride, dispatched.expert_ids_RK.dtype)
        if seen in self._compiled:
            return
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise GeometryError(
                f"a step with {num_rows} rows at the experts is recorded before it was run once: its kernels would be "
                "compiled inside the recording"
            )
        self._compiled.add(seen)

    def _by_shape(self) -> dict[str, Adopted]:
        """One layer of each shape."""
        return {layer.key: layer for layer in self._layers.values()}

    def _describe_tiles(self) -> str:
        """Tiles of both GEMMs by the rows up to which they hold, for each shape of layer."""
        layers = sorted(self._by_shape().items())
        return "; ".join(
            f"{layer.num_local}x{layer.shape.hidden_size}x{layer.shape.intermediate_size} top-{layer.shape.top_k}: "
            f"{self._tables[key]}"
            for key, layer in layers
        )
