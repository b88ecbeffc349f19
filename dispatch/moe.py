"""One MoE layer on one rank: scatter the shared batch, send its rows through the experts, gather back.

Transformers builds one `ExpertParallelExperts` for every experts module of the model (through its
`EPImplementationInterface`) and calls it with the batch this rank holds. All layers of a rank share one `MoeExchange`,
which carries the path to the experts and the geometry of the step under way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation

from .budgets.geometry import StepGeometry
from .budgets.layout import Layout
from .budgets.path_settings import ModelShape
from .collectives import Collectives
from .dispatchers.contract import INVALID_EXPERT_ID
from .errors import GeometryError
from .expert_load import ExpertLoad
from .expert_path import ExpertPath
from .experts.expert_weights import plain_weights
from .experts.kept_experts import KeptExperts
from .moe_layer import MoeLayer

StandIn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class MoeExchange:
    """The experts' path of a rank and the geometry of its current step.

    Args:
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        path: how rows travel and what computes them; the same on every rank.
        collectives: through which the ranks that share a batch gather its rows back.

    Attributes:
        bound: what every experts module of the model calls.
        layers: the model's MoE layers, in the order in which it runs them; none before they are described.
        num_valid: `[1]` int32 on the device, rows of the step under way that carry a token: where it is set, routers
            read it, and send rows from there on to no expert themselves.
        load: what layers count their routing into, set before anything is recorded; `None`: they do not count.
    """

    def __init__(self, layout: Layout, rank: int, path: ExpertPath, collectives: Collectives):
        self.layout = layout
        self.rank = rank
        self.path = path
        self.collectives = collectives
        self.bound: list[ExpertParallelExperts] = []
        self.layers: list[MoeLayer] = []
        self.num_valid: torch.Tensor | None = None
        self.load: ExpertLoad | None = None
        self._geometry: StepGeometry | None = None
        self._num_valid_tokens: torch.Tensor | None = None
        self._carries_token_T1: torch.Tensor | None = None
        self._carried_TK: torch.Tensor | None = None
        self._stand_in: StandIn | None = None

    def describe_layers(self, model: torch.nn.Module, spec: ModelShape) -> None:
        """Describe every layer of a model that is bound to this, once its weights are in place and before any step.

        Args:
            model: with this rank's experts, on its device.
            spec: of the model; equal on every rank, and so is the order of layers that follows from it.
        """
        for shape in spec.moe:
            module = model.get_submodule(shape.name)
            bound = next(one for one in self.bound if one.module is module)
            if bound.layer is not None:  # a model may run one module twice
                continue
            kept = bound.kept
            bound.layer = MoeLayer(
                index=len(self.layers),
                shape=shape,
                dtype=getattr(torch, spec.dtype),
                num_local=bound.num_local_experts,
                first_expert=self.rank * bound.num_local_experts,
                weights=plain_weights(module, shape.name) if kept is None else kept.weights,
                forward=bound.experts_forward if kept is None else kept.forward_of(bound.experts_forward),
            )
            self.layers.append(bound.layer)

    def begin_step(self, geometry: StepGeometry, num_valid_tokens: torch.Tensor | None) -> None:
        """Set what every MoE layer of the coming step uses.

        Args:
            geometry: equal on every rank.
            num_valid_tokens: `[1]` int32, tokens of this rank's batch before padding; `None` where nothing is padded.
        """
        self._geometry = geometry
        self._num_valid_tokens = num_valid_tokens
        self._carries_token_T1 = None
        self._carried_TK = None
        if self.num_valid is not None:
            if num_valid_tokens is None:
                self.num_valid.fill_(torch.iinfo(torch.int32).max)
            else:
                self.num_valid.copy_(num_valid_tokens)

    @contextmanager
    def tried_with(self, stand_in: StandIn) -> Iterator[None]:
        """Within, layers call this in the place of their experts: no step is under way, and nothing is sent.

        Args:
            stand_in: `[T, H]` hidden states, `[T, K]` global expert ids and weights -> `[T, H]`.
        """
        self._stand_in = stand_in
        try:
            yield
        finally:
            self._stand_in = None

    def stand_in(self) -> StandIn | None:
        """What layers call now in the place of their experts; `None` in every step."""
        return self._stand_in

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
        if self.num_valid is not None or (carries_token_T1 := self._carries_token(expert_ids_TK)) is None:
            return expert_ids_TK
        return torch.where(carries_token_T1, expert_ids_TK, INVALID_EXPERT_ID)

    def count_load(self, layer: int, expert_ids_TK: torch.Tensor) -> None:
        """Count a layer's routing; `[T, K]` global expert ids of the whole batch, as the router gives them."""
        if self.load is None:
            return
        if self._carried_TK is None or self._carried_TK.shape != expert_ids_TK.shape:
            self._carried_TK = torch.ones_like(expert_ids_TK, dtype=torch.int64)
            if (carries_token_T1 := self._carries_token(expert_ids_TK)) is not None:
                self._carried_TK *= carries_token_T1
        if self.num_valid is not None:
            expert_ids_TK = expert_ids_TK.clamp(min=0)  # padding counts nothing, for whichever expert
        self.load.count(layer, expert_ids_TK, self._carried_TK)

    def _carries_token(self, expert_ids_TK: torch.Tensor) -> torch.Tensor | None:
        """`[T, 1]` bool, false for padding; `None` where there is none. The same for all layers of a step."""
        if self._num_valid_tokens is not None and self._carries_token_T1 is None:
            row_T1 = torch.arange(expert_ids_TK.shape[0], device=expert_ids_TK.device).unsqueeze(1)
            self._carries_token_T1 = row_T1 < self._num_valid_tokens
        return self._carries_token_T1

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


class ExpertParallelExperts(EPImplementation):
    """Our dispatch behind Transformers' expert-parallel plug-in point; one instance an experts module.

    Attributes:
        module: whose forward this takes the place of.
        layer: what it computes; see `MoeExchange.describe_layers`.
        kept: the module's experts, set before layers are described; `None` where the module has them itself.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, exchange: MoeExchange):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.module = experts
        self.layer: MoeLayer | None = None
        self.kept: KeptExperts | None = None
        self._exchange = exchange
        exchange.bound.append(self)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]` hidden states of the batch this rank holds, `[T, K]` global expert ids and weights -> `[T, H]`."""
        exchange, layer = self._exchange, self.layer
        if (stand_in := exchange.stand_in()) is not None:
            return stand_in(hidden_states, top_k_index, top_k_weights)
        assert layer is not None, "layers are described before any step"
        geometry = exchange.geometry_for(hidden_states.shape[0])
        rows = geometry.row_range(exchange.rank)
        ids_TK = exchange.without_padding(top_k_index)
        exchange.count_load(layer.index, top_k_index)
        y_TH = exchange.path.run(layer, hidden_states[rows], ids_TK[rows], top_k_weights[rows], geometry)
        return exchange.gather_shared_batch(y_TH, geometry)
