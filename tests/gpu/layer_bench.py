"""One layer in CUDA graphs: paths side by side, FlashInfer bare, Transformers and the floor; for check_layers.py."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from expert_pool.dispatch.geometry import StepGeometry
from layer_setup import PATHS, Built, Inputs, Layer

TOKENS = (1, 8, 64, 256, 2048)
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
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return max(world.gather(statistics.median(times)))


@torch.inference_mode()
def path_us(layer: Layer, built: Built, tokens: int) -> float:
    geometry = StepGeometry.captured(layer.world.layout, tokens, capacity=built.path.capacity)
    batches = [layer.inputs(tokens, seed=40 + call) for call in range(CALLS)]
    return graph_us(layer, [lambda batch=batch: built.run(batch, geometry) for batch in batches])


def mega_bare_us(layer: Layer, tokens: int) -> float:
    """FlashInfer's layer as its documentation calls it, of the smallest capacity that holds the rows."""
    from flashinfer.moe_ep import BootstrapConfig, FleetParams, MegaConfig, MoEEpLayer, MoEEpTensors, MoEWeightPack
    from flashinfer.moe_ep import Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig as Sm90Bf16

    world, size = layer.world, layer.size
    capacity = next(capacity for capacity in MEGA_CAPACITIES if capacity >= tokens)
    module = layer.make_experts().module
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

    mesh = init_device_mesh("cuda", (layer.world.size, 1), mesh_dim_names=("ep", "tp"))
    implementation = AllToAllEP(layer.local.module, mesh["ep"], mesh["tp"])
    with torch.no_grad():  # its collectives are autograd functions, which inference mode lacks
        batches = [layer.inputs(tokens, seed=40 + call) for call in range(CALLS)]
        given = [(batch.x, batch.ids, batch.weights.to(torch.bfloat16)) for batch in batches]
        return eager_us(layer, [lambda arguments=arguments: implementation(*arguments) for arguments in given])


@torch.inference_mode()
def stage_us(layer: Layer, built: Built, tokens: int) -> dict[str, float]:
    """Where the time of the CuTe DSL pair goes: each stage in a graph of its own, on what the stages before it left."""
    from expert_pool.dispatch.routing_kernels import sort_pairs, weighted_sum

    backend, dispatcher, experts = built.path.experts, built.path.dispatcher, built.experts
    geometry = StepGeometry.captured(layer.world.layout, tokens, capacity=built.path.capacity)
    batch = layer.inputs(tokens, seed=40)

    def exchange() -> None:
        arrived = dispatcher.dispatch(batch.x, batch.ids, batch.weights, geometry, experts.num_local)
        y = arrived.combine_input_RH
        dispatcher.combine(arrived.x_RH if y is None else y, arrived)

    stages = {"dispatch+combine": graph_us(layer, [exchange] * CALLS)}
    arrived = dispatcher.dispatch(batch.x, batch.ids, batch.weights, geometry, experts.num_local)
    x, ids, weights = arrived.x_RH.clone(), arrived.expert_ids_RK.clone(), arrived.expert_weights_RK.clone()
    first = arrived.first_expert
    dispatcher.combine(torch.zeros_like(x), arrived)
    shape = backend._layers[id(experts.module)].shape
    views = backend._buffers.views(shape, x.shape[0])
    known = backend._layers[id(experts.module)]
    tiles = backend._tables[shape, layer.size.experts].tiles_for(x.shape[0])
    y = torch.empty_like(x)

    def sort() -> None:
        sort_pairs(ids, first, shape.num_local, views.offsets, views.source_row_P, views.position_RK)

    def add() -> None:
        weighted_sum(views.output_PH, ids, weights, views.position_RK, first, shape.num_local, y)

    stages["sort"] = graph_us(layer, [sort] * CALLS)
    stages["gate_up"] = graph_us(layer, [lambda: backend._gate_up(known, x, views, tiles[0])] * CALLS)
    stages["down"] = graph_us(layer, [lambda: backend._down(known, views, tiles[1])] * CALLS)
    stages["sum"] = graph_us(layer, [add] * CALLS)
    return stages


def measure(
    layer: Layer, names: list[str], tokens: tuple[int, ...], attempt: Callable[..., Any]
) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the table: a path each, a column for each number of tokens; and rows of the pair's stages.

    Args:
        layer: of a world.
        names: of paths, and `bare` and `transformers`.
        tokens: a rank.
        attempt: runs a function, and says its failure without raising it.
    """
    times: dict[str, list[float | None]] = {}
    stage_rows: list[list[str]] = []
    for name in names:
        if name == "bare":
            times[name] = [attempt(f"bench {name} {count}", mega_bare_us, layer, count) for count in tokens]
        elif name == "transformers":
            times[name] = [attempt(f"bench {name} {count}", transformers_us, layer, count) for count in tokens]
        elif name.startswith("mega"):
            # A mega kernel's speed follows the capacity that it is built for.
            for count in tokens:
                capacity = next(capacity for capacity in MEGA_CAPACITIES if capacity >= count)
                built = attempt(f"build {name}@{capacity}", PATHS[name], layer, capacity)
                result = attempt(f"bench {name} {count}", path_us, layer, built, count) if built else None
                times.setdefault(name, []).append(result)
                if built:
                    attempt(f"close {name}", built.close)
        else:
            built = attempt(f"build {name}", PATHS[name], layer, max(tokens))
            if not built:
                continue
            times[name] = [attempt(f"bench {name} {count}", path_us, layer, built, count) for count in tokens]
            if name.endswith("cutedsl"):
                for count in tokens:
                    stages = attempt(f"stages {name} {count}", stage_us, layer, built, count)
                    if stages:
                        heads = ["path", "tokens", *stages]
                        stage_rows = stage_rows or [heads]
                        stage_rows.append([name, str(count), *(f"{value:.1f}" for value in stages.values())])
            attempt(f"close {name}", built.close)
        layer.world.say(f"{name}: {' '.join('-' if value is None else f'{value:.0f}' for value in times[name])} us")
    floors = [floor_us(layer, [layer.inputs(count, seed=40 + call) for call in range(CALLS)]) for count in tokens]
    best = [
        min((found[index] for found in times.values() if found[index]), default=0.0) for index in range(len(tokens))
    ]
    rows = [["floor", *(f"{value:.0f}" for value in floors)]]
    for name, found in times.items():
        cells = (
            "-" if value is None else f"{value:.0f} ({value / fastest:.2f}, {value / floor:.2f})"
            for value, fastest, floor in zip(found, best, floors, strict=True)
        )
        rows.append([name, *cells])
    return rows, stage_rows
