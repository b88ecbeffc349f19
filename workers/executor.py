"""Running a planned step on one rank: replay the graph that all ranks replay, or run eagerly as all do.

A step is launched, and its tokens are waited for later: on a GPU the next step can be made ready meanwhile. What the
next step needs of them stays on the device.
"""

import time

import torch
import torch.distributed as dist

from ..dispatch.errors import RankError
from ..graphs.lockstep import LockstepRank
from .model.target import TargetModel
from .scheduling.inputs import PackedStep, dummy, pack
from .scheduling.sampler import sample
from .scheduling.scheduler import ScheduledBatch
from .sharing import SharingRanks
from .step_plan import StepPlan

_POLL_S = 20e-6


class SampledTokens:
    """Tokens of a launched step, on their way to the host.

    Args:
        tokens_N: `[N]` int64 on the host; on a GPU their copy may be under way.
        copied: set once it is not; `None` where there was nothing to copy.
    """

    def __init__(self, tokens_N: torch.Tensor, copied: torch.cuda.Event | None):
        self._tokens_N = tokens_N
        self._copied = copied

    def wait(self, timeout_s: float) -> list[int]:
        """The tokens.

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
        return self._tokens_N.tolist()


class StepExecutor:
    """Runs steps of the target model.

    Args:
        model: with its cache.
        graphs: the committed graphs of this rank.
        sharing: the ranks that share this rank's batch, and take the tokens of their leader.
    """

    def __init__(self, model: TargetModel, graphs: LockstepRank, sharing: SharingRanks):
        self._model = model
        self._graphs = graphs
        self._sharing = sharing
        self._tokens_N = torch.empty(0, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, plan: StepPlan) -> SampledTokens:
        """Launch the step. Every rank calls it in every step, an idle one with an empty batch.

        Args:
            batch: what this DP rank scheduled. Tokens whose values are not known yet are the last step's.
            plan: equal on every rank; has a geometry.

        Returns:
            The next tokens of the slices that reach the end of their sequence, in order.
        """
        self._tokens_N = self._sample(batch, *self._logits(batch, plan))
        if not self._tokens_N.is_cuda:
            return SampledTokens(self._tokens_N, None)
        on_host = torch.empty(self._tokens_N.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(self._tokens_N, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return SampledTokens(on_host, copied)

    def _logits(self, batch: ScheduledBatch, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[N, V]` logits of the slices that reach the end of their sequence, and `[N]` greedy tokens of a graph."""
        assert plan.geometry is not None
        packed = pack(batch, self._model.cache.block_size, pin=self._model.device.type == "cuda")
        if plan.graph is None and not batch.slices:
            packed = PackedStep(dummy())
        inputs = packed.on(self._model.device, self._tokens_N)
        if plan.graph is not None:
            self._graphs.count_replay(plan.graph)
            runner = self._graphs.runners[plan.graph.kind]
            logits_NV = runner.replay(plan.graph, inputs.values(), batch.num_due, packed.inputs.values())
            return logits_NV, runner.finished(plan.graph, batch.num_due)
        self._graphs.count_eager(plan.eager_reason or "")
        return self._model.forward(inputs, plan.geometry, on_host=packed.inputs)[: batch.num_due], None

    def _sample(self, batch: ScheduledBatch, logits_NV: torch.Tensor, greedy_N: torch.Tensor | None) -> torch.Tensor:
        """The leader's tokens, on every rank that shares the batch: two ranks must never continue differently."""
        sequences = [piece.sequence for piece in batch.slices if piece.reaches_end]
        if self._sharing.step_group is None or not sequences:
            return sample(logits_NV, sequences, greedy_N)
        tokens_N = torch.empty(len(sequences), dtype=torch.int64, device=logits_NV.device)
        if self._sharing.is_leader:
            tokens_N = sample(logits_NV, sequences, greedy_N)
        dist.broadcast(tokens_N, src=self._sharing.leader, group=self._sharing.step_group)
        return tokens_N
