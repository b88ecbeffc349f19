"""Several ways to the experts as one: each step takes the one that the table says for its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..budgets.budget import Bound, own_capacity
from ..budgets.geometry import StepGeometry
from ..budgets.layout import Layout
from ..budgets.limits import Limits
from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..budgets.stored_coding import weights_kind
from ..expert_path import ExpertPath, HeldAlike
from ..registry import LOCAL, MEASURED, experts_of, way_kinds, way_of
from ..way import ExpertsWay, Way, places
from .problems import problems_of, refused_in_quantisation
from .table import PathName, PathTable, candidate_paths, table_problems

if TYPE_CHECKING:
    import torch

    from ..moe_layer import MoeLayer


class MeasuredPath(Way):
    """Keeps `dispatch.expert_path.ExpertPath` with a path for every number of rows.

    A step is looked up by `runtime_max_tokens_per_rank`: all ranks have the same from the step plan, so all take the
    same path, and a recorded step keeps the one it was recorded with. The table is part of what ranks compare before
    every step.

    Args:
        members: by name, with the layers they compute; those of the table, equal on every rank.
        table: equal on every rank.
        shapes: of the layers, by their index.
        num_bytes: of the buffers of all members, those that several share counted once.
        capacity: the most rows a rank that a step has, covered by the table.
    """

    kind = name = MEASURED
    devices = places(cpu=2, cuda=0)

    @classmethod
    def capacity_bound(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> Bound:
        """Exactly what is needed, since a capacity costs speed; one rank alone has nothing with a capacity."""
        if layout.world_size == 1:
            return way_of(LOCAL).capacity_bound(limits, layout, experts)
        return own_capacity(limits, layout, experts.least_capacity(limits, layout), default=0)

    @classmethod
    def budget_problems(cls, limits: Limits, layout: Layout, experts: type[ExpertsWay]) -> list[str]:
        return [] if layout.world_size == 1 else super().budget_problems(limits, layout, experts)

    @classmethod
    def problems(cls, settings: PathSettings, setting: str) -> list[str]:
        """What no path computes that is left to choose from, and what is wrong with a table."""
        problems: list[str] = []
        if settings.quantisation != "none":
            problems += refused_in_quantisation(settings, setting, settings.worker.device)
        table = settings.tuning.table
        if table is None:
            return problems
        shapes = [shape.text for shape in settings.spec.moe]
        device = settings.worker.device
        world_size, weights = settings.layout.world_size, weights_kind(settings.stored)
        quantisation, capacity = settings.quantisation, settings.capacity
        problems += table_problems(table, device, quantisation, capacity, shapes, world_size, weights)
        if problems:  # names that are not known, say
            return problems
        for path in PathTable(table).names:
            problems += problems_of(PathName.parse(path), settings, f"tuning.table's path {path!r}")
        return list(dict.fromkeys(problems))

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        bound, made_of = settings.tuning.max_bytes, "at most, by tuning.max_bytes"
        if settings.layout.world_size == 1 and (known := _experts_bytes(settings)) <= bound:
            bound, made_of = known, "at most, all experts to choose from"
        return [PlannedBuffer("dispatch: measured paths", None, bound, made_of)]

    @classmethod
    def kernel_modules(cls, settings: PathSettings) -> list[tuple[str, Any]]:
        kinds = way_kinds(settings.worker.device) if settings.layout.world_size > 1 else (LOCAL,)
        ways: list[type[Way] | type[ExpertsWay]] = [way_of(kind) for kind in kinds if kind != MEASURED]
        experts = dict.fromkeys(name.experts for name in _candidates(settings) if name.capacity is None)
        ways += [experts_of(kind) for kind in experts]
        return [module for way in ways for module in way.kernel_modules(settings)]

    def __init__(
        self,
        members: Mapping[str, ExpertPath],
        table: PathTable,
        shapes: Mapping[int, str],
        num_bytes: int,
        capacity: int,
    ):
        self.members = dict(members)
        self.table = table
        held = {name: member.held for name, member in members.items()}
        tuned = [f"{name}: {one.tuning}" for name, one in held.items() if one.tuning]
        # Of kernels of one kind and several capacities, all have the same.
        scales = dict.fromkeys(one.quantisation_scales for one in held.values())
        self.held = HeldAlike(
            dispatcher=MEASURED,
            expert_backend="; ".join(f"{name}: {one.expert_backend}" for name, one in held.items()),
            capacity=capacity,
            workspace_bytes=num_bytes,
            tuning="; ".join([table.text, *tuned]),
            quantisation_scales=tuple(scale for found in scales for scale in found),
        )
        self._shapes = dict(shapes)

    def member_for(self, layer: MoeLayer, geometry: StepGeometry) -> str:
        """The name of the path that a step of this geometry takes through this layer; equal on every rank."""
        shape = self._shapes[layer.index]
        return self.table.path_for(shape, geometry.runtime_max_tokens_per_rank)

    def run(
        self,
        layer: MoeLayer,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        member = self.members[self.member_for(layer, geometry)]
        return member.run(layer, x_TH, expert_ids_TK, expert_weights_TK, geometry)


def _candidates(settings: PathSettings) -> tuple[PathName, ...]:
    return candidate_paths(
        settings.tuning,
        settings.worker.device,
        settings.experts,
        settings.quantisation,
        settings.capacity,
        settings.layout.world_size,
        weights_kind(settings.stored),
    )


def _experts_bytes(settings: PathSettings) -> int:
    """Of all experts that one rank measures, which are all that its paths allocate."""
    names = _candidates(settings)
    taken = [name for name in names if not problems_of(name, settings, f"path {str(name)!r}")]
    return sum(buffer.num_bytes for name in taken for buffer in experts_of(name.experts).planned(settings))
