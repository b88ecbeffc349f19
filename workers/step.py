"""The loop of one rank: take in, schedule, agree, launch, hand out. One agreement, one plan, one forward.

With overlap, the tokens of a step are waited for after the next one has been launched: scheduling, agreement and
packing happen while the device runs. Otherwise they are waited for at once.
"""

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from ..dispatch.budgets.layout import Layout
from ..dispatch.expert_load import ExpertLoad
from .agreement import Agreement, Proposal, StateReader, StepPlan
from .executor import SampledTokens, StepExecutor
from .mailbox import Inbox, Intake, Outbox
from .observing.trace import StepTrace, TraceEvent
from .request import STEP_TIME_BOUNDS_S, Completion, Progress, RankStats
from .scheduling.sampler import NOT_FINITE
from .scheduling.scheduler import BatchKind, ScheduledBatch, Scheduler
from .scheduling.sequence import RunningRequest

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class _Launched:
    """A step under way."""

    batch: ScheduledBatch
    plan: StepPlan
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
        trace: remembers the stages of steps; `None` where nobody asks for them.
        expert_load: what the MoE layers count into; `None` where they do not.

    Attributes:
        stage_began: `time.monotonic()` when the present stage of an iteration began (all up to the agreement, the
            launch, the wait); `None` outside iterations. No stage outlasts `peer_wait_s`, unless a call hangs.
        step: iterations since the start.
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
        trace: StepTrace | None = None,
        expert_load: ExpertLoad | None = None,
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
        self._trace = trace
        self._expert_load = expert_load
        self._under_way: _Launched | None = None
        self._stats = RankStats(self._dp_rank)
        self._step_times = [0] * (len(STEP_TIME_BOUNDS_S) + 1)
        self._sharing_ranks = layout.ranks_of(self._dp_rank)
        self._dispatched_rows = [0] * len(self._sharing_ranks)
        self.step = 0
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
            scheduled = time.perf_counter()
            plan = self._agreement.agree(
                Proposal(
                    state_digest=self._state.digest(),
                    step=self.step,
                    kind=batch.kind,
                    num_tokens=batch.num_tokens,
                    num_due=batch.num_due,
                    batch_digest=0 if self._sharing_group is None else batch.digest,
                    intake_bytes=len(encoded),
                    wake_epoch=wake_epoch,
                    leave=int(leave),
                    in_flight=int(self._under_way is not None),
                ),
                self._state,
            )
            agreed = time.perf_counter()
            if self._trace is not None:
                self._remember(batch, plan, ("schedule", started, scheduled), ("agree", scheduled, agreed))
            self.step += 1
            self._run_step(batch, plan, started, agreed - scheduled)
            if plan.intake_bytes[self._dp_rank]:
                self._accept(self._share_intake(encoded, plan.intake_bytes[self._dp_rank]))
            if plan.leave:
                self._next_progress = 0.0
                self._settle()
                return
            if plan.is_pause:
                self._settle()
                self.stage_began = None
                logger.debug("all ranks pause")
                self._inbox.wait_beyond(plan.wake_epoch)

    def _run_step(self, batch: ScheduledBatch, plan: StepPlan, started: float, agree_seconds: float) -> None:
        """Launch this step, if there is one, and take in what has come back."""
        self.stage_began = time.monotonic()
        before, self._under_way = self._under_way, None
        launches = plan.geometry is not None and not plan.leave
        if launches:
            model_started = time.perf_counter()
            launched = _Launched(batch, plan, self._executor.run(batch, plan))
            self.stage_began = time.monotonic()
            model_ended = time.perf_counter()
            self._scheduler.launch(batch)
            self._count_launched(batch, plan, agree_seconds)
            if self._trace is not None:
                self._remember(batch, plan, ("launch", model_started, model_ended))
            if self._overlap:
                self._under_way = launched
            else:
                before = launched
        if before is not None:
            self._finish(before)
        if launches:
            self._count_time(batch, time.perf_counter() - started, model_ended - model_started)
        if self._expert_load is not None:
            self._expert_load.poll()

    def _finish(self, launched: _Launched) -> None:
        began = time.perf_counter()
        tokens = launched.tokens.wait(self._peer_wait_s)
        waited = time.perf_counter()
        due = [piece.sequence for piece in launched.batch.slices if piece.reaches_end]
        results = [_result(token, sequence) for token, sequence in zip(tokens, due, strict=True)]
        self._add(generated_tokens=sum(not sequence.is_over for sequence in due))
        self._hand_out(self._scheduler.resolve(launched.batch, results))
        if self._trace is not None:
            stages = ("wait", began, waited), ("resolve", waited, time.perf_counter())
            self._remember(launched.batch, launched.plan, *stages)

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
            num_kv_blocks=self._scheduler.num_blocks,
            step_times=tuple(self._step_times),
            dispatched_rows=tuple(self._dispatched_rows),
        )
        self._outbox.publish(completions, self._stats, self._progress())

    def _progress(self) -> list[Progress]:
        """Now and then what unfinished requests have gained, so that they could go on elsewhere; no work of a step."""
        now = time.monotonic()
        if now < self._next_progress:
            return []
        self._next_progress = now + _PROGRESS_INTERVAL_S
        return self._scheduler.progress()

    def _count_launched(self, batch: ScheduledBatch, plan: StepPlan, agree_seconds: float) -> None:
        self._add(
            steps=1,
            replayed_steps=plan.graph is not None,
            decode_steps=batch.kind is BatchKind.DECODE,
            idle_steps=batch.kind is BatchKind.IDLE,
            prompt_tokens=batch.num_tokens if batch.kind is BatchKind.PREFILL else 0,
            agree_seconds=agree_seconds,
        )
        assert plan.geometry is not None
        for index, rank in enumerate(self._sharing_ranks):
            self._dispatched_rows[index] += plan.geometry.num_rows_per_rank[rank]

    def _count_time(self, batch: ScheduledBatch, seconds: float, model_seconds: float) -> None:
        """After what the step finished is handed out, so what goes along with that has neither time of this step."""
        decodes = batch.kind is BatchKind.DECODE
        self._step_times[bisect_left(STEP_TIME_BOUNDS_S, seconds)] += 1
        self._add(
            step_seconds=seconds,
            decode_seconds=seconds if decodes else 0.0,
            decode_model_seconds=model_seconds if decodes and not self._overlap else 0.0,
        )

    def _remember(self, batch: ScheduledBatch, plan: StepPlan, *stages: tuple[str, float, float]) -> None:
        assert self._trace is not None
        graph = plan.eager_reason if plan.graph is None else str(plan.graph)
        kind, num_tokens = batch.kind.name.lower(), batch.num_tokens
        self._trace.add(
            *(TraceEvent(name, plan.step, began, ended, kind, num_tokens, graph) for name, began, ended in stages)
        )

    def _settle(self) -> None:
        """Nothing is under way: counters say all of what was done, the last step's time included."""
        if self._expert_load is not None:
            self._expert_load.settle()
        self._hand_out([])

    def _add(self, **amounts: float) -> None:
        sums = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
        self._stats = msgspec.structs.replace(self._stats, **sums)


def _result(token: int, sequence: RunningRequest) -> int | str:
    if token == NOT_FINITE:
        return f"the model's logits are not finite after {len(sequence.token_ids)} tokens"
    return token
