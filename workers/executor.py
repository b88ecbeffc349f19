"""Running a planned step on one rank: replay the graph that all ranks replay, or run eagerly as all do.

A step is launched, and its rows are waited for later: on a GPU the next step can be made ready meanwhile. What the
next step needs of them stays on the device.
"""

import time

import torch

from ..dispatch.errors import RankError
from ..graphs.lockstep import LockstepRank
from .model.target import TargetModel
from .scheduling.inputs import PackedStep, dummy, pack
from .scheduling.rows import Row, StepRows
from .scheduling.sampler import sample
from .scheduling.scheduler import ScheduledBatch
from .sharing import SharingRanks
from .step_plan import StepPlan

_POLL_S = 20e-6


class SampledRows:
    """Rows of a launched step, on their way to the host.

    Args:
        rows: on the host; from a GPU their copy may be under way.
        copied: set once it is not; `None` where there was nothing to copy.
    """

    def __init__(self, rows: StepRows, copied: torch.cuda.Event | None):
        self._rows = rows
        self._copied = copied

    def wait(self, timeout_s: float) -> list[Row]:
        """The rows.

        Raises:
            RankError: the device has not finished in time, because it waits for another rank most likely.
        """
        deadline = time.monotonic() + timeout_s
        while self._copied is not None and not self._copied.query():
            if time.monotonic() > deadline:
                raise RankError(
                    f"a step on this rank's GPU timed out after {timeout_s:g} s (worker.step_timeout_s, less the "
                    "driver's time to report it)"
                )
            time.sleep(_POLL_S)
        return self._rows.rows()


class StepExecutor:
    """Runs steps of the target model.

    Args:
        model: with its cache.
        graphs: the committed graphs of this rank.
        sharing: the ranks that share this rank's batch, and take the rows of their leader.
    """

    def __init__(self, model: TargetModel, graphs: LockstepRank, sharing: SharingRanks):
        self._model = model
        self._graphs = graphs
        self._sharing = sharing
        self._rows = StepRows.none(model.device)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, plan: StepPlan) -> SampledRows:
        """Launch the step. Every rank calls it in every step, an idle one with an empty batch.

        Args:
            batch: what this DP rank scheduled. Tokens whose values are not known yet are the last step's.
            plan: equal on every rank; has a geometry.

        Returns:
            What the step yields for the slices that reach the end of their sequence, in order.
        """
        self._rows = self._sample(batch, *self._logits(batch, plan))
        if not self._rows.token_ids_N.is_cuda:
            return SampledRows(self._rows, None)
        on_host = self._rows.pinned()
        copied = torch.cuda.Event()
        copied.record()
        return SampledRows(on_host, copied)

    def _logits(self, batch: ScheduledBatch, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[N, V]` logits of the slices that reach the end of their sequence, and packed greedy rows of a graph."""
        assert plan.geometry is not None
        packed = pack(batch, self._model.cache.block_size, pin=self._model.device.type == "cuda")
        if plan.graph is None and not batch.slices:
            packed = PackedStep(dummy())
        inputs = packed.on(self._model.device, self._rows.token_ids_N)
        if plan.graph is not None:
            runner = self._graphs.runners[plan.graph.kind]
            return runner.replay(plan.graph, inputs.values(), batch.num_due, packed.inputs.values())
        self._graphs.count_eager(plan.eager_reason or "")
        return self._model.forward(inputs, plan.geometry, on_host=packed.inputs)[: batch.num_due], None

    def _sample(self, batch: ScheduledBatch, logits_NV: torch.Tensor, greedy_NF: torch.Tensor | None) -> StepRows:
        """The leader's rows, on every rank that shares the batch: two ranks must never continue differently."""
        sequences = [piece.sequence for piece in batch.slices if piece.reaches_end]
        if self._sharing.step_group is None or not sequences:
            return sample(logits_NV, sequences, greedy_NF)
        own = sample(logits_NV, sequences, greedy_NF) if self._sharing.is_leader else None
        return StepRows.shared(own, len(sequences), self._sharing, logits_NV.device)
