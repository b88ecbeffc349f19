"""Several ways to the experts as one: each step takes the one that the table says for its rows."""

from collections.abc import Mapping

import torch

from ..budgets.geometry import StepGeometry
from ..experts.local_experts import LocalExperts
from .held import HeldAlike
from .path import ExpertPath
from .table import PathTable


class MeasuredPath:
    """Keeps `dispatch.paths.path.ExpertPath` with a path for every number of rows.

    A step is looked up by `runtime_max_tokens_per_rank`: all ranks have the same from the step plan, so all take the
    same path, and a recorded step keeps the one it was recorded with. The table is part of what ranks compare before
    every step.

    Args:
        members: by name, with the layers they compute; those of the table, equal on every rank.
        table: equal on every rank.
        shapes: of the layers, by `id` of their experts module.
        num_bytes: of the buffers of all members, those that several share counted once.
        rank: this rank.
        capacity: the most rows a rank that a step has, covered by the table.
    """

    def __init__(
        self,
        members: Mapping[str, ExpertPath],
        table: PathTable,
        shapes: Mapping[int, str],
        num_bytes: int,
        rank: int,
        capacity: int,
    ):
        self.members = dict(members)
        self.table = table
        held = {name: member.held for name, member in members.items()}
        tuned = [f"{name}: {one.tuning}" for name, one in held.items() if one.tuning]
        # Of kernels of one kind and several capacities, all have the same.
        scales = dict.fromkeys(one.quantisation_scales for one in held.values())
        self.held = HeldAlike(
            dispatcher="measured",
            expert_backend="; ".join(f"{name}: {one.expert_backend}" for name, one in held.items()),
            capacity=capacity,
            workspace_bytes=num_bytes,
            tuning="; ".join([table.text, *tuned]),
            quantisation_scales=tuple(scale for found in scales for scale in found),
        )
        self._shapes = dict(shapes)
        self._rank = rank

    def member_for(self, experts: LocalExperts, geometry: StepGeometry) -> str:
        """The name of the path that a step of this geometry takes through this layer; equal on every rank."""
        shape = self._shapes[id(experts.module)]
        return self.table.path_for(shape, geometry.runtime_max_tokens_per_rank(self._rank))

    def run(
        self,
        experts: LocalExperts,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        member = self.members[self.member_for(experts, geometry)]
        return member.run(experts, x_TH, expert_ids_TK, expert_weights_TK, geometry)
