"""Running a planned step on one rank: replay the graph that all ranks replay, or run eagerly as all do."""

import torch

from ..dispatch.counts import CountTensors
from ..graphs.lockstep import LockstepRank
from .agreement import StepPlan
from .inputs import dummy, pack
from .model import TargetModel
from .scheduler import ScheduledBatch


class StepExecutor:
    """Runs steps of the target model.

    Args:
        model: with its cache.
        graphs: the committed graphs of this rank.
        counts: where kernels read the step's token counts.
    """

    def __init__(self, model: TargetModel, graphs: LockstepRank, counts: CountTensors):
        self._model = model
        self._graphs = graphs
        self._counts = counts

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, plan: StepPlan) -> torch.Tensor:
        """Run the step. Every rank calls it in every step, an idle one with an empty batch.

        Args:
            batch: what this DP rank scheduled.
            plan: equal on every rank; has a geometry.

        Returns:
            `[N, V]` logits of the `N` slices that reach the end of their sequence, in order.
        """
        assert plan.geometry is not None
        self._counts.fill(plan.geometry, plan.num_due_per_dp_rank)
        inputs = pack(batch, self._model.cache.block_size)
        if plan.graph is not None:
            self._graphs.count_replay(plan.graph)
            return self._graphs.runners[plan.graph.kind].replay(plan.graph, inputs.values(), batch.num_due)
        self._graphs.count_eager(plan.eager_reason or "")
        if not batch.slices:
            inputs = dummy()
        return self._model.forward(inputs, plan.geometry)[: batch.num_due]
