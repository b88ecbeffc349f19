"""From process groups to a rank that can run steps: weights, path to the experts, cache, graphs, scheduler, loop."""

import logging
import resource
import time
from dataclasses import dataclass

import msgspec
import torch
from transformers import AutoTokenizer, PreTrainedModel

from ...dispatch.errors import CheckpointError
from ...dispatch.expert_load import ExpertLoad
from ...dispatch.moe import MoeExchange
from ...dispatch.probe import HostGroup
from ...graphs.lockstep import LockstepRank
from ..agreement import Agreement, StateReader
from ..attention.kv_cache import BlockAllocator
from ..attention.kv_sizing import make_target, measured_blocks
from ..compiled.layers import settle_layers
from ..compiled.said import said_of_layers
from ..executor import StepExecutor
from ..graph_set import RecordingMeans, make_backend, make_graphs
from ..mailbox import Inbox, Outbox
from ..model.checkpoint import expert_bytes
from ..model.spec import ModelSpec
from ..observing.reporter import StepReporter
from ..observing.trace import StepTrace
from ..path_selection.candidates import kept_measurements, loading_path, path_check, path_maker
from ..path_selection.selection import PathSelection
from ..rank_config import LoadReport, RankConfig, ReadFile
from ..scheduling.continued_text import Decode
from ..scheduling.scheduler import Scheduler
from ..speculation.draft import DraftModel, make_draft
from ..step import StepLoop
from .groups import Joined
from .host_memory import refuse_beyond_host
from .rendezvous import wait_for_all
from .weights import read_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRank:
    """A rank that can run steps.

    Attributes:
        config: of the rank, with the number of KV blocks that ranks agreed on; equal on every rank.
        draft: its draft model; `None` without speculation.
        layers: what runs in its layers beside attention and experts; equal on every rank.
        graphs: its graphs, none at first.
        expert_load: what its MoE layers count into; `None` where they do not.
        loop: its step loop.
    """

    config: RankConfig
    draft: DraftModel | None
    layers: str
    graphs: LockstepRank
    expert_load: ExpertLoad | None
    loop: StepLoop


def load(
    config: RankConfig, joined: Joined, inbox: Inbox, outbox: Outbox, trace: StepTrace | None
) -> tuple[LoadedRank, LoadReport]:
    """Read this rank's weights and allocate its cache and buffers; collective over all ranks.

    Args:
        config: of the rank, equal on every rank.
        joined: its groups.
        inbox: where its requests come from.
        outbox: where its completions go.
        trace: remembers the stages of steps; `None` where nobody asks for them.

    Raises:
        ConfigError: this machine has less memory than this rank alone would hold.
        CheckpointError: some rank has read what no weights can be; raised by every rank.
        RankError: others did not finish reading in time.
    """
    refuse_beyond_host(config, ranks_here=1)
    layout, rank, device = config.layout, joined.rank, joined.device
    hosts = HostGroup(joined.host_group, rank)
    kept = kept_measurements(config, hosts, device)
    maker = path_maker(config, rank, joined.collectives, joined.world, device, kept)
    exchange = MoeExchange(layout, rank, loading_path(config, maker), joined.collectives)
    peak_before, started = _peak_memory(), time.perf_counter()
    read, problem = _read_or_problem(config, exchange, device)
    load_seconds, peak_after = time.perf_counter() - started, _peak_memory()
    wait = "read their weights", rank, layout.world_size, config.start_timeout_s
    if problems := sorted({one for one in wait_for_all(joined.store, *wait, value=problem) if one}):
        raise CheckpointError("; ".join(problems))
    assert read is not None, "a rank that has read nothing says why"
    model, files = read
    exchange.describe_layers(model, config.spec)
    own_experts = expert_bytes(model)
    dense_bytes = sum(parameter.nbytes for parameter in model.parameters()) - own_experts
    own_experts += sum(bound.kept.num_bytes for bound in exchange.bound if bound.kept is not None)
    seconds = {"weights": load_seconds}
    started = time.perf_counter()
    layers = settle_layers(config, model, exchange, hosts, device)
    seconds["layers"], started = time.perf_counter() - started, time.perf_counter()
    check = path_check(config, hosts, exchange.path, device)
    settled = PathSelection(config, maker, hosts, make_backend(device), check).settle(model, exchange)
    exchange.path = path = settled.path
    seconds["paths"], started = time.perf_counter() - started, time.perf_counter()
    agreement = Agreement(joined.host_group, layout)
    if config.gpu_memory_utilization is not None:
        num_blocks = measured_blocks(config, model, exchange, layers.held, agreement, joined.host_group, device)
        config = msgspec.structs.replace(config, num_blocks=num_blocks, gpu_memory_utilization=None)
    target = make_target(config, model, exchange, config.num_blocks, device)
    draft = make_draft(config, target, exchange, device)
    allocator = BlockAllocator(config.num_blocks, config.block_size)
    graphs = make_graphs(
        config, target, draft, exchange, RecordingMeans(config, allocator, path, device), layers.greedy
    )
    seconds["cache and draft"] = time.perf_counter() - started
    expert_load = _expert_load(config, joined, exchange)
    scheduler = _scheduler(config, allocator)
    sharing = joined.sharing
    loop = StepLoop(
        config.worker,
        sharing,
        scheduler,
        agreement,
        StateReader(config, path, layers.held, graphs),
        StepExecutor(target, graphs, sharing),
        inbox,
        StepReporter(sharing, scheduler, outbox, config.worker.overlaps, trace, expert_load),
    )
    stages = ", ".join(f"{stage} {took:.1f} s" for stage, took in seconds.items())
    logger.info("loaded: %s; %d KV blocks, experts by %s", stages, config.num_blocks, path.held.dispatcher)
    report = LoadReport(
        rank=rank,
        dense_bytes=dense_bytes,
        expert_bytes=own_experts,
        kv_cache_bytes=target.cache.num_bytes + (draft.num_cache_bytes if draft is not None else 0),
        kv_cache_tokens=(config.num_blocks - 1) * config.block_size,
        exchange_bytes=path.held.workspace_bytes,
        load_seconds=load_seconds,
        peak_memory_before=peak_before,
        peak_memory=peak_after,
        layers=(*layers.said, *said_of_layers(config, model, path)),
        experts=settled.lines,
        files=files,
        held_as=config.held_as,
    )
    return LoadedRank(config, draft, layers.held, graphs, expert_load, loop), report


def _read_or_problem(
    config: RankConfig, exchange: MoeExchange, device: torch.device
) -> tuple[tuple[PreTrainedModel, tuple[ReadFile, ...]] | None, str]:
    """See `read_weights`; or what is wrong with what this rank has read, which another may not have to."""
    try:
        return read_weights(config, exchange, device), ""
    except CheckpointError as error:
        return None, str(error)


def _scheduler(config: RankConfig, allocator: BlockAllocator) -> Scheduler:
    spec = config.spec
    return Scheduler(
        config.limits,
        allocator,
        spec.context_length,
        spec.vocab_size,
        spec.eos_token_ids,
        _decode(spec) if spec.has_tokenizer else None,
    )


def _expert_load(config: RankConfig, joined: Joined, exchange: MoeExchange) -> ExpertLoad | None:
    """What the MoE layers count into, from now on; at the leader of a batch alone, whose routing is all of it."""
    if not config.worker.expert_load or not joined.sharing.is_leader:
        return None
    num_experts = [layer.shape.num_experts for layer in exchange.layers]
    exchange.load = ExpertLoad(num_experts, joined.device)
    return exchange.load


def _decode(spec: ModelSpec) -> Decode:
    tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    return lambda token_ids, skip: tokenizer.decode(token_ids, skip_special_tokens=skip)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
