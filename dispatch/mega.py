"""FlashInfer's SM90 CuTe DSL mega kernel: one kernel exchanges the tokens, runs the experts and combines.

It takes the place of a dispatcher and of the experts behind it. What all ranks must agree on is the same as for any
dispatcher: every rank calls every layer in every step, with at most `capacity` rows. The kernel waits for its peers
without bound; the driver's deadline is what ends a stalled gang.

FlashInfer is imported at construction.
"""

from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collectives
from .contract import INVALID_EXPERT_ID
from .errors import GeometryError
from .expert_checks import refuse_unsupported
from .geometry import StepGeometry
from .layout import Layout
from .torch_experts import LocalExperts


class MegaExperts:
    """The mega kernel of all MoE layers of one rank, in bfloat16.

    Args:
        collectives: lists what is exchanged; in a rehearsal nothing is.
        group: process group of all ranks, over which the kernel's memory is set up.
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        capacity: rows a rank, equal on every rank; sizes the workspace, and the kernel's default tuning follows it.
        device: this rank's GPU.
    """

    name = "mega"
    expert_backend = "FlashInfer SM90 CuTe DSL mega kernel, bf16"
    tuning = ""

    def __init__(
        self,
        collectives: Collectives,
        group: dist.ProcessGroup,
        layout: Layout,
        rank: int,
        capacity: int,
        device: torch.device,
    ):
        self.capacity = capacity
        self.num_bytes = 0
        self._collectives = collectives
        self._group = group
        self._layout = layout
        self._rank = rank
        self._device = device
        self._layers: dict[int, Any] = {}

    def adopt(self, experts: torch.nn.Module, name: str, num_experts: int, top_k: int) -> None:
        """Build the kernel of one layer over its experts' weights, which it takes over. Collective over all ranks.

        Args:
            experts: the model's own experts module, sharded; its weights are released.
            name: for messages.
            num_experts: of the layer, over all ranks.
            top_k: experts a token goes to.

        Raises:
            ConfigError: on every rank alike, where the kernel cannot compute these experts.
        """
        from flashinfer.moe_ep import BootstrapConfig, FleetParams, MegaConfig, MoEEpLayer, MoEWeightPack
        from flashinfer.moe_ep import Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig as Sm90Bf16

        refuse_unsupported(experts, name, "dispatch='mega'", "dispatch='flashinfer' or 'allgather'")
        w13, w2 = (getattr(experts, parameter) for parameter in ("gate_up_proj", "down_proj"))
        bootstrap = BootstrapConfig(
            world_size=self._layout.world_size,
            rank=self._rank,
            device=self._device.index or 0,
            process_group=self._group,
        )
        fleet = FleetParams(num_experts=num_experts, max_tokens_per_rank=self.capacity, token_hidden_size=w13.shape[2])
        kernel = Sm90Bf16(intermediate_size=w2.shape[2], top_k=top_k)
        pack = MoEWeightPack(w13.detach(), w2.detach())
        self._layers[id(experts)] = MoEEpLayer(bootstrap, fleet, pack, backend=MegaConfig(megakernel=kernel))
        for parameter in ("gate_up_proj", "down_proj"):
            weights = getattr(experts, parameter)
            weights.data = weights.data.new_empty(0)

    def prepare(self, group: dist.ProcessGroup | None) -> None:
        """Nothing more: `adopt` has built the kernels."""

    def run(
        self,
        experts: LocalExperts,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
    ) -> torch.Tensor:
        """`[T, H]` rows of this rank, `[T, K]` global expert ids and weights -> `[T, H]`; collective over all ranks.

        Raises:
            GeometryError: before the kernel, when the step does not fit the capacity or announces other rows.
        """
        from flashinfer.moe_ep import MoEEpTensors

        if x_TH.shape[0] != geometry.num_rows_per_rank[self._rank]:
            raise GeometryError(
                f"rank {self._rank} brings {x_TH.shape[0]} rows to a layer; the step plan announced "
                f"{geometry.num_rows_per_rank}"
            )
        if geometry.runtime_max_tokens_per_rank(self._rank) > self.capacity:
            raise GeometryError(
                f"rows per rank {geometry.num_rows_per_rank} exceed the {self.capacity} that the mega kernel was built "
                "for: raise limits.max_dispatch_tokens_per_rank"
            )
        if not self._collectives.issue("mega_moe", "ep", x_TH):
            return torch.zeros_like(x_TH)
        return self._layers[id(experts.module)].forward(
            MoEEpTensors(
                hidden_states=x_TH.contiguous(),
                topk_ids=expert_ids_TK.to(torch.int64).clamp(min=INVALID_EXPERT_ID).contiguous(),
                topk_weights=expert_weights_TK.float().contiguous(),
            )
        )
