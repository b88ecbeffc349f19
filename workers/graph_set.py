"""Putting a rank's graph runners together: which kinds, over which buffers, and what this rank can record."""

from collections.abc import Callable, Mapping

import psutil
import torch

from ..dispatch.collectives import Collectives
from ..dispatch.contract import Dispatcher
from ..dispatch.geometry import pad_to_ranks
from ..graphs.backend import CaptureBackend, StaticReplayBackend
from ..graphs.kinds import KINDS
from ..graphs.lockstep import LockstepRank
from ..graphs.plan import CaptureEntry, CapturePlan, make_plan
from ..graphs.runner import FrozenFacts, GraphRunner
from ..graphs.static import BufferSpec, StaticBuffers
from .inputs import target_buffer_specs
from .kv_cache import BlockAllocator
from .model import TargetModel
from .rank_config import RankConfig

EXPERT_BACKEND = "torch grouped_mm"


def frozen_facts(dispatcher: Dispatcher) -> FrozenFacts:
    """What recordings freeze of this dispatcher and of the experts behind it."""
    return FrozenFacts(
        dispatcher=dispatcher.name,
        expert_backend=EXPERT_BACKEND,
        capacity=dispatcher.capacity,
        workspace_bytes=dispatcher.num_bytes,
    )


def make_backend(device: torch.device) -> CaptureBackend:
    """CUDA graphs where there is CUDA, static replay elsewhere."""
    if device.type == "cuda":
        from ..graphs.cuda import CudaGraphBackend

        return CudaGraphBackend(device)
    return StaticReplayBackend()


class RecordingMeans:
    """Whether this rank can record an entry: KV slots, rows of the workspace, free memory.

    Args:
        config: what the rank was built from.
        allocator: of its KV blocks.
        facts: of its dispatcher.
    """

    def __init__(self, config: RankConfig, allocator: BlockAllocator, facts: Callable[[], FrozenFacts]):
        self._config = config
        self._allocator = allocator
        self._facts = facts

    def __call__(self, entry: CaptureEntry) -> str | None:
        requests = entry.bucket if KINDS[entry.kind].unit == "requests" else 1
        blocks = requests * self._allocator.blocks_for(entry.num_tokens // requests)
        if blocks > self._allocator.num_blocks:
            return f"needs {blocks} KV blocks, this rank has {self._allocator.num_blocks}: raise cache.num_tokens"
        rows, capacity = -(-entry.num_tokens // self._config.layout.attn_tp_size), self._facts().capacity
        if rows > capacity:
            return f"needs {rows} dispatch rows, the capacity is {capacity}: raise max_dispatch_tokens_per_rank"
        needed, free = activation_bytes(self._config, entry), psutil.virtual_memory().available
        if needed > free:
            return f"needs about {needed} bytes to run, {free} are free"
        return None


def activation_bytes(config: RankConfig, entry: CaptureEntry) -> int:
    """A lower bound on what a step of this entry allocates: hidden states of a layer or two, and logits in float32."""
    spec = config.spec
    hidden = max(layer.hidden_size for layer in spec.moe)
    return entry.num_tokens * (8 * hidden * spec.dtype_bytes + 4 * spec.vocab_size)


def make_graphs(
    config: RankConfig,
    rank: int,
    target: TargetModel,
    collectives: Collectives,
    facts: Callable[[], FrozenFacts],
    can_record: Callable[[CaptureEntry], str | None],
    device: torch.device,
) -> LockstepRank:
    """The graph runners of a rank, with static buffers allocated for the largest entry of the plan."""
    plan, backend = make_plan(config.limits), make_backend(device)
    runners: dict[str, GraphRunner] = {}
    target_entries = [entry for entry in plan.entries if KINDS[entry.kind].model == "target"]
    if target_entries:
        buffers = StaticBuffers(_target_specs(config, target_entries), device)
        for name in {entry.kind for entry in target_entries}:
            runners[name] = GraphRunner(
                KINDS[name],
                target.graph_step,
                buffers,
                config.limits.max_running_requests,
                backend,
                config.layout,
                rank,
                collectives,
                facts,
            )
    return LockstepRank(rank, runners, can_record)


def _target_specs(config: RankConfig, entries: list[CaptureEntry]) -> Mapping[str, BufferSpec]:
    tokens = [pad_to_ranks(entry.num_tokens, config.layout.attn_tp_size) for entry in entries]
    by_request = [entry for entry in entries if KINDS[entry.kind].unit == "requests"]
    max_requests = max([config.limits.max_running_requests, *(entry.bucket for entry in by_request)])
    return target_buffer_specs(
        max_tokens=max(tokens),
        max_requests=max_requests,
        max_due=max([config.limits.max_running_requests, *(entry.num_tokens for entry in by_request)]),
        max_blocks=-(-config.spec.context_length // config.block_size),
    )


def static_bytes(config: RankConfig) -> int:
    """Bytes of the static buffers of a rank, as they will be allocated."""
    entries = [entry for entry in make_plan(config.limits).entries if KINDS[entry.kind].model == "target"]
    return sum(spec.num_bytes for spec in _target_specs(config, entries).values()) if entries else 0


def planned(config: RankConfig) -> CapturePlan:
    """The graphs that a pool of this configuration will ask its ranks to record."""
    return make_plan(config.limits)
