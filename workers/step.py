"""The loop of one rank: take in, schedule, agree, run, sample, hand out. One agreement, one plan, one forward."""

import time

import msgspec
import torch
import torch.distributed as dist

from ..dispatch.layout import Layout
from .agreement import Agreement, Proposal, StateReader, StepPlan
from .executor import StepExecutor
from .mailbox import Inbox, Intake, Outbox
from .request import Completion, RankStats
from .sampler import sample
from .scheduler import BatchKind, ScheduledBatch, Scheduler

_FAILED = -1


class StepLoop:
    """Runs until every rank is told to leave; may be run again afterwards, requests under way go on.

    Args:
        rank: this rank.
        layout: the arrangement of ranks, equal on every rank.
        scheduler: requests of this rank's DP rank.
        agreement: the host all-gather.
        state: what must be alike on all ranks, read from the live objects; compared in every agreement.
        executor: runs a planned step.
        inbox: where requests come from; those of a DP rank come to its leader.
        outbox: where completions go; read at the leader.
        sharing_group: a Gloo group of the ranks that share this rank's batch; `None` when it shares it with none.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        scheduler: Scheduler,
        agreement: Agreement,
        state: StateReader,
        executor: StepExecutor,
        inbox: Inbox,
        outbox: Outbox,
        sharing_group: dist.ProcessGroup | None,
    ):
        self._dp_rank = layout.dp_rank(rank)
        self._leader = layout.leader(self._dp_rank)
        self._is_leader = rank == self._leader
        self._scheduler = scheduler
        self._agreement = agreement
        self._state = state
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._sharing_group = sharing_group
        self._stats = RankStats(self._dp_rank)
        self._step = 0

    def run(self) -> None:
        """Returns once all ranks leave. What was scheduled then is scheduled again when the loop runs again."""
        while True:
            started = time.perf_counter()
            intake, wake_epoch, leave = self._inbox.take()
            encoded = b""
            if self._sharing_group is None:
                self._accept(intake)
            elif intake:
                encoded = msgspec.msgpack.encode(intake)
            batch = self._scheduler.schedule()
            plan = self._agreement.agree(
                Proposal(
                    state_digest=self._state.digest(),
                    step=self._step,
                    kind=batch.kind,
                    num_tokens=batch.num_tokens,
                    num_due=batch.num_due,
                    intake_bytes=len(encoded),
                    wake_epoch=wake_epoch,
                    leave=int(leave),
                ),
                self._state,
            )
            self._step += 1
            if plan.geometry is not None and not plan.leave:
                self._run_step(batch, plan, started)
            if plan.intake_bytes[self._dp_rank]:
                self._accept(self._share_intake(encoded, plan.intake_bytes[self._dp_rank]))
            if plan.leave:
                return
            if plan.is_pause:
                self._inbox.wait_beyond(plan.wake_epoch)

    def _run_step(self, batch: ScheduledBatch, plan: StepPlan, started: float) -> None:
        model_started = time.perf_counter()
        logits = self._executor.run(batch, plan)
        model_seconds = time.perf_counter() - model_started
        next_token_ids = self._sample(batch, logits)
        completions = self._scheduler.update(batch, next_token_ids)
        self._count(batch, plan, len(next_token_ids), model_seconds, time.perf_counter() - started)
        self._hand_out(completions)

    def _sample(self, batch: ScheduledBatch, logits_NV: torch.Tensor) -> list[int | str]:
        """The leader's tokens, on every rank that shares the batch: two ranks must never continue differently."""
        sequences = [piece.sequence for piece in batch.slices if piece.reaches_end]
        if self._sharing_group is None or not sequences:
            return sample(logits_NV, sequences)
        results = sample(logits_NV, sequences) if self._is_leader else []
        tokens = torch.tensor(
            [_FAILED if isinstance(result, str) else result for result in results] or [0] * len(sequences)
        )
        dist.broadcast(tokens, src=self._leader, group=self._sharing_group)
        return results or ["failed on the leader" if token == _FAILED else token for token in tokens.tolist()]

    def _accept(self, intake: Intake) -> None:
        refused = [self._scheduler.add(request) for request in intake.requests]
        for key in intake.aborts:
            self._scheduler.abort(key)
        completions = [completion for completion in refused if completion is not None]
        if intake:
            self._hand_out(completions)

    def _share_intake(self, encoded: bytes, num_bytes: int) -> Intake:
        """Bring the leader's requests to the ranks that share its batch; all accept them at the same step."""
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        if self._is_leader:
            buffer.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        dist.broadcast(buffer, src=self._leader, group=self._sharing_group)
        return msgspec.msgpack.decode(buffer.numpy().tobytes(), type=Intake)

    def _hand_out(self, completions: list[Completion]) -> None:
        if not self._is_leader:
            return
        self._stats = msgspec.structs.replace(
            self._stats,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            preemptions=self._scheduler.num_preemptions,
            free_kv_blocks=self._scheduler.num_free_blocks,
        )
        self._outbox.publish(completions, self._stats)

    def _count(
        self, batch: ScheduledBatch, plan: StepPlan, num_sampled: int, model_seconds: float, step_seconds: float
    ) -> None:
        stats, decodes = self._stats, batch.kind is BatchKind.DECODE
        self._stats = msgspec.structs.replace(
            stats,
            steps=stats.steps + 1,
            replayed_steps=stats.replayed_steps + (plan.graph is not None),
            decode_steps=stats.decode_steps + decodes,
            idle_steps=stats.idle_steps + (batch.kind is BatchKind.IDLE),
            generated_tokens=stats.generated_tokens + num_sampled,
            decode_seconds=stats.decode_seconds + (step_seconds if decodes else 0.0),
            decode_model_seconds=stats.decode_model_seconds + (model_seconds if decodes else 0.0),
        )
