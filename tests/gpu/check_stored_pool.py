"""Pools of one rank and more whose experts stay in their checkpoints' bytes, from files that are written here.

    python tests/gpu/check_stored_pool.py
    python tests/gpu/check_stored_pool.py --format mxfp4 --ranks 2
    python tests/gpu/check_stored_pool.py --device cpu

Each format: a small checkpoint, its pool with `stored_weights: keep`, another of the same, which may compile nothing,
and one with `expand`. Agreement is the share of tokens that Transformers finds the most likely too, in that dtype on
the weights expanded by the writer. Attention is PyTorch's, so that what is compiled are the experts alone. With
HUMMING_CACHE_DIR at an empty folder the first start shows what compiling costs. The last line finds typos on a CPU.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import ray
import torch
from check_pool import agreement, prompts, reference
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
from harness import begin_session, end_after, in_time, say, show
from models import save_random_model
from stored_checkpoints import FORMATS, write_stored

NEW_TOKENS, PROMPTS = 24, 12
FAMILY = {"mxfp4": "gpt_oss"}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 192,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "initializer_range": 0.1,
    },
    "gpt_oss": {"hidden_size": 192, "intermediate_size": 160, "num_local_experts": 8, "num_hidden_layers": 2},
}
LEAST_AGREEMENT = 0.95
rows: list[list[object]] = []
failed: list[str] = []


def run(name: str, folder: Path, expanded: Path, stored_weights: str, ranks: int, device: str) -> None:
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = PoolConfig(
        model=str(folder),
        ranks=ranks,
        dtype=dtype,
        stored_weights=stored_weights,  # type: ignore[arg-type]
        dispatch="allgather",
        limits=Limits(chunked_prefill_size=256, max_running_requests=16, cuda_graph_bs=(1, 4, 16)),
        cache=CacheConfig(num_tokens=8192),
        worker=WorkerConfig(device=device, step_timeout_s=120, attention="torch"),
        placement=PlacementConfig(timeout_s=60),
        recovery=RecoveryConfig(max_restarts=0),
    )
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        say(f"  {line}")

    started = time.perf_counter()
    with ExpertPool.launch(config, report=heard) as pool:
        launched = time.perf_counter() - started
        batch = prompts(pool.rank_config.spec.vocab_size, PROMPTS, 60)
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        completions = {one.index: one.token_ids for one in pool.generate(batch, sampling)}
        status = pool.status()
    share = agreement(reference(str(expanded), dtype, device), batch, completions)
    compiled = sum("compiling" in line and "on first use" in line for line in lines)
    load = status.loads[0]
    rows.append(
        [name, stored_weights, ranks, f"{launched:.1f}", compiled, f"{share:.3f}", load.expert_bytes, load.held_as]
    )
    say("  ".join(map(str, rows[-1])))
    if share < LEAST_AGREEMENT:
        failed.append(f"{name}, {stored_weights}: agreement {share:.3f}")
    if device == "cuda" and not status.graphs[0].replays:
        failed.append(f"{name}, {stored_weights}: no step was replayed")


def report() -> None:
    show("pools", [["format", "setting", "ranks", "launch s", "compiled", "agreement", "expert bytes", "held"], *rows])
    print(f"failed: {'; '.join(failed) if failed else 'nothing'}", flush=True)


@click.command()
@click.option("--format", "formats", multiple=True, default=("block_fp8", "mxfp4"), show_default=True)
@click.option("--ranks", default=1, show_default=True)
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--pool-deadline", default=120.0, show_default=True)
@click.option("--deadline", default=570.0, show_default=True)
def main(formats: tuple[str, ...], ranks: int, device: str, pool_deadline: float, deadline: float) -> None:
    end_after(deadline, report)
    begin_session(ranks, device)
    with tempfile.TemporaryDirectory() as work:
        for name in formats:
            family = FAMILY.get(name, "qwen3_moe")
            save_random_model(family, Path(work, family), **SIZES[family])
            folder, expanded = write_stored(Path(work, family), Path(work, name), FORMATS[name])
            for count, stored_weights in enumerate(("keep", "keep", "expand")):
                try:
                    in_time(pool_deadline, run, name, folder, expanded, stored_weights, ranks, device)
                except Exception as error:
                    failed.append(f"{name}, {stored_weights}: {type(error).__name__}: {str(error)[:1000]}")
                    say(failed[-1])
                if count == 1 and device == "cuda" and len(rows) > 1 and rows[-1][0] == name and rows[-1][4]:
                    failed.append(f"{name}: the second start compiled")
    report()
    ray.shutdown()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
