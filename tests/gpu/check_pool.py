"""What only GPUs can show, as one script with one table: run it on a host with at least two of them.

Each row is a pool of two ranks over Ray. Agreement is the share of generated tokens that Transformers, given the same
prefix in the same dtype on one GPU, finds the most likely too (or ties with, within the rounding of the dtype).
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import click
import torch
from expert_pool.cluster import CacheConfig, ExpertPool, Limits, PoolConfig, SamplingParams, WorkerConfig
from expert_pool.dispatch.limits import QuantisationKind
from expert_pool.dispatch.tuning import TableRow, Tuning
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NUM_PROMPTS, NEW_TOKENS = 24, 32


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


def save(config: PreTrainedConfig, folder: str) -> str:
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    return folder


def prompts(vocab_size: int, count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def agreement(path: str, batch: list[list[int]], completions: dict[int, tuple[int, ...]]) -> float:
    """Share of generated tokens that Transformers finds most likely after the same prefix."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda:0").eval()
    same = total = 0
    for index, prompt in enumerate(batch):
        generated = completions[index]
        ids = torch.tensor([prompt + list(generated)], device="cuda:0")
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1)
        chosen = logits.gather(1, torch.tensor(generated, device="cuda:0").unsqueeze(1))[:, 0]
        tie = best.values - chosen <= 2**-7 * best.values.abs()
        same += int(tie.sum())
        total += len(generated)
    del model
    torch.cuda.empty_cache()
    return same / total


def run(
    name: str,
    path: str,
    dispatch: str,
    table: Table,
    per_batch: int,
    ranks: int,
    attn_tp_size: int,
    quantisation: str,
    tuning: Tuning,
    expert_load: bool,
    disable_graphs: bool = False,
) -> None:
    config = PoolConfig(
        model=path,
        ranks=ranks,
        attn_tp_size=attn_tp_size,
        dtype="bfloat16",
        dispatch=dispatch.partition("+")[0],
        experts=dispatch.partition("+")[2] or "auto",
        quantisation=quantisation,
        tuning=tuning,
        address="local",
        limits=Limits(
            chunked_prefill_size=1024,
            max_running_requests=64,
            cuda_graph_bs=(1, 8, 16, 64),
            disable_cuda_graph=disable_graphs,
        ),
        cache=CacheConfig(num_tokens=65536),
        worker=WorkerConfig(device="cuda", step_timeout_s=120, expert_load=expert_load),
    )
    started = time.perf_counter()
    with ExpertPool.launch(config, report=lambda line: click.echo(f"  {line}")) as pool:
        launched = time.perf_counter() - started
        batch = prompts(pool.rank_config.spec.vocab_size, config.layout.dp_size * per_batch, 200)
        before = pool.status().stats
        completions = {
            completion.index: completion.token_ids
            for completion in pool.generate(batch, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        }
        status = pool.status()
    steps = sum(stats.decode_steps for stats in status.stats) - sum(stats.decode_steps for stats in before)
    seconds = sum(stats.decode_seconds for stats in status.stats) - sum(stats.decode_seconds for stats in before)
    share = agreement(path, batch, completions) if per_batch <= NUM_PROMPTS else float("nan")
    replays = [report.replays for report in status.graphs]
    eager = dict(status.graphs[0].eager_steps)
    table.add_row(
        name,
        dispatch if quantisation == "none" else f"{dispatch}, {quantisation}",
        f"{config.layout.dp_size} x {attn_tp_size}",
        str(per_batch),
        f"{launched:.0f}",
        f"{share:.3f}",
        f"{1e3 * seconds / max(steps, 1):.2f}",
        str(replays),
        str(eager),
    )


@click.command()
@click.option("--layers", default=4, show_default=True, help="Of the Qwen3-30B-A3B geometry; 0 leaves it out.")
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
@click.option("--quantisation", type=click.Choice(get_args(QuantisationKind)), default="none", show_default=True)
@click.option("--mega-capacity", "capacities", type=int, multiple=True, help="Of mega kernels that `auto` measures.")
@click.option("--table", help="Pinned paths, like 64:mega@64,4096:flashinfer+torch; for `auto`.")
@click.option("--expert-load", is_flag=True, help="Layers count the experts that are chosen.")
@click.option("--cache", help="File that keeps measured tables.")
def main(
    layers: int,
    dispatches: tuple[str, ...],
    only: tuple[str, ...],
    layouts: tuple[str, ...],
    quantisation: str,
    capacities: tuple[int, ...],
    table: str | None,
    cache: str | None,
    expert_load: bool,
) -> None:
    """Run everything and print the table."""
    rows = tuple(TableRow(int(part.split(":")[0]), part.split(":")[1]) for part in table.split(",")) if table else None
    tuning = Tuning(mega_capacities=capacities or None, table=rows, cache=cache)
    results = Table(title="pools in bf16, greedy")
    columns = ("model", "dispatch", "layout", "requests a batch", "launch s", "agreement", "decode step ms")
    for column in (*columns, "replays", "eager"):
        results.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "tiny_moe": str(REPOSITORY / "examples" / "tiny_moe"),
            "small": save(small_model(), f"{folder}/small"),
        }
        large = save(qwen3_30b_layers(layers), f"{folder}/large") if layers else None
        for dp_size, attn_tp_size in (map(int, layout.split("x")) for layout in layouts):
            sizes = (dp_size * attn_tp_size, attn_tp_size, quantisation, tuning, expert_load)
            for dispatch in dispatches:
                for name in only:
                    attempt(run, name, models[name], dispatch, results, 12, *sizes)
                if large is not None:
                    attempt(run, f"Qwen3-30B geometry, {layers} layers", large, dispatch, results, 64, *sizes)
            if layers:
                attempt(run, "small, no graphs", models["small"], dispatches[-1], results, 12, *sizes, True)
    Console(width=160).print(results)
    versions = [f"torch {torch.__version__}", torch.cuda.get_device_name(0), sys.version.split()[0]]
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True)
    click.echo(", ".join([*versions, *driver.stdout.decode().split()[:1]]))


failed: list[str] = []


def attempt(function, name, *arguments) -> None:  # type: ignore[no-untyped-def]
    """A row that fails is shown as failed; the others still run."""
    click.echo(f"{name}, {arguments[1]}")
    try:
        function(name, *arguments)
    except Exception as error:
        click.echo(f"FAILED {name}, {arguments[1]}: {type(error).__name__}: {error}")
        failed.append(name)
        if len(failed) > 1:
            raise


if __name__ == "__main__":
    main()
