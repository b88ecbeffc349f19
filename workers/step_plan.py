"""What ranks propose for a step, and the one plan that follows from all proposals: pure functions of equal numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..dispatch.budgets.geometry import StepGeometry
from ..dispatch.budgets.layout import Layout
from ..dispatch.budgets.step_kinds import KINDS
from ..dispatch.errors import GeometryError
from ..graphs.plan import CaptureEntry, CapturePlan
from .scheduling.scheduler import BatchKind

_BATCH_KINDS = {kind.value: kind for kind in BatchKind}

EAGER_NO_GRAPHS = "no graph of this kind"
EAGER_TOO_LARGE = "larger than the largest graph"


class Proposal(NamedTuple):
    """What one rank brings to the agreement; each field travels as an int64.

    Attributes:
        step: iterations since the start.
        kind: a `BatchKind`.
        num_tokens: tokens of its scheduled batch, 0 when idle.
        num_due: sequences of its batch whose next token is due; ranks that share a batch send each other these tokens.
        batch_digest: of which tokens of which requests are in it, where it is shared; 0 elsewhere.
        intake_bytes: encoded requests that this rank, a leader, has for those that share its batch.
        wake_epoch: the last wake-up call of the driver that this rank has seen.
        leave: 1 when this rank was told to leave the loop.
        in_flight: 1 while tokens of this rank's last step have not come back yet.
    """

    step: int
    kind: int
    num_tokens: int
    num_due: int
    batch_digest: int
    intake_bytes: int
    wake_epoch: int
    leave: int
    in_flight: int


@dataclass(frozen=True)
class StepPlan:
    """What all ranks do in one iteration; equal on every rank in every field.

    Attributes:
        step: iterations since the start.
        kinds: what each DP rank runs.
        num_tokens_per_dp_rank: tokens that each DP rank scheduled, without padding; 0 for an idle one.
        geometry: of the step, its padded extents included; `None` when every DP rank is idle and nothing runs.
        graph: the graph that all ranks replay; `None` when all run eagerly.
        eager_reason: why they do.
        intake_bytes: encoded requests each DP rank's leader shares now.
        wake_epoch: the lowest wake-up call that some rank has seen. Ranks that all go idle wait for a higher one: a
            call that reached only some of them is on its way to the others.
        leave: all ranks leave the loop now.
        in_flight: the last step of some rank has not come back yet, and may leave something to run.
    """

    step: int
    kinds: tuple[BatchKind, ...]
    num_tokens_per_dp_rank: tuple[int, ...]
    geometry: StepGeometry | None
    graph: CaptureEntry | None
    eager_reason: str | None
    intake_bytes: tuple[int, ...]
    wake_epoch: int
    leave: bool
    in_flight: bool

    @property
    def is_pause(self) -> bool:
        """Nothing to run and nothing to take in: all ranks wait for the driver together."""
        return self.geometry is None and not (any(self.intake_bytes) or self.in_flight or self.leave)


def choose_graph(
    kinds: Sequence[BatchKind], num_tokens_per_dp_rank: Sequence[int], graphs: CapturePlan
) -> tuple[CaptureEntry | None, str | None]:
    """The one graph that all ranks replay, or why all run eagerly.

    It is looked up by the largest count of any rank, not by their sum: every rank, an idle one too, pads to its bucket.
    A rank that decodes beside one that prefills replays a prefill graph too, with one token a request; so do the rows
    that decode in a mixed step.

    Args:
        kinds: what each DP rank wants to run; at least one is not idle.
        num_tokens_per_dp_rank: tokens of each, 0 when idle.
        graphs: the committed graphs, equal on every rank.
    """
    step = "prefill" if any(kind.prefills for kind in kinds) else "decode"
    largest = max(num_tokens_per_dp_rank)
    candidates = [entry for entry in graphs.entries if KINDS[entry.kind].serves == step]
    if not candidates:
        return None, EAGER_NO_GRAPHS
    fitting = [entry for entry in candidates if entry.num_tokens >= largest]
    if not fitting:
        return None, EAGER_TOO_LARGE
    return min(fitting, key=lambda entry: entry.num_tokens), None


def derive_plan(proposals: list[Proposal], layout: Layout, capacity: int, graphs: CapturePlan) -> StepPlan:
    """The plan that follows from all ranks' proposals; a pure function, so all ranks derive the same.

    Args:
        proposals: one a rank, in rank order, of ranks whose states are alike.
        layout: the arrangement of ranks, equal on every rank.
        capacity: the most rows one rank may dispatch, equal on every rank.
        graphs: the committed graphs, equal on every rank.

    Raises:
        GeometryError: on every rank alike; names the field, the ranks and their values.
    """
    _require_equal("step", proposals, range(layout.world_size))
    if layout.attn_tp_size > 1:
        for dp_rank in range(layout.dp_size):
            for name in ("kind", "num_tokens", "num_due", "batch_digest"):
                _require_equal(name, proposals, layout.ranks_of(dp_rank))
    leaders = proposals[:: layout.attn_tp_size]
    kinds = tuple([_BATCH_KINDS[leader.kind] for leader in leaders])
    num_tokens = tuple([leader.num_tokens for leader in leaders])
    geometry, graph, eager_reason = None, None, None
    if any(kind is not BatchKind.IDLE for kind in kinds):
        graph, eager_reason = choose_graph(kinds, num_tokens, graphs)
        if graph is not None:
            geometry = _captured_geometry(layout, graph.num_tokens, capacity)
        else:
            counts = tuple(max(1, count) for count in num_tokens)
            geometry = StepGeometry.eager(layout, counts, capacity=capacity)
    return StepPlan(
        step=proposals[0].step,
        kinds=kinds,
        num_tokens_per_dp_rank=num_tokens,
        geometry=geometry,
        graph=graph,
        eager_reason=eager_reason,
        intake_bytes=tuple([leader.intake_bytes for leader in leaders]),
        wake_epoch=min([proposal.wake_epoch for proposal in proposals]),
        leave=any(proposal.leave for proposal in proposals),
        in_flight=any(proposal.in_flight for proposal in proposals),
    )


@lru_cache(maxsize=512)
def _captured_geometry(layout: Layout, num_tokens: int, capacity: int) -> StepGeometry:
    """Geometries of graphs come back step after step, and a step's plan is on its critical path."""
    return StepGeometry.captured(layout, num_tokens, capacity=capacity)


def _require_equal(name: str, proposals: list[Proposal], ranks: range) -> None:
    values = [getattr(proposals[rank], name) for rank in ranks]
    if values.count(values[0]) < len(values):
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True))
        raise GeometryError(f"ranks disagree before a step: {name} differs ({listed})")
