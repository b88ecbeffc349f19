"""A rank's half of lockstep capture: agree, rehearse, record, commit. The driver's half calls these on all ranks.

Nothing in agree and rehearse communicates with another rank, so until the driver has compared what all ranks would
freeze, nothing can hang. Recording runs collectives; by then all ranks have rehearsed the same ones in the same order.
A rank never skips an entry alone, and never keeps a graph that not all ranks have.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from ..dispatch.errors import GeometryError
from .plan import CaptureEntry, CapturePlan
from .record import RecordedGeometry
from .report import AgreeReply, GraphReport
from .runner import GraphRunner


class LockstepRank:
    """Graphs of one rank, and the calls through which the driver has them made.

    Args:
        rank: this rank.
        runners: by kind.
        can_record: whether this rank's means (KV slots, workspace, memory) allow an entry; the reason if not.

    Attributes:
        capture_depth: captures under way, of which the driver opens and closes one at a time: 1 while graphs are
            recorded, 0 for every step.
    """

    def __init__(self, rank: int, runners: Mapping[str, GraphRunner], can_record: Callable[[CaptureEntry], str | None]):
        self.capture_depth = 0
        self.runners = dict(runners)
        self._rank = rank
        self._can_record = can_record
        self._recorded: dict[CaptureEntry, RecordedGeometry] = {}
        self.commit_plan(CapturePlan(()))
        self._eager: Counter[str] = Counter()

    def agree(self, plan: CapturePlan) -> AgreeReply:
        """Check the plan against this rank's means."""
        refused = [(entry, reason) for entry in plan.entries if (reason := self._can_record(entry)) is not None]
        return AgreeReply(self._rank, plan.digest, tuple(refused))

    @torch.inference_mode()
    def rehearse(self, plan: CapturePlan) -> tuple[RecordedGeometry, ...]:
        """What a recording of each entry would freeze, one capture deeper than now; sends nothing."""
        return tuple(self.runners[entry.kind].rehearse(entry, self.capture_depth + 1) for entry in plan.entries)

    def begin(self) -> None:
        """Enter capture mode, and forget the graphs of before."""
        self.discard()
        self.capture_depth += 1

    @torch.inference_mode()
    def warm_up(self, entry: CaptureEntry) -> None:
        """Collective: every rank warms up the same entry."""
        self._require_capture(entry)
        self.runners[entry.kind].warm_up(entry)

    @torch.inference_mode()
    def record(self, entry: CaptureEntry) -> RecordedGeometry:
        """Collective: every rank records the same entry. Returns what was frozen.

        Raises:
            GeometryError: the entry cannot be recorded; names it, and says what to do.
        """
        self._require_capture(entry)
        try:
            frozen = self.runners[entry.kind].record(entry, self.capture_depth)
        except GeometryError as error:
            raise GeometryError(f"rank {self._rank} cannot record {entry}: {error}") from error
        self._recorded[entry] = frozen
        return frozen

    def end(self) -> int:
        """Leave capture mode; returns the depth that is left, 0, for the driver to compare.

        Raises:
            GeometryError: another capture is still open, also where it is on every rank alike: what was recorded then
                is of a depth that no step has.
        """
        self.capture_depth -= 1
        if self.capture_depth:
            raise GeometryError(
                f"rank {self._rank} is {self.capture_depth} deep in capture mode after the last recording, and has to "
                "be out of it"
            )
        return self.capture_depth

    def commit(self, plan: CapturePlan) -> int:
        """Use exactly the graphs of this plan from now on; returns the digest of what is held."""
        missing = [str(entry) for entry in plan.entries if entry not in self._recorded]
        if missing or len(self._recorded) != len(plan.entries):
            raise GeometryError(
                f"rank {self._rank} is to hold {len(plan.entries)} graphs and recorded {len(self._recorded)}; "
                f"missing: {', '.join(missing) or 'none'}"
            )
        self.commit_plan(plan)
        return self.committed_digest

    def fail(self, message: str) -> None:
        """The driver gives the capture up: leave capture mode, hold no graphs, and raise on this rank too."""
        self.capture_depth = 0
        self.discard()
        raise GeometryError(message)

    def discard(self) -> None:
        """Hold no graphs."""
        for runner in self.runners.values():
            runner.discard()
        self._recorded.clear()
        self.commit_plan(CapturePlan(()))

    def commit_plan(self, plan: CapturePlan) -> None:
        self.committed = plan
        self.committed_digest = plan.digest

    def count_eager(self, reason: str) -> None:
        self._eager[reason] += 1

    def report(self) -> GraphReport:
        """Which graphs exist, what they hold, and how often they ran."""
        pools = {id(runner.buffers): runner.buffers.num_bytes for runner in self.runners.values()}
        backends = sorted({runner.backend.name for runner in self.runners.values()})
        return GraphReport(
            rank=self._rank,
            backend=", ".join(backends) or "none",
            static_bytes=sum(pools.values()),
            graphs=tuple(self.runners[entry.kind].use(entry) for entry in self.committed.entries),
            eager_steps=tuple(sorted(self._eager.items())),
        )

    def _require_capture(self, entry: CaptureEntry) -> None:
        if not self.capture_depth:
            raise GeometryError(f"rank {self._rank} is asked to record {entry} outside capture mode")
