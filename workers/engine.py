"""All of one rank but its actor: process groups, model, cache, scheduler and loop, put together in order.

Knows no Ray, so the same rank also runs in a plain process.
"""

import logging
import os
import resource
import time
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, PreTrainedModel

from ..dispatch.collectives import Collectives, GroupName
from ..dispatch.expert_load import ExpertLoad
from ..dispatch.moe import MoeExchange
from ..dispatch.probe import HostGroup
from ..graphs.lockstep import LockstepRank
from ..graphs.plan import plan_captures
from .agreement import Agreement, StateReader
from .attention.gathered import GatheredAttention
from .attention.kv_cache import BlockAllocator, KvCache
from .attention.kv_sizing import agree_on_blocks, graph_reserve, read_memory, run_largest_step
from .attention.paged import AttentionBackend, SdpaAttention
from .executor import StepExecutor
from .graph_set import RecordingMeans, make_backend, make_graphs
from .kernels.fused_layers import fuse_layers
from .kernels.fused_norms import fuse_norms
from .mailbox import Inbox, Outbox
from .model.checkpoint import expert_bytes, load_sharded_model
from .model.inspection import quiet_transformers
from .model.random_weights import make_random_model
from .model.target import TargetModel
from .observing.trace import RankTrace, StepTrace
from .path_selection.candidates import loading_path, path_check, path_maker
from .path_selection.selection import PathChoice
from .rank_config import LoadReport, RankConfig, ReadFile, Rendezvous
from .request import ExpertCounts
from .scheduling.continued_text import Decode
from .scheduling.scheduler import Scheduler
from .speculation.draft import make_draft
from .start.host_memory import refuse_beyond_host
from .start.rendezvous import join_store, open_store, wait_for_all
from .start.same_start import facts_of, require_same_start
from .start.sealed_store import SealedStore
from .start.transports import unusable_settings
from .step import StepLoop
from .watch import run_watched

logger = logging.getLogger(__name__)


class RankEngine:
    """One rank, from process groups to the end of the loop. Methods are called in order: join, load, run."""

    def __init__(self, config: RankConfig, rank: int):
        self.config = config
        self.rank = rank
        self.inbox = Inbox()
        self.outbox = Outbox(config.layout.dp_rank(rank))
        # Ray shows a rank the one GPU it was given, so on GPUs it is always the first.
        self._device = torch.device("cpu") if config.worker.device == "cpu" else torch.device("cuda", 0)
        self._store: SealedStore | None = None
        self._loop: StepLoop | None = None
        self._trace = StepTrace(config.worker.trace_steps) if config.worker.trace_steps else None
        self._expert_load: ExpertLoad | None = None
        torch.set_num_threads(config.worker.threads)
        quiet_transformers()
        # The threaded loader holds several tensors at a time; sequential reading keeps a rank's peak near its weights.
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

    def open_rendezvous(self, host: str) -> Rendezvous:
        """Listen on a free port of `host`, and nowhere else; called on rank 0 before any rank joins.

        Returns:
            What the others join with; whoever has it can read what ranks tell each other while they start.

        Raises:
            RankError: `host` is no address of this machine.
        """
        self._store, rendezvous = open_store(host, self._timeout)
        return rendezvous

    def join(self, rendezvous: Rendezvous, drivers_code: str = "") -> None:
        """Form the process groups over the rendezvous that rank 0 opened; collective over all ranks.

        Args:
            rendezvous: what rank 0 opened.
            drivers_code: see `facts_of`.

        Raises:
            ConfigError: on every rank, when communication cannot use what the environment of some of them sets.
            GeometryError: on every rank, when some of them run other code, or read another model under the same path.
            RankError: others did not come in time.
        """
        layout, on_gpu = self.config.layout, self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        if self._store is None:
            self._store = join_store(rendezvous, self._timeout)
        facts = facts_of(self.config.spec, self.config.weights != "random", drivers_code)
        unusable = unusable_settings(os.environ, on_gpu)
        require_same_start(self._store, self.rank, layout.world_size, facts, self.config.start_timeout_s, unusable)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=layout.world_size,
            timeout=self._step_group_timeout,
            device_id=self._device if on_gpu else None,
        )
        self._host_group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._sharing_group: dist.ProcessGroup | None = None
        self._step_group: dist.ProcessGroup | None = None
        if layout.attn_tp_size > 1:
            for dp_rank in range(layout.dp_size):
                ranks = list(layout.ranks_of(dp_rank))
                host_group = dist.new_group(ranks, backend="gloo", timeout=self._timeout)
                step_group = dist.new_group(ranks, timeout=self._step_group_timeout)
                if dp_rank == layout.dp_rank(self.rank):
                    self._sharing_group, self._step_group = host_group, step_group
        assert dist.group.WORLD is not None
        groups: dict[GroupName, dist.ProcessGroup] = {"ep": dist.group.WORLD}
        if self._step_group is not None:
            # Gathering a shared batch is part of a step; the agreement's own group must not advance with it.
            groups["attn_tp"] = self._step_group
        self._collectives = Collectives(groups)

    def load(self) -> LoadReport:
        """Read this rank's weights and allocate its cache and buffers; collective over all ranks.

        Raises:
            ConfigError: this machine has less memory than this rank alone would hold.
            RankError: others did not finish reading in time.
        """
        layout = self.config.layout
        refuse_beyond_host(self.config, ranks_here=1)
        assert dist.group.WORLD is not None, "join comes before load"
        maker = path_maker(self.config, self.rank, self._collectives, dist.group.WORLD, self._device)
        exchange = MoeExchange(layout, self.rank, loading_path(self.config, maker), self._collectives)
        peak_before, started = _peak_memory(), time.perf_counter()
        model, files = self._weights(exchange)
        load_seconds, peak_after = time.perf_counter() - started, _peak_memory()
        assert self._store is not None, "join comes before load"
        wait_for_all(self._store, "read their weights", self.rank, layout.world_size, self.config.start_timeout_s)
        own_experts = expert_bytes(model)
        dense_bytes = sum(parameter.nbytes for parameter in model.parameters()) - own_experts
        hosts = HostGroup(self._host_group, self.rank)
        check = path_check(self.config, hosts, exchange.path, self._device)
        settled = PathChoice(self.config, maker, hosts, make_backend(self._device), check).settle(model, exchange)
        exchange.path = path = settled.path
        agreement = Agreement(self._host_group, layout)
        self._settle_blocks(model, exchange, agreement)
        num_blocks, block_size = self.config.num_blocks, self.config.block_size
        target = self._target(model, exchange, num_blocks)
        self._make_loop(target, exchange, agreement, BlockAllocator(num_blocks, block_size))
        logger.info("loaded in %.1f s, %d KV blocks, experts by %s", load_seconds, num_blocks, path.held.dispatcher)
        return LoadReport(
            rank=self.rank,
            dense_bytes=dense_bytes,
            expert_bytes=own_experts,
            kv_cache_bytes=target.cache.num_bytes + (self.draft.num_cache_bytes if self.draft is not None else 0),
            kv_cache_tokens=(num_blocks - 1) * block_size,
            exchange_bytes=path.held.workspace_bytes,
            load_seconds=load_seconds,
            peak_memory_before=peak_before,
            peak_memory=peak_after,
            experts=settled.lines,
            files=files,
        )

    def _weights(self, exchange: MoeExchange) -> tuple[PreTrainedModel, tuple[ReadFile, ...]]:
        """This rank's share of the model on its device, bound to the exchange, and what was read of each file."""
        config, spec = self.config, self.config.spec
        mesh = init_device_mesh("cpu", (config.layout.world_size, 1), mesh_dim_names=("ep", "tp"))
        files: tuple[ReadFile, ...] = ()
        if config.weights == "random":
            model = make_random_model(spec, exchange, mesh["ep"], mesh["tp"], self.rank, self._device)
        else:
            on_host, files = load_sharded_model(spec, exchange, mesh["ep"], mesh["tp"])
            model = on_host.to(self._device)
        if self._device.type == "cuda":
            dtype = getattr(torch, spec.dtype)
            fuse_norms(model, dtype)
            fuse_layers(model, dtype)
        return model, files

    def _settle_blocks(self, model: PreTrainedModel, exchange: MoeExchange, agreement: Agreement) -> None:
        """Put the number of KV blocks into the configuration, where it is to be measured; collective then."""
        if self.config.gpu_memory_utilization is not None:
            num_blocks = self._measured_blocks(model, exchange, agreement)
            self.config = msgspec.structs.replace(self.config, num_blocks=num_blocks, gpu_memory_utilization=None)

    def _make_loop(
        self,
        target: TargetModel,
        exchange: MoeExchange,
        agreement: Agreement,
        allocator: BlockAllocator,
    ) -> None:
        """Put what runs steps around the model: draft, graphs, scheduler, loop."""
        config, spec, layout = self.config, self.config.spec, self.config.layout
        self.draft = make_draft(config, target, exchange, self._device)
        can_record = RecordingMeans(config, allocator, exchange.path, target.attention, self._device)
        self.graphs = make_graphs(config, target, self.draft, exchange, can_record)
        scheduler = Scheduler(
            config.limits,
            allocator,
            spec.context_length,
            spec.vocab_size,
            spec.eos_token_ids,
            self._decode() if spec.has_tokenizer else None,
        )
        leader = layout.leader(layout.dp_rank(self.rank))
        if config.worker.expert_load and self.rank == leader:
            num_experts = [layer.num_local * layout.world_size for layer in exchange.layers]
            exchange.load = self._expert_load = ExpertLoad(num_experts, self._device)
        self._loop = StepLoop(
            self.rank,
            layout,
            scheduler,
            agreement,
            StateReader(config, exchange.path, self.graphs),
            StepExecutor(target, self.graphs, leader, self.rank == leader, self._step_group),
            self.inbox,
            self.outbox,
            self._sharing_group,
            config.worker.overlaps,
            config.worker.peer_wait_s,
            self._trace,
            self._expert_load,
        )

    def run(self, wake_epoch: int = 0) -> None:
        """Run the loop until all ranks are told to leave it, by a later wake-up call; raises what a step raises.

        A rank that raises is ended by the driver at once, which closes its connections, so that the ranks that wait for
        it fail too. It closes none itself: NCCL's shutdown would wait for those ranks.
        """
        assert self._loop is not None, "load comes before run"
        self.inbox.stay(wake_epoch)
        logger.info("the loop begins")
        try:
            run_watched(self._loop, self.config.worker.peer_wait_s)
        except BaseException as error:
            logger.error("the loop failed: %s", error)
            raise
        logger.info("the loop was left")

    @property
    def step(self) -> int | None:
        """Iterations of the loop; `None` before it was made."""
        return None if self._loop is None else self._loop.step

    def trace(self) -> RankTrace:
        """The steps that this rank remembers; from any thread."""
        return RankTrace(self.rank, 0, ()) if self._trace is None else self._trace.read(self.rank)

    def expert_counts(self) -> ExpertCounts | None:
        """How often experts were chosen, as last read; from any thread. `None` where it is not counted."""
        load = self._expert_load
        return None if load is None else ExpertCounts(load.num_experts, load.latest)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.config.worker.peer_wait_s)

    @property
    def _step_group_timeout(self) -> timedelta:
        """Of groups whose collectives run inside steps."""
        on_gpu = self._device.type == "cuda"
        return timedelta(seconds=self.config.worker.device_timeout_s) if on_gpu else self._timeout

    def _target(self, model: PreTrainedModel, exchange: MoeExchange, num_blocks: int) -> TargetModel:
        """The model over a KV cache of this many blocks, the padding block included."""
        config, dtype = self.config, getattr(torch, self.config.spec.dtype)
        with torch.inference_mode(False):
            cache = KvCache(config.spec.attention, num_blocks, config.block_size, dtype, self._device)
        return TargetModel(model, exchange, cache, self._attention(cache), self._device)

    def _measured_blocks(
        self,
        model: PreTrainedModel,
        exchange: MoeExchange,
        agreement: Agreement,
    ) -> int:
        """KV blocks of every rank, from a forward of the largest step; collective. See `kv_sizing`."""
        config = self.config
        target = self._target(model, exchange, num_blocks=1)
        state = StateReader(config, exchange.path, LockstepRank(self.rank, {}, lambda _: None))
        reading, step_bytes = read_memory(partial(run_largest_step, config, target, agreement, state), self._device)
        refusal = target.attention.refusal
        entries = [entry for entry in plan_captures(config.limits).entries if refusal(entry) is None]
        attention_bytes = target.attention.graph_bytes(entries)
        reserved = graph_reserve(config, entries, step_bytes, attention_bytes)
        return agree_on_blocks(reading._replace(graphs=reserved), config, self._host_group)

    def _attention(self, cache: KvCache) -> AttentionBackend:
        """FlashInfer where it has kernels for all layers, PyTorch elsewhere; the same on every rank."""
        config, spec = self.config, self.config.spec
        if self._device.type == "cpu":
            return SdpaAttention(cache, self._device)
        from .attention.flashinfer_attention import FlashInferAttention, unsupported_reason

        reason: str | None = "worker.attention is 'torch'"
        if config.worker.attention == "auto":
            reason = unsupported_reason(spec.attention, spec.dtype)
        if reason is not None:
            logger.warning("attention runs in PyTorch: %s", reason)
            return GatheredAttention(cache, spec.attention, spec.context_length, self._device)
        pages_of_one = -(-spec.context_length // config.block_size)
        max_pages = min(config.num_blocks, pages_of_one * config.limits.max_requests_per_step)
        return FlashInferAttention(
            cache,
            spec.attention,
            config.limits.max_running_requests,
            max_pages + config.limits.max_requests_per_step + config.layout.attn_tp_size,
            getattr(torch, spec.dtype),
            config.worker.prefill_backend,
            config.layout.attn_tp_size,
            self._device,
        )

    def _decode(self) -> Decode:
        tokenizer = AutoTokenizer.from_pretrained(self.config.spec.path, local_files_only=True)
        return lambda token_ids, skip: tokenizer.decode(token_ids, skip_special_tokens=skip)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
