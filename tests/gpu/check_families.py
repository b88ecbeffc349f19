"""Every family on two GPUs against Transformers on one, teacher-forced: logits of all positions, eager and replayed.

Two plain processes, each with one GPU, run the engine that a pool's ranks run, without Ray: all but the last tokens of
each sequence are prefilled eagerly, several sequences a step, and the last ones are decoded by replaying a graph, each
step given the sequence's own next token. Transformers runs the same sequences in the same dtype, and in float32.

The last columns explain what is left: how far each of the two is from float32, and in how many positions a token goes
to other experts in Transformers' own bf16 than in its float32. Those routing flips are no rounding error of one logit:
a whole expert is another one.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click
import torch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

NUM_SEQUENCES, LONGEST, DECODED = 64, 200, 4
REPLAYED_BATCH = 32
STEP_TOKENS = 512
RELATIVE_BOUND, SAME_BOUND = 3e-2, 0.99
TIE = 2.0**-7

COMMON = {"vocab_size": 1024, "hidden_size": 256, "initializer_range": 0.06, "max_position_embeddings": 512}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "mixtral": {"intermediate_size": 128},
    "olmoe": {"intermediate_size": 128},
    "deepseek_v3": {
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
    },
    "gpt_oss": {"head_dim": 64, "intermediate_size": 128},
}


def sequences(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(DECODED + 1, LONGEST, (NUM_SEQUENCES,), generator=generator).tolist()
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def step_inputs(pieces: list[tuple[list[int], int, int]], blocks: list[list[int]], block_size: int) -> Any:
    """Inputs of a step that runs tokens `start` to `end` of each sequence; every row's logits are due."""
    from expert_pool.workers.inputs import StepInputs
    from expert_pool.workers.kv_cache import PADDING_BLOCK

    lens = torch.tensor([end - start for _, start, end in pieces])
    positions = [position for _, start, end in pieces for position in range(start, end)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (_, start, end), table in zip(pieces, blocks, strict=True)
        for position in range(start, end)
    ]
    widest = max(len(table) for table in blocks)
    return StepInputs(
        input_ids=torch.tensor([token for tokens, start, end in pieces for token in tokens[start:end]]),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        due_rows=torch.arange(len(positions)),
        query_starts=lens.cumsum(0) - lens,
        query_lens=lens,
        context_lens=torch.tensor([start for _, start, _ in pieces]),
        block_tables=torch.tensor([table + [PADDING_BLOCK] * (widest - len(table)) for table in blocks]),
        num_valid_tokens=torch.tensor([len(positions)], dtype=torch.int32),
    )


def prefill_groups(batch: list[list[int]]) -> list[list[int]]:
    """Sequences by number, as many a step as its tokens allow."""
    groups: list[list[int]] = [[]]
    for index, tokens in enumerate(batch):
        if sum(len(batch[other]) for other in groups[-1]) + len(tokens) > STEP_TOKENS:
            groups.append([])
        groups[-1].append(index)
    return groups


def record_what_can_be(engine: Any) -> Any:
    """The driver's part of capture, for ranks that are alike: drops what cannot be recorded, and says why."""
    from expert_pool.graphs.plan import plan_captures

    plan = plan_captures(engine.config.limits)
    refused = dict(engine.graphs.agree(plan).refused)
    if engine.rank == 0:
        for reason in sorted({f"{entry.kind}: {reason}" for entry, reason in refused.items()}):
            print(f"  not recorded, {reason}", flush=True)
    plan = plan.without(set(refused))
    engine.graphs.rehearse(plan)
    engine.graphs.begin()
    for entry in plan.entries:
        engine.graphs.warm_up(entry)
        engine.graphs.record(entry)
    engine.graphs.end()
    engine.graphs.commit(plan)
    return plan


@torch.inference_mode()
def logits_of(engine: Any, batches: list[list[list[int]]]) -> list[torch.Tensor]:
    """`[length, V]` float32 logits of each of this rank's sequences; collective over all ranks."""
    from expert_pool.dispatch.geometry import StepGeometry
    from expert_pool.workers.inputs import dummy
    from expert_pool.workers.kv_cache import BlockAllocator

    config, target = engine.config, engine._loop._executor._model
    allocator, batch = BlockAllocator(config.num_blocks, config.block_size), batches[engine.rank]
    tables: list[list[int]] = [[] for _ in batch]
    for table, tokens in zip(tables, batch, strict=True):
        assert allocator.grow(table, len(tokens)), "too few KV blocks for the sequences"
    logits: list[list[torch.Tensor]] = [[] for _ in batch]
    groups = [prefill_groups([tokens[:-DECODED] for tokens in one]) for one in batches]
    for step in range(max(len(one) for one in groups)):
        counts = tuple(
            sum(len(batches[rank][index]) - DECODED for index in one[step]) if step < len(one) else 1
            for rank, one in enumerate(groups)
        )
        geometry = StepGeometry.eager(config.layout, counts, capacity=config.capacity)
        mine = groups[engine.rank][step] if step < len(groups[engine.rank]) else []
        pieces = [(batch[index], 0, len(batch[index]) - DECODED) for index in mine]
        blocks = [tables[index] for index in mine]
        inputs = step_inputs(pieces, blocks, config.block_size) if mine else dummy()
        rows = target.forward(inputs, geometry).float().cpu()
        for index, part in zip(mine, rows.split([end for _, _, end in pieces]) if mine else (), strict=True):
            logits[index].append(part)
    decode = [entry for entry in engine.graphs.committed.entries if entry.kind == "decode"]
    entry = min((entry for entry in decode if entry.bucket >= len(batch)), key=lambda entry: entry.bucket)
    for back in range(DECODED, 0, -1):
        pieces = [(tokens, len(tokens) - back, len(tokens) - back + 1) for tokens in batch]
        values = step_inputs(pieces, tables, config.block_size).values()
        rows = engine.graphs.runners["decode"].replay(entry, values, len(batch)).float().cpu()
        for index, row in enumerate(rows):
            logits[index].append(row.unsqueeze(0))
    return [torch.cat(parts) for parts in logits]


def rank_main(config: Any, rank: int, batches: list[list[list[int]]], ports: Any, folder: str) -> None:
    from expert_pool.workers.engine import RankEngine

    try:
        engine = RankEngine(config, rank)
        if rank == 0:
            port = engine.open_rendezvous("127.0.0.1")
            for _ in range(config.layout.world_size - 1):
                ports.put(port)
        else:
            port = ports.get(timeout=120)
        engine.join("127.0.0.1", port)
        report = engine.load()
        plan = record_what_can_be(engine)
        attention = type(engine._loop._executor._model.attention).__name__
        if rank == 0:
            print(
                f"  {attention}, {len(plan.entries)} graphs, KV cache of {report.kv_cache_tokens:,} tokens "
                f"({report.kv_cache_bytes:,} bytes)",
                flush=True,
            )
        torch.save(logits_of(engine, batches), f"{folder}/rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_ranks(config: Any, batches: list[list[list[int]]], deadline_s: float) -> list[list[torch.Tensor]]:
    """Logits of each rank's sequences, from processes that see one GPU each."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(rank) for rank in range(len(batches))]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(len(batches)):
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
            process = context.Process(target=rank_main, args=(config, rank, batches, ports, folder), daemon=True)
            process.start()
            processes.append(process)
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        for process in processes:
            process.join(timeout=deadline_s)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        for process in processes:
            if process.is_alive():
                process.kill()
        if failed:
            raise RuntimeError(f"ranks {failed} did not finish")
        return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(len(batches))]


@torch.inference_mode()
def transformers_logits(
    path: str, dtype: torch.dtype, device: str, batch: list[list[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of each sequence run alone, and the experts of each token, sorted: `[length, layers x top-k]`."""
    from expert_pool.workers.inspection import expert_parallel_plan
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    chosen: list[torch.Tensor] = []
    modules = dict(model.named_modules())
    for name, style in expert_parallel_plan(model).items():
        if style == "ep_dispatch_experts":
            modules[name].register_forward_pre_hook(
                lambda _, args, kwargs: chosen.append(_experts_of(args, kwargs)), with_kwargs=True
            )
    logits, experts = [], []
    for tokens in batch:
        chosen.clear()
        logits.append(model(torch.tensor([tokens], device=device)).logits[0].float().cpu())
        experts.append(torch.cat(chosen, dim=1))
    return logits, experts


def _experts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    indices = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    return indices.sort(dim=-1).values.cpu()


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative error of each position's logits, `[N, V]` twice -> `[N]`."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def same_argmax(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of positions with the same most likely token, or with one that lies within the rounding of the largest."""
    best = theirs.max(dim=-1).values
    chosen = theirs.gather(1, ours.argmax(dim=-1, keepdim=True))[:, 0]
    return float((best - chosen <= TIE * best.abs()).float().mean())


def compare(name: str, ours: list[torch.Tensor], half: Any, full: Any) -> list[tuple[str, ...]]:
    """Rows of the table: one for what was prefilled, one for what was replayed."""
    (half_logits, half_experts), (full_logits, full_experts) = half, full
    rows = []
    for part, pick in (("prefill", slice(None, -DECODED)), ("replay", slice(-DECODED, None))):
        mine, theirs, exact = (torch.cat([one[pick] for one in logits]) for logits in (ours, half_logits, full_logits))
        flips = torch.cat([(a[pick] != b[pick]).any(dim=1) for a, b in zip(half_experts, full_experts, strict=True)])
        error, steady = relative(mine, theirs), ~flips
        overall = float((mine - theirs).norm() / theirs.norm())
        same = same_argmax(mine, theirs)
        verdict = "ok" if overall <= RELATIVE_BOUND and same >= SAME_BOUND else "ABOVE"
        rows.append(
            (
                name,
                part,
                f"{overall:.4f}",
                f"{float(error.max()):.4f}",
                f"{float(error[steady].max()) if steady.any() else float('nan'):.4f}",
                f"{same:.4f}",
                f"{float(relative(mine, exact).mean()):.4f}",
                f"{float(relative(theirs, exact).mean()):.4f}",
                f"{same_argmax(mine, exact):.4f}",
                f"{same_argmax(theirs, exact):.4f}",
                f"{float(flips.float().mean()):.3f}",
                verdict,
            )
        )
    return rows


def check(name: str, path: str, dispatch: str, attention: str, device: str, dtype: str) -> list[tuple[str, ...]]:
    from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
    from expert_pool.cluster.config import resolve
    from expert_pool.workers.inspection import inspect_model

    # On GPUs the cache is sized by measuring, on CPUs by hand.
    cache = CacheConfig(gpu_memory_utilization=0.3) if device == "cuda" else CacheConfig(num_tokens=16384)
    limits = Limits(
        chunked_prefill_size=STEP_TOKENS,
        max_running_requests=REPLAYED_BATCH,
        cuda_graph_bs=(1, REPLAYED_BATCH),
        disable_piecewise_cuda_graph=True,
    )
    config = PoolConfig(
        model=path,
        ranks=2,
        dtype=dtype,
        dispatch=dispatch,
        limits=limits,
        cache=cache,
        worker=WorkerConfig(device=device, attention=attention, step_timeout_s=120),
    )
    rank_config = resolve(config, inspect_model(path, dtype))
    batch = sequences(rank_config.spec.vocab_size)
    batches = [batch[rank :: config.ranks] for rank in range(config.ranks)]
    by_rank = run_ranks(rank_config, batches, deadline_s=400)
    ours = [by_rank[index % config.ranks][index // config.ranks] for index in range(len(batch))]
    half = transformers_logits(path, getattr(torch, dtype), device, batch)
    full = transformers_logits(path, torch.float32, device, batch)
    return compare(f"{name}, {attention}", ours, half, full)


@click.command()
@click.option("--family", "families", multiple=True, help="All five and tiny_moe, unless given.")
@click.option("--dispatch", default="flashinfer", show_default=True)
@click.option("--attention", "attentions", multiple=True, default=("auto",), show_default=True, help="auto, torch.")
@click.option("--device", default="cuda", show_default=True, help="cpu tries the script itself, with --dispatch auto.")
@click.option("--dtype", default="bfloat16", show_default=True)
def main(families: tuple[str, ...], dispatch: str, attentions: tuple[str, ...], device: str, dtype: str) -> None:
    """Run every family with every attention, and print one table; exits with 1 where a bound is exceeded."""
    from models import FAMILIES, save_random_model
    from rich.console import Console
    from rich.table import Table
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    columns = ("family, attention", "part", "rel", "worst", "worst, no flip", "same", "ours/f32", "HF/f32")
    columns += ("same ours/f32", "same HF/f32", "flips", "")
    table = Table(*columns, title=f"{NUM_SEQUENCES} sequences, {dtype}, dispatch {dispatch}, against Transformers")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in families or (*FAMILIES, "tiny_moe"):
            path = str(REPOSITORY / "examples" / "tiny_moe")
            if name != "tiny_moe":
                path = f"{folder}/{name}"
                save_random_model(name, Path(path), dtype=getattr(torch, dtype), **COMMON, **SIZES[name])
            for attention in attentions:
                click.echo(f"{name}, attention {attention}")
                try:
                    rows = check(name, path, dispatch, attention, device, dtype)
                except Exception as error:
                    click.echo(f"FAILED: {type(error).__name__}: {error}")
                    failed.append(name)
                    continue
                failed += [name for row in rows if row[-1] != "ok"]
                for row in rows:
                    table.add_row(*row)
                    click.echo("  " + "  ".join(row))
    Console(width=170).print(table)
    click.echo(
        f"rel: of all logits together, at most {RELATIVE_BOUND:g}; worst: of one position; same: most likely token, "
        f"ties within {TIE:g} aside, at least {SAME_BOUND:g}; flips: positions with other experts in Transformers' "
        f"{dtype} than in its float32"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
