"""Ranks, one MoE layer with its inputs and float32 reference, and every path to its experts; for check_layers.py."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from expert_pool.dispatch.budgets.budget import RowFormat, exchange_budget, exchange_rows
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.limits import Limits, QuantisationKind
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.collectives import Collectives
from expert_pool.dispatch.dispatchers.contract import INVALID_EXPERT_ID
from expert_pool.dispatch.experts.expert_weights import plain_weights, unsupported_traits
from expert_pool.dispatch.experts.pairs.pair_budget import pair_budget
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.mega import MegaPath
from expert_pool.dispatch.paths.mega_kernels import MegaKernels
from expert_pool.dispatch.paths.path import DispatchedPath
from expert_pool.dispatch.probe import HostGroup
from expert_pool.dispatch.registry import dispatcher_of
from harness import gpu_of, ranks_share_gpu
from layer_watch import Watch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from handle import links_of
from rounded_experts import Blockwise, PerTensor

GROUP_TIMEOUT = timedelta(seconds=100)
# `[N, H]` rows of one of this rank's experts, with their routing weights `[N]` -> `[N, H]` float32, weighted.
Chain = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Of one MoE layer."""

    hidden: int
    experts: int
    top_k: int
    intermediate: int


SIZES = {
    "Q": Size(2048, 128, 8, 768),
    "D": Size(7168, 64, 8, 2048),
    "D256": Size(7168, 256, 8, 2048),
    "odd": Size(2048, 64, 6, 1408),
    # The last tile of gate and up is half empty where a kernel's is 256 wide.
    "ragged": Size(256, 8, 2, 192),
    "small": Size(256, 16, 2, 128),
    # In fp8 refused by the pool; here one sees what the kernel makes of it.
    "narrow": Size(256, 8, 2, 64),
}


class World:
    """This process among its peers, with the groups of a rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        device: str = "cuda",
        hangs_after: float = 600.0,
        memory_share: float = 0.0,
    ):
        self.rank, self.size = rank, size
        self.layout = Layout(size)
        self.on_gpu = device == "cuda"
        self.device = torch.device("cuda", gpu_of(rank)) if self.on_gpu else torch.device("cpu")
        self.started = time.perf_counter()
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            if memory_share and ranks_share_gpu():
                # A rank then gives back what it holds unused where it would else take the memory of another.
                torch.cuda.set_per_process_memory_fraction(memory_share / size)
        self.watch = Watch(rank, self.device, hangs_after)
        self.host_group: dist.ProcessGroup | None = None
        self.ep_group: Any = None
        if size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=size,
                timeout=GROUP_TIMEOUT,
                device_id=self.device if self.on_gpu else None,
            )
            self.host_group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            self.ep_group = dist.group.WORLD
        self.hosts = HostGroup(self.host_group, rank) if self.host_group is not None else None
        self.collectives = Collectives({"ep": self.ep_group} if size > 1 else {})

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f}s] {line}", flush=True)

    def gather(self, value: Any) -> list[Any]:
        """What every rank holds, on the host."""
        if self.host_group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        self.synchronize()
        self.gather(None)


@dataclass
class Layer:
    """One MoE layer of a world: this rank's experts, on its own GPU, from its own seed.

    Attributes:
        module: of the model family, with the experts.
        local: the layer as ranks describe it, over that module's weights.
    """

    world: World
    size: Size
    module: Qwen3MoeExperts = field(init=False)
    local: MoeLayer = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.make_experts()
        self.local = self.describe()

    @property
    def num_local(self) -> int:
        return self.size.experts // self.world.size

    def make_experts(self) -> Qwen3MoeExperts:
        """A module of the model family with random weights, equal at every call on a rank."""
        size = self.size
        config = Qwen3MoeConfig(
            hidden_size=size.hidden,
            moe_intermediate_size=size.intermediate,
            num_experts=self.num_local,
            num_experts_per_tok=size.top_k,
        )
        config._experts_implementation = "grouped_mm" if self.world.on_gpu else "eager"
        torch.set_default_dtype(torch.bfloat16)
        with self.world.device:
            module = Qwen3MoeExperts(config).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        module._is_expert_parallel = True
        generator = torch.Generator(self.world.device).manual_seed(100 + self.world.rank)
        module.gate_up_proj.normal_(0.0, size.hidden**-0.5, generator=generator)
        module.down_proj.normal_(0.0, size.intermediate**-0.5, generator=generator)
        return module

    def describe(self) -> MoeLayer:
        """The layer, the first and only one of its model."""
        size, module = self.size, self.module
        shape = MoeShape(
            "the layer",
            size.experts,
            size.hidden,
            size.top_k,
            "float32",
            size.intermediate,
            unsupported_traits(module),
        )
        return MoeLayer(
            index=0,
            shape=shape,
            dtype=torch.bfloat16,
            num_local=self.num_local,
            first_expert=self.world.rank * self.num_local,
            weights=plain_weights(module, shape.name),
            forward=module.forward,
        )

    def inputs(self, num_rows: int, seed: int) -> "Inputs":
        """Fresh rows of this rank, routed to distinct experts."""
        size, device = self.size, self.world.device
        generator = torch.Generator(device).manual_seed(1000 * seed + self.world.rank)
        x = torch.randn(num_rows, size.hidden, generator=generator, device=device).to(torch.bfloat16)
        scores = torch.rand(num_rows, size.experts, generator=generator, device=device)
        weights, ids = scores.topk(size.top_k, dim=1)
        return Inputs(x, ids, weights / weights.sum(dim=1, keepdim=True))

    def in_float32(self, expert: int, x_NH: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
        """A `Chain` that rounds nothing."""
        module = self.module
        gate, up = (x_NH.float() @ module.gate_up_proj[expert].float().T).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up
        return (h @ module.down_proj[expert].float().T) * weight_N.unsqueeze(1)

    def reference(self, inputs: "Inputs", chain: Chain | None = None) -> torch.Tensor:
        """`[T, H]` in float32 over all ranks' experts, each computed by `chain`; collective."""
        chain = chain or self.in_float32
        world, size = self.world, self.size
        counts = world.gather(inputs.x.shape[0])
        largest = max(*counts, 1)
        everyone = [self._everywhere(inputs.padded(largest), part, largest) for part in range(3)]
        x, ids, weights = everyone
        y = torch.zeros(world.size * largest, size.hidden, device=world.device)
        first = world.rank * self.num_local
        for expert in range(self.num_local):
            row, slot = (ids == first + expert).nonzero(as_tuple=True)
            for part in torch.arange(row.numel(), device=world.device).split(4096):
                r, s = row[part], slot[part]
                y.index_add_(0, r, chain(expert, x[r], weights[r, s]))
        if world.size > 1:
            dist.all_reduce(y)
        return y.view(world.size, largest, -1)[world.rank, : inputs.x.shape[0]]

    def _everywhere(self, padded: "Inputs", part: int, largest: int) -> torch.Tensor:
        own = (padded.x, padded.ids, padded.weights)[part].contiguous()
        if self.world.size == 1:
            return own
        gathered = own.new_empty(self.world.size * largest, own.shape[1])
        dist.all_gather_into_tensor(gathered, own)
        return gathered


@dataclass
class Inputs:
    """Rows of one rank, `[T, H]` bf16, with `[T, K]` global ids and float32 weights."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def padded(self, num_rows: int, filler: float = 0.0) -> "Inputs":
        """With rows that carry no token behind them, as the pool pads; what those hold is undefined."""
        extra = num_rows - self.x.shape[0]
        return Inputs(
            torch.cat([self.x, self.x.new_full((extra, self.x.shape[1]), filler)]),
            torch.cat([self.ids, self.ids.new_full((extra, self.ids.shape[1]), INVALID_EXPERT_ID)]),
            torch.cat([self.weights, self.weights.new_zeros(extra, self.weights.shape[1])]),
        )

    def copy_from(self, other: "Inputs") -> None:
        self.x.copy_(other.x)
        self.ids.copy_(other.ids)
        self.weights.copy_(other.weights)


@dataclass
class Built:
    """A path that is ready to run, and how to give back what it holds.

    Attributes:
        path: an `ExpertPath`.
        layer: that it computes.
        close: gives up its memory.
        limit: of its error.
        filler: of rows that carry no token.
        rounded: in fp8, references that round the same operands; the second, where there is one, rounds the
            intermediate as the kernel's own sums give it.
    """

    path: Any
    layer: MoeLayer
    close: Callable[[], None]
    limit: float = 5e-3
    filler: float = float("nan")
    rounded: tuple[Chain, ...] = ()

    def run(self, inputs: Inputs, geometry: StepGeometry) -> torch.Tensor:
        return self.path.run(self.layer, inputs.x, inputs.ids, inputs.weights, geometry)


def dispatched(layer: Layer, dispatch: str, experts: str, capacity: int, others: tuple[int, ...] = ()) -> Built:
    """A dispatcher with an expert backend behind it.

    Args:
        layer: of a world.
        dispatch, experts: kinds.
        capacity: rows a rank.
        others: experts of further layers that FlashInfer's dispatcher is made for, of rows of the same format.
    """
    world, size = layer.world, layer.size
    row_format = RowFormat(size.hidden, size.top_k, "bfloat16", "float32")
    budget = exchange_budget(Limits(), world.layout, [row_format], capacity=capacity)
    backend: Any = TorchExperts(world.device)
    if experts == "cutedsl":
        from expert_pool.dispatch.experts.quack_experts import QuackExperts

        rows = exchange_rows(world.layout, capacity)
        backend = QuackExperts(pair_budget(rows, [layer.local.shape], world.size), world.device)
    if experts == "triton":
        from expert_pool.dispatch.experts.triton_experts import TritonExperts

        rows = exchange_rows(world.layout, capacity)
        backend = TritonExperts(pair_budget(rows, [layer.local.shape], world.size), world.device)
    if dispatch == "flashinfer":
        from expert_pool.dispatch.dispatchers.flashinfer_alltoall import FlashInferDispatcher

        world.watch.begin(f"FlashInfer's dispatcher for {[size.experts, *others]} experts")
        dispatcher: Any = FlashInferDispatcher(
            world.collectives,
            world.ep_group,
            world.layout,
            world.rank,
            capacity,
            [(num_experts, row_format) for num_experts in (size.experts, *others)],
            60,
            world.device,
        )
        world.watch.links = links_of(dispatcher)
    else:
        with torch.inference_mode(False):
            dispatcher = dispatcher_of(dispatch)(world.collectives, world.rank, budget, world.device)
    path = DispatchedPath(dispatcher, backend)
    path.adopt(layer.local)
    started = time.perf_counter()
    path.prepare(world.hosts)
    if path.held.tuning:
        world.say(f"  tuned in {time.perf_counter() - started:.1f} s: {path.held.tuning}")

    return Built(path, layer.local, dispatcher.close)


class CoarseKernels(MegaKernels):
    """fp8 kernels whose sums stay in the tensor cores' accumulator over all columns, FlashInfer's default.

    Against these one sees what the pool's promotion of sums costs, and what it is good for.
    """

    def _knobs(self, *_: Any) -> None:
        return None


def mega(layer: Layer, quantisation: QuantisationKind, capacity: int, is_coarse: bool = False) -> Built:
    """FlashInfer's mega kernel as the pool calls it; or with fp8 sums as FlashInfer takes them by default."""
    world, module = layer.world, layer.module
    kind = CoarseKernels if is_coarse else MegaKernels
    kernels = kind(world.ep_group, world.layout, world.rank, world.device, quantisation)
    weights, rounded = (module.gate_up_proj.detach(), module.down_proj.detach()), ()
    if quantisation == "fp8":
        scales = kernels.scales[layer.local.index] = fp8_scales(layer)
        rounded = (PerTensor(*weights, scales), PerTensor(*weights, scales, accumulates_as_kernel=True))
        rounded = rounded if is_coarse else rounded[:1]
    elif quantisation == "fp8_blockwise":
        rounded = (Blockwise(*weights),)
    path = MegaPath(world.collectives, kernels, world.rank, capacity)
    with mock.patch("expert_pool.dispatch.paths.mega.refuse_experts"):  # widths that it refuses are to be seen too
        path.adopt(layer.local)
    path.prepare(world.hosts)
    limit = 5e-3 if quantisation == "none" else 8e-2
    # The padding stays finite: the kernel reads rows that carry no token.
    assert world.hosts is not None, "the kernel exchanges between ranks"
    return Built(path, layer.local, partial(kernels.keep_only, (), world.hosts), limit, 1e3, rounded)


def fp8_scales(layer: Layer) -> tuple[float, float]:
    """Scales of both projections' inputs from random rows, the largest of all ranks."""
    inputs = layer.inputs(256, seed=77)
    largest_h = 0.0
    for expert in range(layer.num_local):
        gate, up = (inputs.x @ layer.module.gate_up_proj[expert].T).float().chunk(2, dim=-1)
        largest_h = max(largest_h, float((torch.nn.functional.silu(gate) * up).abs().max()))
    found = torch.tensor(layer.world.gather((float(inputs.x.abs().max()), largest_h))).max(dim=0).values
    return tuple(float(value) * 1.05 / 448.0 for value in found)  # type: ignore[return-value]


PATHS: dict[str, Callable[[Layer, int], Built]] = {
    "local+torch": lambda layer, capacity: dispatched(layer, "local", "torch", capacity),
    "local+cutedsl": lambda layer, capacity: dispatched(layer, "local", "cutedsl", capacity),
    "local+triton": lambda layer, capacity: dispatched(layer, "local", "triton", capacity),
    "alltoall+torch": lambda layer, capacity: dispatched(layer, "alltoall", "torch", capacity),
    "allgather+torch": lambda layer, capacity: dispatched(layer, "allgather", "torch", capacity),
    "allgather+cutedsl": lambda layer, capacity: dispatched(layer, "allgather", "cutedsl", capacity),
    "allgather+triton": lambda layer, capacity: dispatched(layer, "allgather", "triton", capacity),
    "flashinfer+torch": lambda layer, capacity: dispatched(layer, "flashinfer", "torch", capacity),
    "flashinfer-mixed+torch": lambda layer, capacity: dispatched(
        layer, "flashinfer", "torch", capacity, (2 * layer.size.experts,)
    ),
    "flashinfer+cutedsl": lambda layer, capacity: dispatched(layer, "flashinfer", "cutedsl", capacity),
    "flashinfer+triton": lambda layer, capacity: dispatched(layer, "flashinfer", "triton", capacity),
    "mega": lambda layer, capacity: mega(layer, "none", capacity),
    "mega-fp8": lambda layer, capacity: mega(layer, "fp8", capacity),
    "mega-fp8-coarse": lambda layer, capacity: mega(layer, "fp8", capacity, is_coarse=True),
    "mega-fp8-blockwise": lambda layer, capacity: mega(layer, "fp8_blockwise", capacity),
}
