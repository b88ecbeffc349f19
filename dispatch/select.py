"""Making the dispatcher and the expert backend that a configuration names."""

import torch

from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .budget import ExchangeBudget
from .collectives import Collectives
from .contract import Dispatcher
from .experts import ExpertBackend, TorchExperts
from .local import LocalDispatcher
from .pair_budget import PairBudget


def make_dispatcher(
    kind: str, collectives: Collectives, rank: int, budget: ExchangeBudget, device: torch.device
) -> Dispatcher:
    """The dispatcher of this kind, with its buffers allocated; every rank makes the same kind with the same budget.

    Args:
        kind: `local` for a pool of one rank, `allgather` or `alltoall`.
        collectives: through which everything is sent.
        rank: this rank.
        budget: sizes of the buffers.
        device: where the rows live.
    """
    # Steps run in inference mode and write these buffers; a tensor made inside it could not be written outside.
    with torch.inference_mode(False):
        if kind == "local":
            return LocalDispatcher(budget.capacity)
        if kind == "allgather":
            return AllGatherDispatcher(collectives, rank, budget, device)
        assert kind == "alltoall", kind
        return AllToAllDispatcher(collectives, rank, budget, device)


def make_experts(kind: str, budget: PairBudget | None, device: torch.device) -> ExpertBackend:
    """The expert backend of this kind; every rank makes the same kind with the same budget.

    Args:
        kind: `torch`, or `cutedsl` for QuACK's grouped GEMM pair on Hopper GPUs.
        budget: of the buffers of `cutedsl`.
        device: where the rows live.

    Raises:
        ConfigError: a GPU or a QuACK that `cutedsl` does not run on.
    """
    if kind == "torch":
        return TorchExperts(device)
    assert kind == "cutedsl", kind
    assert budget is not None, "CuTe DSL experts have buffers"
    from .quack_experts import QuackExperts

    return QuackExperts(budget, device)
