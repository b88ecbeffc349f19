"""One layer in CUDA graphs: paths side by side, FlashInfer bare, Transformers and the floor; for check_layers.py."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness  # noqa: F401  makes the folder of the tests importable
import torch
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.paths.table import PathName
from handle import grouped_gemms_of
from layer_auto import Auto, auto
from layer_setup import PATHS, Built, Inputs, Layer

PAIR = "flashinfer+cutedsl"
BYTES_A_SECOND = 4.3e12
# Calls in one graph, each with rows of its own: a step's layers do not find their weights in the L2 cache either.
CALLS, REPLAYS = 8, 7
MEGA_CAPACITIES = (8, 64, 256, 2048)


def floor_us(layer: Layer, batches: list[Inputs]) -> float:
    """Time to read the weights of the experts that are hit once; the slowest rank's."""
    size, first = layer.size, layer.world.rank * layer.num_local
    hit = []
    for batch in batches:
        ids = torch.cat([torch.tensor(part) for part in layer.world.gather(batch.ids.flatten().tolist())]).unique()
        hit.append(int(((ids >= first) & (ids < first + layer.num_local)).sum()))
    num_bytes = statistics.mean(hit) * 3 * size.hidden * size.intermediate * 2
    return 1e6 * max(layer.world.gather(num_bytes)) / BYTES_A_SECOND


def graph_us(layer: Layer, calls: list[Callable[[], Any]]) -> float:
    """Microseconds of a call inside a graph of all calls, the slowest rank's; collective."""
    world = layer.world
    if not world.on_gpu:
        return eager_us(layer, calls)
    for _ in range(2):
        for call in calls:
            call()
    world.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        world.meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return max(world.gather(statistics.median(times)))


def eager_us(layer: Layer, calls: list[Callable[[], Any]]) -> float:
    """The same without a graph, by the host's clock."""
    world = layer.world
    for call in calls[:2]:
        call()
    times = []
    for call in calls:
        world.meet()
        started = time.perf_counter()
        call()
        world.synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return max(world.gather(statistics.median(times)))


@torch.inference_mode()
def path_us(layer: Layer, built: Built, tokens: int) -> float:
    geometry = StepGeometry.captured(layer.world.layout, tokens, capacity=built.path.held.capacity)
    batches = [layer.inputs(tokens, seed=40 + call) for call in range(CALLS)]
    return graph_us(layer, [lambda batch=batch: built.run(batch, geometry) for batch in batches])


def mega_bare_us(layer: Layer, tokens: int) -> float:
    """FlashInfer's layer as its documentation calls it, of the smallest capacity that holds the rows."""
    from flashinfer.moe_ep import BootstrapConfig, FleetParams, MegaConfig, MoEEpLayer, MoEEpTensors, MoEWeightPack
    from flashinfer.moe_ep import Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig as Sm90Bf16

    world, size = layer.world, layer.size
    capacity = next(capacity for capacity in MEGA_CAPACITIES if capacity >= tokens)
    module = layer.make_experts()
    bare = MoEEpLayer(
        BootstrapConfig(
            world_size=world.size, rank=world.rank, device=world.device.index, process_group=world.ep_group
        ),
        FleetParams(num_experts=size.experts, max_tokens_per_rank=capacity, token_hidden_size=size.hidden),
        MoEWeightPack(module.gate_up_proj.detach(), module.down_proj.detach()),
        backend=MegaConfig(megakernel=Sm90Bf16(intermediate_size=size.intermediate, top_k=size.top_k)),
    )
    try:
        with torch.inference_mode():
            batches = [layer.inputs(tokens, seed=40 + call) for call in range(CALLS)]
            tensors = [
                MoEEpTensors(hidden_states=batch.x, topk_ids=batch.ids, topk_weights=batch.weights) for batch in batches
            ]
            return graph_us(layer, [lambda given=given: bare.forward(given) for given in tensors])
    finally:
        world.meet()
        bare.destroy()


def transformers_us(layer: Layer, tokens: int) -> float:
    """Transformers' own expert parallelism for ranks with different batches; eager, it reads sizes back to the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    mesh = init_device_mesh(layer.world.device.type, (layer.world.size, 1), mesh_dim_names=("ep", "tp"))
    implementation = AllToAllEP(layer.module, mesh["ep"], mesh["tp"])
    with torch.no_grad():  # its collectives are autograd functions, which inference mode lacks
        batches = [layer.inputs(tokens, seed=40 + call) for call in range(CALLS)]
        given = [(batch.x, batch.ids, batch.weights.to(torch.bfloat16)) for batch in batches]
        return eager_us(layer, [lambda arguments=arguments: implementation(*arguments) for arguments in given])


@torch.inference_mode()
def stage_us(layer: Layer, built: Built, tokens: int) -> dict[str, float]:
    """Where the time of the CuTe DSL pair goes: each stage in a graph of its own, on what the stages before it left."""
    from expert_pool.dispatch.experts.pairs.routing_kernels import sort_pairs, weighted_sum

    backend, dispatcher, num_local = built.path.experts, built.path.dispatcher, built.layer.num_local
    geometry = StepGeometry.captured(layer.world.layout, tokens, capacity=built.path.held.capacity)
    batch = layer.inputs(tokens, seed=40)

    def exchange() -> None:
        arrived = dispatcher.dispatch(batch.x, batch.ids, batch.weights, geometry, num_local)
        y = arrived.combine_input_RH
        dispatcher.combine(arrived.x_RH if y is None else y, arrived)

    stages = {"dispatch+combine": graph_us(layer, [exchange] * CALLS)}
    arrived = dispatcher.dispatch(batch.x, batch.ids, batch.weights, geometry, num_local)
    x, ids, weights = arrived.x_RH.clone(), arrived.expert_ids_RK.clone(), arrived.expert_weights_RK.clone()
    first = arrived.first_expert
    dispatcher.combine(torch.zeros_like(x), arrived)
    views, gate_up, down = grouped_gemms_of(backend, built.layer, x)
    y = torch.empty_like(x)

    def sort() -> None:
        sort_pairs(ids, first, num_local, views.offsets, views.source_row_P, views.position_RK)

    def add() -> None:
        weighted_sum(views.output_PH, ids, weights, views.position_RK, first, num_local, y)

    stages["sort"] = graph_us(layer, [sort] * CALLS)
    stages["gate_up"] = graph_us(layer, [gate_up] * CALLS)
    stages["down"] = graph_us(layer, [down] * CALLS)
    stages["sum"] = graph_us(layer, [add] * CALLS)
    return stages


@dataclass
class Bench:
    """What was measured of one layer on one number of ranks, microseconds by tokens a rank.

    Attributes:
        floor: time to read the weights of the experts that are hit.
        times: by path; `None` where it was not run.
        candidates: the paths that `auto` chooses from.
        chosen: by `auto`, for each number of tokens.
        stages: of the pair, header first.
    """

    floor: list[float]
    times: dict[str, list[float | None]] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    stages: list[list[str]] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Of the table: each path as microseconds (over the fastest candidate, over the floor), then the ratios."""
        best = [self._best(index, self.candidates or list(self.times)) for index in range(len(self.floor))]
        rows = [["floor", *(f"{value:.0f}" for value in self.floor)]]
        for name, found in self.times.items():
            cells = (
                "-" if value is None else f"{value:.0f} ({_over(value, fastest)}, {_over(value, floor)})"
                for value, fastest, floor in zip(found, best, self.floor, strict=True)
            )
            rows.append([name, *cells])
        if self.chosen:
            taken = [self.times.get(name, [None] * len(best))[index] for index, name in enumerate(self.chosen)]
            rows.append(["auto takes", *self.chosen])
            rows.append(["auto over fastest candidate", *map(_over, taken, best)])
            if "transformers" in self.times:
                rows.append(["transformers over auto", *map(_over, self.times["transformers"], taken)])
        mega = [name for name in self.times if name.startswith("mega@")]
        if mega and PAIR in self.times:
            fastest = [self._best(index, mega) for index in range(len(best))]
            rows.append(["pair over fastest mega", *map(_over, self.times[PAIR], fastest)])
        return rows

    def _best(self, index: int, names: list[str]) -> float | None:
        return min((self.times[name][index] for name in names if self.times[name][index]), default=None)


def _over(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def measure(
    layer: Layer,
    names: list[str],
    tokens: tuple[int, ...],
    bare_tokens: tuple[int, ...],
    mega_capacities: tuple[int, ...] | None,
    attempt: Callable[..., Any],
) -> Bench:
    """All that is asked for of one layer, side by side; collective over all ranks.

    Args:
        layer: of a world.
        names: `auto` (all its candidates), paths of their own, `bare` and `transformers`.
        tokens: a rank, ascending.
        bare_tokens: those of them for which FlashInfer's layer is built without the pool.
        mega_capacities: of candidates; unset, those of the pool.
        attempt: runs a function, and says its failure without raising it.
    """
    batches = [[layer.inputs(count, seed=40 + call) for call in range(CALLS)] for count in tokens]
    bench = Bench([floor_us(layer, given) for given in batches])
    for name in names:
        if name in bench.times:
            continue  # a candidate of `auto`
        if name == "auto":
            found = attempt("auto", auto, layer, tokens, mega_capacities)
            if found:
                bench_candidates(layer, found, tokens, bench, attempt)
                attempt("close candidates", found.close)
        elif name in ("bare", "transformers"):
            run = mega_bare_us if name == "bare" else transformers_us
            times = [
                attempt(f"bench {name} {count}", run, layer, count) if name != "bare" or count in bare_tokens else None
                for count in tokens
            ]
            keep(layer, bench, name, times)
        else:
            keep(layer, bench, name, own_path(layer, name, tokens, bench, attempt))
    return bench


def keep(layer: Layer, bench: Bench, name: str, times: list[float | None]) -> None:
    bench.times[name] = times
    layer.world.say(f"{name}: {' '.join('-' if value is None else f'{value:.0f}' for value in times)} us")


def bench_candidates(
    layer: Layer, found: Auto, tokens: tuple[int, ...], bench: Bench, attempt: Callable[..., Any]
) -> None:
    """Time every candidate again, apart from the times that were chosen by."""
    for line in (*found.dropped, found.table.text):
        layer.world.say(f"auto: {line}")
    for name, took in found.measured.microseconds.items():
        layer.world.say(f"auto measured {name}: {' '.join(f'{value:.0f}' for value in took)} us for {found.buckets}")
    for path_name, path in found.paths.items():
        name, built = str(path_name), Built(path, layer.local, lambda: None)
        times = [
            attempt(f"bench {name} {count}", path_us, layer, built, count) if count <= path.held.capacity else None
            for count in tokens
        ]
        bench.candidates.append(name)
        keep(layer, bench, name, times)
        if name == PAIR and layer.world.on_gpu:
            stages_of_pair(layer, built, tokens, bench, attempt)
    shape = layer.local.shape.text
    bench.chosen = [str(PathName.parse(found.table.path_for(shape, count))) for count in tokens]


def own_path(
    layer: Layer, name: str, tokens: tuple[int, ...], bench: Bench, attempt: Callable[..., Any]
) -> list[float | None]:
    """Times of a path that is built for itself; a mega kernel of the smallest capacity that holds the rows."""
    times: list[float | None] = []
    if name.startswith("mega"):
        for count in tokens:
            capacity = next((capacity for capacity in MEGA_CAPACITIES if capacity >= count), count)
            built = attempt(f"build {name} for {capacity}", PATHS[name], layer, capacity)
            times.append(attempt(f"bench {name} {count}", path_us, layer, built, count) if built else None)
            if built:
                attempt(f"close {name}", built.close)
        return times
    built = attempt(f"build {name}", PATHS[name], layer, max(tokens))
    if not built:
        return [None] * len(tokens)
    times = [attempt(f"bench {name} {count}", path_us, layer, built, count) for count in tokens]
    bench.times[name] = times
    if name == PAIR and layer.world.on_gpu:
        stages_of_pair(layer, built, tokens, bench, attempt)
    attempt(f"close {name}", built.close)
    return times


def stages_of_pair(
    layer: Layer, built: Built, tokens: tuple[int, ...], bench: Bench, attempt: Callable[..., Any]
) -> None:
    """Each stage of the pair alone, and the exchange's share of the layer's time."""
    for index, count in enumerate(tokens):
        stages, whole = attempt(f"stages {count}", stage_us, layer, built, count), bench.times[PAIR][index]
        if stages:
            bench.stages = bench.stages or [["tokens", *stages, "layer", "exchange over layer"]]
            took = "-" if whole is None else f"{whole:.1f}"
            cells = (*(f"{value:.1f}" for value in stages.values()), took, _over(stages["dispatch+combine"], whole))
            bench.stages.append([str(count), *cells])
