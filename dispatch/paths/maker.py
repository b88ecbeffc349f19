"""Making a way to the experts by its name, and saying beforehand why a rank cannot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..dispatchers.contract import Dispatcher
from ..expert_path import ExpertPath, MemberPath
from ..experts.backend import ExpertBackend
from ..probe import HostGroup
from ..registry import dispatcher_of, experts_of, fused_kinds, fused_of
from ..way import AS_LOADED, ExpertsWay, FusedWay, RankParts, SharedWeights, Way
from .fastest import PathCost
from .path import DispatchedPath
from .problems import problems_of
from .table import PathName

if TYPE_CHECKING:
    from ..moe_layer import MoeLayer


@dataclass(frozen=True)
class PathMaker:
    """Makes the paths of one rank, those over one dispatcher or backend over the same one.

    Args:
        parts: what all of them are made from.
    """

    parts: RankParts
    _dispatchers: dict[str, Dispatcher] = field(init=False, default_factory=dict)
    _experts: dict[str, ExpertBackend] = field(init=False, default_factory=dict)
    _shared: dict[str, SharedWeights] = field(init=False, default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.parts.device

    def shared(self, kind: str) -> SharedWeights:
        """Prepared weights, which fused paths of all capacities share."""
        if kind not in self._shared:
            self._shared[kind] = fused_of(kind).share(self.parts)
        return self._shared[kind]

    def cost_of(self, name: PathName, path: ExpertPath) -> PathCost:
        """What keeping a path costs on this rank; paths over one dispatcher or backend share its buffers."""
        if isinstance(path, DispatchedPath):
            parts = {
                f"dispatcher {name.dispatch}": path.dispatcher.num_bytes,
                f"experts {name.experts}": path.experts.num_bytes,
            }
            return PathCost(parts, name.weights)
        return PathCost({str(name): path.held.workspace_bytes}, name.weights)

    def copy_bytes(self, names: Collection[PathName], layers: Sequence[MoeLayer]) -> int:
        """Bytes of the second layout of these layers' weights, where paths of two layouts are kept side by side."""
        ways: list[type[FusedWay] | type[ExpertsWay]] = [
            experts_of(name.experts) if name.capacity is None else fused_of(name.dispatch) for name in names
        ]
        prepared = [way for way in ways if way.weights_layout != AS_LOADED]
        return max((way.copy_bytes(layers, self.parts.settings.quantisation) for way in prepared), default=0)

    def refusal(self, name: PathName, layers: Sequence[MoeLayer], host_of_first: str) -> str | None:
        """Why this rank cannot take the path, found without communicating; what it raises is a reason too.

        Args:
            name: of the path.
            layers: it would compute.
            host_of_first: the host name of rank 0.
        """
        if problems := problems_of(name, self.parts.settings, f"path {str(name)!r}"):  # as on every other rank
            return "; ".join(problems)
        if name.capacity is not None:
            fused = fused_of(name.dispatch)
            return self._device_problem(name, fused) or fused.refusal(self.parts, layers, host_of_first)
        dispatcher, experts = dispatcher_of(name.dispatch), experts_of(name.experts)
        return (
            self._device_problem(name, dispatcher, experts)
            or dispatcher.refusal(self.parts, host_of_first)
            or experts.refusal(self.parts, layers)
        )

    def make(self, name: PathName) -> MemberPath:
        """The path; collective over all ranks, which make the same paths in the same order.

        Raises:
            ConfigError: the name of no path.
        """
        if name.capacity is not None:
            return fused_of(name.dispatch).make(self.parts, self.shared(name.dispatch), name.capacity)
        self.make_local(name)
        if name.dispatch not in self._dispatchers:
            self._dispatchers[name.dispatch] = self._dispatcher(name.dispatch)
        return DispatchedPath(self._dispatchers[name.dispatch], self._experts[name.experts])

    def make_local(self, name: PathName) -> str:
        """Make what of a path takes no other rank, so that a failure is known before any rank waits for this one.

        Returns:
            The kind of experts.

        Raises:
            ConfigError: no such experts, or they cannot run here.
        """
        if name.capacity is None and name.experts not in self._experts:
            self._experts[name.experts] = experts_of(name.experts).make(self.parts)
        return name.experts

    def give_up(self, name: PathName, kept: Collection[PathName], group: HostGroup) -> None:
        """Give up what some rank could not make, or prepare, of a path; collective over all ranks, which are `group`.

        The next path over it is then made by all ranks again: making a dispatcher, and tuning experts, takes them all.

        Args:
            name: of the path.
            kept: paths that all ranks have made.
            group: all ranks.
        """
        if name.experts not in {other.experts for other in kept}:
            self._experts.pop(name.experts, None)
        everywhere = set.intersection(*map(set, group.gather(list(self._dispatchers), list[str])))
        for kind in [kind for kind in self._dispatchers if kind not in everywhere]:
            self._dispatchers.pop(kind).close()

    def keep_only(self, names: Sequence[PathName], group: HostGroup) -> None:
        """Give up what none of these paths uses; collective over all ranks, which are `group`."""
        for kind in [kind for kind in self._dispatchers if kind not in {name.dispatch for name in names}]:
            self._dispatchers.pop(kind).close()
        for kind in [kind for kind in self._experts if kind not in {name.experts for name in names}]:
            del self._experts[kind]
        exchanges = self.parts.settings.layout.world_size > 1
        for kind in fused_kinds(self.device.type) if exchanges else ():
            kept = {name.capacity for name in names if name.capacity is not None and name.dispatch == kind}
            self.shared(kind).keep_only(kept, group)

    def _dispatcher(self, kind: str) -> Dispatcher:
        # Steps run in inference mode and write its buffers; a tensor made inside it could not be written outside.
        with torch.inference_mode(False):
            return dispatcher_of(kind).make(self.parts)

    def _device_problem(self, name: PathName, *ways: type[Way] | type[ExpertsWay]) -> str | None:
        device = self.device.type
        for way in ways:
            if device not in way.devices:
                needed = "NVIDIA GPUs" if "cuda" in way.devices else "CPUs"
                return f"worker.device is {device}, {name} needs {needed}"
        return None
