"""FlashInfer's NVLink one-sided all-to-all as a dispatcher, for GPUs that reach each other's memory.

Rows are put into the peers' workspaces by the dispatch kernel and fetched by the combine kernel; nothing is read back
to the host, so a step can be recorded in a CUDA graph. Of the workspace a step uses `ep_size` times
`runtime_max_tokens_per_rank` rows: the one number that all ranks must agree on, and that the step's geometry computes.

FlashInfer is imported at construction: a CPU machine imports this module without it. Its sizes are in
`flashinfer_workspace`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..budgets.budget import RowFormat
from ..budgets.geometry import StepGeometry
from ..budgets.layout import Layout
from ..budgets.path_settings import PathSettings, row_formats
from ..budgets.planned_buffer import PlannedBuffer
from ..gpu_problems import import_problem, link_problem, nvlink_domain_problem, peer_problem
from ..way import DispatcherWay, RankParts, places
from .contract import INVALID_EXPERT_ID, Dispatched, check_rows
from .exchange import row_format_of
from .flashinfer_workspace import planned_workspace, top_k_problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ..collectives import Collectives


class LinkKey(NamedTuple):
    """What one of FlashInfer's links is made for: it finds an expert's rank from the number of experts it was given."""

    num_experts: int
    hidden_size: int
    top_k: int


def links_for(layers: Iterable[tuple[int, RowFormat]]) -> dict[LinkKey, RowFormat]:
    """The links that these layers need, in the order in which they come.

    Args:
        layers: `(num_experts, row format)` of each MoE layer, in one dtype.
    """
    links: dict[LinkKey, RowFormat] = {}
    for num_experts, row_format in layers:
        links.setdefault(LinkKey(num_experts, row_format.hidden_size, row_format.top_k), row_format)
    return links


class FlashInferDispatcher(DispatcherWay):
    """Keeps the contract of `dispatch.dispatchers.contract`; all ranks of one NVLink domain.

    Args:
        collectives: lists what is exchanged; in a rehearsal nothing is.
        group: process group of all ranks, through which the workspaces' handles are exchanged.
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        capacity: rows a rank, equal on every rank; sizes the workspace.
        layers: `(num_experts, row format)` of each kind of MoE layer, equal on every rank.
        peer_timeout_s: bound on every wait for a peer inside a kernel, recorded into graphs; past it the kernel traps.
        device: this rank's GPU.
    """

    kind = name = "flashinfer"
    devices = places(cuda=1)

    @classmethod
    def problems(cls, settings: PathSettings, setting: str) -> list[str]:
        """Layers whose rows its kernels do not send."""
        for layer in settings.spec.moe:
            problem = top_k_problem(layer.top_k)
            if problem is not None:
                other = "use another way to the experts, like 'allgather'"
                return [f"{setting} cannot run {layer.name}: {problem}; {other}"]
        return []

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        return planned_workspace(settings)

    @classmethod
    def kernel_modules(cls, settings: PathSettings) -> list[tuple[str, Any]]:
        from flashinfer.jit.comm import gen_nvlink_one_sided_alltoall_module

        return [("all-to-all", gen_nvlink_one_sided_alltoall_module())]

    @classmethod
    def refusal(cls, parts: RankParts, host_of_first: str) -> str | None:
        return (
            nvlink_domain_problem(parts.device, host_of_first)
            or import_problem("flashinfer.moe_ep")
            or peer_problem(parts.device)
            or link_problem()
        )

    @classmethod
    def make(cls, parts: RankParts) -> FlashInferDispatcher:
        settings = parts.settings
        formats = zip((layer.num_experts for layer in settings.spec.moe), row_formats(settings.spec), strict=True)
        return cls(
            parts.collectives,
            parts.group,
            settings.layout,
            parts.rank,
            settings.capacity,
            list(dict.fromkeys(formats)),
            settings.worker.device_timeout_s,
            parts.device,
        )

    def __init__(
        self,
        collectives: Collectives,
        group: dist.ProcessGroup,
        layout: Layout,
        rank: int,
        capacity: int,
        layers: list[tuple[int, RowFormat]],
        peer_timeout_s: float,
        device: torch.device,
    ):
        import torch
        from flashinfer.moe_ep import (
            BootstrapConfig,
            MoEEpCommParams,
            NVLinkOneSidedConfig,
            create_communication,
        )

        self._collectives = collectives
        self._rank = rank
        self.capacity = capacity
        bootstrap = BootstrapConfig(
            world_size=layout.world_size, rank=rank, device=device.index or 0, process_group=group
        )
        self._links: dict[LinkKey, Any] = {}
        for key, row_format in links_for(layers).items():
            params = MoEEpCommParams(
                num_experts=key.num_experts,
                top_k=key.top_k,
                max_tokens_per_rank=capacity,
                hidden_size=key.hidden_size,
                dtype=getattr(torch, row_format.dtype),
                invalid_expert_id=INVALID_EXPERT_ID,
            )
            options = NVLinkOneSidedConfig(timeout_sec=max(1, int(peer_timeout_s)))
            try:
                self._links[key] = create_communication(bootstrap, params, options)
            except BaseException:
                # FlashInfer keeps workspaces by their layout: a rank that held one would not take part in the next try.
                self.close()
                raise
        # Of this rank's part of the workspaces, one of which links for rows of one format share; read in every step.
        workspaces = {link.workspace.data_ptr(): link.workspace for link in self._links.values()}
        self.num_bytes = sum(workspace[rank].nbytes for workspace in workspaces.values())

    def close(self) -> None:
        """Give the workspaces back; what is still read through a view of one stays mapped until the view is gone."""
        for link in self._links.values():
            link.destroy()
        self._links.clear()

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        import torch

        check_rows(x_TH, expert_ids_TK, geometry, self._rank, self.capacity)
        row_format = row_format_of(x_TH, expert_ids_TK, torch.float32)
        runtime_max = geometry.runtime_max_tokens_per_rank
        first_expert = self._rank * num_local_experts
        if not self._collectives.issue("flashinfer_dispatch", "ep", x_TH):
            num_rows = geometry.layout.world_size * runtime_max
            return Dispatched(
                x_RH=x_TH.new_zeros(num_rows, x_TH.shape[1]),
                expert_ids_RK=expert_ids_TK.new_full(
                    (num_rows, row_format.top_k), INVALID_EXPERT_ID, dtype=torch.int32
                ),
                expert_weights_RK=expert_weights_TK.new_zeros(num_rows, row_format.top_k, dtype=torch.float32),
                geometry=geometry,
                row_format=row_format,
                first_expert=first_expert,
            )
        num_experts = num_local_experts * geometry.layout.world_size
        link = self._links[LinkKey(num_experts, row_format.hidden_size, row_format.top_k)]
        received = link.dispatch(
            x_TH.contiguous(),
            expert_ids_TK.to(torch.int32).contiguous(),
            expert_weights_TK.to(torch.float32).contiguous(),
            runtime_max_tokens_per_rank=runtime_max,
        )
        return Dispatched(
            x_RH=received.hidden_states,
            expert_ids_RK=received.topk_ids,
            expert_weights_RK=received.topk_weights,
            geometry=geometry,
            row_format=row_format,
            first_expert=first_expert,
            combine_input_RH=link.get_combine_input_buffer(x_TH.dtype),
            link=link,
        )

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        if not self._collectives.issue("flashinfer_combine", "ep", y_RH):
            return y_RH.new_zeros(dispatched.geometry.num_rows_per_rank[self._rank], y_RH.shape[1])
        return dispatched.link.combine(y_RH)
