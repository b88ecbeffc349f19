"""What a pool would take, before anything is started: bytes a rank, tokens a step, requests at once."""

import os

import msgspec
from rich.console import Console
from rich.table import Table

from ..dispatch.budget import ExchangeBudget
from ..dispatch.errors import CheckpointError
from ..workers.checkpoint import check_weights
from ..workers.engine import budget_for
from ..workers.inspection import inspect_model
from ..workers.rank_config import RankConfig
from .config import PoolConfig, resolve


class PlanReport(msgspec.Struct, frozen=True):
    """Sizes of one rank; the same for every rank. Bytes, rows and tokens."""

    config: RankConfig
    dense_bytes: int
    expert_bytes: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    exchange: ExchangeBudget | None
    weights_problem: str | None

    @property
    def total_bytes(self) -> int:
        exchange = self.exchange.total_bytes if self.exchange else 0
        return self.dense_bytes + self.expert_bytes + self.kv_cache_bytes + exchange


def make_plan(config: PoolConfig) -> PlanReport:
    """Size a pool from the model's `config.json` alone; weight files are looked at, if there are any, not read.

    Raises:
        ConfigError: the model or the configuration cannot work.
    """
    spec = inspect_model(os.path.abspath(os.path.expanduser(config.model)), config.dtype)
    rank_config = resolve(config, spec)
    problem = None
    try:
        check_weights(spec)
    except CheckpointError as error:
        problem = str(error)
    ep_size = rank_config.layout.world_size
    return PlanReport(
        config=rank_config,
        dense_bytes=spec.dense_bytes,
        expert_bytes=spec.expert_bytes // ep_size,
        kv_cache_bytes=rank_config.num_blocks * rank_config.block_size * spec.kv_bytes_per_token,
        kv_cache_tokens=(rank_config.num_blocks - 1) * rank_config.block_size,
        exchange=budget_for(rank_config) if ep_size > 1 else None,
        weights_problem=problem,
    )


def print_plan(report: PlanReport, console: Console) -> None:
    """The report as tables."""
    config, spec, layout = report.config, report.config.spec, report.config.layout
    experts = sorted({layer.num_experts for layer in spec.moe})
    console.print(
        f"{spec.model_type} in {spec.dtype}: {len(spec.attention)} layers, {len(spec.moe)} of them MoE with "
        f"{'/'.join(map(str, experts))} experts, context {spec.context_length}",
        highlight=False,
    )
    console.print(
        f"{layout.world_size} ranks = {layout.dp_size} batches x {layout.attn_tp_size} ranks each; "
        f"dispatch {config.dispatch}",
        highlight=False,
    )
    table = Table(title="one rank holds", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("made of")
    rows = [
        ("dense weights", report.dense_bytes, "in full on every rank"),
        ("experts", report.expert_bytes, f"{spec.expert_bytes} bytes / {layout.world_size} ranks"),
        (
            "KV cache",
            report.kv_cache_bytes,
            f"{report.kv_cache_tokens} tokens in blocks of {config.block_size}, and one block for padding; "
            f"{spec.kv_bytes_per_token} bytes a token",
        ),
    ]
    if report.exchange is not None:
        budget = report.exchange
        received = f"{layout.world_size} ranks x {budget.capacity} rows"
        rows += [
            ("dispatch: send", budget.send_bytes, received),
            ("dispatch: receive", budget.receive_bytes, received),
            ("dispatch: combine", budget.combine_bytes, received),
        ]
    for name, num_bytes, source in rows:
        table.add_row(name, f"{num_bytes:,}", source)
    table.add_row("total", f"{report.total_bytes:,}", f"{report.total_bytes / 2**30:.2f} GiB", style="bold")
    console.print(table)
    limits = config.limits
    console.print(
        f"a step: at most {limits.chunked_prefill_size} prefill tokens (limits.chunked_prefill_size) or "
        f"{limits.max_running_requests} decode tokens (limits.max_running_requests) a batch; "
        f"{limits.max_tokens_per_step // layout.attn_tp_size} rows a rank bound the dispatch",
        highlight=False,
    )
    if report.weights_problem is not None:
        console.print(f"generate would refuse: {report.weights_problem}", style="yellow", highlight=False)
