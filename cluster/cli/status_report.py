"""`expert-pool status`: how a pool stands, as a person reads it."""

from collections.abc import Iterator

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ...workers.observing.printable import printable
from ..driver.pool_status import PoolStatus
from .graph_report import graph_summary

_UNBOUNDED = 1_000_000


def print_status(status: PoolStatus, console: Console) -> None:
    """Everything about the pool: its state, ranks and where they run, load and KV use, graphs, ways to the experts."""
    report = status_report(status)
    if not console.is_terminal:  # what is piped has no width of its own, and whoever reads it wants addresses whole
        needed = Measurement.get(console, console.options.update(width=_UNBOUNDED), report).maximum
        console.width = max(console.width, needed)
    console.print(report, highlight=False, soft_wrap=True)


def status_report(status: PoolStatus) -> Group:
    """The same as something that rich prints."""
    parts: list[Text | Table] = [Text(printable(line)) for line in _facts(status)]
    if status.places:
        parts.append(_ranks(status))
    if status.stats:
        parts.append(_batches(status))
    for load in status.loads[:1]:  # the same on every rank
        parts += [Text(printable(line)) for line in (*load.layers, *load.experts)]
    return Group(*parts)


def _facts(status: PoolStatus) -> Iterator[str]:
    nodes = len({place.node_id for place in status.places})
    where = f": {len(status.places)} ranks on {nodes} node(s)" if status.places else ""
    yield f"{status.state}{where}"
    if status.failure:
        yield f"failed: {status.failure}"
    if status.restarts:
        yield f"restarted {status.restarts} time(s), last after: {status.last_failure}"
    if status.driver_restarts:
        yield f"driver actor started anew {status.driver_restarts} time(s)"
    if status.notice and status.notice != status.failure:
        yield f"latest: {status.notice}"
    if status.unfinished:
        yield f"{status.unfinished} requests unfinished"
    if status.loads:
        yield (
            f"loaded in {max(load.load_seconds for load in status.loads):.1f} s, graphs recorded in "
            f"{status.capture_seconds:.1f} s, KV cache of {status.loads[0].kv_cache_tokens:,} tokens a batch"
        )
    if status.loads and status.loads[0].held_as:
        yield f"weights: {status.loads[0].held_as}"
    if status.graphs:
        yield graph_summary(status.graphs)


def _ranks(status: PoolStatus) -> Table:
    loads = {load.rank: load for load in status.loads}
    table = Table(title="ranks", title_justify="left")
    for column in ("rank", "node", "address", "process", "GPU"):
        table.add_column(column)
    for column in ("dense weights", "experts", "KV cache", "exchange buffers"):
        table.add_column(column, justify="right")
    for place in status.places:
        load = loads.get(place.rank)
        held = () if load is None else (load.dense_bytes, load.expert_bytes, load.kv_cache_bytes, load.exchange_bytes)
        table.add_row(
            str(place.rank),
            place.node_id[:8],
            place.address,
            str(place.pid),
            ", ".join(place.gpu_ids) or "-",
            *(_size(num_bytes) for num_bytes in held),
        )
    return table


def _batches(status: PoolStatus) -> Table:
    table = Table(title="batches", title_justify="left")
    table.add_column("DP rank")
    columns = ("running", "waiting", "KV use", "tokens", "prefilled", "steps", "mixed", "replayed", "step", "agreement")
    for column in columns:
        table.add_column(column, justify="right")
    for stats in status.stats:
        used = f"{1 - stats.free_kv_blocks / stats.num_kv_blocks:.0%}" if stats.num_kv_blocks else "-"
        per_step = 1e3 / stats.steps if stats.steps else 0.0
        table.add_row(
            str(stats.dp_rank),
            str(stats.running),
            str(stats.waiting),
            used,
            f"{stats.generated_tokens:,}",
            f"{stats.prompt_tokens:,}",
            f"{stats.steps:,}",
            f"{stats.mixed_steps / stats.steps:.0%}" if stats.steps else "-",
            f"{stats.replayed_steps / stats.steps:.0%}" if stats.steps else "-",
            f"{stats.step_seconds * per_step:.2f} ms",
            f"{stats.agree_seconds * per_step:.2f} ms",
        )
    return table


def _size(num_bytes: int) -> str:
    """Three digits and a unit."""
    amount, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"
