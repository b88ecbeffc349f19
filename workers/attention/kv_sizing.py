"""How many KV blocks fit on a GPU: measured once, with weights and exchange buffers in place, the same on every rank.

Every rank runs one eager forward of the largest step that the limits allow, and reads what the GPU then holds. What is
left of the share that `cache.gpu_memory_utilization` gives, less an estimate for CUDA graphs, is for the KV cache. All
ranks take the smallest number of blocks that fits on any of them, so a request that fits on one fits on all.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...dispatch.budgets.budget import largest_step
from ...dispatch.budgets.step_kinds import tokens_per_request
from ...dispatch.collectives import all_gather_tensors
from ...dispatch.errors import ConfigError
from ...dispatch.moe import MoeExchange
from ...graphs.lockstep import LockstepRank
from ...graphs.plan import CaptureEntry
from ..agreement import Agreement, StateReader
from ..model.target import TargetModel
from ..rank_config import RankConfig
from ..request import Request, SamplingParams
from ..scheduling.inputs import StepInputs
from ..scheduling.sampler import sample
from ..scheduling.scheduler import BatchKind
from ..scheduling.sequence import TokenSequence
from ..sizes.attention import GRAPH_BYTES, recorded_entries
from ..sizes.kv_blocks import PADDING_BLOCK, PADDING_SLOT, block_bytes, blocks_of_context, least_blocks
from ..sizes.step_inputs import static_bytes
from ..step_plan import Proposal
from .backend import AttentionBackend, PagedCache
from .registry import choice, chosen

logger = logging.getLogger(__name__)


class MemoryReading(NamedTuple):
    """What one GPU holds after the largest step, before its KV cache is made. Bytes.

    Attributes:
        total: of the GPU.
        others: in use outside PyTorch's allocator: CUDA, communication, symmetric memory, other processes.
        peak: the most that PyTorch had allocated at once, weights and exchange buffers included.
        graphs: reserved for CUDA graphs and their static buffers, an estimate.
    """

    total: int
    others: int
    peak: int
    graphs: int

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache; negative where there are none."""
        return int(self.total * utilization) - self.others - self.peak - self.graphs


def make_target(
    config: RankConfig, model: PreTrainedModel, exchange: MoeExchange, num_blocks: int, device: torch.device
) -> TargetModel:
    """The model over a KV cache of this many blocks, the padding block included."""
    with torch.inference_mode(False):
        cache = chosen(config).make_cache(config, num_blocks, device)
    return TargetModel(model, exchange, cache, make_attention(config, model, cache, device), device)


def make_attention(
    config: RankConfig, model: PreTrainedModel, cache: PagedCache, device: torch.device
) -> AttentionBackend:
    """The attention that ranks take, over a cache of its own; the same on every rank."""
    attention, reason = choice(config)
    if reason is not None and attention.computed_in == "torch":
        logger.warning("attention runs in PyTorch: %s", reason)
    return attention.make(config, model, cache, device)


def measured_blocks(
    config: RankConfig,
    model: PreTrainedModel,
    exchange: MoeExchange,
    layers: str,
    agreement: Agreement,
    host_group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """KV blocks of every rank, from a forward of the largest step; collective over all ranks.

    Args:
        config: equal on every rank; its `gpu_memory_utilization` is set.
        model: of this rank, on its device.
        exchange: that its experts are bound to, with the path that it will keep.
        layers: what runs in its layers, for what ranks compare.
        agreement: of all ranks.
        host_group: a Gloo group of all ranks.
        device: of this rank.

    Raises:
        ConfigError: on every rank alike; see `blocks_for_all`.
    """
    target = make_target(config, model, exchange, 1, device)
    state = StateReader(config, exchange.path, layers, LockstepRank(exchange.rank, {}, lambda _: None))
    reading, step_bytes = read_memory(partial(run_largest_step, config, target, agreement, state), device)
    entries = recorded_entries(config)
    attention_bytes = target.attention.graph_bytes(entries)
    reserved = graph_reserve(config, entries, step_bytes, attention_bytes)
    return agree_on_blocks(reading._replace(graphs=reserved), config, host_group)


def blocks_that_fit(reading: MemoryReading, utilization: float, bytes_of_block: int) -> int:
    """KV blocks for which one GPU has room, the padding block included; 0 where it has none."""
    return max(0, reading.left(utilization) // bytes_of_block)


def blocks_for_all(readings: Sequence[MemoryReading], config: RankConfig) -> int:
    """The blocks of every rank: what fits on the fullest GPU, at most what the configuration can use.

    Args:
        readings: one a rank, in rank order.
        config: equal on every rank; its `gpu_memory_utilization` is set.

    Raises:
        ConfigError: on every rank alike, where one full context does not fit; names rank, bytes and setting.
    """
    utilization, one = config.gpu_memory_utilization or 0.0, block_bytes(config)
    fitting = [blocks_that_fit(reading, utilization, one) for reading in readings]
    rank = min(range(len(fitting)), key=lambda index: fitting[index])
    least, reading = least_blocks(config), readings[rank]
    if fitting[rank] < least:
        raise ConfigError(
            f"the KV cache of one full context ({config.spec.context_length} tokens) needs {least * one:,} bytes, and "
            f"cache.gpu_memory_utilization={utilization:g} leaves {max(0, reading.left(utilization)):,} on rank "
            f"{rank}: of {reading.total:,} bytes of its GPU, weights, buffers and the largest step take "
            f"{reading.peak:,}, graphs about {reading.graphs:,}, everything else {reading.others:,}. "
            "Raise cache.gpu_memory_utilization, lower limits.chunked_prefill_size or limits.max_running_requests, "
            "use more ranks, or set cache.num_tokens"
        )
    return min(fitting[rank], config.num_blocks)


def agree_on_blocks(reading: MemoryReading, config: RankConfig, group: dist.ProcessGroup) -> int:
    """Bring all ranks' readings together and take `blocks_for_all`; collective over the host group.

    Args:
        reading: of this rank.
        config: equal on every rank.
        group: a Gloo group of all ranks.

    Raises:
        ConfigError: on every rank alike; see `blocks_for_all`.
    """
    received = torch.zeros(config.layout.world_size, len(MemoryReading._fields), dtype=torch.int64)
    all_gather_tensors(received, torch.tensor([reading], dtype=torch.int64), group=group)
    return blocks_for_all([MemoryReading._make(row) for row in received.tolist()], config)


def read_memory(step: Callable[[], None], device: torch.device) -> tuple[MemoryReading, int]:
    """Run a step on the GPU; returns the reading without graphs, and the bytes that the step took at its peak."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return MemoryReading(total=total, others=others, peak=peak, graphs=0), peak - before


def graph_reserve(config: RankConfig, entries: Sequence[CaptureEntry], step_bytes: int, attention_bytes: int) -> int:
    """An estimate of what recording these entries takes: activations of the largest, and a share for each graph.

    Graphs of one pool reuse each other's activations, so only the largest counts, scaled from the largest step.

    Args:
        config: of the rank.
        entries: that this rank can record.
        step_bytes: what the largest step took at its peak.
        attention_bytes: what the attention of these graphs takes.
    """
    largest = max((entry.num_tokens for entry in entries), default=0)
    activations = step_bytes * largest // largest_step(config.limits).value
    return activations + len(entries) * GRAPH_BYTES + attention_bytes + static_bytes(config)


def largest_inputs(config: RankConfig) -> StepInputs:
    """A prefill of as many tokens as the limits allow, each request at the end of its context, in the padding block.

    Nothing of it is kept: all tokens write to the padding block, and all blocks that are read are that one.
    """
    spec, num_tokens = config.spec, largest_step(config.limits).value
    longest = min(num_tokens, spec.context_length)
    lens = [longest] * (num_tokens // longest) + ([num_tokens % longest] if num_tokens % longest else [])
    query_lens = torch.tensor(lens)
    contexts = spec.context_length - query_lens
    positions = [torch.arange(context, spec.context_length) for context in contexts.tolist()]
    num_due = min(num_tokens, config.limits.max_requests_per_step * tokens_per_request(config.limits))
    return StepInputs(
        input_ids=torch.arange(num_tokens) % spec.vocab_size,
        positions=torch.cat(positions),
        slots=torch.full((num_tokens,), PADDING_SLOT),
        due_rows=torch.arange(num_tokens - num_due, num_tokens),
        query_starts=query_lens.cumsum(0) - query_lens,
        query_lens=query_lens,
        context_lens=contexts,
        block_tables=torch.full((len(lens), blocks_of_context(config)), PADDING_BLOCK),
        num_valid_tokens=torch.tensor([num_tokens], dtype=torch.int32),
    )


@torch.inference_mode()
def run_largest_step(config: RankConfig, target: TargetModel, agreement: Agreement, state: StateReader) -> None:
    """One eager forward of the largest step, agreed on like any step, and sampling. Collective over all ranks.

    Args:
        config: equal on every rank.
        target: over a cache that holds at least the padding block.
        agreement: of all ranks.
        state: this rank's; compared with the others' before anything is sent.

    Raises:
        GeometryError: on every rank alike, where ranks disagree.
    """
    inputs = largest_inputs(config)
    plan = agreement.agree(
        Proposal(
            step=0,
            kind=BatchKind.PREFILL,
            num_tokens=inputs.input_ids.numel(),
            num_due=inputs.due_rows.numel(),
            batch_digest=0,
            intake_bytes=0,
            wake_epoch=0,
            leave=0,
            in_flight=0,
        ),
        state,
    )
    assert plan.geometry is not None
    logits_NV = target.forward(inputs, plan.geometry)
    sample(logits_NV, [_widest_draw(config)] * logits_NV.shape[0])


def _widest_draw(config: RankConfig) -> TokenSequence:
    """A request whose sampling takes the most memory."""
    sampling = SamplingParams.widest(config.spec.vocab_size)
    return TokenSequence(Request(0, (0,), sampling), config.spec.context_length, None)
