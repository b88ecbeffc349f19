"""What every dispatcher keeps.

A dispatcher takes the rows of one MoE layer to the ranks that own their experts, and brings the results back.

- **Equal on every rank**, call by call: the `StepGeometry`, the `RowFormat`, the dispatcher's kind, the number of
  experts a rank owns, and the order of layers. All of them follow from the step plan and the checkpoint, so a check on
  them fails on every rank alike, before the collective.
- **May differ between ranks**: the rows themselves and their expert ids. Never their number beyond what the geometry
  says: a rank brings exactly `geometry.num_rows_per_rank[rank]` rows, none included. One that would bring others fails
  alone, before it sends; its peers wait for it within their bounds, and its own report is what ends them.
- **Two collectives a layer**, one in `dispatch` and one in `combine`; none in the pool of one rank. Row counts come
  from the geometry; no collective is spent on sizes, and nothing is read back from a device, but for `alltoall`, which
  is for CPUs.
- **Expert ids** are global on the way in; a row that carries no token has `INVALID_EXPERT_ID` in every slot and costs
  the experts nothing. What `dispatch` returns is local ids plus `first_expert`; whatever is not in
  `[first_expert, first_expert + num_local_experts)` marks a slot with nothing to compute.
- **Bounds are checked on every call, before anything is sent**: the rows a rank brings are those that the geometry
  announces, and `runtime_max_tokens_per_rank` is within the capacity the buffers were made for.
- **Every rank takes part in every call**, also with no rows of its own.
- **Results do not depend on the dispatcher** beyond the order of floating-point sums; partial results of a row are
  summed in rank order, so a run repeats to the bit.
- State between `dispatch` and `combine` travels in `Dispatched`, of FlashInfer's all-to-all as the `link` that keeps
  it. Buffers are allocated once, at construction, from the budget, and a `Dispatched` is valid until the next
  `dispatch` on the same dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..budgets.budget import RowFormat
from ..budgets.geometry import StepGeometry
from ..errors import GeometryError

if TYPE_CHECKING:
    import torch

INVALID_EXPERT_ID = -1


@dataclass(frozen=True)
class Dispatched:
    """Rows that arrived at this rank's experts.

    Shapes: `R` rows received (`sum(geometry.slot_sizes)`, padding included), `H` hidden size, `K` top-k.

    Attributes:
        x_RH: hidden states, in the model's dtype. Rows without a token hold undefined bytes.
        expert_ids_RK: expert ids; outside `[first_expert, first_expert + num_local_experts)` where there is nothing to
            compute.
        expert_weights_RK: routing weights.
        geometry: the step's geometry, equal on every rank.
        row_format: the layer's row format, equal on every rank.
        returned_to: which of this rank's own rows each returned row belongs to, `[ep_size * slot]`; `None` where
            all own rows went to every rank in order.
        first_expert: the id that stands for local expert 0.
        combine_input_RH: `[R, H]` memory that `combine` reads from, where the dispatcher has such; experts that write
            their results there save it a copy. Valid until `combine`.
        link: what `combine` goes on with, where the dispatcher's library keeps the state of a round itself.
    """

    x_RH: torch.Tensor
    expert_ids_RK: torch.Tensor
    expert_weights_RK: torch.Tensor
    geometry: StepGeometry
    row_format: RowFormat
    returned_to: torch.Tensor | None = None
    first_expert: int = 0
    combine_input_RH: torch.Tensor | None = None
    link: Any = None

    @property
    def local_ids_RK(self) -> torch.Tensor:
        """Ids from 0; outside `[0, num_local_experts)` where there is nothing to compute."""
        return self.expert_ids_RK - self.first_expert if self.first_expert else self.expert_ids_RK


class Dispatcher(Protocol):
    """One way for rows to reach their experts; see the module docstring for what it keeps."""

    name: str

    @property
    def capacity(self) -> int:
        """Rows a rank that the buffers were made for; equal on every rank."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's buffers."""
        ...

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        """Send this rank's `T` rows; collective over all ranks.

        Args:
            x_TH: `[T, H]` hidden states, `T == geometry.num_rows_per_rank[rank]`.
            expert_ids_TK: `[T, K]` global expert ids, any integer dtype.
            expert_weights_TK: `[T, K]` routing weights.
            geometry: equal on every rank.
            num_local_experts: experts a rank owns; equal on every rank.

        Raises:
            GeometryError: before the collective, when `T` is not what the geometry says.
        """
        ...

    def close(self) -> None:
        """Give back what it holds, where no rank uses it any more; waits for nobody, since some rank may have none."""
        ...

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Bring weighted partial results back; collective over all ranks.

        Args:
            y_RH: `[R, H]`, row for row what `dispatch` returned: the weighted sum over this rank's experts.
            dispatched: what `dispatch` returned.

        Returns:
            `[T, H]`: for each of this rank's rows the sum over all ranks' experts.
        """
        ...


def check_rows(
    x_TH: torch.Tensor, expert_ids_TK: torch.Tensor, geometry: StepGeometry, rank: int, capacity: int
) -> None:
    """Refuse rows that the geometry does not announce, or that the buffers cannot hold.

    Args:
        x_TH: this rank's rows.
        expert_ids_TK: their routing.
        geometry: equal on every rank; the other ranks have sized their messages by it.
        rank: this rank.
        capacity: rows a rank that the buffers were made for; equal on every rank.

    Raises:
        GeometryError: before anything is sent.
    """
    runtime_max = geometry.runtime_max_tokens_per_rank
    if runtime_max > capacity:
        raise GeometryError(
            f"runtime_max_tokens_per_rank={runtime_max} is above the {capacity} rows a rank that the exchange buffers "
            f"were made for (rows per rank {geometry.num_rows_per_rank}): raise limits.max_dispatch_tokens_per_rank"
        )
    announced = geometry.num_rows_per_rank[rank]
    if x_TH.shape[0] != announced or expert_ids_TK.shape[0] != announced:
        raise GeometryError(
            f"rank {rank} brings {x_TH.shape[0]} rows and {expert_ids_TK.shape[0]} routings to a layer; the step plan "
            f"announced {announced} (rows per rank {geometry.num_rows_per_rank})"
        )
