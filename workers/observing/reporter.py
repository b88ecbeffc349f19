"""What a rank's steps did and how long they took: counted, remembered, and handed to the driver."""

import time
from bisect import bisect_left

import msgspec

from ...dispatch.expert_load import ExpertLoad
from ..mailbox import Outbox
from ..request import STEP_TIME_BOUNDS_S, Completion, Progress, RankStats
from ..scheduling.scheduler import BatchKind, ScheduledBatch, Scheduler
from ..sharing import SharingRanks
from ..step_plan import StepPlan
from .trace import StepTrace, TraceEvent

_PROGRESS_INTERVAL_S = 0.5

Stage = tuple[str, float, float]
"""Of a step: its name, and when it began and ended by `time.perf_counter`."""


class StepReporter:
    """Counts and hands out what one rank's loop does.

    Args:
        sharing: the ranks that share this rank's batch.
        scheduler: requests of this rank's DP rank.
        outbox: where completions go; read at the leader.
        overlap: whether a step is launched before the one before it has come back.
        trace: remembers the stages of steps; `None` where nobody asks for them.
        expert_load: what the MoE layers count into; `None` where they do not.
    """

    def __init__(
        self,
        sharing: SharingRanks,
        scheduler: Scheduler,
        outbox: Outbox,
        overlap: bool,
        trace: StepTrace | None,
        expert_load: ExpertLoad | None,
    ):
        self._sharing = sharing
        self._scheduler = scheduler
        self._outbox = outbox
        self._overlap = overlap
        self._trace = trace
        self._expert_load = expert_load
        self._stats = RankStats(sharing.dp_rank)
        self._step_times = [0] * (len(STEP_TIME_BOUNDS_S) + 1)
        self._dispatched_rows = [0] * len(sharing.ranks)
        self._next_progress = 0.0

    def hand_out(self, completions: list[Completion]) -> None:
        if not self._sharing.is_leader:
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

    def note_launch(
        self, batch: ScheduledBatch, plan: StepPlan, schedule: Stage, agree: Stage, launch: Stage | None
    ) -> None:
        """Count and remember an iteration up to its launch; one without is no step, and remembered all the same."""
        if launch is None:
            self._remember(batch, plan, schedule, agree)
            return
        self._remember(batch, plan, schedule, agree, launch)
        self._add(
            steps=1,
            replayed_steps=plan.graph is not None,
            decode_steps=batch.kind is BatchKind.DECODE,
            mixed_steps=batch.kind is BatchKind.MIXED,
            idle_steps=batch.kind is BatchKind.IDLE,
            prompt_tokens=batch.num_prompt_tokens,
            agree_seconds=agree[2] - agree[1],
        )
        assert plan.geometry is not None
        for index, rank in enumerate(self._sharing.ranks):
            self._dispatched_rows[index] += plan.geometry.num_rows_per_rank[rank]

    def hand_out_step(
        self, batch: ScheduledBatch, plan: StepPlan, completions: list[Completion], num_generated: int, wait: Stage
    ) -> None:
        """Hand out what a launched step finished, once its rows are taken in."""
        self._add(generated_tokens=num_generated)
        self.hand_out(completions)
        self._remember(batch, plan, wait, ("resolve", wait[2], time.perf_counter()))

    def end_step(self, batch: ScheduledBatch, started: float, launch: Stage | None) -> None:
        """After what the step finished is handed out, so what goes along with that has neither time of this step.

        Also where nothing was launched: take in what layers have counted, as far as it has come back from the device.
        """
        if launch is not None:
            seconds, decodes = time.perf_counter() - started, batch.kind is BatchKind.DECODE
            self._step_times[bisect_left(STEP_TIME_BOUNDS_S, seconds)] += 1
            self._add(
                step_seconds=seconds,
                decode_seconds=seconds if decodes else 0.0,
                decode_model_seconds=launch[2] - launch[1] if decodes and not self._overlap else 0.0,
            )
        if self._expert_load is not None:
            self._expert_load.poll()

    def _remember(self, batch: ScheduledBatch, plan: StepPlan, *stages: Stage) -> None:
        if self._trace is None:
            return
        graph = plan.eager_reason if plan.graph is None else str(plan.graph)
        kind, num_tokens = batch.kind.name.lower(), batch.num_tokens
        self._trace.add(
            *(TraceEvent(name, plan.step, began, ended, kind, num_tokens, graph) for name, began, ended in stages)
        )

    def leave(self) -> None:
        """All ranks leave the loop: what unfinished requests have gained goes along, however recently it last did."""
        self._next_progress = 0.0
        self.settle()

    def settle(self) -> None:
        """Nothing is under way: counters say all of what was done, the last step's time included."""
        if self._expert_load is not None:
            self._expert_load.settle()
        self.hand_out([])

    def _add(self, **amounts: float) -> None:
        sums = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
        self._stats = msgspec.structs.replace(self._stats, **sums)
