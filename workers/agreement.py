"""One plan for all ranks: a single host all-gather at the start of every iteration.

Each rank says what it wants to run. All ranks then hold the same numbers, and derive the same plan from them with
the same code; a disagreement is found by every rank, and raised on every rank, before any collective of the step.
"""

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

from ..dispatch.errors import GeometryError
from ..dispatch.geometry import StepGeometry
from ..dispatch.layout import Layout
from .scheduler import BatchKind


@dataclass(frozen=True)
class Proposal:
    """What one rank brings to the agreement; each field travels as an int64.

    Attributes:
        config_digest: of everything that must be configured alike.
        step: iterations since the start.
        kind: a `BatchKind`.
        num_tokens: tokens of its scheduled batch, 0 when idle.
        intake_bytes: encoded requests that this rank, a leader, has for those that share its batch.
        wake_epoch: the last wake-up call of the driver that this rank has seen.
        stop: 1 when this rank was told to stop.
    """

    config_digest: int
    step: int
    kind: int
    num_tokens: int
    intake_bytes: int
    wake_epoch: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """What all ranks do in one iteration; equal on every rank in every field.

    Attributes:
        step: iterations since the start.
        kinds: what each DP rank runs.
        geometry: of the step; `None` when every DP rank is idle and nothing runs.
        intake_bytes: encoded requests each DP rank's leader shares now.
        wake_epoch: the lowest wake-up call that some rank has seen. Ranks that all go idle wait for a higher one: a
            call that reached only some of them is on its way to the others.
        stop: all ranks stop now.
    """

    step: int
    kinds: tuple[BatchKind, ...]
    geometry: StepGeometry | None
    intake_bytes: tuple[int, ...]
    wake_epoch: int
    stop: bool

    @property
    def is_pause(self) -> bool:
        """Nothing to run and nothing to take in: all ranks wait for the driver together."""
        return self.geometry is None and not any(self.intake_bytes) and not self.stop


def derive_plan(proposals: list[Proposal], layout: Layout, capacity: int) -> StepPlan:
    """The plan that follows from all ranks' proposals; a pure function, so all ranks derive the same.

    Args:
        proposals: one a rank, in rank order.
        layout: the arrangement of ranks, equal on every rank.
        capacity: the most rows one rank may dispatch, equal on every rank.

    Raises:
        GeometryError: on every rank alike; names the field, the ranks and their values.
    """
    for name in ("config_digest", "step"):
        _require_equal(name, proposals, range(layout.world_size))
    for dp_rank in range(layout.dp_size):
        for name in ("kind", "num_tokens"):
            _require_equal(name, proposals, layout.ranks_of(dp_rank))
    leaders = [proposals[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
    kinds = tuple(BatchKind(leader.kind) for leader in leaders)
    geometry = None
    if any(kind is not BatchKind.IDLE for kind in kinds):
        counts = tuple(max(1, leader.num_tokens) for leader in leaders)
        geometry = StepGeometry.build(layout, counts, capacity=capacity)
    return StepPlan(
        step=proposals[0].step,
        kinds=kinds,
        geometry=geometry,
        intake_bytes=tuple(leader.intake_bytes for leader in leaders),
        wake_epoch=min(proposal.wake_epoch for proposal in proposals),
        stop=any(proposal.stop for proposal in proposals),
    )


def _require_equal(name: str, proposals: list[Proposal], ranks: range) -> None:
    values = {rank: getattr(proposals[rank], name) for rank in ranks}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
        raise GeometryError(f"ranks disagree about {name} before a step: {listed}")


class Agreement:
    """The host all-gather, on a group that carries nothing else.

    Args:
        group: a Gloo group of all ranks, used for nothing that a step records.
        layout: the arrangement of ranks, equal on every rank.
        capacity: the most rows one rank may dispatch, equal on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, capacity: int):
        self._group = group
        self._layout = layout
        self._capacity = capacity
        self._sent = torch.zeros(1, len(fields(Proposal)), dtype=torch.int64)
        self._received = torch.zeros(layout.world_size, len(fields(Proposal)), dtype=torch.int64)

    def agree(self, proposal: Proposal) -> StepPlan:
        """Collective over all ranks; see `derive_plan` for what is refused."""
        self._sent[0] = torch.tensor(astuple(proposal))
        dist.all_gather_into_tensor(self._received, self._sent, group=self._group)
        proposals = [Proposal(*row) for row in self._received.tolist()]
        return derive_plan(proposals, self._layout, self._capacity)
