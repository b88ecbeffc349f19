"""FlashInfer's SM90 CuTe DSL mega kernels of one rank: prepared weights, shared by kernels of every capacity.

A layer's weights are prepared once. A kernel of another capacity is another workspace over the same weights, and layers
of one shape share the workspace of a capacity, its symmetric memory and its compiled kernel: FlashInfer pools them by
process group, shape and settings, which are the same objects and values here for all layers. So a capacity costs one
workspace a shape and one compilation, however many layers there are.

FlashInfer is imported at construction.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..layout import Layout
from ..limits import QuantisationKind

# Launch settings that ranks have to have alike; FlashInfer takes them from a cache file of each host, if there is one.
_SHARED_SETTINGS = (
    "swap_ab",
    "pingpong",
    "mma_tiler_mnk",
    "cluster_shape_mnk",
    "load_balance_mode",
    "token_back_mode",
    "in_kernel_fc2_reduce",
    "dedup_dispatch",
    "grouped_token_back",
    "combine_format",
    "fp8_scale_mode",
    "fp8_accum_mode",
)


class MegaKernels:
    """Prepared layers of one rank.

    Args:
        group: process group of all ranks, over which the kernels' memory is set up.
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        device: this rank's GPU.
        quantisation: `none` computes in bfloat16, the others in fp8; equal on every rank.

    Attributes:
        scales: of the inputs of both projections of a layer in per-tensor fp8, by `id` of its experts module: a number
            is its fp8 code times the scale. Set before `prepare`, equal on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: Layout, rank: int, device: torch.device, quantisation: QuantisationKind
    ):
        self.quantisation = quantisation
        self.scales: dict[int, tuple[float, float]] = {}
        self._group = group
        self._layout = layout
        self._rank = rank
        self._device = device
        self._layers: dict[int, Any] = {}
        self._workspaces: dict[tuple[int, int], Any] = {}

    def prepare(self, experts: torch.nn.Module, num_experts: int, top_k: int, capacity: int) -> None:
        """Have a compiled kernel of this capacity for a layer; collective over all ranks.

        The layer's weights are prepared the first time. The first layer of a shape compiles the kernel and runs it
        once, so that no step compiles or allocates.
        """
        key = id(experts)
        if key not in self._layers:
            self._layers[key] = self._prepared(experts, num_experts, top_k, capacity)
        if (key, capacity) in self._workspaces:
            return
        compiled = {id(handle._backend_workspace) for handle in self._workspaces.values()}
        knobs = self._knobs(experts, num_experts, top_k, capacity)
        workspace = self._layers[key].create_workspace(capacity, knobs=knobs)
        if id(workspace._backend_workspace) not in compiled:
            self._layers[key].warmup(workspace=workspace)
        self._workspaces[key, capacity] = workspace

    def run(self, module: torch.nn.Module, capacity: int, tensors: Any) -> torch.Tensor:
        """The layer's kernel of this capacity on `MoEEpTensors`; collective over all ranks."""
        key = id(module)
        return self._layers[key].forward(tensors, workspace=self._workspaces[key, capacity])

    def workspace_bytes(self, capacity: int) -> int:
        """Bytes of the workspaces of a capacity, over all shapes of layers that were prepared for it."""
        pooled = {
            id(handle._backend_workspace): handle._backend_workspace
            for (_, rows), handle in self._workspaces.items()
            if rows == capacity
        }
        return sum(_bytes_of(workspace) for workspace in pooled.values())

    def settings(self, capacity: int) -> str:
        """Launch settings of the kernels of a capacity that have to be alike on all ranks."""
        configs = {
            ", ".join(
                f"{name} {getattr(handle._backend_workspace._frontend.config, name)}"
                for name in _SHARED_SETTINGS
                if hasattr(handle._backend_workspace._frontend.config, name)
            )
            for (_, rows), handle in self._workspaces.items()
            if rows == capacity
        }
        return " | ".join(sorted(configs))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Of the kernels there are."""
        return tuple(sorted({capacity for _, capacity in self._workspaces}))

    def drop_capacity(self, capacity: int) -> None:
        """Give up the kernels of a capacity; collective over all ranks."""
        for key in [key for key in self._workspaces if key[1] == capacity]:
            self._workspaces.pop(key).destroy()

    def close(self) -> None:
        """Give up all kernels and prepared weights; collective over all ranks."""
        for capacity in self.capacities:
            self.drop_capacity(capacity)
        for layer in self._layers.values():
            layer.destroy()
        self._layers.clear()

    def _prepared(self, experts: torch.nn.Module, num_experts: int, top_k: int, capacity: int) -> Any:
        from flashinfer.moe_ep import BootstrapConfig, FleetParams, MegaConfig, MoEEpLayer, MoEWeightPack

        w13, w2 = (experts.get_parameter(name).detach() for name in ("gate_up_proj", "down_proj"))
        bootstrap = BootstrapConfig(
            world_size=self._layout.world_size,
            rank=self._rank,
            device=self._device.index or 0,
            process_group=self._group,
        )
        fleet = FleetParams(num_experts=num_experts, max_tokens_per_rank=capacity, token_hidden_size=w13.shape[2])
        kernel = self._kernel_config(w2.shape[2], top_k, self.scales.get(id(experts), (1.0, 1.0)))
        return MoEEpLayer(bootstrap, fleet, MoEWeightPack(w13, w2), backend=MegaConfig(megakernel=kernel))

    def _knobs(self, experts: torch.nn.Module, num_experts: int, top_k: int, capacity: int) -> dict[str, Any] | None:
        """Launch settings of a kernel; `None`: FlashInfer's own for this capacity.

        With one scale a tensor FlashInfer keeps sums in the tensor cores' accumulator over all columns. That is coarser
        than float32: the intermediate, rounded to fp8 from it, was off by 0.015 of its norm at a hidden size of 7168.
        `2xacc` promotes the sum every 128 columns, as kernels with scales of blocks do; so what is not tuned on this
        host runs with the tiles that FlashInfer's table has for those.
        """
        if self.quantisation != "fp8":
            return None
        from flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel import default_knobs, lookup_knobs

        _, hidden_size, intermediate_size = experts.get_parameter("down_proj").shape
        knobs = lookup_knobs(
            dtype="fp8_e4m3",
            fp8_scale_mode="per_tensor",
            world_size=self._layout.world_size,
            hidden=hidden_size,
            intermediate=intermediate_size,
            num_experts=num_experts,
            topk=top_k,
            max_tokens=capacity,
        )
        knobs = knobs or default_knobs(capacity, fp8_scale_mode="blockwise")
        # Only as a knob: the setting of this name in the kernel's configuration is overwritten by FlashInfer's table.
        return {**knobs, "fp8_accum_mode": "2xacc"}

    def _kernel_config(self, intermediate_size: int, top_k: int, scales: tuple[float, float]) -> Any:
        from flashinfer.moe_ep import Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig as Sm90Bf16
        from flashinfer.moe_ep import Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig as Sm90Fp8

        if self.quantisation == "none":
            return Sm90Bf16(intermediate_size=intermediate_size, top_k=top_k)
        if self.quantisation == "fp8_blockwise":
            return Sm90Fp8(intermediate_size=intermediate_size, top_k=top_k, fp8_scale_mode="blockwise")
        return Sm90Fp8(
            intermediate_size=intermediate_size,
            top_k=top_k,
            fc1_activation_dequant_scale=scales[0],
            fc2_activation_dequant_scale=scales[1],
        )


def _bytes_of(workspace: Any) -> int:
    """Bytes of a workspace's tensors, and of those its compiled kernel works in.

    FlashInfer has no public word for them; attributes that another release lacks count as nothing.
    """
    compiled = getattr(workspace._frontend, "_mega", None)
    inner = [getattr(compiled, name, None) for name in ("local_workspace", "shared_workspace")]
    return sum(tensor.nbytes for tensor in (*workspace._sym_roots, *inner) if tensor is not None)
