"""One plan for all ranks: a single host all-gather at the start of every iteration.

Each rank says what it wants to run, and a digest of everything that ranks must hold alike. All ranks then have the same
numbers, and derive the same plan from them with the same code; a disagreement is found by every rank, and raised on
every rank, before any collective of the step.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from ..dispatch.budgets.geometry import StepGeometry
from ..dispatch.budgets.layout import Layout
from ..dispatch.collectives import all_gather_tensors
from ..dispatch.errors import GeometryError
from ..dispatch.messages import gather_values
from ..dispatch.paths.held import HeldAlike
from ..dispatch.paths.path import ExpertPath
from ..graphs.lockstep import LockstepRank
from ..graphs.plan import CaptureEntry, CapturePlan
from ..graphs.record import differences
from .rank_config import RankConfig
from .scheduling.scheduler import BatchKind

_BATCH_KINDS = {kind.value: kind for kind in BatchKind}

EAGER_NO_GRAPHS = "no graph of this kind"
EAGER_TOO_LARGE = "larger than the largest graph"


class LocalState(msgspec.Struct, frozen=True):
    """What a rank holds that must be alike on all ranks.

    Attributes:
        config: what the rank was built from.
        held: the way to the experts.
        capture_depth: captures under way; a step of a running pool is outside all of them.
        graphs: the committed graphs, in order.
    """

    config: RankConfig
    held: HeldAlike
    capture_depth: int
    graphs: CapturePlan


class StateReader:
    """Reads a rank's state from the live objects, at every step.

    Args:
        config: what the rank was built from.
        path: to the experts.
        graphs: of this rank.
    """

    def __init__(self, config: RankConfig, path: ExpertPath, graphs: LockstepRank):
        self._config = config
        self._config_digest = config.digest
        self._path = path
        self._graphs = graphs

    def read(self) -> LocalState:
        return LocalState(self._config, self._path.held, self._graphs.mode.depth, self._graphs.committed)

    def digest(self) -> int:
        """One number for all of it; equal numbers mean equal states."""
        graphs = self._graphs
        # Configuration and graphs are long, and change rarely: their digests are kept.
        parts = (self._config_digest, self._path.held, graphs.mode.depth, graphs.committed_digest)
        return zlib.crc32(msgspec.msgpack.encode(parts))


class Proposal(NamedTuple):
    """What one rank brings to the agreement; each field travels as an int64.

    Attributes:
        state_digest: of its `LocalState`.
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

    state_digest: int
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
    A rank that decodes beside one that prefills replays the prefill graph too, with one token a request.

    Args:
        kinds: what each DP rank wants to run; at least one is not idle.
        num_tokens_per_dp_rank: tokens of each, 0 when idle.
        graphs: the committed graphs, equal on every rank.
    """
    name, largest = "piecewise" if BatchKind.PREFILL in kinds else "decode", max(num_tokens_per_dp_rank)
    candidates = [entry for entry in graphs.entries if entry.kind == name]
    if not candidates:
        return None, EAGER_NO_GRAPHS
    fitting = [entry for entry in candidates if entry.bucket >= largest]
    if not fitting:
        return None, EAGER_TOO_LARGE
    return min(fitting, key=lambda entry: entry.bucket), None


def derive_plan(proposals: list[Proposal], layout: Layout, capacity: int, graphs: CapturePlan) -> StepPlan:
    """The plan that follows from all ranks' proposals; a pure function, so all ranks derive the same.

    Args:
        proposals: one a rank, in rank order, with equal state digests.
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


class Agreement:
    """The host all-gather, on a host group that no step uses otherwise.

    Args:
        group: a Gloo group of all ranks, used for nothing that a step records.
        layout: the arrangement of ranks, equal on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout):
        self._group = group
        self._layout = layout
        self._sent = torch.zeros(1, len(Proposal._fields), dtype=torch.int64)
        self._received = torch.zeros(layout.world_size, len(Proposal._fields), dtype=torch.int64)
        # The same memory; plain integers go through NumPy in a fraction of the time.
        self._sent_row, self._received_rows = self._sent.numpy()[0], self._received.numpy()

    def agree(self, proposal: Proposal, state: StateReader) -> StepPlan:
        """Collective over all ranks; see `derive_plan` for what is refused.

        Args:
            proposal: with the digest of `state`.
            state: this rank's.
        """
        self._sent_row[:] = proposal
        all_gather_tensors(self._received, self._sent, group=self._group)
        proposals = [Proposal._make(row) for row in self._received_rows.tolist()]
        digests = [other.state_digest for other in proposals]
        local = state.read()
        if digests.count(digests[0]) < len(digests):
            self._explain(local)
        return derive_plan(proposals, self._layout, local.held.capacity, local.graphs)

    def _explain(self, state: LocalState) -> None:
        """All ranks have seen that their states differ, so all of them come here, show theirs, and raise alike."""
        shown = gather_values(state, LocalState, self._group)
        states = {f"rank {rank}": other for rank, other in enumerate(shown)}
        found = differences(states) or ["state digests differ"]
        raise GeometryError(f"ranks disagree before a step: {'; '.join(found)}")
