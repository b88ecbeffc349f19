"""Pools that only GPUs can run, one row each, in one Ray session: run it on a host with as many GPUs as ranks.

    python tests/gpu/check_pool.py --pool tiny_moe,4x1,flashinfer+cutedsl --pool tiny_moe,2x2,flashinfer+cutedsl \\
        --pool tiny_moe,1x4,flashinfer+cutedsl --pool small,4x1,mega,fp8
    python tests/gpu/check_pool.py --layers 0
    python tests/gpu/check_pool.py --device cpu --pool tiny_moe,2x1,alltoall --pool small,1x2,measured   finds typos

Agreement is the share of generated tokens that Transformers, given the same prefix in the same dtype on one GPU, finds
the most likely too (or ties with, within the rounding of bf16).
"""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import ray
import torch
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    Limits,
    PlacementConfig,
    PoolConfig,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.dispatch.paths.tuning import TableRow, Tuning
from harness import begin_session, end_after, in_time, say, show
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FEW, MANY, NEW_TOKENS = 12, 64, 32
HEADER = ["model", "dispatch", "layout", "requests a batch", "launch s", "agreement", "decode step ms", "replays"]

rows: list[list[str]] = []
failed: list[str] = []


class PoolRow(msgspec.Struct, frozen=True):
    """One pool: `MODEL,DPxTP,DISPATCH[+EXPERTS][,QUANTISATION]`."""

    model: str
    dp_size: int
    attn_tp_size: int
    dispatch: str
    experts: str
    quantisation: str = "none"
    graphs: bool = True

    @classmethod
    def parse(cls, text: str) -> "PoolRow":
        model, layout, dispatch, *quantisation = text.split(",")
        dp_size, attn_tp_size = map(int, layout.split("x"))
        name, _, experts = dispatch.partition("+")
        return cls(model, dp_size, attn_tp_size, name, experts or "auto", *quantisation)

    @property
    def ranks(self) -> int:
        return self.dp_size * self.attn_tp_size

    @property
    def per_batch(self) -> int:
        return MANY if self.model == "large" else FEW

    @property
    def way(self) -> str:
        parts = [self.dispatch if self.experts == "auto" else f"{self.dispatch}+{self.experts}"]
        parts += [] if self.quantisation == "none" else [self.quantisation]
        return ", ".join(parts if self.graphs else [*parts, "no graphs"])


def small_model() -> PreTrainedConfig:
    """Shapes that the GPU kernels take, small enough to compare in seconds."""
    return Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.1,
        eos_token_id=1,
    )


def qwen3_30b_layers(num_layers: int) -> PreTrainedConfig:
    """The first layers of Qwen3-30B-A3B's geometry."""
    return Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        eos_token_id=1,
    )


def save(config: PreTrainedConfig, folder: str, device: str) -> str:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    return folder


def prompts(vocab_size: int, count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def reference(path: str, dtype: str, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()


@torch.inference_mode()
def agreement(model: Any, batch: list[list[int]], completions: dict[int, tuple[int, ...]]) -> float:
    """Share of generated tokens that Transformers finds most likely after the same prefix."""
    same = total = 0
    for index, prompt in enumerate(batch):
        generated = completions[index]
        ids = torch.tensor([prompt + list(generated)], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1)
        chosen = logits.gather(1, torch.tensor(generated, device=model.device).unsqueeze(1))[:, 0]
        tie = best.values - chosen <= 2**-7 * best.values.abs()
        same += int(tie.sum())
        total += len(generated)
    return same / total


def config_of(row: PoolRow, path: str, tuning: Tuning, expert_load: bool, device: str) -> PoolConfig:
    return PoolConfig(
        model=path,
        ranks=row.ranks,
        attn_tp_size=row.attn_tp_size,
        dtype="bfloat16" if device == "cuda" else "float32",
        dispatch=row.dispatch,
        experts=row.experts,
        quantisation=row.quantisation,
        tuning=tuning,
        limits=Limits(
            chunked_prefill_size=1024,
            max_running_requests=64,
            cuda_graph_bs=(1, 8, 16, 64),
            disable_cuda_graph=not row.graphs,
        ),
        cache=CacheConfig(num_tokens=65536),
        worker=WorkerConfig(device=device, step_timeout_s=120, expert_load=expert_load),
        placement=PlacementConfig(timeout_s=60),
        recovery=RecoveryConfig(max_restarts=0),
    )


def run(row: PoolRow, config: PoolConfig) -> None:
    started = time.perf_counter()
    with ExpertPool.launch(config, report=lambda line: say(f"  {line}")) as pool:
        launched = time.perf_counter() - started
        batch = prompts(pool.rank_config.spec.vocab_size, row.dp_size * row.per_batch, 200)
        before = pool.status().stats
        completions = {
            completion.index: completion.token_ids
            for completion in pool.generate(batch, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        }
        status = pool.status()
    steps = sum(stats.decode_steps for stats in status.stats) - sum(stats.decode_steps for stats in before)
    seconds = sum(stats.decode_seconds for stats in status.stats) - sum(stats.decode_seconds for stats in before)
    share = float("nan")
    if row.model != "large":
        assert config.dtype is not None
        model = reference(config.model, config.dtype, "cuda:0" if config.worker.device == "cuda" else "cpu")
        share = agreement(model, batch, completions)
    cells = [row.model, row.way, f"{row.dp_size} x {row.attn_tp_size}", f"{row.per_batch}", f"{launched:.0f}"]
    replays = f"{status.graphs[0].replays}, eagerly {dict(status.graphs[0].eager_steps)}"
    rows.append([*cells, f"{share:.3f}", f"{1e3 * seconds / max(steps, 1):.2f}", replays])
    say("  ".join(rows[-1]))
    if len({report.replays for report in status.graphs}) > 1 or (row.graphs and not status.graphs[0].replays):
        raise RuntimeError(f"ranks replayed {[report.replays for report in status.graphs]} graphs")


def product(dispatches: tuple[str, ...], only: tuple[str, ...], layouts: tuple[str, ...], quantisation: str) -> Any:
    """A pool for each layout, dispatch and model."""
    for layout in layouts:
        for dispatch in dispatches:
            for name in only:
                yield PoolRow.parse(f"{name},{layout},{dispatch},{quantisation}")


@click.command()
@click.option("--pool", "texts", multiple=True, help="MODEL,DPxTP,DISPATCH[+EXPERTS][,QUANTISATION], and no others.")
@click.option("--layers", default=4, show_default=True, help="Of model `large`, Qwen3-30B-A3B's geometry; 0: without.")
@click.option(
    "--dispatch",
    "dispatches",
    multiple=True,
    default=("allgather", "flashinfer", "flashinfer+cutedsl", "mega"),
    show_default=True,
    help="A dispatch, or DISPATCH+EXPERTS.",
)
@click.option("--model", "only", multiple=True, default=("tiny_moe", "small"), show_default=True)
@click.option("--layout", "layouts", multiple=True, default=("2x1",), show_default=True, help="dp_size x attn_tp_size.")
@click.option("--quantisation", default="none", show_default=True)
@click.option("--mega-capacity", "capacities", type=int, multiple=True, help="Of mega kernels that `auto` measures.")
@click.option("--table", help="Pinned paths, like 64:mega@64,4096:flashinfer+torch; for `auto`.")
@click.option("--expert-load", is_flag=True, help="Layers count the experts that are chosen.")
@click.option("--cache", help="File that keeps measured tables.")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--pool-deadline", default=100.0, show_default=True, help="Seconds for one pool.")
@click.option("--deadline", default=570.0, show_default=True)
def main(
    texts: tuple[str, ...],
    layers: int,
    dispatches: tuple[str, ...],
    only: tuple[str, ...],
    layouts: tuple[str, ...],
    quantisation: str,
    table: str | None,
    capacities: tuple[int, ...],
    cache: str | None,
    expert_load: bool,
    **options: Any,
) -> None:
    """Run every pool and print the table; exit with 1 if one fails, with 3 at the deadline."""
    pinned = (
        tuple(TableRow(int(part.split(":")[0]), part.split(":")[1]) for part in table.split(",")) if table else None
    )
    tuning = Tuning(mega_capacities=capacities or None, table=pinned, cache=cache)
    wanted = [PoolRow.parse(text) for text in texts]
    if not texts:
        models = (*only, "large") if layers else only
        wanted = list(product(dispatches, models, layouts, quantisation))
        wanted += [msgspec.structs.replace(wanted[-1], model="small", graphs=False)] if layers else []
    device = options["device"]
    end_after(options["deadline"], report)
    begin_session(max(row.ranks for row in wanted), device)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"tiny_moe": str(REPOSITORY / "examples" / "tiny_moe")}
        makers = {"small": small_model, "large": functools.partial(qwen3_30b_layers, layers or 4)}
        for name in {row.model for row in wanted} - set(paths):
            paths[name] = save(makers[name](), f"{folder}/{name}", "cuda:0" if device == "cuda" else "cpu")
        for row in wanted:
            say(f"{row.model}, {row.dp_size} x {row.attn_tp_size}, {row.way}")
            try:
                config = config_of(row, paths[row.model], tuning, expert_load, device)
                in_time(options["pool_deadline"], run, row, config)
            except Exception as error:
                failed.append(f"FAILED {row}: {type(error).__name__}: {str(error)[:1200]}")
                say(failed[-1])
                if isinstance(error, TimeoutError):  # what hangs would keep its GPUs
                    ray.shutdown()
                    begin_session(max(row.ranks for row in wanted), device)
    report()
    ray.shutdown()
    raise SystemExit(bool(failed))


def report() -> None:
    show("pools in bf16, greedy", [HEADER, *rows])
    for line in failed:
        click.echo(line)
    versions = [f"torch {torch.__version__}", sys.version.split()[0]]
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        versions += subprocess.run(query, capture_output=True).stdout.decode().splitlines()[:1]
    click.echo(", ".join(versions))


if __name__ == "__main__":
    main()
