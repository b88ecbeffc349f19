"""What a pool would take, before anything is started: buffers, bounds and what decided them, graphs, and what fails."""

import os
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from ..dispatch.budget import (
    Bound,
    ExchangeBudget,
    RowFormat,
    capacity_bound,
    exchange_rows,
    largest_forward,
    largest_step,
    needed_capacity,
    prefill_setting,
)
from ..dispatch.capacity import CAPACITY_VARIABLE
from ..dispatch.errors import CheckpointError, ConfigError
from ..dispatch.limits import ALL_TO_ALL_KINDS, Limits, step_widths
from ..dispatch.workspace import flashinfer_workspace_bytes
from ..graphs.plan import CaptureEntry, plan_captures
from ..workers.checkpoint import check_weights
from ..workers.exchange_sizes import budget_for, pair_budget_for, row_formats
from ..workers.graph_set import draft_cache, static_bytes
from ..workers.inspection import inspect_model
from ..workers.kv_sizing import least_blocks
from ..workers.rank_config import RankConfig
from .config import PoolConfig, configuration_problems, refuse_unbuilt, resolve_unchecked


class PlannedBuffer(msgspec.Struct, frozen=True):
    """Memory that one rank holds for the life of the pool, the same on every rank.

    Attributes:
        name: what it is.
        rows: rows it holds; `None` where it is not made of rows.
        num_bytes: what is allocated for it.
        made_of: where the size comes from.
    """

    name: str
    rows: int | None
    num_bytes: int
    made_of: str


class PlannedBound(msgspec.Struct, frozen=True):
    """A bound of one DP rank or rank, its unit, and the setting that decided it."""

    name: str
    value: int
    unit: str
    term: str


class PlannedGraphs(msgspec.Struct, frozen=True):
    """Graphs of one kind: buckets ascending, in requests, or in tokens for `piecewise`; once for each draft layer."""

    kind: str
    tokens_per_request: int
    buckets: tuple[int, ...]
    layers: int


class PlanReport(msgspec.Struct, frozen=True):
    """Sizes of one rank, the same for every rank, and what is wrong with the configuration.

    Attributes:
        config: what the ranks would be built from.
        buffers: everything allocated, weights included.
        bounds: of a step and of the dispatch.
        graphs: what the ranks would be asked to record.
        kv_cache_tokens: tokens that the KV cache holds; where it is measured at start, the most it may hold.
        problems: why the pool would not start; empty when it would.
        refusals: what keeps `generate` from running this plan though the plan itself holds: weights that are missing, a
            mode that is not built yet.
    """

    config: RankConfig
    buffers: tuple[PlannedBuffer, ...]
    bounds: tuple[PlannedBound, ...]
    graphs: tuple[PlannedGraphs, ...]
    kv_cache_tokens: int
    problems: tuple[str, ...]
    refusals: tuple[str, ...]

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
    spec = inspect_model(os.path.abspath(os.path.expanduser(config.model)), config.dtype)
    rank_config = resolve_unchecked(config, spec)
    return PlanReport(
        config=rank_config,
        buffers=_buffers(rank_config),
        bounds=_bounds(rank_config, config.limits),
        graphs=_graphs(rank_config),
        kv_cache_tokens=(rank_config.num_blocks - 1) * rank_config.block_size,
        problems=configuration_problems(rank_config),
        refusals=_refusals(rank_config),
    )


def _buffers(config: RankConfig) -> tuple[PlannedBuffer, ...]:
    spec, ep_size = config.spec, config.layout.world_size
    buffers = [
        PlannedBuffer("dense weights", None, spec.dense_bytes, "in full on every rank"),
        PlannedBuffer("experts", None, spec.expert_bytes // ep_size, f"{spec.expert_bytes:,} bytes / {ep_size} ranks"),
        *_caches(config),
    ]
    graph_bytes = static_bytes(config)
    if graph_bytes:
        buffers.append(PlannedBuffer("graph inputs", None, graph_bytes, "static buffers that all buckets share"))
    if config.dispatch == "measured":
        bound = config.tuning.max_bytes
        buffers.append(PlannedBuffer("dispatch: measured paths", None, bound, "at most, by tuning.max_bytes"))
    elif config.dispatch == "mega":
        buffers.append(_mega_staging(config, row_formats(spec)))
    elif config.dispatch == "flashinfer" or (config.dispatch == "alltoall" and config.experts == "cutedsl"):
        buffers.append(_flashinfer_workspace(config, row_formats(spec)))
    elif config.dispatch != "local":
        buffers += _exchange_buffers(config, budget_for(config))
    return (*buffers, *_pair_buffers(config))


def _pair_buffers(config: RankConfig) -> list[PlannedBuffer]:
    """Of CuTe DSL experts: every row that can reach a rank, with every expert that it can have there."""
    budget = pair_budget_for(config)
    if budget is None:
        return []
    made_of = f"{_rows_of(config, config.capacity)}, with every expert that a row can have there"
    sizes = (
        ("routing", budget.routing_bytes),
        ("hidden", budget.hidden_bytes),
        ("outputs", budget.output_bytes),
    )
    return [PlannedBuffer(f"experts: {name}", budget.num_pairs, num, made_of) for name, num in sizes]


def _caches(config: RankConfig) -> list[PlannedBuffer]:
    """The KV caches; those that are measured on GPUs at their least, one full context, and so not in rows."""
    spec, measured = config.spec, config.gpu_memory_utilization is not None
    num_blocks = least_blocks(config) if measured else config.num_blocks
    slots = num_blocks * config.block_size
    made_of = f"{num_blocks - 1} blocks of {config.block_size} tokens, and one for padding; "
    if measured:
        made_of = (
            f"at least one full context; measured at start, up to {config.num_blocks - 1} blocks of "
            f"{config.block_size} tokens within cache.gpu_memory_utilization={config.gpu_memory_utilization:g}; "
        )
    made_of += f"{spec.kv_bytes_per_token:,} bytes a token"
    rows = None if measured else slots
    caches = [PlannedBuffer("KV cache", rows, slots * spec.kv_bytes_per_token, made_of)]
    draft_width = sum(shape.width for shape in draft_cache(config))
    if draft_width:
        num_bytes = slots * draft_width * spec.dtype_bytes
        caches.append(PlannedBuffer("draft KV cache", rows, num_bytes, "of the draft layers, same blocks"))
    return caches


def _exchange_buffers(config: RankConfig, budget: ExchangeBudget) -> list[PlannedBuffer]:
    rows, made_of = exchange_rows(config.layout, budget.capacity), _rows_of(config, budget.capacity)
    sizes = (("send", budget.send_bytes), ("receive", budget.receive_bytes), ("combine", budget.combine_bytes))
    return [PlannedBuffer(f"dispatch: {name}", rows, num_bytes, made_of) for name, num_bytes in sizes]


def _flashinfer_workspace(config: RankConfig, formats: list[RowFormat]) -> PlannedBuffer:
    ep_size = config.layout.world_size
    return PlannedBuffer(
        "dispatch: FlashInfer workspace",
        exchange_rows(config.layout, config.capacity),
        flashinfer_workspace_bytes(ep_size, config.capacity, formats),
        _rows_of(config, config.capacity),
    )


def _mega_staging(config: RankConfig, formats: list[RowFormat]) -> PlannedBuffer:
    """What is known before the kernel is compiled: rows in and out, expert ids (int64) and weights (float32)."""
    row_bytes = max(2 * row_format.hidden_bytes + 12 * row_format.top_k for row_format in formats)
    made_of = "rows in and out; the compiled kernel adds its own workspace"
    return PlannedBuffer("dispatch: mega kernel", config.capacity, config.capacity * row_bytes, made_of)


def _rows_of(config: RankConfig, capacity: int) -> str:
    return f"ep_size {config.layout.world_size} x capacity {capacity}"


def _bounds(config: RankConfig, given: Limits) -> tuple[PlannedBound, ...]:
    """Bounds with their terms; `given` is what the user wrote, without what the environment added."""
    limits, layout = config.limits, config.layout
    capacity = capacity_bound(limits, layout, config.dispatch, config.experts)
    if capacity.term == "limits.max_dispatch_tokens_per_rank" and given.max_dispatch_tokens_per_rank is None:
        capacity = Bound(capacity.value, CAPACITY_VARIABLE)
    widest = max(step_widths(limits), key=lambda width: width.tokens_per_request)
    bounds = [
        ("prefill step", Bound(limits.prefill_tokens_per_step, prefill_setting(limits)), "tokens a batch"),
        ("tokens per request", Bound(widest.tokens_per_request, widest.kind), "tokens"),
        ("largest step", largest_step(limits), "tokens a batch"),
        ("largest forward", largest_forward(limits), "tokens a batch"),
        ("capacity", capacity, "rows a rank"),
    ]
    if config.dispatch in ALL_TO_ALL_KINDS:
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


def _refusals(config: RankConfig) -> tuple[str, ...]:
    refusals = []
    checks: list[Callable[[], None]] = [lambda: refuse_unbuilt(config.limits, config.experts, config.worker.device)]
    if config.weights == "checkpoint":
        checks.insert(0, lambda: check_weights(config.spec))
    for check in checks:
        try:
            check()
        except (CheckpointError, ConfigError) as error:
            refusals.append(str(error))
    return tuple(refusals)


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
    _say(console, "bounds, and what decided them:")
    for bound in report.bounds:
        _say(console, f"  {bound.name}: {bound.value:,} {bound.unit}, by {bound.term}")
    _print_graphs(report, console)
    if config.dispatch not in ALL_TO_ALL_KINDS and config.limits.max_dispatch_tokens_per_rank is not None:
        _say(console, f"limits.max_dispatch_tokens_per_rank rests: dispatch {config.dispatch} is not an all-to-all")
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


def _print_graphs(report: PlanReport, console: Console) -> None:
    if not report.graphs:
        _say(console, "graphs: none")
    for graphs in report.graphs:
        unit = "tokens" if graphs.kind == "piecewise" else f"requests x {graphs.tokens_per_request} tokens"
        layers = f", each for {graphs.layers} draft layers" if graphs.layers > 1 else ""
        _say(console, f"graphs of {graphs.kind}, in {unit}{layers}: {', '.join(map(str, graphs.buckets))}")


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
