"""One plan for all ranks: a single host all-gather at the start of every iteration.

Each rank says what it wants to run, and a digest of everything that ranks must hold alike. All ranks then have the same
numbers, and derive the same plan from them with the same code; a disagreement is found by every rank, and raised on
every rank, before any collective of the step.
"""

import zlib

import msgspec
import torch
import torch.distributed as dist

from ..dispatch.budgets.layout import Layout
from ..dispatch.collectives import all_gather_tensors
from ..dispatch.errors import GeometryError
from ..dispatch.expert_path import ExpertPath, HeldAlike
from ..dispatch.messages import gather_values
from ..graphs.lockstep import LockstepRank
from ..graphs.plan import CapturePlan
from ..graphs.record import differences
from .rank_config import RankConfig
from .step_plan import Proposal, StepPlan, derive_plan


class LocalState(msgspec.Struct, frozen=True):
    """What a rank holds that must be alike on all ranks.

    Attributes:
        config: what the rank was built from.
        held: the way to the experts.
        layers: what runs in the layers beside attention and experts.
        capture_depth: captures under way; a step of a running pool is outside all of them.
        graphs: the committed graphs, in order.
    """

    config: RankConfig
    held: HeldAlike
    layers: str
    capture_depth: int
    graphs: CapturePlan


class StateReader:
    """Reads a rank's state from the live objects, at every step.

    Args:
        config: what the rank was built from.
        path: to the experts.
        layers: what runs in its layers beside attention and experts.
        graphs: of this rank.
    """

    def __init__(self, config: RankConfig, path: ExpertPath, layers: str, graphs: LockstepRank):
        self._config = config
        self._config_digest = config.digest
        self._path = path
        self._layers = layers
        self._graphs = graphs

    def read(self) -> tuple[LocalState, int]:
        """The state, and one number for all of it; equal numbers mean equal states."""
        graphs, held = self._graphs, self._path.held
        # Configuration and graphs are long, and change rarely: their digests are kept.
        parts = (self._config_digest, held, self._layers, graphs.capture_depth, graphs.committed_digest)
        digest = zlib.crc32(msgspec.msgpack.encode(parts))
        return LocalState(self._config, held, self._layers, graphs.capture_depth, graphs.committed), digest


class Agreement:
    """The host all-gather, on a host group that no step uses otherwise.

    Args:
        group: a Gloo group of all ranks, used for nothing that a step records.
        layout: the arrangement of ranks, equal on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout):
        self._group = group
        self._layout = layout
        # The digest of a rank's state, and its proposal.
        self._sent = torch.zeros(1, 1 + len(Proposal._fields), dtype=torch.int64)
        self._received = torch.zeros(layout.world_size, 1 + len(Proposal._fields), dtype=torch.int64)
        # The same memory; plain integers go through NumPy in a fraction of the time.
        self._sent_row, self._received_rows = self._sent.numpy()[0], self._received.numpy()

    def agree(self, proposal: Proposal, state: StateReader) -> StepPlan:
        """Collective over all ranks; see `derive_plan` for what is refused.

        Args:
            proposal: this rank's.
            state: this rank's; read here, and held to the others' before their proposals are.
        """
        local, digest = state.read()
        self._sent_row[:] = digest, *proposal
        all_gather_tensors(self._received, self._sent, group=self._group)
        rows = self._received_rows.tolist()
        digests = [row[0] for row in rows]
        if digests.count(digests[0]) < len(digests):
            self._explain(local)
        proposals = [Proposal._make(row[1:]) for row in rows]
        return derive_plan(proposals, self._layout, local.held.capacity, local.graphs)

    def _explain(self, state: LocalState) -> None:
        """All ranks have seen that their states differ, so all of them come here, show theirs, and raise alike."""
        shown = gather_values(state, LocalState, self._group)
        states = {f"rank {rank}": other for rank, other in enumerate(shown)}
        found = differences(states) or ["state digests differ"]
        raise GeometryError(f"ranks disagree before a step: {'; '.join(found)}")
