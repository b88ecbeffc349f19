"""Which graphs a pool holds, how often each ran, and why the other steps ran eagerly."""

from collections.abc import Sequence

from rich.table import Table

from ...graphs.report import GraphReport


def graph_summary(reports: Sequence[GraphReport]) -> str:
    """One line; all ranks hold the same graphs and run the same steps, so rank 0 speaks for all."""
    if not reports:
        return "graphs: none"
    report = reports[0]
    eager = dict(report.eager_steps)
    total = report.replays + sum(eager.values())
    reasons = "".join(f"; {count} eager: {reason}" for reason, count in eager.items())
    return (
        f"graphs: {len(report.graphs)} by {report.backend}, {report.static_bytes:,} bytes of inputs a rank; "
        f"{report.replays} of {total} steps replayed{reasons}"
    )


def graph_table(reports: Sequence[GraphReport]) -> Table:
    """Every graph with its bytes and replays, and the eager steps by reason."""
    table = Table(title="graphs, alike on all ranks", title_justify="left")
    for column in ("kind", "bucket", "tokens a request", "bytes a rank", "replays"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for use in reports[0].graphs if reports else ():
        entry = use.entry
        name = f"{entry.kind}, layer {entry.layer}" if entry.layer else entry.kind
        table.add_row(name, str(entry.bucket), str(entry.tokens_per_request), f"{use.num_bytes:,}", str(use.replays))
    for reason, count in reports[0].eager_steps if reports else ():
        table.add_row(f"eager: {reason}", "", "", "", str(count))
    return table
