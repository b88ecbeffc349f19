"""One MoE layer on one rank: scatter the shared batch, dispatch, experts, combine, gather back.

Transformers builds one `ExpertParallelExperts` for every experts module of the model (through its
`EPImplementationInterface`) and calls it with the batch this rank holds. All layers of a rank share one `MoeExchange`,
which carries the dispatcher and the geometry of the step under way.
"""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from .collectives import Collectives
from .contract import INVALID_EXPERT_ID, Dispatcher
from .errors import GeometryError
from .geometry import StepGeometry
from .layout import Layout
from .mega import MegaExperts

ExpertsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class MoeExchange:
    """The dispatcher of a rank and the geometry of its current step.

    Args:
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        dispatcher: how rows reach their experts, or what takes them there and computes them in one; the same kind on
            every rank.
        collectives: through which the ranks that share a batch gather its rows back.
    """

    def __init__(self, layout: Layout, rank: int, dispatcher: Dispatcher | MegaExperts, collectives: Collectives):
        self.layout = layout
        self.rank = rank
        self.dispatcher = dispatcher
        self.collectives = collectives
        self._geometry: StepGeometry | None = None
        self._num_valid_tokens: torch.Tensor | None = None

    def begin_step(self, geometry: StepGeometry, num_valid_tokens: torch.Tensor | None) -> None:
        """Set what every MoE layer of the coming step uses.

        Args:
            geometry: equal on every rank.
            num_valid_tokens: `[1]` int32, tokens of this rank's batch before padding; `None` where nothing is padded.
        """
        self._geometry = geometry
        self._num_valid_tokens = num_valid_tokens

    def geometry_for(self, num_tokens: int) -> StepGeometry:
        """The current geometry, checked against the tokens that a layer actually holds."""
        if self._geometry is None:
            raise GeometryError(f"rank {self.rank} entered a MoE layer outside a step: no geometry was agreed")
        announced = self._geometry.num_tokens(self.rank)
        if num_tokens != announced:
            raise GeometryError(
                f"rank {self.rank} holds {num_tokens} tokens in a MoE layer; the step plan announced {announced} "
                f"(tokens per DP rank {self._geometry.num_tokens_per_dp_rank})"
            )
        return self._geometry

    def without_padding(self, expert_ids_TK: torch.Tensor) -> torch.Tensor:
        """Expert ids in which padding rows are routed to no expert."""
        if self._num_valid_tokens is None:
            return expert_ids_TK
        row_T1 = torch.arange(expert_ids_TK.shape[0], device=expert_ids_TK.device).unsqueeze(1)
        return torch.where(row_T1 < self._num_valid_tokens, expert_ids_TK, INVALID_EXPERT_ID)

    def gather_shared_batch(self, y_TH: torch.Tensor, geometry: StepGeometry) -> torch.Tensor:
        """Undo the scatter: from this rank's rows to all rows of the batch it shares. Collective over those ranks."""
        if self.layout.attn_tp_size == 1:
            return y_TH
        peers = self.layout.ranks_of(self.layout.dp_rank(self.rank))
        sizes = [geometry.num_rows_per_rank[peer] for peer in peers]
        padded = y_TH.new_zeros(max(sizes), y_TH.shape[1])
        padded[: y_TH.shape[0]] = y_TH
        gathered = y_TH.new_empty(len(sizes) * max(sizes), y_TH.shape[1])
        self.collectives.all_gather("attn_tp", gathered, padded)
        slots = gathered.view(len(sizes), max(sizes), -1)
        return torch.cat([slot[:size] for slot, size in zip(slots, sizes, strict=True)])


def run_local_experts(
    experts_forward: ExpertsForward,
    x_RH: torch.Tensor,
    expert_ids_RK: torch.Tensor,
    expert_weights_RK: torch.Tensor,
    num_local_experts: int,
) -> torch.Tensor:
    """This rank's experts on the (row, expert) pairs that are its own; rows without one cost nothing.

    Args:
        experts_forward: the model family's own experts, `(x, ids, weights) -> weighted sum`, on local expert ids.
        x_RH: `[R, H]` received rows.
        expert_ids_RK: `[R, K]` local expert ids; outside `[0, num_local_experts)` where there is nothing to compute.
        expert_weights_RK: `[R, K]` routing weights.
        num_local_experts: experts this rank owns.

    Returns:
        `[R, H]`: weighted sums over this rank's experts, zero where it owns none of a row's experts.
    """
    here_RK = (expert_ids_RK >= 0) & (expert_ids_RK < num_local_experts)
    if x_RH.device.type == "cuda":
        # Shapes must not depend on the routing where a step is recorded; the grouped GEMM skips the sentinel's rows.
        ids_RK = torch.where(here_RK, expert_ids_RK, num_local_experts).to(torch.int64)
        return experts_forward(x_RH, ids_RK, expert_weights_RK.masked_fill(~here_RK, 0.0))
    row, slot = here_RK.nonzero(as_tuple=True)
    y_RH = x_RH.new_zeros(x_RH.shape)
    if row.numel() == 0:
        return y_RH
    ids_P1 = expert_ids_RK[row, slot].unsqueeze(1).to(torch.int64)
    weights_P1 = expert_weights_RK[row, slot].unsqueeze(1)
    return y_RH.index_add_(0, row, experts_forward(x_RH[row], ids_P1, weights_P1).to(y_RH.dtype))


class ExpertParallelExperts(EPImplementation):
    """Our dispatch behind Transformers' expert-parallel plug-in point; one instance an experts module."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, exchange: MoeExchange):
        super().__init__(experts, ep_mesh, tp_mesh)
        self._exchange = exchange
        self._experts = experts

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]` hidden states of the batch this rank holds, `[T, K]` global expert ids and weights -> `[T, H]`."""
        exchange = self._exchange
        geometry = exchange.geometry_for(hidden_states.shape[0])
        rows = geometry.row_range(exchange.rank)
        top_k_index = exchange.without_padding(top_k_index)
        x_TH, ids_TK, weights_TK = hidden_states[rows], top_k_index[rows], top_k_weights[rows]
        dispatcher = exchange.dispatcher
        if isinstance(dispatcher, MegaExperts):
            y_TH = dispatcher.run(self._experts, x_TH, ids_TK, weights_TK, geometry)
            return exchange.gather_shared_batch(y_TH, geometry)
        dispatched = dispatcher.dispatch(x_TH, ids_TK, weights_TK, geometry, self.num_local_experts)
        partial = run_local_experts(
            self.experts_forward,
            dispatched.x_RH,
            dispatched.expert_ids_RK,
            dispatched.expert_weights_RK,
            self.num_local_experts,
        )
        return exchange.gather_shared_batch(dispatcher.combine(partial, dispatched), geometry)
