"""The loop of one rank: take in, schedule, agree, launch, hand out. One agreement, one plan, one forward.

With overlap, the rows of a step are waited for after the next one has been launched: scheduling, agreement and
packing happen while the device runs. Otherwise they are waited for at once.
"""

import logging
import time
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from .agreement import Agreement, StateReader
from .config import WorkerConfig
from .executor import SampledRows, StepExecutor
from .mailbox import Inbox, Intake
from .observing.reporter import Stage, StepReporter
from .scheduling.scheduler import ScheduledBatch, Scheduler
from .sharing import SharingRanks
from .step_plan import Proposal, StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launched:
    """A step under way."""

    batch: ScheduledBatch
    plan: StepPlan
    rows: SampledRows


class StepLoop:
    """Runs until every rank is told to leave; may be run again afterwards, requests under way go on.

    Args:
        worker: how ranks compute: with overlap or without, and how long a launched step may take; equal on every rank.
        sharing: the ranks that share this rank's batch.
        scheduler: requests of this rank's DP rank.
        agreement: the host all-gather.
        state: what must be alike on all ranks, read from the live objects; compared in every agreement.
        executor: runs a planned step.
        inbox: where requests come from; those of a DP rank come to its leader.
        reporter: counts what steps did, and hands completions out.

    Attributes:
        stage_began: `time.monotonic()` when the present stage of an iteration began (all up to the agreement, the
            launch, the wait); `None` outside iterations. No stage outlasts `peer_wait_s`, unless a call hangs.
        step: iterations since the start.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        sharing: SharingRanks,
        scheduler: Scheduler,
        agreement: Agreement,
        state: StateReader,
        executor: StepExecutor,
        inbox: Inbox,
        reporter: StepReporter,
    ):
        self._overlap = worker.overlaps
        self._peer_wait_s = worker.peer_wait_s
        self._sharing = sharing
        self._scheduler = scheduler
        self._agreement = agreement
        self._state = state
        self._executor = executor
        self._inbox = inbox
        self._reporter = reporter
        self._under_way: _Launched | None = None
        self.step = 0
        self.stage_began: float | None = None

    def run(self) -> None:
        """Returns once all ranks leave. What was scheduled then is scheduled again when the loop runs again."""
        while True:
            started = time.perf_counter()
            self.stage_began = time.monotonic()
            intake, wake_epoch, leave = self._inbox.take()
            encoded = b""
            if self._sharing.host_group is None:
                self._accept(intake)
            elif intake:
                encoded = msgspec.msgpack.encode(intake)
            batch = self._scheduler.schedule()
            scheduled = time.perf_counter()
            plan = self._agreement.agree(
                Proposal(
                    step=self.step,
                    kind=batch.kind,
                    num_tokens=batch.num_tokens,
                    num_due=batch.num_due,
                    batch_digest=0 if self._sharing.host_group is None else batch.digest,
                    intake_bytes=len(encoded),
                    wake_epoch=wake_epoch,
                    leave=int(leave),
                    in_flight=int(self._under_way is not None),
                ),
                self._state,
            )
            self.step += 1
            self._run_step(batch, plan, started, scheduled)
            if num_bytes := plan.intake_bytes[self._sharing.dp_rank]:
                self._accept(self._share_intake(encoded, num_bytes))
            if plan.leave:
                self._reporter.leave()
                return
            if plan.is_pause:
                self._reporter.settle()
                self.stage_began = None
                logger.debug("all ranks pause")
                self._inbox.wait_beyond(plan.wake_epoch)

    def _run_step(self, batch: ScheduledBatch, plan: StepPlan, started: float, scheduled: float) -> None:
        """Launch this step, if there is one, and take in what has come back."""
        agreed = time.perf_counter()
        self.stage_began = time.monotonic()
        before, self._under_way = self._under_way, None
        launch: Stage | None = None
        if plan.geometry is not None and not plan.leave:
            launched = _Launched(batch, plan, self._executor.run(batch, plan))
            self.stage_began = time.monotonic()
            launch = "launch", agreed, time.perf_counter()
            self._scheduler.launch(batch)
            if self._overlap:
                self._under_way = launched
            else:
                before = launched
        self._reporter.note_launch(batch, plan, ("schedule", started, scheduled), ("agree", scheduled, agreed), launch)
        if before is not None:
            self._finish(before)
        self._reporter.end_step(batch, started, launch)

    def _finish(self, launched: _Launched) -> None:
        began = time.perf_counter()
        rows = launched.rows.wait(self._peer_wait_s)
        waited = time.perf_counter()
        due = [piece.sequence for piece in launched.batch.slices if piece.reaches_end]
        num_generated = sum(not sequence.is_over for sequence in due)
        completions = self._scheduler.resolve(launched.batch, rows)
        wait = "wait", began, waited
        self._reporter.hand_out_step(launched.batch, launched.plan, completions, num_generated, wait)

    def _accept(self, intake: Intake) -> None:
        refused = [self._scheduler.add(request) for request in intake.requests]
        for key in intake.aborts:
            self._scheduler.abort(key)
        completions = [completion for completion in refused if completion is not None]
        if intake:
            self._reporter.hand_out(completions)

    def _share_intake(self, encoded: bytes, num_bytes: int) -> Intake:
        """Bring the leader's requests to the ranks that share its batch; all accept them at the same step."""
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        if self._sharing.is_leader:
            buffer.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        dist.broadcast(buffer, src=self._sharing.leader, group=self._sharing.host_group)
        return msgspec.msgpack.decode(buffer.numpy().tobytes(), type=Intake)
