"""What a way to the experts may read of a pool to refuse it, to size itself and to be made; free of PyTorch.

`workers.rank_config.RankConfig` is what has it in a pool. All of it is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .budget import ExchangeBudget, RowFormat, exchange_budget
from .layout import Layout
from .limits import Limits, QuantisationKind
from .moe_shape import MoeShape
from .stored_coding import StoredCoding

if TYPE_CHECKING:
    from ..paths.tuning import Tuning


class ModelShape(Protocol):
    """A model, as far as its experts go; see `workers.model.spec.ModelSpec`."""

    @property
    def model_type(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def moe(self) -> Sequence[MoeShape]: ...


class DeviceSettings(Protocol):
    """Of a rank's device; see `workers.config.WorkerConfig`."""

    @property
    def device(self) -> str: ...
    @property
    def device_timeout_s(self) -> float: ...


class PathSettings(Protocol):
    """Everything resolved; see `workers.rank_config.RankConfig`."""

    @property
    def spec(self) -> ModelShape: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def worker(self) -> DeviceSettings: ...
    @property
    def dispatch(self) -> str: ...
    @property
    def experts(self) -> str: ...
    @property
    def quantisation(self) -> QuantisationKind: ...
    @property
    def stored(self) -> StoredCoding | None: ...
    @property
    def tuning(self) -> Tuning: ...
    @property
    def capacity(self) -> int: ...


def row_formats(spec: ModelShape) -> list[RowFormat]:
    """The wire format of each MoE layer."""
    return [RowFormat(layer.hidden_size, layer.top_k, spec.dtype, layer.weights_dtype) for layer in spec.moe]


def budget_for(settings: PathSettings) -> ExchangeBudget:
    """Exchange buffers of each rank, for dispatchers that send rows over `torch.distributed`."""
    formats = row_formats(settings.spec)
    return exchange_budget(settings.limits, settings.layout, formats, capacity=settings.capacity)


def rows_of(settings: PathSettings) -> str:
    """Where the rows of a buffer come from that has those of all ranks, for plans."""
    return f"ep_size {settings.layout.world_size} x capacity {settings.capacity}"
