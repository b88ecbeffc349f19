"""CuTe DSL experts for Blackwell: FlashInfer's `CuteDslMoEWrapper` in NVFP4, on rows that a dispatcher brought.

Written against the interface that FlashInfer 0.7.4 documents, and never run here: there was no such GPU. Weights are
prepared from bfloat16 by FlashInfer; rows are quantised to NVFP4 as they arrive, as FlashInfer's own split layer does.
Sums over experts are atomic, so results need not repeat to the bit.

FlashInfer is imported when a layer is adopted.
"""

from typing import Any

import torch

from ..dispatchers.contract import Dispatched
from ..errors import ConfigError
from ..moe_layer import MoeLayer
from ..probe import HostGroup
from .checks import refuse_unsupported
from .expert_weights import DOWN, GATE_UP
from .nvfp4 import architecture_problem

_SCALE_BLOCK = 16


def wrapper_settings(layer: MoeLayer, records_graphs: bool, device: torch.device) -> dict[str, Any]:
    """What `CuteDslMoEWrapper` is made with for a layer; it sizes its buffers by the rows of each call.

    Args:
        layer: with its sizes; all but the first expert are equal on every rank.
        records_graphs: whether steps are recorded; only then does the wrapper hold streams and events for it.
        device: this rank's GPU.
    """
    return {
        "num_experts": layer.shape.num_experts,
        "top_k": layer.shape.top_k,
        "hidden_size": layer.shape.hidden_size,
        "intermediate_size": layer.shape.intermediate_size,
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
    layer: MoeLayer, expert_ids_RK: torch.Tensor, expert_weights_RK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (int32, over all ranks) and weights (float32), with slots that have nothing to compute sent elsewhere.

    An id outside `[0, num_experts)` would be out of the bounds of FlashInfer's histogram. So it becomes an expert of
    another rank, which FlashInfer skips; this rank's first where there is no other.
    """
    foreign_expert = (layer.first_expert + layer.num_local) % layer.shape.num_experts
    last = layer.first_expert + layer.num_local
    here_RK = (expert_ids_RK >= layer.first_expert) & (expert_ids_RK < last)
    ids_RK = torch.where(here_RK, expert_ids_RK, foreign_expert).to(torch.int32)
    return ids_RK, expert_weights_RK.masked_fill(~here_RK, 0.0).float()


class Nvfp4Experts:
    """Keeps the contract of `dispatch.experts.backend` on SM100 and SM103.

    Args:
        records_graphs: whether steps are recorded; equal on every rank.
        device: this rank's GPU.

    Raises:
        ConfigError: another architecture.
    """

    name = "FlashInfer CuTe DSL experts (CuteDslMoEWrapper), NVFP4"
    num_bytes = 0
    tuning = ""

    def __init__(self, records_graphs: bool, device: torch.device):
        problem = architecture_problem(torch.cuda.get_device_capability(device))
        if problem is not None:
            raise ConfigError(f"quantisation='nvfp4' cannot run here: {problem}; set quantisation to 'none' or 'fp8'")
        self._records_graphs = records_graphs
        self._device = device
        self._layers: dict[int, tuple[MoeLayer, Any, dict[str, torch.Tensor]]] = {}

    def adopt(self, layer: MoeLayer) -> None:
        """Prepare a layer's weights and make its wrapper, once; the model's own weights are read and left."""
        from flashinfer import CuteDslMoEWrapper
        from flashinfer.fused_moe.api import CuteDslConfig

        if layer.index in self._layers:
            return
        refuse_unsupported(layer, "quantisation='nvfp4'", "quantisation='none'")
        gate_up_EFH, down_EHI = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
        with torch.inference_mode(False):
            view = CuteDslConfig.prepare_weights(
                up_gate(gate_up_EFH),
                down_EHI,
                num_local_experts=layer.num_local,
                hidden_size=layer.shape.hidden_size,
                intermediate_size=layer.shape.intermediate_size,
                nvfp4_4over6=None,
            )
            settings = wrapper_settings(layer, self._records_graphs, self._device)
            self._layers[layer.index] = (layer, CuteDslMoEWrapper(**settings), view)

    def prepare(self, group: HostGroup | None) -> None:
        """Have the kernels of each shape of layer built, by one run on rows of zeros with nothing to compute."""
        by_shape = {layer.shape.text: layer for layer, _, _ in self._layers.values()}
        for layer in by_shape.values():
            x_RH = torch.zeros(1, layer.shape.hidden_size, dtype=torch.bfloat16, device=self._device)
            ids_RK = torch.full((1, layer.shape.top_k), -1, dtype=torch.int32, device=self._device)
            self._run(layer.index, x_RH, ids_RK, ids_RK.float())
        torch.cuda.synchronize(self._device)

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        """See `ExpertBackend.run`."""
        if dispatched.x_RH.shape[0] == 0:
            return dispatched.x_RH
        # Dispatched ids count from the dispatcher's `first_expert`, which may be 0; FlashInfer's count over all ranks.
        ids_RK = dispatched.local_ids_RK
        ids_RK = torch.where(ids_RK >= 0, ids_RK + layer.first_expert, ids_RK)
        y_RH = self._run(layer.index, dispatched.x_RH, ids_RK, dispatched.expert_weights_RK)
        into_RH = dispatched.combine_input_RH
        return y_RH if into_RH is None else into_RH.copy_(y_RH)

    def _run(self, index: int, x_RH: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor) -> torch.Tensor:
        from flashinfer import fp4_quantize

        layer, wrapper, view = self._layers[index]
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
