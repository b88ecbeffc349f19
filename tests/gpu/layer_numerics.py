"""Every path against a float32 reference with fresh inputs, eager and replayed; for check_layers.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from expert_pool.dispatch.budgets.geometry import StepGeometry
from layer_setup import Built, Inputs, Layer, World

# Tokens of rank 0 and rank 1: each of 0, 1, 3, 64, 513 and 4096 on either side.
COUNTS = ((0, 3), (1, 0), (3, 64), (64, 1), (513, 64), (1, 513), (4096, 513), (0, 4096))
TOKENS = (0, 1, 3, 64, 513, 4096)
# Of one rank alone: experts have other tiles, and other launches, for other numbers of rows.
ALONE = (1, 2, 3, 8, 13, 16, 33, 64, 200, 256, 513, 1024, 2048, 4096)
# Against float32 math on the same rounded operands.
ROUNDED_LIMIT = 1e-2
HEADER = ("tokens", "eager", "replayed", "rounded alike", "and h as summed", "replay against eager", "")


def relative_error(world: World, y: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all ranks' rows together."""
    sums = torch.stack([(y.float() - expected).double().square().sum(), expected.double().square().sum()])
    if world.size > 1:
        dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def counts_of(size: int, capacity: int) -> list[tuple[int, ...]]:
    """Tokens of each rank, uneven and with idle ranks: every number of `TOKENS` up to the capacity on every rank."""
    if size == 1:
        counts: Any = [(count,) for count in ALONE]
    elif size == 2:
        counts = COUNTS
    else:
        idle, shifts = (0,) * (size - 2), range(len(TOKENS))
        turned = [tuple(TOKENS[(shift + rank) % len(TOKENS)] for rank in range(size)) for shift in shifts]
        counts = [*turned, (0, *idle, 3), (64, *idle, 0)]
    return list(dict.fromkeys(tuple(min(count, capacity) for count in of_ranks) for of_ranks in counts))


@torch.inference_mode()
def check_path(layer: Layer, built: Built) -> tuple[list[list[str]], bool]:
    """Rows of the table, of the columns `HEADER`, and whether all is within bounds."""
    rows, good = [], True
    # The norm of a few narrow rows says less.
    slack = 2 if layer.size.hidden < 512 else 1
    for seed, counts in enumerate(counts_of(layer.world.size, built.path.held.capacity)):
        layer.world.watch.begin(f"{built.path.held.dispatcher} with {counts} tokens")
        eager, replayed, rounded, same = check_counts(layer, built, counts, seed)
        within = max(eager, replayed) <= slack * built.limit
        verdict = "ok" if within else "TOO LARGE"
        # With its own sums' rounding of the intermediate the operands are the same; without, they are to a few codes.
        if rounded and rounded[0] > slack * ROUNDED_LIMIT:
            within = within and rounded[-1] <= slack * ROUNDED_LIMIT
            verdict = "ok, h as summed" if within else "TOO LARGE"
        good = good and within
        alike = [f"{error:.2e}" for error in rounded] + ["-"] * (2 - len(rounded))
        rows.append(["/".join(map(str, counts)), f"{eager:.2e}", f"{replayed:.2e}", *alike, same, verdict])
    return rows, good


def check_counts(
    layer: Layer, built: Built, counts: tuple[int, ...], seed: int
) -> tuple[float, float, list[float], str]:
    """Errors eager and replayed, against references rounded alike, and whether replay and eager are equal to the bit.

    The eager step that a replay is held against has the same padding.
    """
    world = layer.world
    own = counts[world.rank]
    inputs = layer.inputs(own, seed=10 + seed)
    expected = layer.reference(inputs)

    # An idle rank runs one dummy row, routed to no expert.
    at_least_one = tuple(max(1, count) for count in counts)
    geometry = StepGeometry.eager(world.layout, at_least_one, capacity=built.path.held.capacity)
    y = built.run(inputs.padded(max(1, own), built.filler), geometry)[:own]
    eager_error = relative_error(world, y, expected)
    rounded = [relative_error(world, y, layer.reference(inputs, chain)) for chain in built.rounded]

    bucket = max(at_least_one)
    geometry = StepGeometry.captured(world.layout, bucket, capacity=built.path.held.capacity)
    static = layer.inputs(bucket, seed=500 + seed)
    replay = capture(world, built, static, geometry)
    padded = inputs.padded(bucket, built.filler)
    static.copy_from(padded)
    replayed = replay().clone()
    world.meet()
    repeats = torch.equal(replay()[:own], replayed[:own])
    world.meet()
    again = built.run(padded, geometry)
    equal = torch.equal(again[:own], replayed[:own])
    zero = not bool(replayed[own:].any())
    findings = world.gather((equal, repeats, zero))
    said = [name for name, index in (("equal", 0), ("repeats", 1)) if all(found[index] for found in findings)]
    said += [] if all(found[2] for found in findings) else ["padding not zero"]
    replay_error = relative_error(world, replayed[:own], expected)
    return eager_error, replay_error, rounded, " ".join(said) or "differs"


def capture(world: World, built: Built, static: Inputs, geometry: StepGeometry) -> Callable[[], torch.Tensor]:
    """A step on static inputs, recorded: what is returned replays it and returns its output."""
    if not world.on_gpu:
        return lambda: built.run(static, geometry)
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

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay
