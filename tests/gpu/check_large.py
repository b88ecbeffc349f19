"""Qwen3-30B-A3B's whole geometry with random weights on two GPUs: start, decode steps beside their floors, throughput.

    python tests/gpu/check_large.py --dispatch flashinfer --experts cutedsl
    python tests/gpu/check_large.py --part plain --profile-host
    python tests/gpu/check_large.py --device cpu --tiny --layers 2 --requests 1,3        finds typos on a CPU

`pool` is the step as a Ray pool runs it, `loop` the same step loop in plain processes, `bare` its graph replayed back
to back on constant inputs. All are the same code, so pool/bare is what Ray, scheduling, agreement and packing cost. The
floor is the time to read once, at 4.3 TB/s, all dense weights but the embedding, the experts that the batch hits (were
routing uniform) and the cached keys and values.
"""

import tempfile
import time
from typing import Any

import click
import msgspec
import ray
import step_times
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    Limits,
    PlacementConfig,
    PoolConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.pool import _get
from expert_pool.workers.model_spec import ModelSpec
from expert_pool.workers.rank_config import RankConfig
from harness import end_after, save_config, say, show
from plain_loop import PROMPT_TOKENS, Measured, measure_plain, prompts
from step_times import begin_times, end_times, middle

BYTES_PER_S = 4.3e12
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

results: dict[str, Any] = {"pool": {}, "plain": {}, "notes": []}


class PoolStep(msgspec.Struct, frozen=True):
    """Of one number of requests a rank: milliseconds of a replayed step (median, rank 0), of any decode step by
    `RankStats` (mean, all ranks), and generated tokens a second of the pool, prefill included."""

    step_ms: float
    stats_ms: float
    tokens_per_s: float


def pool_config(folder: str, options: dict[str, Any]) -> PoolConfig:
    most, tokens = max(options["requests"]), PROMPT_TOKENS + options["new_tokens"]
    on_gpu = options["device"] == "cuda"
    return PoolConfig(
        model=folder,
        ranks=2,
        dtype="bfloat16" if on_gpu else "float32",
        weights="random",
        dispatch=options["dispatch"],
        experts=options["experts"],
        quantisation=options["quantisation"],
        address="local",
        limits=Limits(
            chunked_prefill_size=2048,
            max_running_requests=most,
            cuda_graph_bs=(*(bucket for bucket in options["buckets"] if bucket < most), most),
            disable_piecewise_cuda_graph=True,
            max_dispatch_tokens_per_rank=options["capacity"],
        ),
        cache=CacheConfig(num_tokens=most * (tokens + 32) + 4096),
        worker=WorkerConfig(device=options["device"], overlap=options["overlap"], step_timeout_s=120),
        placement=PlacementConfig(timeout_s=60, start_timeout_s=options["deadline"]),
    )


def measure_pool(config: PoolConfig, options: dict[str, Any]) -> RankConfig:
    started = time.monotonic()
    with ExpertPool.launch(config, report=lambda line: say(f"  {line}")) as pool:
        launched = time.monotonic() - started
        status = pool.status()
        loads = status.loads
        graph_bytes = sum(use.num_bytes for use in status.graphs[0].graphs)
        results["notes"].append(
            f"launch {launched:.1f} s: load {max(load.load_seconds for load in loads):.1f} s, capture "
            f"{status.capture_seconds:.1f} s, {len(status.graphs[0].graphs)} graphs of {graph_bytes / 2**20:.0f} MiB; "
            f"dense {loads[0].dense_bytes / 2**30:.2f} GiB, experts {loads[0].expert_bytes / 2**30:.2f} GiB, KV "
            f"{loads[0].kv_cache_bytes / 2**30:.2f} GiB, exchange {loads[0].exchange_bytes / 2**30:.2f} GiB a rank"
        )
        say(results["notes"][-1])
        for count in options["requests"]:
            results["pool"][count] = measured = measure_requests(pool, count, options["new_tokens"])
            say(f"  {count} a rank: {measured}")
        eager = dict(pool.status().graphs[0].eager_steps)
        results["notes"].append(f"eager steps, warm-up included: {eager}")
        return pool.rank_config


def measure_requests(pool: ExpertPool, count: int, new_tokens: int) -> PoolStep:
    """Twice that many requests at once, all of one length; the first, shorter run warms up what a prefill compiles."""
    vocab_size = pool.rank_config.spec.vocab_size
    generate(pool, prompts(2 * count, vocab_size, seed=7), 4)
    actors = _get(pool._driver.__ray_call__.remote(lambda driver: driver._gang.actors))
    on_engines(actors, begin_times)
    before, started = pool.status().stats, time.monotonic()
    generated = generate(pool, prompts(2 * count, vocab_size, seed=8), new_tokens)
    seconds = time.monotonic() - started
    after = pool.status().stats
    step_seconds = on_engines(actors, end_times)[0]

    def grown(name: str) -> float:
        return sum(getattr(one, name) for one in after) - sum(getattr(one, name) for one in before)

    return PoolStep(
        step_ms=middle(step_seconds),
        stats_ms=1e3 * grown("decode_seconds") / max(grown("decode_steps"), 1),
        tokens_per_s=generated / seconds,
    )


def generate(pool: ExpertPool, batch: list[tuple[int, ...]], new_tokens: int) -> int:
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    lengths = [completion.num_completion_tokens for completion in pool.generate(batch, sampling)]
    if lengths != [new_tokens] * len(batch):
        raise RuntimeError(f"requests ended early: {sorted(set(lengths))}, {len(lengths)} of {len(batch)}")
    return sum(lengths)


def on_engines(actors: list[Any], function: Any) -> list[Any]:
    return _get([actor.__ray_call__.remote(lambda actor: function(actor._engine)) for actor in actors])


def floor_ms(spec: ModelSpec, count: int, new_tokens: int) -> float:
    """Milliseconds to read what one rank's step of `count` requests has to read."""
    embedding = spec.vocab_size * spec.hidden_size * spec.dtype_bytes
    num_bytes = float(spec.dense_bytes - embedding)
    for layer in spec.moe:
        hit = layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** (2 * count))
        expert = spec.expert_bytes / len(spec.moe) / layer.num_experts
        num_bytes += hit / 2 * expert
    num_bytes += count * (PROMPT_TOKENS + new_tokens / 2) * spec.kv_bytes_per_token
    return 1e3 * num_bytes / BYTES_PER_S


def report(spec: ModelSpec, options: dict[str, Any]) -> None:
    header = ["requests a rank", "pool ms", "by RankStats", "loop ms", "bare ms", "floor ms"]
    rows: list[list[Any]] = [[*header, "pool/bare", "loop/bare", "pool/floor", "bare/floor", "tokens/s"]]
    for count in options["requests"]:
        pool: PoolStep | None = results["pool"].get(count)
        plain: Measured | None = results["plain"].get(count)
        step = pool.step_ms if pool else float("nan")
        loop, bare = (plain.loop_ms, plain.bare_ms) if plain else (float("nan"),) * 2
        floor = floor_ms(spec, count, options["new_tokens"])
        values = [step, pool.stats_ms if pool else float("nan"), loop, bare, floor]
        ratios = [step / bare, loop / bare, step / floor, bare / floor]
        rows.append(
            [
                count,
                *(f"{value:.3f}" for value in (*values, *ratios)),
                f"{pool.tokens_per_s:.0f}" if pool else "-",
            ]
        )
    overlap = {None: "default", True: "on", False: "off"}[options["overlap"]]
    way = f"{options['dispatch']}+{options['experts']}, quantisation {options['quantisation']}, overlap {overlap}"
    show(f"{options['layers']} layers, {way}", rows)
    profiled = [plain for plain in results["plain"].values() if plain.profile]
    if profiled:
        parts = list(dict.fromkeys(part for plain in profiled for part in plain.profile))
        lines = [[part, *(f"{plain.profile.get(part, 0):.0f}" for plain in profiled)] for part in parts]
        show("host, mean microseconds on rank 0", [["requests a rank", *(p.requests for p in profiled)], *lines])
    for note in results["notes"]:
        click.echo(note)


@click.command()
@click.option("--dispatch", default="flashinfer", show_default=True)
@click.option("--experts", default="auto", show_default=True)
@click.option("--quantisation", default="none", show_default=True)
@click.option("--layers", default=48, show_default=True)
@click.option("--requests", default="1,8,64,256", show_default=True, help="A rank, at once.")
@click.option("--buckets", default="1,8,64,128,256", show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--capacity", type=int, help="limits.max_dispatch_tokens_per_rank.")
@click.option("--overlap/--no-overlap", default=None)
@click.option("--part", multiple=True, type=click.Choice(["pool", "plain"]), default=("pool", "plain"))
@click.option("--profile-host", is_flag=True, help="Where the host's time goes, in the plain processes.")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--tiny", is_flag=True, help="Everything small but the number of layers.")
@click.option("--deadline", default=235.0, show_default=True)
def main(**options: Any) -> None:
    """Measure the parts that are asked for, and print one table; exit with 3 at the deadline."""
    from expert_pool.cluster.pool import validate

    options["requests"] = [int(number) for number in options["requests"].split(",")]
    options["buckets"] = [int(number) for number in options["buckets"].split(",")]
    ray.cloudpickle.register_pickle_by_value(step_times)  # actors do not see this folder
    with tempfile.TemporaryDirectory() as folder:
        config = pool_config(
            save_config(folder, num_hidden_layers=options["layers"], **(TINY if options["tiny"] else {})), options
        )
        rank_config = validate(config)
        end_after(options["deadline"], lambda: report(rank_config.spec, options))
        if "pool" in options["part"]:
            attempt("pool", measure_pool, config, options)
        if "plain" in options["part"]:
            attempt("plain ranks", measure_plain_ranks, rank_config, options)
        report(rank_config.spec, options)
    if any(note.startswith("FAILED") for note in results["notes"]):
        raise SystemExit(1)


def measure_plain_ranks(rank_config: RankConfig, options: dict[str, Any]) -> None:
    for measured in measure_plain(
        rank_config, options["requests"], options["new_tokens"], options["profile_host"], options["deadline"]
    ):
        results["plain"][measured.requests] = measured


def attempt(what: str, function: Any, *arguments: Any) -> None:
    """A part that fails is said; the others still run."""
    say(what)
    try:
        function(*arguments)
    except Exception as error:
        results["notes"].append(f"FAILED {what}: {type(error).__name__}: {str(error)[-1500:]}")
        say(results["notes"][-1])


if __name__ == "__main__":
    main()
