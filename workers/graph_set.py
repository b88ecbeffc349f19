"""Putting a rank's graph runners together: which kinds, over which buffers, and what this rank can record."""

from collections.abc import Callable

import psutil
import torch

from ..dispatch.budgets.step_kinds import KINDS, recorded_kinds
from ..dispatch.expert_path import ExpertPath
from ..dispatch.moe import MoeExchange
from ..graphs.backend import CaptureBackend, StaticReplayBackend
from ..graphs.lockstep import LockstepRank
from ..graphs.plan import CaptureEntry
from ..graphs.runner import GraphModel, GraphRunner
from ..graphs.static import StaticBuffers
from .attention.kv_cache import BlockAllocator
from .attention.registry import chosen
from .model.target import TargetModel
from .rank_config import RankConfig
from .sizes.step_inputs import buffer_specs
from .speculation.draft import DraftModel


def make_backend(device: torch.device) -> CaptureBackend:
    """CUDA graphs where there is CUDA, static replay elsewhere."""
    if device.type == "cuda":
        from ..graphs.cuda import CudaGraphBackend

        return CudaGraphBackend(device)
    return StaticReplayBackend()


class RecordingMeans:
    """Whether this rank can record an entry: attention, KV slots, rows of the workspace, free memory of its device.

    Args:
        config: what the rank was built from.
        allocator: of its KV blocks.
        path: to the experts.
        device: of this rank.
    """

    def __init__(
        self,
        config: RankConfig,
        allocator: BlockAllocator,
        path: ExpertPath,
        device: torch.device,
    ):
        self._device = device
        self._config = config
        self._allocator = allocator
        self._path = path

    def __call__(self, entry: CaptureEntry) -> str | None:
        refusal = chosen(self._config).entry_refusal(self._config, entry)
        if refusal is not None:
            return refusal
        requests = entry.bucket if KINDS[entry.kind].unit == "requests" else 1
        blocks = requests * self._allocator.blocks_for(entry.num_tokens // requests)
        if blocks > self._allocator.num_blocks:
            return f"needs {blocks} KV blocks, this rank has {self._allocator.num_blocks}: raise cache.num_tokens"
        rows, capacity = -(-entry.num_tokens // self._config.layout.attn_tp_size), self._path.held.capacity
        if rows > capacity:
            return f"needs {rows} dispatch rows, the capacity is {capacity}: raise limits.max_dispatch_tokens_per_rank"
        needed, free = activation_bytes(self._config, entry), free_bytes(self._device)
        if needed > free:
            return (
                f"needs about {needed:,} bytes to run, {free:,} are free: lower limits.cuda_graph_max_bs or "
                "limits.piecewise_cuda_graph_max_tokens, or leave more free by cache.num_tokens or, on GPUs, "
                "cache.gpu_memory_utilization"
            )
        return None


def free_bytes(device: torch.device) -> int:
    """Bytes that a step on this device may still allocate, those that PyTorch holds and does not use included."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def activation_bytes(config: RankConfig, entry: CaptureEntry) -> int:
    """A lower bound on what a step of this entry allocates: hidden states of a layer or two, and logits in float32.

    Of a prefill, which counts in tokens, logits of each request's last one alone.
    """
    spec = config.spec
    hidden = max(spec.hidden_size, *(layer.hidden_size for layer in spec.moe))
    most = config.limits.max_running_requests
    num_due = KINDS[entry.kind].num_due(entry.bucket, entry.tokens_per_request, most)
    return entry.num_tokens * 8 * hidden * spec.dtype_bytes + num_due * 4 * spec.vocab_size


def make_graphs(
    config: RankConfig,
    target: TargetModel,
    draft: DraftModel | None,
    exchange: MoeExchange,
    can_record: Callable[[CaptureEntry], str | None],
    greedy: Callable[[torch.Tensor], torch.Tensor],
) -> LockstepRank:
    """The graph runners of a rank; target and draft graphs each have static buffers for their largest entry."""
    backend = make_backend(target.device)
    steps = {"target": target.graph_step} | ({"draft": draft.graph_step} if draft is not None else {})
    finishes = {"target": greedy}
    runners: dict[str, GraphRunner] = {}
    for model, specs in buffer_specs(config).items():
        graph_model = GraphModel(
            steps[model],
            StaticBuffers(specs, target.device),
            config.limits.max_running_requests,
            target.attention.prepare,
            finishes.get(model),
        )
        for kind in recorded_kinds(config.limits):
            if kind.model == model:
                runners[kind.name] = GraphRunner(kind, graph_model, exchange, backend)
    return LockstepRank(exchange.rank, runners, can_record)
