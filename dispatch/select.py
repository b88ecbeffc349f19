"""Making the dispatcher that a configuration names."""

import torch

from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .budget import ExchangeBudget
from .collectives import Collectives
from .contract import Dispatcher
from .local import LocalDispatcher


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
