"""FlashInfer's SM90 CuTe DSL mega kernels of one rank: prepared weights, shared by kernels of every capacity.

A layer's weights are prepared once. A kernel of another capacity is another workspace over the same weights, and layers
of one shape share the workspace of a capacity, its symmetric memory and its compiled kernel: FlashInfer pools them by
process group, shape and settings, which are the same objects and values here for all layers. So a capacity costs one
workspace a shape and one compilation, however many layers there are.

FlashInfer is imported at construction.
"""

import logging
import os
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..budgets.layout import Layout
from ..budgets.limits import QuantisationKind
from ..budgets.moe_shape import MoeShape
from ..errors import ConfigError
from ..experts.expert_weights import DOWN, GATE_UP
from ..moe_layer import MoeLayer
from ..probe import HostGroup, require_equal

logger = logging.getLogger(__name__)

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

# Mega reads and writes its peers' memory itself. The thread by which NVSHMEM serves everything else reads pinned memory
# that NVSHMEM 3.4.5 never wrote: where a library that was there before left a certain number, it takes it for the wish
# to end, and the next allocation ends the process ("nvshmem API called before nvshmem_init").
_WITHOUT_PROXY = {
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_IB_ENABLE_IBGDA": "0",
}


def leave_out_proxy(environment: MutableMapping[str, str]) -> None:
    """Have NVSHMEM start without its proxy thread, unless the user has set otherwise; before it is initialised."""
    for name, value in _WITHOUT_PROXY.items():
        environment.setdefault(name, value)


@dataclass(frozen=True)
class AdoptedLayer:
    """FlashInfer's layer over prepared weights, and the shape that launch settings are looked up by."""

    layer: Any
    shape: MoeShape


class MegaKernels:
    """Prepared layers of one rank.

    Args:
        group: process group of all ranks, over which the kernels' memory is set up.
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        device: this rank's GPU.
        quantisation: `none` computes in bfloat16, the others in fp8; equal on every rank.

    Attributes:
        scales: of the inputs of both projections of a layer in per-tensor fp8, by its index: a number is its fp8
            code times the scale. Set before `adopt`, equal on every rank.
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
        self._layers: dict[int, AdoptedLayer] = {}
        self._workspaces: dict[tuple[int, int], Any] = {}

    def adopt(self, layer: MoeLayer, capacity: int) -> None:
        """Prepare a layer's weights, once for kernels of all capacities; collective over all ranks."""
        if layer.index not in self._layers:
            self._layers[layer.index] = AdoptedLayer(self._prepared(layer, capacity), layer.shape)

    def prepare(self, indices: Sequence[int], capacity: int, group: HostGroup | None) -> None:
        """Have a compiled kernel of this capacity for each of these layers; collective over all ranks.

        The first layer of a shape compiles the kernel and runs it once, so that no step compiles or allocates. The
        kernel's launch settings come from a file of each host, so the ranks compare them before they use them.

        Args:
            indices: of adopted layers, in the same order on every rank.
            capacity: rows a rank, equal on every rank.
            group: all ranks; `None` for one rank alone.

        Raises:
            ConfigError: on every rank alike, where launch settings differ.
            PeerGaveUp: another rank failed before.
        """
        for index in indices:
            if (index, capacity) in self._workspaces:
                continue
            if group is not None:
                # What one rank alone holds cannot be given back.
                group.meet()
            compiled = {id(handle._backend_workspace) for handle in self._workspaces.values()}
            adopted = self._layers[index]
            handle = adopted.layer.create_workspace(capacity, knobs=self._knobs(adopted, capacity))
            # Before what follows can fail: FlashInfer's layer holds it, so it has to be counted and given back.
            self._workspaces[index, capacity] = handle
            if id(handle._backend_workspace) in compiled:
                continue
            if group is not None:
                what = f"the launch settings of mega@{capacity}, from FlashInfer's cache of tuned kernels on each host,"
                require_equal(group, what, _settings_of(handle))
            adopted.layer.warmup(workspace=handle)

    def run(self, index: int, capacity: int, tensors: Any) -> torch.Tensor:
        """The layer's kernel of this capacity on `MoEEpTensors`; collective over all ranks."""
        return self._layers[index].layer.forward(tensors, workspace=self._workspaces[index, capacity])

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
        found = {_settings_of(handle) for (_, rows), handle in self._workspaces.items() if rows == capacity}
        return " | ".join(sorted(found))

    def keep_only(self, capacities: Collection[int], group: HostGroup) -> None:
        """Give up kernels of other capacities, and all prepared weights where no kernel is left; collective.

        Giving memory back takes all ranks. So a kernel that some rank failed to build stays where it was built, and
        what it shares with others stays with it.
        """
        given_up = [key for key in self._workspaces if key[1] not in capacities]
        by_rank = group.gather((len(self._layers), given_up), tuple[int, list[tuple[int, int]]])
        everywhere = set.intersection(*(set(found) for _, found in by_rank))
        for key in sorted(everywhere):
            self._workspaces.pop(key).destroy()
        if any(found != by_rank[0] for found in by_rank):
            logger.warning("mega kernels that not all ranks could build keep their memory: %s", by_rank)
        elif not self._workspaces:
            for adopted in self._layers.values():
                adopted.layer.destroy()
            self._layers.clear()

    def _prepared(self, layer: MoeLayer, capacity: int) -> Any:
        from flashinfer.moe_ep import BootstrapConfig, FleetParams, MegaConfig, MoEEpLayer, MoEWeightPack

        w13, w2 = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
        shape = layer.shape
        bootstrap = BootstrapConfig(
            world_size=self._layout.world_size,
            rank=self._rank,
            device=self._device.index or 0,
            process_group=self._group,
        )
        fleet = FleetParams(
            num_experts=shape.num_experts, max_tokens_per_rank=capacity, token_hidden_size=shape.hidden_size
        )
        scales = self.scales.get(layer.index, (1.0, 1.0))
        kernel = self._kernel_config(shape.intermediate_size, shape.top_k, scales)
        leave_out_proxy(os.environ)
        return MoEEpLayer(bootstrap, fleet, MoEWeightPack(w13, w2), backend=MegaConfig(megakernel=kernel))

    def _knobs(self, adopted: AdoptedLayer, capacity: int) -> dict[str, Any] | None:
        """Launch settings of a kernel; `None`: FlashInfer's own for this capacity.

        With one scale a tensor FlashInfer keeps sums in the tensor cores' accumulator over all columns. That is coarser
        than float32: the intermediate, rounded to fp8 from it, was off by 0.015 of its norm at a hidden size of 7168.
        `2xacc` promotes the sum every 128 columns, as kernels with scales of blocks do; so what is not tuned on this
        host runs with the tiles that FlashInfer's table has for those.
        """
        if self.quantisation != "fp8":
            return None
        from flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel import default_knobs, lookup_knobs

        knobs = lookup_knobs(
            dtype="fp8_e4m3",
            fp8_scale_mode="per_tensor",
            world_size=self._layout.world_size,
            hidden=adopted.shape.hidden_size,
            intermediate=adopted.shape.intermediate_size,
            num_experts=adopted.shape.num_experts,
            topk=adopted.shape.top_k,
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


def _settings_of(handle: Any) -> str:
    """Launch settings of a kernel that have to be alike on all ranks."""
    config = handle._backend_workspace._frontend.config
    return ", ".join(f"{name} {getattr(config, name)}" for name in _SHARED_SETTINGS if hasattr(config, name))


def _bytes_of(workspace: Any) -> int:
    """Bytes of a workspace's tensors, and of those its compiled kernel works in.

    FlashInfer has no public word for them.

    Raises:
        ConfigError: a FlashInfer that keeps them elsewhere: counted as nothing they would break `tuning.max_bytes`.
    """
    try:
        compiled = workspace._frontend._mega
        tensors = (*workspace._sym_roots, compiled.local_workspace, compiled.shared_workspace)
        return sum(tensor.nbytes for tensor in tensors)
    except AttributeError as error:
        raise ConfigError(
            f"the memory of FlashInfer's mega kernel cannot be counted ({error}): install the FlashInfer that "
            "expert-pool[gpu] names, or set dispatch to 'flashinfer' or 'allgather'"
        ) from error
