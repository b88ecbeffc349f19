"""Where a decode step goes: the kernels of a recorded graph by name, beside the time to read its weights once.

    python benchmarks/decode_kernels.py --requests 1,8,64,256 --experts cutedsl
    python benchmarks/decode_kernels.py --device cpu --tiny --layers 2 --requests 1,2

One rank in this process, through the pool's own engine and graphs, without Ray. The second finds typos on a CPU, where
what is counted are PyTorch's operators instead of kernels.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import harness
import plain_loop
import torch
from check_large import TINY
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.planning.validation import validate
from expert_pool.workers.engine import RankEngine
from handle import graphs_of, take
from large_tables import weight_bytes
from side_by_side import Counts

PROFILED_REPLAYS = 3
NAME_WIDTH = 72


@dataclass(frozen=True)
class Kernel:
    """Of one name. Counts and microseconds are those of one replay, over the layers of the model."""

    name: str
    count_a_layer: float
    us_each: float
    us_a_layer: float


def short_name(name: str) -> str:
    """Without return type, namespaces, template arguments and parameters; what PyTorch's generic kernels compute, which
    a template argument says, is kept in brackets."""
    functors = re.findall(r"\b(\w+(?:Functor\w*|_kernel_cuda|_kernel_impl|Ops?))\b", name.partition("<")[2])
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = shorter
    bare = re.sub(r"\b\w+::", "", bare).split("(")[0].strip()
    return (bare + (f" [{functors[0]}]" if functors else ""))[:NAME_WIDTH]


def kernels_of(events: Iterable[tuple[str, float]], replays: int, layers: int) -> list[Kernel]:
    """The slowest name first.

    Args:
        events: full name and microseconds of each kernel of all replays. Names that differ in template arguments alone
            are told apart: they are other kernels.
    """
    found: dict[str, list[float]] = {}
    for name, microseconds in events:
        found.setdefault(name, []).append(microseconds)
    kernels = [
        Kernel(short_name(name), len(us) / replays / layers, sum(us) / len(us), sum(us) / replays / layers)
        for name, us in found.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us_a_layer)


def floor_ms(num_bytes: float, bandwidth_tb_s: float) -> float:
    return num_bytes / (bandwidth_tb_s * 1e12) * 1e3


def recorded_events(graph: Any, on_gpu: bool) -> list[tuple[str, float]]:
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(PROFILED_REPLAYS):
            graph.replay()
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        device = torch.autograd.DeviceType.CUDA
        return [(one.name, one.device_time_total) for one in profile.events() if one.device_type == device]
    return [(one.name, one.self_cpu_time_total) for one in profile.events()]


def loaded_engine(folder: str, options: dict[str, Any]) -> RankEngine:
    most, on_gpu = max(options["requests"]), options["device"] == "cuda"
    config = PoolConfig(
        model=folder,
        dtype="bfloat16" if on_gpu else "float32",
        weights="random",
        experts=options["experts"],
        limits=Limits(
            max_running_requests=most,
            chunked_prefill_size=2048,
            cuda_graph_bs=tuple(sorted(options["requests"])),
            disable_piecewise_cuda_graph=True,
        ),
        cache=CacheConfig(num_tokens=most * (plain_loop.PROMPT_TOKENS + options["new_tokens"] + 32) + 4096),
        worker=WorkerConfig(device=options["device"]),
    )
    engine = RankEngine(validate(config), 0)
    engine.join(engine.open_rendezvous("127.0.0.1"))
    engine.load()
    plain_loop.record_what_all_can(engine)
    return engine


def measure(engine: RankEngine, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Replay the graph over the inputs of a step in the middle of a generation."""
    kept = plain_loop.KeptInputs(engine, options["new_tokens"])
    plain_loop.run_loop(engine, count, options["new_tokens"])
    kept.stop()
    runner = engine.graphs.runners["decode"]
    entry, values, on_host = kept.steps[len(kept.steps) // 2]
    with torch.inference_mode():
        take(runner, entry, values, on_host)
        graph = graphs_of(runner)[entry]
        for _ in range(plain_loop.SETTLING_REPLAYS):
            graph.replay()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        graph_ms = plain_loop.replays_ms(graph, engine.device)
        events = recorded_events(graph, engine.device.type == "cuda")
    if not events:
        raise click.ClickException(f"the profiler saw no kernel in the graph of {count} requests")
    kernels = kernels_of(events, PROFILED_REPLAYS, options["layers"])
    num_bytes = weight_bytes(engine.config.spec, 1, count)
    floor = floor_ms(num_bytes, options["bandwidth"])
    return {
        "requests": count,
        "layers": options["layers"],
        "experts": options["experts"],
        "device": options["device"],
        "graph_ms": graph_ms,
        "weight_bytes": num_bytes,
        "floor_ms": floor,
        "over_floor": graph_ms / floor,
        "kernels_a_layer": sum(one.count_a_layer for one in kernels),
        "kernels": [asdict(one) for one in kernels],
    }


def show(result: dict[str, Any], most: int) -> None:
    rows: list[list[object]] = [["kernel", "a layer", "us each", "us a layer"]]
    for one in result["kernels"][:most]:
        numbers = [f"{one[name]:.2f}" for name in ("count_a_layer", "us_each", "us_a_layer")]
        rows.append([one["name"], *numbers])
    title = (
        f"{result['requests']} requests: graph {result['graph_ms']:.3f} ms, {result['kernels_a_layer']:.1f} kernels a "
    )
    title += f"layer; weights once {result['floor_ms']:.3f} ms, step over it {result['over_floor']:.2f}"
    harness.show(title, rows)


@click.command()
@click.option("--requests", type=Counts(), default="1,64", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--experts", default="cutedsl", show_default=True, help="On CPUs torch.")
@click.option("--new-tokens", type=click.IntRange(min=4), default=24, show_default=True)
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), default=4.3, show_default=True, help="TB/s.")
@click.option("--most", type=click.IntRange(min=1), default=28, show_default=True, help="Kernels to print.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--tiny", is_flag=True, help="A small model.")
@click.option("--results", type=click.Path(dir_okay=False), help="JSON lines, all kernels, are appended here.")
def main(**options: Any) -> None:
    """Print a table for each number of requests."""
    if options["device"] == "cpu":
        options["experts"] = "torch"
    with tempfile.TemporaryDirectory() as folder:
        harness.save_config(folder, num_hidden_layers=options["layers"], **(TINY if options["tiny"] else {}))
        engine = loaded_engine(folder, options)
        for count in options["requests"]:
            result = measure(engine, count, options)
            show(result, options["most"])
            if options["results"]:
                with open(options["results"], "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
