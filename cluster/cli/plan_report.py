"""What a pool would take, before anything is started: buffers, bounds and what decided them, graphs, and what fails."""

import contextlib

import msgspec
from rich.console import Console
from rich.table import Table

from ...dispatch.budgets.budget import CAPACITY_SETTING, Bound, largest_forward, largest_step, prefill_setting
from ...dispatch.budgets.capacity import CAPACITY_VARIABLE
from ...dispatch.budgets.limits import Limits
from ...dispatch.budgets.planned_buffer import PlannedBuffer
from ...dispatch.budgets.step_kinds import KINDS, kinds_of
from ...dispatch.errors import CheckpointError
from ...dispatch.paths.capacity import capacity_bound, needed_capacity
from ...dispatch.registry import way_of
from ...graphs.plan import CaptureEntry, plan_captures
from ...workers.observing.printable import printable
from ...workers.rank_config import RankConfig
from ...workers.start.host_memory import HostNeed, host_bytes, host_need
from ..config import PoolConfig, resolve_unchecked
from ..planning.gpu_memory import MemoryNeed, memory_need
from ..planning.planned_buffers import planned_buffers
from ..planning.validation import inspected, launch_refusals, pool_problems


class PlannedBound(msgspec.Struct, frozen=True):
    """A bound of one DP rank or rank, its unit, and the setting that decided it."""

    name: str
    value: int
    unit: str
    term: str


class PlannedGraphs(msgspec.Struct, frozen=True):
    """Graphs of one kind: buckets ascending, in requests or in tokens; once for each draft layer."""

    kind: str
    tokens_per_request: int
    buckets: tuple[int, ...]
    layers: int


class StoredWeights(msgspec.Struct, frozen=True):
    """Weights of a checkpoint that ranks hold otherwise than its files do.

    Attributes:
        format: of the files, see `workers.model.formats.registry`.
        file_bytes: of all of them; `None` where they are not there yet, or are not read.
        held_bytes: dense weights once and all experts, as ranks hold them.
        held_as: what that is, for people.
    """

    format: str
    file_bytes: int | None
    held_bytes: int
    held_as: str


class PlanReport(msgspec.Struct, frozen=True):
    """Sizes of one rank, the same for every rank, and what is wrong with the configuration.

    Attributes:
        config: what the ranks would be built from.
        buffers: everything allocated, weights included.
        bounds: of a step and of the dispatch.
        graphs: what the ranks would be asked to record.
        kv_cache_tokens: tokens that the KV cache holds; where it is measured at start, the most it may hold.
        gpu_memory: what a rank needs of its GPU, as far as it is known, and what it has; `None` on CPUs.
        host_memory: what a rank holds of its machine's memory; `None` on GPUs.
        gpu_memory_given: whether the configuration says what a GPU has.
        problems: why the pool would not start; empty when it would.
        refusals: what keeps `generate` from running this plan though the plan itself holds: weights that are missing, a
            mode that is not built yet.
        notes: what of the model's generation_config.json is applied and what is not.
        stored: how a quantised checkpoint stores its weights; `None` for others.
    """

    config: RankConfig
    buffers: tuple[PlannedBuffer, ...]
    bounds: tuple[PlannedBound, ...]
    graphs: tuple[PlannedGraphs, ...]
    kv_cache_tokens: int
    gpu_memory: MemoryNeed | None
    host_memory: HostNeed | None
    gpu_memory_given: bool
    problems: tuple[str, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...] = ()
    stored: StoredWeights | None = None

    @property
    def total_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    def num_bytes(self, name: str) -> int:
        """Bytes of all buffers whose name starts with `name`."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.name.startswith(name))


def plan_pool(config: PoolConfig) -> PlanReport:
    """Size a pool from the model's `config.json` alone; weight files are looked at, if there are any, not read.

    A configuration that would be refused is planned all the same, with every problem in the report.

    Raises:
        ConfigError: the model or a single setting makes no sense.
    """
    rank_config = resolve_unchecked(config, inspected(config))
    return PlanReport(
        config=rank_config,
        buffers=planned_buffers(rank_config),
        bounds=_bounds(rank_config, config.limits),
        graphs=_graphs(rank_config),
        kv_cache_tokens=(rank_config.num_blocks - 1) * rank_config.block_size,
        gpu_memory=memory_need(config, rank_config),
        host_memory=host_need(rank_config),
        gpu_memory_given=config.placement.gpu_memory_bytes is not None,
        problems=pool_problems(config, rank_config),
        refusals=launch_refusals(rank_config),
        notes=tuple(rank_config.spec.generation.notes(config.generation_config)),
        stored=_stored(rank_config),
    )


def _stored(config: RankConfig) -> StoredWeights | None:
    from ...workers.model.weight_files import weight_files

    spec = config.spec
    if spec.expanded_from is None:
        return None
    file_bytes = None
    if config.weights == "checkpoint":
        with contextlib.suppress(CheckpointError):  # it is among the refusals
            file_bytes = sum(file.stat().st_size for file in weight_files(spec.path))
    return StoredWeights(spec.expanded_from, file_bytes, spec.dense_bytes + config.expert_bytes, config.held_as)


def _bounds(config: RankConfig, given: Limits) -> tuple[PlannedBound, ...]:
    """Bounds with their terms; `given` is what the user wrote, without what the environment added."""
    limits, layout = config.limits, config.layout
    capacity = capacity_bound(limits, layout, config.dispatch, config.experts)
    if capacity.term == CAPACITY_SETTING and given.max_dispatch_tokens_per_rank is None:
        capacity = Bound(capacity.value, CAPACITY_VARIABLE)
    widest = max(kinds_of(limits), key=lambda kind: kind.width(limits))
    bounds = [
        ("prefill step", Bound(limits.prefill_tokens_per_step, prefill_setting(limits)), "tokens a batch"),
        ("tokens per request", Bound(widest.width(limits), widest.name), "tokens"),
        ("largest step", largest_step(limits), "tokens a batch"),
        ("largest forward", largest_forward(limits), "tokens a batch"),
        ("capacity", capacity, "rows a rank"),
    ]
    if way_of(config.dispatch).has_own_capacity:
        bounds.append(("capacity needed", needed_capacity(limits, layout, config.experts), "rows a rank"))
    return tuple(PlannedBound(name, bound.value, unit, bound.term) for name, bound, unit in bounds)


def _graphs(config: RankConfig) -> tuple[PlannedGraphs, ...]:
    kinds: dict[tuple[str, int], list[CaptureEntry]] = {}
    for entry in plan_captures(config.limits).entries:
        kinds.setdefault((entry.kind, entry.tokens_per_request), []).append(entry)
    return tuple(
        PlannedGraphs(
            kind=kind,
            tokens_per_request=width,
            buckets=tuple(sorted({entry.bucket for entry in entries})),
            layers=len({entry.layer for entry in entries}),
        )
        for (kind, width), entries in kinds.items()
    )


def print_plan(report: PlanReport, console: Console) -> None:
    """The report as tables, and a line for each problem."""
    config, spec, layout = report.config, report.config.spec, report.config.layout
    experts = sorted({layer.num_experts for layer in spec.moe})
    _say(
        console,
        f"{spec.model_type} in {spec.dtype}: {len(spec.attention)} layers, {len(spec.moe)} of them MoE with "
        f"{'/'.join(map(str, experts))} experts, context {spec.context_length}",
    )
    role = "" if config.limits.disaggregation_mode == "none" else f"; role {config.limits.disaggregation_mode}"
    _say(
        console,
        f"{layout.world_size} ranks = {layout.dp_size} batches x {layout.attn_tp_size} ranks each; "
        f"dispatch {config.dispatch}; experts {config.experts}{role}",
    )
    console.print(_buffer_table(report))
    if report.stored is not None:
        in_files = "" if report.stored.file_bytes is None else f", {report.stored.file_bytes:,} bytes in all files"
        _say(
            console,
            f"weights: stored as {report.stored.format}{in_files}; {report.stored.held_as or 'not read'}, "
            f"{report.stored.held_bytes:,} bytes on all ranks, dense ones counted once",
        )
    if report.gpu_memory is not None:
        _print_memory(report.gpu_memory, console)
    if report.host_memory is not None:
        available = host_bytes()
        fitting = available // max(1, report.host_memory.needed)
        _say(
            console,
            f"host memory: {report.host_memory}; steps come on top. This machine has {available:,}, for at most "
            f"{fitting:,} such ranks",
            style=None if fitting >= layout.world_size else "yellow",
        )
    _say(console, "bounds, and what decided them:")
    for bound in report.bounds:
        _say(console, f"  {bound.name}: {bound.value:,} {bound.unit}, by {bound.term}")
    _print_graphs(report, console)
    mixes = config.limits.mixes_steps
    _say(
        console,
        f"one step of a batch {'may decode and prefill' if mixes else 'decodes or prefills'}, by limits.mixed_steps",
    )
    if not way_of(config.dispatch).has_own_capacity and config.limits.max_dispatch_tokens_per_rank is not None:
        _say(console, f"{CAPACITY_SETTING} has no effect: dispatch {config.dispatch} is not an all-to-all")
    if report.gpu_memory is None and report.gpu_memory_given:
        _say(console, f"placement.gpu_memory_bytes has no effect: worker.device is {config.worker.device}")
    for note in report.notes:
        _say(console, note)
    for refusal in report.refusals:
        _say(console, f"generate would refuse: {refusal}", style="yellow")
    for problem in report.problems:
        _say(console, f"would fail: {problem}", style="red")


def _buffer_table(report: PlanReport) -> Table:
    table = Table(title="one rank holds", title_justify="left")
    table.add_column("what")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("made of")
    for buffer in report.buffers:
        rows = "" if buffer.rows is None else f"{buffer.rows:,}"
        table.add_row(buffer.name, rows, f"{buffer.num_bytes:,}", buffer.made_of)
    table.add_row("total", "", f"{report.total_bytes:,}", f"{report.total_bytes / 2**30:.2f} GiB", style="bold")
    return table


def _print_memory(need: MemoryNeed, console: Console) -> None:
    _say(console, f"GPU memory: {need}; CUDA and communication come on top")
    if need.available is None:
        _say(console, "  whether it fits is not known: say what a GPU has, placement.gpu_memory_bytes or --gpu-memory")
    elif need.fits:
        share = f" and cache.gpu_memory_utilization={need.utilization:g}" if need.utilization < 1 else ""
        _say(
            console,
            f"  fits: {need.available - need.needed:,} of {need.available:,} bytes are left, "
            f"by placement.gpu_memory_bytes={need.gpu_memory:,}{share}",
        )


def _print_graphs(report: PlanReport, console: Console) -> None:
    if not report.graphs:
        _say(console, "graphs: none")
    for graphs in report.graphs:
        in_tokens = KINDS[graphs.kind].unit == "tokens"
        unit = "tokens" if in_tokens else f"requests x {graphs.tokens_per_request} tokens"
        layers = f", each for {graphs.layers} draft layers" if graphs.layers > 1 else ""
        _say(console, f"graphs of {graphs.kind}, in {unit}{layers}: {', '.join(map(str, graphs.buckets))}")


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(printable(line), style=style, highlight=False, markup=False, soft_wrap=True)
