"""Qwen3-30B-A3B's whole geometry with random weights: start, decode steps beside their floors, scaling, throughput.

    python tests/gpu/check_large.py --ranks 2 --ranks 4 --dispatch flashinfer --experts cutedsl --plain beside
    python tests/gpu/check_large.py --ranks 4 --part auto
    python tests/gpu/check_large.py --device cpu --tiny --layers 2 --requests 1,2 --auto-requests 1,4 --part auto

The last finds typos on a CPU. All pools share one Ray session. `pool` is the step as a pool runs it, one pool for each
number of ranks. `plain` runs the ranks of the first as plain processes without Ray: the same step loop, and its graphs
replayed back to back on constant inputs of several steps. All are the same code on the same prompts, so pool/bare is
what Ray, scheduling, agreement and packing cost. `auto` lets a pool of the last number of ranks measure which way to
the experts to take, with `worker.expert_load`; then another takes the same ways and does not count. `prefill` generates
from long prompts in a pool with prefill graphs, and in one without.
"""

import tempfile
import time
from typing import Any

import click
import harness  # noqa: F401  makes the folder of the tests importable
import ray
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
from expert_pool.cluster.planning.validation import validate
from expert_pool.dispatch.paths.tuning import Tuning
from expert_pool.workers.model.spec import ModelSpec
from handle import actors_of
from harness import begin_session, end_after, in_time, save_config, say
from large_insides import counting_problems
from large_prefill import PROMPTS, PrefillRates, longest_request, measure_prefill, show_prefill
from large_tables import PoolStep, show_bare, show_counting, show_scaling, show_steps
from plain_loop import PROMPT_TOKENS, Measured, PlainRanks, dealt, prompts
from step_times import traced_steps

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
PARTS = ("pool", "plain", "auto", "prefill")

pools: dict[int, dict[int, PoolStep]] = {}
plain: list[Measured] = []
auto: dict[int, PoolStep] = {}
auto_uncounted: dict[int, PoolStep] = {}
prefill: list[PrefillRates] = []
notes: list[str] = []
session: list[Any] = []


def note(line: str) -> None:
    notes.append(line)
    say(line)


def pool_config(folder: str, ranks: int, options: dict[str, Any], **others: Any) -> PoolConfig:
    most, tokens = max(options["requests"]), PROMPT_TOKENS + options["new_tokens"]
    on_gpu = options["device"] == "cuda"
    chosen = {name: options[name] for name in ("dispatch", "experts", "quantisation")} | others
    expert_load = chosen.pop("expert_load", False)
    tokens = chosen.pop("tokens", tokens)
    no_prefill_graphs = not chosen.pop("prefill_graphs", False)
    return PoolConfig(
        model=folder,
        ranks=ranks,
        dtype="bfloat16" if on_gpu else "float32",
        weights="random",
        **chosen,
        limits=Limits(
            chunked_prefill_size=2048,
            max_running_requests=most,
            cuda_graph_bs=tuple(sorted({bucket for bucket in options["buckets"] if bucket < most} | {most})),
            disable_piecewise_cuda_graph=no_prefill_graphs,
            max_dispatch_tokens_per_rank=options["capacity"],
        ),
        cache=CacheConfig(num_tokens=most * (tokens + 32) + 4096),
        worker=WorkerConfig(
            device=options["device"],
            overlap=options["overlap"],
            step_timeout_s=120,
            trace_steps=2 * options["new_tokens"] + 64,
            expert_load=expert_load,
        ),
        placement=PlacementConfig(timeout_s=60, start_timeout_s=options["deadline"]),
        recovery=RecoveryConfig(max_restarts=0),
    )


def measure_pool(folder: str, ranks: int, options: dict[str, Any]) -> None:
    """A pool of this many ranks; beside the first, plain ranks load, and measure while the pool is idle."""
    config = pool_config(folder, ranks, options)
    is_first, plain_ranks = ranks == options["ranks"][0], None
    if is_first and "plain" in options["part"] and options["plain"] == "beside":
        plain_ranks = new_plain_ranks(config, options)
    try:
        with launched(config, options) as pool:
            pools[ranks] = steps = {}
            for count in options["requests"]:
                steps[count] = measure_requests(pool, count, options["new_tokens"])
                say(f"  {count} a rank: {steps[count]}")
            note(f"{ranks} ranks, eager steps, warm-up included: {dict(pool.status().graphs[0].eager_steps)}")
            if plain_ranks is not None:
                gpus = [",".join(place.gpu_ids) for place in pool.status().places]
                note(f"GPUs of the pool {gpus}, of the plain ranks beside it 0 to {ranks - 1}")
                attempt("plain ranks", measure_plain, plain_ranks, options)
    finally:
        if plain_ranks is not None:
            plain_ranks.end()


def launched(config: PoolConfig, options: dict[str, Any]) -> ExpertPool:
    started = time.monotonic()
    lines: list[tuple[float, str]] = []

    def report(line: str) -> None:
        lines.append((time.monotonic(), line))
        say(f"  {line}")

    pool = in_time(options["case_deadline"], ExpertPool.launch, config, report)
    status, seconds = pool.status(), time.monotonic() - started
    load, graphs = status.loads[0], status.graphs[0].graphs
    stages = [(at - started, line.split(" ")[0].rstrip(":")) for at, line in lines if not line.startswith(" ")]
    note(
        f"{config.ranks} ranks, {config.dispatch}+{config.experts}: launch {seconds:.1f} s: load "
        f"{max(one.load_seconds for one in status.loads):.1f} s, capture {status.capture_seconds:.1f} s, "
        f"{len(graphs)} graphs of {sum(use.num_bytes for use in graphs) / 2**20:.0f} MiB; a rank holds dense "
        f"{load.dense_bytes / 2**30:.2f} GiB, experts {load.expert_bytes / 2**30:.2f} GiB, KV "
        f"{load.kv_cache_bytes / 2**30:.2f} GiB, exchange {load.exchange_bytes / 2**30:.2f} GiB; stages begin at "
        + ", ".join(f"{at:.1f} {what}" for at, what in stages)
    )
    return pool


def measure_requests(pool: ExpertPool, count: int, new_tokens: int) -> PoolStep:
    """That many requests a rank at once, all of one length; a shorter run before warms up what a prefill compiles."""
    ranks, vocab_size = pool.rank_config.layout.world_size, pool.rank_config.spec.vocab_size
    generate(pool, prompts(ranks * count, vocab_size, seed=99), 4)
    before, began, started = pool.status().stats, time.perf_counter(), time.monotonic()
    generated = generate(pool, dealt(ranks, count, vocab_size), new_tokens)
    seconds = time.monotonic() - started
    after, traced = pool.status().stats, traced_steps(pool.trace()[0], began)

    def grown(name: str) -> float:
        return sum(getattr(one, name) for one in after) - sum(getattr(one, name) for one in before)

    return PoolStep(
        step_ms=traced.step_ms,
        stats_ms=1e3 * grown("decode_seconds") / max(grown("decode_steps"), 1),
        agree_ms=traced.agree_ms,
        host_ms=traced.host_ms,
        tokens_per_s=generated / seconds,
    )


def generate(pool: ExpertPool, batch: list[tuple[int, ...]], new_tokens: int) -> int:
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    lengths = [completion.num_completion_tokens for completion in pool.generate(batch, sampling)]
    if lengths != [new_tokens] * len(batch):
        raise RuntimeError(f"requests ended early: {sorted(set(lengths))}, {len(lengths)} of {len(batch)}")
    return sum(lengths)


def new_plain_ranks(config: PoolConfig, options: dict[str, Any]) -> PlainRanks:
    return PlainRanks(validate(config), options["requests"], options["new_tokens"], options["profile_host"])


def measure_plain(ranks: PlainRanks, options: dict[str, Any]) -> None:
    plain.extend(ranks.measure(options["case_deadline"]))


def measure_plain_alone(folder: str, options: dict[str, Any]) -> None:
    ranks = new_plain_ranks(pool_config(folder, options["ranks"][0], options), options)
    try:
        measure_plain(ranks, options)
    finally:
        ranks.end()


def measure_auto(folder: str, options: dict[str, Any]) -> None:
    """The way to the experts is measured at start, and experts are counted; then the same ways without counting."""
    tuning = Tuning(
        cache=f"{folder}/measured.json",
        mega_capacities=tuple(map(int, options["mega_capacities"].split(","))) if options["mega_capacities"] else None,
        max_bytes=int(options["tuning_gib"] * 2**30),
    )
    # On GPUs `auto` is this, and on CPUs it would measure nothing.
    way = {"dispatch": "measured", "experts": "auto", "tuning": tuning}
    options = options | {"requests": options["auto_requests"], "buckets": options["auto_requests"]}
    with launched(pool_config(folder, options["ranks"][-1], options, expert_load=True, **way), options) as pool:
        check_counting(pool, options)
        for count in options["requests"]:
            auto[count] = measure_requests(pool, count, options["new_tokens"])
    with launched(pool_config(folder, options["ranks"][-1], options, **way), options) as pool:
        for count in options["requests"]:
            auto_uncounted[count] = measure_requests(pool, count, options["new_tokens"])
        note(f"auto, eager steps: {dict(pool.status().graphs[0].eager_steps)}")


def measure_prefills(folder: str, options: dict[str, Any]) -> None:
    options = options | {"requests": [PROMPTS], "buckets": [1, 4, 16, PROMPTS]}
    for has_graphs in (True, False):
        longest = longest_request(options["tiny"])
        config = pool_config(folder, options["ranks"][-1], options, tokens=longest, prefill_graphs=has_graphs)
        with launched(config, options) as pool:
            prefill.append(measure_prefill(pool, options["tiny"]))
            say(f"  {'with' if has_graphs else 'without'} graphs: {prefill[-1]}")


def check_counting(pool: ExpertPool, options: dict[str, Any]) -> None:
    layout, new_tokens = pool.rank_config.layout, options["new_tokens"]
    leaders = [actors_of(pool)[layout.leader(dp_rank)] for dp_rank in range(layout.dp_size)]
    count = options["requests"][len(options["requests"]) // 2]
    generate(pool, prompts(layout.dp_size, pool.rank_config.spec.vocab_size, seed=98), 2)
    found = []
    for batch in ([], dealt(layout.dp_size, count, pool.rank_config.spec.vocab_size)):
        generate(pool, batch, new_tokens)
        time.sleep(0.5)  # ranks go idle, which brings the counters to the host
        found.append((ray.get([leader.expert_counts.remote() for leader in leaders]), pool.status().stats))
    (counts, stats), (counts_after, stats_after) = found
    top_k = pool.rank_config.spec.moe[0].top_k
    problems = counting_problems(counts, counts_after, stats, stats_after, new_tokens, top_k)
    note(f"FAILED counters: {problems}" if problems else f"expert counters are right on {len(leaders)} DP ranks")


def report(spec: ModelSpec, options: dict[str, Any]) -> None:
    overlap = {None: "default", True: "on", False: "off"}[options["overlap"]]
    way = f"{options['dispatch']}+{options['experts']}, quantisation {options['quantisation']}, overlap {overlap}"
    show_steps(f"{options['layers']} layers, {way}", spec, pools, options["new_tokens"])
    show_scaling(pools)
    show_bare(pools.get(options["ranks"][0], {}), plain)
    last = options["ranks"][-1]
    show_steps("ways to the experts as measured, experts counted", spec, {last: auto}, options["new_tokens"])
    show_counting(auto, auto_uncounted)
    show_prefill(*[*prefill, None, None][:2])
    for line in notes:
        click.echo(line)


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2,), show_default=True, help="Sizes, one pool each.")
@click.option("--dispatch", default="flashinfer", show_default=True)
@click.option("--experts", default="auto", show_default=True)
@click.option("--quantisation", default="none", show_default=True)
@click.option("--layers", default=48, show_default=True)
@click.option("--requests", default="1,4,8,32,64,128,256", show_default=True, help="A rank, at once.")
@click.option("--buckets", default="1,4,8,32,64,128,256", show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--capacity", type=int, help="limits.max_dispatch_tokens_per_rank.")
@click.option("--overlap/--no-overlap", default=None)
@click.option("--part", multiple=True, type=click.Choice(PARTS), default=("pool", "plain"), show_default=True)
@click.option("--plain", default="after", type=click.Choice(["after", "beside"]), help="When plain ranks load.")
@click.option("--profile-host", is_flag=True, help="Where the host's time goes, in the plain processes.")
@click.option("--auto-requests", default="8,64,256", show_default=True, help="As --requests, and the buckets, of auto.")
@click.option("--mega-capacities", default="", help="Of mega kernels that are measured, like 64,256.")
@click.option("--tuning-gib", default=8.0, show_default=True, help="tuning.max_bytes.")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--tiny", is_flag=True, help="Everything small but the number of layers.")
@click.option("--case-deadline", default=240.0, show_default=True, help="For a launch, and for all of the plain ranks.")
@click.option("--deadline", default=580.0, show_default=True)
def main(**options: Any) -> None:
    """Measure the parts that are asked for, and print tables; exit with 3 at the deadline."""
    for name in ("requests", "buckets", "auto_requests"):
        options[name] = [int(number) for number in options[name].split(",")]
    if options["device"] == "cpu" and options["dispatch"] == "flashinfer":
        options["dispatch"] = "alltoall"
    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, num_hidden_layers=options["layers"], **(TINY if options["tiny"] else {}))
        spec = validate(pool_config(folder, options["ranks"][0], options)).spec
        end_after(options["deadline"], lambda: report(spec, options))
        session.extend((max(options["ranks"]), options["device"], ()))
        begin_session(*session)
        for ranks in options["ranks"] if "pool" in options["part"] else ():
            attempt(f"pool of {ranks} ranks", measure_pool, folder, ranks, options)
        if "plain" in options["part"] and ("pool" not in options["part"] or options["plain"] == "after"):
            attempt("plain ranks", measure_plain_alone, folder, options)
        if "auto" in options["part"]:
            attempt("auto", measure_auto, folder, options)
        if "prefill" in options["part"]:
            attempt("prefill", measure_prefills, folder, options)
        report(spec, options)
    ray.shutdown()
    raise SystemExit(any("FAILED" in line for line in notes))


def attempt(what: str, function: Any, *arguments: Any) -> None:
    """A part that fails is said; the others still run."""
    say(what)
    try:
        function(*arguments)
    except Exception as error:
        note(f"FAILED {what}: {type(error).__name__}: {str(error)[-1500:]}")
        if isinstance(error, TimeoutError):  # what hangs would keep its GPUs
            ray.shutdown()
            begin_session(*session)


if __name__ == "__main__":
    main()
