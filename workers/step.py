"""The loop of one rank: take in, schedule, agree, launch, hand out. One agreement, one plan, one forward.

With overlap, the tokens of a step are waited for after the next one has been launched: scheduling, agreement and
packing happen while the device runs. Otherwise they are waited for at once.
"""

import time
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from ..dispatch.layout import Layout
from .agreement import Agreement, Proposal, StateReader, StepPlan
from .executor import SampledTokens, StepExecutor
from .mailbox import Inbox, Intake, Outbox
from .request import Completion, Progress, RankStats
from .sampler import NOT_FINITE
from .scheduler import BatchKind, ScheduledBatch, Scheduler
from .sequence import Sequence

_PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class _Launched:
    """A step under way."""

    batch: ScheduledBatch
    tokens: SampledTokens


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
        overlap: whether a step is launched before the one before it has come back; equal on every rank.
        peer_wait_s: how long a launched step may take.

    Attributes:
        stage_began: `time.monotonic()` when the present stage of an iteration began (all up to the agreement, the
            launch, the wait); `None` outside iterations. No stage outlasts `peer_wait_s`, unless a call hangs.
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
        overlap: bool,
        peer_wait_s: float,
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
        self._overlap = overlap
        self._peer_wait_s = peer_wait_s
        self._under_way: _Launched | None = None
        self._stats = RankStats(self._dp_rank)
        self._step = 0
        self._next_progress = 0.0
        self.stage_began: float | None = None

    def run(self) -> None:
        """Returns once all ranks leave. What was scheduled then is scheduled again when the loop runs again."""
        while True:
            started = time.perf_counter()
            self.stage_began = time.monotonic()
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
                    in_flight=int(self._under_way is not None),
                ),
                self._state,
            )
            self._step += 1
            self._run_step(batch, plan, started)
            if plan.intake_bytes[self._dp_rank]:
                self._accept(self._share_intake(encoded, plan.intake_bytes[self._dp_rank]))
            if plan.leave:
                self._next_progress = 0.0
                self._hand_out([])
                return
            if plan.is_pause:
                self.stage_began = None
                self._inbox.wait_beyond(plan.wake_epoch)

    def _run_step(self, batch: ScheduledBatch, plan: StepPlan, started: float) -> None:
        """Launch this step, if there is one, and take in what has come back."""
        self.stage_began = time.monotonic()
        before, self._under_way = self._under_way, None
        launches = plan.geometry is not None and not plan.leave
        if launches:
            model_started = time.perf_counter()
            launched = _Launched(batch, self._executor.run(batch, plan))
            self.stage_began = time.monotonic()
            self._scheduler.launch(batch)
            self._count_launched(batch, plan, time.perf_counter() - model_started)
            if self._overlap:
                self._under_way = launched
            else:
                before = launched
        if before is not None:
            self._finish(before)
        if launches and batch.kind is BatchKind.DECODE:
            self._add(decode_seconds=time.perf_counter() - started)

    def _finish(self, launched: _Launched) -> None:
        tokens = launched.tokens.wait(self._peer_wait_s)
        due = [piece.sequence for piece in launched.batch.slices if piece.reaches_end]
        results = [_result(token, sequence) for token, sequence in zip(tokens, due, strict=True)]
        self._add(generated_tokens=sum(not sequence.is_over for sequence in due))
        self._hand_out(self._scheduler.resolve(launched.batch, results))

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
        self._outbox.publish(completions, self._stats, self._progress())

    def _progress(self) -> list[Progress]:
        """Now and then what unfinished requests have gained, so that they could go on elsewhere; no work of a step."""
        now = time.monotonic()
        if now < self._next_progress:
            return []
        self._next_progress = now + _PROGRESS_INTERVAL_S
        return self._scheduler.progress()

    def _count_launched(self, batch: ScheduledBatch, plan: StepPlan, model_seconds: float) -> None:
        decodes = batch.kind is BatchKind.DECODE
        self._add(
            steps=1,
            replayed_steps=plan.graph is not None,
            decode_steps=decodes,
            idle_steps=batch.kind is BatchKind.IDLE,
            decode_model_seconds=model_seconds if decodes else 0.0,
        )

    def _add(self, **amounts: float) -> None:
        sums = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
        self._stats = msgspec.structs.replace(self._stats, **sums)


def _result(token: int, sequence: Sequence) -> int | str:
    if token == NOT_FINITE:
        return f"the model's logits are not finite after {len(sequence.token_ids)} tokens"
    return token
