"""Every path against a float32 reference with fresh inputs, eager and replayed; for check_layers.py."""

import torch
import torch.distributed as dist
from expert_pool.dispatch.geometry import StepGeometry
from layer_setup import Built, Inputs, Layer, World

# Tokens of rank 0 and rank 1: each of 0, 1, 3, 64, 513 and 4096 on either side.
COUNTS = ((0, 3), (1, 0), (3, 64), (64, 1), (513, 64), (1, 513), (4096, 513), (0, 4096))
CAPACITY = 4096


def relative_error(world: World, y: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all ranks' rows together."""
    sums = torch.stack([(y.float() - expected).double().square().sum(), expected.double().square().sum()])
    if world.size > 1:
        dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def counts_of(world: World) -> list[tuple[int, ...]]:
    return [(0 if counts[0] == 0 else counts[0],) if world.size == 1 else counts for counts in COUNTS]


@torch.inference_mode()
def check_path(layer: Layer, built: Built) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether all is within bounds."""
    rows, good = [], True
    seen = set()
    for seed, counts in enumerate(counts_of(layer.world)):
        if max(counts) == 0 or counts in seen:
            continue
        seen.add(counts)
        eager, replayed, same = check_counts(layer, built, counts, seed)
        # The norm of a few narrow rows says less.
        within = max(eager, replayed) <= built.limit * (2 if layer.size.hidden < 512 else 1)
        good = good and within
        rows.append(
            ["/".join(map(str, counts)), f"{eager:.2e}", f"{replayed:.2e}", same, "ok" if within else "TOO LARGE"]
        )
    return rows, good


def check_counts(layer: Layer, built: Built, counts: tuple[int, ...], seed: int) -> tuple[float, float, str]:
    """Errors eager and replayed, and whether a replay equals the eager step with the same padding to the bit."""
    world = layer.world
    own = counts[world.rank]
    inputs = layer.inputs(own, seed=10 + seed)
    expected = layer.reference(inputs)

    # An idle rank runs one dummy row, routed to no expert.
    at_least_one = tuple(max(1, count) for count in counts)
    geometry = StepGeometry.eager(world.layout, at_least_one, capacity=built.path.capacity)
    y = built.run(inputs.padded(max(1, own), built.filler), geometry)[:own]
    eager_error = relative_error(world, y, expected)

    bucket = max(at_least_one)
    geometry = StepGeometry.captured(world.layout, bucket, capacity=built.path.capacity)
    static = layer.inputs(bucket, seed=500 + seed)
    graph, output = capture(world, built, static, geometry)
    padded = inputs.padded(bucket, built.filler)
    static.copy_from(padded)
    graph.replay()
    replayed = output.clone()
    world.meet()
    graph.replay()
    repeats = torch.equal(output[:own], replayed[:own])
    world.meet()
    again = built.run(padded, geometry)
    equal = torch.equal(again[:own], replayed[:own])
    zero = not bool(replayed[own:].any())
    findings = world.gather((equal, repeats, zero))
    said = [name for name, index in (("equal", 0), ("repeats", 1)) if all(found[index] for found in findings)]
    said += [] if all(found[2] for found in findings) else ["padding not zero"]
    return eager_error, relative_error(world, replayed[:own], expected), " ".join(said) or "differs"


def capture(
    world: World, built: Built, static: Inputs, geometry: StepGeometry
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            built.run(static, geometry)
    world.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = built.run(static, geometry)
    world.meet()
    return graph, output
