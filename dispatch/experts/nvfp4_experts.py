"""CuTe DSL experts for Blackwell: FlashInfer's `CuteDslMoEWrapper` in NVFP4, on rows that a dispatcher brought.

Written against the interface that FlashInfer 0.7.4 documents, and never run here: there was no such GPU. Weights are
prepared from bfloat16 by FlashInfer; rows are quantised to NVFP4 as they arrive, as FlashInfer's own split layer does.
Sums over experts are atomic, so results need not repeat to the bit.

FlashInfer is imported when a layer is adopted.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..dispatchers.contract import Dispatched
from ..errors import ConfigError
from ..probe import HostGroup
from .checks import refuse_unsupported
from .local_experts import LocalExperts
from .nvfp4 import architecture_problem

_SCALE_BLOCK = 16


@dataclass(frozen=True)
class Nvfp4Layer:
    """Sizes of one layer on one rank; all but the first expert are equal on every rank.

    Attributes:
        num_experts: over all ranks.
        top_k: experts a token goes to.
        hidden_size: of a token.
        intermediate_size: between the projections.
        num_local: experts this rank owns.
        first_expert: id of the first of them.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_local: int
    first_expert: int

    @property
    def foreign_expert(self) -> int:
        """An expert of another rank, which FlashInfer skips; this rank's first where there is no other."""
        return (self.first_expert + self.num_local) % self.num_experts


def wrapper_settings(layer: Nvfp4Layer, records_graphs: bool, device: torch.device) -> dict[str, Any]:
    """What `CuteDslMoEWrapper` is made with for a layer; it sizes its buffers by the rows of each call.

    Args:
        layer: its sizes.
        records_graphs: whether steps are recorded; only then does the wrapper hold streams and events for it.
        device: this rank's GPU.
    """
    return {
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "use_cuda_graph": records_graphs,
        "num_local_experts": layer.num_local,
        "local_expert_offset": layer.first_expert,
        "sf_vec_size": _SCALE_BLOCK,
        "output_dtype": torch.bfloat16,
        "device": str(device),
        "quant_mode": "w4a4",
    }


def up_gate(gate_up_EFH: torch.Tensor) -> torch.Tensor:
    """Stacked first projections, `[E, 2I, H]`, from Hugging Face's order (gate, up) to FlashInfer's (up, gate)."""
    gate_EIH, up_EIH = gate_up_EFH.chunk(2, dim=1)
    return torch.cat([up_EIH, gate_EIH], dim=1)


def routing_for(
    layer: Nvfp4Layer, expert_ids_RK: torch.Tensor, expert_weights_RK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (int32, over all ranks) and weights (float32), with slots that have nothing to compute sent elsewhere.

    An id outside `[0, num_experts)` would be out of the bounds of FlashInfer's histogram.
    """
    last = layer.first_expert + layer.num_local
    here_RK = (expert_ids_RK >= layer.first_expert) & (expert_ids_RK < last)
    ids_RK = torch.where(here_RK, expert_ids_RK, layer.foreign_expert).to(torch.int32)
    return ids_RK, expert_weights_RK.masked_fill(~here_RK, 0.0).float()


class Nvfp4Experts:
    """Keeps the contract of `dispatch.experts.backend` on SM100 and SM103.

    Args:
        rank: this rank.
        records_graphs: whether steps are recorded; equal on every rank.
        device: this rank's GPU.

    Raises:
        ConfigError: another architecture.
    """

    name = "FlashInfer CuTe DSL experts (CuteDslMoEWrapper), NVFP4"
    num_bytes = 0
    tuning = ""

    def __init__(self, rank: int, records_graphs: bool, device: torch.device):
        problem = architecture_problem(torch.cuda.get_device_capability(device))
        if problem is not None:
            raise ConfigError(f"quantisation='nvfp4' cannot run here: {problem}; set quantisation to 'none' or 'fp8'")
        self._rank = rank
        self._records_graphs = records_graphs
        self._device = device
        self._layers: dict[int, tuple[Nvfp4Layer, Any, dict[str, torch.Tensor]]] = {}

    def adopt(self, experts: torch.nn.Module, name: str, num_experts: int, top_k: int) -> None:
        """Prepare a layer's weights and make its wrapper, once; the module's own weights are read and left."""
        from flashinfer import CuteDslMoEWrapper
        from flashinfer.fused_moe.api import CuteDslConfig

        if id(experts) in self._layers:
            return
        refuse_unsupported(experts, name, "quantisation='nvfp4'", "quantisation='none'")
        gate_up_EFH, down_EHI = (experts.get_parameter(p).detach() for p in ("gate_up_proj", "down_proj"))
        num_local, hidden_size, intermediate_size = down_EHI.shape
        layer = Nvfp4Layer(num_experts, top_k, hidden_size, intermediate_size, num_local, self._rank * num_local)
        with torch.inference_mode(False):
            view = CuteDslConfig.prepare_weights(
                up_gate(gate_up_EFH),
                down_EHI,
                num_local_experts=num_local,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                nvfp4_4over6=None,
            )
            settings = wrapper_settings(layer, self._records_graphs, self._device)
            self._layers[id(experts)] = (layer, CuteDslMoEWrapper(**settings), view)

    def prepare(self, group: HostGroup | None) -> None:
        """Have the kernels of each shape of layer built, by one run on rows of zeros with nothing to compute."""
        by_shape = {layer: key for key, (layer, _, _) in self._layers.items()}
        for layer, key in by_shape.items():
            x_RH = torch.zeros(1, layer.hidden_size, dtype=torch.bfloat16, device=self._device)
            ids_RK = torch.full((1, layer.top_k), -1, dtype=torch.int32, device=self._device)
            self._run(key, x_RH, ids_RK, ids_RK.float())
        torch.cuda.synchronize(self._device)

    def run(self, experts: LocalExperts, dispatched: Dispatched) -> torch.Tensor:
        """See `ExpertBackend.run`."""
        if dispatched.x_RH.shape[0] == 0:
            return dispatched.x_RH
        layer = self._layers[id(experts.module)][0]
        # Dispatched ids count from the dispatcher's `first_expert`, which may be 0; FlashInfer's count over all ranks.
        ids_RK = dispatched.local_ids_RK
        ids_RK = torch.where(ids_RK >= 0, ids_RK + layer.first_expert, ids_RK)
        y_RH = self._run(id(experts.module), dispatched.x_RH, ids_RK, dispatched.expert_weights_RK)
        into_RH = dispatched.combine_input_RH
        return y_RH if into_RH is None else into_RH.copy_(y_RH)

    def _run(self, key: int, x_RH: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor) -> torch.Tensor:
        from flashinfer import fp4_quantize

        layer, wrapper, view = self._layers[key]
        ids_RK, weights_RK = routing_for(layer, ids_RK, weights_RK)
        # Block scales alone, in rows: the layout that the wrapper reads and the one scale that its weights expect.
        codes_RH, scales_RB = fp4_quantize(
            x_RH.contiguous(),
            global_scale=torch.ones(1, dtype=torch.float32, device=x_RH.device),
            sf_vec_size=_SCALE_BLOCK,
            is_sf_swizzled_layout=False,
        )
        scales_RB1 = scales_RB.view(torch.float8_e4m3fn).reshape(x_RH.shape[0], -1).unsqueeze(-1)
        return wrapper.run(
            codes_RH,
            scales_RB1,
            ids_RK,
            weights_RK,
            view["w1_weight"],
            view["w1_weight_sf"],
            view["w1_alpha"],
            view["fc2_input_scale"],
            view["w2_weight"],
            view["w2_weight_sf"],
            view["w2_alpha"],
        )
