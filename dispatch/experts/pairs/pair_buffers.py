"""The buffers of a grouped GEMM pair, as tensors."""

from dataclasses import dataclass

import torch

from ...budgets.moe_shape import MoeShape
from .pair_budget import PairBudget


@dataclass(frozen=True)
class PairViews:
    """The parts of the buffers that one layer uses for `R` rows; `P` is the most pairs they make.

    Attributes:
        offsets: `[E + 1]` int32, where each expert's pairs start.
        source_row_P: `[P]` int32, the row of each sorted pair.
        position_RK: `[R * K]` int32, where each slot's pair stands.
        hidden_PI: `[P, I]`, between the projections.
        output_PH: `[P, H]`, after them.
    """

    offsets: torch.Tensor
    source_row_P: torch.Tensor
    position_RK: torch.Tensor
    hidden_PI: torch.Tensor
    output_PH: torch.Tensor

    def with_own_routing(self) -> "PairViews":
        """The same with other memory for what a sort writes."""
        return PairViews(
            torch.zeros_like(self.offsets),
            torch.zeros_like(self.source_row_P),
            torch.zeros_like(self.position_RK),
            self.hidden_PI,
            self.output_PH,
        )


class PairBuffers:
    """Allocated once, outside inference mode, and shared by all layers, which run one after the other.

    Args:
        budget: sizes, equal on every rank.
        device: where the rows live.
        dtype: of what is between and after the projections, of 2 bytes.
    """

    def __init__(self, budget: PairBudget, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        self.budget = budget
        # Graphs write these in inference mode; a tensor made inside it could not be written outside.
        with torch.inference_mode(False):
            self._offsets = torch.zeros(budget.num_local + 1, dtype=torch.int32, device=device)
            self._source_row = torch.zeros(budget.num_pairs, dtype=torch.int32, device=device)
            self._position = torch.zeros(budget.num_slots, dtype=torch.int32, device=device)
            self._hidden = torch.zeros(budget.hidden_elements, dtype=dtype, device=device)
            self._output = torch.zeros(budget.output_elements, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        buffers = (self._offsets, self._source_row, self._position, self._hidden, self._output)
        return sum(buffer.nbytes for buffer in buffers)

    def views(self, shape: MoeShape, num_rows: int) -> PairViews:
        """The parts for this many rows of a layer, at most `budget.num_rows`."""
        ep_size = self.budget.ep_size
        num_pairs = shape.max_pairs(num_rows, ep_size)
        return PairViews(
            offsets=self._offsets[: shape.num_local(ep_size) + 1],
            source_row_P=self._source_row[:num_pairs],
            position_RK=self._position[: num_rows * shape.top_k],
            hidden_PI=self._hidden[: num_pairs * shape.intermediate_size].view(num_pairs, shape.intermediate_size),
            output_PH=self._output[: num_pairs * shape.hidden_size].view(num_pairs, shape.hidden_size),
        )
