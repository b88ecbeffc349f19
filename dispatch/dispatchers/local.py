"""The pool of one rank: all experts are here, nothing travels."""

import torch

from ..budgets.budget import RowFormat
from ..budgets.geometry import StepGeometry
from .contract import Dispatched, check_rows


class LocalDispatcher:
    """Keeps the contract of `dispatch.dispatchers.contract` for `ep_size == 1`, without collectives or buffers."""

    name = "local"
    num_bytes = 0

    def __init__(self, capacity: int):
        self.capacity = capacity

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        check_rows(x_TH, expert_ids_TK, geometry, rank=0, capacity=self.capacity)
        row_format = RowFormat(x_TH.shape[1], expert_ids_TK.shape[1], x_TH.dtype, expert_weights_TK.dtype)
        return Dispatched(x_TH, expert_ids_TK, expert_weights_TK, geometry, row_format)

    def close(self) -> None:
        """Nothing is held."""

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return y_RH
