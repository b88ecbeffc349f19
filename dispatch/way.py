"""What a way to the experts says of itself: one class a way, looked up by its `kind` in `dispatch.registry`.

There are dispatchers, which take rows to their experts and back; experts, which compute rows that a dispatcher brought;
and fused ways, which do both. A class says all about its way: what settings call it, which configurations it refuses
and why, the bytes that it plans, what a rank refuses from what it can tell alone, and how it is made.

- **Before anything starts**, from configuration alone, on the driver's side too: everything but `refusal`, `share`,
  `make`, and what needs libraries (`kernel_modules`) or layers (`copy_bytes`). What these need of PyTorch is imported
  inside: the module is read without it.
- **What a rank refuses by itself** (`refusal`) it finds without communicating; ranks agree on it before anything is
  made. `make` and what it returns are attempted by all ranks together.
- **A layer is a value** (`dispatch.moe_layer`), handed to `refusal`, `adopt` and `run`: its index, its shape, and its
  weights in the format that they are stored in.
- **What ranks must hold alike** is on what `make` returns: its `name`, `capacity`, and of experts their `tuning`. It is
  compared before every step and in every recording.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .budgets.budget import Bound, own_capacity
from .budgets.capacity import capacity_problem
from .budgets.layout import Layout
from .budgets.limits import Limits, QuantisationKind
from .budgets.path_settings import PathSettings
from .budgets.planned_buffer import PlannedBuffer
from .budgets.stored_coding import PLAIN

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from .collectives import Collectives
    from .dispatchers.contract import Dispatcher
    from .expert_path import MemberPath
    from .experts.backend import ExpertBackend
    from .moe_layer import MoeLayer
    from .paths.kept_measurements import KeptMeasurements
    from .paths.tuning import Tuning
    from .probe import HostGroup

AS_LOADED = "as loaded"
"""The layout of expert weights that a model is loaded with."""
_LAST = 100


def places(**places: int) -> Mapping[str, int]:
    """Devices with a way's place among the ways there, for `Way.devices`."""
    return MappingProxyType(places)


@dataclass(frozen=True)
class RankParts:
    """What ways are made from on one rank.

    Attributes:
        settings: equal on every rank.
        rank: this rank.
        collectives: through which steps exchange.
        group: process group of all ranks.
        device: where rows are.
        kept: what starts before measured; `None`: nothing is kept.
    """

    settings: PathSettings
    rank: int
    collectives: Collectives
    group: dist.ProcessGroup
    device: torch.device
    kept: KeptMeasurements | None = None


class Way(ABC):
    """What the setting `dispatch` may name.

    Attributes:
        kind: what settings call it.
        devices: on which it runs, each with its place among the ways there: those of the lowest are tried first, and
            the first is what `auto` takes.
        has_own_capacity: whether its workspace has a capacity of its own, which steps must stay within.
        is_chosen: whether settings may name it.
    """

    kind: ClassVar[str]
    devices: ClassVar[Mapping[str, int]] = places(cpu=_LAST, cuda=_LAST)
    has_own_capacity: ClassVar[bool] = True
    is_chosen: ClassVar[bool] = True

    @classmethod
    def capacity_bound(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> Bound:
        """Rows that one rank may dispatch in a step, and what decided it; not multiplied by `ep_size`."""
        return own_capacity(limits, layout, experts.least_capacity(limits, layout))

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> list[str]:
        """Why some step would exceed a buffer, each with the values and both ways out."""
        problem = capacity_problem(limits, layout, experts.least_capacity(limits, layout))
        return [*([] if problem is None else [problem]), *experts.budget_problems(limits, layout)]

    @classmethod
    def problems(cls, settings: PathSettings, setting: str) -> list[str]:
        """Which configurations it refuses, each with the reason and what to set instead.

        Args:
            settings: everything resolved.
            setting: that names this way, for messages.
        """
        return []

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        """What a rank allocates for it, by the same arithmetic as `make`."""
        return []

    @classmethod
    def kernel_modules(cls, settings: PathSettings) -> list[tuple[str, Any]]:
        """What FlashInfer compiles for it on first use: specifications of its modules, each with a label for people."""
        return []


class DispatcherWay(Way):
    """A dispatcher; what it makes keeps `dispatch.dispatchers.contract`.

    Attributes:
        is_plain: whether it is one that others are held to.
        exchanges: whether rows travel; what does not is for a pool of one rank.
    """

    is_plain: ClassVar[bool] = False
    exchanges: ClassVar[bool] = True

    @classmethod
    def refusal(cls, parts: RankParts, host_of_first: str) -> str | None:
        """Why this rank cannot have it; found without communicating, and what it raises is a reason too.

        Args:
            parts: of this rank, whose device it runs on.
            host_of_first: the host name of rank 0.
        """
        return None

    @classmethod
    @abstractmethod
    def make(cls, parts: RankParts) -> Dispatcher:
        """The dispatcher with its buffers; all ranks make it together, outside inference mode."""


class ExpertsWay(ABC):
    """Experts behind a dispatcher; what it makes keeps `dispatch.experts.backend`.

    Attributes:
        kind: what settings call it.
        devices: as for ways.
        runs_on: that device, for people.
        computes: in which quantisations; one that does not compute in `none` is not named by settings, but taken where
            they ask for the quantisation.
        reads: which kinds of expert weights, see `stored_coding.weights_kind`; what is plain computes those of every
            kind, by expanding a layer in each call.
        weights_layout: of the expert weights that it reads.
        is_plain: whether it is what others are held to.
    """

    kind: ClassVar[str]
    devices: ClassVar[Mapping[str, int]] = places(cpu=_LAST, cuda=_LAST)
    runs_on: ClassVar[str] = "GPUs"
    computes: ClassVar[tuple[QuantisationKind, ...]] = ("none",)
    reads: ClassVar[tuple[str, ...]] = (PLAIN,)
    weights_layout: ClassVar[str] = AS_LOADED
    is_plain: ClassVar[bool] = False

    @classmethod
    def is_candidate_behind(cls, dispatcher: type[DispatcherWay]) -> bool:
        """Whether the two are measured together, where paths are."""
        return True

    @classmethod
    def least_capacity(cls, limits: Limits, layout: Layout) -> Bound | None:
        """What a dispatcher with a capacity of its own has to hold for them, beside the largest step."""
        return None

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout) -> list[str]:
        """Why rows could exceed their buffers behind a dispatcher with a capacity of its own."""
        return []

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        """Which configurations they refuse, each with the reason and what to set instead."""
        return []

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        """What a rank allocates for them, by the same arithmetic as `make`."""
        return []

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer]) -> str | None:
        """Why this rank cannot have them; as for dispatchers.

        Args:
            parts: of this rank, whose device they run on.
            layers: they would compute.
        """
        return None

    @classmethod
    def copy_bytes(cls, layers: Sequence[MoeLayer], quantisation: QuantisationKind) -> int:
        """Bytes of these layers' weights in their own layout, as far as they are a copy."""
        return 0

    @classmethod
    def kernel_modules(cls, settings: PathSettings) -> list[tuple[str, Any]]:
        """What is compiled for them on first use and announced before; as for ways, FlashInfer's or likewise."""
        return []

    @classmethod
    @abstractmethod
    def make(cls, parts: RankParts) -> ExpertBackend:
        """The backend with its buffers; takes no other rank."""


class SharedWeights(Protocol):
    """Prepared weights of one rank, which paths of several capacities share.

    Attributes:
        scales: of the inputs of both projections of a layer, by its index, where the quantisation has such; set before
            a path adopts the layer, equal on every rank.
    """

    scales: dict[int, tuple[float, float]]

    def keep_only(self, capacities: Any, group: HostGroup) -> None:
        """Give up what paths of other capacities hold; collective."""
        ...


class FusedWay(Way):
    """Exchanges and computes in one, in kernels that are built for a capacity each.

    Attributes:
        computes: in which quantisations.
        calibrated: those of them for which it wants scales of the activations.
        reads: which kinds of expert weights, as for experts.
        weights_layout: of the expert weights that it reads.
    """

    computes: ClassVar[tuple[QuantisationKind, ...]] = ("none",)
    reads: ClassVar[tuple[str, ...]] = (PLAIN,)
    calibrated: ClassVar[tuple[QuantisationKind, ...]] = ()
    weights_layout: ClassVar[str] = AS_LOADED

    @classmethod
    def candidates(cls, tuning: Tuning, capacity: int) -> tuple[int, ...]:
        """Capacities for which it is measured, ascending; the last is that of the largest step."""
        return (capacity,)

    @classmethod
    def refusal(cls, parts: RankParts, layers: Sequence[MoeLayer], host_of_first: str) -> str | None:
        """Why this rank cannot have it; as for dispatchers and experts."""
        return None

    @classmethod
    def copy_bytes(cls, layers: Sequence[MoeLayer], quantisation: QuantisationKind) -> int:
        """As for experts."""
        return 0

    @classmethod
    @abstractmethod
    def share(cls, parts: RankParts) -> SharedWeights:
        """What its paths of all capacities share; takes no other rank, and allocates nothing yet."""

    @classmethod
    @abstractmethod
    def make(cls, parts: RankParts, shared: Any, capacity: int) -> MemberPath:
        """The path of one capacity; all ranks make it together.

        Args:
            parts: of this rank.
            shared: what `share` returned.
            capacity: rows a rank, equal on every rank.
        """
