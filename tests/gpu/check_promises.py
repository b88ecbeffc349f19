"""Whether what the documents promise is what runs: compiled regions, fusions, ways to the experts, kinds of graph.

    python tests/gpu/check_promises.py                       on one GPU, a Qwen3-30B-A3B of 4 layers, random weights
    python tests/gpu/check_promises.py --compile off         has to fail: nothing is compiled

Loads one rank in this process, records its graphs, generates, and looks at the kernels of one replayed decode step.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.planning.validation import validate
from expert_pool.workers.compiled.regions import graphs_so_far
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank_config import RankConfig
from harness import save_config, say
from plain_loop import KeptInputs, record_what_all_can, run_loop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from handle import graphs_of, take
from promises import broken_promises

REQUESTS, NEW_TOKENS = 64, 16


def rank_config(folder: str, num_layers: int, is_compiled: bool) -> RankConfig:
    save_config(folder, num_hidden_layers=num_layers)
    config = PoolConfig(
        model=folder,
        ranks=1,
        dtype="bfloat16",
        weights="random",
        limits=Limits(max_running_requests=REQUESTS, chunked_prefill_size=2048, cuda_graph_bs=(1, REQUESTS)),
        cache=CacheConfig(num_tokens=64 * 1024),
        worker=WorkerConfig(device="cuda", compile=is_compiled),
    )
    return validate(config)


def kernels_of_a_step(engine: RankEngine, num_layers: int) -> dict[str, float]:
    """How often each layer launches each kernel in a replayed decode step of the most requests."""
    kept = KeptInputs(engine, NEW_TOKENS)
    run_loop(engine, REQUESTS, NEW_TOKENS)
    kept.stop()
    runner = engine.graphs.runners["decode"]
    entry, values, on_host = kept.steps[-1]
    with torch.inference_mode():
        take(runner, entry, values, on_host)
        graph = graphs_of(runner)[entry]
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
    on_device = [one.name for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return {name: count / num_layers for name, count in Counter(on_device).most_common()}


@click.command()
@click.option("--layers", "num_layers", default=12, show_default=True, help="Of the model.")
@click.option("--compile", "is_compiled", type=bool, default=True, show_default=True)
@click.option("--experts", default="measured, local", show_default=True, help="How the way to the experts is named.")
def main(num_layers: int, is_compiled: bool, experts: str) -> None:
    """Exits with 1 where a promise is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        engine = RankEngine(rank_config(folder, num_layers, is_compiled), 0)
        engine.join(engine.open_rendezvous("127.0.0.1"))
        layers = engine.load().layers
        say("loaded: " + "\n    ".join(layers))
        compiled = graphs_so_far()
        record_what_all_can(engine)
        kernels = kernels_of_a_step(engine, num_layers)
        recorded = {entry.kind for entry in engine.graphs.committed.entries}
        broken = list(broken_promises(layers, recorded, graphs_so_far() - compiled, kernels, experts))
    for name, count in kernels.items():
        if count >= 0.5:
            print(f"  {count:5.2f} a layer  {name:.110}")
    for line in broken:
        say(f"BROKEN: {line}")
    say(f"{sum(kernels.values()):.1f} kernels a layer, a step's own among them; {len(broken)} promises broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
